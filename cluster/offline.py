"""The engine behind `secateur.LLM`: the service's own parts without HTTP, on an event loop in a background thread."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

from tqdm import tqdm

from cluster.convert import fetch_weights, read_engine, visible_gpus, with_tokenizer
from cluster.engine.local_engine import LocalEngine
from cluster.errors import BadRequest, HttpError
from cluster.http.service import RequestHead, Service
from cluster.local_service import build_service
from cluster.openai.deltas import GenerationFailed
from cluster.openai.openai_format import prompt_logprobs, token_logprobs, total_stats
from cluster.openai.output_processor import Generation
from cluster.pairs import settled
from cluster.text.tokenizer_pool import TokenizerPool
from secateur.config import EngineArgs
from secateur.errors import BadRequestError, ConfigError, Problem, ServerError, ServiceUnavailableError
from secateur.outputs import CompletionOutput, RequestOutput
from secateur.requests import ChatCompletionRequest, CompletionRequest

Body = CompletionRequest | ChatCompletionRequest
T = TypeVar("T")

_CHOICES_PER_SEQUENCE = 2
"""Choices in the engine per place in its running batch: enough for a place never to stay empty."""


class OfflineEngine:
    """An engine that runs lists of requests.

    Raises ConfigError before anything starts, EngineDead if the engine does not start.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._args = args = settled(args)
        config, self._specs = read_engine(args, num_gpus=visible_gpus())
        self._config, self._tokenizer = with_tokenizer(args, config)
        fetch_weights(args, self._config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="secateur-offline", daemon=True)
        self._thread.start()
        self._running = AsyncExitStack()
        self._num_requests = 0
        try:
            self._service: Service = self._call(self._start())
        except BaseException:
            self.stop()
            raise

    def run(self, bodies: Sequence[Body], *, has_progress: bool) -> list[RequestOutput]:
        """Run all requests and return their outputs in order.

        Raises ConfigError before any of them runs if one is wrong, and an error of `secateur.errors` or EngineDead if
        one fails, which ends the others.
        """
        if self._loop.is_closed():
            raise RuntimeError("this LLM is closed; make another one")
        with tqdm(total=len(bodies), desc="prompts", disable=not has_progress, file=sys.stderr) as bar:
            return self._call(self._run(bodies, bar))

    def stop(self) -> None:
        """Stop the engine's processes; a second call does nothing."""
        if self._loop.is_closed():
            return
        self._call(self._running.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the background loop; an interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _start(self) -> Service:
        pool = await self._running.enter_async_context(TokenizerPool(self._tokenizer))
        client = await self._running.enter_async_context(LocalEngine(self._config, self._specs, restarts=True))
        await pool.ready()
        service = build_service(self._args, self._config, client, self._tokenizer, pool, replica="offline")
        service.admission.max_pending = sys.maxsize  # `_run` bounds how many there are
        return service

    async def _run(self, bodies: Sequence[Body], bar: Any) -> list[RequestOutput]:
        slots = asyncio.Semaphore(_CHOICES_PER_SEQUENCE * self._config.max_num_seqs)
        prepared = [await self._prepare(body) for body in bodies]

        async def generate(body: Body, generations: Sequence[Generation], head: RequestHead) -> RequestOutput:
            async with slots, aclosing(self._service.deltas(generations, head)) as deltas:
                async for _ in deltas:
                    pass
            bar.update()
            return self._output(body, generations, head.request_id)

        tasks = [asyncio.create_task(generate(body, *own)) for body, own in zip(bodies, prepared, strict=True)]
        try:
            return list(await asyncio.gather(*tasks))
        except BadRequest as error:  # an output that cannot follow its grammar
            raise BadRequestError(str(error), param=error.param, code=error.code) from None
        except GenerationFailed as error:
            raise ServerError(str(error)) from None
        finally:  # the first error ends all requests
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _prepare(self, body: Body) -> tuple[list[Generation], RequestHead]:
        """Check and tokenize a request, before any of them runs."""
        service = self._service
        head = RequestHead(request_id=body.request_id or str(self._num_requests), arrival=0.0)
        self._num_requests += 1
        try:
            body = service.accept(body)
            with service.ticket(body) as ids:
                return await service.prepare(body, await service.tokenize(body), head, ids), head
        except HttpError as error:
            if error.status == 503:
                raise ServiceUnavailableError(error.body.error.message) from None
            raise ConfigError(Problem(error.body.error.param or "", error.body.error.message)) from None

    def _output(self, body: Body, generations: Sequence[Generation], request_id: str) -> RequestOutput:
        first = generations[0]
        return RequestOutput(
            request_id=request_id,
            prompt=body.prompt if isinstance(body, CompletionRequest) and isinstance(body.prompt, str) else None,
            prompt_token_ids=list(first.submit.prompt),
            prompt_logprobs=None
            if body.prompt_logprobs is None
            else prompt_logprobs(self._tokenizer, first, body.prompt_logprobs),
            outputs=[self._answer(body, index, generation) for index, generation in enumerate(generations)],
            num_cached_tokens=first.last.num_cached_tokens,
            speculative=total_stats(generations),
        )

    def _answer(self, body: Body, index: int, generation: Generation) -> CompletionOutput:
        has_logprobs = body.num_logprobs is not None
        return CompletionOutput(
            index=index,
            text=generation.text,
            token_ids=list(generation.token_ids),
            cumulative_logprob=sum(own.score.logprob for own in generation.scored) if has_logprobs else None,
            logprobs=[
                token_logprobs(self._tokenizer, own.token, own.score, has_ranks=body.logprob_token_ids is None)
                for own in generation.scored
            ]
            if has_logprobs
            else None,
            finish_reason=generation.last.finish_reason,
            stop_reason=generation.last.stop_reason,
        )
