"""The service's end of the engine socket: submits requests and distributes their token chunks.

The service listens and the engine connects (workers.comm.ipc). Nothing here blocks the event loop or depends on Ray or
HTTP. Call all methods in the loop that called `listen`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import NamedTuple

from secateur.errors import SecateurError
from workers.comm.ipc import (
    Abort,
    DrafterLost,
    EngineStats,
    FrameDecoder,
    Message,
    Ready,
    StepOutput,
    Submit,
    TokenChunk,
    encode,
    unix_path_fits,
)
from workers.gc_freeze import freeze_start_up

logger = logging.getLogger(__name__)

PROGRESS_TIMEOUT_S = 120.0
"""The engine hangs if no frame arrives for this long, since even an idle engine sends one every second. It is longer
than the engine's step timeout (60 s), whose error is more precise."""
CAUSE_WAIT_S = 2.0
"""Time between losing the connection and declaring the engine dead. The watcher of the ranks may report the cause
meanwhile."""


class EngineDead(SecateurError, RuntimeError):
    """The engine has died, and its requests are lost."""


class Health(NamedTuple):
    """Whether the engine makes progress."""

    ok: bool
    reason: str  # why not; if it does, what is amiss all the same, or nothing


class EngineClient:
    """The client of one engine: `listen`, start the engine with `address`, `wait_ready`, `submit`, ..., `close`."""

    def __init__(self, *, progress_timeout_s: float = PROGRESS_TIMEOUT_S, cause_wait_s: float = CAUSE_WAIT_S) -> None:
        self.address = ""
        self.ready: Ready | None = None
        self.stats = EngineStats()
        self.on_drafter_lost: Callable[[DrafterLost], None] = lambda _: None
        self._drafter_loss = ""  # why the engine is without its drafter now
        self._progress_timeout_s = progress_timeout_s
        self._cause_wait_s = cause_wait_s
        self._ids = itertools.count(1)
        self._queues: dict[int, asyncio.Queue[TokenChunk | EngineDead]] = {}
        self._reserved: set[int] = set()  # admitted, not submitted yet
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ready_event = asyncio.Event()
        self._death: str | None = None
        self._loss: asyncio.TimerHandle | None = None
        self._last_frame = time.monotonic()

    async def listen(self, address: str) -> str:
        """Open the socket ("unix:/path" or "tcp:host:0") and return the address that the engine connects to."""
        scheme, _, rest = address.partition(":")
        match scheme:
            case "unix":
                if not unix_path_fits(rest):
                    raise ValueError(f"socket path {rest!r} is longer than 107 bytes; use a shorter temporary folder")
                self._server = await asyncio.start_unix_server(self._serve, rest)
                self.address = address
            case "tcp":
                host, _, port = rest.rpartition(":")
                self._server = await asyncio.start_server(self._serve, host, int(port))
                self.address = f"tcp:{host}:{self._server.sockets[0].getsockname()[1]}"
            case _:
                raise ValueError(f"engine address {address!r}: write unix:/path or tcp:host:port")
        return self.address

    async def wait_ready(self, timeout_s: float) -> Ready:
        """Wait for the engine's Ready and return it; exempt what was allocated so far from garbage collection.

        Raises EngineDead if the engine dies first, TimeoutError if it takes too long.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready_event.wait()
        except TimeoutError:
            raise TimeoutError(f"the engine was not ready after {timeout_s:.0f} s") from None
        if self.ready is None:
            raise EngineDead(self._death or "the engine died while it started")
        freeze_start_up()
        return self.ready

    def new_id(self) -> int:
        """Return an id for the next Submit, unique on this socket."""
        return next(self._ids)

    def reserve(self, ids: Iterable[int]) -> None:
        """Count requests as pending that are about to be submitted, so that no others are admitted in their place."""
        self._reserved.update(ids)

    def release(self, ids: Iterable[int]) -> None:
        """Undo `reserve` for requests that will not be submitted; it does nothing for those that were."""
        self._reserved.difference_update(ids)

    @property
    def num_pending(self) -> int:
        """The number of requests reserved or submitted, and not finished."""
        return len(self._queues) + len(self._reserved)

    @property
    def dead(self) -> str | None:
        """Why the engine is dead; None if it is alive."""
        return self._death

    async def submit(self, request: Submit) -> AsyncGenerator[TokenChunk]:
        """Yield the request's chunks, one per engine step, until one has a finish_reason.

        Closing the iterator early, or cancelling its task, aborts the request in the engine. Raises EngineDead if the
        engine is dead or dies; a finish_reason "error" concerns this request alone.
        """
        self._reserved.discard(request.id)
        if self._death is not None or self._writer is None:
            raise EngineDead(self._death or "the engine is not connected yet")
        # Unbounded, but prompt and max_tokens bound what can be in it.
        queue: asyncio.Queue[TokenChunk | EngineDead] = asyncio.Queue()
        self._queues[request.id] = queue
        try:
            self._send(request)
            while True:
                chunk = await queue.get()
                if isinstance(chunk, EngineDead):
                    raise chunk
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            if self._queues.pop(request.id, None) is not None:
                self._send(Abort(id=request.id))

    def health(self) -> Health:
        """Check that frames keep arriving from the engine."""
        if self._death is not None:
            return Health(False, self._death)
        if self.ready is None:
            return Health(False, "the engine is starting")
        silent_s = time.monotonic() - self._last_frame
        if silent_s > self._progress_timeout_s:
            return Health(False, f"the engine is silent for {silent_s:.0f} s with {len(self._queues)} requests pending")
        return Health(True, self._drafter_loss)

    def fail(self, reason: str) -> None:
        """Declare the engine dead: pending requests and later calls of `submit` raise EngineDead."""
        if self._death is None:
            logger.error("engine lost with %d requests in flight: %s", len(self._queues), reason)
            self._end(reason)

    async def close(self) -> None:
        """Close the socket, which makes the engine stop."""
        if self._death is None:
            self._end("the service is shutting down")
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        if self._server is not None:
            self._server.close()

    def _end(self, reason: str) -> None:
        self._death = reason
        if self._loss is not None:
            self._loss.cancel()
        for queue in self._queues.values():
            queue.put_nowait(EngineDead(reason))
        self._queues.clear()
        self._ready_event.set()

    def _send(self, message: Message) -> None:
        # No drain(): frames are small and the engine reads them after every step.
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(message))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._writer is not None:
            logger.warning("rejected the connection of a second engine")
            writer.close()
            return
        self._writer = writer
        decoder = FrameDecoder()
        reason = "the engine closed its connection"
        try:
            while data := await reader.read(1 << 20):
                for message in decoder.feed(data):
                    self._take(message)
        except OSError as error:  # not the reason: a socket error does not say why the engine died
            logger.warning("the engine's connection broke: %s", error)
        except ValueError as error:
            reason = f"the engine's connection broke: {error}"
        except asyncio.CancelledError:
            self.fail("the service is shutting down")
            raise
        finally:
            writer.close()
            if self._death is None:
                self._loss = asyncio.get_running_loop().call_later(self._cause_wait_s, self.fail, reason)

    def _take(self, message: Message) -> None:
        self._last_frame = time.monotonic()
        match message:
            case StepOutput():
                self.stats = message.stats
                if message.stats.has_drafter:
                    self._drafter_loss = ""
                for chunk in message.chunks:
                    # Chunks of a request that was just aborted may still arrive.
                    if (queue := self._queues.get(chunk.id)) is not None:
                        queue.put_nowait(chunk)
                        if chunk.finish_reason is not None:  # finished, although its reader may not have read it yet
                            del self._queues[chunk.id]
            case DrafterLost():
                self.stats.has_drafter = False  # the step's own statistics follow
                self._drafter_loss = f"{message.reason.splitlines()[0]}; requests are answered without drafts"
                self.on_drafter_lost(message)
            case Ready():
                self.ready = message
                self._ready_event.set()
            case _:
                raise ValueError(f"the engine sent a {type(message).__name__}, which only the service may send")
