"""What the supervisor makes of ranks that end, on a host without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from cluster.engine.engine_client import EngineClient
from cluster.engine.rank_exits import EngineDead, ExitKind, RankExit
from cluster.engine.supervisor import Supervisor
from tests.support.fake_engine import FakeEngine
from workers.config import DraftConfig, EngineConfig

DRAFT = DraftConfig(method="eagle3", model_path="", tensor_parallel_size=1)
CONFIG = EngineConfig(model_path="", tensor_parallel_size=2, draft=DRAFT, hang_timeout_s=0.0)
KILLED = RankExit(ExitKind.KILLED, "verifier 1 was ended by SIGKILL")
LOST = RankExit(ExitKind.LOST_A_PEER, "verifier 0 lost verifier 1")


class Host:
    """Ranks that end when a test says so. The first one brings a fake engine."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self.ends: dict[int, asyncio.Future[RankExit]] = {}
        self.calls: list[str] = []
        self.engines: list[FakeEngine] = []
        self.dies_at_start: RankExit | None = None

    async def is_here(self, rank: int) -> bool:
        return True

    async def start(self, rank: int, config: Any, specs: Any, *, env: Any, flags: Mapping[str, str]) -> str:
        self.calls.append(f"start {rank} with {', '.join(flags) or 'nothing'}")
        self.ends[rank] = asyncio.get_running_loop().create_future()
        if self.dies_at_start is not None:
            self.ends[rank].set_result(self.dies_at_start)
        elif "front" in flags:
            self.engines.append(FakeEngine(flags["front"], lambda submit: [[1]]))
        return "127.0.0.1:1"

    async def wait(self, rank: int) -> RankExit:
        return await asyncio.shield(self.ends[rank])

    def kill(self, rank: int, why: str | None = None) -> None:
        self.calls.append(f"kill {rank}")

    async def free(self, rank: int) -> None:
        self.calls.append(f"free {rank}")

    def close(self) -> None:
        for engine in self.engines:
            engine.die()


class Supervised:
    """A supervisor of such ranks, and the reasons of the deaths that it reports."""

    def __init__(self) -> None:
        self.host, self.client, self.deaths = Host(), EngineClient(), asyncio.Queue[str]()
        self.supervisor = Supervisor(self.host, self.client, restarts=False, report=lambda stage: None)
        self.client.on_loss = self._died

    async def start(self) -> list[str]:
        """Start the ranks and return what the host was told."""
        self.host.calls.clear()
        await self.supervisor.start(CONFIG, None)  # type: ignore[arg-type]  # the host does not look at them
        return self.host.calls[:]

    def _died(self, reason: str) -> None:
        self.client.interrupt(reason)
        self.deaths.put_nowait(reason)

    async def close(self) -> None:
        self.supervisor.close()
        await self.client.close()


STARTS = ["start 0 with front", "start 1 with store", "start 2 with store"]
FREES, KILLS = ([f"{what} {rank}" for rank in range(3)] for what in ("free", "kill"))


async def test_the_rank_that_ended_first_is_named_and_all_are_killed_and_may_start_again() -> None:
    own = Supervised()
    for _ in range(2):
        assert await own.start() == FREES + STARTS
        own.host.calls.clear()
        own.host.ends[0].set_result(LOST)
        asyncio.get_running_loop().call_later(0.1, own.host.ends[1].set_result, KILLED)
        assert await asyncio.wait_for(own.deaths.get(), 60) == KILLED.message
        assert own.host.calls == KILLS
        own.host.engines.pop().die()
    await own.close()


async def test_a_rank_that_ends_in_the_start_makes_it_fail() -> None:
    own = Supervised()
    own.host.dies_at_start = KILLED
    with pytest.raises(EngineDead, match="verifier 1 was ended by SIGKILL"):
        await own.start()
    await own.close()


async def test_the_end_of_a_drafter_that_may_be_lost_is_no_death() -> None:
    own = Supervised()
    await own.start()
    own.host.ends[2].set_result(RankExit(ExitKind.KILLED, "drafter 0 was ended by SIGKILL"))
    await asyncio.sleep(0.1)
    assert own.deaths.empty()
    own.host.ends[1].set_result(KILLED)
    assert await asyncio.wait_for(own.deaths.get(), 60) == KILLED.message
    await own.close()


async def test_an_end_that_is_expected_is_no_death() -> None:
    own = Supervised()
    await own.start()
    own.supervisor.expect_end()
    own.host.ends[0].set_result(KILLED)
    await asyncio.sleep(0.1)
    assert own.deaths.empty() and own.host.calls[-1] == STARTS[-1]
    await own.close()
