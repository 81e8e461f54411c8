"""Refusals of a full service that Serve's proxy repeats by itself, next to nothing each.

On its way through Serve a refused request costs the proxy and the replica's front some 7 ms of processor time. At ten
times the load that a service can take, all requests would wait in sockets for that. So a replica marks the refusals
that hold for everyone. From then on the proxy lets one request in for each that comes out, and gives all others the
latest refusal. `ReplicaMark` is the replica's side, `RepeatedRefusals` the proxy's. This module does not import torch,
because every proxy is a process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ray.util.metrics import Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.http.errors import HttpError, too_many_requests
from cluster.http.paths import ADMITTED, REFUSES_ALL
from secateur.responses import REQUEST_ID_HEADER

HOLD_S = 2.0
"""How long a replica counts as full after its last refusal."""
TRY_S = 0.25
"""While all replicas are full, the proxy lets a request in at least so often, to learn when they are no longer."""
FORGET_S = 30.0
"""A replica that was not heard of for so long has ended, or has no part in what this proxy forwards."""
_MARK = "x-secateur-replica"
"""From replica to proxy: its name, the most requests that it holds, and "full" if it refuses everyone. Clients do not
see it."""

Refusal = tuple[Message, Message]
"""The two messages of a response."""


class ReplicaMark:
    """Writes into a replica's responses who it is, how many requests it holds, and whether it refuses everyone."""

    def __init__(self, app: ASGIApp, replica: str, max_pending: int) -> None:
        self._app = app
        self._mark = f"{replica} {max_pending}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        state = scope.setdefault("state", {})

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_MARK] = f"{self._mark} full" if REFUSES_ALL in state else self._mark
            await send(message)

        await self._app(scope, receive, marked)


class _Replica:
    """What the proxy knows of a replica."""

    max_pending = 0
    heard_at = refused_at = -math.inf  # its last answer, and its last refusal of everyone


class RepeatedRefusals:
    """While every replica refuses everyone, lets one request in for each that comes out, and refuses the others itself.

    Nor does it let in more than the replicas hold: under a sudden load their first refusal takes its time. Scripts of
    other origins are always let in, because their refusals have headers of their own.
    """

    def __init__(self, app: ASGIApp, now: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._now = now
        self._replicas: dict[str, _Replica] = {}
        self._refusal = _messages(too_many_requests("too many requests are pending; try later"))
        self._num_waiting = 0
        """Requests that were let in and whose responses have not begun."""
        self._places = 0
        """Requests that came out since the replicas are full, less those that were let in."""
        self._let_in_at = -math.inf
        self._repeated = Counter(
            "secateur_repeated_refusals", description="Requests that Serve's proxy refused, because all replicas did."
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].rstrip("/").endswith(ADMITTED):
            await self._app(scope, receive, send)
        elif "origin" in Headers(scope=scope) or self._lets_in():
            await self._forward(scope, receive, send)
        else:
            self._repeated.inc()
            start, body = self._refusal
            start = {**start, "headers": list(start["headers"])}
            MutableHeaders(scope=start)[REQUEST_ID_HEADER] = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
            await send(start)
            await send(body)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, learn from its response, and hide the replica's mark."""
        is_waiting, refusal = True, None
        self._num_waiting += 1

        async def heard(message: Message) -> None:
            nonlocal is_waiting, refusal
            if message["type"] == "http.response.start":
                self._num_waiting -= is_waiting
                is_waiting = False
                headers = MutableHeaders(raw=list(message["headers"]))
                if mark := headers.get(_MARK):
                    del headers[_MARK]
                    message = {**message, "headers": headers.raw}
                    refusal = message if self._learn(mark) else None
            elif refusal is not None and not message.get("more_body", False):
                self._refusal = refusal, message
            await send(message)

        try:
            await self._app(scope, receive, heard)
        finally:
            self._num_waiting -= is_waiting
            self._places += refusal is None  # one that was refused had no place

    def _learn(self, mark: str) -> bool:
        """Learn from a replica's mark; return whether it refuses everyone."""
        name, max_pending, *full = mark.split()
        replica, now = self._replicas.setdefault(name, _Replica()), self._now()
        replica.max_pending, replica.heard_at = int(max_pending), now
        if full:
            replica.refused_at = now
        return bool(full)

    def _lets_in(self) -> bool:
        now = self._now()
        self._replicas = {name: own for name, own in self._replicas.items() if now - own.heard_at < FORGET_S}
        replicas = self._replicas.values()
        if replicas and self._num_waiting >= sum(own.max_pending for own in replicas):
            return False
        if not replicas or any(now - own.refused_at >= HOLD_S for own in replicas):
            self._places = 0
        elif self._places > 0:
            self._places -= 1
        elif now - self._let_in_at < TRY_S:
            return False
        self._let_in_at = now
        return True


def _messages(error: HttpError) -> Refusal:
    """Return the response for an error."""
    body = error.body.model_dump_json().encode()
    headers = MutableHeaders(raw=[])
    headers["content-type"], headers["content-length"] = "application/json", str(len(body))
    headers["retry-after"] = str(error.retry_after_s)
    start = {"type": "http.response.start", "status": error.status, "headers": headers.raw}
    return start, {"type": "http.response.body", "body": body}
