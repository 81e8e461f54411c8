"""The Python client, blocking and async. `client_http.py` builds requests and reads responses; here are the sockets.

    with Client() as client:
        print(client.complete("def main(", max_tokens=32).text)
        for chunk in client.stream_chat("Write a loop."):
            print(chunk.text, end="", flush=True)

Methods raise the errors of `secateur.errors` and warn about parameters that the service ignored. Calls are retried up
to `retries` times after 408, 429 and 5xx. If the service goes away, they wait for it up to `outage_timeout` seconds,
and streams then go on where they broke off.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Generator
from typing import Any, Self, TypeVar

import httpx2
from pydantic import BaseModel

from secateur import client_http
from secateur.client_http import Call, Events, Messages
from secateur.errors import APIConnectionError, APIError, ConfigError, Problem, SecateurError
from secateur.responses import (
    ChatCompletionChunk,
    ChatCompletionResponse,
    CompletionChunk,
    CompletionResponse,
    DetokenizeResponse,
    ModelList,
    TokenizeResponse,
)
from secateur.retries import OUTAGE_TIMEOUT_S, Attempts, Retry

logger = logging.getLogger(__name__)

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 10.0
HEALTH_TIMEOUT_S = 10.0

Prompt = str | list[str] | list[int] | list[list[int]]
Model = TypeVar("Model", bound=BaseModel)


def check_base_url(base_url: str) -> None:
    """Raise ConfigError unless `base_url` is an HTTP URL."""
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(Problem("base_url", f"must begin with http:// or https:// (got {base_url!r})"))


class _Settings:
    """The settings of both clients. `timeout` is in seconds per read; connecting takes at most 10 s.

    outage_timeout: seconds that a service which has answered may be gone; 0 = fail at once.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_BASE_URL,
        *,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        retries: int = 2,
        outage_timeout: float = OUTAGE_TIMEOUT_S,
    ) -> None:
        check_base_url(base_url)
        if not timeout > 0:
            raise ConfigError(Problem("timeout", f"must be more than 0 seconds (got {timeout})"))
        self.base_url = base_url.rstrip("/").removesuffix("/v1")  # OpenAI's clients write it with /v1
        if not outage_timeout >= 0:
            raise ConfigError(Problem("outage_timeout", f"must be 0 seconds or more (got {outage_timeout})"))
        self._retry = Retry(retries, outage_timeout)
        self._was_there = False  # the service has answered this client
        key = api_key if api_key is not None else os.environ.get("SECATEUR_API_KEY")
        self._options: dict[str, Any] = {
            "base_url": self.base_url,
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "timeout": httpx2.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT_S)),
        }

    def _attempts(self) -> Attempts:
        return Attempts(self._retry, self._was_there)

    def _delay_after(self, attempts: Attempts, failure: SecateurError, *, can_continue: bool = True) -> float:
        """Return the seconds to wait before the next attempt. Raises the failure if there is none."""
        delay = attempts.delay_after(failure) if can_continue else None
        if delay is None:
            raise failure
        if attempts.has_lost_service:
            logger.warning("%s; trying again for up to %.0f s", failure, self._retry.outage_s)
        return delay


class Client(_Settings):
    """Blocking client. `base_url` may end in /v1; `api_key` defaults to the environment's SECATEUR_API_KEY.

    `transport` replaces the network (httpx2.MockTransport, a proxy). Close it, or use it in a `with`.
    """

    def __init__(
        self, base_url: str = DEFAULT_BASE_URL, *, transport: httpx2.BaseTransport | None = None, **settings: Any
    ) -> None:
        super().__init__(base_url, **settings)
        self._http = httpx2.Client(transport=transport, **self._options)

    def complete(self, prompt: Prompt, **params: Any) -> CompletionResponse:
        """POST /v1/completions; `params` are its body fields (max_tokens, temperature, speculative, ...)."""
        return self._call(client_http.complete_call(prompt, params))

    def chat(self, messages: Messages, **params: Any) -> ChatCompletionResponse:
        """POST /v1/chat/completions; a text stands for one user message."""
        return self._call(client_http.chat_call(messages, params))

    def stream_complete(self, prompt: Prompt, **params: Any) -> Generator[CompletionChunk]:
        """Yield chunks as they arrive. Closing the iterator closes the connection, which aborts the request."""
        return self._stream(client_http.stream_complete_call(prompt, params))

    def stream_chat(self, messages: Messages, **params: Any) -> Generator[ChatCompletionChunk]:
        """Stream a chat completion; see `stream_complete`."""
        return self._stream(client_http.stream_chat_call(messages, params))

    def models(self) -> ModelList:
        """GET /v1/models."""
        return self._call(client_http.models_call())

    def tokenize(self, prompt: Messages, **params: Any) -> TokenizeResponse:
        """POST /tokenize; a list of messages goes through the chat template."""
        return self._call(client_http.tokenize_call(prompt, params))

    def detokenize(self, tokens: list[int]) -> DetokenizeResponse:
        """POST /detokenize."""
        return self._call(client_http.detokenize_call(tokens))

    def health(self) -> bool:
        """Return whether the service is up and its engine makes progress; never raises and never retries."""
        try:
            return self._http.get("/health", timeout=HEALTH_TIMEOUT_S).is_success
        except httpx2.TransportError:
            return False

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, call: Call[Model]) -> Model:
        response = self._send(call, self._attempts(), stream=False)
        return client_http.read(call, response)

    def _stream(self, call: Call[Model]) -> Generator[Model]:
        attempts, events = self._attempts(), Events(call)
        while True:
            response = self._send(call.after(events.last_id), attempts, stream=True)
            events = Events(call, events.last_id)
            failure: SecateurError
            try:
                client_http.warn_of_ignored(response.headers)
                for data in response.iter_bytes():
                    for chunk in events.feed(data):
                        attempts.progressed()
                        yield chunk
                    if events.done:
                        return
                events.end()
            except httpx2.TransportError as error:
                failure = client_http.connection_error(error, self.base_url)
            except (APIError, APIConnectionError) as error:
                failure = error
            finally:
                response.close()
            time.sleep(self._delay_after(attempts, failure, can_continue=events.can_continue))

    def _send(self, call: Call[Any], attempts: Attempts, *, stream: bool) -> httpx2.Response:
        """Return a successful response; its body is read unless `stream`. Retries, then raises."""
        request = client_http.request_of(self._http, call)
        while True:
            failure: SecateurError
            try:
                response = self._http.send(request, stream=stream)
                if response.is_success:
                    self._was_there = True
                    return response
                response.read()  # which closes it
                failure = client_http.error_of(response)
            except httpx2.TransportError as error:
                failure = client_http.connection_error(error, self.base_url)
            time.sleep(self._delay_after(attempts, failure))


class AsyncClient(_Settings):
    """Async client: `Client` with `await` before calls and `async for` over streams."""

    def __init__(
        self, base_url: str = DEFAULT_BASE_URL, *, transport: httpx2.AsyncBaseTransport | None = None, **settings: Any
    ) -> None:
        super().__init__(base_url, **settings)
        # The caller limits concurrency, so the connection pool must not.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx2.AsyncClient(transport=transport, limits=limits, **self._options)

    async def complete(self, prompt: Prompt, **params: Any) -> CompletionResponse:
        """POST /v1/completions; `params` are its body fields."""
        return await self.call(client_http.complete_call(prompt, params))

    async def chat(self, messages: Messages, **params: Any) -> ChatCompletionResponse:
        """POST /v1/chat/completions; a text stands for one user message."""
        return await self.call(client_http.chat_call(messages, params))

    def stream_complete(self, prompt: Prompt, **params: Any) -> AsyncGenerator[CompletionChunk]:
        """Stream a completion; see `Client.stream_complete`."""
        return self._stream(client_http.stream_complete_call(prompt, params))

    def stream_chat(self, messages: Messages, **params: Any) -> AsyncGenerator[ChatCompletionChunk]:
        """Stream a chat completion."""
        return self._stream(client_http.stream_chat_call(messages, params))

    async def models(self) -> ModelList:
        """GET /v1/models."""
        return await self.call(client_http.models_call())

    async def tokenize(self, prompt: Messages, **params: Any) -> TokenizeResponse:
        """POST /tokenize; a list of messages goes through the chat template."""
        return await self.call(client_http.tokenize_call(prompt, params))

    async def detokenize(self, tokens: list[int]) -> DetokenizeResponse:
        """POST /detokenize."""
        return await self.call(client_http.detokenize_call(tokens))

    async def health(self) -> bool:
        """Return whether the service is healthy; never raises and never retries."""
        try:
            return (await self._http.get("/health", timeout=HEALTH_TIMEOUT_S)).is_success
        except httpx2.TransportError:
            return False

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(self, call: Call[Model]) -> Model:
        """Send a prepared call; the batch runner builds its own."""
        response = await self._send(call, self._attempts(), stream=False)
        return client_http.read(call, response)

    async def _stream(self, call: Call[Model]) -> AsyncGenerator[Model]:
        attempts, events = self._attempts(), Events(call)
        while True:
            response = await self._send(call.after(events.last_id), attempts, stream=True)
            events = Events(call, events.last_id)
            failure: SecateurError
            try:
                client_http.warn_of_ignored(response.headers)
                async for data in response.aiter_bytes():
                    for chunk in events.feed(data):
                        attempts.progressed()
                        yield chunk
                    if events.done:
                        return
                events.end()
            except httpx2.TransportError as error:
                failure = client_http.connection_error(error, self.base_url)
            except (APIError, APIConnectionError) as error:
                failure = error
            finally:
                await response.aclose()
            await asyncio.sleep(self._delay_after(attempts, failure, can_continue=events.can_continue))

    async def _send(self, call: Call[Any], attempts: Attempts, *, stream: bool) -> httpx2.Response:
        request = client_http.request_of(self._http, call)
        while True:
            failure: SecateurError
            try:
                response = await self._http.send(request, stream=stream)
                if response.is_success:
                    self._was_there = True
                    return response
                await response.aread()
                failure = client_http.error_of(response)
            except httpx2.TransportError as error:
                failure = client_http.connection_error(error, self.base_url)
            await asyncio.sleep(self._delay_after(attempts, failure))
