"""Limits of each API key on requests and tokens per minute, and the count of both by the key's name.

Both limits are token buckets: a key may use a minute's worth at once, and gets it back evenly. A request takes one
request at its start. Its tokens are taken as they are used: the prompt when it is submitted, the answer step by step.
So a bucket may be in debt after a long answer, and the key waits until it is paid. Each replica counts for itself, but
the fronts of one engine count together: the levels are in memory that they share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from cluster.errors import HttpError
from cluster.observe.metrics import Metrics
from cluster.system.shared import Shared
from secateur.api_keys import ApiKey
from secateur.responses import ErrorResponse

_MINUTE_S = 60.0
_ROWS = 1 << 20
"""More than a service has keys in its life; a row takes memory when it is used."""


@dataclass(slots=True)
class _TokenBucket:
    """Holds up to `per_minute` units, and refills at that rate. state: [level, time of the last refill]; the level may
    be negative, and a time of 0 is a new bucket, which is full."""

    per_minute: int
    state: NDArray[np.float64]

    def resize(self, per_minute: int, now_s: float) -> None:
        self.wait_s(now_s)  # refill at the old rate
        self.per_minute, self.state[0] = per_minute, min(self.state[0], per_minute)

    def take(self, units: int) -> None:
        self.state[0] -= units

    def wait_s(self, now_s: float) -> float:
        """Refill, and return the seconds until it holds a unit."""
        level, updated_s = self.state.tolist()
        gained = (now_s - updated_s) * self.per_minute / _MINUTE_S if updated_s else math.inf
        level = min(level + gained, self.per_minute)
        self.state[:] = level, now_s
        return max(0.0, (1 - level) * _MINUTE_S / self.per_minute)


class _Levels:
    """The state of the buckets of all keys: one row per key, in a hash table that fronts share."""

    def __init__(self, shared: Shared) -> None:
        self.locked = shared.locked
        self._digests = shared.array("rate_keys", (_ROWS,), np.int64)
        self._states = shared.array("rate_levels", (_ROWS, 2, 2))

    def of(self, key: str) -> NDArray[np.float64]:
        """Return a key's row: the states of its buckets of requests and of tokens."""
        digest = 1 + int.from_bytes(blake2b(key.encode(), digest_size=7).digest(), "little")
        with self.locked():
            row = digest % _ROWS
            while self._digests[row] not in (0, digest):
                row = (row + 1) % _ROWS
            self._digests[row] = digest
        return self._states[row]


class Caller:
    """The holder of an API key: what is left of its limits, and the metrics under its name."""

    def __init__(self, key: ApiKey, metrics: Metrics, clock: Callable[[], float], levels: _Levels) -> None:
        self._metrics = metrics
        self._clock = clock
        self._locked, (self._of_requests, self._of_tokens) = levels.locked, levels.of(key.key)
        self._requests: _TokenBucket | None = None
        self._tokens: _TokenBucket | None = None
        self.update(key)

    def update(self, key: ApiKey) -> None:
        """Take the limits of `key`, the same key as before. What was used stays used."""
        self._key = key
        with self._locked():
            self._requests = self._resized(self._requests, key.requests_per_minute, self._of_requests)
            self._tokens = self._resized(self._tokens, key.tokens_per_minute, self._of_tokens)

    def _resized(
        self, bucket: _TokenBucket | None, per_minute: int | None, state: NDArray[np.float64]
    ) -> _TokenBucket | None:
        if per_minute is None:
            state[:] = 0
            return None
        bucket = bucket or _TokenBucket(per_minute, state)
        bucket.resize(per_minute, self._clock())
        return bucket

    def admit(self) -> HttpError | None:
        """Count a request; return the error to answer with if it exceeds a limit of the key."""
        with self._locked():
            return self._admit(self._clock(), self._key)

    def _admit(self, now_s: float, key: ApiKey) -> HttpError | None:
        if self._tokens is not None and (wait_s := self._tokens.wait_s(now_s)):
            return self._refuse("tokens", key.tokens_per_minute, wait_s)
        if self._requests is not None:
            if wait_s := self._requests.wait_s(now_s):
                return self._refuse("requests", key.requests_per_minute, wait_s)
            self._requests.take(1)
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
            with self._locked():
                self._tokens.take(prompt_tokens + generation_tokens)
        self._metrics.observe_key_tokens(self._key.name, prompt_tokens, generation_tokens)


class Callers:
    """The callers of a service by their keys; those of keys that were removed are forgotten."""

    def __init__(
        self, metrics: Metrics, clock: Callable[[], float] = time.monotonic, shared: Shared | None = None
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._levels = _Levels(shared or Shared())
        self._callers: dict[str, Caller] = {}
        self._keys: tuple[ApiKey, ...] = ()

    def of(self, key: ApiKey, keys: tuple[ApiKey, ...]) -> Caller:
        """Return the caller of `key`; `keys` are all that are valid now."""
        if keys is not self._keys:
            self._keys, known = keys, self._callers
            for gone in known.keys() - {own.key for own in keys}:
                self._levels.of(gone)[:] = 0
            self._callers = {own.key: known[own.key] for own in keys if own.key in known}
            for own in keys:
                if own.key in self._callers:
                    self._callers[own.key].update(own)
        if key.key not in self._callers:
            self._callers[key.key] = Caller(key, self._metrics, self._clock, self._levels)
        return self._callers[key.key]
