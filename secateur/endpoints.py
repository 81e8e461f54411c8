"""Several services that answer the same requests: each request goes to the one with the fewest pending."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from secateur.client import AsyncClient
from secateur.client_http import Call, Model
from secateur.errors import ConfigError, Problem, SecateurError
from secateur.responses import ModelList
from secateur.retries import OUTAGE_TIMEOUT_S, Attempts, Retry, is_transient


@dataclass(eq=False)
class _Endpoint:
    client: AsyncClient
    num_pending: int = 0
    num_sent: int = 0
    num_failures: int = 0
    """In a row."""
    rests_until: float = 0.0
    """On the clock of `time.monotonic`; a service that failed gets no request before."""


class EndpointPool:
    """Clients of several services. An async context manager that closes them.

    A request that fails for a passing reason (no answer, 429, 5xx) goes on to another service at once, and the one that
    failed rests for a time that grows with its failures. A request is tried at most `retries` + 1 times per service; if
    services that were there are gone, for up to `outage_timeout` seconds. `settings` are those of AsyncClient. Raises
    ConfigError if an address is given twice.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        retries: int = 2,
        outage_timeout: float = OUTAGE_TIMEOUT_S,
        **settings: Any,
    ) -> None:
        self._endpoints = [_Endpoint(AsyncClient(url, retries=0, outage_timeout=0, **settings)) for url in base_urls]
        self._retry = Retry((retries + 1) * len(self._endpoints) - 1, outage_timeout)
        self._was_there = False  # a service has answered
        addresses = [endpoint.client.base_url for endpoint in self._endpoints]
        if not addresses:
            raise ConfigError(Problem("base_url", "is empty; give at least one address"))
        if twice := [address for address in addresses if addresses.count(address) > 1]:
            raise ConfigError(Problem("base_url", f"{twice[0]} is given twice; remove one"))

    async def models(self) -> ModelList:
        """Ask every service for its models, so that those that cannot be reached rest.

        Returns one answer. Raises the first error if no service answers, and any that is no passing failure.
        """
        asked = [endpoint.client.models() for endpoint in self._endpoints]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for endpoint, answer in zip(self._endpoints, answers, strict=True):
            if isinstance(answer, SecateurError) and is_transient(answer):
                self._rest(endpoint, answer)
            elif isinstance(answer, BaseException):
                raise answer
        for answer in answers:
            if isinstance(answer, ModelList):
                self._was_there = True
                return answer
        raise next(answer for answer in answers if isinstance(answer, BaseException))

    async def call(self, call: Call[Model]) -> Model:
        """Send a prepared call to the service with the fewest pending requests, and again if that fails."""
        attempts = Attempts(self._retry, self._was_there)
        while True:
            endpoint = await self._least_pending()
            endpoint.num_pending += 1
            endpoint.num_sent += 1
            try:
                answer = await endpoint.client.call(call)
            except SecateurError as failure:
                if attempts.delay_after(failure) is None:
                    raise
                self._rest(endpoint, failure)
            else:
                endpoint.num_failures, self._was_there = 0, True
                return answer
            finally:
                endpoint.num_pending -= 1

    def _rest(self, endpoint: _Endpoint, failure: SecateurError) -> None:
        now = time.monotonic()
        if endpoint.rests_until > now:
            return  # it was in flight with one that failed before
        told = getattr(failure, "retry_after", None)
        wait = min(self._retry.longest_s, self._retry.first_s * 2**endpoint.num_failures) if told is None else told
        endpoint.rests_until = now + wait
        endpoint.num_failures += 1

    async def _least_pending(self) -> _Endpoint:
        """Return the service to ask next; wait if all rest."""
        while True:
            now = time.monotonic()
            if awake := [endpoint for endpoint in self._endpoints if endpoint.rests_until <= now]:
                return min(awake, key=lambda endpoint: (endpoint.num_pending, endpoint.num_sent))
            await asyncio.sleep(min(endpoint.rests_until for endpoint in self._endpoints) - now)

    async def close(self) -> None:
        """Close all connections."""
        for endpoint in self._endpoints:
            await endpoint.client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
