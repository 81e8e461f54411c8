"""An engine as plain processes: start, requests, failures, and no process left afterwards."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

import cluster.convert
import secateur
import workers.models.eagle3_format
import workers.models.readers
from cluster.convert import engine_config
from cluster.engine.engine_client import EngineClient
from cluster.engine.local_engine import LocalEngine
from cluster.engine.rank_exits import EngineDead
from cluster.local_service import local_service
from cluster.system.processes import wait_gone
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from workers.comm.ipc import Submit, TokenChunk
from workers.config import EngineConfig
from workers.settings import SamplingSettings

BUNDLED = Path(secateur.__file__).parent / "bundled"
HANG_S = 4.0
needs_models = pytest.mark.skipif(not (BUNDLED / "target").is_dir(), reason="the bundled models are not there yet")


def assert_gone(pids: list[int]) -> None:
    assert wait_gone(pids, timeout_s=60.0) == []


def listening(pid: int) -> list[str]:
    """Return the addresses on which a process listens."""
    sockets = psutil.Process(pid).net_connections(kind="inet")
    return [each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN]


async def collect(client: EngineClient, submit: Submit) -> list[TokenChunk]:
    return [chunk async for chunk in client.submit(submit)]


@pytest.fixture
def config() -> EngineConfig:
    return engine_config(EngineArgs.load({"max_num_seqs": 4, "max_model_len": 256}))


# Real processes


@needs_models
def test_an_engine_answers_listens_on_loopback_alone_and_leaves_no_process(config: EngineConfig) -> None:
    """A store that still listened would be another address of the verifier."""

    async def main() -> list[int]:
        engine = LocalEngine(config)
        async with engine as client:
            assert [entry["rank"] for entry in client.ready.topology] == [0, 1]
            assert [entry["pid"] for entry in client.ready.topology] == engine.pids
            chunks = await collect(client, Submit(id=1, prompt=[300, 301, 302], max_tokens=12, ignore_eos=True))
            assert sum(len(chunk.tokens) for chunk in chunks) == 12
            assert client.health().ok
            verifier, drafter = map(listening, engine.pids)
            assert set(verifier + drafter) == {"127.0.0.1"}
            assert len(verifier) == len(drafter)
        return engine.pids

    assert_gone(asyncio.run(main()))


@needs_models
def test_an_engine_that_does_not_start_in_time_leaves_nothing_behind(config: EngineConfig) -> None:
    engine = LocalEngine(replace(config, startup_timeout_s=0.2))
    with pytest.raises(TimeoutError, match=r"not ready after 0.2 s; raise startup_timeout"):
        asyncio.run(engine.start())
    assert_gone(engine.pids)


@needs_models
@pytest.mark.parametrize(
    ("killed", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGSTOP)], ids=lambda each: str(each)
)
def test_a_dead_or_hung_rank_stops_all_and_is_named(config: EngineConfig, killed: int, number: signal.Signals) -> None:
    async def main() -> list[int]:
        assert config.draft is not None
        draft = replace(config.draft, fallback=False)
        engine = LocalEngine(replace(config, draft=draft, hang_timeout_s=HANG_S))
        async with engine as client:
            submit = Submit(id=1, prompt=[300], max_tokens=250, ignore_eos=True)
            waiting = asyncio.create_task(collect(client, submit))
            await asyncio.sleep(0.05 if number == signal.SIGKILL else 1.0)  # a beat says that it serves
            os.kill(engine.pids[killed], number)
            with suppress(EngineDead):  # or it was done before
                await asyncio.wait_for(waiting, 60 + HANG_S)
            async with asyncio.timeout(60 + HANG_S):
                while client.dead is None:
                    await asyncio.sleep(0.05)
            role, pid = "drafter 0" if killed else "verifier 0", f"(pid {engine.pids[killed]})"
            if number == signal.SIGSTOP:
                assert client.dead.startswith(f"{role} gave no sign of life for {HANG_S:g} s and was killed {pid}")
            else:
                assert client.dead.startswith(f"{role} {pid} was ended by SIGKILL")
            assert_gone(engine.pids)
        return engine.pids

    assert_gone(asyncio.run(main()))


@needs_models
@pytest.mark.parametrize("has_standby", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_lost_engine_is_replaced_and_changes_no_token(config: EngineConfig, has_standby: bool) -> None:
    async def main() -> list[int]:
        engine = LocalEngine(replace(config, standby=has_standby, hang_timeout_s=HANG_S), restarts=True)
        async with engine as client:
            standby, seen = engine.standby_pid, list(engine.pids)
            assert (standby is not None) == has_standby
            settings = [SamplingSettings(temperature=0.0), SamplingSettings(temperature=0.8, seed=3)]

            async def answer(sampling: SamplingSettings) -> list[int]:
                submit = Submit(id=client.new_id(), prompt=[300], max_tokens=150, ignore_eos=True, sampling=sampling)
                return [token for chunk in await collect(client, submit) for token in chunk.tokens]

            async def answers() -> list[list[int]]:
                return list(await asyncio.gather(*map(answer, settings)))

            wanted = await answers()
            for number in (signal.SIGKILL, signal.SIGSTOP) if has_standby else (signal.SIGKILL,):
                waiting = asyncio.create_task(answers())
                while client.stats.num_running < 2:
                    await asyncio.sleep(0.01)
                os.kill(engine.pids[0], number)
                assert await asyncio.wait_for(waiting, 120) == wanted
                assert not {*seen} & {*engine.pids} and client.health() == (True, "")
                seen += engine.pids
            assert engine.standby_pid == standby
            if standby is not None:
                os.kill(standby, signal.SIGKILL)  # its ranks end with it
                async with asyncio.timeout(60):
                    while client.health() == (True, "") or engine.standby_pid == standby:
                        await asyncio.sleep(0.02)
                assert await answers() == wanted
                assert engine.standby_pid is not None
                seen += [standby, engine.standby_pid, *engine.pids]
        return seen

    assert_gone(asyncio.run(main()))


@needs_models
def test_a_step_that_takes_longer_than_the_hang_timeout_is_not_cut() -> None:
    """All prompts are computed in one forward pass, during which no message is sent."""
    args = {"max_model_len": 2048, "max_num_batched_tokens": 1 << 16, "no_speculation": True, "device": "cpu"}
    config = replace(engine_config(EngineArgs.load(args)), hang_timeout_s=2.0, enable_prefix_caching=False)

    async def main() -> list[int]:
        engine = LocalEngine(config)
        async with engine as client:

            async def ask(number: int) -> None:
                prompt = [300 + (7 * number + place) % 50 for place in range(2000)]
                await collect(client, Submit(id=client.new_id(), prompt=prompt, max_tokens=1, ignore_eos=True))

            for num_prompts in (8, 16, 32):  # as many as take long enough on this machine
                before = replace(client.stats)
                await asyncio.gather(*map(ask, range(num_prompts)))
                assert client.health() == (True, "") and client.dead is None
                steps = client.stats.steps - before.steps
                if client.stats.forward_seconds - before.forward_seconds > steps * config.hang_timeout_s:
                    return engine.pids
        pytest.fail("no step took longer than the timeout")

    assert_gone(asyncio.run(main()))


@needs_models
@pytest.mark.parametrize(
    ("sizes", "killed", "number"),
    [
        pytest.param((1, 1), 1, signal.SIGKILL, marks=pytest.mark.full),
        ((1, 1), 1, signal.SIGSTOP),
        ((2, 2), 3, signal.SIGKILL),
    ],
    ids=["killed", "hung", "one of two ranks killed"],
)
def test_a_lost_drafter_is_replaced_and_changes_no_token(
    sizes: tuple[int, int], killed: int, number: signal.Signals
) -> None:
    speculation = {"model": "bundled:eagle3", "draft_tensor_parallel_size": sizes[1], "speculative_tree_prune": "off"}
    config = engine_config(
        EngineArgs.load({"max_model_len": 512, "tensor_parallel_size": sizes[0], "speculative_config": speculation})
    )
    config = replace(config, hang_timeout_s=HANG_S)

    async def main() -> list[int]:
        engine = LocalEngine(config)
        async with engine as client:
            pids = engine.pids
            ports = [len(listening(pid)) for pid in pids]

            async def answer() -> tuple[list[int], int]:
                submit = Submit(id=client.new_id(), prompt=[300], max_tokens=200, ignore_eos=True)
                chunks = await collect(client, submit)
                assert chunks[-1].stats is not None
                return [t for chunk in chunks for t in chunk.tokens], chunks[-1].stats.num_accepted_tokens

            before, accepted = await answer()
            waiting = asyncio.create_task(answer())
            await asyncio.sleep(0.1)
            os.kill(pids[killed], number)
            async with asyncio.timeout(90):
                while not client.health().reason:
                    await asyncio.sleep(0.02)
                ok, reason = client.health()
                assert ok and "without drafts" in reason
                assert (await waiting)[0] == before
                while not client.stats.has_drafter:
                    await asyncio.sleep(0.05)
            assert client.health() == (True, "")
            assert await answer() == (before, accepted)
            assert engine.pids[: sizes[0]] == pids[: sizes[0]] and set(engine.pids) != set(pids)
            assert all(len(listening(pid)) <= most for pid, most in zip(engine.pids, ports, strict=True)), (
                "a store or an offer is still open"
            )
        assert_gone([*pids, *engine.pids])
        return engine.pids

    assert_gone(asyncio.run(main()))


@needs_models
def test_a_failed_start_gives_the_reason_and_leaves_no_process(config: EngineConfig, tmp_path: Path) -> None:
    async def main() -> list[int]:
        nothing = LocalEngine(replace(config, model_path=str(tmp_path)))
        with pytest.raises(FileNotFoundError, match=r"config\.json"):
            await nothing.start()
        assert not nothing.pids
        shutil.copy(Path(config.model_path) / "config.json", tmp_path)
        engine = LocalEngine(nothing.config)
        with pytest.raises(EngineDead, match="no weights"):
            await engine.start()
        return engine.pids

    assert_gone(asyncio.run(main()))


@needs_models
def test_the_engine_does_not_outlive_a_killed_parent(config: EngineConfig, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys\n"
        "from cluster.engine.local_engine import LocalEngine\n"
        "from workers.config import EngineConfig\n"
        "async def main():\n"
        "    engine = LocalEngine(EngineConfig.from_json(sys.argv[1]))\n"
        "    async with engine:\n"
        "        print(*engine.pids, flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    root = str(Path(secateur.__file__).parents[1])
    parent = subprocess.Popen(
        [sys.executable, str(script), config.to_json()],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert_gone(pids)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the folders whose model or tokenizer is read from now on, once for each reading."""
    read: list[str] = []

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda path, *rest: (read.append(Path(path).name), function(path, *rest))[1]

    for module, name in (
        (cluster.convert, "read_spec"),
        (workers.models.readers, "read_spec"),
        (workers.models.eagle3_format, "read_config"),
        (cluster.convert, "Tokenizer"),
    ):
        monkeypatch.setattr(module, name, counting(getattr(module, name)))
    return read


@needs_models
def test_a_local_service_reads_its_files_once_answers_over_http_and_leaves_no_process(
    capfd: pytest.CaptureFixture[str], read: list[str]
) -> None:
    with local_service(EngineArgs.load({"port": 0, "max_model_len": 256}), shows_progress=True) as url:
        told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("secateur: ")]
        stages = [line.partition(" s, ")[2] for line in told if "still" not in line]
        assert stages[0] == "reading the model's configuration and tokenizer"
        assert stages[-2:] == ["warming up", "ready"]
        pids = [entry["pid"] for entry in httpx2.get(f"{url}/server_info").json()["topology"]]
        body = {"prompt": "def f(", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        with_drafts = httpx2.post(f"{url}/v1/completions", json=body, timeout=60).json()
        body["speculative"] = {"enabled": False}
        without = httpx2.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert with_drafts["usage"]["completion_tokens"] == 8
        assert with_drafts["choices"][0]["text"] == without["choices"][0]["text"]
        assert httpx2.get(f"{url}/health", headers={f"X-{number}": "a" for number in range(200)}).status_code == 431
    assert_gone(pids)
    assert sorted(read) == ["eagle3", "target", "target"], "the target for its model and its tokenizer"


def test_a_port_in_use_is_reported_before_anything_starts() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot listen"), local_service(EngineArgs.load({"port": port})):
            pass
