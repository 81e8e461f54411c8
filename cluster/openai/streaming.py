"""Event streams of completions and chats, and handlers that stop when the client disconnects.

However a stream ends, the generators it reads from are closed, down to the requests in the engine.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, ParamSpec

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Send

from cluster.openai.direct import DirectWriter
from cluster.openai.failures import to_http_error
from cluster.openai.openai_format import ResponseFormat
from cluster.openai.output_processor import Generation, TextDelta
from cluster.openai.resumption import EventIds
from secateur.responses import SSE_DONE

P = ParamSpec("P")

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected; it appears in logs alone."""
KEEP_ALIVE_S = 5.0
"""While a stream goes through what its client has, a comment this often keeps proxies from closing the connection."""


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


def with_id(event: str, id: str | None) -> str:
    """Return a server-sent event with an id, after its data: some clients look for these in the first line."""
    return event if id is None else f"{event[:-1]}id: {id}\n\n"


class DeltaEvents:
    """Writes the event of each delta of a stream. ids: what numbers them; None = they have no ids.

    writer: takes what comes while the stream waits; None = the stream is woken. With it this is a `Sink`.
    """

    def __init__(
        self,
        response_format: ResponseFormat,
        generations: Sequence[Generation],
        ids: EventIds | None,
        writer: DirectWriter | None = None,
    ) -> None:
        self.ids, self._writer = ids, writer
        self._format, self._generations = response_format, generations

    def event(self, index: int, delta: TextDelta) -> str | None:
        """Return the event of answer `index`; None if its text is held back, as half a character is, or is replayed."""
        if self.ids is not None:
            self.ids.process(index, delta.token_ids, is_finished=delta.finish_reason is not None)
        if not self._format.has_event(delta):
            return None
        event = self._format.event(index, self._generations[index], delta)
        if event is None or delta.is_replayed:
            return None
        return with_id(event, self.ids.sent(index) if self.ids else None)

    @property
    def is_open(self) -> bool:
        """Return whether `write` may be called now."""
        return self._writer is not None and self._writer.is_open

    def write(self, deltas: Sequence[tuple[int, TextDelta]]) -> None:
        """Write the events of deltas to the connection."""
        assert self._writer is not None
        if events := [event for index, delta in deltas if (event := self.event(index, delta)) is not None]:
            self._writer.write("".join(events).encode())


async def events_of(
    response_format: ResponseFormat,
    generations: Sequence[Generation],
    first: tuple[int, TextDelta],
    rest: AsyncGenerator[tuple[int, TextDelta]],
    events: DeltaEvents,
) -> AsyncGenerator[str]:
    """Yield server-sent events: opening chunks, one chunk per delta, totals, [DONE]; an error is an event, too.

    Replayed deltas go the same way, so that what they leave behind is the same, but the client has their events.
    """
    told_at, ids = time.monotonic(), events.ids
    try:
        async with aclosing(rest):
            if response_format.reads_prompts:
                await asyncio.to_thread(response_format.read_prompts, generations)
            for index, generation in enumerate(generations):
                if ids is not None and ids.has_begun(index):
                    continue
                if (opening := response_format.opening_event(index, generation)) is not None:
                    yield with_id(opening, ids.sent(index) if ids else None)
            item: tuple[int, TextDelta] | None = first
            while item is not None:
                if (event := events.event(*item)) is not None:
                    yield event
                elif item[1].is_replayed and time.monotonic() - told_at > KEEP_ALIVE_S:
                    told_at = time.monotonic()
                    yield ": replaying\n\n"
                item = await anext(rest, None)
        if response_format.has_totals and not (ids and ids.is_closed):
            yield with_id(response_format.closing_event(generations), ids.closed() if ids else None)
    except Exception as error:
        yield to_http_error(error).body.sse()
        yield SSE_DONE
    else:
        yield with_id(SSE_DONE, ids.last if ids else None)
