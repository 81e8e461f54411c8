"""What every HTTP request passes: its id, the API key, and errors that always have OpenAI's shape."""

from __future__ import annotations

import logging
import re
import secrets
from http import HTTPStatus
from typing import cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.engine_client import EngineDead
from cluster.http.api_keys import ApiKeys, is_authorised
from cluster.http.limits import MAX_BODY_BYTES
from cluster.http.output_processor import EngineFailed
from cluster.http.request_params import BadRequest
from cluster.http.tokenizer import PromptError
from cluster.http.tokenizer_pool import TokenizerPoolDown, TokenizerPoolFull
from secateur.errors import Problem
from secateur.responses import REQUEST_ID_HEADER, ErrorResponse
from secateur.schema import problems_of
from secateur.speculative import Speculative

logger = logging.getLogger(__name__)

PROTECTED = ("/v1/", "/tokenize", "/detokenize", "/server_info")
_SANE_ID = re.compile(r"[!-~]{1,512}")
"""It goes into logs and headers, and Serve's proxies fail on some that are beyond ASCII."""
RETRY_WHEN_FULL_S = 1
RETRY_WHEN_DOWN_S = 10
"""About what a replica takes to be replaced."""


class Refused(Exception):
    """An answer that is an error: thrown by a route, written by the handlers below."""

    def __init__(self, status: int, body: ErrorResponse, *, retry_after_s: int | None = None) -> None:
        super().__init__(body.error.message)
        self.status = status
        self.body = body
        self.retry_after_s = retry_after_s


def not_found(message: str, *, code: str | None = None, param: str | None = None) -> Refused:
    return Refused(404, ErrorResponse.of(message, type="not_found_error", param=param, code=code))


def too_many(message: str) -> Refused:
    body = ErrorResponse.of(message, type="rate_limit_error", code="too_many_requests")
    return Refused(429, body, retry_after_s=RETRY_WHEN_FULL_S)


def unavailable(message: str) -> Refused:
    body = ErrorResponse.of(message, type="service_unavailable_error", code="engine_unavailable")
    return Refused(503, body, retry_after_s=RETRY_WHEN_DOWN_S)


def refusal_of(error: Exception) -> Refused:
    """The answer an exception deserves; unknown ones become a 500 that tells nothing and are logged."""
    match error:
        case Refused():
            return error
        case BadRequest():
            return Refused(400, ErrorResponse.of(str(error), param=error.param, code=error.code))
        case PromptError():
            return Refused(400, ErrorResponse.of(str(error), param=error.param, code=error.code))
        case TokenizerPoolFull():
            return too_many(str(error))
        case TokenizerPoolDown():
            return unavailable(str(error))
        case EngineDead():
            return unavailable(f"the engine is not available: {_first_line(error)}")
        case EngineFailed():
            message = f"the engine failed: {_first_line(error)}"
            return Refused(500, ErrorResponse.of(message, type="server_error", code="engine_error"))
        case _:
            logger.error("a request failed", exc_info=error)
            return Refused(500, ErrorResponse.of("internal error; see the server's log", type="server_error"))


def write(refusal: Refused) -> Response:
    headers = {} if refusal.retry_after_s is None else {"Retry-After": str(refusal.retry_after_s)}
    return Response(
        refusal.body.model_dump_json(), status_code=refusal.status, headers=headers, media_type="application/json"
    )


def install(app: FastAPI, *, api_keys: ApiKeys | None, echo_request_id: bool) -> None:
    """Error handlers and middlewares."""

    async def known(_: Request, error: Exception) -> Response:
        return write(refusal_of(error))

    for kind in (Refused, BadRequest, PromptError, TokenizerPoolFull, TokenizerPoolDown, EngineDead, EngineFailed):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    # The last one added is the outermost: a request without a key has an id too.
    if api_keys is not None:
        app.add_middleware(_ApiKey, keys=api_keys)
    app.add_middleware(_Outermost, echo=echo_request_id)


async def _http(_: Request, error: Exception) -> Response:
    """Starlette's own refusals: unknown route, wrong method, unreadable body."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return write(not_found("no such path; see /openapi.json"))
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    message = str(error.detail or HTTPStatus(error.status_code).phrase)
    response = write(Refused(error.status_code, ErrorResponse.of(message, type=kind)))
    response.headers.update(error.headers or {})
    return response


async def _invalid(request: Request, error: Exception) -> Response:
    """A body that does not fit its model: 400 as OpenAI answers it, not FastAPI's 422."""
    assert isinstance(error, RequestValidationError)
    content_type = request.headers.get("content-type", "")
    if "json" not in content_type:
        message = f"send the body as JSON, with Content-Type: application/json (got {content_type or 'none'!r})"
        return write(Refused(400, ErrorResponse.of(message)))
    if told := _no_object(error):
        return write(Refused(400, ErrorResponse.of(told)))
    # Both kinds of error have the same `errors()`, which is all that is read.
    found = problems_of(cast(ValidationError, error), Speculative.model_fields)
    problems = [_without_body(problem) for problem in found]
    param = re.split(r"[.:]", problems[0].field or problems[0].message)[0]
    message = "; ".join(dict.fromkeys(map(str, problems)))
    return write(Refused(400, ErrorResponse.of(message, param=param if param.isidentifier() else None)))


def _no_object(error: RequestValidationError) -> str | None:
    """What to say of a body without any fields that could be wrong."""
    match error.errors()[0]:
        case {"type": "json_invalid", "loc": (_, place), "ctx": {"error": why}}:
            return f"the body is not JSON: {why} at character {place}"
        case {"type": "missing", "loc": ("body",)}:
            return "the body is empty; send a JSON object"
        case {"type": "model_attributes_type", "loc": ("body",)}:
            return "the body must be a JSON object, {...}"
    return None


def _without_body(problem: Problem) -> Problem:
    """FastAPI's paths begin with where a value was: body.temperature -> temperature."""
    _, _, field = problem.field.partition(".")
    message = problem.message.removeprefix("Value error, ")
    return Problem("" if field.isdigit() else field, message)


class _Outermost:
    """X-Request-ID: the caller's if it is sane, else a new one; `request.state.request_id`, and echoed.

    Also the last resort for bugs: a 500 without a traceback, with the id under which the log has it.
    """

    def __init__(self, app: ASGIApp, echo: bool) -> None:
        self._app = app
        self._echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if _SANE_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id

        started, num_bytes = False, 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB; send less at once")
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._echo:
                    MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive_limited, send_with_id)
        except Exception as error:
            if started:
                raise
            await write(refusal_of(error))(scope, receive, send_with_id)


class _ApiKey:
    """401 without `Authorization: Bearer <key>` on what generates or tells; health and metrics stay open."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            if f"{path}/".startswith(PROTECTED) and not is_authorised(given, self._keys()):
                message = "missing or wrong API key; send 'Authorization: Bearer KEY'"
                body = ErrorResponse.of(message, type="authentication_error", code="invalid_api_key")
                response = write(Refused(401, body))
                response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
