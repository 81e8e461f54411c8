"""Requests that this process sends to its own application: the routes, limits and errors of HTTP, without a socket."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Scope

from cluster.batches.runner import PostedAnswer
from secateur.responses import REQUEST_ID_HEADER

IN_PROCESS = "secateur.in_process"
"""A key of the scope that no client can set: the request needs no API key, and is no client's."""


async def post(app: ASGIApp, path: str, body: bytes, *, request_id: str, owner: str) -> PostedAnswer:
    """Send a JSON body to a route and return its response. Cancelling this cancels the request.

    owner: the API key for which it is sent, as `api_keys.owner_of` names it.
    """
    headers = {"content-type": "application/json", "content-length": str(len(body)), REQUEST_ID_HEADER: request_id}
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
        "state": {"owner": owner},
        IN_PROCESS: True,
    }
    is_sent, status, found, content = False, 0, dict[str, str](), bytearray()

    async def receive() -> Message:
        nonlocal is_sent
        if is_sent:
            await asyncio.Event().wait()  # this client never disconnects
        is_sent = True
        return {"type": "http.request", "body": body}

    async def send(message: Message) -> None:
        nonlocal status, found
        if message["type"] == "http.response.start":
            status = message["status"]
            found = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            content.extend(message.get("body", b""))

    await app(scope, receive, send)
    return PostedAnswer(status, found, content.decode())
