"""The client's HTTP as pure functions: build requests, parse responses and event streams.

`client.py` adds sockets and clocks, once blocking and once async; `retries.py` decides on retries.
"""

from __future__ import annotations

import codecs
import json
import re
import uuid
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import httpx2
from pydantic import BaseModel, ValidationError

from secateur import errors, responses
from secateur.retries import retry_after

Model = TypeVar("Model", bound=BaseModel)
Messages = str | list[dict[str, Any]]

_LINE_END = re.compile(rb"\r\n|\r|\n")
_LAST_EVENT_ID = responses.LAST_EVENT_ID_HEADER
_EVENT_ID = re.compile(rb"1:[0-9a-f]{16}:[!-~]+")
"""Our services' ids. Others may send ids and not continue streams behind them: answers would begin again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[Model]):
    """A request to send, and the model that parses its response or each chunk of its stream."""

    path: str
    reads: type[Model]
    body: dict[str, Any] | None = None
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)

    def after(self, event_id: str | None) -> Call[Model]:
        """Return the call that continues a stream behind this event."""
        return self if event_id is None else replace(self, headers={**self.headers, _LAST_EVENT_ID: event_id})


def complete_call(prompt: Any, params: Mapping[str, Any]) -> Call[responses.CompletionResponse]:
    """Return the call of a completion."""
    return _generation("/v1/completions", responses.CompletionResponse, {"prompt": prompt}, params, stream=False)


def stream_complete_call(prompt: Any, params: Mapping[str, Any]) -> Call[responses.CompletionChunk]:
    """Return the call of a streamed completion."""
    return _generation("/v1/completions", responses.CompletionChunk, {"prompt": prompt}, params, stream=True)


def chat_call(messages: Messages, params: Mapping[str, Any]) -> Call[responses.ChatCompletionResponse]:
    """Return the call of a chat completion."""
    return _generation(
        "/v1/chat/completions", responses.ChatCompletionResponse, {"messages": _turns(messages)}, params, stream=False
    )


def stream_chat_call(messages: Messages, params: Mapping[str, Any]) -> Call[responses.ChatCompletionChunk]:
    """Return the call of a streamed chat completion."""
    return _generation(
        "/v1/chat/completions", responses.ChatCompletionChunk, {"messages": _turns(messages)}, params, stream=True
    )


def models_call() -> Call[responses.ModelList]:
    """Return the call that lists models."""
    return Call(path="/v1/models", reads=responses.ModelList, method="GET")


def tokenize_call(prompt: Messages, params: Mapping[str, Any]) -> Call[responses.TokenizeResponse]:
    """Return the call that tokenizes a text or a conversation."""
    content = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
    return Call(path="/tokenize", reads=responses.TokenizeResponse, body={**content, **_given(params)})


def detokenize_call(tokens: list[int]) -> Call[responses.DetokenizeResponse]:
    """Return the call that turns token ids into text."""
    return Call(path="/detokenize", reads=responses.DetokenizeResponse, body={"tokens": tokens})


def _generation(
    path: str, reads: type[Model], content: dict[str, Any], params: Mapping[str, Any], *, stream: bool
) -> Call[Model]:
    if "stream" in params:
        raise TypeError("`stream` is not a parameter here; use stream_complete or stream_chat")
    given = _given(params)
    request_id = given.get("request_id")
    headers = {responses.IDEMPOTENCY_HEADER: uuid.uuid4().hex}  # every attempt gets the same answer
    if request_id:
        headers[responses.REQUEST_ID_HEADER] = str(request_id)
    return Call(path=path, reads=reads, body={**content, **given, "stream": stream}, headers=headers)


def _given(params: Mapping[str, Any]) -> dict[str, Any]:
    """Drop None values, which mean "not given", and turn models such as Speculative into dicts."""
    return {
        key: value.model_dump(exclude_none=True, by_alias=True) if isinstance(value, BaseModel) else value
        for key, value in params.items()
        if value is not None
    }


def _turns(messages: Messages) -> list[dict[str, Any]]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def request_of(http: httpx2.Client | httpx2.AsyncClient, call: Call[Any]) -> httpx2.Request:
    """Build the HTTP request. Raises BadRequestError for NaN, lone surrogates and request ids that are not ASCII."""
    try:
        return http.build_request(call.method, call.path, json=call.body, headers=call.headers)
    except ValueError as error:
        raise errors.BadRequestError(f"the request cannot be encoded: {error}", code="invalid_request") from None


# -- responses --------------------------------------------------------------------------------------------


def read(call: Call[Model], response: httpx2.Response) -> Model:
    """Parse a response whose body was read. Raises APIError."""
    if not response.is_success:
        raise error_of(response)
    warn_of_ignored(response.headers)
    return _parse(call.reads, response.content)


def warn_of_ignored(headers: Mapping[str, str]) -> None:
    """Warn about parameters that the service ignored, such as misspelt ones, which only a header reports."""
    if names := headers.get(responses.IGNORED_HEADER):
        warnings.warn(f"the service ignored {names}: unknown to it, or without effect", stacklevel=2)


def error_of(response: httpx2.Response) -> errors.APIError:
    """Return the error that a response stands for; its body was read."""
    try:
        body: Any = response.json()
    except ValueError:
        body = response.text
    detail = body.get("error", body.get("detail")) if isinstance(body, dict) else body
    if not isinstance(detail, dict):
        detail = {"message": str(detail or response.reason_phrase or "no message")}
    return api_error(response.status_code, detail, body, retry_after(response.headers))


def api_error(
    status: int | None, detail: Mapping[str, Any], body: Any, retry_after: float | None = None
) -> errors.APIError:
    """Return our error for OpenAI's error object `detail` = {message, type, param, code}."""
    message = str(detail.get("message") or "no message")
    fields: dict[str, Any] = {
        "status": status,
        "code": detail.get("code"),
        "param": detail.get("param"),
        "type": detail.get("type"),
        "body": body,
    }
    text = f"{status}: {message}" if status else message
    match status:
        case 429:
            return errors.RateLimitError(text, retry_after=retry_after, **fields)
        case 503:
            return errors.ServiceUnavailableError(text, retry_after=retry_after, **fields)
        case 400 | 409 | 413 | 422 | 431:
            return errors.BadRequestError(text, **fields)
        case 401 | 403:
            return errors.AuthenticationError(text, **fields)
        case 404:
            return errors.NotFoundError(text, **fields)
        case int() if status >= 500:
            return errors.ServerError(text, **fields)
        case _:
            return errors.APIError(text, **fields)


def connection_error(error: httpx2.TransportError, url: str) -> errors.APIConnectionError:
    """Return our error for a failed connection or a timeout."""
    if isinstance(error, httpx2.TimeoutException):
        failure: errors.APIConnectionError = errors.APITimeoutError(
            f"{url} did not answer in time ({type(error).__name__})"
        )
    else:
        failure = errors.APIConnectionError(f"no answer from {url}: {error or type(error).__name__}")
    failure.__cause__ = error
    return failure


class Events(Generic[Model]):
    r"""Parse the bytes of a server-sent event stream into chunks. The final `[DONE]` sets `done`.

    Lines are split here and end with \n, \r\n or a lone \r, as the specification says. The HTTP library's line
    iterator also splits at U+2028 and U+0085, which models write and JSON does not escape.
    """

    def __init__(self, call: Call[Model], last_id: str | None = None) -> None:
        self._call = call
        self._rest = b""
        self._is_start = True
        self._ends_in_cr = False
        self._data: list[bytes] = []
        self._id = last_id
        self.done = False
        self.last_id = last_id
        """The id of the last event, behind which the stream can be continued; None if it cannot."""
        self._is_empty = True

    def feed(self, data: bytes) -> Iterator[Model]:
        """Yield the chunks that these bytes complete. Raises APIError for an error event."""
        for line in self._lines(data):
            if (event := self._line(line)) is None:
                continue
            if event == b"[DONE]":
                self.done = True
                return
            chunk = self._chunk(event)
            self._is_empty, self.last_id = False, self._id
            yield chunk

    def _lines(self, data: bytes) -> list[bytes]:
        """Return the lines that these bytes complete, without line ends."""
        if not data:
            return []
        # A \r at the end of a read ends its line at once, because the next bytes may arrive much later. If those begin
        # with \n, it belongs to the same line end.
        if self._ends_in_cr:
            data = data.removeprefix(b"\n")
        self._ends_in_cr = data.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + data)
        if lines and self._is_start:
            self._is_start, lines[0] = False, lines[0].removeprefix(codecs.BOM_UTF8)
        return lines

    def _line(self, line: bytes) -> bytes | None:
        """Return the event's data if this line ends an event with data, else None."""
        if line:
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":  # comments (": ping") and event names are not used
                self._data.append(value)
            elif name == b"id":
                self._id = value.decode() if _EVENT_ID.fullmatch(value) else None
            return None
        data, self._data = b"\n".join(self._data), []
        return data or None

    @property
    def can_continue(self) -> bool:
        """Whether another stream can go on where this one broke off."""
        return self._is_empty or self.last_id is not None

    def end(self) -> None:
        """Call this at the end of the stream. Raises APIConnectionError if `[DONE]` is missing."""
        if not self.done:
            raise errors.APIConnectionError("the stream ended before [DONE]")

    def _chunk(self, data: bytes) -> Model:
        if b'"error"' in data:
            body = json.loads(data)
            if isinstance(body, dict) and isinstance(detail := body.get("error"), dict):
                code = detail.get("code")
                raise api_error(code if isinstance(code, int) else None, detail, body)
        return _parse(self._call.reads, data)


def _parse(model: type[Model], data: str | bytes) -> Model:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise errors.APIError(f"the service sent no {model.__name__}: {error}", body=data) from None
