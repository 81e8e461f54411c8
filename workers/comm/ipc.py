"""The socket between a service front and its engine: length-prefixed msgpack frames, duplex.

The front sends `Submit`, `Abort` and `SwapHead`. The engine sends a `StepOutput` for every step that produced output, a
`DrafterLost` if it loses its drafter, and a `HeadSwapped` for each `SwapHead`. On two cores, a frame takes 0.2 ms from
write to read, where a Ray streaming method takes 1.1 ms. `FrameSocket` is the engine's end, which never blocks the step
loop, and `FrontSockets` that of an engine with several fronts. The asyncio end needs only `encode` and `FrameDecoder`.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import add, attrgetter
from typing import Any, TypeVar, cast, get_args

import msgpack

from workers.settings import Constraints, SamplingSettings

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20
MAX_UNREAD_BYTES = 4 << 20
"""An engine takes no step while its first front has left more than this unread. Another front may leave a frame's
largest size unread; then it is lost."""
MAX_FRONTS = 64
"""A front with the number k has the request ids k, k + MAX_FRONTS and so on. 0 is the first, or only one."""
QUIET_S = 1.0
"""How often a front without chunks gets the engine's statistics."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """One request's `speculative` object. None means the server's setting."""

    enabled: bool = True
    num_speculative_tokens: int | None = None
    auto: bool | None = None
    rules: dict[str, float] = field(default_factory=dict)  # those of `TreeRules` that the request sets
    acceptance: str | None = None  # "coupled" | "rejection"
    draft_probs: bool | None = None


@dataclass(slots=True)
class _NodeCounts:
    """Node counts, in lists by depth, starting at 1. Drafted nodes are pruned or verified; accepted ones are among the
    verified."""

    num_drafts: int = 0  # steps that verified at least one draft node
    pruned_per_depth: list[int] = field(default_factory=list)  # removed by pruning
    verified_per_depth: list[int] = field(default_factory=list)  # went through the target
    accepted_per_depth: list[int] = field(default_factory=list)  # emitted, so not those behind the end of the output
    num_copied_tokens: int = 0  # verified nodes from prompt lookup instead of the drafter ...
    num_accepted_copied_tokens: int = 0  # ... and those of them that were accepted

    def count_nodes(self, pruned: Sequence[int], verified: Sequence[int], num_accepted: int) -> None:
        """Add one tree: its nodes by depth, and the number of its accepted tokens that were emitted."""
        self.add_nodes(pruned, verified, [1] * num_accepted)

    def add_nodes(self, pruned: Sequence[int], verified: Sequence[int], accepted: Sequence[int]) -> None:
        """Add nodes by depth."""
        for total, added in (
            (self.pruned_per_depth, pruned),
            (self.verified_per_depth, verified),
            (self.accepted_per_depth, accepted),
        ):
            if len(added) > len(total):
                total += [0] * (len(added) - len(total))
            if added:
                total[: len(added)] = map(add, total, added)

    @property
    def num_draft_tokens(self) -> int:
        """Nodes that were drafted."""
        return sum(self.pruned_per_depth) + sum(self.verified_per_depth)

    @property
    def num_verified_tokens(self) -> int:
        """Drafted nodes that went through the target."""
        return sum(self.verified_per_depth)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted nodes that were accepted and emitted."""
        return sum(self.accepted_per_depth)


@dataclass(slots=True)
class RequestStats(_NodeCounts):
    """Speculation statistics of one request."""

    def truncate(self, num_accepted: int, num_kept: int, *, is_copied: bool) -> RequestStats:
        """Return the statistics as if only `num_kept` of the last step's `num_accepted` tokens had been emitted."""
        num_lost = max(0, num_accepted - num_kept)
        return replace(
            self,
            accepted_per_depth=[
                number - (num_kept <= depth < num_accepted) for depth, number in enumerate(self.accepted_per_depth)
            ],
            num_accepted_copied_tokens=self.num_accepted_copied_tokens - num_lost * is_copied,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """What a request has been sent by an engine that was lost. Another engine goes on from there."""

    output: list[int]
    num_prompt_logprobs: int  # prompt tokens whose log-probabilities were sent
    stats: RequestStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A new request. The front chooses `id`, which is unique on this socket."""

    id: int
    prompt: list[int]
    max_tokens: int
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    cache_salt: str | None = None  # only requests with the same salt share cached prefixes
    speculation: Speculation = Speculation()
    has_trees: bool = False  # the chunks carry the tree of each step
    num_prompt_logprobs: int | None = None  # most likely tokens to report per prompt token; None = no log-probabilities
    resumption: Resumption | None = None  # in an engine that was lost
    priority: int = 0  # lower is served earlier
    may_learn: bool = True  # a drafter that learns may keep its tokens and features for a while
    tenant: int = 0  # which of those this is for whom it may learn, below 2**31; 0 = it tells none apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Stop a request. Unknown ids are ignored, because the request may just have finished."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Another front listens at `address`. The first front says so again and again; one that is connected stays so."""

    number: int  # 1 .. MAX_FRONTS - 1
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """The log probability of one token in the target's raw distribution, before any sampling parameter."""

    logprob: float
    rank: int  # 1 = the most likely token
    top: list[tuple[int, float]]  # (token, logprob) of the most likely tokens in descending order, or, if the request
    # chose tokens, of the token itself and of these in its order


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRecord:
    """One request's tree in one step: the verified nodes, the root first, then pruned ones (see `TreeTrace`).

    Example: root 7 with children 9 and 4, of which 9 was accepted: tokens [7, 9, 4], parents [-1, 0, 0],
    depths [0, 1, 1], probs [None, 0.6, 0.2], weights [1.0, 0.7, 0.1], reasons [0, 0, 0], path [1].
    """

    tokens: list[int]  # -1 = children that were not drafted
    parents: list[int]
    depths: list[int]
    probs: list[float | None]  # q(token | parent); None = unknown
    weights: list[float | None]  # estimated probability to survive verification; None = unknown
    reasons: list[int]  # workers.settings.PruneReason
    path: list[int]  # the accepted nodes, in order
    draft_ms: float | None  # of the whole step: the exchange with the drafter, if there was one ...
    verify_ms: float  # ... and the target's forward and the verdicts


@dataclass(slots=True)
class TokenChunk:
    """The tokens that one request gained in one step, or the log-probabilities of prompt tokens that it computed.

    It is never changed. There is one for every request in every step: a frozen one takes three times as long to make,
    and one with keywords alone seven times as long to decode.
    """

    id: int
    tokens: list[int]
    finish_reason: str | None = None  # "stop" | "length" | "error"; None = not finished
    stop_token: int | None = None  # the stop or EOS token if finish_reason is "stop" (also in `tokens`)
    error: str | None = None
    error_code: str | None = None  # set if the error lies in the request; None = in the engine
    logprobs: list[TokenLogprobs] | None = None  # one per token, if requested
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_accepted: int = 0  # leading `tokens` that were accepted draft tokens ...
    is_copied: bool = False  # ... or, if this is set, tokens from prompt lookup
    stats: RequestStats | None = None  # so far; None with an error
    tree: TreeRecord | None = None  # if requested
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the next prompt tokens, from the second on, if requested
    queued_s: float = field(default=0.0, compare=False)
    """Seconds that the request waited in the engine before it first joined the running batch."""


@dataclass(slots=True, kw_only=True)
class EngineStats(_NodeCounts):
    """Cumulative counters since the engine started, and current gauges. Times are in seconds.

    The engine updates one instance; every StepOutput carries a snapshot of it.
    """

    steps: int = 0
    requests_finished: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_trees: int = 0  # drafted
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # prompt tokens looked up ...
    prefix_cache_hits: int = 0  # ... and found
    draft_seconds: float = 0.0  # on the drafter's clock
    transfer_seconds: float = 0.0  # the rest of rank 0's wait for drafts: packing, transfer both ways, wake-up
    verify_seconds: float = 0.0  # packing, forward, acceptance
    forward_seconds: float = 0.0  # part of it: forward pass and sampling, until the tokens are on the host
    accept_seconds: float = 0.0  # part of it: verifying the trees against these tokens
    step_seconds: float = 0.0
    num_drafter_losses: int = 0
    num_head_swaps: int = 0
    has_drafter: bool = False  # connected now; always False for a service without one
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # 0 .. 1
    lacks_pages: bool = False  # requests wait for KV pages
    num_head_trees: int = 0  # of the present draft model that were verified, without prompt lookup ...
    num_head_accepted_tokens: int = 0  # ... and what was accepted of them
    greedy_acceptance: list[float] = field(default_factory=list)  # accepted share by depth, of some 500 recent trees
    sampled_acceptance: list[float] = field(default_factory=list)  # the same at temperatures above 0
    head_note: str = ""  # what is amiss with these shares


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The output of one step."""

    chunks: list[TokenChunk]
    stats: EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The engine's first frame: the weights are loaded, and it serves."""

    topology: list[dict[str, str | int]]  # one per rank: see `World.gather_topology`
    max_model_len: int
    vocab_size: int
    num_pages: int
    num_state_checkpoints: int = 0  # see `EngineConfig`; 0 for models without recurrent states


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterLost:
    """The engine has lost its drafter and goes on without one. A new drafter may connect to `link`."""

    reason: str
    link: str  # holds a secret


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapHead:
    """Let the drafter go on with another head of the same method and shape, or score it."""

    id: int  # of the front's requests
    path: str  # the head's folder
    action: int = 0  # HeadAction
    num_steps: int = 0  # to score it in


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSwapped:
    """The end of a SwapHead, told to all fronts: from here on a head that was to be taken drafts, unless it failed."""

    id: int
    path: str
    action: int = 0  # HeadAction
    error: str | None = None
    scores: str = ""  # JSON, see `Canary.told`; "" = no head is being scored
    old_path: str = ""
    num_old_trees: int = 0  # of the old head, as in `EngineStats`
    num_old_accepted_tokens: int = 0


Message = Submit | Abort | Connect | StepOutput | Ready | DrafterLost | SwapHead | HeadSwapped
_KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Encode one frame: 4 bytes of little-endian length, then msgpack [kind, fields in class order].

    Raises ValueError if the frame is too long, so that the sender fails instead of the reader.
    """
    fields: tuple[object, ...] = _values(message)
    if isinstance(message, StepOutput):  # a call for each chunk would take as long as all the rest
        fields = (list(map(_getter(TokenChunk), message.chunks)), message.stats)
    body = msgpack.packb((type(message).__name__, fields), default=_values)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a {type(message).__name__} of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def _values(value: Any) -> tuple[object, ...]:
    """Return a dataclass's field values in order (`dataclasses.asdict` would copy every token of a prompt)."""
    return _getter(type(value))(value)  # type: ignore[arg-type]  # types are hashable


@cache
def _getter(kind: type) -> Callable[[object], tuple[object, ...]]:
    names = tuple(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda value: (get(value),)


def _rebuild(kind: str, raw: list[Any]) -> Message:
    fields = _named(_KINDS[kind], raw)
    match kind:
        case "Submit":
            sampling = _named(SamplingSettings, fields["sampling"])
            sampling["constraints"] = Constraints(**_named(Constraints, sampling["constraints"]))
            fields["sampling"] = SamplingSettings(**sampling)
            fields["speculation"] = Speculation(**_named(Speculation, fields["speculation"]))
            if fields["resumption"] is not None:
                resumption = _named(Resumption, fields["resumption"])
                resumption["stats"] = RequestStats(**_named(RequestStats, resumption["stats"]))
                fields["resumption"] = Resumption(**resumption)
        case "StepOutput":
            fields["stats"] = EngineStats(**_named(EngineStats, fields["stats"]))
            fields["chunks"] = [_chunk(chunk) for chunk in fields["chunks"]]
    return _KINDS[kind](**fields)


def _chunk(raw: list[Any]) -> TokenChunk:
    chunk: Any = _positional(TokenChunk, raw)
    if chunk.stats is not None:
        chunk.stats = _positional(RequestStats, chunk.stats)
    for name in ("logprobs", "prompt_logprobs"):
        if (entries := getattr(chunk, name)) is not None:
            scores = [_named(TokenLogprobs, entry) for entry in entries]
            setattr(chunk, name, [TokenLogprobs(**score | {"top": list(map(tuple, score["top"]))}) for score in scores])
    if chunk.tree is not None:
        chunk.tree = TreeRecord(**_named(TreeRecord, chunk.tree))
    return cast(TokenChunk, chunk)


def _positional(kind: type[T], raw: list[Any]) -> T:
    if len(raw) != len(kind.__dataclass_fields__):  # type: ignore[attr-defined]
        raise ValueError(f"a {kind.__name__} of {len(raw)} fields")
    return kind(*raw)


def _named(kind: type, raw: list[Any]) -> dict[str, Any]:
    return dict(zip(kind.__dataclass_fields__, raw, strict=True))  # type: ignore[attr-defined]


class FrameDecoder:
    """Decodes a byte stream, in pieces of any size, into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that `data` completes. Raises ValueError for an invalid frame."""
        self._buffer += data
        messages: list[Message] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {length} bytes: the peer does not speak this protocol")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            try:
                kind, raw = msgpack.unpackb(bytes(self._buffer[_LENGTH.size : end]), strict_map_key=False)
                messages.append(_rebuild(kind, raw))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"a frame that holds no valid message: {error!r}") from error
            del self._buffer[:end]
        return messages


class FrontGone(ConnectionError):
    """The front closed its end of the socket."""


class FrameSocket:
    """The engine's end, which never blocks. `poll` also flushes what an earlier `send` could not write."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = FrameDecoder()
        self._unsent = bytearray()

    @property
    def is_behind(self) -> bool:
        """Return whether the front has left so much unread that it is to read before there is more."""
        return len(self._unsent) > MAX_UNREAD_BYTES

    def send(self, message: Message) -> None:
        """Send a message. Raises FrontGone if the front has closed the socket."""
        self._unsent += encode(message)
        self._flush()

    def poll(self, timeout: float = 0.0) -> list[Message]:
        """Return the received messages, waiting up to `timeout` seconds for the first. Raises FrontGone at EOF."""
        return self._receive() if self in _ready([self], timeout) else []

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def fileno(self) -> int:
        """Return the socket's descriptor, for `select`."""
        return self._sock.fileno()

    def _receive(self) -> list[Message]:
        try:
            data = self._sock.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError as error:
            raise FrontGone(str(error)) from error
        if not data:
            raise FrontGone("the service front closed the engine's socket")
        return self._decoder.feed(data)

    def _flush(self) -> None:
        try:
            sent = self._sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError as error:
            raise FrontGone(str(error)) from error
        del self._unsent[:sent]


def _ready(sockets: Sequence[FrameSocket], timeout: float) -> list[FrameSocket]:
    """Return those that have something to read, waiting for that; flush those that can be written."""
    readable, writable, _ = select.select(sockets, [own for own in sockets if own._unsent], [], timeout)
    for own in writable:
        own._flush()
    return readable


class FrontSockets(FrameSocket):
    """The engine's end where its front may name others with `Connect`. Each has the chunks of its own requests.

    Another front that goes, or leaves too much unread, loses its connection, which aborts its requests; it may be named
    again. All have the engine's messages. ready: what they are told first.
    """

    def __init__(self, sock: socket.socket, ready: Ready) -> None:
        super().__init__(sock)
        self._ready = ready
        self._others: dict[int, FrameSocket] = {}  # by number
        self._ids: defaultdict[int, set[int]] = defaultdict(set)  # their requests that run
        self._told_s: defaultdict[int, float] = defaultdict(float)
        self._lost: list[Message] = []  # aborts of requests whose front has gone
        super().send(ready)

    def send(self, message: Message) -> None:
        """Send each front its part of a message. Raises FrontGone if the first front has closed its socket."""
        if not isinstance(message, StepOutput) or not self._others:
            for number in list(self._others):
                self._attempt(number, partial(FrameSocket.send, message=message))
            super().send(message)
            return
        parts: defaultdict[int, list[TokenChunk]] = defaultdict(list)
        for chunk in message.chunks:
            number = chunk.id % MAX_FRONTS
            if not number or chunk.id in self._ids[number]:  # not of a front that has gone
                parts[number].append(chunk)
            if chunk.finish_reason is not None:
                self._ids[number].discard(chunk.id)
        now = time.monotonic()
        for number in (*self._others, 0):
            if number in parts or now - self._told_s[number] >= QUIET_S:
                self._told_s[number], part = now, replace(message, chunks=parts[number])
                if number:
                    self._attempt(number, partial(FrameSocket.send, message=part))
                else:
                    super().send(part)

    def poll(self, timeout: float = 0.0) -> list[Message]:
        """Return the messages of all fronts; see `FrameSocket.poll`. Raises FrontGone if the first has gone."""
        fronts: list[FrameSocket] = [self, *self._others.values()]
        try:
            readable = _ready(fronts, 0.0 if self._lost else timeout)
        except FrontGone:  # which of them?
            readable = fronts
        messages: list[Message] = []
        for number, other in list(self._others.items()):
            for message in (self._attempt(number, FrameSocket._receive) if other in readable else None) or ():
                if isinstance(message, Submit):
                    self._ids[number].add(message.id)
                elif isinstance(message, Abort):
                    self._ids[number].discard(message.id)
                messages.append(message)
        for message in self._receive() if self in readable else ():
            if isinstance(message, Connect):
                self._connect(message)
            else:
                messages.append(message)
        lost, self._lost = self._lost, []
        return messages + lost

    def close(self) -> None:
        """Close all sockets."""
        for other in self._others.values():
            other.close()
        super().close()

    def _connect(self, told: Connect) -> None:
        if told.number not in self._others:
            with suppress(OSError):  # it does not listen yet
                self._others[told.number] = FrameSocket(connect(told.address))
                self._attempt(told.number, partial(FrameSocket.send, message=self._ready))

    def _attempt(self, number: int, act: Callable[[FrameSocket], T]) -> T | None:
        """Do something with another front's socket; forget the front if it has gone or does not read."""
        other = self._others[number]
        try:
            done = act(other)
            if len(other._unsent) <= MAX_FRAME_BYTES:
                return done
        except (FrontGone, ValueError):
            pass
        other.close()
        del self._others[number]
        self._lost += [Abort(id=id) for id in self._ids.pop(number, ())]
        return None


def connect(address: str) -> socket.socket:
    """Connect to "unix:/path" or "tcp:host:port" (the engine connects, the front listens)."""
    scheme, _, rest = address.partition(":")
    match scheme:
        case "unix":
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(rest)
            except OSError:
                sock.close()
                raise
        case "tcp":
            host, _, port = rest.rpartition(":")
            sock = socket.create_connection((host, int(port)))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        case _:
            raise ValueError(f"engine address {address!r}: write unix:/path or tcp:host:port")
    return sock


def unix_path_fits(path: str) -> bool:
    """Return True if the path fits the 107 bytes of an AF_UNIX address."""
    return len(os.fsencode(path)) <= 107
