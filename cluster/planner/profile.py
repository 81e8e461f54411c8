"""This machine's cost table: an engine runs a handful of configurations, its own statistics of every step are read.

A cell is a number of requests with trees of a size behind a context of a length. Only steps count in which exactly
these requests decode. All cells take turns in every round, so that what else the machine does hits them alike. A cell's
steps of a round are averaged, because throughput is; of the rounds the median counts. `fit` makes a table of it.

Legend: C cells, J terms.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cluster.bench.runner import GenerationJob, Runner, StatsSnapshot
from secateur.errors import SecateurError
from workers.comm.ipc import Speculation
from workers.config import EngineConfig, PruneConfig
from workers.types import SamplingParams

OUTPUT_TOKENS = 96
PLAIN_OUTPUT_TOKENS = 64  # a step gives one
WARM_TOKENS = 8
WARM_STEPS = 1  # the first after the prompts: it also feeds them to the drafter


class ProfileCell(NamedTuple):
    requests: int
    nodes: int
    context: int
    """Tokens in the cache of each, in the middle of its answer."""

    @property
    def output(self) -> int:
        return OUTPUT_TOKENS if self.nodes else PLAIN_OUTPUT_TOKENS

    @property
    def prompt(self) -> int:
        return max(2, self.context - self.output // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One decoding step, or what stands for many."""

    requests: int
    nodes: int  # asked for
    context: int  # likewise
    rows: float
    kv: float
    wall_ms: float
    verify_ms: float
    draft_ms: float
    transfer_ms: float

    @property
    def pairs(self) -> float:
        return self.kv * self.rows / self.requests

    @property
    def host_ms(self) -> float:
        return max(0.0, self.wall_ms - self.verify_ms - self.draft_ms - self.transfer_ms)


class AcceptedCounts(NamedTuple):
    """Of whole answers: a request that has little accepted takes more steps, and counts for more."""

    nodes: int
    context: int
    num_drafts: int
    """Trees verified."""
    num_accepted: int


class PrefillSample(NamedTuple):
    """One prompt computed alone, in one step, and what feeding it to the drafter took."""

    rows: int
    verify_ms: float
    feed_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    samples_C: tuple[StepSample, ...]
    prompts: tuple[PrefillSample, ...]
    accepted: tuple[AcceptedCounts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileGrid:
    """The cells of a profile: all combinations."""

    requests: tuple[int, ...]
    nodes: tuple[int, ...]
    contexts: tuple[int, ...]

    @staticmethod
    def of(config: EngineConfig) -> ProfileGrid:
        """What the engine can do."""
        most = config.max_num_seqs
        budget = config.draft.tree.num_speculative_tokens if config.draft else 0
        room = config.max_model_len - OUTPUT_TOKENS
        return ProfileGrid(
            requests=tuple(sorted({1, -(-most // 2), most})),
            nodes=tuple(sorted({0, *(n for n in (1, 4, 8, budget) if n <= budget)})),
            contexts=tuple(sorted({min(128, room), min(512, room)})),
        )

    @property
    def cells(self) -> list[ProfileCell]:
        return [ProfileCell(*cell) for cell in itertools.product(self.requests, self.nodes, self.contexts)]


class UniquePrompts:
    """UniquePrompts of chosen lengths, each the end of a text that ends with another of the given ones.

    No two of them begin alike, so that nothing is found in a prefix cache.
    """

    def __init__(self, texts: Sequence[list[int]]) -> None:
        self._texts = texts
        self._count = 0

    def take(self, length: int) -> list[int]:
        number, self._count = self._count, self._count + 1
        after = number % len(self._texts) + 1
        text = list(itertools.chain(*self._texts[after:], *self._texts[:after]))
        text *= -(-length // len(text))
        # One token from anywhere in front: at equal length no two texts share their first page.
        return [self._texts[0][number % len(self._texts[0])], *text[len(text) - length + 1 :]]


def watch(
    runner: Runner,
    prompts: Sequence[list[int]],
    nodes: int,
    output: int,
    *,
    temperature: float = 0.0,
    concurrency: int = 0,
) -> list[StatsSnapshot]:
    """What the engine counts while it answers; the first frame is from before the first step. concurrency 0: all at
    once. Raises EngineDead."""
    speculation = Speculation(enabled=nodes > 0, num_speculative_tokens=nodes or None, auto=False)
    jobs = [
        GenerationJob(
            prompt=prompt,
            max_tokens=output,
            sampling=SamplingParams(temperature=temperature, seed=number),
            speculation=speculation,
        )
        for number, prompt in enumerate(prompts)
    ]
    runner.run(jobs, concurrency or len(jobs))
    return runner.frames


def profiled(config: EngineConfig, max_batch: int) -> EngineConfig:
    """The engine that is profiled: trees as large as asked, no larger than the profile fills."""
    config = replace(config, max_num_seqs=min(config.max_num_seqs, max_batch))
    if config.draft is None:
        return config
    tree = replace(config.draft.tree, prune=PruneConfig())
    return replace(config, draft=replace(config.draft, tree=tree))


class Profiler:
    """Goes through a grid's cells, round by round."""

    def __init__(self, runner: Runner, grid: ProfileGrid, prompts: UniquePrompts, temperature: float) -> None:
        self._runner, self._grid, self._prompts, self._temperature = runner, grid, prompts, temperature
        self._samples: dict[ProfileCell, list[StepSample]] = {cell: [] for cell in grid.cells}
        self._alone: list[PrefillSample] = []
        self._accepted: list[AcceptedCounts] = []

    def warm_up(self) -> None:
        for cell in self._grid.cells:
            self._run(cell, WARM_TOKENS)

    def round(self) -> None:
        for cell in self._grid.cells:
            frames = self._run(cell, cell.output)
            if steps := decoding_steps(frames, cell):
                self._samples[cell].append(summary(steps, statistics.mean))
            self._alone += prompt_steps(frames, cell)
            self._accepted.append(accepted(frames, cell))

    @property
    def profile(self) -> Profile:
        """Of the rounds so far. Raises SecateurError if one of the cells has no step to show."""
        if empty := [cell for cell, found in self._samples.items() if not found]:
            raise SecateurError(f"the profile saw no undisturbed step of {empty[0]}")
        medians = tuple(summary(found, statistics.median) for found in self._samples.values())
        return Profile(samples_C=medians, prompts=tuple(self._alone), accepted=tuple(self._accepted))

    def _run(self, cell: ProfileCell, output: int) -> list[StatsSnapshot]:
        prompts = [self._prompts.take(cell.prompt) for _ in range(cell.requests)]
        return watch(self._runner, prompts, cell.nodes, output, temperature=self._temperature)


def decoding_steps(frames: Sequence[StatsSnapshot], cell: ProfileCell) -> list[StepSample]:
    """The steps in which exactly the cell's requests decoded."""
    began, prompt_tokens = frames[0].stats, cell.requests * cell.prompt
    found = []
    for before, after in itertools.pairwise(frames):
        old, new = before.stats, after.stats
        if (
            old.prompt_tokens - began.prompt_tokens == prompt_tokens
            and new.steps == old.steps + 1
            and old.num_running == new.num_running == cell.requests
        ):
            found.append(
                StepSample(
                    requests=cell.requests,
                    nodes=cell.nodes,
                    context=cell.context,
                    rows=cell.requests + new.num_verified_tokens - old.num_verified_tokens,
                    kv=prompt_tokens + old.generation_tokens - began.generation_tokens,
                    wall_ms=1e3 * (after.at - before.at),
                    verify_ms=1e3 * (new.verify_seconds - old.verify_seconds),
                    draft_ms=1e3 * (new.draft_seconds - old.draft_seconds),
                    transfer_ms=1e3 * (new.transfer_seconds - old.transfer_seconds),
                )
            )
    return found[WARM_STEPS:]


def prompt_steps(frames: Sequence[StatsSnapshot], cell: ProfileCell) -> list[PrefillSample]:
    """Of a cell of one request, its prompt: the first step, and the drafter's first over its usual time."""
    if cell.requests != 1 or len(frames) < 4 or frames[1].stats.steps != frames[0].stats.steps + 1:
        return []
    drafts = [1e3 * (new.stats.draft_seconds - old.stats.draft_seconds) for old, new in itertools.pairwise(frames)]
    feed = max(0.0, drafts[1] - statistics.median(drafts[2:])) if cell.nodes else None
    verify_ms = 1e3 * (frames[1].stats.verify_seconds - frames[0].stats.verify_seconds)
    return [PrefillSample(cell.prompt, verify_ms, feed)]


def accepted(frames: Sequence[StatsSnapshot], cell: ProfileCell) -> AcceptedCounts:
    first, last = frames[0].stats, frames[-1].stats
    num_accepted = last.num_accepted_tokens - first.num_accepted_tokens
    return AcceptedCounts(cell.nodes, cell.context, last.num_drafts - first.num_drafts, num_accepted)


def summary(samples: Sequence[StepSample], middle: Callable[[Iterable[float]], float]) -> StepSample:
    """Of each number by itself."""
    return replace(
        samples[0],
        rows=middle(sample.rows for sample in samples),
        kv=middle(sample.kv for sample in samples),
        wall_ms=middle(sample.wall_ms for sample in samples),
        verify_ms=middle(sample.verify_ms for sample in samples),
        draft_ms=middle(sample.draft_ms for sample in samples),
        transfer_ms=middle(sample.transfer_ms for sample in samples),
    )
