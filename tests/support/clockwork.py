"""The bundled pair in this process on a simulated clock with given costs, to measure `auto` without noise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from drafter.proposers.base import FeatureProposer
from drafter.tree.frontier import Frontier
from tests.support.engine_here import EngineHere, Pair, engine_here
from tests.support.engines import BUNDLED, DYNAMIC, bundled, prompts
from verifier import drafting, engine
from verifier.adaptive import controller
from verifier.adaptive.cost_model import RowCosts
from verifier.target import Target
from workers.comm.ipc import EngineStats, Speculation, Submit
from workers.settings import SamplingSettings
from workers.types import DraftRequest, TargetStep

OFF, FIXED, AUTO = Speculation(enabled=False), Speculation(auto=False), Speculation(auto=True)


@dataclass(frozen=True, kw_only=True)
class ClockCosts:
    """Simulated costs in milliseconds.

    A step of the target takes fixed + row x rows. The drafter takes message + fed x input rows + level x levels +
    node x nodes. In addition, each request with a tree takes `tree`, which is not part of the start-up profile.
    """

    fixed: float
    row: float
    message: float
    fed: float
    level: float
    node: float
    tree: float = 0.0

    @property
    def rows(self) -> RowCosts:
        rows_T = np.array([1.0, 512.0])
        return RowCosts(rows_T, self.fixed + self.row * rows_T)


@dataclass(frozen=True)
class Run:
    """The result of a run."""

    tokens: list[list[int]]
    milliseconds: float
    stats: EngineStats
    num_trees: int  # trees requested from the drafter

    @property
    def rate(self) -> float:
        return sum(map(len, self.tokens)) / self.milliseconds

    @property
    def acceptance_length(self) -> float:
        return 1 + self.stats.num_accepted_tokens / max(1, self.stats.num_drafts)

    @property
    def verified_per_token(self) -> float:
        return self.stats.num_verified_tokens / sum(map(len, self.tokens))


@dataclass
class Clock:
    """A clock that only advances when one of the models runs."""

    costs: ClockCosts
    ms: float = 0.0

    def seconds(self) -> float:
        return self.ms / 1e3


class _Target(Target):
    def __init__(self, clock: Clock, *own: Any) -> None:
        super().__init__(*own)
        self.clock = clock

    def run(self, step: TargetStep, number: int, *more: Any, **options: Any) -> list[int]:
        costs, attention = self.clock.costs, step.attention
        offsets = attention.query_offsets
        has_tree_B = (attention.ancestors_N[offsets[:-1]] != 0) & (offsets[1:] - offsets[:-1] > 1)
        self.clock.ms += costs.fixed + costs.row * len(step.token_N) + costs.tree * int(has_tree_B.sum())
        return super().run(step, number, *more, **options)


class _Proposer(FeatureProposer):
    def __init__(self, clock: Clock, *own: Any) -> None:
        super().__init__(*own)
        self.clock = clock

    def extend(self, request: DraftRequest):  # type: ignore[no-untyped-def]
        costs = self.clock.costs
        self.clock.ms += costs.message + costs.level + costs.fed * len(request.token_M)
        return super().extend(request)

    def expand(self, level: Frontier):  # type: ignore[no-untyped-def]
        self.clock.ms += self.clock.costs.level + self.clock.costs.node * len(level.request_F)
        return super().expand(level)


@cache
def _pair() -> Pair:
    return Pair.load(BUNDLED / "target", BUNDLED / "eagle3")


@dataclass
class Bench:
    """An engine and its clock; see `bench`."""

    here: EngineHere
    clock: Clock
    _num_submitted: int = 0

    @property
    def engine(self) -> engine.Engine:
        return self.here.engine

    def run(
        self, speculation: Speculation, batch: int, temperature: float, num_prompts: int = 12, num_tokens: int = 64
    ) -> Run:
        """Generate for the bundled prompts with `batch` concurrent requests."""
        began, self.engine._stats = self.clock.ms, EngineStats(steps=self.engine._stats.steps)
        requests: list[DraftRequest] = self.engine._drafter.channel.requests  # type: ignore[union-attr]
        requests.clear()
        waiting = list(enumerate(prompts(num_prompts)))
        tokens: dict[int, list[int]] = {}
        num_open = 0
        while waiting or num_open:
            while waiting and num_open < batch:
                number, prompt = waiting.pop(0)
                sampling = SamplingSettings(temperature=temperature, seed=number)
                submit = Submit(
                    id=self._num_submitted, prompt=prompt, max_tokens=num_tokens, sampling=sampling, ignore_eos=True,
                    speculation=speculation,
                )  # fmt: skip
                self.here.submit(submit)
                tokens[self._num_submitted] = []
                self._num_submitted += 1
                num_open += 1
            for chunk in self.here.step():
                tokens[chunk.id] += chunk.tokens
                num_open -= chunk.finish_reason is not None
        num_trees = sum(int((request.num_nodes_B > 0).sum()) for request in requests)
        return Run(list(tokens.values()), self.clock.ms - began, self.engine._stats, num_trees)


@contextmanager
def bench(costs: ClockCosts, row_costs: RowCosts | None = None) -> Iterator[Bench]:
    """Start an engine with trees of 16 nodes. row_costs: the start-up profile, if it differs from `costs`."""
    config = bundled(DYNAMIC, enable_prefix_caching=False)  # because the prompts repeat
    config = replace(
        config,
        num_pages=1 + config.max_num_seqs * (config.max_model_len // config.page_size),
    )
    clock = Clock(costs)
    time = SimpleNamespace(perf_counter=clock.seconds, monotonic=clock.seconds)
    target, proposer = partial(_Target, clock), partial(_Proposer, clock)
    with (
        mock.patch.object(engine, "time", time),
        mock.patch.object(controller, "time", time),
        mock.patch.object(drafting, "time", time),
        engine_here(config, _pair(), row_costs or costs.rows, target=target, proposer=proposer) as here,
    ):
        yield Bench(here, clock)
