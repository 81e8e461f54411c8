"""`secateur serve` as a process on a real Ray, and a client's view of it: start, failures, open ports and shutdown."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx2
import psutil
import pytest

from tests.support.certificates import assert_speaks_tls_alone, self_signed
from tests.support.deployments import free_port

START_S = 240
STOP_S = 60
ROOT = Path(__file__).parents[3]
PATHS = ("/health", "/v1/models")
SHORT_LIMITS = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "tests.cluster.serve.short_proxy:middlewares"}


class Serving(NamedTuple):
    process: psutil.Process
    stdout: Path
    stderr: Path

    def url(self) -> str | None:
        found = re.search(r"https?://\S+(?=/v1)", self.stdout.read_text())
        return found and found[0]

    def below(self) -> list[psutil.Process]:
        return self.process.children(recursive=True)

    def named(self, part: str) -> list[psutil.Process]:
        return [process for process in self.below() if part in title(process)]


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


def wait_for(condition: Callable[[], object], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


@contextmanager
def serving(folder: Path, *arguments: str, script: str = 'exec "$@"', **environment: str) -> Iterator[Serving]:
    """Run the command in a shell script. Without drafts, as a drafter is one more process to start."""
    stdout, stderr = folder / "stdout", folder / "stderr"
    fixed = ["--device", "cpu", "--no-speculation", "--port", "0"]
    command = [sys.executable, "-m", "secateur", "serve", *fixed, *arguments]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | environment
    env |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    with stdout.open("w") as out, stderr.open("w") as err:
        shell = subprocess.Popen(["sh", "-c", script, "sh", *command], env=env, cwd=folder, stdout=out, stderr=err)
    process = psutil.Process(shell.pid)
    if script.startswith("exec"):
        found = process
    else:
        wait_for(lambda: any("secateur" in title(each) for each in process.children()), 20)
        [found] = process.children()
    one = Serving(found, stdout, stderr)
    try:
        yield one
    finally:
        left = one.below() if running(one.process) else []
        for each in [process, found, *left]:
            if each.is_running():
                each.kill()
        shell.wait()


def ready(one: Serving) -> str:
    wait_for(lambda: one.url() is not None or not running(one.process), START_S)
    url = one.url()
    assert url is not None, one.stderr.read_text()
    return url


def running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def assert_ended(one: Serving, below: list[psutil.Process]) -> None:
    wait_for(lambda: not running(one.process), STOP_S)
    _, left = psutil.wait_procs(below, timeout=10)
    assert [(each.pid, each.cmdline()) for each in left if running(each)] == []


def listening(one: Serving) -> dict[str, set[str]]:
    """Return the names of the processes that listen on each address."""
    found: dict[str, set[str]] = {}
    for process in [one.process, *one.below()]:
        with suppress(psutil.Error):
            for each in process.net_connections(kind="inet"):
                if each.status == psutil.CONN_LISTEN:
                    found.setdefault(each.laddr.ip.removeprefix("::ffff:"), set()).add(process.name())
    return found


def complete(url: str) -> int:
    body = {"prompt": "def f(", "max_tokens": 4}
    try:
        return httpx2.post(f"{url}/v1/completions", json=body, timeout=60).status_code
    except httpx2.HTTPError:
        return 0


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a path short enough for Ray's sockets (107 bytes), unlike those of pytest's workers."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="s", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def test_a_port_in_use_is_reported_before_slow_imports(short: Path) -> None:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")):
        with socket.socket(family) as taken:
            taken.bind((host, 0))
            taken.listen()
            port = taken.getsockname()[1]
            with serving(short, "--port", str(port)) as one:
                wait_for(lambda one=one: not running(one.process), START_S)
            said = one.stderr.read_text()
            assert f"cannot listen on 127.0.0.1:{port}" in said
            assert "choose another --host or --port" in said
            assert "importing" not in said


def refusal(response: httpx2.Response) -> str:
    assert (response.status_code, response.headers["content-type"]) == (503, "application/json"), response.text
    assert int(response.headers["retry-after"]) > 0
    return response.json()["error"]["message"]


def refusals_until_ready(url: str, one: Serving) -> set[tuple[str, str]]:
    """Return with which message each of PATHS was refused, before all of them answer 200."""
    found, left = set(), {*PATHS}

    def ask_all() -> bool:
        assert running(one.process), one.stderr.read_text()
        for path in [*left]:
            with suppress(httpx2.ConnectError):
                response = httpx2.get(url + path, timeout=30, trust_env=False)
                if response.status_code == 200:
                    left.remove(path)
                else:
                    found.add((path, refusal(response)))
        return not left

    wait_for(ask_all, START_S)
    return found


def answer_to(port: int, sent: bytes) -> bytes:
    """Return everything until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        with suppress(OSError):  # it had enough
            sock.sendall(sent)
        answer = b""
        while part := sock.recv(1 << 16):
            answer += part
        return answer


HEAD = b"GET /health HTTP/1.1\r\nHost: a\r\n"
BEYOND_LIMITS = [
    (HEAD, 408),
    (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{", 408),
    (HEAD + b"X: " + b"a" * (10 << 20) + b"\r\n\r\n", 431),
    (HEAD + b"".join(b"X-%d: a\r\n" % number for number in range(100_000)) + b"\r\n", 431),
]


def interrupt_twice(url: str, one: Serving) -> None:
    """Send SIGINT, and again, while an answer runs: it ends well, and what comes is told to come back."""
    body = {"prompt": "def f", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    while_draining: list[str] = []

    def ask_all() -> bool:
        for path in PATHS:
            now = httpx2.get(url + path, timeout=30, trust_env=False)
            if now.status_code != 200:  # Serve has not heard yet
                while_draining.append(refusal(now))
        return bool(while_draining)

    with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=60, trust_env=False) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        one.process.send_signal(signal.SIGINT)  # ignored, were it for the shell: it was started with &
        wait_for(lambda: "Secateur is stopping; 2 more" in one.stderr.read_text(), STOP_S)
        wait_for(ask_all, STOP_S)
        one.process.send_signal(signal.SIGINT)
        payloads = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert set(while_draining) == {"the service is draining or has ended; try again later"}
    assert payloads[-1] == "[DONE]"
    assert json.loads(payloads[-2])["choices"][0]["finish_reason"] == "length"


@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_clients_get_our_errors_from_start_to_end_and_the_service_outlives_its_proxy(short: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    # On a busy machine the running answer takes minutes; it ends when it has ended.
    arguments = ["--port", str(port), "--shutdown-timeout", "300"]
    with serving(short, *arguments, script='"$@" & wait', **SHORT_LIMITS) as one:
        assert refusals_until_ready(url, one) == {(path, "the service is starting; try again later") for path in PATHS}
        assert ready(one) == url
        said = one.stderr.read_text()
        # Not "starting the engine's processes", which may be too short to be seen.
        stages = ["starting Ray", "starting Ray Serve", "loading the model", "warming up", "ready"]
        places = [said.index(stage) for stage in stages]
        assert places == sorted(places), said
        seconds = [int(each) for each in re.findall(r"secateur: (\d+) s, ", said)]
        assert len(seconds) > 1 and seconds == sorted(seconds)

        assert set(listening(one)) == {"127.0.0.1"}, listening(one)
        assert httpx2.get(f"{url}/health", trust_env=False).json() == {"status": "ok"}
        for sent, status in BEYOND_LIMITS:
            assert answer_to(port, sent).startswith(b"HTTP/1.1 %d " % status)
        odd = httpx2.get(f"{url}/v1/models", headers={b"X-Request-ID": b"caf\xe9"}, trust_env=False)
        assert odd.status_code == 200

        [folder] = short.glob("secateur-*")
        [replica] = one.named("ray::ServeReplica")
        [proxy] = one.named("ray::ProxyActor")
        proxy.kill()
        wait_for(lambda: complete(url) == 200, 60)
        assert one.named("ray::ServeReplica") == [replica], "the engine was never touched"

        replica.kill()
        wait_for(lambda: replica not in one.named("ray::ServeReplica") and complete(url) == 200, START_S)
        assert not folder.exists(), "the next start removes what a killed replica leaves"
        assert len(list(short.glob("secateur-*"))) == 1

        below = one.below()
        interrupt_twice(url, one)
        assert_ended(one, below)
        said = one.stderr.read_text()
        assert "Secateur is stopping; 1 more" in said
        assert said.rstrip().endswith("stopped")
        assert not list(short.glob("secateur-*"))


@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("process", [pytest.param("gcs_server", marks=pytest.mark.full), "raylet"])
def test_only_https_is_open_to_others_and_the_end_of_its_ray_is_told_at_once(short: Path, process: str) -> None:
    pair = self_signed(short)
    with serving(short, "--host", "0.0.0.0", *pair.flags) as one:
        assert_speaks_tls_alone(ready(one), pair)
        found = listening(one)
        assert set(found) == {"127.0.0.1", "0.0.0.0"}
        assert found["0.0.0.0"] == {"ray::ProxyActor"}, "the HTTPS port alone is open to others"

        below = one.below()
        [lost] = [each for each in below if each.name() == process]
        lost.kill()
        wait_for(lambda: "its Ray has ended; start it again" in one.stderr.read_text(), STOP_S)
        assert_ended(one, below)


@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_sigterms_while_it_starts_leave_nothing_and_start_nothing(short: Path) -> None:
    with serving(short) as one:
        wait_for(lambda: "starting Ray Serve" in one.stderr.read_text(), START_S)
        one.process.terminate()
        time.sleep(0.5)
        below = one.below()
        one.process.terminate()
        started = set()
        while running(one.process):
            for each in one.below():
                with suppress(psutil.NoSuchProcess):  # it ends in these very moments
                    started |= {each.pid} if each.name() in ("raylet", "gcs_server") else set()
            time.sleep(0.05)
        assert len(started) <= 2, "no second Ray"
        assert_ended(one, below)
        said = one.stderr.read_text()
        assert "SIGTERM received" not in said, "Ray's handler, which aborts"
        assert said.rstrip().endswith("stopped")
