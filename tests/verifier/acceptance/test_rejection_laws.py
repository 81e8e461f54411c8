"""Sampled drafts are lossless by exact enumeration, and the same enumeration detects mutants that are not.

Every distribution here is that of the first tokens over several rounds of drawing, verification and commit, by the
production `draw_children` and `decide` with every outcome of their noise (see `enumeration.py`). It covers fixed trees,
every valid way to prune, and mutants, each a plausible mistake of one line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from drafter.tree.policy import DynamicTreePolicy, StaticTreePolicy, TreePolicy
from drafter.tree.sample import expected_survival
from tests.support import oracles
from tests.support.enumeration import (
    Draft,
    GrownScenario,
    History,
    Policy,
    Scenario,
    Slots,
    Weights,
    support_of,
    without,
)
from tests.support.oracles import Path, distance, product_law
from tests.support.pairs import pairs
from verifier.acceptance.coupled import walk
from verifier.acceptance.rejection import Residual
from workers.settings import Rule
from workers.types import DraftCosts, NodeKind

TOLERANCE = 1e-12
VISIBLE = 0.005  # what a wrong rule must be off by
LENGTH = 3
RULES = [Rule.TRAVERSAL, Rule.RECURSIVE]

Target = Callable[[Path], np.ndarray]
Drafter = Callable[[Path], Weights]


def target(seed: int, vocab: int = 3, forbidden: int | None = None) -> Target:
    """Return p(. | prefix): random, peaked, a function of the prefix; `forbidden` has p = 0."""

    @cache
    def p(prefix: Path) -> np.ndarray:
        law = np.random.default_rng([seed, *prefix, 99]).dirichlet(np.full(vocab, 0.7))
        if forbidden is not None:
            law[forbidden] = 0.0
        return law / law.sum()

    return p


def drafter(seed: int, vocab: int = 3, forbidden: int | None = None) -> Drafter:
    """Return small integer weights, some 0 or equal; `forbidden` is masked before drawing."""

    @cache
    def q(prefix: Path) -> Weights:
        weights = np.random.default_rng([seed, *prefix, 7]).integers(0, 5, size=vocab)
        weights[weights.sum() % vocab] += 1
        if forbidden is not None:
            weights[forbidden] = 0
            weights[(forbidden + 1) % vocab] += 1
        return tuple(weights.tolist())

    return q


def check(scenario: Scenario, length: int = LENGTH) -> None:
    assert distance(scenario.law(length), product_law(scenario.p, length)) < TOLERANCE


def bias(scenario: Scenario, length: int = LENGTH) -> float:
    return distance(scenario.law(length), product_law(scenario.p, length))


# ---- shapes, and which children of a node are fixed


def widths(*each: int) -> Callable[[History, Draft, int], int]:
    return lambda history, draft, row: (*each, *[0] * 9)[len(draft[row].path)]


def ragged(history: History, draft: Draft, row: int) -> int:
    return {(): 3, (0,): 2, (0, 0): 1, (2,): 1}.get(draft[row].path, 0) if row < 5 else 0


def random_count(history: History, draft: Draft, row: int) -> int:
    rng = np.random.default_rng([len(history), *map(len, history), *sum(history, ()), 77, *draft[row].path, row])
    return int(rng.integers(4 - len(draft[row].path))) if len(draft) < 5 else 0


SHAPES = {"chain": widths(1, 1, 1), "2x2": widths(2, 2), "ragged": ragged, "random": random_count}
FIXED: dict[str, Callable[[int, int, int], int]] = {  # (rounds so far, row, count) -> how many are fixed
    "all sampled": lambda rounds, row, count: 0,
    "hybrid nodes": lambda rounds, row, count: 1 if count > 1 else row % 2,
    "sampled and fixed nodes": lambda rounds, row, count: count * ((rounds + row) % 2),
    "all fixed": lambda rounds, row, count: count,
}


def policy_of(shape: str, fixed: str) -> Policy:
    def policy(history: History, draft: Draft, row: int) -> Slots:
        count = SHAPES[shape](history, draft, row)
        return Slots(count, min(count, FIXED[fixed](len(history), row, count)))

    return policy


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fixed", FIXED)
@pytest.mark.parametrize("shape", SHAPES)
def test_sampled_drafts_are_lossless_for_every_shape_and_kind_of_node(shape, fixed, rule):
    check(Scenario(p=target(1), q=drafter(1), policy=policy_of(shape, fixed), rule=rule))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocab", [4, 5])
def test_sampled_drafts_are_lossless_on_larger_vocabularies(vocab, rule):
    for shape, fixed in ((widths(1, 1), 0), (widths(3), 0), (widths(3), 1)):
        policy: Policy = lambda h, draft, row, s=shape, f=fixed: Slots(n := s(h, draft, row), min(n, f))  # noqa: E731
        check(Scenario(p=target(2, vocab), q=drafter(2, vocab), policy=policy, rule=rule))


@pytest.mark.parametrize("rule", RULES)
def test_a_perfect_draft_is_accepted_whole(rule):
    p = {0: (2, 1, 1), 1: (0, 3, 1), 2: (1, 1, 2)}
    q: Drafter = lambda prefix: p[len(prefix) % 3]  # noqa: E731
    same = Scenario(p=lambda prefix: np.array(q(prefix)) / 4, q=q, policy=policy_of("chain", "all sampled"), rule=rule)
    check(same)
    assert same.accepted() == pytest.approx(3, abs=1e-12)


# ---- every legal way to prune


def share(q: Drafter, prefix: Path, token: int) -> float:
    weights = q(prefix)
    return weights[token] / sum(weights)


def path_prob(q: Drafter, prefix: Path, path: Path) -> float:
    return float(np.prod([share(q, (*prefix, *path[:i]), token) for i, token in enumerate(path)]))


def two_by_two_unless(is_stopped: Callable[[Drafter, Path, Draft, int], bool]) -> Callable[[Drafter], Policy]:
    def make(q: Drafter) -> Policy:
        def policy(history: History, draft: Draft, row: int) -> Slots:
            stops = len(draft[row].path) > 1 or is_stopped(q, sum(history, ()), draft, row)
            return Slots(0 if stops else 2)

        return policy

    return make


def is_unsure(q: Drafter, prefix: Path, draft: Draft, row: int) -> bool:
    weights = q((*prefix, *draft[row].path))
    return max(weights) < 0.6 * sum(weights)


def is_unlikely_itself(q: Drafter, prefix: Path, draft: Draft, row: int) -> bool:
    path = draft[row].path
    return bool(path) and share(q, (*prefix, *path[:-1]), path[-1]) < 0.4


def is_unlikely_path(q: Drafter, prefix: Path, draft: Draft, row: int) -> bool:
    return path_prob(q, prefix, draft[row].path) < 0.4


def is_level_cut(q: Drafter, prefix: Path, draft: Draft, row: int) -> bool:
    """Leave the whole level undrawn if its nodes' total weight is small."""
    level = [node.path for node in draft if len(node.path) == len(draft[row].path)]
    return sum(path_prob(q, prefix, path) for path in level) < 0.7


def counts_by_value(q: Drafter) -> Policy:
    """Return the number of children that pays by an estimate from q alone."""

    def policy(history: History, draft: Draft, row: int) -> Slots:
        path = draft[row].path
        support = support_of(q((*sum(history, ()), *path)))
        survival = expected_survival(support, np.ones(1), 3)[0]
        return Slots(int((survival * 0.6 ** len(path) > 0.03).sum()) if len(path) < 2 else 0)

    return policy


def sizes_by_earlier_draws(q: Drafter) -> Policy:
    """Set a subtree's size from its ancestors, its root and earlier siblings."""

    def policy(history: History, draft: Draft, row: int) -> Slots:
        node = draft[row]
        before = sum(other.path[-1] for other in draft[1:row] if other.parent == node.parent)
        return Slots(2 if row == 0 else (before + sum(node.path) + row) % 3 if len(node.path) < 2 else 0)

    return policy


def sizes_by_all_other_draws(q: Drafter) -> Policy:
    """Set a node's children from everything but its own subtree, including its cousins."""

    def policy(history: History, draft: Draft, row: int) -> Slots:
        depth = len(draft[row].path)
        seen = sum((i + 1) * sum(node.path) for i, node in enumerate(draft))
        return Slots(2 if row == 0 else (seen % 3 if depth == 1 else (seen + 1) % 2) if depth < 3 else 0)

    return policy


def budget_by_history(q: Drafter) -> Policy:
    """A node budget that depends on earlier rounds, spent breadth-first; 0 after two rejections."""

    def policy(history: History, draft: Draft, row: int) -> Slots:
        budget = 3 if not history else 1 + 2 * len(history[-1]) - sum(history[0]) % 2
        if [len(tokens) for tokens in history[-2:]] == [1, 1]:
            budget = 0
        return Slots(min(2, max(0, budget - (len(draft) - 1))))

    return policy


PRUNINGS: dict[str, Callable[[Drafter], Policy]] = {
    "nothing is drawn where the draft is unsure": two_by_two_unless(is_unsure),
    "a drawn node is not expanded for its own probability": two_by_two_unless(is_unlikely_itself),
    "a drawn node is not expanded for its path probability": two_by_two_unless(is_unlikely_path),
    "a level is cut before it is drawn": two_by_two_unless(is_level_cut),
    "slots are counted before they are drawn": counts_by_value,
    "subtrees are sized by earlier draws": sizes_by_earlier_draws,
    "subtrees are sized by all other draws": sizes_by_all_other_draws,
    "the budget follows the history": budget_by_history,
}
HISTORIES: list[History] = [(), ((0,),), ((1,),), ((2, 1),), ((0,), (1,))]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pruning", PRUNINGS)
def test_pruning_independent_of_the_pruned_draws_is_lossless(pruning, rule):
    q = drafter(3)
    scenario = Scenario(p=target(3), q=q, policy=PRUNINGS[pruning](q), rule=rule)
    sizes = {len(draft) for history in HISTORIES for _, draft in scenario.drafts(history)}
    assert len(sizes) > 1, "this pruning never pruned"
    check(scenario)


@pytest.mark.parametrize("rule", RULES)
def test_a_later_sibling_may_be_pruned_because_of_an_earlier_one(rule):
    def edit(draft: Draft, q: Drafter) -> Draft:
        return without(draft, lambda d, row: d[row - 1].parent == d[row].parent and d[row - 1].path[-1] == 1)

    check(Scenario(p=target(4), q=drafter(4), policy=policy_of("2x2", "all sampled"), rule=rule, edit=edit))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fixed", FIXED)
def test_a_token_that_the_target_forbids_may_be_drawn_or_masked_before_drawing(fixed, rule):
    policy = policy_of("2x2", fixed)
    check(Scenario(p=target(5, forbidden=0), q=drafter(5), policy=policy, rule=rule))
    check(Scenario(p=target(5, forbidden=0), q=drafter(5, forbidden=0), policy=policy, rule=rule))
    check(Scenario(p=target(5), q=drafter(5, forbidden=0), policy=policy, rule=rule))


@pytest.mark.parametrize("rule", RULES)
def test_coins_keyed_on_root_and_row_are_as_good_as_fresh_ones(rule):
    policy = policy_of("2x2", "all sampled")
    check(
        Scenario(
            p=target(6), q=drafter(6), policy=policy, rule=rule, coin_key=lambda root, depth, row: root * 64 + row
        ),
        2,
    )


# ---- the trees of the real grow


DYNAMIC, CHAIN = DynamicTreePolicy(3, 3), StaticTreePolicy(((0,), (0, 0), (0, 0, 0)))
STATIC = StaticTreePolicy(((0,), (1,), (0, 0), (1, 0)))
COSTS = DraftCosts(
    nodes_T=torch.tensor([0, 9], dtype=torch.int32),
    verify_ms_T=torch.tensor([1.0, 1.02]),
    draft_ms_3=torch.tensor([0.2, 0.4, 0.0]),
    base_tokens_1=torch.ones(1),
    log_odds_D=torch.zeros(1),
)
"""A level costs enough that it depends on the tree so far whether another one is drawn."""

GROWN: dict[str, tuple[TreePolicy, dict[str, object]]] = {
    "chain": (CHAIN, {}),
    "chain with thresholds": (CHAIN, {"min_prob": [0.5], "path_prob": [0.3]}),
    "static": (STATIC, {}),
    "static hybrid": (STATIC, {"is_hybrid": True}),
    "dynamic": (DYNAMIC, {}),
    "dynamic hybrid": (DYNAMIC, {"is_hybrid": True}),
    "dynamic with thresholds": (DYNAMIC, {"min_prob": [0.5], "path_prob": [0.3]}),
    "dynamic hybrid on a budget with thresholds": (
        DYNAMIC,
        {"auto": [True], "min_prob": [0.4], "path_prob": [0.2], "is_hybrid": True},
    ),
    "dynamic on a budget": (DYNAMIC, {"auto": [True]}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("grown", "rule"), pairs(GROWN, RULES))
def test_trees_of_the_real_grow_are_lossless(grown, rule):
    tree_policy, options = GROWN[grown]
    limits = oracles.limits([5], [3], rule=[rule], **options)  # type: ignore[arg-type]
    costs = COSTS if "auto" in options else None
    scenario = GrownScenario(p=target(9), q=drafter(9), rule=rule, tree_policy=tree_policy, limits=limits, costs=costs)
    drafts = [draft for history in HISTORIES for _, draft in scenario.drafts(history)]
    assert NodeKind.SAMPLED in {node.kind for draft in drafts for node in draft}
    assert "min_prob" not in options or len({len(draft) for draft in drafts}) > 1, "the thresholds never pruned"
    check(scenario)


# ---- heads that change between two steps


@dataclass(frozen=True, kw_only=True)
class Learning(Scenario):
    """Another head drafts in every round; which one follows from all that was emitted, as if learnt from it."""

    heads: tuple[Drafter, ...]

    def drafts(self, history: History) -> Iterator[tuple[float, Draft]]:
        serving = self.heads[(len(history) + sum(map(sum, history))) % len(self.heads)]
        return Scenario(p=self.p, q=serving, policy=self.policy, rule=self.rule, edit=self.edit).drafts(history)


HEADS = tuple(drafter(seed) for seed in (11, 12, 13))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fixed", FIXED)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_head_that_learns_from_what_was_emitted_is_lossless(shape, fixed, rule):
    check(Learning(p=target(10), q=HEADS[0], heads=HEADS, policy=policy_of(shape, fixed), rule=rule))


# ---- traversal accepts more


def test_traversal_accepts_at_least_as_much_as_recursive_rejection():
    gains = []
    for shape, fixed in [
        ("chain", "all sampled"),
        ("2x2", "all sampled"),
        ("2x2", "hybrid nodes"),
        ("random", "hybrid nodes"),
    ]:
        for seed in range(4):
            one = Scenario(p=target(seed), q=drafter(seed), policy=policy_of(shape, fixed), rule=Rule.TRAVERSAL)
            traversal, recursive = one.accepted(), replace(one, rule=Rule.RECURSIVE).accepted()
            assert traversal > recursive - TOLERANCE
            gains.append(traversal - recursive)
    assert np.mean(gains) > 0.03


def test_block_verification_of_a_chain_of_four_gains_what_is_published():
    policy: Policy = lambda history, draft, row: Slots(int(len(draft[row].path) < 4))  # noqa: E731
    chains = [Scenario(p=target(s), q=drafter(s), policy=policy, rule=Rule.TRAVERSAL) for s in range(10)]
    traversal = np.mean([chain.accepted() for chain in chains])
    recursive = np.mean([replace(chain, rule=Rule.RECURSIVE).accepted() for chain in chains])
    assert 1.05 * recursive < traversal < 1.25 * recursive


# ---- mutants


def test_the_mutants_harness_is_right_when_nothing_is_replaced():
    for rule in RULES:
        for fixed in ("all sampled", "hybrid nodes"):
            check(mutable(rule, fixed))


def mutable(rule: Rule, fixed: str = "all sampled") -> Scenario:
    return Scenario(p=target(7), q=lambda prefix: (4, 2, 1), policy=policy_of("2x2", fixed), rule=rule)


def drop_unlikely(draft: Draft, q: Drafter) -> Draft:
    return without(draft, lambda d, row: share(q, d[row].path[:-1], d[row].path[-1]) < 0.2)


def drop_unlikely_paths(draft: Draft, q: Drafter) -> Draft:
    return without(draft, lambda d, row: path_prob(q, (), d[row].path) < 0.2)


def drop_the_tree(draft: Draft, q: Drafter) -> Draft:
    first = draft[1].path if len(draft) > 1 else ()
    return draft if path_prob(q, (), first) > 0.5 else draft[:1]


def keep_the_best_three(draft: Draft, q: Drafter) -> Draft:
    best = sorted(range(1, len(draft)), key=lambda row: -path_prob(q, (), draft[row].path))[:3]
    return without(draft, lambda d, row: row not in best)


def sort_siblings(draft: Draft, q: Drafter) -> Draft:
    order = sorted(
        range(len(draft)), key=lambda row: (len(draft[row].path), draft[row].parent, -path_prob(q, (), draft[row].path))
    )
    return tuple(draft[row]._replace(parent=order.index(draft[row].parent) if row else -1) for row in order)


def drop_forbidden(draft: Draft, q: Drafter) -> Draft:
    return without(draft, lambda d, row: d[row].path[-1] == 0)


def call_fixed_sampled(draft: Draft, q: Drafter) -> Draft:
    return tuple(node._replace(kind=NodeKind.SAMPLED) if node.path else node for node in draft)


def from_p(residual: Residual) -> Residual:
    return Residual(np.zeros(0, dtype=np.int64), np.zeros(0), 1.0)


def told_by_the_next_head(draft: Draft, q: Drafter) -> Draft:
    return tuple(node._replace(told=((0, 1), (1, 2), (2, 4))) if node.told else node for node in draft)


def pair(history: History, draft: Draft, row: int) -> Slots:
    return Slots(2 if row == 0 else 0)


MUTANTS: dict[str, Callable[[Rule], Scenario]] = {
    "a drawn child is dropped by its own probability": lambda rule: replace(mutable(rule), edit=drop_unlikely),
    "drawn nodes are cut by path probability": lambda rule: replace(mutable(rule), edit=drop_unlikely_paths),
    "a tree is dropped for its draws": lambda rule: replace(mutable(rule), edit=drop_the_tree),
    "drawn nodes are reranked and the best kept": lambda rule: replace(mutable(rule), edit=keep_the_best_three),
    "sampled siblings are sorted": lambda rule: replace(mutable(rule), edit=sort_siblings),
    "a drawn child that the grammar forbids is removed": lambda rule: replace(
        mutable(rule), p=target(7, forbidden=0), edit=drop_forbidden
    ),
    "fixed children are tested with p / q": lambda rule: replace(
        mutable(rule, "all fixed"), edit=call_fixed_sampled, is_zeroed=False
    ),
    "a hybrid's draft law is not zeroed on its fixed children": lambda rule: replace(
        mutable(rule, "hybrid nodes"), is_zeroed=False
    ),
    "drafting and the ratio test share noise": lambda rule: replace(
        mutable(rule), policy=policy_of("chain", "all sampled"), draws_toss=True
    ),
    "sampled children's coins are keyed on position alone": lambda rule: replace(
        mutable(rule), p=target(1), policy=pair, coin_key=lambda root, depth, row: root + depth
    ),
    "fixed children's coins are keyed on position alone": lambda rule: replace(
        mutable(rule, "all fixed"), coin_key=lambda root, depth, row: root + depth
    ),
    "coins are keyed on the row alone": lambda rule: replace(
        mutable(rule), p=target(2), policy=policy_of("chain", "all sampled"), coin_key=lambda root, depth, row: row
    ),
    "another head than the one that drew a tree tells its draft law": lambda rule: replace(
        mutable(rule), edit=told_by_the_next_head
    ),
    "the last token is drawn from p": lambda rule: replace(mutable(rule), ending=from_p),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_drafter_or_verifier_is_detected(mutant, rule):
    assert bias(MUTANTS[mutant](rule)) > VISIBLE


@pytest.mark.parametrize("rule", RULES)
def test_noise_shared_between_rounds_is_detected_over_several_rounds(rule):
    assert bias(MUTANTS["coins are keyed on the row alone"](rule), length=1) < TOLERANCE


# ---- a rule is for a whole request


def coupled_then_rejection(p: Target, switches: Callable[[Path], bool]) -> dict[Path, float]:
    """Return the distribution of two tokens: a coupled round whose drafter knows the noise, then as `switches` decides.

    The drafter offers the first winner only if the winner after it is not token 0; so a round that ends after one token
    has told something about the noise ahead, and only a request that goes on with this noise may use it.
    """
    law: dict[Path, float] = defaultdict(float)
    for first, p_first in enumerate(p(())):
        for second, p_second in enumerate(p((first,))):
            nodes = ([-1, 0], [9, first]) if second else ([-1], [9])
            (verdict,) = walk(oracles.tree(*nodes), [first, second][: len(nodes[0])])
            weight = p_first * p_second
            if len(verdict.tokens) == 2:
                law[verdict.tokens] += weight
            elif switches(verdict.tokens):
                rest = Scenario(
                    p=lambda x, f=first: p((f, *x)),
                    q=drafter(8),
                    policy=policy_of("2x2", "all sampled"),
                    rule=Rule.TRAVERSAL,
                )
                for (token,), chance in rest.law(1).items():
                    law[first, token] += weight * chance
            else:
                law[first, second] += weight
    return law


def test_a_rule_that_is_switched_inside_a_request_is_biased():
    p = target(8)
    assert distance(coupled_then_rejection(p, lambda text: False), product_law(p, 2)) < TOLERANCE
    assert distance(coupled_then_rejection(p, lambda text: text[-1] == 1), product_law(p, 2)) > VISIBLE
