"""`secateur serve` around its service: the URL, supervision and shutdown. Ray is replaced."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import psutil
import pytest
from ray.serve.config import HTTPOptions

import cluster.serve.controller
import cluster.serve.launch
import cluster.serve.ray_cluster
from cluster.serve.launch import running, watch
from cluster.serve.ray_cluster import local_cluster
from cluster.serve.signals import StopSignals
from cluster.system.processes import name_of
from cluster.system.progress import Progress
from secateur.config import EngineArgs
from secateur.errors import ConfigError, SecateurError
from tests.support.fake_service import wait_for

RUNNING = {cluster.serve.controller.APP_NAME: {"status": "RUNNING", "message": ""}}
UNHEALTHY = {cluster.serve.controller.APP_NAME: {"status": "UNHEALTHY", "message": "its replica is being replaced"}}


class Controller:
    """A fake of Serve's controller: returns these statuses of the applications in turn, the last one forever."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self._answers = list(answers or [{}])
        self.delete_apps = SimpleNamespace(remote=lambda names: None)
        self.get_serve_instance_details = SimpleNamespace(remote=self._next)

    def _next(self) -> dict[str, Any]:
        return {"applications": self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the HTTP options with which Serve was started, on a cluster whose head is 10.0.0.1."""
    found: list[dict[str, Any]] = []
    nodes = [
        {"NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 8}},
        {"NodeManagerAddress": "10.0.0.1", "Resources": {"node:__internal_head__": 1}},
    ]
    monkeypatch.setattr(cluster.serve.launch, "ray_cluster", lambda *_: nullcontext())
    monkeypatch.setattr(cluster.serve.launch, "_get_global_client", lambda **options: None)
    monkeypatch.setattr(cluster.serve.launch.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(
        cluster.serve.launch.ray_serve, "start", lambda http_options, **options: found.append(http_options)
    )
    monkeypatch.setattr(cluster.serve.launch.ray_serve, "run", lambda application, **options: None)
    monkeypatch.setattr(cluster.serve.launch, "get_controller", Controller)
    monkeypatch.setattr(cluster.serve.launch.ray, "get", lambda answer, timeout: answer)
    return found


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make Serve run on the cluster already."""

    def run(**options: Any) -> None:
        client = SimpleNamespace(http_config=HTTPOptions(**options))
        monkeypatch.setattr(cluster.serve.launch, "_get_global_client", lambda **options: client)

    return run


def url_of(**fields: Any) -> str:
    with running(EngineArgs.load({"device": "cpu", **fields}), address="10.0.0.1:6379") as url:
        return url


# Where it is


@pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "http://10.0.0.1:8123"), ("127.0.0.1", "http://127.0.0.1:8123")])
def test_on_a_cluster_the_url_is_the_heads(started: list[dict[str, Any]], host: str, url: str) -> None:
    assert url_of(host=host, port=8123) == url
    assert started == [{"host": host, "port": 8123}]


def test_a_running_serve_sets_the_url(started: list[dict[str, Any]], there: Callable[..., None]) -> None:
    there(host="0.0.0.0", port=8456)
    assert url_of() == url_of(port=8456) == url_of(port=0) == "http://10.0.0.1:8456"
    assert not started


def test_another_port_than_the_running_serves_is_an_error(
    started: list[dict[str, Any]], there: Callable[..., None]
) -> None:
    there(host="0.0.0.0", port=8456)
    with pytest.raises(ConfigError, match=r"port: .*listens on 8456; write that or leave the port out"):
        url_of(port=8000)


# How its Ray starts


@pytest.fixture
def ray_starts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Start a Ray whose attempts end as given: with an error, or None. Return what it says."""

    def start(*ends: Exception | None) -> list[str]:
        said, left = [], list(ends)

        def init(**options: Any) -> None:
            if (error := left.pop(0)) is not None:
                raise error

        monkeypatch.setattr(cluster.serve.ray_cluster.ray, "init", init)
        monkeypatch.setattr(cluster.serve.ray_cluster.ray, "shutdown", lambda: None)
        progress = Progress(is_shown=False)
        monkeypatch.setattr(progress, "say", said.append)
        with StopSignals() as signals, local_cluster(signals, progress):
            assert not left
        return said

    return start


def test_a_ray_that_does_not_start_is_started_once_more(ray_starts: Callable[..., list[str]]) -> None:
    assert ray_starts(None) == []
    [line] = ray_starts(Exception("The node timed out during startup. This could happen.\nMore."), None)
    assert line == "Ray did not start, and is started once more: The node timed out during startup"


def test_ray_gets_each_mig_slice_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray counts cards by itself, and would name the slices 0, 1 and 2, of which CUDA knows one."""
    seen = []

    def init(**options: Any) -> None:
        seen.append((options["num_gpus"], os.environ["CUDA_VISIBLE_DEVICES"]))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cluster.serve.ray_cluster, "gpu_names", lambda: ["MIG-a", "MIG-b", "MIG-c"])
    monkeypatch.setattr(cluster.serve.ray_cluster.ray, "init", init)
    monkeypatch.setattr(cluster.serve.ray_cluster.ray, "shutdown", lambda: None)
    with StopSignals() as signals, local_cluster(signals, Progress(is_shown=False)):
        pass
    assert seen == [(3, "MIG-a,MIG-b,MIG-c")] and "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_ray_that_never_starts_is_one_sentence_with_what_to_set(ray_starts: Callable[..., list[str]]) -> None:
    told = r"^Ray did not start: no GCS; if this machine is busy, .* set RAY_raylet_start_wait_time_s=900 .*now 300\)"
    with pytest.raises(SecateurError, match=told):
        ray_starts(Exception("late"), RuntimeError("no GCS.\nStack:\n ..."))
    with pytest.raises(SecateurError, match="set TMPDIR to a folder with a short path"):
        ray_starts(OSError("AF_UNIX path length cannot exceed 107 bytes"))


def test_ray_waits_for_its_node_as_long_as_it_is_told(
    ray_starts: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself stops asking after 30 s. It need not wait for a raylet that has ended."""
    services, asked, raylets = cluster.serve.ray_cluster.ray._private.services, [], [1]

    def get_node(address: str, node: str) -> str:
        asked.append(node)
        if len(asked) < 1000:
            raise RuntimeError("not yet")
        return "found"

    def init(**options: Any) -> None:
        assert services.get_node("127.0.0.1:1", "a") == "found"
        limits = {value for name, value in os.environ.items() if name.lower() == "ray_worker_register_timeout_seconds"}
        assert options["address"] == "local" and limits == {"300"}

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(cluster.serve.ray_cluster.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(cluster.serve.ray_cluster, "descendants", lambda: raylets)
    monkeypatch.setattr(cluster.serve.ray_cluster, "wait_gone", lambda pids, timeout_s: [])
    monkeypatch.setattr(cluster.serve.ray_cluster, "name_of", lambda pid: "raylet")
    monkeypatch.setattr(cluster.serve.ray_cluster, "is_running", lambda pid: True)
    monkeypatch.setattr(cluster.serve.ray_cluster.ray, "init", init)
    monkeypatch.setattr(cluster.serve.ray_cluster.ray, "shutdown", lambda: None)
    with StopSignals() as signals, local_cluster(signals, Progress(is_shown=False)):
        assert len(asked) == 1000
    asked.clear()
    raylets.clear()
    with pytest.raises(SecateurError, match="its raylet has ended"), StopSignals() as signals:
        with local_cluster(signals, Progress(is_shown=False)):
            pass
    assert len(asked) == 2, "once for each start"


@pytest.mark.parametrize("where", ["start", "run"])
def test_a_serve_that_starts_too_slowly_is_one_sentence_with_what_to_set(
    started: list[dict[str, Any]], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **options: Any) -> None:
        raise TimeoutError("HTTP proxies not available after 300s.")

    monkeypatch.setattr(cluster.serve.launch.ray_serve, where, fail)
    with pytest.raises(SecateurError, match=r"^Ray Serve did not start: HTTP proxies .* 300s; if this machine is busy"):
        url_of()


# How long it stays


@pytest.fixture
def checked(started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return the error that ends `watch`, given the responses of the proxy and of Serve."""

    def run(answers: list[httpx2.Response | None], *statuses: dict[str, Any]) -> str:
        left, slept = list(answers), []

        def get(url: str, **options: Any) -> httpx2.Response:
            assert url == "http://127.0.0.1:8000/-/healthz"
            if (answer := left.pop(0)) is None:
                raise httpx2.ConnectError("refused")
            return answer

        controller = Controller(*statuses)
        monkeypatch.setattr(cluster.serve.launch, "get_controller", lambda: controller)
        monkeypatch.setattr(cluster.serve.launch.httpx2, "get", get)
        monkeypatch.setattr(cluster.serve.launch.time, "sleep", slept.append)
        with pytest.raises(SecateurError, match=r"is lost: .* start it again") as error:
            watch("http://127.0.0.1:8000")
        assert not left
        assert slept == [5.0] * len(answers)
        return str(error.value)

    return run


@pytest.mark.parametrize(
    ("final", "reason"),
    [
        ({}, "its application was deleted"),
        ({"secateur": {"status": "DEPLOY_FAILED", "message": "no GPU"}}, "its application failed, no GPU"),
    ],
)
def test_a_service_that_serve_gives_up_is_an_error(
    checked: Callable[..., str], final: dict[str, Any], reason: str
) -> None:
    """It must be reported three times in a row: a restarted controller may not know its applications yet."""
    statuses = [RUNNING, {}, {}, UNHEALTHY, final, final, final]
    assert reason in checked([httpx2.Response(200)] * len(statuses), *statuses)


def test_a_dead_proxy_is_waited_for(checked: Callable[..., str], caplog: pytest.LogCaptureFixture) -> None:
    answers = [httpx2.Response(503), *[None] * 50, httpx2.Response(200), *[None] * 3]
    checked(answers, *[RUNNING] * 52, {})
    said = [record.getMessage() for record in caplog.records if "proxy" in record.getMessage()]
    assert ["again" in line for line in said] == [False, True, False]


def test_a_service_whose_raylet_has_ended_is_an_error_though_the_proxy_answers(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cluster.serve.launch, "get_controller", lambda: Controller(RUNNING))
    monkeypatch.setattr(cluster.serve.launch.httpx2, "get", lambda url, **options: httpx2.Response(200))
    monkeypatch.setattr(cluster.serve.launch, "CHECK_PERIOD_S", 0.01)
    (tmp_path / "raylet").symlink_to(shutil.which("sleep"))
    raylet = subprocess.Popen([tmp_path / "raylet", "60"])
    try:
        wait_for(lambda: name_of(raylet.pid) == "raylet")
        threading.Timer(0.5, raylet.kill).start()
        with pytest.raises(SecateurError, match="its Ray"):
            watch("http://127.0.0.1:8000")
    finally:
        raylet.kill()
        raylet.wait()


# How it ends


def test_it_waits_until_serve_has_ended_the_application(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = Controller(RUNNING, RUNNING, {})
    monkeypatch.setattr(cluster.serve.launch, "get_controller", lambda: controller)
    url_of()
    assert controller._answers == [{}]


def test_an_unresponsive_ray_is_not_waited_for_forever(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    over, calls = threading.Event(), []

    def hang() -> dict[str, Any]:
        calls.append("status")
        over.wait()
        return {"applications": RUNNING}

    controller = Controller()
    controller.get_serve_instance_details.remote = hang
    monkeypatch.setattr(cluster.serve.controller, "DELETE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(cluster.serve.launch, "get_controller", lambda: controller)
    url_of(shutdown_timeout=0.5)
    assert "has not ended the application" in caplog.text
    [deleting] = [thread for thread in threading.enumerate() if thread.name == "serve-delete"]
    over.set()
    deleting.join(60)
    assert not deleting.is_alive() and calls == ["status"]


def test_a_failed_deletion_is_reported_and_stops_nothing_else(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(names: list[str]) -> None:
        raise RuntimeError("the controller is dead")

    controller = Controller()
    controller.delete_apps.remote = fail
    monkeypatch.setattr(cluster.serve.launch, "get_controller", lambda: controller)
    url_of()
    assert "could not end the application" in caplog.text


def test_a_start_that_is_interrupted_leaves_no_application_on_a_cluster(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[list[str]] = []
    controller = Controller()
    controller.delete_apps.remote = deleted.append
    monkeypatch.setattr(cluster.serve.launch, "get_controller", lambda: controller)

    def run(application: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(cluster.serve.launch.ray_serve, "run", run)
    with pytest.raises(KeyboardInterrupt):
        url_of()
    assert deleted == [["secateur"]]


# What signals do


def test_signals_do_not_interrupt_the_shutdown(started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGINT too if it was ignored, as in background jobs of a script."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    ended = []

    def delete(controller: Controller, drain_s: float) -> None:
        signal.raise_signal(signal.SIGTERM)
        ended.append("whole")

    monkeypatch.setattr(cluster.serve.launch, "delete_application", delete)
    try:
        args = EngineArgs.load({"device": "cpu"})
        with pytest.raises(KeyboardInterrupt), running(args, address="10.0.0.1:6379"):
            signal.raise_signal(signal.SIGINT)
        assert ended == ["whole"]
        with running(args, address="10.0.0.1:6379"):
            pass
        assert ended == ["whole", "whole"]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


HANGING = """
import subprocess, time
from cluster.serve.signals import StopSignals
with StopSignals():
    try:
        subprocess.Popen(["sh", "-c", "sleep 600 & echo up; wait"])
        time.sleep(600)
    finally:
        time.sleep(600)
"""
"""A service whose clean-up hangs."""


def test_the_third_signal_ends_everything_at_once() -> None:
    command = [sys.executable, "-c", HANGING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "up\n"
        below = psutil.Process(process.pid).children(recursive=True)
        for said in ("is stopping; 2 more", "is stopping; 1 more", "is killed"):
            assert process.poll() is None
            process.terminate()
            assert said in process.stderr.readline()
        assert process.wait(60) == 128 + signal.SIGKILL
    assert len(below) == 2
    assert psutil.wait_procs(below, timeout=60)[1] == []
