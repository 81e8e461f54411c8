"""Limits on the size and the arrival time of a request, the same without Ray and in Ray Serve's proxies.

uvicorn has no such limits: it buffers headers of any size and waits for them forever. Both servers therefore use
`LimitedProtocol`, uvicorn's protocol plus limits on what clients send. There is no limit on how slowly a client reads
or on how long a response takes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar, Literal

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.errors import HttpError, body_at
from cluster.openai.direct import EXTENSION, DirectWriter
from secateur.responses import ErrorResponse

MAX_BODY_BYTES = 16 << 20
"""Enough for a million token ids, or for a text several times as long as any context. The whole body is read before it
is validated."""
UPLOAD_PATH = "/v1/files"
MAX_FILE_BYTES = 200 << 20
"""OpenAI's limit of a file. An uploaded file is written to the disk as it arrives."""
MAX_UPLOAD_BYTES = MAX_FILE_BYTES + (1 << 20)
"""A file in a form, with the form's other fields."""
LINGER_S = 2.0
"""Time between an error response and closing the connection. Data that arrives meanwhile is discarded: closing at once
would reset the connection, and the client could lose the response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits on size and arrival time.

    Example: HttpLimits(head_s=5.0, num_headers=64)
    """

    head_s: float = 20.0
    """From connecting, or from the first byte of a further request, to the end of the headers."""
    head_bytes: int = 64 << 10
    """Request line and headers together."""
    num_headers: int = 128
    body_s: float = 30.0
    """Time for any body. A large body has `num_bytes / body_bytes_per_s` more."""
    body_bytes_per_s: int = 16 << 10
    body_bytes: int = MAX_BODY_BYTES
    upload_bytes: int = MAX_UPLOAD_BYTES
    """The same for uploads of files."""

    def max_body_bytes(self, method: str, path: str) -> int:
        """Return the size that the body of a request may have."""
        is_upload = method == "POST" and path.rstrip("/").endswith(UPLOAD_PATH)
        return self.upload_bytes if is_upload else self.body_bytes


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits: rejects requests that are too large (413, 431) or arrive too slowly (408).

    Subclass it to set other `limits`. Time does not count while reading is paused or a response is being sent.
    """

    limits: ClassVar[HttpLimits] = HttpLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._expected: Literal["head", "body"] | None = None
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_rejected = False
        self._parser_error: HttpError | None = None  # why a callback stopped the parser
        self._num_unparsed = 0  # bytes since the parser's last callback; it buffers an unfinished header
        self._num_head = 0
        self._num_headers = 0
        self._num_body = self._max_body = 0
        self._path = ""  # known from the end of the headers on

    # Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Start the timer for the first request's headers."""
        super().connection_made(transport)
        self._expect("head")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse `data` unless the request has been rejected; limit what the parser buffers."""
        if self._is_rejected:
            return
        if self._expected is None:
            self._expect("head")
        self._num_unparsed += len(data)
        super().data_received(data)
        if self._num_unparsed > self.limits.head_bytes:
            self._reject(self._head_too_large())

    def handle_websocket_upgrade(self) -> None:
        """Leave an upgraded connection to uvicorn."""
        self._stop_timer()
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """Reject a request on which the parser failed."""
        self._reject(self._parser_error or _not_http())

    # Parser callbacks

    def on_message_begin(self) -> None:
        """Reset the request's counters."""
        self._num_unparsed = self._num_head = self._num_headers = self._num_body = 0
        self._path = ""
        if self._expected is None:
            self._expect("head")
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count the URL towards the head."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:  # also called for trailers after a body
        """Count a header; reject the request if it has too many or too large ones."""
        self._num_headers += 1
        if self._num_headers > self.limits.num_headers:
            message = f"the request has more than {self.limits.num_headers} headers; send fewer"
            self._stop_parser(_error(431, message, "too_many_headers"))
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the timer for the body; refuse HTTP/0.9, which the parser accepts."""
        self._num_unparsed = 0
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            self._stop_parser(_not_http())
        self._path = self.url.partition(b"?")[0].decode("latin-1")
        self._max_body = self.limits.max_body_bytes(self.parser.get_method().decode(), self._path)
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:  # not an upgrade
            writer: Any = DirectWriter(self.cycle, self.loop)  # of no type that ASGI's stubs know
            self.scope["extensions"] = {EXTENSION: writer}
        self._expect("body")

    def on_body(self, body: bytes) -> None:
        """Count a part of the body; reject the request if the body is too large."""
        self._num_unparsed = 0
        self._num_body += len(body)
        if self._num_body > self._max_body:
            message = f"the body is larger than {self._max_body >> 20} MiB; send less at once"
            self._stop_parser(_error(413, message, "body_too_large"))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the timer: the request is complete."""
        self._num_unparsed = 0
        self._stop_timer()
        super().on_message_complete()

    def _count_head(self, num_bytes: int) -> None:
        self._num_unparsed = 0
        self._num_head += num_bytes
        if self._num_head > self.limits.head_bytes:
            self._stop_parser(self._head_too_large())

    def _head_too_large(self) -> HttpError:
        message = f"request line and headers are larger than {self.limits.head_bytes >> 10} KiB; send less"
        return _error(431, message, "headers_too_large")

    def _stop_parser(self, error: HttpError) -> None:
        self._parser_error = error
        raise error  # uvicorn catches the parser's failure and calls `send_400_response`

    # Time

    def _expect(self, part: Literal["head", "body"]) -> None:
        self._stop_timer()
        self._expected, self._since = part, self.loop.time()
        seconds = self.limits.head_s if part == "head" else self.limits.body_s
        self._timer = self.loop.call_later(seconds, self._check_deadline)

    def _stop_timer(self) -> None:
        self._expected = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_deadline(self) -> None:
        """Reject the request, or extend the deadline for the bytes received and for time that does not count."""
        assert self._expected is not None
        if self.transport.is_closing():
            return
        if self._is_waiting_for_us():
            self._expect(self._expected)
            return
        limits = self.limits
        if self._expected == "head":
            if not (self._num_unparsed or self._num_head):  # an idle connection without a request
                self.transport.close()
                return
            self._reject(_error(408, f"the headers were not complete within {limits.head_s:g} s", "request_timeout"))
            return
        allowed_s = limits.body_s + self._num_body / limits.body_bytes_per_s
        left_s = self._since + allowed_s - self.loop.time()
        if left_s > 0:
            self._timer = self.loop.call_later(left_s, self._check_deadline)
            return
        message = (
            f"the body did not arrive in time: the limit is {limits.body_s:g} s plus its size at "
            f"{limits.body_bytes_per_s} bytes/s"
        )
        self._reject(_error(408, message, "request_timeout"))

    def _is_waiting_for_us(self) -> bool:
        """Return whether the client may be waiting for the server: reading is paused, or a response is being sent."""
        if self.flow.read_paused:
            return True
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        return self._expected == "head" or cycle.response_started

    # Rejection

    def _can_respond(self) -> bool:
        """Return whether the client would match a response to the rejected request, not to an earlier one."""
        if self._expected == "body":
            return not (self.cycle.response_started or self.pipeline)
        return self.cycle is None or self.cycle.response_complete

    def _reject(self, error: HttpError) -> None:
        """Close the connection, after an error response if none of another request is being sent."""
        if self._is_rejected or self.transport.is_closing():
            return
        self._is_rejected = True
        can_respond, is_body = self._can_respond(), self._expected == "body"
        self._stop_timer()
        self._unset_keepalive_if_required()
        if not can_respond:
            self.transport.close()
            return
        if is_body:  # the application already handles this request and must not send a second response
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = body_at(self._path, error).model_dump_json().encode()
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()


def _error(status: int, message: str, code: str) -> HttpError:
    return HttpError(status, ErrorResponse.of(message, code=code))


def _not_http() -> HttpError:
    return _error(400, "this is not an HTTP/1.1 request", "malformed_request")
