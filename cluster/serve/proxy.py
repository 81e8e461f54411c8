"""Middleware for Serve's proxies: request limits, sessions, and OpenAI's errors where no replica answers.

Serve has one hook for this. Its proxies read an environment variable at start-up, call the function that it names (here
`middlewares`) and wrap their application in the result. This module does not import torch, because every proxy is a
process.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS

from cluster.http.request_ids import request_id_of
from cluster.serve.sessions import Sessions
from secateur.responses import REQUEST_ID_HEADER, ErrorResponse

logger = logging.getLogger("ray.serve")

CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
RETRY_AFTER_S = 10
HOLD_S = 0.5
"""How long Serve may look for a replica before the first one is ready.

It is not 0, because a deployment with `min_replicas: 0` starts a replica only when a request arrives.
"""

_ERROR_TYPES = {408: "timeout_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
"""Error types for the statuses that Serve itself answers in plain text."""


def environment() -> dict[str, str]:
    """Return the environment that makes Ray's proxies call `middlewares`; a callback that is already set stays."""
    return {CALLBACK: os.environ.get(CALLBACK, f"{__name__}:middlewares")}


def middlewares(protocol: str = "cluster.http.limits:LimitedProtocol") -> list[Middleware]:
    """Return the proxy's middleware, the innermost first; each proxy calls this once, before it creates its server.

    It also installs `protocol`, the import path of the server's protocol class, in uvicorn's table of protocols: Serve
    lets uvicorn choose.
    """
    HTTP_PROTOCOLS.update(auto=protocol, httptools=protocol)
    return [Middleware(Sessions), Middleware(OpenAIErrors)]


class OpenAIErrors:
    """Answers in OpenAI's error format where Serve would answer in plain text, after minutes, or never.

    - No application, or no replica ready yet: 503 with Retry-After and a reason.
    - A replica that dies before it answers: 503.
    - Serve's own 408, 429 and 503: the same status and text.

    The application's responses and Serve's own paths, `/-/healthz` and `/-/routes`, pass unchanged.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._router = _proxy_router(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")).startswith("/-/"):
            await self._app(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        headers[REQUEST_ID_HEADER] = request_id_of(headers)  # another where Serve would fail on the caller's
        if (reason := self._unavailable_reason()) is not None:
            await _error_response(503, reason)(scope, receive, _with_id(send, scope))
            return
        response, is_ready = _ResponseRewriter(send), self._is_ready()
        if is_ready:
            await self._forward(scope, receive, response)
        else:
            await self._forward_briefly(scope, receive, response)
        if not response.has_started:
            why = "the replica ended before it answered" if is_ready else "the service is starting"
            await _error_response(503, f"{why}; try again later")(scope, receive, _with_id(send, scope))

    async def _forward(self, scope: Scope, receive: Receive, response: _ResponseRewriter) -> None:
        try:
            await self._app(scope, receive, response.send)
        except UnicodeDecodeError as error:  # Serve reads some headers as UTF-8
            if response.has_started:
                raise
            error_response = _error_response(400, f"a header is not UTF-8: {error.object!r}")
            await error_response(scope, receive, _with_id(response.send, scope))
        except Exception:
            if response.has_started:
                raise
            logger.exception("a request failed in the proxy")
            error_response = _error_response(500, "internal error; see the log of Serve's proxy")
            await error_response(scope, receive, _with_id(response.send, scope))

    async def _forward_briefly(self, scope: Scope, receive: Receive, response: _ResponseRewriter) -> None:
        """Forward the request, and give up if no response starts within HOLD_S."""
        forwarding = asyncio.ensure_future(self._forward(scope, receive, response))
        starting = asyncio.ensure_future(response.started.wait())
        try:
            await asyncio.wait({forwarding, starting}, timeout=HOLD_S, return_when=asyncio.FIRST_COMPLETED)
            if response.has_started or forwarding.done():
                await forwarding
        finally:
            for task in (forwarding, starting):
                task.cancel()
            await asyncio.gather(forwarding, starting, return_exceptions=True)

    def _unavailable_reason(self) -> str | None:
        """Return why no application can answer, or None if there is one."""
        if self._router is None or self._router.endpoints:
            return None
        was_there = self._router.ready_for_traffic(is_head=True)[0]
        return f"the service {'is draining or has ended' if was_there else 'is starting'}; try again later"

    def _is_ready(self) -> bool:
        """Return whether a replica has ever been ready. From then on Serve holds requests while it replaces one."""
        if self._router is None:
            return True
        ready: bool = self._router.ready_for_traffic(is_head=False)[0]  # is_head=True would ignore replicas
        return ready


class _ResponseRewriter:
    """Sends one response, records whether it has started, and rewrites Serve's own errors."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held_start: Message | None = None
        self.started = asyncio.Event()

    @property
    def has_started(self) -> bool:
        return self.started.is_set()

    async def send(self, message: Message) -> None:
        self.started.set()
        if message["type"] == "http.response.start" and _is_serve_error(message):
            self._held_start = message
            return
        if (start := self._held_start) is not None:
            self._held_start = None
            if not message.get("more_body", False):  # Serve sends its errors in one piece
                start, message = _rewrite_error(start, message)
            await self._send(start)
        await self._send(message)


def _is_serve_error(start: Message) -> bool:
    content_type = Headers(raw=start["headers"]).get("content-type", "")
    return start["status"] in _ERROR_TYPES and content_type.startswith("text/plain")


def _rewrite_error(start: Message, body: Message) -> tuple[Message, Message]:
    status = start["status"]
    text = body.get("body", b"").decode("utf-8", "replace")
    start = {**start, "headers": list(start["headers"])}
    headers = MutableHeaders(scope=start)
    data = ErrorResponse.of(text, type=_ERROR_TYPES[status]).model_dump_json().encode()
    headers["Content-Type"], headers["Content-Length"] = "application/json", str(len(data))
    if status in (429, 503):
        headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    return start, {**body, "body": data}


def _error_response(status: int, message: str) -> ASGIApp:
    """Return an ASGI application that answers with this error."""
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = "service_unavailable" if status == 503 else None
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
    content = ErrorResponse.of(message, type=kind, code=code).model_dump_json()
    return Response(content, status_code=status, headers=headers, media_type="application/json")


def _with_id(send: Send, scope: Scope) -> Send:
    """Add the request id to our own responses; Serve adds it to those from further inside."""

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[REQUEST_ID_HEADER] = Headers(scope=scope)[REQUEST_ID_HEADER]
        await send(message)

    return send_with_id


def _proxy_router(app: Any) -> Any:
    """Return the router of Serve's proxy, which knows the applications and their replicas; None without one.

    The router is private to Serve. On a head node the public paths `/-/routes` and `/-/healthz` tell of the
    applications only.
    """
    while app is not None and not hasattr(app, "proxy_router"):
        app = getattr(app, "_app", None)
    return None if app is None else app.proxy_router
