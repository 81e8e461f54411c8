"""The form of POST /v1/files: Starlette reads it, and its fields are checked here."""

from __future__ import annotations

import asyncio
import shutil
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from cluster.errors import BadRequest, HttpError
from cluster.http.limits import MAX_FILE_BYTES
from secateur.batches_api import ExpiresAfter
from secateur.responses import ErrorResponse
from secateur.schema import problems_of

MAX_FIELD_BYTES = 1024
MAX_NAME_CHARS = 255
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
    """Read the form and write its file to `draft`. Raises BadRequest, HttpError (413), ClientDisconnect, OSError.

    Starlette spools the file to the disk (TMPDIR) as it arrives, so that one of any size takes no memory.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        raise _no_form(f"got {content_type or 'none'!r}")
    try:
        form = await request.form(max_files=1, max_fields=len(_FIELDS), max_part_size=MAX_FIELD_BYTES)
    except HTTPException as error:
        if error.status_code != HTTPStatus.BAD_REQUEST:
            raise
        raise _no_form(error.detail) from None
    try:
        upload, file = _checked(form)
        with draft.open("wb") as target:
            await asyncio.to_thread(shutil.copyfileobj, file.file, target)
    finally:
        await form.close()
    return upload


def _no_form(why: str) -> BadRequest:
    message = f"send one file as a form, with Content-Type: multipart/form-data; boundary=... ({why})"
    return BadRequest(message, param=None)


def _checked(form: FormData) -> tuple[Upload, UploadFile]:
    """Return the fields and the file of a form. Raises BadRequest, HttpError (413)."""
    fields = dict[str, str]()
    for name, value in form.multi_items():
        if name != "file" and name not in _FIELDS:
            raise BadRequest(f"unknown field {name!r}; a form has file, {', '.join(_FIELDS)}", param=name)
        if isinstance(value, UploadFile) != (name == "file"):
            instead = "send it as a file, with a filename" if name == "file" else "send it as text, without a filename"
            raise BadRequest(f"{name}: {instead}", param=name)
        if isinstance(value, str):
            fields[name] = value
    for name in ("purpose", "file"):
        if name not in form:
            raise BadRequest(f"the form has no field {name!r}, or ends before its last boundary", param=name)
    if (purpose := fields["purpose"]) != "batch":
        message = f"purpose must be 'batch', the only one that this service has (got {purpose!r})"
        raise BadRequest(message, param="purpose")
    file = form["file"]
    assert isinstance(file, UploadFile)
    if not file.size:
        raise BadRequest("the file is empty", param="file")
    if file.size > MAX_FILE_BYTES:
        message = f"a file has at most {MAX_FILE_BYTES >> 20} MiB; split it"
        raise HttpError(413, ErrorResponse.of(message, param="file", code="file_too_large"))
    filename = file.filename or "upload.jsonl"
    return Upload(filename[:MAX_NAME_CHARS], _expires_s(fields)), file


def _expires_s(fields: dict[str, str]) -> int | None:
    if _ANCHOR not in fields and _SECONDS not in fields:
        return None
    seconds = fields.get(_SECONDS, "")
    number = int(seconds) if seconds.isdecimal() and len(seconds) < 16 else fields.get(_SECONDS)
    try:
        return ExpiresAfter.model_validate({"anchor": fields.get(_ANCHOR), "seconds": number}).seconds
    except ValidationError as error:
        problem = problems_of(error, ExpiresAfter.model_fields)[0]
        raise BadRequest(f"expires_after[{problem.field}] {problem.message}", param="expires_after") from None
