"""Responses of Serve's proxy if no replica answers: Serve's own server and router, without Ray."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from ray.serve._private.common import DeploymentID, EndpointInfo
from ray.serve._private.http_util import (
    configure_http_middlewares,
    configure_http_options_with_defaults,
    convert_object_to_asgi_messages,
    start_asgi_http_server,
)
from ray.serve._private.proxy_router import ProxyRouter
from ray.serve.config import HTTPOptions
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS

from cluster.http.limits import HttpLimits, LimitedProtocol
from cluster.serve.proxy import OpenAIErrors, environment, middlewares
from cluster.serve.sessions import Sessions

ENDPOINT = {DeploymentID("secateur", "secateur"): EndpointInfo(route="/")}


class ShortProtocol(LimitedProtocol):
    limits = HttpLimits(head_s=0.6)


class Handle:
    """A fake handle of a deployment; `is_ready`: whether it has ever had a replica."""

    is_ready = False

    def running_replicas_populated(self) -> bool:
        return self.is_ready


class Proxy:
    """Serve's proxy with an application in place of the replicas."""

    def __init__(self, replica: ASGIApp) -> None:
        self.handle, self._replica = Handle(), replica
        self.proxy_router = ProxyRouter(lambda *_: self.handle)  # type: ignore[arg-type, return-value]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for name, value in scope["headers"]:
            if name == b"serve_multiplexed_model_id":
                value.decode()
        if self.proxy_router.match_route(scope["path"]) is None:
            for message in convert_object_to_asgi_messages(f"Path '{scope['path']}' not found.", status_code=404):
                await send(message)
        elif scope["path"].startswith("/-/"):
            await PlainTextResponse("success")(scope, receive, send)
        else:
            while not self.handle.is_ready:
                await asyncio.sleep(0.01)
            await self._replica(scope, receive, send)


@pytest.fixture(autouse=True)
def protocols(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("auto", "httptools"):
        monkeypatch.setitem(HTTP_PROTOCOLS, name, HTTP_PROTOCOLS[name])


@asynccontextmanager
async def serving(replica: ASGIApp) -> AsyncIterator[tuple[Proxy, httpx2.AsyncClient]]:
    """Start a proxy as Serve does, with our callback; yield it with a client."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    options = configure_http_options_with_defaults(HTTPOptions(host="127.0.0.1", port=port))
    options.middlewares.extend(middlewares(f"{__name__}:ShortProtocol"))
    proxy = Proxy(replica)
    serving, server = await start_asgi_http_server(proxy, options, event_loop=asyncio.get_running_loop())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False) as client:
            yield proxy, client
    finally:
        server.should_exit = True
        await serving


def refusal(response: httpx2.Response) -> str:
    """Check a 503 and return its message."""
    assert response.status_code == 503
    assert response.headers["content-type"] == "application/json"
    assert int(response.headers["retry-after"]) > 0
    assert len(response.headers.get_list("x-request-id")) == 1
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert error["type"] == "service_unavailable_error"
    return error["message"]


async def test_a_proxy_without_a_replica_answers_503_in_our_format() -> None:
    async with serving(JSONResponse({"status": "ok"})) as (proxy, client):
        for path in ("/health", "/v1/models", "/nowhere"):
            assert refusal(await client.get(path)) == "the service is starting; try again later"
        proxy.proxy_router.update_routes(ENDPOINT)  # and no replica yet
        assert refusal(await client.get("/health")) == "the service is starting; try again later"
        assert refusal(await client.post("/v1/completions", json={})) == "the service is starting; try again later"
        proxy.handle.is_ready = True
        assert (await client.get("/health")).json() == {"status": "ok"}
        proxy.proxy_router.update_routes({})
        assert refusal(await client.get("/health")) == "the service is draining or has ended; try again later"
        assert refusal(await client.get("/health", headers={"X-Request-ID": "mine"})).startswith("the service")


async def test_a_request_that_starts_the_first_replica_is_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment with zero replicas starts one on request."""
    monkeypatch.setattr("cluster.serve.proxy.HOLD_S", 10.0)
    async with serving(JSONResponse({"status": "ok"})) as (proxy, client):
        proxy.proxy_router.update_routes(ENDPOINT)
        waiting = asyncio.create_task(client.get("/health"))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        proxy.handle.is_ready = True
        assert (await waiting).json() == {"status": "ok"}


async def test_serve_s_own_paths_are_left_to_serve() -> None:
    async with serving(JSONResponse({})) as (proxy, client):
        assert (await client.get("/-/healthz")).status_code == 404  # this test's proxy has no such thing then
        proxy.proxy_router.update_routes(ENDPOINT)
        assert (await client.get("/-/healthz")).text == "success"


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """As Serve does when a replica dies during a request."""


async def bug(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError("a secret")


def told(text: str, status: int) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in convert_object_to_asgi_messages(text, status_code=status):
            await send(message)

    return app


@pytest.mark.parametrize(
    ("replica", "status", "kind", "message"),
    [
        (nothing, 503, "service_unavailable_error", "the replica ended before it answered; try again later"),
        (bug, 500, "server_error", "internal error; see the log of Serve's proxy"),
        (told("Deployment is unavailable.", 503), 503, "service_unavailable_error", "Deployment is unavailable."),
        (told("Request 1 timed out.", 408), 408, "timeout_error", "Request 1 timed out."),
    ],
)
async def test_serves_plain_text_errors_get_our_format(replica: ASGIApp, status: int, kind: str, message: str) -> None:
    async with serving(replica) as (proxy, client):
        proxy.proxy_router.update_routes(ENDPOINT)
        proxy.handle.is_ready = True
        response = await client.get("/health")
        assert response.status_code == status
        assert ("retry-after" in response.headers) is (status == 503)
        assert len(response.headers.get_list("x-request-id")) == 1
        assert (response.json()["error"]["type"], response.json()["error"]["message"]) == (kind, message)


@pytest.mark.parametrize(
    "answer",
    [JSONResponse({"error": {}}, 503), JSONResponse({}, 404), PlainTextResponse("no", 404), PlainTextResponse("x")],
)
async def test_an_applications_responses_pass_unchanged(answer: Any) -> None:
    async with serving(answer) as (proxy, client):
        proxy.proxy_router.update_routes(ENDPOINT)
        proxy.handle.is_ready = True
        response = await client.get("/health")
        assert (response.status_code, response.content) == (answer.status_code, answer.body)
        assert response.headers["content-type"] == answer.headers["content-type"]


async def test_headers_that_serve_cannot_read_are_a_400() -> None:
    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse({"id": dict(scope["headers"])[b"x-request-id"].decode()})(scope, receive, send)

    async with serving(echo) as (proxy, client):
        proxy.proxy_router.update_routes(ENDPOINT)
        proxy.handle.is_ready = True
        response = await client.get("/", headers={b"X-Request-ID": b"caf\xe9"})
        assert response.headers["x-request-id"] == response.json()["id"] and response.json()["id"].isascii()
        assert (await client.get("/", headers={"X-Request-ID": "mine"})).json() == {"id": "mine"}
        response = await client.get("/", headers={b"serve_multiplexed_model_id": b"\xff"})
        assert response.status_code == 400
        assert "is not UTF-8" in response.json()["error"]["message"]


async def test_a_proxy_s_server_has_our_limits() -> None:
    async with serving(JSONResponse({})) as (_, client):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"GET /health HT")
        assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_the_environment_makes_serve_call_us(monkeypatch: pytest.MonkeyPatch) -> None:
    [(name, path)] = environment().items()
    monkeypatch.setattr(f"ray.serve._private.http_util.{name}", path)
    middlewares = configure_http_middlewares(HTTPOptions()).middlewares
    assert [each.cls for each in middlewares] == [Sessions, OpenAIErrors]
    monkeypatch.setenv(name, "mine:callback")
    assert environment() == {name: "mine:callback"}
