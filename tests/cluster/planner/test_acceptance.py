"""Acceptance by nodes equals that of the best of all trees."""

from __future__ import annotations

import random

import numpy as np
import pytest

from bench.sequoia import best_tree, expected_accepted
from cluster.planner.acceptance import acceptance_curve, best_lengths
from drafter.tree.policy import TYPICAL_CHILDREN
from tests.support.engines import STATIC_PATHS
from workers.config import DraftConfig, TreeConfig


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


def test_without_chances_a_curve_is_that_of_the_drafters_prior() -> None:
    assert np.array_equal(acceptance_curve(drafter()), best_lengths([TYPICAL_CHILDREN] * 8))
    assert np.all(np.diff(np.diff(acceptance_curve(drafter()))) <= 1e-12)


def test_a_chains_length_is_a_sum_of_powers() -> None:
    found = acceptance_curve(drafter("chain", num_speculative_tokens=3), (0.8, 0.1))
    assert found[:5].tolist() == pytest.approx([0, 0.8, 0.8 + 0.64, 0.8 + 0.64 + 0.512, 0.8 + 0.64 + 0.512])


def test_a_dynamic_tree_keeps_to_its_depth_and_children() -> None:
    assert acceptance_curve(drafter(max_depth=1), (0.8, 0.1))[63] == pytest.approx(0.9)
    assert acceptance_curve(drafter(max_depth=2, max_children=1), (0.8, 0.1))[63] == pytest.approx(0.8 + 0.64)


def test_a_static_tree_is_cut_in_breadth_first_order() -> None:
    chances = (0.6, 0.2, 0.1)
    found = acceptance_curve(drafter("static", num_speculative_tokens=9, static_paths=STATIC_PATHS), chances)
    for count in range(10):
        assert found[count] == pytest.approx(expected_accepted(STATIC_PATHS[:count], (chances,) * 4))
    assert found[63] == found[9]
