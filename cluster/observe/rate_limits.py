"""Limits of each API key on requests and tokens per minute, and the count of both by the key's name.

Both limits are token buckets: a key may use a minute's worth at once, and gets it back evenly. A request takes one
request at its start. Its tokens are taken as they are used: the prompt when it is submitted, the answer step by step.
So a bucket may be in debt after a long answer, and the key waits until it is paid. Each replica counts for itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.errors import HttpError
from cluster.observe.metrics import Metrics
from secateur.api_keys import ApiKey
from secateur.responses import ErrorResponse

_MINUTE_S = 60.0


@dataclass(slots=True)
class _TokenBucket:
    """Holds up to `per_minute` units, and refills at that rate. `level` may be negative."""

    per_minute: int
    level: float
    updated_s: float

    def resize(self, per_minute: int, now_s: float) -> None:
        self.wait_s(now_s)  # refill at the old rate
        self.per_minute, self.level = per_minute, min(self.level, per_minute)

    def wait_s(self, now_s: float) -> float:
        """Refill, and return the seconds until it holds a unit."""
        gained = (now_s - self.updated_s) * self.per_minute / _MINUTE_S
        self.level, self.updated_s = min(self.level + gained, self.per_minute), now_s
        return max(0.0, (1 - self.level) * _MINUTE_S / self.per_minute)


class Caller:
    """The holder of an API key: what is left of its limits, and the metrics under its name."""

    def __init__(self, key: ApiKey, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._requests: _TokenBucket | None = None
        self._tokens: _TokenBucket | None = None
        self.update(key)

    def update(self, key: ApiKey) -> None:
        """Take the limits of `key`, the same key as before. What was used stays used."""
        self._key = key
        self._requests = self._resized(self._requests, key.requests_per_minute)
        self._tokens = self._resized(self._tokens, key.tokens_per_minute)

    def _resized(self, bucket: _TokenBucket | None, per_minute: int | None) -> _TokenBucket | None:
        if per_minute is None:
            return None
        if bucket is None:
            return _TokenBucket(per_minute, per_minute, self._clock())
        bucket.resize(per_minute, self._clock())
        return bucket

    def admit(self) -> HttpError | None:
        """Count a request; return the error to answer with if it exceeds a limit of the key."""
        now_s, key = self._clock(), self._key
        if self._tokens is not None and (wait_s := self._tokens.wait_s(now_s)):
            return self._refuse("tokens", key.tokens_per_minute, wait_s)
        if self._requests is not None:
            if wait_s := self._requests.wait_s(now_s):
                return self._refuse("requests", key.requests_per_minute, wait_s)
            self._requests.level -= 1
        self._metrics.observe_key_request(key.name, "accepted")
        return None

    def _refuse(self, unit: str, per_minute: int | None, wait_s: float) -> HttpError:
        self._metrics.observe_key_request(self._key.name, f"{unit}_limited")
        seconds = math.ceil(wait_s)
        message = f"this API key may use {per_minute} {unit} per minute; try again in {seconds} s"
        body = ErrorResponse.of(message, type="rate_limit_error", code="rate_limit_exceeded")
        return HttpError(429, body, retry_after_s=seconds)

    def charge(self, *, prompt_tokens: int = 0, generation_tokens: int = 0) -> None:
        """Count tokens that a request has used."""
        if self._tokens is not None:
            self._tokens.level -= prompt_tokens + generation_tokens
        self._metrics.observe_key_tokens(self._key.name, prompt_tokens, generation_tokens)


class Callers:
    """The callers of a service by their keys; those of keys that were removed are forgotten."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._callers: dict[str, Caller] = {}
        self._keys: tuple[ApiKey, ...] = ()

    def of(self, key: ApiKey, keys: tuple[ApiKey, ...]) -> Caller:
        """Return the caller of `key`; `keys` are all that are valid now."""
        if keys is not self._keys:
            self._keys, known = keys, self._callers
            self._callers = {own.key: known[own.key] for own in keys if own.key in known}
            for own in keys:
                if own.key in self._callers:
                    self._callers[own.key].update(own)
        if key.key not in self._callers:
            self._callers[key.key] = Caller(key, self._metrics, self._clock)
        return self._callers[key.key]
