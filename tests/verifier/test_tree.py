"""Trees and prompt chunks as one packed forward: positions by depth, slots by row."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import torch

from tests.support import oracles
from verifier.draft_batch import DraftBatch
from verifier.tree import PromptChunk, bare_roots, chains, chunk_metadata, select, tree_metadata, with_chains
from workers.types import DraftProbs, DraftReply, NodeKind, TreeBatch

torch.set_num_threads(1)

TWO_BY_TWO = ([-1, 0, 0, 1, 1, 2, 2], [50, 7, 9, 5, 6, 8, 4])
CHAIN = oracles.chain([3, 4], root=1)
BARE = ([-1], [8])


def same(a: TreeBatch, b: TreeBatch) -> bool:
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in TreeBatch.__slots__)


def test_positions_follow_depth_and_slots_follow_rows():
    meta = tree_metadata(oracles.trees([TWO_BY_TWO, BARE, CHAIN]), np.array([10, 0, 30], dtype=np.int32))
    assert meta.position_N.tolist() == [10, 11, 11, 12, 12, 12, 12, 0, 30, 31, 32]
    assert meta.slot_N.tolist() == [10, 11, 12, 13, 14, 15, 16, 0, 30, 31, 32]
    assert meta.visible_N.tolist() == [10] * 7 + [0] + [30] * 3
    assert meta.ancestors_N.tolist() == [1, 3, 5, 11, 19, 37, 69, 1, 1, 3, 7]
    assert {t.dtype for t in meta[:3]} == {np.dtype(np.int32)} and meta.ancestors_N.dtype == np.int64


def test_a_prompt_row_sees_itself_and_all_before_it():
    meta = chunk_metadata([PromptChunk(0, 3), PromptChunk(7, 9)])
    assert meta.position_N.tolist() == meta.slot_N.tolist() == [0, 1, 2, 7, 8]
    assert meta.visible_N.tolist() == [1, 2, 3, 8, 9]
    assert meta.ancestors_N.tolist() == [0] * 5


def test_bare_roots_see_alone_what_they_see_beside_trees():
    base = np.array([10, 0, 30], dtype=np.int32)
    beside = tree_metadata(oracles.trees([BARE, BARE, BARE, CHAIN]), np.append(base, np.int32(5)))
    alone = tree_metadata(oracles.trees([BARE, BARE, BARE]), base)
    for position, slot, visible, ancestors in zip(*(field[:3] for field in beside), strict=True):
        seen = {*range(visible), *(slot + bit for bit in range(64) if ancestors >> bit & 1)}
        i = base.tolist().index(slot)
        assert (alone.position_N[i], alone.slot_N[i]) == (position, slot)
        assert set(range(alone.visible_N[i])) == seen and not alone.ancestors_N[i]


def test_an_empty_batch_has_empty_metadata():
    for meta in (chunk_metadata([]), tree_metadata(oracles.trees([]), np.zeros(0, dtype=np.int32))):
        assert [len(t) for t in meta] == [0, 0, 0, 0]
        assert {t.dtype for t in meta[:3]} == {np.dtype(np.int32)} and meta.ancestors_N.dtype == np.int64


def completed(trees: TreeBatch, drafted: list[bool], tokens: list[list[int]]) -> TreeBatch:
    merged, probs = with_chains(trees, None, drafted, tokens)
    assert probs is None
    return merged


def test_requests_without_a_tree_get_their_chain_or_bare_root_in_place():
    drafted, tokens = [False, True, False, True, False], [[8], [50], [9, 5, 6], [1], [7, 2]]
    merged = completed(oracles.trees([TWO_BY_TWO, CHAIN]), drafted, tokens)
    others = [oracles.chain(own[1:], root=own[0]) for own in tokens]
    expected = oracles.trees([others[0], TWO_BY_TWO, others[2], CHAIN, others[4]])
    expected.kind_N[[9, 10, 15]] = NodeKind.DETERMINISTIC.value
    assert same(merged, expected)


def entries(probs: DraftProbs) -> list[list[tuple[int, int]]]:
    """Return (id, weight) of each row."""
    pairs = list(zip(probs.id_S.tolist(), probs.weight_S.tolist(), strict=True))
    return [pairs[a:b] for a, b in pairwise(probs.offsets.tolist())]


def test_draft_probabilities_stay_with_their_rows():
    drafted = oracles.trees([TWO_BY_TWO, CHAIN])
    num_rows = len(drafted.token_N)
    sizes = [row % 3 for row in range(num_rows)]
    num_entries = sum(sizes)
    probs = DraftProbs(
        offsets=torch.tensor([0, *accumulate(sizes)], dtype=torch.int32),
        id_S=torch.arange(num_entries, dtype=torch.int32),
        weight_S=torch.arange(num_entries, dtype=torch.int32) + 1,
    )
    own, chain, split = entries(probs), [[], [], []], len(TWO_BY_TWO[0])
    merged, moved = with_chains(drafted, probs, [False, True, False, True, False], [[8], [1], [9, 5, 6], [1], [7]])
    assert moved is not None
    assert entries(moved) == [[], *own[:split], *chain, *own[split:], []]
    for requests, expected in (([1, 3], own), ([3], own[split:]), ([2, 3, 4], [*chain, *own[split:], []])):
        trees, some, rows = select(merged, moved, requests)
        assert some is not None and entries(some) == expected
        assert trees.token_N.tolist() == merged.token_N[rows].tolist() and len(rows) == len(expected)


def test_a_steps_drafts_are_counted_per_request_and_kind():
    """In order: a bare root, a drafted chain of two, a copy of one, a drafted root that pruning left alone."""
    reply = DraftReply(
        trees=oracles.trees([CHAIN, BARE]), probs=None, pruned_GD=torch.tensor([[0, 1, 0], [3, 0, 0]]),
        num_levels=2, num_run=1, seconds=0.0,
    )  # fmt: skip
    drafts = DraftBatch.of(reply, [False, True, False, True], [[7], [1], [9, 5], [8]])
    assert drafts.verified == [[], [1, 1], [1], []] and drafts.pruned == [[], [0, 1], [], [3]]
    assert drafts.copied == [False, False, True, False] and (drafts.num_nodes, drafts.num_trees) == (3, 2)


def test_chains_are_trees_of_deterministic_nodes():
    tokens = [[9, 5, 6], [8], [7, 2]]
    expected = oracles.trees([oracles.chain(own[1:], root=own[0]) for own in tokens], NodeKind.DETERMINISTIC)
    assert same(chains(tokens), expected)


def test_a_batch_without_drafts_is_all_bare_roots():
    assert same(bare_roots([8, 9]), oracles.trees([([-1], [8]), ([-1], [9])]))
    assert same(completed(oracles.trees([]), [False], [[8]]), oracles.trees([BARE]))


def test_a_batch_in_which_all_have_trees_is_unchanged():
    batch = oracles.trees([TWO_BY_TWO, CHAIN])
    assert completed(batch, [True, True], [[50], [1]]) is batch


def test_a_step_without_decoding_requests_has_no_tree_rows():
    for trees in (bare_roots([]), completed(oracles.trees([]), [], [])):
        assert trees.offsets.tolist() == [0]


def test_a_bare_root_has_the_kind_and_weight_of_a_root():
    merged = completed(oracles.trees([CHAIN]), [True, False], [[1], [8]])
    assert merged.kind_N.tolist() == [NodeKind.ROOT, NodeKind.COUPLED, NodeKind.COUPLED, NodeKind.ROOT]
    assert merged.weight_N.tolist() == [1.0] * 4
