"""Middleware and error handlers: CORS, request ids, API keys, and errors in OpenAI's format."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.engine.rank_exits import EngineDead
from cluster.errors import BadRequest, HttpError, not_found
from cluster.http.api_keys import ApiKeys, matching_key, owner_of
from cluster.http.in_process import IN_PROCESS
from cluster.http.limits import HttpLimits
from cluster.http.paths import ADMITTED, PathMiddleware
from cluster.observe.rate_limits import Callers
from cluster.openai.deltas import GenerationFailed
from cluster.openai.failures import to_http_error
from cluster.text.tokenizer_pool import TokenizerPoolDown, TokenizerPoolFull
from secateur.errors import Problem
from secateur.jsonl import MAX_LEVELS, is_nested
from secateur.responses import IGNORED_HEADER, REQUEST_ID_HEADER, ErrorResponse
from secateur.schema import problems_of
from secateur.speculative import Speculative

logger = logging.getLogger(__name__)

PROTECTED = ("/v1/", "/tokenize", "/detokenize", "/tokenizer_info", "/server_info")
_SANE_ID = re.compile(r"[!-~]{1,512}")
"""Printable ASCII: ids go into logs and headers, and Serve's proxies fail on some other characters."""

_INSTEAD = {
    "/v1/messages": "this service does not speak Anthropic's interface; send the conversation to /v1/chat/completions "
    "or /v1/responses, or put a proxy that translates, such as LiteLLM, between client and service",
    "/v1/embeddings": "this service generates text; embeddings need a service for embedding models",
    "/v1/audio": "this service generates text from text; send a transcript to /v1/chat/completions",
    "/v1/images": "this service generates text; images need a service for image models",
    "/v1/conversations": "conversations are not kept; chain responses by previous_response_id",
    "/v1/assistants": "assistants are not implemented; use /v1/responses, with previous_response_id",
    "/v1/threads": "threads are not implemented; use /v1/responses, with previous_response_id",
}
"""Maps the beginning of another service's path to the message of its 404."""
EXPOSED_HEADERS = (REQUEST_ID_HEADER, IGNORED_HEADER, "retry-after")
"""Response headers that scripts of other origins may read, beside those that every script may read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cors:
    """Which scripts of other origins may use the service (cross-origin resource sharing).

    Example: Cors(origins=["https://app.example"])
    """

    origins: Sequence[str]
    methods: Sequence[str] = ("*",)
    headers: Sequence[str] = ("*",)
    credentials: bool = False


_HALF = re.compile("[\ud800-\udfff]")
_MAY_BE_HALF = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]|\0")
"""Lone surrogates as JSON may spell them, whole pairs, which are as good as any character, and JSON in UTF-16."""


async def check_json(request: Request) -> None:
    """Raise BadRequest for a JSON body that is nested too deeply or has a lone surrogate, which no answer can repeat.

    A dependency of all routes.
    """
    has_json = "json" in request.headers.get("content-type", "").lower()
    if not has_json or getattr(request.scope["route"], "body_field", None) is None:
        return  # to read the body of an upload would be too much
    raw = await request.body()
    may_be_half, may_be_deep = _MAY_BE_HALF.search(raw), raw.count(b"[") + raw.count(b"{") > MAX_LEVELS
    if not (may_be_half or may_be_deep):
        return
    try:
        body = await request.json()
    except (ValueError, RecursionError):  # of a type that FastAPI does not read as JSON
        return
    for field, value in body.items() if isinstance(body, dict) else ():
        if may_be_half and _has_half([field, value]):
            param = None if _has_half(field) else field
            message = "has half a character, a lone surrogate such as \\ud83c; write it whole"
            raise BadRequest(f"{param or 'the name of a field'} {message}", param=param)
        if may_be_deep and is_nested(value, MAX_LEVELS):
            raise BadRequest(f"{field} is nested more than {MAX_LEVELS} levels deep; make it flatter", param=field)


def _has_half(value: Any) -> bool:
    pending = [value]
    while pending:
        match pending.pop():
            case str() as text if _HALF.search(text):
                return True
            case dict() as fields:
                pending += [*fields.keys(), *fields.values()]
            case list() as items:
                pending += items
    return False


def is_protected(path: str) -> bool:
    """Return whether a path needs an API key, if the service has keys."""
    return f"{path}/".startswith(PROTECTED)


def error_response(error: HttpError) -> Response:
    """Serialize an error, with Retry-After if it has one."""
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return Response(
        error.body.model_dump_json(), status_code=error.status, headers=headers, media_type="application/json"
    )


def install(
    app: FastAPI,
    *,
    api_keys: ApiKeys | None,
    callers: Callers,
    echo_request_id: bool,
    refusal: Callable[[], HttpError | None],
    on_rejected: Callable[[], None],
    client_request: Callable[[], AbstractContextManager[None]],
    on_response: Callable[[str, str, int, float], None],
    root_path: str = "",
    cors: Cors | None = None,
) -> None:
    """Add the exception handlers and middlewares.

    `refusal` returns why no request can be admitted at the moment. `on_rejected` is called for every 429 of a client
    but those of its key's limits; each of its requests to a protected path runs inside a `client_request`.
    `on_response` gets method, route, status and seconds of every response to a client.
    """

    async def known(request: Request, error: Exception) -> Response:
        http_error = to_http_error(error)
        if http_error.status == HTTPStatus.TOO_MANY_REQUESTS and IN_PROCESS not in request.scope:
            on_rejected()
        return error_response(http_error)

    for kind in (HttpError, BadRequest, TokenizerPoolFull, TokenizerPoolDown, EngineDead, GenerationFailed):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(HTTPException, _starlette_error)
    # The middleware added last is the outermost: responses to requests without a key have a request id, too.
    app.add_middleware(_AdmissionMiddleware, refusal=refusal, on_rejected=on_rejected)
    if api_keys is not None:
        app.add_middleware(_ApiKeyMiddleware, keys=api_keys, callers=callers)
    app.add_middleware(_ClientRequestMiddleware, running=client_request)
    app.add_middleware(_ResponseObserver, on_response=on_response)
    app.add_middleware(PathMiddleware, root_path=root_path)
    app.add_middleware(_RequestIdMiddleware, echo=echo_request_id)
    if cors is not None:  # it answers preflight requests, which have no API key, and adds its headers to errors
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors.origins,
            allow_methods=cors.methods,
            allow_headers=cors.headers,
            allow_credentials=cors.credentials,
            expose_headers=EXPOSED_HEADERS,
        )


async def _starlette_error(request: Request, error: Exception) -> Response:
    """Handle Starlette's errors: unknown route, wrong method, unreadable body."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        path = f"{_path_of(request.scope)}/"
        instead = next((told for prefix, told in _INSTEAD.items() if path.startswith(f"{prefix}/")), None)
        return error_response(not_found(instead or "no such path; see /openapi.json"))
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    message = str(error.detail or HTTPStatus(error.status_code).phrase)
    response = error_response(HttpError(error.status_code, ErrorResponse.of(message, type=kind)))
    response.headers.update(error.headers or {})
    return response


async def _invalid_body(request: Request, error: Exception) -> Response:
    """Handle a body or a query that fails validation: OpenAI's 400 instead of FastAPI's 422."""
    assert isinstance(error, RequestValidationError)
    if error.errors()[0]["loc"][0] == "query":  # a request that has no body
        return _invalid_fields(error)
    content_type = request.headers.get("content-type", "")
    if "json" not in content_type.lower():
        message = f"send the body as JSON, with Content-Type: application/json (got {content_type or 'none'!r})"
        return error_response(HttpError(400, ErrorResponse.of(message)))
    if problem_with_body := _no_object(error):
        return error_response(HttpError(400, ErrorResponse.of(problem_with_body)))
    return _invalid_fields(error)


def _invalid_fields(error: RequestValidationError) -> Response:
    # `problems_of` uses `errors()` alone, which both exception classes have.
    found = problems_of(cast(ValidationError, error), Speculative.model_fields)
    problems = [_without_body(problem) for problem in found]
    param = re.split(r"[.:]", problems[0].field or problems[0].message)[0]
    message = "; ".join(dict.fromkeys(map(str, problems)))
    return error_response(HttpError(400, ErrorResponse.of(message, param=param if param.isidentifier() else None)))


def _no_object(error: RequestValidationError) -> str | None:
    """Return the message for a body that is not a JSON object, None for one that is."""
    match error.errors()[0]:
        case {"type": "json_invalid", "loc": (_, place), "ctx": {"error": why}}:
            return f"the body is not JSON: {why} at character {place}"
        case {"type": "missing", "loc": ("body",)}:
            return "the body is empty; send a JSON object"
        case {"type": "model_attributes_type", "loc": ("body",)}:
            return "the body must be a JSON object, {...}"
    return None


def _without_body(problem: Problem) -> Problem:
    """Drop the location that FastAPI puts before a field: body.temperature -> temperature."""
    _, _, field = problem.field.partition(".")
    message = problem.message.removeprefix("Value error, ")
    return Problem("" if field.isdigit() else field, message)


class _ResponseObserver:
    """Reports every response, with the status with which it began. It sees the paths and methods of routes."""

    def __init__(self, app: ASGIApp, on_response: Callable[[str, str, int, float], None]) -> None:
        self._app = app
        self._on_response = on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or IN_PROCESS in scope:
            await self._app(scope, receive, send)
            return
        status, began = 500, time.perf_counter()  # what an exception becomes further out

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, observed)
        finally:
            # Set by the router. Of the requests that end before it, such as those without a key, only these are named.
            before_router = path if (path := _path_of(scope)) in ADMITTED else "none"
            handler = getattr(scope.get("route"), "path", before_router)
            self._on_response(scope["method"], handler, status, time.perf_counter() - began)


class _RequestIdMiddleware:
    """Sets `request.state.request_id` to the client's X-Request-ID if it is valid, else to a new one, and echoes it.

    Also bounds the body, refuses compressed ones (a few KiB may be gigabytes), and answers unhandled exceptions with a
    500 without a traceback.
    """

    def __init__(self, app: ASGIApp, echo: bool) -> None:
        self._app = app
        self._echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given, encoding = headers.get(REQUEST_ID_HEADER, ""), headers.get("content-encoding", "identity")
        request_id = given if _SANE_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id

        started, num_bytes = False, 0
        max_bytes = HttpLimits().max_body_bytes(scope["method"], scope["path"])

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes and IN_PROCESS not in scope:  # a line of a batch, which has been measured
                raise HTTPException(413, f"the body is larger than {max_bytes >> 20} MiB; send less at once")
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._echo:
                    MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            if encoding.lower() != "identity":
                message = f"the body is compressed ({encoding[:32]!r}); send it as it is, without Content-Encoding"
                raise BadRequest(message, param=None, code="unsupported_encoding")
            await self._app(scope, receive_limited, send_with_id)
        except Exception as error:
            if started:
                raise
            await error_response(to_http_error(error))(scope, receive, send_with_id)


class _ApiKeyMiddleware:
    """Answers 401 to requests of PROTECTED paths without `Authorization: Bearer <key>`, and 429 beyond a key's limits.

    Sets `request.state.caller` and `request.state.owner`. Only POST counts: other methods cost next to nothing.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, callers: Callers) -> None:
        self._app = app
        self._keys = keys
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and IN_PROCESS not in scope and is_protected(_path_of(scope)):
            keys, given = self._keys(), Headers(scope=scope).get("authorization", "").encode("latin-1")
            if (key := matching_key(given, keys)) is None:
                message = "missing or wrong API key; send 'Authorization: Bearer KEY'"
                body = ErrorResponse.of(message, type="authentication_error", code="invalid_api_key")
                response = error_response(HttpError(401, body))
                response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
            caller = self._callers.of(key, keys)
            scope.setdefault("state", {}).update(caller=caller, owner=owner_of(key))
            if scope["method"] == "POST" and (refusal := caller.admit()) is not None:
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _AdmissionMiddleware:
    """Refuses requests before their body is read, where it would make no difference.

    An overloaded service refuses most requests, and reading and validating a body takes longer than the rest.
    """

    def __init__(self, app: ASGIApp, refusal: Callable[[], HttpError | None], on_rejected: Callable[[], None]) -> None:
        self._app = app
        self._refusal = refusal
        self._on_rejected = on_rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_admitted = scope["type"] == "http" and scope["method"] == "POST" and _path_of(scope) in ADMITTED
        if not is_admitted or IN_PROCESS in scope or (refusal := self._refusal()) is None:
            await self._app(scope, receive, send)
            return
        if refusal.status == HTTPStatus.TOO_MANY_REQUESTS:
            self._on_rejected()
        await error_response(refusal)(scope, receive, send)


class _ClientRequestMiddleware:
    """Runs the requests of clients, but for those of monitoring, inside a context that counts them."""

    def __init__(self, app: ASGIApp, running: Callable[[], AbstractContextManager[None]]) -> None:
        self._app = app
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_counted = scope["type"] == "http" and IN_PROCESS not in scope and is_protected(_path_of(scope))
        with self._running() if is_counted else nullcontext():
            await self._app(scope, receive, send)


def _path_of(scope: Scope) -> str:
    """Return the path below the service's prefix."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
