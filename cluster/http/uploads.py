"""The form of POST /v1/files: its file goes to the disk as it arrives, its fields are checked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

from fastapi import Request
from pydantic import ValidationError

from cluster.errors import BadRequest, HttpError
from cluster.http.limits import MAX_FILE_BYTES
from cluster.http.multipart import FormPart, FormReader
from secateur.batches_api import ExpiresAfter
from secateur.responses import ErrorResponse
from secateur.schema import problems_of

MAX_FIELD_BYTES = 1024
MAX_NAME_CHARS = 255
WRITE_BYTES = 1 << 20
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("purpose", _ANCHOR, _SECONDS)
FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "A request in each line."},
                        "purpose": {"type": "string", "enum": ["batch"], "description": "What the file is for."},
                        _ANCHOR: {"type": "string", "enum": ["created_at"], "description": "See the next one."},
                        _SECONDS: {"type": "integer", "description": "Delete the file so long after its creation."},
                    },
                }
            }
        },
    }
}
"""The description of the form in the OpenAPI document, for FastAPI's `openapi_extra`."""


class Upload(NamedTuple):
    """The fields of a form; the content of its file is in the draft."""

    filename: str
    expires_s: int | None


async def receive_upload(request: Request, draft: Path) -> Upload:
    """Read the form and write its file to `draft`. Raises BadRequest, HttpError (413), ClientDisconnect, OSError."""
    reader = FormReader(request.headers.get("content-type", ""))
    fields, part, filename, size = dict[str, bytes](), FormPart("", None), None, 0
    pending = bytearray()
    with await asyncio.to_thread(draft.open, "wb") as file:
        async for data in request.stream():
            for item in reader.feed(data):
                if isinstance(item, FormPart):
                    part = _known(item)
                    if part.name == "file":
                        if filename is not None:
                            raise BadRequest("the form has several files; send one", param="file")
                        filename = part.filename or "upload.jsonl"
                    else:
                        fields[part.name] = b""
                elif part.name == "file":
                    size += len(item)
                    if size > MAX_FILE_BYTES:
                        message = f"a file has at most {MAX_FILE_BYTES >> 20} MiB; split it"
                        raise HttpError(413, ErrorResponse.of(message, param="file", code="file_too_large"))
                    pending += item
                else:
                    fields[part.name] += item
                    if len(fields[part.name]) > MAX_FIELD_BYTES:
                        raise BadRequest(f"has more than {MAX_FIELD_BYTES} bytes", param=part.name)
            if len(pending) >= WRITE_BYTES:
                await asyncio.to_thread(file.write, bytes(pending))
                pending.clear()
        await asyncio.to_thread(file.write, bytes(pending))
    if not reader.is_complete:
        raise BadRequest("the form is not complete: its last boundary is missing", param=None)
    texts = {name: value.decode("utf-8", "replace") for name, value in fields.items()}
    if texts.get("purpose") != "batch":
        got = f" (got {texts['purpose']!r})" if "purpose" in texts else ""
        raise BadRequest(f"purpose must be 'batch', the only one that this service has{got}", param="purpose")
    if filename is None:
        raise BadRequest("the form has no field 'file'", param="file")
    if not size:
        raise BadRequest("the file is empty", param="file")
    return Upload(filename[:MAX_NAME_CHARS], _expires_s(texts))


def _known(part: FormPart) -> FormPart:
    if part.name != "file" and part.name not in _FIELDS:
        raise BadRequest(f"unknown field {part.name!r}; a form has file, {', '.join(_FIELDS)}", param=part.name)
    return part


def _expires_s(fields: dict[str, str]) -> int | None:
    given = {"anchor": fields.get(_ANCHOR), "seconds": fields.get(_SECONDS)}
    if given == {"anchor": None, "seconds": None}:
        return None
    seconds = given["seconds"]
    number = int(seconds) if seconds is not None and seconds.isdecimal() and len(seconds) < 16 else seconds
    try:
        return ExpiresAfter.model_validate({**given, "seconds": number}).seconds
    except ValidationError as error:
        problem = problems_of(error, ExpiresAfter.model_fields)[0]
        raise BadRequest(f"expires_after[{problem.field}] {problem.message}", param="expires_after") from None
