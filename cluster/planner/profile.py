"""Measures an engine on this machine: its own statistics of every step, for a grid of configurations.

A cell is a number of requests, a tree size and a context length. Only steps in which exactly these requests decode
count. All cells take turns in every round, so that other load on the machine affects them alike. The steps of a round
are averaged, because throughput is an average; over the rounds the median counts. `fit` turns the result into a cost
table.

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
from workers.settings import SamplingSettings

OUTPUT_TOKENS = 96
PLAIN_OUTPUT_TOKENS = 64  # one token per step
WARM_TOKENS = 8
WARM_STEPS = 1  # in the first step after the prompts the drafter reads them


class ProfileCell(NamedTuple):
    """One configuration of the grid."""

    requests: int
    nodes: int
    context: int
    """Cached tokens of each request, halfway through its answer."""

    @property
    def output(self) -> int:
        """Tokens to generate."""
        return OUTPUT_TOKENS if self.nodes else PLAIN_OUTPUT_TOKENS

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return max(2, self.context - self.output // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One decoding step, or an average of several."""

    requests: int
    nodes: int  # requested
    context: int  # requested
    rows: float
    kv: float
    wall_ms: float
    verify_ms: float
    draft_ms: float
    transfer_ms: float

    @property
    def pairs(self) -> float:
        """Row-token pairs of attention."""
        return self.kv * self.rows / self.requests

    @property
    def host_ms(self) -> float:
        """The rest of the step."""
        return max(0.0, self.wall_ms - self.verify_ms - self.draft_ms - self.transfer_ms)


class AcceptedCounts(NamedTuple):
    """Acceptance over whole answers. A request with low acceptance takes more steps, so it weighs more."""

    nodes: int
    context: int
    num_drafts: int
    """Trees verified."""
    num_accepted: int


class PrefillSample(NamedTuple):
    """One prompt that was computed alone in one step, and the drafter's time to read it."""

    rows: int
    verify_ms: float
    feed_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All measurements of a profile."""

    samples_C: tuple[StepSample, ...]
    prompts: tuple[PrefillSample, ...]
    accepted: tuple[AcceptedCounts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileGrid:
    """The cells of a profile: all combinations of these values."""

    requests: tuple[int, ...]
    nodes: tuple[int, ...]
    contexts: tuple[int, ...]

    @staticmethod
    def of(config: EngineConfig) -> ProfileGrid:
        """Return a grid within the engine's limits."""
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
        """All combinations."""
        return [ProfileCell(*cell) for cell in itertools.product(self.requests, self.nodes, self.contexts)]


class UniquePrompts:
    """Makes prompts of any length from the given texts.

    Each prompt is the end of a concatenation of all texts. No two begin alike, so the prefix cache never matches.
    """

    def __init__(self, texts: Sequence[list[int]]) -> None:
        self._texts = texts
        self._count = 0

    def take(self, length: int) -> list[int]:
        """Return the next prompt."""
        number, self._count = self._count, self._count + 1
        after = number % len(self._texts) + 1
        text = list(itertools.chain(*self._texts[after:], *self._texts[:after]))
        text *= -(-length // len(text))
        # A varying first token: no two prompts of equal length share their first page.
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
    """Run the prompts and return the engine's statistics before the first step and after each.

    concurrency 0 runs all prompts at once. Raises EngineDead.
    """
    speculation = Speculation(enabled=nodes > 0, num_speculative_tokens=nodes or None, auto=False)
    jobs = [
        GenerationJob(
            prompt=prompt,
            max_tokens=output,
            sampling=SamplingSettings(temperature=temperature, seed=number),
            speculation=speculation,
        )
        for number, prompt in enumerate(prompts)
    ]
    runner.run(jobs, concurrency or len(jobs))
    return runner.snapshots


def profiled(config: EngineConfig, max_batch: int) -> EngineConfig:
    """Return the engine configuration to profile: unpruned trees, and no more requests than the profile uses."""
    config = replace(config, max_num_seqs=min(config.max_num_seqs, max_batch))
    if config.draft is None:
        return config
    tree = replace(config.draft.tree, prune=PruneConfig())
    return replace(config, draft=replace(config.draft, tree=tree))


class Profiler:
    """Measures the cells of a grid, round by round."""

    def __init__(self, runner: Runner, grid: ProfileGrid, prompts: UniquePrompts, temperature: float) -> None:
        self._runner, self._grid, self._prompts, self._temperature = runner, grid, prompts, temperature
        self._samples: dict[ProfileCell, list[StepSample]] = {cell: [] for cell in grid.cells}
        self._prefills: list[PrefillSample] = []
        self._accepted: list[AcceptedCounts] = []

    def warm_up(self) -> None:
        """Run every cell once without measuring."""
        for cell in self._grid.cells:
            self._run(cell, WARM_TOKENS)

    def round(self) -> None:
        """Measure every cell once."""
        for cell in self._grid.cells:
            snapshots = self._run(cell, cell.output)
            if steps := decoding_steps(snapshots, cell):
                self._samples[cell].append(summary(steps, statistics.mean))
            self._prefills += prompt_steps(snapshots, cell)
            self._accepted.append(accepted(snapshots, cell))

    @property
    def profile(self) -> Profile:
        """The medians over the rounds so far. Raises SecateurError if a cell has no valid step."""
        if empty := [cell for cell, found in self._samples.items() if not found]:
            raise SecateurError(f"the profile saw no undisturbed step of {empty[0]}")
        medians = tuple(summary(found, statistics.median) for found in self._samples.values())
        return Profile(samples_C=medians, prompts=tuple(self._prefills), accepted=tuple(self._accepted))

    def _run(self, cell: ProfileCell, output: int) -> list[StatsSnapshot]:
        prompts = [self._prompts.take(cell.prompt) for _ in range(cell.requests)]
        return watch(self._runner, prompts, cell.nodes, output, temperature=self._temperature)


def decoding_steps(snapshots: Sequence[StatsSnapshot], cell: ProfileCell) -> list[StepSample]:
    """Return the steps in which exactly the cell's requests decoded."""
    began, prompt_tokens = snapshots[0].stats, cell.requests * cell.prompt
    found = []
    for before, after in itertools.pairwise(snapshots):
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


def prompt_steps(snapshots: Sequence[StatsSnapshot], cell: ProfileCell) -> list[PrefillSample]:
    """Return the prompt step of a one-request cell: the first step, and how much longer the first draft took."""
    if cell.requests != 1 or len(snapshots) < 4 or snapshots[1].stats.steps != snapshots[0].stats.steps + 1:
        return []
    drafts = [1e3 * (new.stats.draft_seconds - old.stats.draft_seconds) for old, new in itertools.pairwise(snapshots)]
    feed = max(0.0, drafts[1] - statistics.median(drafts[2:])) if cell.nodes else None
    verify_ms = 1e3 * (snapshots[1].stats.verify_seconds - snapshots[0].stats.verify_seconds)
    return [PrefillSample(cell.prompt, verify_ms, feed)]


def accepted(snapshots: Sequence[StatsSnapshot], cell: ProfileCell) -> AcceptedCounts:
    """Return how many draft tokens the target accepted over the whole run."""
    first, last = snapshots[0].stats, snapshots[-1].stats
    num_accepted = last.num_accepted_tokens - first.num_accepted_tokens
    return AcceptedCounts(cell.nodes, cell.context, last.num_drafts - first.num_drafts, num_accepted)


def summary(samples: Sequence[StepSample], middle: Callable[[Iterable[float]], float]) -> StepSample:
    """Combine samples field by field with `middle`, such as mean or median."""
    return replace(
        samples[0],
        rows=middle(sample.rows for sample in samples),
        kv=middle(sample.kv for sample in samples),
        wall_ms=middle(sample.wall_ms for sample in samples),
        verify_ms=middle(sample.verify_ms for sample in samples),
        draft_ms=middle(sample.draft_ms for sample in samples),
        transfer_ms=middle(sample.transfer_ms for sample in samples),
    )
