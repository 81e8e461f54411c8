"""Paths with a trailing slash, behind a proxy's prefix, and HEAD; routes that load balancers ask."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from cluster.http.paths import PathMiddleware
from tests.support.fake_service import FakeService, wait_for

COMPLETION = {"prompt": "a", "max_tokens": 3}


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/fake-model", "/version", "/", "/metrics"])
def test_head_is_get_without_the_body(http: httpx2.Client, path: str) -> None:
    head, get = http.head(path), http.get(path)
    assert head.status_code == get.status_code == 200
    assert head.content == b"" and head.headers["content-type"] == get.headers["content-type"]
    if path != "/metrics":  # its values change
        assert head.headers["content-length"] == str(len(get.content))


def test_head_fails_where_get_does(own: Callable[..., FakeService]) -> None:
    with own(api_key="sesame").http() as http:
        assert http.head("/v1/models").status_code == 401
        assert http.head("/nowhere").status_code == 404
        assert http.head("/ping").status_code == 200
        refused = http.head("/v1/completions", headers={"Authorization": "Bearer sesame"})
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/models/fake-model/", "/health//", "/openapi.json/"])
def test_a_trailing_slash_changes_nothing(http: httpx2.Client, path: str) -> None:
    with_slash, without = http.get(path), http.get(path.rstrip("/"))
    assert with_slash.status_code == 200 and with_slash.json() == without.json()


def test_a_body_arrives_at_a_path_with_a_trailing_slash(own: Callable[..., FakeService]) -> None:
    with own(api_key="sesame").http(follow_redirects=False) as http:
        assert http.post("/v1/completions/", json=COMPLETION).status_code == 401
        answer = http.post("/v1/completions/", json=COMPLETION, headers={"Authorization": "Bearer sesame"})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("prefix", ["/llm", ""])
def test_behind_a_prefix_the_proxy_may_remove_it_or_not(own: Callable[..., FakeService], prefix: str) -> None:
    with own(root_path="/llm", api_key="sesame").http(follow_redirects=False) as http:
        key = {"Authorization": "Bearer sesame"}
        for path in ("/v1/models", "/v1/models/", "/v1/models/fake-model"):
            assert http.get(prefix + path).status_code == 401
            assert http.get(prefix + path, headers=key).status_code == 200
        assert http.post(f"{prefix}/v1/completions", json=COMPLETION).status_code == 401
        assert http.post(f"{prefix}/v1/completions", json=COMPLETION, headers=key).status_code == 200
        assert http.get(f"{prefix}/").text.startswith("<!doctype html>")
        assert http.get(f"{prefix}/openapi.json").json()["servers"] == [{"url": "/llm"}]
        assert '"/llm/openapi.json"' in http.get(f"{prefix}/docs").text.replace("'", '"')
        assert http.get("/llmv1/models", headers=key).status_code == 404


def test_the_prefix_alone_leads_to_the_page(own: Callable[..., FakeService]) -> None:
    """With the slash, as the page's requests are relative to it."""
    with own(root_path="/llm").http() as http:
        answer = http.get("/llm", follow_redirects=True)
        assert (answer.status_code, answer.url.path) == (200, "/llm/")


@pytest.mark.parametrize(
    ("given", "server_root", "path", "root", "seen"),
    [
        ("", "", "/a/", "", "/a"),
        ("", "/app", "/app/a/", "/app", "/app/a"),  # Ray Serve's route prefix
        ("/p", "/app", "/app/a", "/p", "/p/a"),
        ("/p", "", "/p/a", "/p", "/p/a"),
        ("/p", "", "/pa", "/p", "/p/pa"),
        ("/p", "", "/p", "/p", "/p"),
        ("", "", "/", "", "/"),
    ],
)
async def test_the_router_gets_a_path_under_its_root(
    given: str, server_root: str, path: str, root: str, seen: str
) -> None:
    scopes: list[Any] = []

    async def app(scope: Any, *_: Any) -> None:
        scopes.append(scope)

    scope = {"type": "http", "method": "HEAD", "path": path, "root_path": server_root}
    await PathMiddleware(app, given)(scope, None, None)  # type: ignore[arg-type]  # not called
    assert (scopes[0]["root_path"], scopes[0]["path"], scopes[0]["method"]) == (root, seen, "GET")
    assert scope["method"] == "HEAD", "the server leaves the body out by its own scope"


def test_ping_is_health(own: Callable[..., FakeService]) -> None:
    running = own(api_key="sesame")
    with running.http() as http:
        assert http.get("/ping").status_code == http.post("/ping").status_code == 200
        running.engine.die()
        wait_for(lambda: running.client.dead is not None)
        assert http.get("/ping").status_code == http.post("/ping").status_code == 503


def test_load_counts_running_and_waiting_requests(own: Callable[..., FakeService]) -> None:
    running = own()
    running.engine.hold.set()
    with running.http() as http, running.http() as other:
        assert http.get("/load").json() == {"server_load": 0}
        body = {"prompt": ["a", "b"], "n": 3, "temperature": 1}
        waiting = threading.Thread(target=lambda: other.post("/v1/completions", json=body))
        waiting.start()
        wait_for(lambda: http.get("/load").json() == {"server_load": 6})
        running.engine.hold.clear()
        waiting.join()
        assert http.get("/load").json() == {"server_load": 0}
