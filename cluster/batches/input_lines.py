"""The lines of an input file, read and checked one after the other; their problems as OpenAI reports them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from secateur.batches_api import InvalidLine
from secateur.jsonl import content_of, value_of

MAX_LINES = 50_000
MAX_ID_CHARS = MAX_QUOTED_CHARS = 512
MAX_LINE_BYTES = 16 << 20
"""As much as the body of a request may have, without the line's end and a byte order mark."""
_AROUND = len(b"\xef\xbb\xbf\r\n")
_KEYS = ("custom_id", "method", "url", "body")


class InputLine(NamedTuple):
    """A valid line and its place in the file, in bytes."""

    number: int
    custom_id: str
    offset: int
    length: int


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


def read_lines(path: Path, endpoint: str, models: Sequence[str]) -> Iterator[InputLine | InvalidLine]:
    """Yield every line that is not blank, or what is wrong with it. Holds one line at a time. Raises OSError."""
    num_requests = 0
    with path.open("rb") as file:
        for number, offset, raw in _raw_lines(file):
            if raw is not None and not content_of(raw).strip():
                continue
            num_requests += 1
            if num_requests > MAX_LINES:
                message = f"A batch has at most {MAX_LINES} requests; split the file."
                yield InvalidLine(code="too_many_tasks", message=message, line=number)
                return
            try:
                if raw is None:
                    raise BadLine("invalid_request", f"This line has more than {MAX_LINE_BYTES} bytes; send less.")
                request = parse(raw)
                _check(request, endpoint, models)
            except BadLine as problem:
                yield problem.at(number)
            else:
                yield InputLine(number, request["custom_id"], offset, len(raw))
    if not num_requests:
        yield InvalidLine(code="empty_file", message="The input file is empty.")


def body_at(path: Path, offset: int, length: int) -> dict[str, Any]:
    """Return the body of a line that was valid. Raises OSError, BadLine if the file has changed."""
    with path.open("rb") as file:
        file.seek(offset)
        body: dict[str, Any] = parse(file.read(length))["body"]
        return body


def parse(raw: bytes) -> dict[str, Any]:
    """Return the object in a line. Raises BadLine."""
    try:
        line = value_of(content_of(raw))
    except ValueError as error:
        raise BadLine("invalid_json_line", f"This line is not parseable as valid JSON: {error}.") from None
    if not isinstance(line, dict):
        raise BadLine("invalid_json_line", 'This line must be a JSON object: {"custom_id": ..., "method": "POST", ...}')
    return line


def _raw_lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes | None]]:
    r"""Yield (number, offset, line); None for one that is too long. A line ends with \n, as in `secateur.jsonl`."""
    number = offset = 0
    while raw := file.readline(MAX_LINE_BYTES + _AROUND):
        number += 1
        if len(content_of(raw)) <= MAX_LINE_BYTES:
            yield number, offset, raw
        else:
            yield number, offset, None
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(MAX_LINE_BYTES)
        offset = file.tell()


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
