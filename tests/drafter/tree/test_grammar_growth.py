"""Grammars while trees grow: forbidden candidates are masked along each node's path, in model and n-gram drafts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drafter.tree.frontier import DraftVocabulary, Frontier, NgramCandidates
from drafter.tree.grow import _PathConstraints
from drafter.tree.policy import DynamicTreePolicy
from drafter.tree.sample import Support
from drafter.tree.score import ChildScores
from tests.support import oracles
from tests.support.grammars import TinyTable, allowed_by, state_of
from tests.support.growing import grow
from workers.sampling.grammar import Grammars, grammar_text
from workers.settings import Constraints, Rule, SamplingSettings
from workers.types import NodeKind, SamplingBatch

TEXTS, END = ["a", "b", "ab", "c", "<end>"], 4
LANGUAGE = ["ab", "c", "abab", "abc", "cab", "cc"]
GRAMMAR = Constraints(grammar=grammar_text("regex", "(ab|c){1,2}"))
ROOTS = Frontier(0, *(np.array(values) for values in ([0, 1], [0, 0], [-1, -1], [3, 3], [1, 1])))
CHILDREN = Frontier(1, *(np.array(values) for values in ([1, 1], [1, 2], [0, 0], [0, 3], [3, 5])))


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(TinyTable(TEXTS, [END]))


def constraints(grammars: Grammars, vocab: DraftVocabulary) -> _PathConstraints:
    """Return the constraints of two requests, of which the second has a grammar and has said nothing yet."""
    return _PathConstraints({1: state_of(GRAMMAR, ())}, vocab, grammars)


def test_logits_are_masked_along_each_path(grammars: Grammars) -> None:
    own, x_2V = constraints(grammars, DraftVocabulary(target_size=5)), torch.arange(10.0).view(2, 5)
    for frontier, allowed in (
        (ROOTS, [{0, 1, 2, 3, 4}, allowed_by(TEXTS, [END], LANGUAGE, ())]),
        (CHILDREN, [allowed_by(TEXTS, [END], LANGUAGE, path) for path in ((0,), (3,))]),
    ):
        masked, is_dead_F = own.apply(x_2V, frontier)
        assert isinstance(masked, torch.Tensor) and is_dead_F is not None
        assert is_dead_F.tolist() == [False, False]
        for row, kept in enumerate(allowed):
            assert masked[row].tolist() == [x_2V[row, t].item() if t in kept else -np.inf for t in range(5)]


def test_a_vocabulary_without_an_allowed_token_makes_a_node_dead(grammars: Grammars) -> None:
    own = constraints(grammars, DraftVocabulary(target_size=5, target_ids=torch.tensor([3, 0])))
    assert own.apply(torch.zeros(2, 2), ROOTS)[1].tolist() == [False, False]  # type: ignore[union-attr]
    assert own.apply(torch.zeros(2, 2), CHILDREN)[1].tolist() == [True, False]  # type: ignore[union-attr]


def test_ngram_candidates_are_masked(grammars: Grammars) -> None:
    own = constraints(grammars, DraftVocabulary(target_size=5))
    log_q_FK = np.log(np.array([[0.4, 0.3, 0.2], [0.5, 0.3, 0.2]], np.float32))
    draft = NgramCandidates(np.array([[1, 0, 2], [1, 0, 2]]), log_q_FK.copy())
    masked, is_dead_F = own.apply(draft, ROOTS)
    assert isinstance(masked, NgramCandidates) and is_dead_F is not None and not is_dead_F.any()
    assert masked.token_FK.tolist() == draft.token_FK.tolist()
    assert masked.log_q_FK[0].tolist() == log_q_FK[0].tolist()
    assert masked.log_q_FK[1].tolist() == [-np.inf, *log_q_FK[1, 1:].tolist()], "no text begins with b"
    assert draft.log_q_FK.tolist() == log_q_FK.tolist(), "the candidates themselves are unchanged"


def test_ngram_candidates_without_a_grammar_are_proposed_as_they_are(grammars: Grammars) -> None:
    draft = NgramCandidates(np.array([[1, 0]]), np.zeros((1, 2), np.float32))
    others = _PathConstraints({0: state_of(Constraints(bad_words=[[1]]), ())}, DraftVocabulary(target_size=5), grammars)
    assert others.apply(draft, ROOTS.rows(np.array([0]))) == (draft, None)


@pytest.mark.parametrize("kind", [NodeKind.COUPLED, NodeKind.SAMPLED])
def test_dead_nodes_have_no_candidates(kind: NodeKind) -> None:
    weight_FK = np.array([[0.5, 0.25], [0.75, 0.125]], np.float32)
    support = Support(np.array([[1, 2], [3, 4]]), np.array([[9, 7], [8, 6]])) if kind == NodeKind.SAMPLED else None
    scores = ChildScores(
        np.array([[1, 2], [3, 4]]), weight_FK, weight_FK, weight_FK.max(1), np.full(2, kind.value, np.uint8), support
    )
    assert scores.without_children(np.array([False, False])) is scores
    left = scores.without_children(np.array([True, False]))
    assert left.weight_FK.tolist() == [[0, 0], weight_FK[1].tolist()] and left.weight_FK.dtype == np.float32
    assert left.token_FK is scores.token_FK
    if support is None:
        assert left.support is None
    else:
        assert left.support is not None and left.support.weight_FS.tolist() == [[0, 0], [8, 6]]


def test_a_tree_ends_where_no_draft_token_may_follow(grammars: Grammars) -> None:
    """Nothing may follow a, and both tokens of the vocabulary, c and a, may follow c."""
    grown = grow(
        torch.zeros(1, 2),
        np.array([1]),
        np.array([8]),
        limits=oracles.limits([6], [2], [0.0], [0.0], [Rule.COUPLED], auto=[False]),
        sampling=SamplingBatch.stack([SamplingSettings(temperature=0.0)]),
        policy=DynamicTreePolicy(max_children=2, max_depth=2),
        expand=lambda frontier: torch.zeros(len(frontier.row_F), 2),
        vocab=DraftVocabulary(target_size=5, target_ids=torch.tensor([3, 0])),
        logits_states={0: state_of(GRAMMAR, ())},
        grammars=grammars,
    )
    assert set(oracles.paths_of(grown.trees, 0)) == {(), (3,), (0,), (3, 3), (3, 0)}
