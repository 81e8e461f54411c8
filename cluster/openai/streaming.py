"""Event streams, concurrent generators merged into one, and handlers that stop when the client disconnects.

However a stream ends, the generators it reads from are closed, down to the requests in the engine.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, ParamSpec, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Send

T = TypeVar("T")
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


async def merge(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Yield (stream index, item) from several streams as items arrive. Closing it closes all of them."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[T]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait((index, item))
        except Exception as error:
            queue.put_nowait(error)
        queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            match await queue.get():
                case None:
                    running -= 1
                case BaseException() as error:
                    raise error
                case (index, item):
                    yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def prepend(first: T, rest: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yield `first`, then the rest."""
    yield first
    async for item in rest:
        yield item


def with_id(event: str, id: str | None) -> str:
    """Return a server-sent event with an id, behind its data: some clients look for these in the first line."""
    return event if id is None else f"{event[:-1]}id: {id}\n\n"


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
