"""The final cut and the packing of trees, against slow definitions over random trees."""

from __future__ import annotations

import numpy as np
import pytest

from drafter.tree.cost_model import TreeCostModel
from drafter.tree.frontier import GrowLimits, TreeNodes
from drafter.tree.pack import cut, pack_trees
from tests.support.draft_costs import FREE
from workers.config import TreeRules
from workers.settings import Rule


def trees(rng: np.random.Generator, sizes: list[int], width: int) -> TreeNodes:
    """Random trees of these sizes, breadth-first, with gaps between rows. Nodes branch from the last `width` ones."""
    nodes: list[tuple[int, int, int, int, float]] = []
    for request, size in enumerate(sizes):
        rows, depths = np.sort(rng.choice(2 * size, size, replace=False)), [0]
        rows[0], weights = 0, [1.0]
        for n in range(1, size):
            parent = int(rng.integers(max(0, n - width), n))
            depths.append(depths[parent] + 1)
            weights.append(weights[parent] * float(rng.choice([0.25, 0.5, 0.9])))
            nodes.append((request, int(rows[n]), int(rows[parent]), depths[n], weights[n]))
        nodes.insert(len(nodes) - size + 1, (request, 0, -1, 0, 1.0))
    request, row, parent_row, depth, weight = (np.array(column) for column in zip(*nodes, strict=True))
    zeros = np.zeros(len(nodes))
    return TreeNodes(request, row, parent_row, depth, 7 * row, weight.astype(np.float32), zeros.astype(np.uint8), zeros)


@pytest.mark.parametrize("seed", range(10))
def test_a_node_has_the_ancestors_that_a_walk_to_the_root_meets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 65, 5).tolist()
    nodes = trees(rng, sizes, width=int(rng.integers(1, 9)))
    packed = pack_trees(nodes, len(sizes))
    assert packed.offsets.diff().tolist() == sizes
    parents, ancestors = packed.parent_N.tolist(), packed.ancestors_N.numpy().view(np.uint64).tolist()
    rows = dict(zip(zip(nodes.request_N.tolist(), nodes.row_N.tolist(), strict=True), range(sum(sizes)), strict=True))
    for request, begin in enumerate(packed.offsets.tolist()[:-1]):
        for row in range(sizes[request]):
            own = begin + row
            old_parent = int(nodes.parent_row_N[own])
            assert parents[own] == (rows[request, old_parent] - begin if old_parent >= 0 else -1)
            mask, up = 0, row
            while up >= 0:
                mask, up = mask | 1 << up, parents[begin + up]
            assert ancestors[own] == mask


@pytest.mark.parametrize("seed", range(10))
def test_the_cut_keeps_the_best_nodes_and_the_best_of_each_request(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 20, 4).tolist()
    nodes = trees(rng, sizes, width=4)
    is_auto_B = rng.random(4) < 0.7
    limits = GrowLimits(
        num_nodes_B=np.full(4, 20), max_depth_B=np.full(4, 20), rules=TreeRules().each(lambda _: np.zeros(4)),
        rule_B=np.full(4, Rule.COUPLED.value), auto_B=is_auto_B.astype(np.int32),
    )  # fmt: skip
    costs = TreeCostModel(FREE)
    costs.best_count = lambda ranked_N, draft_ms, fixed: min(3, len(ranked_N))  # type: ignore[method-assign]
    kept = set(np.flatnonzero(cut(nodes, limits, costs, 1.0)).tolist())
    is_candidate = [bool(is_auto_B[b]) and row > 0 for b, row in zip(nodes.request_N, nodes.row_N, strict=True)]
    ranked = sorted((n for n, own in enumerate(is_candidate) if own), key=lambda n: (-nodes.weight_N[n], n))
    best = {int(nodes.request_N[n]): n for n in reversed(ranked)}
    assert kept == {n for n, own in enumerate(is_candidate) if not own} | set(ranked[:3]) | set(best.values())


def test_of_equal_nodes_the_cut_keeps_the_first() -> None:
    """Two weights by turns: an unstable sort would mix those of each."""
    num = 40
    nodes = trees(np.random.default_rng(0), [num + 1], width=1)
    nodes = nodes._replace(weight_N=np.tile(np.array([0.5, 0.25], dtype=np.float32), num)[: num + 1])
    limits = GrowLimits(
        num_nodes_B=np.full(1, num), max_depth_B=np.full(1, num), rules=TreeRules().each(lambda _: np.zeros(1)),
        rule_B=np.full(1, Rule.COUPLED.value), auto_B=np.ones(1, dtype=np.int32),
    )  # fmt: skip
    costs = TreeCostModel(FREE)
    costs.best_count = lambda ranked_N, draft_ms, fixed: 25  # type: ignore[method-assign]
    assert np.flatnonzero(cut(nodes, limits, costs, 1.0)).tolist() == [0, *range(1, 10), *range(10, 41, 2)]
