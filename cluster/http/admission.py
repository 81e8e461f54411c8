"""Admission: which requests may join the engine's queue, and when those that may not should come again.

A request waits until there is a place for it in the running batch. The batch has `max_num_seqs` places, or, while
requests wait for KV pages, as many as run. With all places taken and q requests waiting before it, a request begins
when q + 1 others have ended, and one ends every `service_s / places` seconds (`service_s`: how long a request has been
in the batch, on average). Nothing is estimated before the first request has ended.

A request is admitted once, when its body is valid. Its ticket holds its places in the queue while it is tokenized. A
refusal costs next to nothing: `refusal` is also asked before a body is read, see `middleware`.

Where priorities decide, an urgent request counts only those before it, or a flood of others would keep it out. All
priorities together may then hold twice as many.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from cluster.engine.engine_client import EngineClient
from cluster.errors import BadRequest, HttpError, too_many_requests, unavailable
from cluster.text.tokenizer_pool import TokenizerPool

PENDING_PER_PLACE = 8
"""Pending requests per place in the running batch beyond which the service answers 429."""
MAX_RETRY_AFTER_S = 60
"""OpenAI's client comes again after a second or so where it is told to wait for longer."""

T = TypeVar("T")


class Admission:
    """Decides on requests by the engine's health, its queue, its KV pages and how long a request would wait.

    max_pending: choices running or waiting beyond which all are refused; None = `PENDING_PER_PLACE` per place.
    has_priorities: requests are served by priority, so only those before a request count.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer_pool: TokenizerPool,
        max_num_seqs: int,
        max_pending: int | None = None,
        *,
        has_priorities: bool = False,
    ) -> None:
        self._engine = engine
        self._has_priorities = has_priorities
        self._tokenizer_pool = tokenizer_pool
        self._max_num_seqs = max_num_seqs
        self.max_pending = max_pending or PENDING_PER_PLACE * max_num_seqs

    @contextmanager
    def ticket(
        self, num_prompts: int, choices_each: int = 1, *, priority: int = 0, wait_s: float | None = None
    ) -> Iterator[list[int]]:
        """Admit a request as `admit` does, and hold its places in the queue until it is submitted, or the context ends.

        Yields the ids of its Submits.
        """
        with ExitStack() as held:
            with self._engine.admitting():
                self.admit(num_prompts, choices_each, priority=priority, wait_s=wait_s)
                ids = held.enter_context(self._engine.places(num_prompts * choices_each))
            yield ids

    def admit(self, num_prompts: int, choices_each: int = 1, *, priority: int = 0, wait_s: float | None = None) -> None:
        """Raise HttpError if a request may not join, and BadRequest if it could never. `wait_s`: as for `refusal`."""
        num_choices = num_prompts * choices_each
        if num_choices > self.max_pending:
            raise BadRequest(
                f"{num_prompts} x {choices_each} answers (prompts x n) are more than the {self.max_pending} that this "
                "service holds at once; split the request",
                param="prompt" if choices_each == 1 else "n",
            )
        if (refusal := self.refusal(num_choices, priority=priority, wait_s=wait_s)) is not None:
            raise refusal

    def refusal(
        self, num_choices: int = 1, *, priority: int | None = None, wait_s: float | None = None
    ) -> HttpError | None:
        """Return why a request may not join; None if it may. A priority of None is not known yet.

        503: engine or tokenizer workers are down. 429: too many choices are pending, or, at this priority, the request
        would wait for longer than `wait_s`.
        """
        if not (health := self._engine.health()).ok:
            return unavailable(f"the engine is not available: {health.reason.splitlines()[0]}")
        if not (health := self._tokenizer_pool.health()).ok:
            return unavailable(health.reason)
        num_pending, limit = self._engine.num_pending, self._limit()
        most = limit * (1 + self._has_priorities)
        # With nothing pending the pages are free again, and a request of many choices must not wait for ever.
        if num_pending and num_pending + num_choices > most:
            return self._too_many(f"{num_pending} of at most {most} requests are pending; try later")
        if priority is None:
            return None
        num_before = self._engine.num_before(priority) if self._has_priorities else num_pending
        if num_before and num_before + num_choices > limit:
            return self._too_many(f"{num_before} of at most {limit} requests come before this one; try later")
        if wait_s is not None and (estimate_s := self._wait_s(num_before)) > wait_s:
            return self._too_many(
                f"a place is free in about {estimate_s:.1f} s, too late for the request's first_token_timeout_s; "
                "try later"
            )
        return None

    async def first(self, deltas: AsyncGenerator[T], wait_s: float | None) -> T:
        """Return the first item. If it does not come within `wait_s`, close `deltas` and raise HttpError (429)."""
        try:
            async with asyncio.timeout(wait_s):
                return await anext(deltas)
        except TimeoutError:
            raise self._too_many("no place was free within the request's first_token_timeout_s; try later") from None

    def _places(self) -> int:
        """Return how many requests can run at once."""
        stats = self._engine.stats
        return max(1, stats.num_running) if stats.lacks_pages else self._max_num_seqs

    def _limit(self) -> int:
        """Return how many choices may be pending: fewer while KV pages, not places, are what requests wait for."""
        return max(1, self.max_pending * self._places() // self._max_num_seqs)

    def _wait_s(self, num_before: int) -> float:
        """Estimate how long a request waits that comes after `num_before` others; 0 if nothing is known."""
        places = self._places()
        return max(0, num_before - places + 1) * self._engine.service_s / places

    def _too_many(self, message: str) -> HttpError:
        """Return a 429 that asks to come again when the requests that wait now have begun."""
        wait_s = math.ceil(self._wait_s(self._engine.num_pending))
        return too_many_requests(message, retry_after_s=min(max(1, wait_s), MAX_RETRY_AFTER_S))
