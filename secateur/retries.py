"""When the client tries again: transient errors a few times, outages of a service that was there for a few minutes.

attempts = Attempts(Retry())
while (delay := attempts.delay_after(failure)) is not None:     # None = give up
...                                                         # sleep, try again
"""

from __future__ import annotations

import email.utils
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import httpx2

from secateur.errors import APIConnectionError, APIError, APITimeoutError, SecateurError

MAX_RETRY_AFTER_S = 120.0  # a longer Retry-After is not waited for; the caller gets the error
OUTAGE_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Retry:
    """Exponential backoff with jitter: 0.5, 1, 2, ... up to 30 seconds, each times 0.5 to 1; in an outage up to 5.

    retries: tries again after an error. outage_s: how long a service that was there may be gone; 0 = not at all.
    """

    retries: int = 2
    outage_s: float = OUTAGE_TIMEOUT_S
    first_s: float = 0.5
    longest_s: float = 30.0
    longest_in_outage_s: float = 5.0

    def delay(self, attempt: int, error: SecateurError) -> float | None:
        """Return the seconds to wait after failed attempt number `attempt` (from 0), or None to give up."""
        if attempt >= self.retries or not is_transient(error):
            return None
        return self._wait(attempt, error, self.longest_s)

    def delay_in_outage(self, attempt: int, error: SecateurError, since_s: float) -> float | None:
        """Return the seconds to wait, or None if the outage, which began `since_s` ago, has lasted too long."""
        left_s = self.outage_s - since_s
        wait = self._wait(attempt, error, self.longest_in_outage_s) if left_s > 0 else None
        return None if wait is None else min(wait, left_s)

    def _wait(self, attempt: int, error: SecateurError, longest_s: float) -> float | None:
        seconds: float | None = getattr(error, "retry_after", None)
        if seconds is not None:
            return seconds if seconds <= MAX_RETRY_AFTER_S else None
        return min(longest_s, self.first_s * 2 ** min(attempt, 16)) * random.uniform(0.5, 1.0)


@dataclass(slots=True)
class Attempts:
    """The attempts of one call. was_there: whether the service has answered this client before."""

    retry: Retry
    was_there: bool = False
    clock: Callable[[], float] = time.monotonic
    _num_failed: int = field(init=False, default=0)
    _num_in_outage: int = field(init=False, default=0)
    _outage_began: float | None = field(init=False, default=None)

    def delay_after(self, error: SecateurError) -> float | None:
        """Return the seconds to wait before the next attempt, or None to give up.

        An outage begins with a broken connection, or if a service that was there refuses connections or a proxy reports
        it missing. While it lasts, other transient errors are part of it: a service that comes back may be crowded.
        """
        if self.retry.outage_s > 0 and self._is_outage(error):
            now = self.clock()
            began = self._outage_began = now if self._outage_began is None else self._outage_began
            self._num_in_outage += 1
            return self.retry.delay_in_outage(self._num_in_outage - 1, error, now - began)
        self._num_failed += 1
        return self.retry.delay(self._num_failed - 1, error)

    @property
    def has_lost_service(self) -> bool:
        """Whether an outage began with the last attempt."""
        return self._num_in_outage == 1

    def progressed(self) -> None:
        """Note that the answer goes on: what comes next is another outage."""
        self.was_there, self._outage_began, self._num_in_outage = True, None, 0

    def _is_outage(self, error: SecateurError) -> bool:
        if self._outage_began is not None:
            return is_transient(error) or is_unreachable(error)
        if isinstance(error, APIError):
            return self.was_there and is_unavailable(error)
        if is_unreachable(error):
            return self.was_there
        return is_transient(error)  # the connection broke


def is_transient(error: SecateurError) -> bool:
    """Return whether a retry may help: 408, 429, 5xx except 501, connection errors. Timeouts mean overload."""
    if isinstance(error, APIError):
        status = error.status or 0
        return status in (408, 429) or (status >= 500 and status != 501) or is_unavailable(error)
    return isinstance(error, APIConnectionError) and not isinstance(error, APITimeoutError)


def is_unavailable(error: APIError) -> bool:
    """Return whether the service is gone for a while, according to a proxy, to itself, or to an event of a stream."""
    return error.status in (502, 503, 504) or error.type == "service_unavailable_error"


def is_unreachable(error: SecateurError) -> bool:
    """Return whether no connection could be made."""
    return isinstance(error.__cause__, httpx2.ConnectError | httpx2.ConnectTimeout)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the Retry-After header, seconds or a date, as seconds from now."""
    value = headers.get("retry-after", "").strip()
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
