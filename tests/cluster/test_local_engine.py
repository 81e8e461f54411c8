"""An engine as plain processes: start, requests, failures, and no process left afterwards."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx2
import psutil
import pytest

import secateur
from cluster.convert import engine_config
from cluster.engine_client import DeadlyRequest, EngineClient
from cluster.local_engine import LocalEngine
from cluster.local_service import local_service
from cluster.rank_exits import EngineDead
from cluster.system.processes import wait_gone
from cluster.system.progress import Progress
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from tests.support.fake_engine import FakeEngine
from workers.comm.ipc import Submit, TokenChunk
from workers.config import EngineConfig
from workers.settings import SamplingSettings

BUNDLED = Path(secateur.__file__).parent / "bundled"
HANG_S = 4.0
needs_models = pytest.mark.skipif(not (BUNDLED / "target").is_dir(), reason="the bundled models are not there yet")


def assert_gone(pids: list[int]) -> None:
    assert wait_gone(pids, timeout_s=5.0) == []


def listening(pid: int) -> list[str]:
    """Return the addresses on which a process listens."""
    sockets = psutil.Process(pid).net_connections(kind="inet")
    return [each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN]


async def collect(client: EngineClient, submit: Submit) -> list[TokenChunk]:
    return [chunk async for chunk in client.submit(submit)]


@pytest.fixture
def config() -> EngineConfig:
    return engine_config(EngineArgs.load({"max_num_seqs": 4, "max_model_len": 256}))


# The client alone


def with_fake(folder: Path, body: Callable[[EngineClient, FakeEngine], Awaitable[None]], **client: float) -> None:
    async def main() -> None:
        front = EngineClient(**client)
        fake = FakeEngine(await front.listen(f"unix:{folder}/socket"), lambda submit: [[1, 2], [3], [4, 5, 6]])
        await front.wait_ready(5)
        try:
            await body(front, fake)
        finally:
            await front.close()
            fake.die()

    asyncio.run(main())


def test_each_step_is_one_chunk(tmp_path: Path) -> None:
    async def body(client: EngineClient, fake: FakeEngine) -> None:
        chunks = await collect(client, Submit(id=client.new_id(), prompt=[1], max_tokens=10))
        assert [chunk.tokens for chunk in chunks] == [[1, 2], [3], [4, 5, 6]]
        assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]
        assert client.num_pending == 0

    with_fake(tmp_path, body)


def test_start_up_objects_are_frozen_once_the_engine_is_ready(tmp_path: Path) -> None:
    async def body(client: EngineClient, fake: FakeEngine) -> None:
        assert gc.get_freeze_count() > 10_000

    gc.unfreeze()
    assert gc.get_freeze_count() == 0
    with_fake(tmp_path, body)


def test_an_iterator_left_early_aborts_its_request(tmp_path: Path) -> None:
    async def body(client: EngineClient, fake: FakeEngine) -> None:
        fake.step_s = 0.3
        chunks = client.submit(Submit(id=7, prompt=[1], max_tokens=10))
        await anext(chunks)
        await chunks.aclose()
        assert client.num_pending == 0
        async with asyncio.timeout(5):
            while fake.aborted != [7]:
                await asyncio.sleep(0.01)

    with_fake(tmp_path, body)


def test_a_finished_request_is_not_pending_even_if_unread(tmp_path: Path) -> None:
    async def body(client: EngineClient, fake: FakeEngine) -> None:
        chunks = client.submit(Submit(id=7, prompt=[1], max_tokens=10))
        seen = [await anext(chunks)]
        async with asyncio.timeout(5):
            while client.num_pending:
                await asyncio.sleep(0.01)
        seen += [chunk async for chunk in chunks]
        assert [chunk.tokens for chunk in seen] == [[1, 2], [3], [4, 5, 6]]
        assert not fake.aborted

    with_fake(tmp_path, body)


def test_requests_go_on_in_the_next_engine(tmp_path: Path) -> None:
    """Of two running requests one has gained tokens; a third one arrives while there is no engine."""
    script = {1: [[1, 2], [3], [4, 5]], 2: [[7], [8]], 3: [[9]]}

    def rest(submit: Submit) -> list[list[int]]:
        done = len(submit.resumption.output) if submit.resumption else 0
        tokens = [token for step in script[submit.id] for token in step]
        return [[token] for token in tokens[done:]]

    async def body(client: EngineClient, fake: FakeEngine) -> None:
        fake.script, fake.step_s = lambda submit: list(script[submit.id]), 0.3
        first = client.submit(Submit(id=1, prompt=[1], max_tokens=10))
        tokens = list((await anext(first)).tokens)
        second = asyncio.create_task(collect(client, Submit(id=2, prompt=[1], max_tokens=10)))
        await asyncio.sleep(0.05)
        fake.hold.set()
        client.interrupt("verifier 0 was killed")
        fake.die()
        third = asyncio.create_task(collect(client, Submit(id=3, prompt=[1], max_tokens=10)))
        await asyncio.sleep(0.05)
        assert client.health() == (True, "requests wait for a new engine: verifier 0 was killed")
        assert client.num_pending == 3
        other = FakeEngine(await client.listen(f"unix:{tmp_path}/other"), rest)
        await client.wait_ready(5)
        tokens += [token for chunk in [chunk async for chunk in first] for token in chunk.tokens]
        assert tokens == [1, 2, 3, 4, 5]
        assert [chunk.tokens for chunk in await second] == [[7], [8]]
        assert [chunk.tokens for chunk in await third] == [[9]]
        told = {submit.id: submit.resumption and submit.resumption.output for submit in other.submitted}
        assert told[1] in ([1, 2], [1, 2, 3]) and told[2] in (None, [7]) and told[3] is None
        assert client.health() == (True, "") and client.num_pending == 0
        other.die()

    with_fake(tmp_path, body)


def test_a_request_with_which_engine_after_engine_dies_fails_alone(tmp_path: Path) -> None:
    async def body(client: EngineClient, fake: FakeEngine) -> None:
        fake.hold.set()
        waiting = asyncio.create_task(collect(client, Submit(id=1, prompt=[1], max_tokens=10)))
        for number in range(3):
            await asyncio.sleep(0.05)
            client.interrupt("verifier 0 was killed")
            fake.die()
            await asyncio.sleep(0.05)
            assert waiting.done() == (number == 2)
            fake = FakeEngine(await client.listen(f"unix:{tmp_path}/{number}"), lambda submit: [[1]])
            fake.hold.set()
            await client.wait_ready(5)
        with pytest.raises(DeadlyRequest, match="3 engines have died with this request: verifier 0 was killed"):
            await waiting
        fake.hold.clear()
        assert len(await collect(client, Submit(id=9, prompt=[1], max_tokens=10))) == 1
        fake.die()

    with_fake(tmp_path, body)


def test_an_engine_that_dies_while_it_replaces_another_fails_its_start(tmp_path: Path) -> None:
    async def body(client: EngineClient, fake: FakeEngine) -> None:
        client.interrupt("verifier 0 was killed")
        fake.die()
        await client.listen(f"unix:{tmp_path}/other")
        asyncio.get_running_loop().call_later(0.05, client.interrupt, "verifier 1 ran out of memory")
        with pytest.raises(EngineDead, match="out of memory"):
            await client.wait_ready(5)
        client.fail("no engine starts")
        with pytest.raises(EngineDead, match="no engine starts"):
            await collect(client, Submit(id=1, prompt=[1], max_tokens=10))

    with_fake(tmp_path, body)


def test_a_dead_engine_fails_pending_and_later_requests(tmp_path: Path) -> None:
    async def body(client: EngineClient, fake: FakeEngine) -> None:
        fake.hold.set()
        waiting = asyncio.create_task(collect(client, Submit(id=1, prompt=[1], max_tokens=10)))
        while client.num_pending == 0:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(fake.die)
        with pytest.raises(EngineDead, match="closed its connection"):
            await waiting
        assert not client.health().ok
        with pytest.raises(EngineDead, match="closed its connection"):
            await collect(client, Submit(id=2, prompt=[1], max_tokens=10))

    with_fake(tmp_path, body, cause_wait_s=0.2)


def test_the_report_of_the_dead_rank_is_waited_for(tmp_path: Path) -> None:
    """The socket closes first; requests from before and after it get the watcher's reason."""

    async def body(client: EngineClient, fake: FakeEngine) -> None:
        fake.hold.set()
        before = asyncio.create_task(collect(client, Submit(id=1, prompt=[1], max_tokens=10)))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(fake.die)
        await asyncio.sleep(0.2)
        after = asyncio.create_task(collect(client, Submit(id=2, prompt=[1], max_tokens=10)))
        await asyncio.sleep(0.1)
        assert not before.done() and not after.done()
        client.fail("verifier 1 died")
        for waiting in (before, after):
            with pytest.raises(EngineDead, match="verifier 1 died"):
                await asyncio.wait_for(waiting, 5)
        assert client.dead == "verifier 1 died"

    with_fake(tmp_path, body, cause_wait_s=30.0)


@pytest.mark.parametrize("num_requests", [0, 1])
def test_a_silent_engine_is_unhealthy_and_an_idle_one_is_not(tmp_path: Path, num_requests: int) -> None:
    async def body(client: EngineClient, fake: FakeEngine) -> None:
        await asyncio.sleep(1.5)
        assert client.health().ok, "an idle engine says so"
        fake.hold.set()
        waiting = [
            asyncio.create_task(collect(client, Submit(id=1, prompt=[1], max_tokens=10))) for _ in range(num_requests)
        ]
        await asyncio.sleep(1.5)
        assert re.match(rf"the engine is silent for \d+ s with {num_requests} requests", client.health().reason)
        fake.hold.clear()
        await asyncio.gather(*waiting)
        await asyncio.sleep(0.2)
        assert client.health().ok

    with_fake(tmp_path, body, progress_timeout_s=1.0)


def test_a_new_request_does_not_make_a_silent_engine_healthy(tmp_path: Path) -> None:
    async def body(client: EngineClient, fake: FakeEngine) -> None:
        fake.hold.set()
        await asyncio.sleep(0.5)
        waiting = asyncio.create_task(collect(client, Submit(id=1, prompt=[1], max_tokens=10)))
        await asyncio.sleep(0)
        assert client.num_pending == 1
        assert not client.health().ok
        fake.hold.clear()
        await waiting

    with_fake(tmp_path, body, progress_timeout_s=0.3)


# Real processes


@needs_models
def test_an_engine_answers_and_leaves_no_process(config: EngineConfig) -> None:
    async def main() -> list[int]:
        engine = LocalEngine(config)
        async with engine as client:
            assert [entry["rank"] for entry in client.ready.topology] == [0, 1]
            assert [entry["pid"] for entry in client.ready.topology] == engine.pids
            chunks = await collect(client, Submit(id=1, prompt=[300, 301, 302], max_tokens=12, ignore_eos=True))
            assert sum(len(chunk.tokens) for chunk in chunks) == 12
            assert client.health().ok
        return engine.pids

    assert_gone(asyncio.run(main()))


@needs_models
def test_an_engine_that_does_not_start_in_time_leaves_nothing_behind(config: EngineConfig) -> None:
    engine = LocalEngine(replace(config, startup_timeout_s=0.2))
    with pytest.raises(TimeoutError, match=r"not ready after 0.2 s; raise startup_timeout"):
        asyncio.run(engine.start())
    assert_gone(engine.pids)


@needs_models
def test_ranks_listen_on_loopback_alone_and_the_store_stops_listening(config: EngineConfig) -> None:
    """A store that still listened would be another address of the verifier."""

    async def main() -> list[list[str]]:
        engine = LocalEngine(config)
        async with engine:
            return [listening(pid) for pid in engine.pids]

    verifier, drafter = asyncio.run(main())
    assert set(verifier + drafter) == {"127.0.0.1"}
    assert len(verifier) == len(drafter)


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
                await asyncio.wait_for(waiting, 10 + HANG_S)
            async with asyncio.timeout(10 + HANG_S):
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
@pytest.mark.parametrize("has_standby", [True, False])
def test_a_lost_engine_is_replaced_and_changes_no_token(config: EngineConfig, has_standby: bool) -> None:
    async def main() -> list[int]:
        engine = LocalEngine(replace(config, standby=has_standby, hang_timeout_s=HANG_S), restarts=True)
        async with engine as client:
            standby, seen = engine.standby_pid, list(engine.pids)
            assert (standby is not None) == has_standby
            settings = [SamplingSettings(temperature=0.0), SamplingSettings(temperature=0.8, seed=3)]

            async def answer(sampling: SamplingSettings) -> list[int]:
                submit = Submit(id=client.new_id(), prompt=[300], max_tokens=250, ignore_eos=True, sampling=sampling)
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

    async def main() -> tuple[float, list[int]]:
        engine = LocalEngine(config)
        async with engine as client:

            async def ask(number: int) -> None:
                prompt = [300 + (7 * number + place) % 50 for place in range(2000)]
                await collect(client, Submit(id=client.new_id(), prompt=prompt, max_tokens=1, ignore_eos=True))

            await asyncio.gather(*map(ask, range(8)))
            assert client.health() == (True, "") and client.dead is None
            return client.stats.forward_seconds / client.stats.steps, engine.pids

    seconds, pids = asyncio.run(main())
    assert seconds > config.hang_timeout_s, "raise the number of prompts"
    assert_gone(pids)


@needs_models
@pytest.mark.parametrize(
    ("sizes", "killed", "number"),
    [((1, 1), 1, signal.SIGKILL), ((1, 1), 1, signal.SIGSTOP), ((2, 2), 3, signal.SIGKILL)],
    ids=["killed", "hung", "one of two ranks"],
)
def test_a_lost_drafter_is_replaced_and_changes_no_token(
    sizes: tuple[int, int], killed: int, number: signal.Signals
) -> None:
    speculation = {"model": "bundled:eagle3", "draft_tensor_parallel_size": sizes[1], "speculative_tree_prune": "off"}
    speculation["overlap"] = "none"  # so that trees do not depend on timing
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
                submit = Submit(id=client.new_id(), prompt=[300], max_tokens=400, ignore_eos=True)
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
        "from cluster.local_engine import LocalEngine\n"
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


@needs_models
def test_a_local_service_answers_over_http_and_leaves_no_process(capfd: pytest.CaptureFixture[str]) -> None:
    with local_service(EngineArgs.load({"port": 0, "max_model_len": 256}), Progress()) as url:
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


def test_a_port_in_use_is_reported_before_anything_starts() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot listen"), local_service(EngineArgs.load({"port": port})):
            pass
