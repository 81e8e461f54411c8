"""What the replica does about its engine's health: a fake engine, no Ray."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_engine import FakeEngine

import cluster.app
from cluster.app import Replica
from cluster.engine_client import EngineClient
from workers.ipc import Submit, TokenChunk


class FakeGang:
    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class ReplicaOf(Replica):
    """One that serves already, without Ray."""

    def __init__(self, client: EngineClient) -> None:
        self._client, self._gang, self._serving = client, FakeGang(), True

    def __del__(self) -> None:
        pass  # Serve would await it


async def test_an_engine_that_hangs_is_ended_before_serve_drains_the_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: list[int] = []
    monkeypatch.setattr(cluster.app.os, "_exit", exits.append)
    monkeypatch.setattr(cluster.app, "EXIT_GRACE_S", 0.0)
    client = EngineClient(progress_timeout_s=1.0)
    engine = FakeEngine(await client.listen(f"unix:{tmp_path}/socket"), lambda submit: [[1]])
    await client.wait_ready(5)
    await asyncio.sleep(0.2)  # collecting garbage at the end of the start took a while
    replica = ReplicaOf(client)
    await replica.check_health()

    engine.hold.set()
    waiting = asyncio.create_task(last_chunk(client, Submit(id=1, prompt=[1], max_tokens=10)))
    await asyncio.sleep(1.5)
    with pytest.raises(RuntimeError, match="the engine is silent"):
        await replica.check_health()
    assert replica._gang.is_closed
    chunk = await asyncio.wait_for(waiting, 5)
    assert chunk.finish_reason == "error"
    assert "the engine is silent" in chunk.error
    await asyncio.sleep(0.1)
    with pytest.raises(RuntimeError, match="the engine is silent"):
        await replica.check_health()
    assert exits == [1]
    await client.close()
    engine.die()


async def last_chunk(client: EngineClient, submit: Submit) -> TokenChunk:
    return [chunk async for chunk in client.submit(submit)][-1]
