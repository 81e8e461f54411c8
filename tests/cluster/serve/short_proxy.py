"""A proxy's callback with short limits, for `test_life.py`; Serve's proxies import it by name."""

from __future__ import annotations

from starlette.middleware import Middleware

from cluster.http.limits import HttpLimits, LimitedProtocol
from cluster.serve import proxy


class ShortProtocol(LimitedProtocol):
    limits = HttpLimits(head_s=2.0, body_s=2.0)


def middlewares() -> list[Middleware]:
    return proxy.middlewares(f"{__name__}:ShortProtocol")
