"""Event streams, and handlers that stop when the client disconnects.

However a stream ends, the generators it reads from are closed, down to the requests in the engine.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, ParamSpec

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Send

P = ParamSpec("P")

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected; it appears in logs alone."""


class EventStream(StreamingResponse):
    """Server-sent events. Closes `source` as soon as the response ends, so that the engine aborts its requests."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str], source: AsyncGenerator[Any], headers: dict[str, str]) -> None:
        super().__init__(events, headers={**headers, "Cache-Control": "no-cache"})
        self._events = events
        self._source = source

    async def stream_response(self, send: Send) -> None:
        """Send the events, then close both generators."""
        async with aclosing(self._source), aclosing(self._events):
            await super().stream_response(send)


def cancel_on_disconnect(handler: Callable[P, Awaitable[Response]]) -> Callable[P, Awaitable[Response]]:
    """Cancel a route handler when its client disconnects before the response starts.

    FastAPI passes arguments by name; the handler must have a parameter `request: Request`. The handler has finished,
    clean-up included, when the decorated one returns.
    """

    @functools.wraps(handler)
    async def cancellable(*args: P.args, **kwargs: P.kwargs) -> Response:
        request = kwargs["request"]
        assert isinstance(request, Request)
        work, disconnect = asyncio.ensure_future(handler(*args, **kwargs)), asyncio.ensure_future(_disconnect(request))
        try:
            await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            for task in (work, disconnect):
                task.cancel()
            await asyncio.gather(work, disconnect, return_exceptions=True)

    return cancellable


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
