"""A pod waits for its requests before it stops Ray."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx2
import pytest

import cluster.serve.drain
from cluster.observe.metrics import Metrics
from cluster.serve.drain import drain, is_busy
from workers.comm.ipc import EngineStats


def metrics(clients: int = 0, in_batches: int = 0) -> bytes:
    """Return the metrics of a replica with requests of clients and of batch jobs."""
    found = Metrics("model", "replica", lambda: EngineStats(num_running=clients + in_batches))
    with ExitStack() as running:
        for _ in range(clients):
            running.enter_context(found.client_request())
        return found.render()


@pytest.fixture
def replica() -> Iterator[Callable[..., str]]:
    """Serve these bodies in turn, the last one forever; None is a 503."""
    servers: list[http.server.ThreadingHTTPServer] = []

    def start(*bodies: bytes | None) -> str:
        rest = list(bodies)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = rest.pop(0) if len(rest) > 1 else rest[0]
                self.send_response(503 if body is None else 200)
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/metrics"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock: it advances by the time slept."""
    found: list[float] = []
    monkeypatch.setattr(cluster.serve.drain.time, "sleep", found.append)
    monkeypatch.setattr(cluster.serve.drain.time, "monotonic", lambda: sum(found))
    return found


@pytest.mark.parametrize(
    ("body", "busy"),
    [(metrics(1), True), (metrics(1, 2), True), (metrics(0, 2), False), (metrics(), False), (None, False)],
)
def test_a_replica_is_busy_while_requests_of_clients_run(
    replica: Callable[..., str], body: bytes | None, busy: bool
) -> None:
    assert is_busy(replica(body)) is busy


def test_a_refused_connection_means_idle() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert not is_busy(f"http://127.0.0.1:{bound.getsockname()[1]}/metrics")


def test_a_timeout_means_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(url: str, **options: object) -> None:
        raise httpx2.ReadTimeout("late")

    monkeypatch.setattr(cluster.serve.drain.httpx2, "get", late)
    assert is_busy("http://127.0.0.1:8000/metrics")


def test_drain_waits_for_the_last_request(replica: Callable[..., str], slept: list[float]) -> None:
    drain(replica(metrics(2), metrics(1), metrics()), 60)
    assert slept == [5.0, 1.0, 1.0]


def test_drain_stops_at_its_limit(replica: Callable[..., str], slept: list[float]) -> None:
    drain(replica(metrics(1)), 10)
    assert sum(slept) == 10
