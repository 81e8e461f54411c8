"""From an engine's steps to a cost table: the fit, and the whole profile on a clock without noise.

On that clock (see `clockwork`) a real engine on the bundled pair is profiled; what is then predicted of configurations
that the profile lacks is held against the same engine's own run of them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import nnls

from cluster.bench.runner import GenerationJob, StatsSnapshot
from cluster.planner.acceptance import acceptance_curve
from cluster.planner.cost_model import PlannerCostModel
from cluster.planner.fit import _verify, fit, nonnegative_least_squares
from cluster.planner.fleet import SPREAD, Load, ReplicaSpec, simulate
from cluster.planner.profile import (
    AcceptedCounts,
    PrefillSample,
    Profile,
    ProfileCell,
    ProfileGrid,
    Profiler,
    StepSample,
    UniquePrompts,
    accepted,
    decoding_steps,
    profiled,
    watch,
)
from secateur.errors import SecateurError
from secateur.plan import CostTable, DraftCostTable, VerifyCostTable
from tests.support import clockwork
from tests.support.engines import DYNAMIC, bundled, prompts
from workers.comm.ipc import EngineStats, Submit

CONFIG = bundled(DYNAMIC)

# -- the fit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_least_squares_without_negative_prices_are_scipy_s(seed: int) -> None:
    rng = np.random.default_rng(seed)
    terms, values = rng.random((12, 4)), rng.normal(size=12)
    np.testing.assert_allclose(nonnegative_least_squares(terms, values), nnls(terms, values)[0], atol=1e-6)


def truth() -> CostTable:
    ms = ((3.0, 6.0, 9.0), (4.0, 8.0, 14.0), (5.0, 11.0, 20.0))
    return CostTable(
        verify=VerifyCostTable(
            rows=(1, 8, 32, 512),
            ms=(10, 10.7, 15, 110),
            request_ms=0.2,
            kv_token_ms=2e-3,
            row_kv_token_ms=2e-4,
            tree_ms=3.0,
            tree_request_ms=0.5,
        ),
        draft=DraftCostTable(
            requests=(1, 4, 8),
            nodes=(1, 4, 16),
            ms=ms,
            transfer_ms=((1.0,) * 3,) * 3,
            kv_token_ms=(1e-4, 3e-4, 1e-3),
            prompt_token_ms=0.02,
            host_ms=0.5,
        ),
        host_ms=0.4,
        host_request_ms=0.05,
    )


def samples_of(costs: PlannerCostModel) -> Profile:
    """Return the samples of a profile without noise."""
    samples = []
    for requests, nodes, context in [(r, n, c) for r in (1, 4, 8) for n in (0, 1, 4, 16) for c in (100, 400)]:
        step = costs.decode(requests, nodes, context)
        samples.append(
            StepSample(
                requests=requests,
                nodes=nodes,
                context=context,
                rows=requests * (1 + nodes),
                kv=requests * context,
                wall_ms=step.ms,
                verify_ms=step.verify_ms,
                draft_ms=step.draft_ms,
                transfer_ms=step.transfer_ms,
            )
        )
    alone = [
        PrefillSample(rows, costs.verify_ms(rows=rows, requests=1, kv=rows, pairs=rows**2 / 2), feed_ms=0.02 * rows)
        for rows in (60, 380)
    ]
    trees = [
        AcceptedCounts(n, c, 1000, 1000 * n // 10 + 500 - c) for n in (1, 4, 16) for c in (100, 400) for _ in range(2)
    ]
    return Profile(samples_C=tuple(samples), prompts=tuple(alone), accepted=(*trees, AcceptedCounts(0, 100, 0, 0)))


def test_fitting_recovers_the_table_behind_the_steps() -> None:
    costs = PlannerCostModel(truth())
    table = fit(samples_of(costs), CONFIG, "here", temperature=0.0)
    assert (table.source, table.hardware) == ("measured", "here")
    assert table.fit_error is not None and table.fit_error < 0.01
    found = PlannerCostModel(table)
    for batch, nodes, context in ((2, 0, 150), (6, 10, 300), (3, 2, 50), (8, 16, 800)):
        assert found.decode(batch, nodes, context).ms == pytest.approx(costs.decode(batch, nodes, context).ms, rel=0.05)
    assert table.draft is not None and table.draft.prompt_token_ms == pytest.approx(0.02)
    assert table.draft.host_ms == pytest.approx(0.5) and table.host_request_ms == pytest.approx(0.05)
    assert table.acceptance is not None and CONFIG.draft is not None
    assert acceptance_curve(table.acceptance, CONFIG.draft, 0.0, 250)[4] == pytest.approx(0.4 + 0.25)


def test_steps_with_and_without_trees_are_fitted_separately() -> None:
    """With a price for rows alone, plain steps would come out 14 % too expensive."""
    costs = PlannerCostModel(truth())
    table = fit(samples_of(costs), CONFIG, "here", temperature=0.0)
    assert table.verify.tree_ms == pytest.approx(3.0, rel=0.1)
    assert table.verify.tree_request_ms == pytest.approx(0.5, rel=0.1)
    found = PlannerCostModel(table)
    for batch, nodes, context in ((2, 0, 150), (6, 0, 250), (8, 0, 300), (3, 2, 50), (6, 10, 300), (2, 6, 250)):
        known = costs.decode(batch, nodes, context)
        assert found.decode(batch, nodes, context).verify_ms == pytest.approx(known.verify_ms, rel=0.03)


def test_a_single_request_cannot_separate_the_cost_per_request() -> None:
    exact = samples_of(PlannerCostModel(truth()))
    alone = tuple(s for s in exact.samples_C if s.requests == 1)
    table = fit(replace(exact, samples_C=alone), CONFIG, "here", 0.0)
    assert (table.verify.request_ms, table.verify.tree_request_ms) == (0.0, 0.0)
    assert table.fit_error is not None and table.fit_error < 0.01


def test_noise_changes_a_table_little_and_keeps_it_monotonic() -> None:
    rng = random.Random(1)
    exact = samples_of(PlannerCostModel(truth()))
    errors = [rng.uniform(0.85, 1.15) for _ in exact.samples_C]
    noisy = tuple(
        replace(s, verify_ms=s.verify_ms * e, draft_ms=s.draft_ms * e, wall_ms=s.wall_ms * e)
        for s, e in zip(exact.samples_C, errors, strict=True)
    )
    table = fit(replace(exact, samples_C=noisy), CONFIG, "here", 0.0)
    assert table.verify.ms == tuple(sorted(table.verify.ms)) and table.draft is not None
    for grid in (table.draft.ms, table.draft.transfer_ms):
        assert (np.diff(grid, axis=0) >= 0).all() and (np.diff(grid, axis=1) >= 0).all()
    known, found = PlannerCostModel(truth()), PlannerCostModel(table)
    ratios = [found.decode(b, n, 200).ms / known.decode(b, n, 200).ms for b in (2, 6) for n in (0, 3, 10)]
    assert max(ratios) < 1.15 and min(ratios) > 0.87


# -- what is read from an engine -------------------------------------------------------------------------------------


def snapshots(*steps: dict[str, float]) -> list[StatsSnapshot]:
    """Return snapshots from increments of the statistics; `running` is a gauge."""
    found, stats = [StatsSnapshot(0.0, EngineStats())], EngineStats()
    for step in steps:
        stats = copy.deepcopy(stats)
        stats.steps += int(step.get("steps", 1))
        stats.num_running = int(step["running"])
        stats.prompt_tokens += int(step.get("prompt", 0))
        stats.generation_tokens += int(step.get("tokens", 0))
        stats.verify_seconds += step.get("verify", 0.004)
        if "nodes" in step:
            stats.num_drafts += int(step["nodes"]) // 3 if step["nodes"] != 5 else 2
            stats.count_nodes([], [int(step["nodes"])], int(step.get("accepted", 0)))
        found.append(StatsSnapshot(found[-1].at + 0.005, stats))
    return found


def test_only_steps_in_which_the_whole_batch_decodes_count() -> None:
    cell = ProfileCell(requests=2, nodes=3, context=58)
    assert cell.prompt == 10
    seen = snapshots(
        {"running": 2, "prompt": 10, "tokens": 1},
        {"running": 2, "prompt": 10, "tokens": 2},  # the second prompt, beside a tree
        {"running": 2, "tokens": 4, "nodes": 6},  # warms up
        {"running": 2, "tokens": 5, "nodes": 6, "accepted": 3},
        {"running": 2, "tokens": 9, "steps": 2, "nodes": 12},  # two snapshots at once
        {"running": 2, "tokens": 4, "nodes": 5, "accepted": 2},
        {"running": 1, "tokens": 3, "nodes": 6},  # one finishes
        {"running": 1, "tokens": 1, "nodes": 3},
    )
    first, second = decoding_steps(seen, cell)
    assert (first.rows, first.kv) == (8, 20 + 1 + 2 + 4)
    assert (second.rows, second.kv) == (7, 20 + 1 + 2 + 4 + 5 + 9)
    assert accepted(seen, cell) == AcceptedCounts(3, 58, 13, 5)
    assert first.wall_ms == pytest.approx(5) and first.verify_ms == pytest.approx(4)
    assert first.host_ms == pytest.approx(1) and first.pairs == 27 * 4


def test_profile_prompts_have_their_length_and_share_no_prefix() -> None:
    texts = prompts(10)
    made = UniquePrompts(texts)
    taken = [made.take(length) for length in (40, 40, 700, 700) for _ in range(5)]
    assert [len(prompt) for prompt in taken] == [40] * 10 + [700] * 10
    assert len({tuple(prompt[:16]) for prompt in taken}) == len(taken)
    assert [prompt[-8:] for prompt in taken[:10]] == [text[-8:] for text in texts]


def test_the_profiled_grid_fits_the_engine() -> None:
    grid = ProfileGrid.of(profiled(CONFIG, 8))
    assert grid == ProfileGrid(requests=(1, 4, 8), nodes=(0, 1, 4, 8, 16), contexts=(128, 416))
    assert len(grid.cells) == 30
    assert ProfileGrid.of(profiled(bundled(None), 1)) == ProfileGrid(requests=(1,), nodes=(0,), contexts=(128, 416))


def test_a_profile_without_steps_is_an_error() -> None:
    class Silent:
        snapshots = snapshots({"running": 1, "prompt": 1})

        def run(self, *_: object) -> None: ...

    profiler = Profiler(
        Silent(), ProfileGrid(requests=(1,), nodes=(0,), contexts=(64,)), UniquePrompts(prompts(2)), 0.0
    )  # type: ignore[arg-type]
    profiler.round()
    with pytest.raises(SecateurError, match="no undisturbed step"):
        _ = profiler.profile


# -- a real engine on a clock ----------------------------------------------------------------------------------------

PRICES = clockwork.ClockCosts(fixed=12.0, row=0.25, message=1.0, fed=0.02, level=0.8, node=0.04, tree=1.0)


class ClockRunner:
    """A `Runner` with an engine in this process and a simulated clock."""

    def __init__(self, bench: clockwork.Bench) -> None:
        self._bench = bench
        self._next_id = 0
        self.snapshots: list[StatsSnapshot] = []

    def run(self, jobs: Sequence[GenerationJob], concurrency: int) -> None:
        waiting, num_open = list(jobs), 0
        self.snapshots = [self._frame()]
        while waiting or num_open:
            while waiting and num_open < concurrency:
                job = waiting.pop(0)
                submit = Submit(
                    id=self._next_id, prompt=job.prompt, max_tokens=job.max_tokens, ignore_eos=job.ignore_eos,
                    sampling=job.sampling, speculation=job.speculation,
                )  # fmt: skip
                self._bench.here.submit(submit)
                self._next_id += 1
                num_open += 1
            num_open -= sum(chunk.finish_reason is not None for chunk in self._bench.here.step())
            self.snapshots.append(self._frame())

    def _frame(self) -> StatsSnapshot:
        stats = copy.deepcopy(self._bench.engine._stats)
        # The drafter's own seconds are this process's: on the clock they are part of the exchange.
        stats.draft_seconds, stats.transfer_seconds = stats.draft_seconds + stats.transfer_seconds, 0.0
        return StatsSnapshot(self._bench.clock.seconds(), stats)


@pytest.mark.slow
def test_predictions_for_unprofiled_settings_match_the_engine() -> None:
    config = CONFIG
    assert config.draft is not None
    grid = ProfileGrid(requests=(1, 4), nodes=(0, 4, 16), contexts=(80, 140))
    texts = prompts(50)
    unseen = [ProfileCell(3, 10, 110), ProfileCell(2, 6, 100), ProfileCell(3, 0, 120)]
    with clockwork.bench(PRICES) as bench:
        runner: Any = ClockRunner(bench)
        profiler = Profiler(runner, grid, UniquePrompts(texts[::2]), temperature=0.0)
        profiler.round()
        table = fit(profiler.profile, config, "the clock", 0.0)
        measured = []
        new = UniquePrompts(texts[1::2])
        for cell in unseen:
            asked = [new.take(cell.prompt) for _ in range(2 * cell.requests)]
            run = watch(runner, asked, cell.nodes, cell.output, concurrency=cell.requests)
            measured.append(len(asked) * cell.output / (run[-1].at - run[0].at))
    assert table.fit_error is not None and table.fit_error < 0.02
    assert table.acceptance is not None
    for cell, rate in zip(unseen, measured, strict=True):
        count = 2 * cell.requests
        replica = ReplicaSpec(
            costs=PlannerCostModel(table),
            accepted=acceptance_curve(table.acceptance, config.draft, 0.0, cell.context),
            nodes_by_batch=[0, *[cell.nodes] * cell.requests],
            max_num_batched_tokens=config.max_num_batched_tokens,
            spread=SPREAD,
        )
        load = Load(np.zeros(count), np.full(count, cell.prompt), np.full(count, cell.output))
        predicted = np.mean([simulate(load, replica, seed=seed).tokens_per_second for seed in range(20)])
        # Without trees there is no luck; other texts have other tokens accepted.
        assert predicted == pytest.approx(rate, rel=0.12 if cell.nodes else 1e-3), cell


def test_with_one_context_cached_tokens_cost_nothing() -> None:
    """So small a profile cannot separate the cost of the cache from that of rows; rows must not become free."""
    plain = StepSample(
        requests=1, nodes=0, context=100, rows=1, kv=130, wall_ms=4, verify_ms=3.0, draft_ms=0, transfer_ms=0
    )
    tree = replace(plain, nodes=1, rows=2, kv=100, verify_ms=2.2)
    costs = _verify(Profile(samples_C=(plain, tree), prompts=(), accepted=()))
    assert costs.ms[0] > 2 and costs.kv_token_ms == costs.row_kv_token_ms == 0
