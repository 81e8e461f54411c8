"""Writes the deltas of completions and chats as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from cluster.openai.failures import to_http_error
from cluster.openai.openai_format import ResponseFormat
from cluster.openai.output_processor import Generation, TextDelta
from cluster.openai.resumption import EventIds
from secateur.responses import SSE_DONE

KEEP_ALIVE_S = 5.0
"""While a stream goes through what its client has, a comment this often keeps proxies from closing the connection."""


def with_id(event: str, id: str | None) -> str:
    """Return a server-sent event with an id, after its data: some clients look for these in the first line."""
    return event if id is None else f"{event[:-1]}id: {id}\n\n"


async def events_of(
    response_format: ResponseFormat,
    generations: Sequence[Generation],
    first: tuple[int, TextDelta],
    rest: AsyncGenerator[tuple[int, TextDelta]],
    ids: EventIds | None,
) -> AsyncGenerator[str]:
    """Yield server-sent events: opening chunks, one chunk per delta, totals, [DONE]; an error is an event, too.

    Replayed deltas go the same way, so that what they leave behind is the same, but the client has their events.
    """
    told_at = time.monotonic()
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
                index, delta = item
                if ids is not None:
                    ids.process(index, delta.token_ids, is_finished=delta.finish_reason is not None)
                event = None
                if response_format.has_event(delta):
                    event = response_format.event(index, generations[index], delta)
                # Without an event, text is held back: half a character, or the beginning of a stop string.
                if event is not None and not delta.is_replayed:
                    yield with_id(event, ids.sent(index) if ids else None)
                elif delta.is_replayed and time.monotonic() - told_at > KEEP_ALIVE_S:
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
