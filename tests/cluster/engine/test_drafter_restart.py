"""New drafters in place of lost ones: when they are started, and when no more are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

import cluster.engine.drafter_restart as module
from cluster.engine.drafter_restart import DrafterRestart
from cluster.engine.engine_client import EngineClient
from workers.comm.ipc import DrafterLost


class Drafters:
    """Drafters that fail to start, end early or connect, as `outcomes` say in turn."""

    def __init__(self, outcomes: list[str], lost: DrafterLost | None = None) -> None:
        self.client = EngineClient()
        self.client.drafter_lost = lost
        self.calls: list[str] = []
        self._outcomes, self._now = iter(outcomes), ""
        self.restart = DrafterRestart(
            self.client, kill=self.kill, start=self.start, has_exited=lambda: self._now == "ends"
        )

    async def kill(self) -> None:
        self.calls.append("kill")

    async def start(self, link: str) -> None:
        self.calls.append(f"start {link}")
        self._now = next(self._outcomes)
        if self._now == "fails":
            raise RuntimeError("no memory")
        self.client.stats.has_drafter = self._now == "connects"

    def lose(self, link: str) -> None:
        self.client.stats.has_drafter = False
        self.client.on_drafter_lost(DrafterLost(reason="it was killed", link=link))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the pauses that were made, in seconds; none takes any time."""
    made: list[float] = []
    sleep = asyncio.sleep

    async def passed(seconds: float) -> None:
        made.append(seconds)
        await sleep(0)

    monkeypatch.setattr(module.asyncio, "sleep", passed)
    return made


def run(outcomes: list[str], body: Callable[[Drafters], Awaitable[None]]) -> Drafters:
    async def main() -> Drafters:
        drafters = Drafters(outcomes)
        await body(drafters)
        return drafters

    return asyncio.run(main())


async def finished(drafters: Drafters) -> None:
    task = drafters.restart._task
    assert task is not None
    await asyncio.wait_for(task, 60)


def test_attempts_go_on_with_growing_pauses_until_a_drafter_connects(pauses: list[float]) -> None:
    async def body(drafters: Drafters) -> None:
        drafters.lose("a")
        await finished(drafters)

    drafters = run(["fails", "ends", "fails", "fails", "ends", "fails", "fails", "connects"], body)
    assert drafters.calls == ["kill", "start a"] * 8
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60]


def test_a_drafter_that_was_lost_before_anybody_listened_is_replaced_as_well(pauses: list[float]) -> None:
    async def main() -> list[str]:
        drafters = Drafters(["connects"], DrafterLost(reason="it was killed", link="a"))
        await finished(drafters)
        return drafters.calls

    assert asyncio.run(main()) == ["kill", "start a"]


def test_a_second_loss_begins_again_with_its_own_link(pauses: list[float]) -> None:
    async def body(drafters: Drafters) -> None:
        for link in "ab":
            drafters.lose(link)
            await finished(drafters)

    assert run(["connects", "connects"], body).calls == ["kill", "start a", "kill", "start b"]
    assert pauses == [0, 1], "a drafter that was lost soon after its start is not replaced at once"


def test_a_loss_while_the_last_drafter_is_awaited_replaces_the_attempt(pauses: list[float]) -> None:
    async def body(drafters: Drafters) -> None:
        drafters.lose("a")
        while len(drafters.calls) < 2:
            await asyncio.sleep(0)
        drafters.lose("b")
        await finished(drafters)

    assert run(["hangs", "connects"], body).calls == ["kill", "start a", "kill", "start b"]


def test_no_drafter_is_started_any_more_once_cancelled(pauses: list[float]) -> None:
    async def body(drafters: Drafters) -> None:
        drafters.lose("a")
        drafters.restart.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finished(drafters)

    assert run([], body).calls == []
