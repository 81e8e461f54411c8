"""Runs an engine synchronously: a list of jobs in, their answers and the engine's statistics out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.engine.local_engine import LocalEngine
from cluster.engine.rank_exits import EngineDead
from workers.comm.ipc import EngineStats, RequestStats, Speculation, Submit, TokenLogprobs
from workers.config import EngineConfig
from workers.settings import SamplingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """One request to run."""

    prompt: list[int]
    max_tokens: int = 64
    sampling: SamplingSettings = SamplingSettings(temperature=0.0)
    ignore_eos: bool = True
    speculation: Speculation = Speculation()


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedAnswer:
    """The result of one job."""

    tokens: list[int]
    finish_reason: str
    stats: RequestStats
    num_steps: int
    """Decoding steps that produced tokens, without the prompt's step, which produces the first."""
    logprobs: list[TokenLogprobs]
    """One per token, if the job asked for them."""
    first_seconds: float
    """Seconds from submission to the first token."""
    seconds: float
    """Seconds from submission to the last token."""


class StatsSnapshot(NamedTuple):
    """The engine's statistics at one time."""

    at: float
    stats: EngineStats


class Runner:
    """An engine in processes of this machine; a context manager."""

    def __init__(self, config: EngineConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._engine = LocalEngine(config)
        self.config = config
        self.snapshots: list[StatsSnapshot] = []
        """Statistics of the latest `run`: one entry before the first step, then one after each step."""

    def __enter__(self) -> Runner:
        self._loop.run_until_complete(self._engine.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.run_until_complete(self._engine.__aexit__(None, None, None))
        self._loop.close()

    @property
    def topology(self) -> list[dict[str, str | int]]:
        """Each rank's report of its start-up, see `World.gather_topology`."""
        ready = self._engine.client.ready
        assert ready is not None
        return ready.topology

    @property
    def stats(self) -> EngineStats:
        """The engine's latest statistics."""
        return self._engine.client.stats

    def run(self, jobs: Sequence[GenerationJob], concurrency: int = 1) -> list[GeneratedAnswer]:
        """Run `concurrency` jobs at a time and return the answers in order. Raises EngineDead if one fails."""
        self.snapshots = [StatsSnapshot(time.perf_counter(), self.stats)]
        return self._loop.run_until_complete(self._run(jobs, concurrency))

    async def _run(self, jobs: Sequence[GenerationJob], concurrency: int) -> list[GeneratedAnswer]:
        slots = asyncio.Semaphore(concurrency)

        async def one(job: GenerationJob) -> GeneratedAnswer:
            async with slots:
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
                    if self.stats is not self.snapshots[-1].stats:  # every step replaces the object
                        self.snapshots.append(StatsSnapshot(now, self.stats))
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
