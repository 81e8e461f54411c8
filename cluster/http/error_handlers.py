"""Error handlers: every error in OpenAI's format, or in Anthropic's below /v1/messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from http import HTTPStatus
from typing import cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from cluster.engine.rank_exits import EngineDead
from cluster.errors import BadRequest, HttpError, body_at, not_found
from cluster.http.in_process import IN_PROCESS
from cluster.http.paths import path_of
from cluster.openai.deltas import GenerationFailed
from cluster.openai.failures import to_http_error
from cluster.text.tokenizer_pool import TokenizerPoolDown, TokenizerPoolFull
from secateur.errors import Problem
from secateur.responses import ErrorResponse
from secateur.schema import problems_of
from secateur.speculative import Speculative

_INSTEAD = {
    "/v1/messages/batches": "batches of messages are not implemented; write chats, to /v1/batches",
    "/v1/embeddings": "this service generates text; embeddings need a service for embedding models",
    "/v1/audio": "this service generates text from text; send a transcript to /v1/chat/completions",
    "/v1/images": "this service generates text; images need a service for image models",
    "/v1/conversations": "conversations are not kept; chain responses by previous_response_id",
    "/v1/assistants": "assistants are not implemented; use /v1/responses, with previous_response_id",
    "/v1/threads": "threads are not implemented; use /v1/responses, with previous_response_id",
}
"""Maps the beginning of another service's path to the message of its 404."""


def error_response(error: HttpError, scope: Scope) -> Response:
    """Serialize an error of a request, with Retry-After if it has one."""
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    body = body_at(path_of(scope), error).model_dump_json()
    return Response(body, status_code=error.status, headers=headers, media_type="application/json")


def add_error_handlers(app: FastAPI, on_rejected: Callable[[], None]) -> None:
    """Add the handlers. `on_rejected` is called for every 429 of a route to a client."""

    async def known(request: Request, error: Exception) -> Response:
        http_error = to_http_error(error)
        if http_error.status == HTTPStatus.TOO_MANY_REQUESTS and IN_PROCESS not in request.scope:
            on_rejected()
        return error_response(http_error, request.scope)

    for kind in (HttpError, TokenizerPoolFull, TokenizerPoolDown, EngineDead, GenerationFailed):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(HTTPException, _starlette_error)


async def _starlette_error(request: Request, error: Exception) -> Response:
    """Handle Starlette's errors: unknown route, wrong method, unreadable body."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        path = f"{path_of(request.scope)}/"
        instead = next((told for prefix, told in _INSTEAD.items() if path.startswith(f"{prefix}/")), None)
        return error_response(not_found(instead or "no such path; see /openapi.json"), request.scope)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    message = str(error.detail or HTTPStatus(error.status_code).phrase)
    response = error_response(HttpError(error.status_code, ErrorResponse.of(message, type=kind)), request.scope)
    response.headers.update(error.headers or {})
    return response


async def _invalid_body(request: Request, error: Exception) -> Response:
    """Handle a body or a query that fails validation: OpenAI's 400 instead of FastAPI's 422."""
    assert isinstance(error, RequestValidationError)
    first, content_type, param = error.errors()[0], request.headers.get("content-type", ""), None
    match first:
        case {"loc": ("body", *_)} if "json" not in content_type.lower():
            message = f"send the body as JSON, with Content-Type: application/json (got {content_type or 'none'!r})"
        case {"type": "json_invalid", "loc": (_, place), "ctx": {"error": why}}:
            message = f"the body is not JSON: {why} at character {place}"
        case {"type": "missing", "loc": ("body",)}:
            message = "the body is empty; send a JSON object"
        case {"type": "model_attributes_type", "loc": ("body",)}:
            message = "the body must be a JSON object, {...}"
        case _:
            # `problems_of` uses `errors()` alone, which both exception classes have.
            found = problems_of(cast(ValidationError, error), Speculative.model_fields)
            problems = [_without_body(problem) for problem in found]
            message = "; ".join(dict.fromkeys(map(str, problems)))
            param = re.split(r"[.:]", problems[0].field or problems[0].message)[0]
    wrong = BadRequest(message, param=param if param and param.isidentifier() else None)
    return error_response(wrong, request.scope)


def _without_body(problem: Problem) -> Problem:
    """Drop the location that FastAPI puts before a field: body.temperature -> temperature."""
    _, _, field = problem.field.partition(".")
    message = problem.message.removeprefix("Value error, ")
    return Problem("" if field.isdigit() else field, message)
