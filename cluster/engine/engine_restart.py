"""Starts another engine in place of a lost one. Its requests wait meanwhile, and go on with the tokens they have."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from cluster.engine.engine_client import EngineClient

logger = logging.getLogger(__name__)

MAX_STARTS = 3
"""How often a new engine is started in place of a lost one, until one is ready."""


class EngineRestart:
    """Replaces the engine of a client. Use it in the client's event loop.

    start: ends what is left of the lost engine, starts another one and waits until it is ready. on_failure: called when
    no engine starts; the requests have failed then.
    """

    def __init__(
        self,
        client: EngineClient,
        start: Callable[[], Awaitable[None]],
        *,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._client, self._start, self._on_failure = client, start, on_failure
        self._task: asyncio.Task[None] | None = None

    def lost(self, reason: str) -> None:
        """Replace the engine. While that is going on, another loss makes the present attempt fail."""
        self._client.interrupt(reason)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._replace(reason))

    def cancel(self) -> None:
        """Start no more engines."""
        if self._task is not None:
            self._task.cancel()

    async def _replace(self, reason: str) -> None:
        began = time.monotonic()
        for _ in range(MAX_STARTS):
            try:
                await self._start()
            except Exception:
                logger.exception("a new engine did not start")
            else:
                seconds, num_pending = time.monotonic() - began, self._client.num_pending
                logger.warning("a new engine goes on with %d requests after %.1f s", num_pending, seconds)
                return
        self._client.fail(reason)
        self._on_failure()
