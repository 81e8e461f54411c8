"""Proxy middleware that names the session of a request, for `cluster.serve.routing`: whose prefix it shares.

It reads the body, and sets the header `x-session-id` unless the client did. This module does not import torch, because
every proxy is a process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from ray.serve._private.constants import SERVE_SESSION_ID
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.serve.routing import REPLICA_PREFIX

MAX_BODY = 1 << 20
"""Larger bodies, in bytes, are not parsed in the proxy. Their requests belong to no session."""
PREFIX_CHARS, PREFIX_TOKENS = 512, 128
"""Completions whose prompts begin with the same characters or tokens belong together."""
_POST = re.compile(r"/v1/(completions|chat/completions|responses|messages)")
_STORED = re.compile(r"/v1/responses/(?!input_tokens)([^/]+)")


class Sessions:
    """Sets the session header of requests that share a prompt's prefix with others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "http" and SERVE_SESSION_ID not in (headers := MutableHeaders(scope=scope)):
            session = None
            if stored := _STORED.search(scope["path"]):
                session = session_of_response(stored[1])
            elif scope["method"] == "POST" and _POST.search(scope["path"]):
                messages = await _read(receive)
                receive = _replay(messages, receive)
                session = session_of(b"".join(message.get("body", b"") for message in messages))
            if session is not None:
                headers[SERVE_SESSION_ID] = session
        await self._app(scope, receive, send)


def session_of(body: bytes) -> str | None:
    """Return the session of a request, None if the body is too large or tells of none.

    It is the replica that stored `previous_response_id`; else the client's `prompt_cache_key`; else a digest of how the
    conversation begins, up to the user's first message, or of the beginning of the prompt.
    """
    if len(body) > MAX_BODY:
        return None
    try:
        fields = json.loads(body)
        return _session_of(fields) if isinstance(fields, dict) else None
    except (ValueError, RecursionError):  # no JSON, no UTF-8 or nested too deeply: the replica says what is wrong
        return None


def session_of_response(id: str) -> str | None:
    """Return the session that reaches the replica of a stored response, whose id ends with the replica's."""
    _, _, replica = id.removeprefix("resp-").partition("-")
    return f"{REPLICA_PREFIX}{replica}" if re.fullmatch("[0-9a-z]+", replica) else None


def _session_of(fields: Mapping[str, Any]) -> str | None:
    if isinstance(id := fields.get("previous_response_id"), str):
        return session_of_response(id)
    if isinstance(key := fields.get("prompt_cache_key"), str) and key:
        return _digest(key)
    start = _start_of(fields)
    return None if start is None else _digest(start)


def _start_of(fields: Mapping[str, Any]) -> Any:
    """Return the part of a body that the requests of a session have in common; None if there is none."""
    match fields:
        case {"messages": list(messages)} | {"input": list(messages)}:
            roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
            end = roles.index("user") + 1 if "user" in roles else len(messages)
            return [fields.get("instructions"), messages[:end]]
        case {"input": str(text)}:
            return [fields.get("instructions"), [{"role": "user", "content": text}]]
        case {"prompt": str(text)} | {"prompt": [str(text), *_]}:
            return text[:PREFIX_CHARS]
        case {"prompt": [list(tokens), *_]} | {"prompt": list(tokens)}:
            return tokens[:PREFIX_TOKENS]
    return None


def _digest(start: Any) -> str:
    return blake2b(json.dumps(start, sort_keys=True).encode(), digest_size=16).hexdigest()


async def _read(receive: Receive) -> list[Message]:
    """Return the messages of a request's body, up to its end or the one that makes it larger than MAX_BODY."""
    messages, num_bytes, is_open = [], 0, True
    while is_open and num_bytes <= MAX_BODY:
        messages.append(message := await receive())
        num_bytes += len(message.get("body", b""))
        is_open = message.get("more_body", False)
    return messages


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """Return a `receive` that gives these messages first."""
    remaining = iter(messages)

    async def replayed() -> Message:
        for message in remaining:
            return message
        return await receive()

    return replayed
