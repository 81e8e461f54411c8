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


class FakeWorkerGroup:
    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class FakeTokenizing:
    def __init__(self) -> None:
        self.reason = ""

    def health(self) -> Health:
        return Health(not self.reason, self.reason)


class ReplicaOf(Replica):
    """A running replica, without Ray."""

    _worker_group: Any
    _tokenizing: Any

    def __init__(self, client: EngineClient) -> None:
        self._client, self._worker_group, self._serving = client, FakeWorkerGroup(), True
        self._tokenizing = FakeTokenizing()

    def __del__(self) -> None:
        pass  # Serve would await it


async def test_a_hung_engine_is_killed_before_serve_drains_the_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: list[int] = []
    monkeypatch.setattr(cluster.serve.replica.os, "_exit", exits.append)
    monkeypatch.setattr(cluster.serve.replica, "EXIT_GRACE_S", 0.0)
    client = EngineClient(progress_timeout_s=1.0)
    engine = FakeEngine(await client.listen(f"unix:{tmp_path}/socket"), lambda submit: [[1]])
    await client.wait_ready(5)
    await asyncio.sleep(0.2)  # collecting garbage at the end of the start took a while
    replica = ReplicaOf(client)
    await replica.check_health()
    replica._tokenizing.reason = "no text can be tokenized"
    with pytest.raises(RuntimeError, match="no text can be tokenized"):
        await replica.check_health()
    replica._tokenizing.reason = ""
    await replica.check_health()

    engine.hold.set()
    waiting = asyncio.create_task(last_chunk(client, Submit(id=1, prompt=[1], max_tokens=10)))
    await asyncio.sleep(1.5)
    with pytest.raises(RuntimeError, match="the engine is silent"):
        await replica.check_health()
    assert replica._worker_group.is_closed
    with pytest.raises(EngineDead, match="the engine is silent"):
        await asyncio.wait_for(waiting, 5)
    await asyncio.sleep(0.1)
    with pytest.raises(RuntimeError, match="the engine is silent"):
        await replica.check_health()
    assert exits == [1]
    await client.close()
    engine.die()


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
