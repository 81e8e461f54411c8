"""The id of a request: its client's, or a new one. The service and Ray Serve's proxies follow the same rule."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers

from secateur.responses import REQUEST_ID_HEADER

_SANE_ID = re.compile(r"[!-~]{1,512}")
"""Printable ASCII: ids go into logs and headers, and Serve's proxies fail on some other characters."""


def request_id_of(headers: Headers) -> str:
    """Return the id that a client gave its request if it is printable ASCII, else a new one."""
    given = headers.get(REQUEST_ID_HEADER, "")
    return given if _SANE_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
