"""The replica's handling of its engine's health and of disconnects, with a fake engine and without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import TaskCancelledError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

import cluster.serve.replica
from cluster.engine_client import EngineClient, EngineDead, Health
from cluster.http.streaming import EventStream, cancel_on_disconnect
from cluster.serve.replica import ClientDisconnects, Replica
from tests.support.fake_engine import FakeEngine
from workers.comm.ipc import Submit, TokenChunk


class FakeTokenizing:
    def __init__(self) -> None:
        self.reason = ""

    def health(self) -> Health:
        return Health(not self.reason, self.reason)


class FakeWorkerGroup:
    """Starts a fake engine, or fails."""

    def __init__(self, client: EngineClient, address: str, error: Exception | None = None) -> None:
        self._client, self._address, self._error = client, address, error
        self.engine: FakeEngine | None = None
        self.is_closed = False

    async def start(self, group: Any) -> None:
        if self._error is not None:
            raise self._error
        self.engine = FakeEngine(await self._client.listen(self._address), lambda submit: [[1]])
        await self._client.wait_ready(5)

    def close(self) -> None:
        self.is_closed = True
        if self.engine is not None:
            self.engine.die()


class ReplicaOf(Replica):
    """A running replica, without Ray; `groups` are its worker groups, the first one started."""

    _worker_group: Any
    _tokenizing: Any

    def __init__(self, client: EngineClient, groups: list[FakeWorkerGroup]) -> None:
        self._client, self._serving, self._replacing, self._placement_group = client, True, None, None
        self._tokenizing, self._groups = FakeTokenizing(), iter(groups)
        self._client.on_loss = self._engine_died
        self._worker_group = self._new_worker_group()

    def _new_worker_group(self) -> Any:
        return next(self._groups)

    def __del__(self) -> None:
        pass  # Serve would await it


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []
    monkeypatch.setattr(cluster.serve.replica.os, "_exit", made.append)
    monkeypatch.setattr(cluster.serve.replica, "EXIT_GRACE_S", 0.0)
    return made


async def test_a_hung_engine_is_replaced_and_its_requests_go_on(tmp_path: Path, exits: list[int]) -> None:
    client = EngineClient(progress_timeout_s=1.0)
    groups = [FakeWorkerGroup(client, f"unix:{tmp_path}/{number}") for number in range(2)]
    replica = ReplicaOf(client, groups)
    await groups[0].start(None)
    await asyncio.sleep(0.2)  # collecting garbage at the end of the start took a while
    await replica.check_health()
    replica._tokenizing.reason = "no text can be tokenized"
    with pytest.raises(RuntimeError, match="no text can be tokenized"):
        await replica.check_health()
    replica._tokenizing.reason = ""
    await replica.check_health()

    assert groups[0].engine is not None
    groups[0].engine.hold.set()
    waiting = asyncio.create_task(last_chunk(client, Submit(id=1, prompt=[1], max_tokens=10)))
    await asyncio.sleep(1.5)
    await replica.check_health()
    assert "the engine is silent" in client.health().reason
    assert (await asyncio.wait_for(waiting, 5)).tokens == [1]
    assert groups[0].is_closed and not groups[1].is_closed and client.health() == (True, "")
    await replica.check_health()
    assert exits == []
    await client.close()
    groups[1].close()


async def test_a_broken_connection_alone_replaces_the_engine(tmp_path: Path, exits: list[int]) -> None:
    client = EngineClient(cause_wait_s=0.1)
    groups = [FakeWorkerGroup(client, f"unix:{tmp_path}/{number}") for number in range(2)]
    ReplicaOf(client, groups)
    await groups[0].start(None)
    assert groups[0].engine is not None
    groups[0].engine.die()
    async with asyncio.timeout(5):
        while groups[1].engine is None or client.health() != (True, ""):
            await asyncio.sleep(0.02)
    assert len(await asyncio.wait_for(collected(client), 5)) == 1 and exits == []
    await client.close()
    groups[1].close()


async def test_a_replica_whose_engines_do_not_start_fails_its_requests_and_exits(
    tmp_path: Path, exits: list[int]
) -> None:
    client = EngineClient()
    broken = [FakeWorkerGroup(client, "", RuntimeError("no GPU is left")) for _ in range(3)]
    replica = ReplicaOf(client, [FakeWorkerGroup(client, f"unix:{tmp_path}/socket"), *broken])
    await replica._worker_group.start(None)
    replica._worker_group.engine.hold.set()
    waiting = asyncio.create_task(last_chunk(client, Submit(id=1, prompt=[1], max_tokens=10)))
    await asyncio.sleep(0.05)
    replica._engine_died("verifier 1 was killed")
    with pytest.raises(EngineDead, match="verifier 1 was killed"):
        await asyncio.wait_for(waiting, 5)
    await asyncio.sleep(0.05)
    with pytest.raises(RuntimeError, match="verifier 1 was killed"):
        await replica.check_health()
    assert exits == [1] and all(group.is_closed for group in broken)
    await client.close()


async def collected(client: EngineClient) -> list[TokenChunk]:
    return [chunk async for chunk in client.submit(Submit(id=9, prompt=[1], max_tokens=10))]


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

    await asyncio.wait_for(ClientDisconnects(app)({"type": "http"}, CancelledOnce(), ignore), 5)
    assert is_closed


async def test_a_disconnect_is_final() -> None:
    @cancel_on_disconnect
    async def never(request: Request) -> Response:
        await asyncio.sleep(60)
        return Response()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(2):
            assert (await never(request=Request(scope, receive))).status_code == 499

    await asyncio.wait_for(ClientDisconnects(app)({"type": "http"}, CancelledOnce(), ignore), 5)


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
