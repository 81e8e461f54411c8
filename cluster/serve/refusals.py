"""Repeats the refusals of a full service in Serve's proxy, which costs next to nothing.

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
from dataclasses import dataclass
from typing import NamedTuple

from ray.util.metrics import Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import HttpError, too_many_requests
from cluster.http.paths import ADMITTED, REFUSES_ALL
from secateur.responses import REQUEST_ID_HEADER

FULL_S = 2.0
"""How long a replica counts as full after its last refusal."""
TRY_S = 0.25
"""While all replicas are full, one request for each of them is let in at least so often, to learn whether they are."""
SILENT_S, GONE_S = 10.0, 600.0
"""After SILENT_S without a word from a replica, while others were heard, the question whether all are full ignores it;
after GONE_S it is forgotten, and what it may hold."""
_MARK = "x-secateur-replica"
"""From replica to proxy: the prefixes of the application's paths, the replica's name, how many choices it holds at
most, and "full" if it refuses everyone. Clients do not see it."""


class ReplicaMark:
    """Writes into a replica's responses who it is, how many choices it holds, and whether it refuses everyone.

    root_path: the prefix under which clients see the service, see `PathMiddleware`.
    """

    def __init__(self, app: ASGIApp, replica: str, most_pending: int, root_path: str = "") -> None:
        self._app = app
        self._mark = f"{replica} {most_pending}"
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        state = scope.setdefault("state", {})
        root = scope.get("root_path", "").rstrip("/")
        prefixes = {f"{root}/", f"{root}{self._root_path}/"}  # a proxy in front may have removed the second
        mark = f"{','.join(sorted(prefixes))} {self._mark}"

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_MARK] = f"{mark} full" if REFUSES_ALL in state else mark
            await send(message)

        await self._app(scope, receive, marked)


class Refusal(NamedTuple):
    """The two messages of a response."""

    start: Message
    body: Message


@dataclass(slots=True)
class _Replica:
    """Holds what the proxy knows of a replica."""

    most_pending: int
    heard_at: float
    refused_at: float = -math.inf  # everyone


class _Application:
    """Decides which requests of one application are let in, by what its replicas told."""

    def __init__(self) -> None:
        self.num_waiting = 0  # requests that were let in and whose responses have not begun
        self.places = 0  # requests that came out since all are full, less those that were let in
        self._replicas: dict[str, _Replica] = {}
        self._let_in_at = -math.inf  # or last refused by a replica
        self._refused_at = -math.inf
        self._refusal = _DEFAULT

    def hear(self, name: str, most_pending: int, now: float, *, is_full: bool) -> None:
        """Learn from a replica's mark."""
        newest = max((own.heard_at for own in self._replicas.values()), default=now)
        if now - newest >= SILENT_S:
            for own in self._replicas.values():  # silence in which nobody was heard tells nothing
                own.heard_at += now - newest
        replica = self._replicas.setdefault(name, _Replica(most_pending, now))
        replica.heard_at = now
        if is_full:
            replica.refused_at = now
        self._replicas = {name: own for name, own in self._replicas.items() if now - own.heard_at < GONE_S}

    def keep(self, refusal: Refusal, now: float) -> None:
        """Remember the latest refusal."""
        self._refusal, self._refused_at, self._let_in_at = refusal, now, now

    def refuses(self, now: float) -> Refusal | None:
        """Return how to refuse a request, None if it may try its luck; a place that it takes is counted."""
        newest = max(own.heard_at for own in self._replicas.values())
        heard = [own for own in self._replicas.values() if newest - own.heard_at < SILENT_S]
        is_due = now - self._let_in_at >= TRY_S / len(heard)
        # Under a sudden load the first refusal arrives late. A request has one choice or more, so these fill them all.
        too_many = self.num_waiting >= sum(own.most_pending for own in self._replicas.values())
        if not too_many and any(now - own.refused_at >= FULL_S for own in heard):
            self.places = 0
        elif self.places > 0 and not too_many:
            self.places -= 1
        elif not is_due:
            return self._refusal if now - self._refused_at < FULL_S else _DEFAULT
        self._let_in_at = now
        return None


class RepeatedRefusals:
    """While every replica refuses everyone, lets one request in for each that comes out, and refuses the others itself.

    Beyond what the replicas hold, too, it lets in only the tries, by which it also finds new replicas. Requests with an
    `Origin` header are always let in, because their refusals have headers of their own.
    """

    def __init__(self, app: ASGIApp, now: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._now = now
        self._applications: dict[str, _Application] = {}  # by the prefix of their paths
        self._repeated = Counter(
            "secateur_repeated_refusals", description="Requests that Serve's proxy refused, because all replicas did."
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        application, is_common = self._asked(scope), "origin" not in Headers(scope=scope)
        refusal = application.refuses(self._now()) if application is not None and is_common else None
        if refusal is None:
            await self._forward(scope, receive, send, application, is_common=is_common)
        else:
            self._repeated.inc()
            start = {**refusal.start, "headers": list(refusal.start["headers"])}
            MutableHeaders(scope=start)[REQUEST_ID_HEADER] = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
            await send(start)
            await send(refusal.body)

    def _asked(self, scope: Scope) -> _Application | None:
        """Return the application that must admit the request; None if it is not known, or need not."""
        path = scope["path"].rstrip("/")
        if scope["method"] == "POST" and path.endswith(ADMITTED):
            for prefix, application in self._applications.items():
                if path.startswith(prefix) and f"/{path.removeprefix(prefix)}" in ADMITTED:
                    return application
        return None

    async def _forward(
        self, scope: Scope, receive: Receive, send: Send, application: _Application | None, *, is_common: bool
    ) -> None:
        """Forward a request, learn from its response, and hide the replica's mark.

        application: that admits it, if any. is_common: another request may get the same refusal.
        """
        is_waiting, is_refused = True, False
        refusal: tuple[_Application, Message] | None = None

        async def heard(message: Message) -> None:
            nonlocal is_waiting, is_refused, refusal
            held, refusal = refusal, None
            if message["type"] == "http.response.start":
                is_waiting = False
                if application is not None:
                    application.num_waiting -= 1
                headers = MutableHeaders(raw=list(message["headers"]))
                if mark := headers.get(_MARK):
                    del headers[_MARK]
                    message = {**message, "headers": headers.raw}
                    own, is_refused = self._learn(mark)
                    refusal = (own, message) if is_refused and is_common else None
            elif held is not None and not message.get("more_body", False):
                own, start = held
                own.keep(Refusal(start, message), self._now())
            await send(message)

        if application is not None:
            application.num_waiting += 1
            if not is_common:
                application.places = max(0, application.places - 1)
        try:
            await self._app(scope, receive, heard)
        finally:
            if application is not None:
                application.num_waiting -= is_waiting
                application.places += not is_refused  # a refusal shows that there was no place

    def _learn(self, mark: str) -> tuple[_Application, bool]:
        """Learn from a replica's mark; return its application, and whether it refuses everyone."""
        prefixes, replica, most_pending, *full = mark.split()
        application = self._applications.get(prefixes.split(",")[0]) or _Application()
        self._applications.update(dict.fromkeys(prefixes.split(","), application))
        application.hear(replica, int(most_pending), self._now(), is_full=bool(full))
        return application, bool(full)


def _messages(error: HttpError) -> Refusal:
    """Return the response for an error."""
    body = error.body.model_dump_json().encode()
    headers = MutableHeaders(raw=[])
    headers["content-type"], headers["content-length"] = "application/json", str(len(body))
    headers["retry-after"] = str(error.retry_after_s)
    start = {"type": "http.response.start", "status": error.status, "headers": headers.raw}
    return Refusal(start, {"type": "http.response.body", "body": body})


_DEFAULT = _messages(too_many_requests("too many requests are pending; try later"))
