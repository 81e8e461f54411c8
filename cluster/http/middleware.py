"""Middleware: request ids, what is observed of responses, API keys, and early refusals."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from http import HTTPStatus

from fastapi.responses import Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import BadRequest, HttpError
from cluster.http.api_keys import ApiKeys, matching_key, owner_of
from cluster.http.error_handlers import error_response
from cluster.http.in_process import IN_PROCESS
from cluster.http.limits import HttpLimits
from cluster.http.paths import ADMITTED, path_of
from cluster.http.request_ids import request_id_of
from cluster.observe.metrics import Metrics
from cluster.observe.rate_limits import Callers
from cluster.openai.failures import to_http_error
from cluster.system.shared import Shared
from secateur.responses import REQUEST_ID_HEADER, ErrorResponse

PROTECTED = ("/v1/", "/tokenize", "/detokenize", "/tokenizer_info", "/server_info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cors:
    """Which scripts of other origins may use the service (cross-origin resource sharing).

    Example: Cors(origins=["https://app.example"])
    """

    origins: Sequence[str]
    methods: Sequence[str] = ("*",)
    headers: Sequence[str] = ("*",)
    credentials: bool = False


def is_protected(path: str) -> bool:
    """Return whether a path needs an API key, if the service has keys."""
    return f"{path}/".startswith(PROTECTED)


@dataclass(frozen=True, slots=True)
class Observer:
    """Gives each request its id, `request.state.request_id`, and reports how it was answered.

    Requests of clients to protected paths count as running meanwhile. The response repeats the id if `echoes_id`. Also
    bounds the body, refuses compressed ones (a few KiB may be gigabytes), and answers unhandled exceptions with a 500
    without a traceback. `PathMiddleware` comes before it: it sees the paths and methods of routes.
    """

    app: ASGIApp
    metrics: Metrics
    echoes_id: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path, is_clients = Headers(scope=scope), path_of(scope), IN_PROCESS not in scope
        request_id = scope.setdefault("state", {})["request_id"] = request_id_of(headers)
        began, status, num_bytes = time.perf_counter(), 0, 0
        max_bytes = HttpLimits().max_body_bytes(scope["method"], path)

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes and is_clients:  # a line of a batch has been measured
                raise HTTPException(413, f"the body is larger than {max_bytes >> 20} MiB; send less at once")
            return message

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.echoes_id:
                    MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        if (encoding := headers.get("content-encoding", "identity")).lower() != "identity":
            message = f"the body is compressed ({encoding[:32]!r}); send it as it is, without Content-Encoding"
            refused = BadRequest(message, param=None, code="unsupported_encoding")
            await error_response(refused, scope)(scope, receive, observed)
            return
        try:
            with self.metrics.client_request() if is_clients and is_protected(path) else nullcontext():
                await self.app(scope, receive_limited, observed)
        except Exception as error:
            if status:
                raise
            await error_response(to_http_error(error), scope)(scope, receive, observed)
        finally:
            if is_clients:
                # Set by the router. Of the requests that end before it, such as those without a key, only these are
                # named.
                handler = getattr(scope.get("route"), "path", path if path in ADMITTED else "none")
                self.metrics.observe_http(scope["method"], handler, status or 500, time.perf_counter() - began)


class Gate:
    """Refuses requests of clients before their body is read.

    - 401 on protected paths without `Authorization: Bearer <key>` or, as Anthropic's clients send it,
      `x-api-key: <key>`; and 429 beyond a key's limits. Sets `request.state.caller` and `request.state.owner`. Only
      POST counts: other methods cost next to nothing.
    - What `refusal` returns, where it would make no difference: an overloaded service refuses most requests, and
      reading and validating a body takes longer than the rest.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        *,
        shared: Shared,
        keys: ApiKeys | None,
        refusal: Callable[[], HttpError | None],
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._callers = Callers(metrics, shared=shared)
        self._keys = keys
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        is_clients = scope["type"] == "http" and IN_PROCESS not in scope
        refused = self._refused(scope) if is_clients else None
        await (refused or self._app)(scope, receive, send)

    def _refused(self, scope: Scope) -> Response | None:
        path, is_post = path_of(scope), scope["method"] == "POST"
        if self._keys is not None and is_protected(path):
            keys, headers = self._keys(), Headers(scope=scope)
            given = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
            if (key := matching_key(given.encode("latin-1"), keys)) is None:
                message = "missing or wrong API key; send 'Authorization: Bearer KEY'"
                body = ErrorResponse.of(message, type="authentication_error", code="invalid_api_key")
                response = error_response(HttpError(401, body), scope)
                response.headers["WWW-Authenticate"] = "Bearer"
                return response
            caller = self._callers.of(key, keys)
            scope["state"].update(caller=caller, owner=owner_of(key))
            if is_post and (refusal := caller.admit()) is not None:
                return error_response(refusal, scope)
        if not is_post or path not in ADMITTED or (refusal := self._refusal()) is None:
            return None
        if refusal.status == HTTPStatus.TOO_MANY_REQUESTS:
            self._metrics.observe_rejected()
        return error_response(refusal, scope)
