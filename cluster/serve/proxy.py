"""What Serve's own proxies do for us: limits on requests, and OpenAI's errors where no replica answers.

Serve has one hook for this, an environment variable that its proxies read while they start: they call the function it
names, here `middlewares`, and put what that returns around everything else they do. Imports no torch: each proxy is a
process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS

from secateur.responses import REQUEST_ID_HEADER, ErrorResponse

logger = logging.getLogger("ray.serve")

CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
RETRY_AFTER_S = 10
HOLD_S = 0.5
"""So long Serve may look for a replica before the first one is ready. Not 0: a deployment that starts none before it is
asked has to be asked."""
_SANE_ID = re.compile(r"[!-~]{1,512}")

_ERROR_TYPES = {408: "timeout_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
"""The errors that Serve writes as plain text in an application's place."""


def environment() -> dict[str, str]:
    """What a Ray must have in its environment for its proxies to call `middlewares`. A callback that is set stays."""
    return {CALLBACK: os.environ.get(CALLBACK, f"{__name__}:middlewares")}


def middlewares(protocol: str = "cluster.http.limits:LimitedProtocol") -> list[Middleware]:
    """What a proxy calls once, before it makes its server. `protocol` is where that server's class is found.

    Serve leaves the choice of a protocol to uvicorn, and uvicorn to this table.
    """
    HTTP_PROTOCOLS.update(auto=protocol, httptools=protocol)
    return [Middleware(OpenAIErrors)]


class OpenAIErrors:
    """Answers in OpenAI's shape where Serve would answer in plain text, not at all, or only after minutes.

    No application, or none of its replicas ready yet: 503 with Retry-After and a reason. A replica that ends before it
    answered: 503. Serve's own 408, 429 and 503 keep their status and text. What an application answers passes as it is,
    and so do Serve's own paths, `/-/healthz` and `/-/routes`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._router = _router_of(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")).startswith("/-/"):
            await self._app(scope, receive, send)
            return
        _set_request_id(scope)
        if (absent := self._absence()) is not None:
            await _refuse(503, absent)(scope, receive, _with_id(send, scope))
            return
        answer, is_ready = _ResponseRewriter(send), self._is_ready()
        if is_ready:
            await self._ask(scope, receive, answer)
        else:
            await self._ask_briefly(scope, receive, answer)
        if not answer.has_started:
            why = "the replica ended before it answered" if is_ready else "the service is starting"
            await _refuse(503, f"{why}; try again later")(scope, receive, _with_id(send, scope))

    async def _ask(self, scope: Scope, receive: Receive, answer: _ResponseRewriter) -> None:
        try:
            await self._app(scope, receive, answer.send)
        except UnicodeDecodeError as error:  # Serve reads some headers as UTF-8
            if answer.has_started:
                raise
            refusal = _refuse(400, f"a header is not UTF-8: {error.object!r}")
            await refusal(scope, receive, _with_id(answer.send, scope))
        except Exception:
            if answer.has_started:
                raise
            logger.exception("a request failed in the proxy")
            refusal = _refuse(500, "internal error; see the log of Serve's proxy")
            await refusal(scope, receive, _with_id(answer.send, scope))

    async def _ask_briefly(self, scope: Scope, receive: Receive, answer: _ResponseRewriter) -> None:
        """As long as it takes if an answer begins within HOLD_S, else gives up."""
        asking = asyncio.ensure_future(self._ask(scope, receive, answer))
        beginning = asyncio.ensure_future(answer.started.wait())
        try:
            await asyncio.wait({asking, beginning}, timeout=HOLD_S, return_when=asyncio.FIRST_COMPLETED)
            if answer.has_started or asking.done():
                await asking
        finally:
            for task in (asking, beginning):
                task.cancel()
            await asyncio.gather(asking, beginning, return_exceptions=True)

    def _absence(self) -> str | None:
        """Why no application can answer; None if there is one."""
        if self._router is None or self._router.endpoints:
            return None
        was_there = self._router.ready_for_traffic(is_head=True)[0]
        return f"the service {'is draining or has ended' if was_there else 'is starting'}; try again later"

    def _is_ready(self) -> bool:
        """Whether a replica has ever been. Afterwards Serve holds requests while it replaces one."""
        if self._router is None:
            return True
        ready: bool = self._router.ready_for_traffic(is_head=False)[0]  # on the head it would not look at replicas
        return ready


class _ResponseRewriter:
    """One answer on its way: knows whether it has begun, and rewrites Serve's own errors."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: Message | None = None
        self.started = asyncio.Event()

    @property
    def has_started(self) -> bool:
        return self.started.is_set()

    async def send(self, message: Message) -> None:
        self.started.set()
        if message["type"] == "http.response.start" and _is_serves(message):
            self._held = message
            return
        if (start := self._held) is not None:
            self._held = None
            if not message.get("more_body", False):  # Serve sends its errors in one piece
                start, message = _rewritten(start, message)
            await self._send(start)
        await self._send(message)


def _is_serves(start: Message) -> bool:
    content_type = Headers(raw=start["headers"]).get("content-type", "")
    return start["status"] in _ERROR_TYPES and content_type.startswith("text/plain")


def _rewritten(start: Message, body: Message) -> tuple[Message, Message]:
    status = start["status"]
    text = body.get("body", b"").decode("utf-8", "replace")
    start = {**start, "headers": list(start["headers"])}
    headers = MutableHeaders(scope=start)
    data = ErrorResponse.of(text, type=_ERROR_TYPES[status]).model_dump_json().encode()
    headers["Content-Type"], headers["Content-Length"] = "application/json", str(len(data))
    if status in (429, 503):
        headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    return start, {**body, "body": data}


def _refuse(status: int, message: str) -> ASGIApp:
    """An application that answers this."""
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = "service_unavailable" if status == 503 else None
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
    content = ErrorResponse.of(message, type=kind, code=code).model_dump_json()
    return Response(content, status_code=status, headers=headers, media_type="application/json")


def _set_request_id(scope: Scope) -> None:
    """The caller's if it is sane, else a new one: on some that are not text Serve fails."""
    headers = MutableHeaders(scope=scope)
    if not _SANE_ID.fullmatch(headers.get(REQUEST_ID_HEADER, "")):
        headers[REQUEST_ID_HEADER] = f"req-{secrets.token_hex(12)}"


def _with_id(send: Send, scope: Scope) -> Send:
    """Serve itself adds the id to what comes from further inside."""

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[REQUEST_ID_HEADER] = Headers(scope=scope)[REQUEST_ID_HEADER]
        await send(message)

    return send_with_id


def _router_of(app: Any) -> Any:
    """The router of Serve's proxy, which knows the applications and whether they have replicas; None without one.

    Private to Serve: its public ways, `/-/routes` and `/-/healthz`, tell of the first alone on a head node.
    """
    while app is not None and not hasattr(app, "proxy_router"):
        app = getattr(app, "_app", None)
    return None if app is None else app.proxy_router
