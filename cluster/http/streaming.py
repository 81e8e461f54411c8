"""Streams that end when their client leaves, and several of them as one. Knows HTTP, not OpenAI.

Whatever ends a stream closes what it is made from, down to the engine's requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Send

T = TypeVar("T")


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


class EventStream(StreamingResponse):
    """Closes its source whatever ends the response, so that the engine hears at once of a client that left."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str], source: AsyncGenerator[Any], headers: dict[str, str]) -> None:
        super().__init__(events, headers={**headers, "Cache-Control": "no-cache"})
        self._events = events
        self._source = source

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._source), aclosing(self._events):
            await super().stream_response(send)


async def merged(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """The items of several streams as they come, each with its stream's index. Closing it closes all of them."""
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


async def prepended(first: T, rest: AsyncIterator[T]) -> AsyncIterator[T]:
    yield first
    async for item in rest:
        yield item


async def unless_client_leaves(request: Request, work: Awaitable[T]) -> T | None:
    """The work's result, or None if the client disconnected first; the work is then cancelled and has ended."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_client_left(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for waiting in (task, gone):
            waiting.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _client_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
