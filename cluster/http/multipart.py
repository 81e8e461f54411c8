"""Reads multipart/form-data (RFC 7578) as it arrives, so that a file of any size takes no memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from cluster.errors import BadRequest


class FormPart(NamedTuple):
    """The beginning of a field; `filename` is None for one that is no file."""

    name: str
    filename: str | None


class FormReader:
    """Splits a form into its parts. Raises BadRequest for what is no form.

    Example: [*FormReader(content_type).feed(b'--x...')] == [FormPart("purpose", None), b"batch"]
    """

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind.lower() != b"multipart/form-data" or not boundary:
            sent = content_type or "none"
            told = f"send the file as a form, with Content-Type: multipart/form-data; boundary=... (got {sent!r})"
            raise BadRequest(told, param=None)
        self.is_complete = False
        self._found: list[FormPart | bytes] = []
        self._name = self._value = self._disposition = b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_end": self._on_end,
            },
        )

    def feed(self, data: bytes) -> Iterator[FormPart | bytes]:
        """Return what the next bytes bring: the beginning of each part, then its content in pieces."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise BadRequest(f"the body is not the form that its Content-Type announces: {error}", param=None) from None
        found, self._found = self._found, []
        return iter(found)

    def _on_part_begin(self) -> None:
        self._disposition = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name = self._value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if (name := options.get(b"name")) is None:
            raise BadRequest("the form has a part without a name", param=None)
        filename = options.get(b"filename")
        self._found.append(FormPart(_text(name), None if filename is None else _text(filename)))

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._found.append(data[start:end])

    def _on_end(self) -> None:
        self.is_complete = True


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
