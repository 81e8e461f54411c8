"""Exceptions that become error responses. Imports no web framework: the tokenizer workers load it, too."""

from __future__ import annotations

from secateur.messages_api import MessagesError, MessagesErrorDetail
from secateur.responses import ErrorResponse

RETRY_WHEN_DOWN_S = 10
"""Replacing a replica takes about this long."""
MESSAGES_PATH = "/v1/messages"
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Status -> Anthropic's type of an error."""
_TOO_LONG = "prompt is too long: "
"""Coding agents look for it, and shorten the conversation."""


class HttpError(Exception):
    """An error response with its status. Routes raise it; `http.error_handlers` sends it."""

    def __init__(self, status: int, body: ErrorResponse, *, retry_after_s: int | None = None) -> None:
        super().__init__(body.error.message)
        self.status = status
        self.body = body
        self.retry_after_s = retry_after_s


class BadRequest(HttpError):
    """The service cannot serve this request; `param` is the offending field. Becomes a 400."""

    def __init__(self, message: str, *, param: str | None, code: str | None = None) -> None:
        super().__init__(400, ErrorResponse.of(message, param=param, code=code))
        self.param = param
        self.code = code


class PromptError(BadRequest):
    """The prompt cannot be tokenized: invalid Unicode, too long a text, or messages that the chat template rejects."""


def not_found(message: str, *, code: str | None = None, param: str | None = None) -> HttpError:
    """Return a 404."""
    return HttpError(404, ErrorResponse.of(message, type="not_found_error", param=param, code=code))


def too_many_requests(message: str, *, retry_after_s: int = 1) -> HttpError:
    """Return a 429 with Retry-After."""
    body = ErrorResponse.of(message, type="rate_limit_error", code="too_many_requests")
    return HttpError(429, body, retry_after_s=retry_after_s)


def unavailable(message: str) -> HttpError:
    """Return a 503 with Retry-After."""
    body = ErrorResponse.of(message, type="service_unavailable_error", code="engine_unavailable")
    return HttpError(503, body, retry_after_s=RETRY_WHEN_DOWN_S)


def messages_error(error: HttpError) -> MessagesError:
    """Return an error as Anthropic writes it."""
    told = error.body.error
    kind = _MESSAGES_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = (_TOO_LONG if told.code == "context_length_exceeded" else "") + told.message
    return MessagesError(error=MessagesErrorDetail(type=kind, message=message))


def body_at(path: str, error: HttpError) -> ErrorResponse | MessagesError:
    """Return the body of an error at a path, in the words of the interface that it belongs to."""
    return messages_error(error) if f"{MESSAGES_PATH}/" in f"{path}/" else error.body
