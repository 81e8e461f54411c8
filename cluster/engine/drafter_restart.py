"""Replaces the drafter of a running engine each time it is lost."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator

from cluster.engine.engine_client import EngineClient
from workers.comm.ipc import DrafterLost

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
_POLL_S = 0.2


class DrafterRestart:
    """Starts a new drafter when the engine reports that it has lost its own. Use it in the client's event loop.

    kill: ends what is left of the old ranks and returns when they are gone. start: starts the drafter's ranks, given
    the address of the link that the engine offers. has_exited: whether one of these ranks has ended since. Pauses
    between attempts double up to a minute, so a drafter that cannot start does not keep a node busy.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        kill: Callable[[], Awaitable[None]],
        start: Callable[[str], Awaitable[None]],
        has_exited: Callable[[], bool],
    ) -> None:
        self._client, self._kill, self._start, self._has_exited = client, kill, start, has_exited
        self._task: asyncio.Task[None] | None = None
        self._last_start = -math.inf
        client.on_drafter_lost = self._lost
        if client.drafter_lost is not None:  # before anybody listened
            self._lost(client.drafter_lost)

    def cancel(self) -> None:
        """Start no more drafters."""
        if self._task is not None:
            self._task.cancel()

    def _lost(self, message: DrafterLost) -> None:
        self.cancel()  # if a new drafter was lost before this one learned that it had connected
        self._task = asyncio.get_running_loop().create_task(self._replace(message.link))

    async def _replace(self, link: str) -> None:
        is_first = time.monotonic() - self._last_start > LONGEST_PAUSE_S
        for pause_s in _pauses(0.0 if is_first else FIRST_PAUSE_S):
            await self._kill()
            await asyncio.sleep(pause_s)
            logger.warning("starting a new drafter")
            self._last_start = time.monotonic()
            try:
                await self._start(link)
            except Exception:
                logger.exception("the new drafter did not start")
                continue
            while not self._has_exited():
                if self._client.stats.has_drafter:
                    logger.warning("the new drafter is connected after %.1f s", time.monotonic() - self._last_start)
                    return
                await asyncio.sleep(_POLL_S)
            logger.warning("the new drafter ended before it had connected")


def _pauses(pause_s: float) -> Iterator[float]:
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S) or FIRST_PAUSE_S
