"""Builds what all routes share: the JSON of a model and the header of ignored fields."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from secateur.responses import IGNORED_HEADER

logger = logging.getLogger(__name__)


def ignored_header(request: Request, ignored: Sequence[str]) -> dict[str, str]:
    """Return the header that names ignored fields, if there are any."""
    if not ignored:
        return {}
    logger.info("request %s: ignored fields %s", request.state.request_id, ", ".join(map(repr, ignored)))
    # The client chose these names: remove what could end the header, and bound its length.
    names = (char if char.isascii() and char.isprintable() else "?" for char in ", ".join(ignored)[:1024])
    return {IGNORED_HEADER: "".join(names)}


def json_reply(model: Any, headers: dict[str, str] | None = None) -> Response:
    """Return a model as JSON."""
    return Response(model.model_dump_json(), media_type="application/json", headers=headers)
