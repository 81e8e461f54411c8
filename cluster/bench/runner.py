"""A running engine for synchronous callers: lists of requests in, answers and the engine's counts out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.engine_client import EngineDead
from cluster.local_engine import LocalEngine
from workers.comm.ipc import EngineStats, RequestStats, Speculation, Submit, TokenLogprobs
from workers.config import EngineConfig
from workers.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """One request to run."""

    prompt: list[int]
    max_tokens: int = 64
    sampling: SamplingParams = SamplingParams(temperature=0.0)
    ignore_eos: bool = True
    speculation: Speculation = Speculation()


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedAnswer:
    """One request's outcome."""

    tokens: list[int]
    finish_reason: str
    stats: RequestStats
    num_steps: int
    """Decoding steps that gave it tokens; the prompt's, which gives the first, is not among them."""
    logprobs: list[TokenLogprobs]
    """One per token, if the job asked for them."""
    first_seconds: float
    """From asking to the first token."""
    seconds: float
    """From asking to the last."""


class StatsSnapshot(NamedTuple):
    """What the engine had counted when it was heard."""

    at: float
    stats: EngineStats


class Runner:
    """An engine as plain processes; a context manager."""

    def __init__(self, config: EngineConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._engine = LocalEngine(config)
        self.config = config
        self.frames: list[StatsSnapshot] = []
        """Of the latest `run`: one before the first step, then one after each."""

    def __enter__(self) -> Runner:
        self._loop.run_until_complete(self._engine.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.run_until_complete(self._engine.__aexit__(None, None, None))
        self._loop.close()

    @property
    def stats(self) -> EngineStats:
        return self._engine.client.stats

    def run(self, jobs: Sequence[GenerationJob], concurrency: int = 1) -> list[GeneratedAnswer]:
        """Answers in the order of the jobs, `concurrency` at a time. Raises EngineDead if one ends in an error."""
        self.frames = [StatsSnapshot(time.perf_counter(), self.stats)]
        return self._loop.run_until_complete(self._run(jobs, concurrency))

    async def _run(self, jobs: Sequence[GenerationJob], concurrency: int) -> list[GeneratedAnswer]:
        seats = asyncio.Semaphore(concurrency)

        async def one(job: GenerationJob) -> GeneratedAnswer:
            async with seats:
                submit = Submit(
                    id=self._engine.client.new_id(),
                    prompt=job.prompt,
                    max_tokens=job.max_tokens,
                    sampling=job.sampling,
                    ignore_eos=job.ignore_eos,
                    speculation=job.speculation,
                )
                began = now = time.perf_counter()
                first, chunks = 0.0, []
                async for chunk in self._engine.client.submit(submit):
                    now = time.perf_counter()
                    first = first or now - began
                    chunks.append(chunk)
                    if self.stats is not self.frames[-1].stats:  # every step replaces them
                        self.frames.append(StatsSnapshot(now, self.stats))
                last = chunks[-1]
                if last.finish_reason is None or last.stats is None:
                    raise EngineDead(f"a request was not answered: {last.error}")
                return GeneratedAnswer(
                    tokens=[token for chunk in chunks for token in chunk.tokens],
                    finish_reason=last.finish_reason,
                    stats=last.stats,
                    num_steps=len(chunks) - 1,
                    logprobs=[entry for chunk in chunks for entry in chunk.logprobs or []],
                    first_seconds=first,
                    seconds=now - began,
                )

        return await asyncio.gather(*(one(job) for job in jobs))
