"""Refusals of a full service that Serve's proxy repeats by itself, next to nothing each.

On its way through Serve a refused request costs the proxy and the replica's front some 7 ms of processor time. At ten
times the load that a service can take, all requests would wait in sockets for that. So a replica marks the refusals
that hold for everyone, and the proxy gives the latest one again, for HOLD_S seconds at a time, while all replicas
refuse. `ReplicaMark` is the replica's side, `RepeatedRefusals` the proxy's. This module does not import torch, because
every proxy is a process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ray.util.metrics import Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.http.paths import ADMITTED, REFUSES_ALL
from secateur.responses import REQUEST_ID_HEADER

HOLD_S = 0.25
"""A full queue holds several times what can run, so it does not run dry in this time."""
FORGET_S = 30.0
"""A replica that was not heard of for so long has ended, or has no part in what this proxy forwards."""
_MARK = "x-secateur-replica"
"""From replica to proxy: the replica's name, followed by " full" if it refuses everyone. Clients do not see it."""


class ReplicaMark:
    """Writes a replica's name into its responses, and whether it refuses everyone."""

    def __init__(self, app: ASGIApp, replica: str) -> None:
        self._app = app
        self._replica = replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        state = scope.setdefault("state", {})

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                is_full = state.get(REFUSES_ALL, False)
                MutableHeaders(scope=message)[_MARK] = f"{self._replica} full" if is_full else self._replica
            await send(message)

        await self._app(scope, receive, marked)


class RepeatedRefusals:
    """Answers with the latest refusal while every replica refuses everyone; forwards all other requests.

    Scripts of other origins are always forwarded, because their refusals have headers of their own.
    """

    def __init__(self, app: ASGIApp, now: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._now = now
        self._heard: dict[str, float] = {}
        """When each replica answered last."""
        self._refused: dict[str, float] = {}
        """When it last refused everyone."""
        self._refusal: tuple[Message, Message] | None = None
        self._repeated = Counter(
            "secateur_repeated_refusals", description="Requests that Serve's proxy refused, because all replicas did."
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].rstrip("/").endswith(ADMITTED):
            await self._app(scope, receive, send)
        elif self._refusal is not None and self._all_refuse() and "origin" not in Headers(scope=scope):
            self._repeated.inc()
            start, body = self._refusal
            start = {**start, "headers": list(start["headers"])}
            MutableHeaders(scope=start)[REQUEST_ID_HEADER] = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
            await send(start)
            await send(body)
        else:
            await self._app(scope, receive, self._listening(send))

    def _listening(self, send: Send) -> Send:
        """Return a `send` that learns from the response, and hides the replica's mark."""
        refusal: Message | None = None

        async def learned(message: Message) -> None:
            nonlocal refusal
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=list(message["headers"]))
                if mark := headers.get(_MARK):
                    del headers[_MARK]
                    message = {**message, "headers": headers.raw}
                    replica, _, is_full = mark.partition(" ")
                    self._heard[replica] = self._now()
                    if is_full:
                        self._refused[replica] = self._now()
                        refusal = message
            elif refusal is not None and not message.get("more_body", False):
                self._refusal = refusal, message
            await send(message)

        return learned

    def _all_refuse(self) -> bool:
        now = self._now()
        for replica in [each for each, heard in self._heard.items() if now - heard > FORGET_S]:
            del self._heard[replica]
            self._refused.pop(replica, None)
        return all(now - self._refused.get(each, -math.inf) < HOLD_S for each in self._heard) and bool(self._heard)
