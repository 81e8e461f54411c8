"""Checks JSON bodies for what no route can use."""

from __future__ import annotations

import re
from typing import Any

from fastapi import Request

from cluster.errors import BadRequest
from secateur.jsonl import MAX_LEVELS, is_nested, leaves

_HALF = re.compile("[\ud800-\udfff]")
_MAY_BE_HALF = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]|\0")
"""Lone surrogates as JSON may spell them, whole pairs, which are as good as any character, and JSON in UTF-16."""


async def check_json(request: Request) -> None:
    """Raise BadRequest for a JSON body that is nested too deeply or has a lone surrogate, which no answer can repeat.

    A dependency of all routes.
    """
    has_json = "json" in request.headers.get("content-type", "").lower()
    if not has_json or getattr(request.scope["route"], "body_field", None) is None:
        return  # to read the body of an upload would be too much
    raw = await request.body()
    may_be_half, may_be_deep = _MAY_BE_HALF.search(raw), raw.count(b"[") + raw.count(b"{") > MAX_LEVELS
    if not (may_be_half or may_be_deep):
        return
    try:
        body = await request.json()
    except (ValueError, RecursionError):  # of a type that FastAPI does not read as JSON
        return
    for field, value in body.items() if isinstance(body, dict) else ():
        if may_be_half and _has_half([field, value]):
            param = None if _has_half(field) else field
            message = "has half a character, a lone surrogate such as \\ud83c; write it whole"
            raise BadRequest(f"{param or 'the name of a field'} {message}", param=param)
        if may_be_deep and is_nested(value, MAX_LEVELS):
            raise BadRequest(f"{field} is nested more than {MAX_LEVELS} levels deep; make it flatter", param=field)


def _has_half(value: Any) -> bool:
    return any(isinstance(leaf, str) and _HALF.search(leaf) for leaf in leaves(value))
