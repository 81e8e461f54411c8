"""Grammars are lossless: under every rule, outputs follow the target's law restricted to the grammar, exactly.

Texts over a few tokens are spelt in several ways. The production code masks draft and target, the real `grow` grows the
trees, and all draws are enumerated. The truth masks the target by listing the language. Where a structure begins behind
a thought, which is any text up to a mark, the language has all thoughts of some length.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

import drafter.tree.budgeted
from drafter.tree.frontier import DraftVocabulary, Frontier
from drafter.tree.policy import DynamicTreePolicy, StaticTreePolicy, TreePolicy
from drafter.tree.sample import DrawnChildren, Support
from tests.support import oracles
from tests.support.enumeration import Choose, Draft, GrownScenario, History, as_draft, draw_by, explore
from tests.support.grammars import TinyTable, allowed_by, state_of
from tests.support.growing import grow
from tests.support.oracles import Path, distance, product_law
from verifier.acceptance.coupled import walk
from workers.sampling.grammar import Grammars, ThoughtMarks, grammar_text
from workers.sampling.grammar_masks import grammar_masks
from workers.sampling.logits_edits import Columns, ConstrainedRow
from workers.sampling.logits_processors import constrain
from workers.settings import Constraints, Rule, SamplingSettings
from workers.types import SamplingBatch, TreeBatch

torch.set_num_threads(1)

TEXTS = ["a", "b", "ab", "c", "<end>"]
END = 4
LENGTH = 3
STRUCTURE, TEXT = ["ab", "c", "abab", "abc", "cab", "cc"], grammar_text("regex", "(ab|c){1,2}")
THOUGHTS = ["".join(letters) for length in range(2 * LENGTH + 1) for letters in product("ac", repeat=length)]
TOLERANCE = 1e-7  # log p is float32
VISIBLE = 0.005

CHAIN, STATIC = StaticTreePolicy(((0,), (0, 0))), StaticTreePolicy(((0,), (1,), (0, 0), (0, 1), (1, 0)))
SHAPES: dict[str, tuple[TreePolicy, dict[str, object]]] = {
    "chain": (CHAIN, {}),
    "static": (STATIC, {}),
    "dynamic": (DynamicTreePolicy(max_children=2, max_depth=2), {}),
    "dynamic hybrid": (DynamicTreePolicy(max_children=3, max_depth=2), {"is_hybrid": True}),
}
WHOLE, REDUCED = DraftVocabulary(target_size=5), DraftVocabulary(target_size=5, target_ids=torch.tensor([4, 0, 3]))


@cache
def grammars() -> Grammars:
    return Grammars(TinyTable(TEXTS, [END]))


class Bound(NamedTuple):
    """What the answers of the requests are, and all texts of it."""

    constraints: Constraints
    language: list[str]


AT_ONCE = Bound(Constraints(grammar=TEXT), STRUCTURE)
BEHIND_A_THOUGHT = Bound(
    Constraints(grammar=TinyTable(TEXTS, [END]).behind(ThoughtMarks("", "b"), TEXT)),
    [f"{thought}b{text}" for thought in THOUGHTS for text in STRUCTURE],
)
MAYBE_A_THOUGHT = Bound(
    Constraints(grammar=TinyTable(TEXTS, [END]).behind(ThoughtMarks("b", "b"), TEXT)),
    STRUCTURE + [f"b{thought}b{text}" for thought in THOUGHTS for text in STRUCTURE],
)
BOUNDS = {"at once": AT_ONCE, "behind a thought": BEHIND_A_THOUGHT, "maybe a thought": MAYBE_A_THOUGHT}
bound = AT_ONCE


@pytest.fixture(
    autouse=True,
    params=[AT_ONCE, BEHIND_A_THOUGHT, pytest.param(MAYBE_A_THOUGHT, marks=pytest.mark.full)],
    ids=BOUNDS,
)
def what_answers_are(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "bound", request.param)
    for cached in (grammars, p, truth):
        cached.cache_clear()


@cache
def raw(prefix: Path, is_draft: bool = False) -> np.ndarray:
    return np.random.default_rng([*prefix, 7 + is_draft]).normal(scale=1.2, size=len(TEXTS)).astype(np.float32)


@cache
def p(prefix: Path) -> np.ndarray:
    """Return the law that the target samples from, masked by the production code; an ended text stays ended."""
    if END in prefix:
        return np.eye(len(TEXTS))[END]
    rows = [ConstrainedRow(0, state_of(bound.constraints, prefix[:1]), list(prefix[1:]))]
    columns = Columns(0, len(TEXTS))
    x_1V = constrain(torch.from_numpy(raw(prefix))[None], rows, columns, grammar_masks(rows, columns, grammars()))
    return x_1V.double().softmax(-1)[0].numpy()


@cache
def truth(prefix: Path) -> np.ndarray:
    allowed = sorted(allowed_by(TEXTS, [END], bound.language, prefix)) or [
        END
    ]  # of impossible prefixes any law will do
    law = np.zeros(len(TEXTS))
    law[allowed] = np.exp(raw(prefix)[allowed].astype(np.float64))
    return law / law.sum()


def grown(
    prefix: Path, rule: Rule, tree_policy: TreePolicy, options: dict[str, object], vocab: DraftVocabulary
) -> tuple[TreeBatch, Draft]:
    """Return the tree that the real `grow` draws for a request with this output; none for one that has ended."""
    if END in prefix:
        bare = oracles.trees([([-1], [END])])
        return bare, as_draft(bare, None)
    paths: dict[int, Path] = {0: ()}
    ids = np.arange(vocab.target_size) if vocab.target_ids is None else vocab.target_ids.numpy()

    def logits(rows: list[int]) -> torch.Tensor:
        return torch.from_numpy(np.stack([raw((*prefix, *paths[row]), True)[ids] for row in rows]))

    def expand(level: Frontier) -> torch.Tensor:
        for row, parent, token in zip(level.row_F, level.parent_row_F, level.token_F, strict=True):
            paths[int(row)] = (*paths[int(parent)], int(token))
        return logits(level.row_F.tolist())

    trees = grow(
        logits([0]),
        np.zeros(1, dtype=np.int64),
        np.array([len(prefix) + 1]),
        limits=oracles.limits([4], [2], rule=[rule], **options),  # type: ignore[arg-type]
        sampling=SamplingBatch.stack([SamplingSettings()]),
        policy=tree_policy,
        expand=expand,
        vocab=vocab,
        logits_states={0: state_of(bound.constraints, prefix)},
        grammars=grammars(),
    )
    return trees.trees, as_draft(trees.trees, trees.probs)


@dataclass(frozen=True, kw_only=True)
class GrammarScenario(GrownScenario):
    """A scenario whose request has the grammar."""

    options: dict[str, object]
    vocab: DraftVocabulary

    def drafts(self, history: History) -> Iterator[tuple[float, Draft]]:
        prefix = sum(history, ())

        def run(choose: Choose) -> Draft:
            def draw(support: Support, count_F: np.ndarray, num_fixed_F: np.ndarray, *_: object) -> DrawnChildren:
                return draw_by(choose, support, count_F, num_fixed_F, self.tree_policy.max_children)

            with mock.patch.object(drafter.tree.budgeted, "draw_children", draw):
                return grown(prefix, self.rule, self.tree_policy, self.options, self.vocab)[1]

        return explore(run)


class Winners(list[int]):
    """The target's own token at every row, drawn when the walk looks at it: no other one can change the verdict."""

    def __init__(self, draws: list[Callable[[], int]]) -> None:
        super().__init__([0] * len(draws))
        self._draws = dict(enumerate(draws))

    def __getitem__(self, row: int) -> int:  # type: ignore[override]
        if (draw := self._draws.pop(row, None)) is not None:
            self[row] = draw()
        return super().__getitem__(row)

    def __iter__(self) -> Iterator[int]:
        return (self[row] for row in range(len(self)))


def assert_allowed(history: History, draft: Draft) -> None:
    """Check that every node is allowed, and that nothing follows an end token."""
    prefix = sum(history, ())
    for node in draft[1:]:
        path = (*prefix, *node.path)
        assert path[-1] in allowed_by(TEXTS, [END], bound.language, path[:-1]) and END not in path[:-1]


def cells() -> Iterator[Any]:
    """All combinations; without `--full` the largest, of wide trees behind a thought, by one rule for one of them."""
    for name, answers in BOUNDS.items():
        for rule, shape, vocab in product((Rule.TRAVERSAL, Rule.RECURSIVE), SHAPES, (WHOLE, REDUCED)):
            marks = [pytest.mark.slow] if rule is Rule.RECURSIVE else []
            is_large = answers is BEHIND_A_THOUGHT and vocab is WHOLE and shape in ("static", "dynamic")
            if answers is MAYBE_A_THOUGHT or (is_large and (rule, shape) != (Rule.TRAVERSAL, "dynamic")):
                marks.append(pytest.mark.full)
            case = f"{name}-{rule}-{shape}-{'whole' if vocab is WHOLE else 'reduced'}"
            yield pytest.param(answers, rule, shape, vocab, marks=marks, id=case)


@pytest.mark.parametrize(("what_answers_are", "rule", "shape", "vocab"), [*cells()], indirect=["what_answers_are"])
def test_sampled_drafts_keep_the_law(rule: Rule, shape: str, vocab: DraftVocabulary) -> None:
    tree_policy, options = SHAPES[shape]
    scenario = GrammarScenario(
        p=p,
        q=lambda path: (),
        rule=rule,
        tree_policy=tree_policy,
        limits=oracles.limits([4], [2], rule=[rule]),
        options=options,
        vocab=vocab,
    )
    histories: list[History] = [(), ((0,),), ((2,),), ((3, 3),), ((2, 3),)]
    for history in histories:
        for _, draft in scenario.drafts(history):
            assert_allowed(history, draft)
    assert max(len(draft) for _, draft in scenario.drafts(())) > 2
    assert distance(scenario.law(LENGTH), product_law(truth, LENGTH)) < TOLERANCE


@pytest.mark.parametrize("vocab", [WHOLE, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("shape", ["chain", "static", "dynamic"])
def test_target_only_acceptance_keeps_the_law(shape: str, vocab: DraftVocabulary) -> None:
    tree_policy, options = SHAPES[shape]
    laws: list[dict[Path, float]] = [defaultdict(float) for _ in range(LENGTH + 1)]  # by the number of tokens
    laws[0][()] = 1.0
    for law in laws[:-1]:
        for prefix, weight in law.items():
            trees, draft = grown(prefix, Rule.TARGET_ONLY, tree_policy, options, vocab)
            assert_allowed((prefix,), draft)

            def run(choose: Choose, prefix: Path = prefix, trees: TreeBatch = trees, draft: Draft = draft) -> Path:
                winners = Winners([lambda node=node: choose(p((*prefix, *node.path)).tolist()) for node in draft])
                return walk(trees, winners)[0].tokens

            for chance, tokens in explore(run):
                path = (*prefix, *tokens)[:LENGTH]
                laws[len(path)][path] += weight * chance
    assert distance(laws[-1], product_law(truth, LENGTH)) < TOLERANCE


def test_an_unmasked_draft_would_waste_nodes_and_an_unmasked_target_would_break_the_law() -> None:
    rule, (tree_policy, options) = Rule.TARGET_ONLY, SHAPES["dynamic"]
    with mock.patch("drafter.tree.grow.grammar_masks", return_value=None):
        unmasked = [(prefix, grown(prefix, rule, tree_policy, options, WHOLE)[1]) for prefix in [(), (0,), (2,)]]
    with pytest.raises(AssertionError):
        for prefix, draft in unmasked:
            assert_allowed((prefix,), draft)

    def free(prefix: Path) -> np.ndarray:
        law = np.exp(raw(prefix).astype(np.float64))
        return law / law.sum()

    assert distance(product_law(free, LENGTH), product_law(truth, LENGTH)) > VISIBLE
