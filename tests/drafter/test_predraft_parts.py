"""Which pre-drafted trees answer a message, and what stands for those that were not pre-drafted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drafter.predraft import PreDrafter, _for_outcomes, _select
from drafter.tree.cost_model import TreeCostModel
from drafter.tree.grow import GrownTrees
from tests.support.fakes import Bench, Counting
from workers.config import TreeConfig
from workers.types import DraftCosts, NodeKind, TreeBatch, TreeTrace

TREES = TreeBatch(  # a root with two children in a row, and a root with one child
    offsets=torch.tensor([0, 3, 5], dtype=torch.int32),
    token_N=torch.tensor([7, 8, 9, 17, 18], dtype=torch.int32),
    parent_N=torch.tensor([-1, 0, 1, -1, 0], dtype=torch.int32),
    depth_N=torch.tensor([0, 1, 2, 0, 1], dtype=torch.int32),
    ancestors_N=torch.tensor([1, 3, 7, 1, 3]),
    kind_N=torch.tensor([0, 2, 2, 0, 2], dtype=torch.uint8),
    weight_N=torch.tensor([1.0, 0.5, 0.25, 1.0, 0.75]),
)
TRACE = TreeTrace(
    offsets=torch.tensor([0, 4, 4], dtype=torch.int32),
    token_T=torch.tensor([7, 8, 9, 5], dtype=torch.int32),
    parent_T=torch.tensor([-1, 0, 1, 0], dtype=torch.int32),
    depth_T=torch.tensor([0, 1, 2, 1], dtype=torch.int32),
    prob_T=torch.tensor([1.0, 0.6, 0.5, 0.1]),
    weight_T=torch.tensor([1.0, 0.5, 0.25, 0.125]),
    reason_T=torch.tensor([0, 0, 0, 3], dtype=torch.uint8),
)


def grown(trace: TreeTrace | None) -> GrownTrees:
    return GrownTrees(
        trees=TREES, probs=None, pruned_BD=np.array([[1, 2], [3, 4]], np.int32), num_levels=3, num_run=4, trace=trace
    )


def request(**more: Any) -> Any:
    """Return a message of three requests, each with two rows, the second of them its root."""
    given = {
        "offsets": torch.tensor([0, 2, 4, 6], dtype=torch.int32),
        "token_M": torch.tensor([1, 17, 2, 40, 3, 7], dtype=torch.int32),
        "start_B": torch.tensor([4, 8, 2], dtype=torch.int32),
        "num_nodes_B": torch.tensor([8, 8, 8]),
        "max_depth_B": torch.tensor([4, 4, 4]),
        "page_table_BP": torch.tensor([[5, 6, 7], [8, 9, 10], [11, 12, 13]]),
        "sampling": SimpleNamespace(seed_B=torch.tensor([21, 22, 23])),
        "traced_B": torch.tensor([0, 1, 1], dtype=torch.uint8),
    }
    return SimpleNamespace(**given | more)


def test_chosen_trees_are_joined_and_a_root_stands_for_one_that_is_missing() -> None:
    made = _select(grown(None), [1, None, 0], request())
    assert made.trees.offsets.tolist() == [0, 2, 3, 6] and made.trees.offsets.dtype == torch.int32
    assert made.trees.token_N.tolist() == [17, 18, 40, 7, 8, 9]
    assert made.trees.parent_N.tolist() == [-1, 0, -1, -1, 0, 1]
    assert made.trees.depth_N.tolist() == [0, 1, 0, 0, 1, 2]
    assert made.trees.ancestors_N.tolist() == [1, 3, 1, 1, 3, 7]
    assert made.trees.kind_N.tolist() == [0, 2, NodeKind.ROOT.value, 0, 2, 2]
    assert made.trees.weight_N.tolist() == [1.0, 0.75, 1.0, 1.0, 0.5, 0.25]
    for name in ("token_N", "parent_N", "depth_N", "ancestors_N", "kind_N", "weight_N"):
        assert getattr(made.trees, name).dtype == getattr(TREES, name).dtype
    assert made.pruned_BD.tolist() == [[3, 4], [0, 0], [1, 2]]
    assert (made.probs, made.num_levels, made.num_run, made.trace) == (None, 1, 0, None)


def test_traces_follow_their_trees_and_a_root_alone_has_one_if_it_is_asked_for() -> None:
    trace = _select(grown(TRACE), [None, None, 0], request()).trace
    assert trace is not None
    assert trace.offsets.tolist() == [0, 0, 1, 5]
    assert trace.token_T.tolist() == [40, 7, 8, 9, 5]
    assert trace.parent_T.tolist() == [-1, -1, 0, 1, 0]
    assert trace.depth_T.tolist() == [0, 0, 1, 2, 1]
    assert trace.prob_T.tolist() == pytest.approx([1.0, 1.0, 0.6, 0.5, 0.1])
    assert trace.weight_T.tolist() == [1.0, 1.0, 0.5, 0.25, 0.125]
    assert trace.reason_T.tolist() == [0, 0, 0, 0, 3]
    for name in ("token_T", "parent_T", "depth_T", "prob_T", "weight_T", "reason_T"):
        assert getattr(trace, name).dtype == getattr(TRACE, name).dtype


@pytest.mark.parametrize(("nodes", "depth", "tree"), [(8, 4, 0), (2, 4, 0), (1, 4, None), (8, 2, 0), (8, 1, None)])
def test_a_tree_answers_if_it_is_within_the_requests_limits(nodes: int, depth: int, tree: int | None) -> None:
    ahead = PreDrafter.__new__(PreDrafter)
    ahead._page_size, ahead._grown = 4, grown(None)
    own = request(num_nodes_B=torch.tensor([0, 0, nodes]), max_depth_B=torch.tensor([4, 4, depth]))
    ahead._tree_of = {ahead._outcome(own, 2, 2, (3, 7)): 0, ahead._outcome(own, 1, 8, (2, 40)): 1}
    assert ahead._predrafted(own) == [tree]
    assert ahead._predrafted(request(num_nodes_B=torch.tensor([0, 1, 0]))) == [1]
    assert ahead._predrafted(request(num_nodes_B=torch.tensor([1, 0, 0]))) == [None]


@pytest.mark.parametrize("num_each", [1.0, 3.0, 16.0])
def test_every_outcome_gets_the_tree_that_it_would_get_in_a_step_of_its_own(num_each: float) -> None:
    costs = DraftCosts(
        nodes_T=torch.tensor([0, 8], dtype=torch.int32),
        verify_ms_T=torch.tensor([10.0, 18.0]),
        draft_ms_3=torch.tensor([1.0, 0.8, 0.1]),
        base_tokens_1=torch.tensor([1.0]),
        calibration_D2=torch.tensor([[1.0, 0.0]]),
    )
    weights, none = np.array([0.7, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02], np.float32), np.zeros(0, np.float32)
    alone, together = TreeCostModel(costs), TreeCostModel(_for_outcomes(costs, num_each))
    rates = alone.throughput(weights, alone.draft_ms(3, 2), none)
    assert 1 < rates.argmax() < len(weights)
    ranked = weights.repeat(int(num_each))
    all_rates = together.throughput(ranked, together.draft_ms(3, 2 * int(num_each)), none)
    assert np.allclose(all_rates[:: int(num_each)], rates)
    assert all_rates.argmax() == rates.argmax() * num_each


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [1, 2, 8])
def test_outcomes_are_predicted_for_trees_of_any_size_and_beside_prompts_that_are_fed(num_nodes: int) -> None:
    tree = TreeConfig(num_speculative_tokens=num_nodes)
    with Bench(Counting(), "eagle3", tree, overlap="predraft", max_num_batched_tokens=12, max_num_seqs=2) as own:
        own.submit(list(range(1, 120)), 2)
        own.submit([7], 30)
        own.run()
        stats = own.engine._stats
        assert stats.num_trees > 3 and stats.num_predrafted >= stats.num_trees - 2
