"""Writes parts of a response past ASGI, where the application runs in the server's event loop.

ASGI's `send` is a coroutine inside several others, and who awaits it is a task that has to be woken. A part that is
written at once costs neither.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION = "secateur.direct"
"""In a request's scope, the writer of its response."""


class DirectWriter:
    """Writes parts of one chunked response between its start and its end, which go through `send`."""

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle, self.loop = cycle, loop

    def __reduce__(self) -> tuple[Any, ...]:
        """Become None in another process: Serve's proxy sends a request's scope to a replica."""
        return type(None), ()

    @property
    def is_open(self) -> bool:
        """Return whether a part may be written now: the client reads, and the response has begun and not ended."""
        cycle = self._cycle
        has_begun = cycle.response_started and cycle.chunked_encoding and not cycle.response_complete
        return bool(has_begun) and not (cycle.disconnected or cycle.flow.write_paused)

    def write(self, part: bytes) -> None:
        """Write a part, which is not empty: an empty one would end the response."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


def direct_writer(scope: Scope) -> DirectWriter | None:
    """Return the writer of a response; None where the server is another one, or runs in another loop."""
    writer: DirectWriter | None = scope.get("extensions", {}).get(EXTENSION)
    return writer if writer is not None and writer.loop is asyncio.get_running_loop() else None
