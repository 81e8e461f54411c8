"""The service's end of the engine socket: submits requests and distributes their token chunks.

The service listens and the engine connects (workers.comm.ipc). A lost engine may be replaced: its requests wait, and
the next engine goes on with them, with the tokens that they would have had. Nothing here blocks the event loop or
depends on Ray or HTTP. Call all methods in the loop that called `listen`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cluster.engine.neighbours import Neighbours
from cluster.engine.rank_exits import EngineDead
from workers.comm.ipc import (
    MAX_FRONTS,
    Abort,
    Connect,
    DrafterLost,
    EngineStats,
    FrameDecoder,
    HeadSwapped,
    Message,
    Ready,
    RequestStats,
    Resumption,
    StepOutput,
    Submit,
    SwapHead,
    TokenChunk,
    encode,
    unix_path_fits,
)
from workers.gc_freeze import freeze_start_up
from workers.settings import HeadAction

logger = logging.getLogger(__name__)

CAUSE_WAIT_S = 2.0
"""Time between losing the connection and declaring the engine dead. The watcher of the ranks may report the cause
meanwhile."""

MAX_SWAPS = 16
"""The most swaps of the draft head that are remembered."""
SERVICE_WEIGHT = 1 / 16
"""Share of the last request in the average time that requests spend in the running batch."""
MAX_REPLAYS = 2
"""How often a request is sent again without gaining a token before it fails. It may be what kills the engines."""
MAX_UNREAD = 1 << 17
"""Chunks that may wait for all readers together, some 100 MB. Each log probability counts as one more."""


Direct = Callable[[list[TokenChunk]], bool]


class DeadlyRequest(EngineDead):
    """Several engines have died with this request: it is not to be sent again."""


class SlowReader(Exception):
    """More waited for the reader of a request than for any other when there was too much."""


class Health(NamedTuple):
    """Says whether the engine answers."""

    ok: bool
    reason: str  # why not; if it does, what is amiss all the same, or nothing


class _Inboxes:
    """Those of all readers for whom chunks wait."""

    def __init__(self) -> None:
        self.size = 0
        self._inboxes: set[_Inbox] = set()
        self._untold: dict[_Inbox, None] = {}  # in the order of their chunks

    def added(self, inbox: _Inbox, size: int) -> None:
        self.size += size
        self._inboxes.add(inbox)
        self._untold[inbox] = None

    def deliver(self) -> None:
        """Tell readers of what came since the last call."""
        untold, self._untold = self._untold, {}
        for inbox in untold:
            inbox.deliver()

    def emptied(self, inbox: _Inbox) -> None:
        self.size -= inbox.size
        self._inboxes.discard(inbox)

    def largest(self) -> _Inbox:
        return max(self._inboxes, key=lambda inbox: inbox.size)


class _Inbox:
    """Holds what came for one reader. direct: see `EngineClient.arrivals`."""

    def __init__(self, inboxes: _Inboxes, direct: Direct | None = None) -> None:
        self.size = 0
        self._inboxes, self._direct = inboxes, direct
        self._chunks: list[TokenChunk] = []
        self._death: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, chunk: TokenChunk) -> None:
        scores = chunk.logprobs or chunk.prompt_logprobs
        size = 1 + (sum(len(score.top) for score in scores) if scores else 0)
        self.size += size
        self._inboxes.added(self, size)
        self._chunks.append(chunk)

    def deliver(self) -> None:
        """Let `direct` take what came while the reader waits; wake the reader otherwise."""
        if self._reader is None or self._reader.done() or not self._chunks:
            return
        try:
            is_done = self._direct is not None and self._direct(self._chunks)
        except Exception as error:
            self.clear()
            self.fail(error)
            return
        if is_done:
            self.clear()
        else:
            self._wake()

    def fail(self, death: Exception) -> None:
        self._death = death
        self._wake()

    async def take(self) -> list[TokenChunk]:
        """Wait for chunks and take all of them. Raises what it failed with when there are none, and none will come."""
        if not self._chunks and self._death is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        taken = self.clear()
        if not taken and self._death is not None:
            raise self._death
        return taken

    def clear(self) -> list[TokenChunk]:
        self._inboxes.emptied(self)
        taken, self._chunks, self.size = self._chunks, [], 0
        return taken

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A submitted request, and what it has been sent."""

    submit: Submit
    inbox: _Inbox  # of all requests that were submitted together
    running: set[int]  # ids of those of them whose last chunk has not been read
    output: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    stats: RequestStats = field(default_factory=RequestStats)
    num_sent: int = 0  # how many engines have had it since its last token
    submitted_s: float = field(default_factory=lambda: time.monotonic())

    def take(self, chunk: TokenChunk) -> None:
        self.output += chunk.tokens
        self.num_prompt_logprobs += len(chunk.prompt_logprobs or ())
        self.stats = chunk.stats or self.stats
        self.num_sent = 0
        self.inbox.put(chunk)

    def next_submit(self) -> Submit:
        self.num_sent += 1
        if not self.output and not self.num_prompt_logprobs:
            return self.submit
        resumption = Resumption(output=self.output, num_prompt_logprobs=self.num_prompt_logprobs, stats=self.stats)
        return replace(self.submit, resumption=resumption)


class EngineClient:
    """The client of one engine: `listen`, start the engine with `address`, `wait_ready`, `submit`, ..., `close`.

    on_loss: called with the reason when the connection breaks and nobody has reported the engine's death within
    `cause_wait_s`; by default the engine is dead then. To replace a lost engine, call `interrupt`, and `listen` and
    `wait_ready` again for the next one. neighbours: the engine's other fronts, if there are any.
    """

    def __init__(self, *, cause_wait_s: float = CAUSE_WAIT_S, neighbours: Neighbours | None = None) -> None:
        self.address = ""
        self.ready: Ready | None = None
        self.stats = EngineStats()
        self.service_s = 0.0
        """Average seconds from joining the running batch to the last token; 0 before the first request has ended."""
        self.on_loss: Callable[[str], None] = self.fail
        self.on_drafter_lost: Callable[[DrafterLost], None] = lambda _: None
        self.drafter_lost: DrafterLost | None = None  # while the engine is without its drafter
        self.swaps: deque[HeadSwapped] = deque(maxlen=MAX_SWAPS)
        """The last swaps of the draft head, in turn."""
        self.num_swaps = 0
        self._asked_swaps: dict[int, asyncio.Future[HeadSwapped]] = {}
        self._cause_wait_s = cause_wait_s
        self._neighbours = neighbours
        self._ids = itertools.count(1) if neighbours is None else itertools.count(neighbours.number, MAX_FRONTS)
        self._pending: dict[int, _Pending] = {}
        self._reserved: set[int] = set()  # admitted, not submitted yet
        self._inboxes = _Inboxes()
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._start: asyncio.Event = asyncio.Event()  # the engine is ready, or it has died while it started
        self._interruption: str | None = None  # why there is no engine at the moment
        self._death: str | None = None
        self._loss: asyncio.TimerHandle | None = None

    async def listen(self, address: str) -> str:
        """Open the socket ("unix:/path" or "tcp:host:0") and return the address that the engine connects to."""
        if self._server is not None:
            self._server.close()
        self._start = asyncio.Event()
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
                await self._start.wait()
        except TimeoutError:
            raise TimeoutError(f"the engine was not ready after {timeout_s:g} s; raise startup_timeout") from None
        if (reason := self._death or self._interruption) is not None:
            raise EngineDead(reason)
        assert self.ready is not None
        freeze_start_up()
        return self.ready

    @property
    def head_path(self) -> str:
        """The folder of the head that was swapped in last; "" = the configured one drafts."""
        return self.swaps[-1].path if self.swaps else ""

    def new_id(self) -> int:
        """Return an id for the next Submit, unique on this socket."""
        return next(self._ids)

    @contextmanager
    def places(self, num: int) -> Iterator[list[int]]:
        """Yield ids for `num` Submits, which count as pending from now on: no others are admitted in their place.

        At the end of the context, those that have not been submitted no longer count.
        """
        ids = [self.new_id() for _ in range(num)]
        self._reserved.update(ids)
        if self._neighbours is not None:
            for id in ids:
                self._neighbours.put(id)
        try:
            yield ids
        finally:
            for id in self._reserved.intersection(ids):
                self._reserved.discard(id)
                if self._neighbours is not None:
                    self._neighbours.drop(id)

    def admitting(self) -> AbstractContextManager[None]:
        """Keep other fronts of the engine from admitting requests meanwhile."""
        return nullcontext() if self._neighbours is None else self._neighbours.admitting()

    @property
    def num_pending(self) -> int:
        """The number of requests reserved or submitted, and not finished, of all fronts."""
        return len(self._pending) + len(self._reserved) + (self._neighbours.num_before() if self._neighbours else 0)

    def num_before(self, priority: int) -> int:
        """Return how many of them are served before a new request of this priority; reserved ones all count."""
        own = len(self._reserved) + sum(own.submit.priority <= priority for own in self._pending.values())
        return own + (self._neighbours.num_before(priority) if self._neighbours else 0)

    @property
    def dead(self) -> str | None:
        """Why the engine is dead; None if it is alive."""
        return self._death

    async def submit(self, *requests: Submit) -> AsyncGenerator[TokenChunk]:
        """Yield the chunks of these requests, one for each and engine step; see `arrivals`."""
        async with aclosing(self.arrivals(*requests)) as arrivals:
            async for chunks in arrivals:
                for chunk in chunks:
                    yield chunk

    async def arrivals(self, *requests: Submit, direct: Direct | None = None) -> AsyncGenerator[list[TokenChunk]]:
        """Yield the chunks that have come of these requests, until each had one with a finish_reason.

        A request has one chunk per engine step. A reader that is behind gets those of several steps at once. Closing
        the iterator early, or cancelling its task, aborts all of them in the engine, `abort` one alone. Raises
        EngineDead if the engine is dead or dies and is not replaced; a finish_reason "error" concerns one request
        alone.

        direct: called with what comes while the reader waits. It returns whether it has done the reader's work, which
        never hears of these chunks then. What it raises, the iterator raises. It leaves each last chunk to the reader.
        """
        running = {request.id for request in requests}
        ids = tuple(running)
        if self._death is not None or (self._writer is None and self._interruption is None):
            raise EngineDead(self._death or "the engine is not connected yet")
        inbox = _Inbox(self._inboxes, direct)
        try:
            for request in requests:
                self._reserved.discard(request.id)
                pending = self._pending[request.id] = _Pending(submit=request, inbox=inbox, running=running)
                if self._neighbours is not None:
                    self._neighbours.put(request.id, request.priority)
                if self._interruption is None:
                    self._send(pending.next_submit())
            while running:
                chunks = await inbox.take()
                running.difference_update(chunk.id for chunk in chunks if chunk.finish_reason is not None)
                yield chunks
        finally:
            inbox.clear()
            for id in ids:
                self.abort(id)

    def name_front(self, number: int, address: str) -> None:
        """Tell the engine, if there is one, where another front listens. Do so again and again; see `Connect`."""
        self._send(Connect(number=number, address=address))

    async def swap_head(self, path: str, action: HeadAction = HeadAction.TAKE, num_steps: int = 0) -> HeadSwapped:
        """Let the drafter load another head and go on with it, or what else `action` says; return the end.

        num_steps: to score it in. Raises EngineDead.
        """
        if self._writer is None or self.ready is None:
            raise EngineDead(self._death or self._interruption or "the engine is not connected yet")
        id = self.new_id()
        ended = self._asked_swaps[id] = asyncio.get_running_loop().create_future()
        try:
            self._send(SwapHead(id=id, path=path, action=action, num_steps=num_steps))
            return await ended
        finally:
            del self._asked_swaps[id]

    def _fail_swaps(self, reason: str) -> None:
        for ended in self._asked_swaps.values():
            if not ended.done():
                ended.set_exception(EngineDead(reason))

    def abort(self, id: int) -> None:
        """End a request that is not finished. Call it while `arrivals` yields; what has come is still yielded."""
        if (pending := self._forget(id)) is not None:
            pending.running.discard(id)
            self._send(Abort(id=id))

    def _forget(self, id: int) -> _Pending | None:
        """Stop counting a request as pending; return what was submitted of it."""
        if self._neighbours is not None:
            self._neighbours.drop(id)
        return self._pending.pop(id, None)

    def health(self) -> Health:
        """Say whether there is an engine. `HangMonitor` notices one that hangs."""
        if self._death is not None:
            return Health(False, self._death)
        if self._interruption is not None:
            return Health(True, f"requests wait for a new engine: {self._interruption.splitlines()[0]}")
        if self.ready is None:
            return Health(False, "the engine is starting")
        if (lost := self.drafter_lost) is not None:
            return Health(True, f"{lost.reason.splitlines()[0]}; requests are answered without drafts")
        return Health(True, self.stats.head_note)

    def interrupt(self, reason: str) -> None:
        """Let requests wait for the next engine, because this one is lost.

        Those that were sent again `MAX_REPLAYS` times without gaining a token fail.
        """
        if self._death is not None:
            return
        logger.error("engine lost with %d requests in flight: %s", len(self._pending), reason)
        self._interruption, self.drafter_lost = reason, None
        self._disconnect()
        self._fail_swaps(reason)
        for id, pending in list(self._pending.items()):
            if pending.num_sent > MAX_REPLAYS:
                self._forget(id)
                pending.inbox.fail(DeadlyRequest(f"{pending.num_sent} engines have died with this request: {reason}"))
        self._start.set()

    def fail(self, reason: str) -> None:
        """Declare the engine dead: pending requests and later calls of `submit` raise EngineDead."""
        if self._death is None:
            logger.error("engine lost with %d requests in flight: %s", len(self._pending), reason)
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
        self._fail_swaps(reason)
        for id, pending in list(self._pending.items()):
            pending.inbox.fail(EngineDead(reason))
            self._forget(id)
        self._start.set()

    def _disconnect(self) -> None:
        if self._loss is not None:
            self._loss.cancel()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

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
                self._inboxes.deliver()
        except OSError as error:  # not the reason: a socket error does not say why the engine died
            logger.warning("the engine's connection broke: %s", error)
        except ValueError as error:
            reason = f"the engine's connection broke: {error}"
        except asyncio.CancelledError:
            self.fail("the service is shutting down")
            raise
        finally:
            writer.close()
            if self._death is None and self._writer is writer:
                self._loss = asyncio.get_running_loop().call_later(self._cause_wait_s, self.on_loss, reason)

    def _take(self, message: Message) -> None:
        match message:
            case StepOutput():
                self.stats = message.stats
                if message.stats.has_drafter:
                    self.drafter_lost = None
                for chunk in message.chunks:
                    # Chunks of a request that was just aborted may still arrive.
                    if (pending := self._pending.get(chunk.id)) is not None:
                        pending.take(chunk)
                        if chunk.finish_reason is not None:  # finished, although its reader may not have read it yet
                            self._forget(chunk.id)
                            self._note_service(pending, chunk)
                while self._inboxes.size > MAX_UNREAD:
                    self._drop(self._inboxes.largest())
            case DrafterLost():
                self.stats.has_drafter = False  # the step's own statistics follow
                self.drafter_lost = message
                self.on_drafter_lost(message)
            case HeadSwapped():
                if message.error is None and message.action == HeadAction.TAKE:
                    self.swaps.append(message)
                    self.num_swaps += 1
                    self.stats.num_head_trees = self.stats.num_head_accepted_tokens = 0  # the step's own follow
                if (ended := self._asked_swaps.get(message.id)) is not None and not ended.done():
                    ended.set_result(message)
            case Ready():
                self.ready, self._interruption = message, None
                for pending in self._pending.values():
                    self._send(pending.next_submit())
                self._start.set()
            case _:
                raise ValueError(f"the engine sent {type(message).__name__}, which only the service may send")

    def _drop(self, inbox: _Inbox) -> None:
        """End what one reader does not read."""
        inbox.fail(SlowReader("the stream was read too slowly, and too much waited for its reader"))
        inbox.clear()
        for id in [id for id, own in self._pending.items() if own.inbox is inbox]:
            self._forget(id)
            self._send(Abort(id=id))

    def _note_service(self, pending: _Pending, last: TokenChunk) -> None:
        if last.finish_reason == "error":
            return
        seconds = time.monotonic() - pending.submitted_s - last.queued_s
        weight = SERVICE_WEIGHT if self.service_s else 1.0
        self.service_s += weight * (seconds - self.service_s)
