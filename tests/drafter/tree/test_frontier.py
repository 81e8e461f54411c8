"""The first slots of trees in the KV pool, and the rows and slots that their nodes attend to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from drafter.tree.frontier import Frontier, PrunedNodes, TreeRoots
from drafter.tree.grow import _only_penalize
from tests.drafter.tree.test_tree_graphs import logits_state, message
from workers.settings import Constraints, PruneReason


@pytest.fixture
def roots() -> TreeRoots:
    """Three requests with 4, 7 and 5 fed tokens get 3, 1 and 2 more; the second one is only fed."""
    step = {0: (3, 8, 3), 1: (1, 0, 0), 2: (2, 1, 1)}
    request = message(step, [4, 7, 5], None, torch.Generator().manual_seed(0), "cpu")
    return TreeRoots.of(replace(request, page_table_BP=torch.tensor([[1, 4], [2, 5], [3, 6]], dtype=torch.int32)))


@pytest.fixture
def frontier() -> Frontier:
    """Rows 3 and 4 of the first tree and row 1 of the second, at depth 2."""
    own = (
        np.array([0, 0, 1]),
        np.array([3, 4, 1]),
        np.array([1, 2, 0]),
        np.array([9, 8, 7]),
        np.array([0b1011, 0b10101, 3]),
    )
    return Frontier(2, *own)


def test_a_tree_grows_behind_the_last_fed_row(roots):
    assert roots.base_G.tolist() == [6, 6]
    assert roots.page_table_GP.tolist() == [[1, 4], [3, 6]]


def test_a_node_sees_its_prefix_and_its_ancestors(roots, frontier):
    attention = roots.attention(frontier)
    assert attention.query_offsets.tolist() == [0, 2, 3] and attention.query_offsets.dtype == np.int32
    assert attention.slot_N.tolist() == [9, 10, 7] and attention.slot_N.dtype == np.int32
    assert attention.visible_N.tolist() == [6, 6, 6]
    assert attention.ancestors_N.tolist() == [0b1011, 0b10101, 3]


def test_siblings_have_the_position_of_their_depth(roots, frontier):
    assert roots.position_F(frontier).tolist() == [8, 8, 8]


@pytest.mark.parametrize(
    ("constraints", "expected"),
    [
        ([], True),
        ([Constraints(presence_penalty=1.0)], True),
        ([Constraints(presence_penalty=1.0), Constraints(logit_bias={3: 9.0})], False),
        ([Constraints(bad_words=[[4]])], False),
    ],
)
def test_tree_graphs_apply_penalties_and_nothing_else(constraints, expected):
    assert _only_penalize({b: logits_state(own) for b, own in enumerate(constraints)}) == expected


def test_children_that_were_not_drafted_have_no_token_and_a_reason_in_a_byte() -> None:
    reasons = np.array([PruneReason.COST, PruneReason.PATH_PROB])
    nodes = PrunedNodes.undrafted(np.array([0, 1]), np.array([3, 0]), reasons)
    assert nodes.token_P.tolist() == [-1, -1] and np.isnan(nodes.weight_P).all() and np.isnan(nodes.prob_P).all()
    assert nodes.reason_P.dtype == np.uint8 and nodes.reason_P.tolist() == reasons.tolist()


def test_pruned_nodes_follow_their_parents_and_leave_with_them() -> None:
    """Row 0, the root, is a parent like any other."""
    nodes = PrunedNodes.undrafted(np.array([0, 0, 0]), np.array([0, 1, 2]), np.zeros(3, dtype=int))
    assert nodes.below(np.array([0, -1, 1])).parent_row_P.tolist() == [0, 1]
