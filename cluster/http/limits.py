"""How large a request may be and how long it may take to arrive, the same without Ray and in Serve's proxies.

uvicorn has no such limits: a header grows until memory ends, and one that never ends keeps its connection for ever. So
both servers use `LimitedProtocol`, uvicorn's own protocol with limits on what clients send. Nothing limits how slowly a
client reads or how long an answer takes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar, Literal, NamedTuple

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from secateur.responses import ErrorResponse

MAX_BODY_BYTES = 16 << 20
"""Of a request: a million token ids, or a text several times as long as any context. It is read before anything of it
can be refused."""
LINGER_S = 2.0
"""After a refusal what still arrives is thrown away for so long: a reset would take the answer from its reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What a client may send and how long that may take.

    Example: HttpLimits(head_s=5.0, num_headers=64)
    """

    head_s: float = 20.0
    """From connecting, or from the first byte of a further request, to the end of the headers."""
    head_bytes: int = 64 << 10
    """Of request line and headers together."""
    num_headers: int = 128
    body_s: float = 30.0
    """A body may take so long, and in addition what its bytes take at the rate below."""
    body_bytes_per_s: int = 16 << 10
    body_bytes: int = MAX_BODY_BYTES


class Refusal(NamedTuple):
    """An answer that the protocol writes itself, before it closes the connection."""

    status: int
    message: str
    code: str

    def raw(self) -> bytes:
        """The whole answer as it goes over the wire, in OpenAI's shape."""
        body = ErrorResponse.of(self.message, code=self.code).model_dump_json().encode()
        head = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body


MALFORMED = Refusal(400, "this is not an HTTP/1.1 request", "malformed_request")


class _Refused(Exception):
    """Stops the parser."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which refuses what is too large (413, 431) and what does not arrive in time (408).

    A subclass with other `limits` is another server's protocol. Time counts only while the client is to blame: not
    while reading is paused, nor while an answer is on its way.
    """

    limits: ClassVar[HttpLimits] = HttpLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._expected: Literal["head", "body"] | None = None
        self._since = 0.0
        self._clock: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._refusal = MALFORMED  # what an error of the parser means
        self._num_unparsed = 0  # bytes since the parser last told anything; it keeps an unfinished header itself
        self._num_head = 0
        self._num_headers = 0
        self._num_body = 0

    # Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Start the clock of the first request's head."""
        super().connection_made(transport)
        self._expect("head")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless the request is refused already; bound what the parser holds back."""
        if self._is_refused:
            return
        if self._expected is None:
            self._expect("head")
        self._num_unparsed += len(data)
        super().data_received(data)
        if self._num_unparsed > self.limits.head_bytes:
            self._refuse(self._head_too_large())

    def handle_websocket_upgrade(self) -> None:
        """Leave an upgraded connection to uvicorn."""
        self._stop_clock()
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that the parser gave up on."""
        self._refuse(self._refusal)

    # What the parser tells

    def on_message_begin(self) -> None:
        """Reset the counters of a request."""
        self._num_unparsed = self._num_head = self._num_headers = self._num_body = 0
        if self._expected is None:
            self._expect("head")
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count the URL towards the head."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:  # a trailer behind a body too
        """Count a header; too many, or too much of them, end the request."""
        self._num_headers += 1
        if self._num_headers > self.limits.num_headers:
            message = f"the request has more than {self.limits.num_headers} headers; send fewer"
            self._stop_parser(Refusal(431, message, "too_many_headers"))
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the clock of the body."""
        self._num_unparsed = 0
        super().on_headers_complete()
        self._expect("body")

    def on_body(self, body: bytes) -> None:
        """Count a part of the body; too much of it ends the request."""
        self._num_unparsed = 0
        self._num_body += len(body)
        if self._num_body > self.limits.body_bytes:
            message = f"the body is larger than {self.limits.body_bytes >> 20} MiB; send less at once"
            self._stop_parser(Refusal(413, message, "body_too_large"))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the clock: the rest is up to the application."""
        self._num_unparsed = 0
        self._stop_clock()
        super().on_message_complete()

    def _count_head(self, num_bytes: int) -> None:
        self._num_unparsed = 0
        self._num_head += num_bytes
        if self._num_head > self.limits.head_bytes:
            self._stop_parser(self._head_too_large())

    def _head_too_large(self) -> Refusal:
        message = f"request line and headers are larger than {self.limits.head_bytes >> 10} KiB; send less"
        return Refusal(431, message, "headers_too_large")

    def _stop_parser(self, refusal: Refusal) -> None:
        self._refusal = refusal
        raise _Refused(refusal)  # the parser's error then, which ends in `send_400_response`

    # Time

    def _expect(self, what: Literal["head", "body"]) -> None:
        self._stop_clock()
        self._expected, self._since = what, self.loop.time()
        self._clock = self.loop.call_later(self.limits.head_s if what == "head" else self.limits.body_s, self._check)

    def _stop_clock(self) -> None:
        self._expected = None
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _check(self) -> None:
        """The clock has run out: the client is late, or has earned more time."""
        assert self._expected is not None
        if self.transport.is_closing():
            return
        if self._is_excused():
            self._expect(self._expected)
            return
        limits = self.limits
        if self._expected == "head":
            if not (self._num_unparsed or self._num_head):  # a connection on which nothing was ever asked
                self.transport.close()
                return
            self._refuse(Refusal(408, f"the headers were not complete within {limits.head_s:g} s", "request_timeout"))
            return
        allowed_s = limits.body_s + self._num_body / limits.body_bytes_per_s
        left_s = self._since + allowed_s - self.loop.time()
        if left_s > 0:
            self._clock = self.loop.call_later(left_s, self._check)
            return
        message = (
            f"the body did not arrive in time; it has {limits.body_s:g} s, and more only for what comes at "
            f"{limits.body_bytes_per_s} bytes/s"
        )
        self._refuse(Refusal(408, message, "request_timeout"))

    def _is_excused(self) -> bool:
        """Whether the client may be waiting for us: nothing is read, or an answer is on its way to it."""
        if self.flow.read_paused:
            return True
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        return self._expected == "head" or cycle.response_started

    # Refusals

    def _may_answer(self) -> bool:
        """Whether an answer would be taken for that of the request that is refused."""
        if self._expected == "body":
            return not (self.cycle.response_started or self.pipeline)
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self, refusal: Refusal) -> None:
        """Answers, unless that would go into the middle of another answer, and closes the connection."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        may_answer, is_body = self._may_answer(), self._expected == "body"
        self._stop_clock()
        self._unset_keepalive_if_required()
        if not may_answer:
            self.transport.close()
            return
        if is_body:  # the application has this request: nothing of its own may follow our answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(refusal.raw())
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()
