"""The bundled pair in this process on a simulated clock with given costs, to measure `auto` without noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import cycle, islice
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from drafter.drafter import Drafter
from drafter.proposers.base import FeatureProposer
from drafter.tree.frontier import Frontier
from tests.support.engine_here import EngineHere, Pair, engine_here
from tests.support.engines import BUNDLED, DYNAMIC, bundled, prompts
from verifier import drafting, engine
from verifier.adaptive import controller, profile
from verifier.adaptive.cost_model import RowCosts
from verifier.adaptive.prompt_lookup import LookupResult, PromptLookup
from verifier.request import Request
from verifier.target import Target
from workers.comm.ipc import EngineStats, Speculation, Submit
from workers.cuda_graphs import Size
from workers.settings import SamplingSettings
from workers.types import DraftReply, DraftRequest, TargetStep

OFF, FIXED, AUTO = Speculation(enabled=False), Speculation(auto=False), Speculation(auto=True)


@dataclass(frozen=True, kw_only=True)
class ClockCosts:
    """Simulated costs in milliseconds.

    A step of the target takes fixed + row x rows. The drafter takes message + fed x input rows + level x levels +
    node x nodes. In addition, each request with a tree takes `tree`, which is not part of the start-up profile.

    buckets: milliseconds of a forward by its rows, in place of fixed + row x rows, for a GPU that runs steps and trees
    in CUDA graphs. Then rows and trees are padded, and a level runs all rows that its trees may have. step, request:
    what every step and each of its requests takes beside the forward. drafts: what a step with drafts takes. drafted:
    what each of the drafter's trees takes. look: of a prompt lookup, for each request.
    """

    fixed: float = 0.0
    row: float = 0.0
    message: float
    fed: float
    level: float
    node: float
    tree: float = 0.0
    buckets: tuple[tuple[int, float], ...] = ()
    step: float = 0.0
    request: float = 0.0
    drafts: float = 0.0
    drafted: float = 0.0
    look: float = 0.0

    @property
    def rows(self) -> RowCosts:
        """The start-up profile of the target."""
        if self.buckets:
            rows_T, ms_T = np.array(self.buckets, dtype=np.float64).T
            return RowCosts(rows_T, ms_T).in_buckets(int(rows_T[-1]))
        rows_T = np.array([1.0, 512.0])
        return RowCosts(rows_T, self.fixed + self.row * rows_T)


H200 = ClockCosts(
    buckets=(
        (1, 5.0), (8, 5.06), (16, 5.75), (64, 5.85), (128, 6.6), (192, 8.3), (256, 9.8), (384, 12.3), (512, 14.7),
        (768, 19.0), (1024, 25.0), (1280, 31.0),
    ),
    message=4.4, fed=0.004, level=0.25, node=0.0009, drafted=0.13, tree=0.03, step=0.35, request=0.006, drafts=0.5,
    look=0.02,
)  # fmt: skip
"""A target of 8 B parameters with an EAGLE-3 head on one H200, as measured on 2026-11-28."""


@dataclass(frozen=True)
class Run:
    """The result of a run. request_ms: from each request's first token to its last."""

    tokens: list[list[int]]
    milliseconds: float
    request_ms: list[float]
    stats: EngineStats
    num_trees: int  # trees requested from the drafter

    @property
    def rate(self) -> float:
        return sum(map(len, self.tokens)) / self.milliseconds

    @property
    def tpot_ms(self) -> float:
        """Milliseconds per token after the first, mean over the requests."""
        return float(np.mean([ms / (len(own) - 1) for ms, own in zip(self.request_ms, self.tokens, strict=True)]))

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
        self.clock.ms += float(costs.rows.ms(len(step.token_N))) + costs.tree * int(has_tree_B.sum())
        self.clock.ms += costs.step + costs.request * len(has_tree_B) + costs.drafts * bool(has_tree_B.any())
        return super().run(step, number, *more, **options)


class _Proposer(FeatureProposer):
    def __init__(self, clock: Clock, *own: Any) -> None:
        super().__init__(*own)
        self.clock = clock

    def extend(self, request: DraftRequest):  # type: ignore[no-untyped-def]
        costs = self.clock.costs
        self._whole, num_trees = 0, int((request.num_nodes_B > 0).sum())
        if costs.buckets and num_trees:
            self._whole = Size.of(1, num_trees).requests * int(request.num_nodes_B.max())
        self.clock.ms += costs.message + costs.level + costs.fed * len(request.token_M)
        self.clock.ms += costs.node * self._whole + costs.drafted * num_trees
        return super().extend(request)

    def expand(self, level: Frontier):  # type: ignore[no-untyped-def]
        self.clock.ms += self.clock.costs.level + self.clock.costs.node * (self._whole or len(level.request_F))
        return super().expand(level)


class _PromptLookup(PromptLookup):
    def __init__(self, clock: Clock, *own: Any) -> None:
        super().__init__(*own)
        self.clock = clock

    def look(self, requests: Sequence[Request], *more: Any) -> LookupResult:
        self.clock.ms += self.clock.costs.look * len(requests)
        return super().look(requests, *more)


class _Drafter(Drafter):
    """Reports the rows of whole levels where graphs run them, as `drafter.tree.tree_graphs` does."""

    def draft(self, message: DraftRequest) -> DraftReply:
        reply = super().draft(message)
        if not (self.proposer.clock.costs.buckets and message.is_answered):  # type: ignore[attr-defined]
            return reply
        rows = int((message.num_nodes_B > 0).sum()) * int(message.num_nodes_B.max())
        return replace(reply, num_run=(reply.num_levels - 1) * rows)


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
        waiting = list(enumerate(islice(cycle(prompts()), num_prompts)))
        tokens: dict[int, list[int]] = {}
        first_ms: dict[int, float] = {}
        last_ms: dict[int, float] = {}
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
                last_ms[chunk.id] = self.clock.ms
                first_ms.setdefault(chunk.id, self.clock.ms)
                num_open -= chunk.finish_reason is not None
        num_trees = sum(int((request.num_nodes_B > 0).sum()) for request in requests)
        request_ms = [last_ms[id] - first_ms[id] for id in tokens]
        return Run(list(tokens.values()), self.clock.ms - began, request_ms, self.engine._stats, num_trees)


@contextmanager
def bench(costs: ClockCosts, row_costs: RowCosts | None = None, max_num_seqs: int = 16) -> Iterator[Bench]:
    """Start an engine with trees of 16 nodes. row_costs: the start-up profile, if it differs from `costs`."""
    config = bundled(DYNAMIC, enable_prefix_caching=False, max_num_seqs=max_num_seqs)  # because the prompts repeat
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
        mock.patch.object(profile, "time", time),
        mock.patch.object(controller, "PromptLookup", partial(_PromptLookup, clock)),
        engine_here(
            config, _pair(), row_costs or costs.rows, target=target, proposer=proposer, drafter=_Drafter
        ) as here,
    ):
        yield Bench(here, clock)
