"""Requests that this process sends to its own application: the routes, limits and errors of HTTP, without a socket."""

from __future__ import annotations

import httpx2
from starlette.types import ASGIApp, Receive, Scope, Send

from secateur.responses import REQUEST_ID_HEADER

IN_PROCESS = "secateur.in_process"
"""A key of the scope that no client can set: the request needs no API key, and is no client's."""


async def post(app: ASGIApp, path: str, body: bytes, *, request_id: str, owner: str) -> httpx2.Response:
    """Send a JSON body to a route and return its response. Cancelling this cancels the request.

    owner: the API key for which it is sent, as `api_keys.owner_of` names it.
    """

    async def in_process(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": {"owner": owner}, IN_PROCESS: True}, receive, send)

    headers = {"content-type": "application/json", REQUEST_ID_HEADER: request_id}
    request = httpx2.Request("POST", f"http://localhost{path}", headers=headers, content=body)
    response = await httpx2.ASGITransport(in_process).handle_async_request(request)  # a client would log each of them
    await response.aread()
    return response
