"""The lines of output and error files, as OpenAI writes them."""

from __future__ import annotations

import json
import uuid

from secateur.responses import IGNORED_HEADER

_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
"""JSON texts may have them as they are, but many programs end a line there."""


def answered(custom_id: str, *, status: int, request_id: str, body: str, ignored: str = "") -> str:
    """Return the line of a request that the service answered, with success or not; `body` is JSON.

    `ignored`: the header that names fields of the request without effect. There is no OpenAI field for it.
    """
    headers = f', "headers": {json.dumps({IGNORED_HEADER: ignored})}' if ignored else ""
    response = f'{{"status_code": {status}, "request_id": {json.dumps(request_id)}, "body": {body}{headers}}}'
    return _line(custom_id, response.translate(_LINE_ENDS), "null")


def unanswered(custom_id: str, code: str, message: str) -> str:
    """Return the line of a request that has no HTTP answer."""
    return _line(custom_id, "null", json.dumps({"code": code, "message": message}))


def _line(custom_id: str, response: str, error: str) -> str:
    id = f"batch_req_{uuid.uuid4().hex}"
    return f'{{"id": "{id}", "custom_id": {json.dumps(custom_id)}, "response": {response}, "error": {error}}}'
