"""The OpenAPI document: which errors each route sends, which routes need an API key, and what streams send."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI

from cluster.errors import MESSAGES_PATH
from cluster.http.middleware import is_protected
from secateur.messages_api import MessagesError
from secateur.requests import REQUEST_HEADERS
from secateur.responses import ErrorResponse

_WHY = {
    HTTPStatus.BAD_REQUEST: "The body is not JSON, or a parameter is wrong or not implemented; `param` names it.",
    HTTPStatus.UNAUTHORIZED: "The API key is missing or wrong.",
    HTTPStatus.NOT_FOUND: "There is no such model, response, file or batch; or the service keeps no files and batches.",
    HTTPStatus.CONFLICT: "The state of the file or the batch does not allow it; or a stream cannot go on, because its "
    "answer is not the one that it began with.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body is too large.",
    HTTPStatus.TOO_MANY_REQUESTS: "Too many requests are pending; try later.",
    HTTPStatus.INTERNAL_SERVER_ERROR: "The engine failed on this request, or the service has a bug.",
    HTTPStatus.SERVICE_UNAVAILABLE: "The engine or the tokenizer is not available; try later.",
}
_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
_EVENT = {
    "type": "object",
    "properties": {
        "data": {"type": "string", "description": "One chunk or event, as JSON; or `[DONE]`, which ends a stream."},
        "event": {"type": "string", "description": "The type of an event of `/v1/responses` or `/v1/messages`."},
        "id": {"type": "string", "description": "To send as `Last-Event-ID` when the stream breaks."},
    },
    "required": ["data"],
    "additionalProperties": False,
}
STREAM = {"content": {"text/event-stream": {"itemSchema": _EVENT}}}
"""The second form of an answer. `itemSchema`, of OpenAPI 3.2, describes each event; an older reader skips it."""
RESUMABLE = {
    "parameters": [
        {"name": name, "in": "header", "required": False, "description": why, "schema": {"type": "string"}}
        for name, why in REQUEST_HEADERS.items()
    ]
}
"""The headers of a request, for FastAPI's `openapi_extra`."""

Responses = dict[int | str, dict[str, Any]]


def errors(*statuses: int, model: type[ErrorResponse | MessagesError] = ErrorResponse) -> Responses:
    """Return the declaration of these error responses, for FastAPI's `responses`."""
    declared: Responses = {}
    for status in statuses:
        has_retry = status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
        declared[status] = {"model": model, "description": _WHY[HTTPStatus(status)]}
        declared[status] |= {"headers": _RETRY_AFTER} if has_retry else {}
    return declared


_OF_BODIES = (400, 404, 413, 429, 500, 503)
WITH_BODY = errors(*_OF_BODIES)
"""Errors of the routes that take a body."""
WITH_BODY_OF_MESSAGES = errors(*_OF_BODIES, model=MessagesError)
"""The same in Anthropic's form."""


def complete(app: FastAPI, *, has_keys: bool) -> None:
    """Make the app's document true: no 422, which is never sent, and API keys where they are needed."""
    document = app.openapi

    def completed() -> dict[str, Any]:
        schema = document()  # cached by FastAPI; what follows changes nothing the second time
        for path, operations in schema["paths"].items():
            error = MessagesError.__name__ if path.startswith(MESSAGES_PATH) else ErrorResponse.__name__
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if has_keys and is_protected(path):
                    operation["security"] = [{"api_key": []}]
                    operation["responses"]["401"] = {
                        "description": _WHY[HTTPStatus.UNAUTHORIZED],
                        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}},
                    }
        components = schema["components"]
        for unused in ("HTTPValidationError", "ValidationError"):
            components["schemas"].pop(unused, None)
        if has_keys:
            components["securitySchemes"] = {"api_key": {"type": "http", "scheme": "bearer"}}
        return schema

    app.openapi = completed  # type: ignore[method-assign]  # as FastAPI documents
