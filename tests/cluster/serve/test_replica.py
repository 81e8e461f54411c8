"""The replica's handling of its engine's health and of disconnects, with a fake engine and without Ray."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from ray.exceptions import TaskCancelledError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

import cluster.serve.launch
import cluster.serve.replica
from cluster.engine.engine_client import EngineClient, Health
from cluster.engine.rank_exits import EngineDead
from cluster.engine.supervisor import Supervisor
from cluster.openai.streaming import EventStream, cancel_on_disconnect
from cluster.serve.replica import TOKENIZER_GRACE_S, ClientDisconnects, Replica
from secateur.config import EngineArgs
from tests.support.fake_engine import FakeEngine, StandingClock
from workers.comm.ipc import Submit, TokenChunk


class FakeTokenizing:
    def __init__(self) -> None:
        self.reason = ""

    def health(self) -> Health:
        return Health(not self.reason, self.reason)


class FakeSupervisor(Supervisor):
    """Starts a fake engine each time, or fails if `error` is set."""

    def __init__(self, client: EngineClient, folder: Path, on_failure: Callable[[], None]) -> None:
        super().__init__(None, client, restarts=True, report=print, on_failure=on_failure)  # type: ignore[arg-type]
        self._folder = folder
        self.error: Exception | None = None
        self.engines: list[FakeEngine] = []
        self.is_closed = False

    async def _start(self, config: Any, specs: Any) -> None:
        if self.error is not None:
            raise self.error
        if self.engines:
            self.engines[-1].die()
        address = await self._client.listen(f"unix:{self._folder}/socket")
        self.engines.append(FakeEngine(address, lambda submit: [[1]]))
        await self._client.wait_ready(5)

    def close(self) -> None:
        self.is_closed = True
        self.engines[-1].die()


class ReplicaOf(Replica):
    """A running replica, without Ray."""

    _supervisor: Any
    _tokenizing: Any

    def __init__(self, client: EngineClient, folder: Path) -> None:
        self._client, self._serving, self._config, self._specs = client, True, None, None
        self._cannot_tokenize_since = math.inf
        self._tokenizing = FakeTokenizing()
        self._supervisor = FakeSupervisor(client, folder, self._give_up)

    def __del__(self) -> None:
        pass  # Serve would await it


class Starting(Replica):
    """A replica whose `__del__` garbage collection may call; that of `Replica` must be awaited."""

    def __del__(self) -> None:
        pass


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []
    monkeypatch.setattr(cluster.serve.replica.os, "_exit", made.append)
    monkeypatch.setattr(cluster.serve.replica, "EXIT_GRACE_S", 0.0)
    return made


async def test_a_replica_that_cannot_tokenize_for_long_is_unhealthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = StandingClock()
    monkeypatch.setattr(cluster.serve.replica, "time", clock)
    client = EngineClient()
    replica = ReplicaOf(client, tmp_path)
    supervisor = replica._supervisor
    await supervisor.start(None, None)
    await replica.check_health()
    replica._tokenizing.reason = "no text can be tokenized"
    await replica.check_health()
    clock.now += TOKENIZER_GRACE_S
    with pytest.raises(RuntimeError, match="no text can be tokenized"):
        await replica.check_health()
    replica._tokenizing.reason = ""
    await replica.check_health()
    replica._tokenizing.reason = "another time"
    await replica.check_health()
    await client.close()
    supervisor.close()


async def test_a_lost_engine_is_replaced_and_its_requests_go_on(tmp_path: Path, exits: list[int]) -> None:
    client = EngineClient()
    replica = ReplicaOf(client, tmp_path)
    supervisor = replica._supervisor
    await supervisor.start(None, None)
    supervisor.engines[0].hold.set()
    waiting = asyncio.create_task(last_chunk(client, Submit(id=1, prompt=[1], max_tokens=10)))
    async with asyncio.timeout(60):
        while not supervisor.engines[0].submitted:
            await asyncio.sleep(0.01)
    client.on_loss("verifier 0 gave no sign of life")
    await replica.check_health()
    assert "verifier 0 gave no sign of life" in client.health().reason
    assert (await asyncio.wait_for(waiting, 60)).tokens == [1]
    assert len(supervisor.engines) == 2 and client.health() == (True, "")
    assert exits == [] and not supervisor.is_closed
    await client.close()
    supervisor.close()


async def test_a_broken_connection_alone_replaces_the_engine(tmp_path: Path, exits: list[int]) -> None:
    client = EngineClient(cause_wait_s=0.1)
    supervisor = ReplicaOf(client, tmp_path)._supervisor
    await supervisor.start(None, None)
    supervisor.engines[0].die()
    async with asyncio.timeout(60):
        while len(supervisor.engines) < 2 or client.health() != (True, ""):
            await asyncio.sleep(0.02)
    assert len(await asyncio.wait_for(collected(client), 60)) == 1 and exits == []
    await client.close()
    supervisor.close()


async def test_a_replica_whose_engines_do_not_start_fails_its_requests_and_exits(
    tmp_path: Path, exits: list[int]
) -> None:
    client = EngineClient()
    replica = ReplicaOf(client, tmp_path)
    supervisor = replica._supervisor
    await supervisor.start(None, None)
    supervisor.engines[0].hold.set()
    supervisor.error = RuntimeError("no GPU is left")
    waiting = asyncio.create_task(last_chunk(client, Submit(id=1, prompt=[1], max_tokens=10)))
    await asyncio.sleep(0.05)
    client.on_loss("verifier 1 was killed")
    with pytest.raises(EngineDead, match="verifier 1 was killed"):
        await asyncio.wait_for(waiting, 60)
    await asyncio.sleep(0.05)
    with pytest.raises(RuntimeError, match="verifier 1 was killed"):
        await replica.check_health()
    assert exits == [1] and supervisor.is_closed
    await client.close()


@pytest.mark.parametrize("fails", ["read_engine", "fetch_weights", "start", "ready"])
async def test_a_replica_that_does_not_start_ends_what_it_has_started(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    done: list[str] = []

    def step(name: str, result: Any = None) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            done.append(name)
            if name == fails:
                raise RuntimeError(f"{name} failed")
            return result

        return run

    def awaited(name: str) -> Callable[..., Any]:
        return AsyncMock(side_effect=step(name))

    class Started:
        start, close = staticmethod(awaited("start")), staticmethod(step("supervisor closed"))

    class Tokenizing:
        begin, ready = staticmethod(step("begin")), staticmethod(awaited("ready"))
        close = staticmethod(awaited("tokenizing closed"))

    for name in ("_log_through_serve", "_bind_replica_to_its_node", "report_stage"):
        monkeypatch.setattr(cluster.serve.replica, name, lambda *args: None)
    monkeypatch.setattr(cluster.serve.replica.ray.util, "get_current_placement_group", lambda: None)
    for name, result in (("read_engine", (None, None)), ("with_tokenizer", (None, None)), ("fetch_weights", None)):
        monkeypatch.setattr(cluster.serve.replica, name, step(name, result))
    monkeypatch.setattr(cluster.serve.replica, "RayHost", lambda *args: None)
    monkeypatch.setattr(cluster.serve.replica, "Supervisor", lambda *args, **options: Started)
    monkeypatch.setattr(cluster.serve.replica, "TokenizerPool", lambda tokenizer: Tokenizing)
    replica = Starting.__new__(Starting)
    with pytest.raises(RuntimeError, match=f"{fails} failed"):
        await replica.__init__({"device": "cpu"})  # type: ignore[misc]  # as Serve does
    await Replica.__del__(replica)
    assert done[-1] == "supervisor closed" and done.count("supervisor closed") == 1
    assert ("tokenizing closed" in done) == ("begin" in done) == (fails in ("start", "ready"))


async def collected(client: EngineClient) -> list[TokenChunk]:
    return [chunk async for chunk in client.submit(Submit(id=9, prompt=[1], max_tokens=10))]


READ = """
import sys
from cluster.serve.replica import Replica
from secateur.config import EngineArgs

class Starting(Replica):
    def __init__(self, read):
        self._args = EngineArgs.load({"device": "cpu"})
        self._read_models(read)

    def __del__(self):
        pass

replica = Starting({"config": sys.argv[1], "specs": sys.argv[2]})
assert replica._tokenizer.decode(replica._tokenizer.encode("def f(x):")) == "def f(x):"
assert (replica._config.to_json(), replica._specs.to_json()) == tuple(sys.argv[1:])
assert "torch" not in sys.modules, "it was imported"
"""


def test_a_replica_reads_no_model_again_that_the_command_has_read(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Reading imports torch, which takes longer than all the rest of a replica's start."""
    passed: list[dict[str, str]] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster.serve.launch, "running", lambda args, read, **_: passed.append(read) or nullcontext(""))
    monkeypatch.setattr(cluster.serve.launch, "watch", lambda url: None)
    cluster.serve.launch.serve(EngineArgs.load({"device": "cpu"}))
    [read] = passed
    subprocess.run([sys.executable, "-c", READ, read["config"], read["specs"]], check=True, timeout=120)
    said = capfd.readouterr().err
    assert "reading the model's configuration" in said
    assert "PyTorch was not found" not in said and "fetching weights" not in said


async def last_chunk(client: EngineClient, submit: Submit) -> TokenChunk:
    return [chunk async for chunk in client.submit(submit)][-1]


async def test_a_stream_survives_serves_cancellation_of_its_disconnect_wait() -> None:
    is_closed = False

    async def source() -> AsyncGenerator[str]:
        nonlocal is_closed
        try:
            while True:
                await asyncio.sleep(0.01)
                yield "data: {}\n\n"
        finally:
            is_closed = True

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        events = source()
        await EventStream(events, events, {})(scope, receive, send)

    await asyncio.wait_for(ClientDisconnects(app)({"type": "http"}, CancelledOnce(), ignore), 60)
    assert is_closed


async def test_a_disconnect_is_final() -> None:
    @cancel_on_disconnect
    async def never(request: Request) -> Response:
        await asyncio.sleep(60)
        return Response()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(2):
            assert (await never(request=Request(scope, receive))).status_code == 499

    await asyncio.wait_for(ClientDisconnects(app)({"type": "http"}, CancelledOnce(), ignore), 60)


class CancelledOnce:
    """`receive` as Serve has it after the proxy cancelled it: it raises once, then never returns."""

    def __init__(self) -> None:
        self._has_raised = False

    async def __call__(self) -> Message:
        if self._has_raised:
            await asyncio.Event().wait()
        self._has_raised = True
        await asyncio.sleep(0.05)
        raise TaskCancelledError


async def ignore(message: Message) -> None:
    pass
