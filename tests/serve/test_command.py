"""`secateur serve` around its service: where it says it is reached, what it notices, how it ends. Ray does nothing."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from fake_service import wait_for
from ray.serve.config import HTTPOptions

import cluster.app
from cluster.app import running, stay
from cluster.processes import name_of
from secateur.config import EngineArgs
from secateur.errors import ConfigError, SecateurError

APPLICATIONS = {cluster.app.APP_NAME: "deleting"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The HTTP options with which Serve was started, on a cluster whose head is 10.0.0.1."""
    found: list[dict[str, Any]] = []
    nodes = [
        {"NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 8}},
        {"NodeManagerAddress": "10.0.0.1", "Resources": {"node:__internal_head__": 1}},
    ]
    monkeypatch.setattr(cluster.app, "_remote_cluster", lambda address: nullcontext())
    monkeypatch.setattr(cluster.app, "_get_global_client", lambda **options: None)
    monkeypatch.setattr(cluster.app.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(cluster.app.ray_serve, "start", lambda http_options, **options: found.append(http_options))
    monkeypatch.setattr(cluster.app.ray_serve, "run", lambda application, **options: None)
    monkeypatch.setattr(cluster.app.ray_serve, "delete", lambda name, **options: None)
    monkeypatch.setattr(cluster.app.ray_serve, "status", lambda: SimpleNamespace(applications={}))
    return found


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets Serve run on the cluster already."""

    def run(**options: Any) -> None:
        client = SimpleNamespace(http_config=HTTPOptions(**options))
        monkeypatch.setattr(cluster.app, "_get_global_client", lambda **options: client)

    return run


def url_of(**fields: Any) -> str:
    with running(EngineArgs.load({"device": "cpu", **fields}), address="10.0.0.1:6379") as url:
        return url


# Where it is


@pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "http://10.0.0.1:8123"), ("127.0.0.1", "http://127.0.0.1:8123")])
def test_on_a_cluster_the_service_is_reached_at_the_head(started: list[dict[str, Any]], host: str, url: str) -> None:
    assert url_of(host=host, port=8123) == url
    assert started == [{"host": host, "port": 8123}]


def test_a_serve_that_runs_already_says_where_it_is_reached(
    started: list[dict[str, Any]], there: Callable[..., None]
) -> None:
    there(host="0.0.0.0", port=8456)
    assert url_of() == url_of(port=8456) == url_of(port=0) == "http://10.0.0.1:8456"
    assert not started


def test_another_port_than_that_of_a_serve_that_runs_is_refused(
    started: list[dict[str, Any]], there: Callable[..., None]
) -> None:
    there(host="0.0.0.0", port=8456)
    with pytest.raises(ConfigError, match="port: .*listens on 8456; write that or leave the port out"):
        url_of(port=8000)


# How long it stays


def test_a_service_that_nothing_answers_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any answer will do, and a few in a row may be missing."""
    answers = [httpx2.Response(503), *[None] * 5, httpx2.Response(200), *[None] * 6]
    slept: list[float] = []

    def get(url: str, **options: Any) -> httpx2.Response:
        assert url == "http://127.0.0.1:8000/-/healthz"
        if (answer := answers.pop(0)) is None:
            raise httpx2.ConnectError("refused")
        return answer

    monkeypatch.setattr(cluster.app.httpx2, "get", get)
    monkeypatch.setattr(cluster.app.time, "sleep", slept.append)
    with pytest.raises(SecateurError, match="is lost: .* start it again"):
        stay("http://127.0.0.1:8000")
    assert not answers
    assert slept == [5.0] * 13


def test_a_service_whose_raylet_has_ended_is_an_error_though_the_proxy_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cluster.app.httpx2, "get", lambda url, **options: httpx2.Response(200))
    monkeypatch.setattr(cluster.app, "CHECK_PERIOD_S", 0.01)
    (tmp_path / "raylet").symlink_to(shutil.which("sleep"))
    raylet = subprocess.Popen([tmp_path / "raylet", "60"])
    try:
        wait_for(lambda: name_of(raylet.pid) == "raylet")
        threading.Timer(0.5, raylet.kill).start()
        with pytest.raises(SecateurError, match="its Ray"):
            stay("http://127.0.0.1:8000")
    finally:
        raylet.kill()
        raylet.wait()


# How it ends


def test_it_waits_until_serve_has_ended_the_application(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = [APPLICATIONS, APPLICATIONS, {}]
    monkeypatch.setattr(cluster.app.ray_serve, "status", lambda: SimpleNamespace(applications=statuses.pop(0)))
    url_of()
    assert not statuses


def test_a_ray_that_answers_no_more_is_not_waited_for_for_ever(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    over, calls = threading.Event(), []

    def hang() -> SimpleNamespace:
        calls.append("status")
        over.wait(20)
        return SimpleNamespace(applications=APPLICATIONS)

    monkeypatch.setattr(cluster.app, "DELETE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(cluster.app.ray_serve, "status", hang)
    began = time.monotonic()
    url_of()
    assert time.monotonic() - began < 15
    assert "has not ended the application" in caplog.text
    over.set()
    time.sleep(0.5)
    assert calls == ["status"], "a later call would start another Ray"


def test_a_serve_that_cannot_end_the_application_is_told_and_ends_nothing_else(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str, **options: Any) -> None:
        raise RuntimeError("the controller is dead")

    monkeypatch.setattr(cluster.app.ray_serve, "delete", fail)
    url_of()
    assert "could not end the application" in caplog.text
