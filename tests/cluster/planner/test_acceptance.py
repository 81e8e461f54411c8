"""Acceptance by nodes equals that of the best of all trees, and node budgets equal an exhaustive search."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest

from cluster.bench.sequoia import best_tree, expected_accepted
from cluster.planner.acceptance import TYPICAL, acceptance_curve, best_lengths
from cluster.planner.cost_model import PlannerCostModel
from cluster.planner.predict import Predictor, best, schedule
from secateur.errors import ConfigError
from secateur.plan import AcceptancePoint, AcceptanceTable, CostTable, DraftCostTable, VerifyCostTable, read_acceptance
from tests.support.engines import STATIC_PATHS
from workers.config import AcceptanceConfig, DraftConfig, TreeConfig

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "2026-11-21-acceptance.json"


def drafter(kind: str = "dynamic", **tree: object) -> DraftConfig:
    return DraftConfig(method="eagle3", model_path="head", tree=TreeConfig(kind=kind, **tree))  # type: ignore[arg-type]


def random_table(rng: random.Random, depth: int, width: int) -> list[list[float]]:
    return [[rng.random() * (0.8 if rank == 0 else 0.3) for rank in range(width)] for _ in range(depth)]


def every_tree(num_nodes: int, depth: int, width: int) -> set[frozenset[tuple[int, ...]]]:
    """Return all trees with this number of nodes; a child needs its elder siblings."""
    trees: set[frozenset[tuple[int, ...]]] = {frozenset()}
    for _ in range(num_nodes):
        trees = {
            tree | {(*parent, rank)}
            for tree in trees
            for parent in [(), *tree]
            if len(parent) < depth
            and (rank := sum(len(path) == len(parent) + 1 and path[:-1] == parent for path in tree)) < width
        }
    return trees


# -- accepted length -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_no_tree_is_expected_to_have_more_accepted(seed: int) -> None:
    table = random_table(random.Random(seed), depth=3, width=3)
    lengths = best_lengths(table)
    for num_nodes in range(1, 7):
        trees = every_tree(num_nodes, 3, 3)
        assert lengths[num_nodes] == pytest.approx(max(expected_accepted(tuple(t), table) for t in trees), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_lengths_of_large_trees_are_those_of_sequoia(seed: int) -> None:
    table = random_table(random.Random(seed), depth=5, width=4)
    lengths = best_lengths(table)
    for num_nodes in (12, 33):
        assert lengths[num_nodes] == pytest.approx(expected_accepted(best_tree(num_nodes, table), table))


def test_lengths_grow_ever_more_slowly_up_to_the_largest_tree() -> None:
    lengths = best_lengths([[0.7, 0.2], [0.6, 0.1]])
    assert np.all(np.diff(lengths) >= 0)
    assert lengths[6] == lengths[63] == pytest.approx(0.9 + 0.9 * 0.7)  # all six nodes there can be
    falling = np.diff(best_lengths(TYPICAL.probabilities))
    assert np.all(np.diff(falling) <= 1e-12)


def test_a_chains_length_is_a_sum_of_products() -> None:
    table = AcceptanceTable(probabilities=((0.8, 0.1), (0.5, 0.2), (0.5, 0.2)))
    assert acceptance_curve(table, drafter("chain", num_speculative_tokens=3), 0.0, 0)[:5].tolist() == pytest.approx(
        [0, 0.8, 1.2, 1.4, 1.4]
    )


def test_a_dynamic_tree_keeps_to_its_depth_and_children() -> None:
    table = AcceptanceTable(probabilities=((0.8, 0.1), (0.5, 0.2)))
    assert acceptance_curve(table, drafter(max_depth=1), 0.0, 0)[63] == pytest.approx(0.9)
    assert acceptance_curve(table, drafter(max_children=1), 0.0, 0)[63] == pytest.approx(0.8 + 0.4)


def test_a_static_tree_is_cut_in_breadth_first_order() -> None:
    table = AcceptanceTable(probabilities=((0.6, 0.2, 0.1),) * 4)
    found = acceptance_curve(table, drafter("static", num_speculative_tokens=9, static_paths=STATIC_PATHS), 0.0, 0)
    for count in range(10):
        assert found[count] == pytest.approx(expected_accepted(STATIC_PATHS[:count], table.probabilities))
    assert found[63] == found[9]


def test_lengths_between_measured_sizes_are_interpolated_in_the_logarithm() -> None:
    points = tuple(AcceptancePoint(nodes=n, accepted=a) for n, a in ((3, 1.0), (15, 2.0)))
    found = acceptance_curve(AcceptanceTable(points=points), drafter(), 0.7, 100)
    assert found[[0, 1, 3, 7, 15, 63]].tolist() == pytest.approx([0, 0.5, 1.0, 1.5, 2.0, 2.0])


def test_lengths_are_interpolated_linearly_in_temperature_and_context() -> None:
    points = tuple(
        AcceptancePoint(nodes=8, accepted=a, temperature=t, context=c)
        for t, c, a in ((0.0, 100, 4.0), (0.0, 300, 3.0), (1.0, 100, 2.0), (1.0, 300, 1.0))
    )
    table = AcceptanceTable(points=points)
    seen = [
        acceptance_curve(table, drafter(), t, c)[8] for t, c in ((0, 200), (0.5, 100), (0.5, 200), (2.0, 900), (0, 1))
    ]
    assert seen == pytest.approx([3.5, 3.0, 2.5, 1.0, 4.0])


def test_points_of_another_tree_or_rule_do_not_count() -> None:
    table = AcceptanceTable(points=(AcceptancePoint(nodes=8, accepted=3, tree="chain", acceptance="rejection"),))
    with pytest.raises(
        ConfigError, match="no entry for dynamic trees under coupled, only for chain trees under rejection"
    ):
        acceptance_curve(table, drafter(), 0.0, 0)


def test_the_rows_of_the_benchmark_are_read() -> None:
    table = read_acceptance(RESULTS)
    assert acceptance_curve(table, drafter(), 0.0, 0)[16] == pytest.approx(3.54, abs=0.01)  # 4.54 in the report
    sampled = DraftConfig(method="eagle3", model_path="head", acceptance=AcceptanceConfig(kind="rejection"))
    assert acceptance_curve(table, sampled, 1.0, 0)[16] == pytest.approx(3.04, abs=0.01)
    without = AcceptanceConfig(kind="rejection", draft_probs=False)
    greedy = DraftConfig(method="eagle3", model_path="head", acceptance=without)
    assert acceptance_curve(table, greedy, 1.0, 0)[16] == pytest.approx(1.35, abs=0.01)


# -- node budgets ----------------------------------------------------------------------------------------------------


def random_costs(rng: random.Random) -> PlannerCostModel:
    ms = tuple(sorted(20 * rng.random() for _ in range(4)))
    lines = ((1.0, 2.0, 4.0), (1.5, 3.0, 9.0))
    return PlannerCostModel(
        CostTable(
            verify=VerifyCostTable(rows=(1, 16, 64, 256), ms=(ms[0] + 1, ms[1] + 1, ms[2] + 1, 4 * ms[3] + 1)),
            draft=DraftCostTable(requests=(1, 8), nodes=(1, 8, 24), ms=lines, transfer_ms=lines),
            host_ms=rng.random(),
        )
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_chosen_budget_is_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    predict = Predictor(random_costs(rng), best_lengths(random_table(rng, 6, 4)))
    chosen = schedule(predict, 12, 100, range(25))
    assert chosen[0] == 0
    for batch in range(1, 13):
        rates = [batch * (1 + predict.accepted[n]) / predict.costs.decode(batch, n, 100).ms for n in range(25)]
        assert chosen[batch] == int(np.argmax(rates))  # the first of equals
        assert best(predict, batch, 100, range(25)).tokens_per_second == pytest.approx(1e3 * max(rates))


def test_free_rows_are_used_and_expensive_ones_are_not() -> None:
    def costs(row_ms: float) -> PlannerCostModel:
        verify = VerifyCostTable(rows=(1, 2), ms=(10.0, 10.0 + row_ms))
        grid = ((0.0, 0.0),)
        draft = DraftCostTable(requests=(1,), nodes=(1, 63), ms=grid, transfer_ms=grid)
        return PlannerCostModel(CostTable(verify=verify, draft=draft))

    lengths = best_lengths([[0.6, 0.2]] * 6)
    assert best(Predictor(costs(0.0), lengths), 4, 0, range(64)).nodes == 63
    assert best(Predictor(costs(20.0), lengths), 4, 0, range(64)).nodes == 0
    middle = [best(Predictor(costs(0.2), lengths), batch, 0, range(64)).nodes for batch in (1, 4, 16, 64)]
    assert middle == sorted(middle, reverse=True) and middle[0] > middle[-1]  # the fuller, the smaller the trees


def test_throughput_is_counted_per_request_and_device() -> None:
    verify = VerifyCostTable(rows=(1, 2), ms=(10.0, 10.0))
    grid = ((5.0,),)
    draft = DraftCostTable(requests=(1,), nodes=(4,), ms=grid, transfer_ms=grid)
    found = Predictor(PlannerCostModel(CostTable(verify=verify, draft=draft)), np.full(64, 3.0), num_devices=2)(8, 4, 0)
    assert found.step.ms == 20 and found.tokens_per_step == 4
    assert math.isclose(found.tokens_per_second, 8 * 4 / 0.02)
    assert (found.per_request, found.per_device) == (200, 800)
