"""The lines of an input file, read and checked one after the other; their problems as OpenAI reports them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from secateur.batches_api import InvalidLine
from secateur.jsonl import content_of, value_of

MAX_LINES = 50_000
MAX_ID_CHARS = MAX_QUOTED_CHARS = 512
MAX_LINE_BYTES = 16 << 20
"""As much as the body of a request may have, without the line's end and a byte order mark."""
_AROUND = len(b"\xef\xbb\xbf\r\n")
_KEYS = ("custom_id", "method", "url", "body")
_DUPLICATE = (
    "The custom_id {!r} for this request is a duplicate of another request. The custom_id parameter must be unique for "
    "each request in a batch."
)


class LineRequest(NamedTuple):
    """A line that holds a request."""

    number: int
    """The line's number, from 1."""
    custom_id: str
    body: dict[str, Any]


class BadLine(Exception):
    """A line is no request."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param

    def at(self, number: int) -> InvalidLine:
        """Return the problem as an entry of a batch's errors."""
        param = None if self.param is None else _quoted(self.param)
        return InvalidLine(code=self.code, message=_quoted(str(self)), param=param, line=number)


def _quoted(text: str) -> str:
    """Return text of a client that answers can repeat: bounded, and without lone surrogates."""
    return text[:MAX_QUOTED_CHARS].encode("utf-8", "backslashreplace").decode()


def check(path: Path, endpoint: str, models: Sequence[str], max_problems: int) -> int | list[InvalidLine]:
    """Return how many requests a file has, or what is wrong with it. Holds one line at a time. Raises OSError."""
    problems: list[InvalidLine] = []
    known: set[str] = set()
    num_requests = 0
    for number, raw in _lines(path):
        num_requests += 1
        try:
            if num_requests > MAX_LINES:
                raise BadLine("too_many_tasks", f"A batch has at most {MAX_LINES} requests; split the file.")
            if raw is None:
                raise BadLine("invalid_request", f"This line has more than {MAX_LINE_BYTES} bytes; send less.")
            _check(request := _parse(raw), endpoint, models)
            if (custom_id := request["custom_id"]) in known:
                raise BadLine("duplicate_custom_id", _DUPLICATE.format(custom_id), "custom_id")
            known.add(custom_id)
        except BadLine as problem:
            problems.append(problem.at(number))
            if num_requests > MAX_LINES or len(problems) > max_problems:
                break
    if not num_requests:
        problems.append(InvalidLine(code="empty_file", message="The input file is empty."))
    return problems or num_requests


def requests_in(path: Path, without: Container[int]) -> Iterator[LineRequest]:
    """Yield the requests of a valid file, but for these numbers. Raises OSError, BadLine if the file has changed."""
    for number, raw in _lines(path):
        if number not in without:
            line = _parse(raw or b"")
            yield LineRequest(number, line["custom_id"], line["body"])


def _parse(raw: bytes) -> dict[str, Any]:
    """Return the object in a line. Raises BadLine."""
    try:
        line = value_of(content_of(raw))
    except ValueError as error:
        raise BadLine("invalid_json_line", f"This line is not parseable as valid JSON: {error}.") from None
    if not isinstance(line, dict):
        raise BadLine("invalid_json_line", 'This line must be a JSON object: {"custom_id": ..., "method": "POST", ...}')
    return line


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    r"""Yield (number, line) of every line that is not blank; None for one that is too long.

    A line ends with \n, as in `secateur.jsonl`.
    """
    number = 0
    with path.open("rb") as file:
        while raw := file.readline(MAX_LINE_BYTES + _AROUND):
            number += 1
            is_too_long = len(content_of(raw)) > MAX_LINE_BYTES
            if is_too_long or content_of(raw).strip():
                yield number, None if is_too_long else raw
            while is_too_long and raw and not raw.endswith(b"\n"):
                raw = file.readline(MAX_LINE_BYTES)


def _check(line: dict[str, Any], endpoint: str, models: Sequence[str]) -> None:
    for key in _KEYS:
        if line.get(key) is None:
            raise BadLine("missing_required_parameter", f"Missing required parameter: {key!r}.", key)
    if unknown := sorted(line.keys() - set(_KEYS)):
        message = f"Unknown parameter: {unknown[0]!r}; a line has {', '.join(_KEYS)} and nothing else."
        raise BadLine("unknown_parameter", message, unknown[0])
    custom_id, body = line["custom_id"], line["body"]
    if not isinstance(custom_id, str) or not custom_id:
        raise BadLine("invalid_type", "'custom_id' must be a text that is not empty.", "custom_id")
    if len(custom_id) > MAX_ID_CHARS:
        raise BadLine("invalid_type", f"'custom_id' has more than {MAX_ID_CHARS} characters; use less.", "custom_id")
    if any("\ud800" <= char <= "\udfff" for char in custom_id):
        raise BadLine("invalid_type", "'custom_id' has half a character (a lone surrogate).", "custom_id")
    if line["method"] != "POST":
        raise BadLine("invalid_method", f"The method must be 'POST' (got {line['method']!r}).", "method")
    if line["url"] != endpoint:
        message = f"The URL {line['url']!r} does not match the endpoint of the batch, {endpoint!r}."
        raise BadLine("url_mismatch", message, "url")
    if not isinstance(body, dict):
        raise BadLine("invalid_type", "'body' must be an object, the body of a request.", "body")
    if body.get("stream"):
        raise BadLine("invalid_request", "A batch has whole answers; remove 'stream'.", "body.stream")
    if body.get("model") not in (None, *models):
        names = " and ".join(map(repr, models))
        message = f"The model {body['model']!r} does not exist; this service has {names}."
        raise BadLine("model_not_found", message, "body.model")
