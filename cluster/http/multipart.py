"""Reads multipart/form-data (RFC 7578) as it arrives, so that a file of any size takes no memory."""

from __future__ import annotations

from collections.abc import Iterator
from email.message import Message
from typing import NamedTuple

from cluster.http.errors import BadRequest

MAX_HEADER_BYTES = 8 << 10


class FormPart(NamedTuple):
    """The beginning of a field; `filename` is None for one that is no file."""

    name: str
    filename: str | None


class FormReader:
    """Splits a form into its parts. Raises BadRequest for what is no form.

    Example: [*FormReader(content_type).feed(b'--x...')] == [FormPart("purpose", None), b"batch"]
    """

    def __init__(self, content_type: str) -> None:
        kind = _header("content-type", content_type)
        boundary = kind.get_boundary()
        if kind.get_content_type() != "multipart/form-data" or not boundary:
            sent = content_type or "none"
            told = f"send the file as a form, with Content-Type: multipart/form-data; boundary=... (got {sent!r})"
            raise BadRequest(told, param=None)
        self._delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
        self._buffer = bytearray(b"\r\n")  # the first delimiter has no line before it
        self._is_in_part = False
        self.is_complete = False

    def feed(self, data: bytes) -> Iterator[FormPart | bytes]:
        """Yield what the next bytes bring: the beginning of each part, then its content in pieces."""
        self._buffer += data
        while not self.is_complete:
            found = self._buffer.find(self._delimiter)
            if found < 0:  # the end of the buffer may be the beginning of a delimiter
                yield from self._content(max(0, len(self._buffer) - len(self._delimiter) + 1))
                return
            yield from self._content(found)
            after = len(self._delimiter)
            if self._buffer[after : after + 2] == b"--":
                self.is_complete = True
                return
            end = self._buffer.find(b"\r\n\r\n", after)
            if end < 0:
                if len(self._buffer) > MAX_HEADER_BYTES:
                    raise BadRequest("the form has a part without headers, or with too long ones", param=None)
                return
            part = _part(self._buffer[after:end])
            del self._buffer[: end + 2]  # the delimiter of an empty part begins with the second line end
            if self._buffer.startswith(self._delimiter):
                self._is_in_part = False
            else:
                del self._buffer[:2]
                self._is_in_part = True
            yield part

    def _content(self, size: int) -> Iterator[bytes]:
        """Take `size` bytes off the buffer; those before the first part are not content."""
        content = bytes(self._buffer[:size])
        del self._buffer[:size]
        if content and self._is_in_part:
            yield content


def _part(head: bytearray) -> FormPart:
    """Return the part whose headers these are."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() != "content-disposition":
            continue
        found = _header("content-disposition", value.strip())
        field = found.get_param("name", header="content-disposition")
        if isinstance(field, str):
            return FormPart(field, found.get_filename())
    raise BadRequest("the form has a part without a name", param=None)


def _header(name: str, value: str) -> Message:
    message = Message()
    message[name] = value
    return message
