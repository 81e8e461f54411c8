"""The socket between a service front and its engine: length-prefixed msgpack frames, duplex.

The front sends `Submit` and `Abort`; the engine sends one `StepOutput` per step that has anything to tell. Measured
on two cores: 0.2 ms from write to read, where a Ray streaming method takes 1.1 ms. `FrameSocket` is the engine's
end: it never blocks the step loop. The asyncio end needs only `encode` and `Decoder`.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from typing import Any

import msgpack

from workers.types import Constraints, SamplingParams

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """One request's `speculative` object; None = the server's setting."""

    enabled: bool = True
    num_speculative_tokens: int | None = None
    auto: bool | None = None
    min_prob: float | None = None
    path_prob: float | None = None
    acceptance: str | None = None  # "coupled" | "rejection"
    draft_probs: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A new request. `id` is chosen by the front and unique on this socket."""

    id: int
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    cache_salt: str | None = None  # prefixes are shared among requests of one salt only
    speculation: Speculation = Speculation()


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Stop a request and forget it; unknown ids are ignored (it may just have finished)."""

    id: int


class _NodeCounts:
    """Node counts by depth, the first entry being depth 1. Drafted = pruned + verified; accepted are verified too."""

    __slots__ = ()
    pruned_per_depth: list[int]
    verified_per_depth: list[int]
    accepted_per_depth: list[int]  # of what came out: tokens accepted behind an answer's end are not counted

    def count_nodes(self, pruned: Sequence[int], verified: Sequence[int], num_accepted: int) -> None:
        """Adds one tree: nodes by depth, and how many of its accepted path came out."""
        for total, added in (
            (self.pruned_per_depth, pruned),
            (self.verified_per_depth, verified),
            (self.accepted_per_depth, [1] * num_accepted),
        ):
            total += [0] * (len(added) - len(total))
            for depth, number in enumerate(added):
                total[depth] += number

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.pruned_per_depth) + sum(self.verified_per_depth)

    @property
    def num_verified_tokens(self) -> int:
        return sum(self.verified_per_depth)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_per_depth)


@dataclass(slots=True, kw_only=True)
class RequestStats(_NodeCounts):
    """What speculation did for one request so far."""

    num_drafts: int = 0  # steps that verified at least one draft node
    pruned_per_depth: list[int] = field(default_factory=list)  # the tree had room for them, pruning kept them out
    verified_per_depth: list[int] = field(default_factory=list)  # went through the target
    accepted_per_depth: list[int] = field(default_factory=list)
    num_copied_tokens: int = 0  # of the verified: copied from earlier text, not drafted ...
    num_accepted_copied_tokens: int = 0  # ... and accepted

    def cut(self, num_accepted: int, num_kept: int, *, is_copied: bool) -> RequestStats:
        """These, if of the `num_accepted` tokens that the last step accepted no more than `num_kept` had come out."""
        num_lost = max(0, num_accepted - num_kept)
        return replace(
            self,
            accepted_per_depth=[
                number - (num_kept <= depth < num_accepted) for depth, number in enumerate(self.accepted_per_depth)
            ],
            num_accepted_copied_tokens=self.num_accepted_copied_tokens - num_lost * is_copied,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """One emitted token in the target's own distribution, before any of the request's parameters touch it."""

    logprob: float
    rank: int  # 1 = the most likely token
    top: list[tuple[int, float]]  # (token, logprob) of the most likely tokens, best first


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """All tokens one request gained in one step, as one chunk."""

    id: int
    tokens: list[int]
    finish_reason: str | None = None  # "stop" | "length" | "error"; None = goes on
    stop_token: int | None = None  # the stop or EOS token, when finish_reason is "stop" (it is in `tokens`)
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None  # one per token, if the request asked for them
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache instead of computed
    num_accepted: int = 0  # of `tokens` the leading ones, which were drafted ...
    is_copied: bool = False  # ... or, if this is set, copied from earlier text
    stats: RequestStats | None = None  # so far; absent with an error


@dataclass(slots=True, kw_only=True)
class EngineStats(_NodeCounts):
    """Cumulative counters since the engine started, and gauges of this moment. Times are seconds.

    The engine counts in its own; what arrives in a StepOutput is a copy of that moment.
    """

    steps: int = 0
    requests_finished: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_drafts: int = 0
    pruned_per_depth: list[int] = field(default_factory=list)
    verified_per_depth: list[int] = field(default_factory=list)
    accepted_per_depth: list[int] = field(default_factory=list)
    num_copied_tokens: int = 0  # of the verified: copied from earlier text, not drafted ...
    num_accepted_copied_tokens: int = 0  # ... and accepted
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # prompt tokens looked up ...
    prefix_cache_hits: int = 0  # ... and found
    draft_seconds: float = 0.0  # by the drafter's clock
    transfer_seconds: float = 0.0  # rank 0's wait for drafts beyond that: packing, both ways, waking up
    verify_seconds: float = 0.0  # packing, forward, acceptance
    forward_seconds: float = 0.0  # of these the target's: forward and drawing, until the tokens are on the host
    accept_seconds: float = 0.0  # ... and judging the trees by them
    step_seconds: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # 0 .. 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Everything one step tells the front."""

    chunks: list[TokenChunk]
    stats: EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The engine's first frame: it has loaded its weights and serves."""

    topology: list[dict[str, str | int]]  # one per rank: see `World.gather_topology`
    max_model_len: int
    vocab_size: int
    num_pages: int


Message = Submit | Abort | StepOutput | Ready
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (Submit, Abort, StepOutput, Ready)}


def encode(message: Message) -> bytes:
    """One frame: 4 bytes little-endian length, then msgpack [kind, fields in the order of the class].

    Raises ValueError if it is longer than any frame may be: its sender's mistake shall not be its reader's end.
    """
    body = msgpack.packb((type(message).__name__, _values(message)), default=_values)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a {type(message).__name__} of {len(body)} bytes, where {MAX_FRAME_BYTES} is the most")
    return _LENGTH.pack(len(body)) + body


def _values(value: Any) -> tuple[object, ...]:
    """A dataclass's fields in order, not copied (`dataclasses.asdict` copies every token of a prompt)."""
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
            sampling = _named(SamplingParams, fields["sampling"])
            sampling["constraints"] = Constraints(**_named(Constraints, sampling["constraints"]))
            fields["sampling"] = SamplingParams(**sampling)
            fields["speculation"] = Speculation(**_named(Speculation, fields["speculation"]))
        case "StepOutput":
            fields["stats"] = EngineStats(**_named(EngineStats, fields["stats"]))
            fields["chunks"] = [_chunk(chunk) for chunk in fields["chunks"]]
    return _KINDS[kind](**fields)


def _chunk(raw: list[Any]) -> TokenChunk:
    fields = _named(TokenChunk, raw)
    if fields["stats"] is not None:
        fields["stats"] = RequestStats(**_named(RequestStats, fields["stats"]))
    if fields["logprobs"] is not None:
        entries = [_named(TokenLogprobs, entry) for entry in fields["logprobs"]]
        fields["logprobs"] = [TokenLogprobs(**entry | {"top": list(map(tuple, entry["top"]))}) for entry in entries]
    return TokenChunk(**fields)


def _named(kind: type, raw: list[Any]) -> dict[str, Any]:
    return dict(zip(kind.__dataclass_fields__, raw, strict=True))  # type: ignore[attr-defined]


class FrameDecoder:
    """Turns a byte stream into messages, whatever pieces it arrives in."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages completed by `data`. Raises ValueError on a frame that cannot be ours."""
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
                raise ValueError(f"a frame that is no message of ours: {error!r}") from error
            del self._buffer[:end]
        return messages


class FrontGone(ConnectionError):
    """The other end of the socket closed: nobody is left to answer to."""


class FrameSocket:
    """The engine's end: non-blocking both ways; `poll` also flushes what an earlier `send` could not write."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = FrameDecoder()
        self._unsent = bytearray()

    def send(self, message: Message) -> None:
        """Raises FrontGone if the front has closed, or has stopped reading."""
        self._unsent += encode(message)
        self._flush()
        if len(self._unsent) > MAX_FRAME_BYTES:
            raise FrontGone(f"the service front has left {len(self._unsent)} bytes unread")

    def poll(self, timeout: float = 0.0) -> list[Message]:
        """Messages that have arrived; waits up to `timeout` seconds for the first. Raises FrontGone at EOF."""
        readable, writable, _ = select.select([self._sock], [self._sock] if self._unsent else [], [], timeout)
        if writable:
            self._flush()
        if not readable:
            return []
        try:
            data = self._sock.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError as error:
            raise FrontGone(str(error)) from error
        if not data:
            raise FrontGone("the service front closed the engine's socket")
        return self._decoder.feed(data)

    def close(self) -> None:
        self._sock.close()

    def _flush(self) -> None:
        try:
            sent = self._sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError as error:
            raise FrontGone(str(error)) from error
        del self._unsent[:sent]


def connect(address: str) -> socket.socket:
    """Connects to "unix:/path" or "tcp:host:port" (the engine connects, the front listens)."""
    scheme, _, rest = address.partition(":")
    match scheme:
        case "unix":
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(rest)
        case "tcp":
            host, _, port = rest.rpartition(":")
            sock = socket.create_connection((host, int(port)))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        case _:
            raise ValueError(f"engine address {address!r}: write unix:/path or tcp:host:port")
    return sock


def unix_path_fits(path: str) -> bool:
    """AF_UNIX paths hold 107 bytes."""
    return len(os.fsencode(path)) <= 107
