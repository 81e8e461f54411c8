"""A client's view of `secateur serve` on a real Ray, from before the start until after the end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from cluster.local_service import listening_socket

ROOT = Path(__file__).parents[3]
START_S, STOP_S = 300, 60
NO_PROXY = {"trust_env": False}


def refusal(response: httpx2.Response) -> str:
    assert (response.status_code, response.headers["content-type"]) == (503, "application/json"), response.text
    assert int(response.headers["retry-after"]) > 0
    return response.json()["error"]["message"]


def watch(url: str, path: str, process: subprocess.Popen[bytes]) -> set[str]:
    """Return all reasons until the path answers 200."""
    reasons, deadline = set(), time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "it ended"
        try:
            response = httpx2.get(url + path, timeout=30, **NO_PROXY)
        except httpx2.ConnectError:
            time.sleep(0.1)
            continue
        if response.status_code == 200:
            return reasons
        reasons.add(refusal(response))
        time.sleep(0.1)
    pytest.fail("it never became ready")


def answer_to(port: int, sent: bytes) -> bytes:
    """Return everything until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        try:
            sock.sendall(sent)
        except OSError:
            pass  # it had enough
        answer = b""
        while part := sock.recv(1 << 16):
            answer += part
        return answer


def test_clients_get_our_errors_from_start_to_end() -> None:
    with listening_socket("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "tests.cluster.serve.short_proxy:middlewares",
    }
    command = [sys.executable, "-m", "secateur", "serve", "--device", "cpu", "--port", str(port)]
    command += ["--shutdown-timeout", "120"]  # on a busy machine the running answer takes longer than 20 s
    process = subprocess.Popen(command, env=environment)
    try:
        # Before the first readiness
        found: dict[str, set[str]] = {}
        paths = ("/health", "/v1/models")
        threads = [
            threading.Thread(target=lambda path=path: found.update({path: watch(url, path, process)})) for path in paths
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for path in paths:
            assert found[path] == {"the service is starting; try again later"}

        # Ready
        assert httpx2.get(f"{url}/health", **NO_PROXY).json() == {"status": "ok"}
        head = b"GET /health HTTP/1.1\r\nHost: a\r\n"
        for sent, status in (
            (head, 408),
            (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{", 408),
            (head + b"X: " + b"a" * (10 << 20) + b"\r\n\r\n", 431),
            (head + b"".join(b"X-%d: a\r\n" % number for number in range(100_000)) + b"\r\n", 431),
        ):
            assert answer_to(port, sent).startswith(b"HTTP/1.1 %d " % status)
        odd = httpx2.get(f"{url}/v1/models", headers={b"X-Request-ID": b"caf\xe9"}, **NO_PROXY)
        assert odd.status_code == 200

        # Draining: what runs ends well, what comes is told to come back
        body: dict[str, Any] = {"prompt": "def f", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        while_draining: list[str] = []
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=60, **NO_PROXY) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_S
            while not while_draining and time.monotonic() < deadline:
                for path in paths:
                    now = httpx2.get(url + path, timeout=30, **NO_PROXY)
                    if now.status_code != 200:  # Serve has not heard yet
                        while_draining.append(refusal(now))
            process.send_signal(signal.SIGTERM)  # again, which ends no answer
            payloads = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert while_draining and set(while_draining) == {"the service is draining or has ended; try again later"}
        assert payloads[-1] == "[DONE]"
        assert json.loads(payloads[-2])["choices"][0]["finish_reason"] == "length"
        assert process.wait(STOP_S) == 0
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
