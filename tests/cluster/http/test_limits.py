"""Limits on size and time of requests: raw sockets against the real uvicorn, whose clock the tests set forward."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.http.limits import HttpLimits, LimitedProtocol
from cluster.local_service import listening_socket
from tests.support.fake_service import wait_for

LIMIT_S = 10_000.0
"""Far above the time that any test takes: it passes on the server's clock alone."""
LIMITS = HttpLimits(head_s=LIMIT_S, body_s=LIMIT_S, body_bytes_per_s=1, body_bytes=1 << 20)
PATIENCE_S = 60.0


SLEEPS = threading.Event()
"""Set when `/stream` begins to sleep."""


async def read_bodies(scope: Scope, receive: Receive, send: Send) -> None:
    """An app that returns the size of the body; `/early` responds before it reads, `/stream` slowly."""
    if scope["path"] == "/stream":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(8):
            SLEEPS.set()
            await asyncio.sleep(LIMIT_S / 4)
            await send({"type": "http.response.body", "body": b"x" * (1 << 18), "more_body": True})
        await send({"type": "http.response.body", "body": b"end"})
        return
    size, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    headers = [(b"content-length", str(len(str(size))).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": str(size).encode()})


class CountingProtocol(LimitedProtocol):
    limits = LIMITS
    num_connections = num_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        CountingProtocol.num_connections += 1

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        CountingProtocol.num_bytes += len(data)


class AheadLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be set forward."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s

    def pass_time(self, seconds: float) -> None:
        def forward() -> None:
            self.ahead_s += seconds

        self.call_soon_threadsafe(forward)


class Served(NamedTuple):
    port: int
    loop: AheadLoop


@contextmanager
def serving(app: ASGIApp) -> Iterator[Served]:
    """Run the app under uvicorn in a thread."""
    sock, loop = listening_socket("127.0.0.1", 0), AheadLoop()
    config = uvicorn.Config(
        app, http=CountingProtocol, log_level="critical", lifespan="off", timeout_graceful_shutdown=1,
        timeout_keep_alive=1 << 30,
    )  # fmt: skip
    server = uvicorn.Server(config)

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(server.serve(sockets=[sock]))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Served(sock.getsockname()[1], loop)
    finally:
        server.should_exit = True
        thread.join(10)
        sock.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(read_bodies) as found:
        yield found


@pytest.fixture
def client(served: Served) -> Iterator[Callable[[], socket.socket]]:
    sockets: list[socket.socket] = []

    def connect() -> socket.socket:
        before = CountingProtocol.num_connections
        sockets.append(socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S))
        wait_for(lambda: CountingProtocol.num_connections > before)
        return sockets[-1]

    yield connect
    for sock in sockets:
        sock.close()


def send_read(sock: socket.socket, data: bytes) -> None:
    """Send, and wait until the server has read it."""
    before = CountingProtocol.num_bytes
    sock.sendall(data)
    wait_for(lambda: CountingProtocol.num_bytes - before == len(data))


def rest(sock: socket.socket) -> bytes:
    """Return everything until the server closes; fail after a timeout."""
    data = b""
    while part := sock.recv(1 << 16):
        data += part
    return data


def until(sock: socket.socket, end: bytes) -> bytes:
    """Return a response up to its known end; fail if the server closes before."""
    data = b""
    while not data.endswith(end):
        part = sock.recv(1 << 16)
        assert part, f"cut off behind {data[-300:]!r}"
        data += part
    return data


def send_all(sock: socket.socket, data: bytes) -> None:
    """Send as much as the server accepts."""
    try:
        sock.sendall(data)
    except OSError:
        pass


def refusal(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Return status and error object of the only response."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head and b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]


GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
STREAM_END = b"end\r\n0\r\n\r\n"
LATE_HEAD = "the headers were not complete within 10000 s"
LATE_BODY = "the body did not arrive in time: the limit is 10000 s plus its size at 1 bytes/s"
HEAD = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


# Sizes


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (HEAD + b"X: " + b"a" * (10 << 20) + b"\r\n\r\n", 431, "headers_too_large"),
        (HEAD + b"X: " + b"a" * (10 << 20), 431, "headers_too_large"),
        (HEAD + b"a" * (1 << 20), 431, "headers_too_large"),
        (HEAD + b"X: " + b"a" * 60_000 + b"\r\nY: " + b"a" * 10_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431, "headers_too_large"),
        (HEAD + b"".join(b"X-%d: a\r\n" % n for n in range(100_000)) + b"\r\n", 431, "too_many_headers"),
        (HEAD + b"X: a\r\n" * 128 + b"\r\n", 431, "too_many_headers"),
        (HEAD + b"Content-Length: 3000000\r\n\r\n" + b"a" * 3_000_000, 413, "body_too_large"),
        (CHUNKED + (b"4000\r\n" + b"a" * 0x4000 + b"\r\n") * 100, 413, "body_too_large"),
        (CHUNKED + b"1\r\na\r\n0\r\n" + b"T: a\r\n" * 200, 431, "too_many_headers"),
        (CHUNKED + b"1;" + b"a" * (1 << 20), 431, "headers_too_large"),
        (b"\r\n" * 500_000, 431, "headers_too_large"),
        (b"no such protocol\r\n\r\n", 400, "malformed_request"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else str(value),
)  # fmt: skip
def test_too_large_a_request_gets_an_error_response(
    client: Callable[[], socket.socket], sent: bytes, status: int, code: str
) -> None:
    sock = client()
    send_all(sock, sent)
    found, error = refusal(rest(sock))
    assert (found, error["code"], error["type"]) == (status, code, "invalid_request_error")


def test_two_requests_within_the_limits_share_a_connection(client: Callable[[], socket.socket]) -> None:
    sock = client()
    request = HEAD + b"X: " + b"a" * 60_000 + b"\r\n" + b"Y: a\r\n" * 100 + b"Content-Length: 1000000\r\n\r\n"
    for _ in range(2):
        sock.sendall(request + b"a" * 1_000_000)
        assert until(sock, b"1000000").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("size", [997, 4096, 60_001])
def test_a_request_may_arrive_in_any_pieces(client: Callable[[], socket.socket], size: int) -> None:
    def send(data: bytes) -> socket.socket:
        sock = client()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), size):
            send_all(sock, data[start : start + size])
        return sock

    fits = HEAD + b"X: " + b"a" * 63_000 + b"\r\nContent-Length: 200000\r\n\r\n" + b"a" * 200_000
    assert until(send(2 * fits), b"\r\n\r\n200000").startswith(b"HTTP/1.1 200")
    assert refusal(rest(send(HEAD + b"X: " + b"a" * 66_000 + b"\r\n\r\n")))[0] == 431


def test_headers_of_many_requests_sent_at_once_do_not_add_up(client: Callable[[], socket.socket]) -> None:
    sock = client()
    sock.sendall((HEAD + b"X: " + b"a" * 30_000 + b"\r\nContent-Length: 2\r\n\r\nhi") * 12)
    answer = b""
    while answer.count(b"HTTP/1.1 200") < 12 or not answer.endswith(b"2"):
        part = sock.recv(1 << 16)
        assert part, answer[-300:]
        answer += part


# Times


@pytest.mark.parametrize(
    ("begun", "drip", "told"),
    [
        (b"", b"", None),
        (b"GET / HT", b"", LATE_HEAD),
        (HEAD, b"X: a\r\n", LATE_HEAD),
        (b"\r\n", b"\r\n", LATE_HEAD),
        (HEAD + b"Content-Length: 1000\r\n\r\n", b"", LATE_BODY),
        (HEAD + b"Content-Length: 1000\r\n\r\n", b"a", LATE_BODY),
        (CHUNKED, b"1\r\na\r\n", LATE_BODY),
    ],
)
def test_an_unfinished_request_is_closed_at_its_deadline(
    served: Served, client: Callable[[], socket.socket], begun: bytes, drip: bytes, told: str | None
) -> None:
    """Further `drip` must not extend the deadline."""
    sock = client()
    send_read(sock, begun)
    for _ in range(2):
        served.loop.pass_time(0.4 * LIMIT_S)
        send_read(sock, drip)
    served.loop.pass_time(0.3 * LIMIT_S)
    answer = rest(sock)
    if told is None:
        assert answer == b""
    else:
        status, error = refusal(answer)
        assert (status, error["message"], error["code"]) == (408, told, "request_timeout")


def test_a_second_request_has_its_own_deadline(served: Served, client: Callable[[], socket.socket]) -> None:
    sock = client()
    for _ in range(3):
        served.loop.pass_time(0.6 * LIMIT_S)  # less than a limit each, more than one together
        sock.sendall(GET)
        assert until(sock, b"\r\n\r\n0").startswith(b"HTTP/1.1 200")
    send_read(sock, b"GET / HT")
    served.loop.pass_time(1.1 * LIMIT_S)
    assert refusal(rest(sock))[0] == 408


def test_a_body_at_the_required_rate_extends_its_deadline(served: Served, client: Callable[[], socket.socket]) -> None:
    sock, quarter = client(), int(0.75 * LIMIT_S)
    send_read(sock, HEAD + b"Content-Length: %d\r\n\r\n" % (4 * quarter))
    for _ in range(4):
        served.loop.pass_time(0.6 * LIMIT_S)
        send_read(sock, b"a" * quarter)
    assert until(sock, b"\r\n\r\n%d" % (4 * quarter)).startswith(b"HTTP/1.1 200")


def test_an_unfinished_body_gets_no_second_response(served: Served, client: Callable[[], socket.socket]) -> None:
    sock = client()
    sock.sendall(b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n")
    answer = until(sock, b"\r\n\r\n0")
    served.loop.pass_time(1.1 * LIMIT_S)
    answer += rest(sock)
    assert answer.count(b"HTTP/1.1") == 1 and answer.startswith(b"HTTP/1.1 200")


def test_slow_responses_and_slow_readers_have_no_deadline(served: Served, client: Callable[[], socket.socket]) -> None:
    sock = client()
    send_read(sock, b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
    for _ in range(20):
        served.loop.pass_time(0.3 * LIMIT_S)
        time.sleep(0.01)  # the application sends what it can
    assert until(sock, STREAM_END).count(b"x") >= 8 << 18


def test_the_next_request_has_no_deadline_while_a_response_is_pending(
    served: Served, client: Callable[[], socket.socket]
) -> None:
    sock = client()
    SLEEPS.clear()
    send_read(sock, b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\nGET / HT")
    data = b""
    for number in range(1, 9):  # no time may pass once the response has ended
        assert SLEEPS.wait(PATIENCE_S)
        SLEEPS.clear()
        served.loop.pass_time(0.3 * LIMIT_S)
        while data.count(b"x") < number << 18:
            data += sock.recv(1 << 18)
    data = data if data.endswith(STREAM_END) else until(sock, STREAM_END)
    sock.sendall(b"TP/1.1\r\nHost: a\r\n\r\n")
    assert until(sock, b"\r\n\r\n0").startswith(b"HTTP/1.1 200")


def test_a_late_body_disconnects_its_request_in_the_application() -> None:
    over = threading.Event()

    async def wait_for_all(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        over.set()

    with serving(wait_for_all) as own, socket.create_connection(("127.0.0.1", own.port), timeout=PATIENCE_S) as sock:
        send_read(sock, HEAD + b"Content-Length: 1000\r\n\r\na")
        own.loop.pass_time(1.1 * LIMIT_S)
        assert refusal(rest(sock))[0] == 408
        assert over.wait(PATIENCE_S)
