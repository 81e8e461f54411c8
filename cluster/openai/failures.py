"""Turns an exception into the HTTP error that its client gets."""

from __future__ import annotations

import logging

from cluster.engine.engine_client import DeadlyRequest, SlowReader
from cluster.engine.rank_exits import EngineDead
from cluster.errors import HttpError, too_many_requests, unavailable
from cluster.openai.deltas import GenerationFailed
from cluster.text.tokenizer_pool import TokenizerPoolDown, TokenizerPoolFull
from secateur.responses import ErrorResponse

logger = logging.getLogger(__name__)


def to_http_error(error: Exception) -> HttpError:
    """Return the error response for an exception. An unknown one is logged and becomes a 500 without details."""
    match error:
        case HttpError():
            return error
        case TokenizerPoolFull():
            return too_many_requests(str(error))
        case TokenizerPoolDown():
            return unavailable(str(error))
        case DeadlyRequest() | GenerationFailed():
            message = f"the engine failed: {_first_line(error)}"
            return HttpError(500, ErrorResponse.of(message, type="server_error", code="engine_error"))
        case EngineDead():
            return unavailable(f"the engine is not available: {_first_line(error)}")
        case SlowReader():
            message = f"{error}; read faster, or ask for fewer tokens"
            return HttpError(408, ErrorResponse.of(message, type="timeout_error", code="read_too_slowly"))
        case _:
            logger.error("a request failed", exc_info=error)
            return HttpError(500, ErrorResponse.of("internal error; see the server's log", type="server_error"))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
