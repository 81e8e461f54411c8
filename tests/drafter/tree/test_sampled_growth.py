"""Sampled trees of the real `grow`: budgets set before drawing, draws from the weights sent, losslessness."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch

from drafter.tree.cost_model import TreeCostModel
from drafter.tree.frontier import DraftVocabulary, Frontier, NgramCandidates
from drafter.tree.grow import GrownTrees
from drafter.tree.policy import DynamicTreePolicy, StaticTreePolicy, TreePolicy
from drafter.tree.sample import MAX_WEIGHT, DrawBits, draw_children, quantize
from drafter.tree.score import score
from tests.support import draft_costs, oracles
from tests.support.growing import grow
from tests.support.oracles import Path
from tests.support.verdicts import accept
from workers.settings import Rule, SamplingSettings
from workers.types import DraftCosts, DraftProbs, NodeKind, SamplingBatch, TreeBatch

torch.set_num_threads(1)

V = 5
SHAPES: dict[str, TreePolicy] = {
    "chain": StaticTreePolicy(((0,), (0, 0), (0, 0, 0))),
    "2x2": StaticTreePolicy(((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))),
    "dynamic": DynamicTreePolicy(3, 3),
}
FREE = DraftCosts(
    nodes_T=torch.tensor([0, 99], dtype=torch.int32),
    verify_ms_T=torch.tensor([1.0, 1.5]),
    draft_ms_3=torch.tensor([0.2, 0.1, 0.0]),
    base_tokens_1=torch.ones(1),
    log_odds_D=torch.zeros(1),
)


def log_law(seed: int, prefixes: list[Path]) -> torch.Tensor:
    """Return the log-probabilities after each prefix, float32 [len, V]."""
    rows = [np.log(np.random.default_rng([seed, 77, *prefix]).dirichlet(np.full(V, 0.8)) + 1e-4) for prefix in prefixes]
    return torch.from_numpy(np.stack(rows).astype(np.float32))


def grow_all(
    prefixes: list[Path],
    seeds: np.ndarray,
    policy: TreePolicy,
    *,
    rule: Rule,
    num_nodes: int = 6,
    min_prob: float = 0.0,
    path_prob: float = 0.0,
    auto: bool = False,
    is_hybrid: bool = False,
    costs: DraftCosts = FREE,
    drafted: Callable[[list[Path]], torch.Tensor] = lambda prefixes: log_law(2, prefixes),
) -> GrownTrees:
    """Grow trees for requests whose tokens so far are `prefixes`."""
    count = len(prefixes)
    paths: dict[tuple[int, int], Path] = {(b, 0): prefix for b, prefix in enumerate(prefixes)}

    def expand(frontier: Frontier) -> torch.Tensor:
        for b, row, parent, token in zip(
            frontier.request_F, frontier.row_F, frontier.parent_row_F, frontier.token_F, strict=True
        ):
            paths[b, row] = (*paths[b, parent], int(token))
        return drafted([paths[b, row] for b, row in zip(frontier.request_F, frontier.row_F, strict=True)])

    return grow(
        drafted(prefixes),
        np.array([prefix[-1] if prefix else 0 for prefix in prefixes]),
        np.array([1 + len(prefix) for prefix in prefixes]),
        limits=oracles.limits(
            [num_nodes] * count, [3] * count, [min_prob] * count, [path_prob] * count, [rule] * count, [auto] * count,
            is_hybrid=is_hybrid,
        ),
        sampling=SamplingBatch.stack([SamplingSettings(seed=int(seed)) for seed in seeds]),
        policy=policy,
        expand=expand,
        vocab=DraftVocabulary(target_size=V),
        costs=costs if auto else None,
    )  # fmt: skip


SETTINGS = [{}, {"is_hybrid": True}, {"min_prob": 0.4, "path_prob": 0.1}, {"auto": True}]


def emitted(rule: Rule, policy: TreePolicy, count: int, length: int, **settings: object) -> list[Path]:
    """Return the first `length` tokens of `count` requests with different seeds, by the real functions."""
    tokens: list[Path] = [()] * count
    while min(map(len, tokens)) < length:
        open_ = [i for i, x in enumerate(tokens) if len(x) < length]
        seeds = np.array([1000 + i for i in open_])
        grown = grow_all([tokens[i] for i in open_], seeds, policy, rule=rule, **settings)  # type: ignore[arg-type]
        rows = [(*tokens[i], *path) for place, i in enumerate(open_) for path in oracles.paths_of(grown.trees, place)]
        verdicts = accept(
            grown.trees,
            log_law(1, rows),
            SamplingBatch.stack([SamplingSettings(seed=int(seed)) for seed in seeds]),
            torch.tensor([len(tokens[i]) for i in open_]),
            [rule] * len(open_),
            grown.probs,
        )
        for i, verdict in zip(open_, verdicts, strict=True):
            tokens[i] += verdict.tokens
    return [x[:length] for x in tokens]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "settings", "rule"),
    [
        pytest.param(*cell, marks=[pytest.mark.full] if (place + place // 2 + place // 8) % 2 else [])
        for place, cell in enumerate(itertools.product(SHAPES, SETTINGS, [Rule.TRAVERSAL, Rule.RECURSIVE]))
    ],
)
def test_grown_and_verified_tokens_follow_the_targets_law(rule, settings, policy):
    length, count = 2, 1200
    outcomes = emitted(rule, SHAPES[policy], count, length, **settings)
    law = oracles.product_law(lambda x: log_law(1, [x]).double().softmax(-1)[0].numpy(), length)
    observed = np.array([outcomes.count(x) for x in itertools.product(range(V), repeat=length)])
    expected = np.array([law[x] for x in itertools.product(range(V), repeat=length)]) * count
    often = expected > 4
    observed = np.append(observed[often], observed[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    kept = expected > 0
    assert scipy.stats.chisquare(observed[kept], expected[kept] * observed.sum() / expected[kept].sum()).pvalue > 1e-4


def children_of(trees: TreeBatch, request: int, row: int) -> list[int]:
    begin, end = trees.offsets[request : request + 2].tolist()
    return [r for r in range(end - begin) if trees.parent_N[begin + r] == row]


@pytest.mark.parametrize("is_hybrid", [False, True])
@pytest.mark.parametrize("min_prob", [0.0, 0.4])
def test_every_sampled_child_comes_with_the_distribution_it_was_drawn_from(is_hybrid, min_prob):
    prefixes = [(t,) for t in range(V)]
    grown = grow_all(prefixes, np.arange(V), SHAPES["2x2"], rule=Rule.TRAVERSAL, is_hybrid=is_hybrid, min_prob=min_prob)
    trees, probs = grown.trees, grown.probs
    assert probs is not None
    for request in range(V):
        begin = int(trees.offsets[request])
        for row, path in enumerate(oracles.paths_of(trees, request)):
            a, b = probs.offsets[begin + row : begin + row + 2].tolist()
            children = children_of(trees, request, row)
            assert (b > a) == bool(children), "a law exactly where something was drawn"
            if not children:
                continue
            q = log_law(2, [(request, *path)]).softmax(-1)[0]
            weights = dict(zip(probs.id_S[a:b].tolist(), probs.weight_S[a:b].tolist(), strict=True))
            kinds = [NodeKind(int(trees.kind_N[begin + child])) for child in children]
            tokens = [int(trees.token_N[begin + child]) for child in children]
            if is_hybrid:
                assert kinds == [NodeKind.DETERMINISTIC, NodeKind.SAMPLED] and tokens[0] == int(q.argmax())
                assert tokens[0] not in weights, "q is zeroed on the fixed child"
            else:
                assert kinds == [NodeKind.SAMPLED] * 2
                assert max(weights.values()) == MAX_WEIGHT
            assert tokens[-1] in weights
            kept = sum(q[t] for t in weights)
            for token, weight in weights.items():
                expected = float(q[token] / kept)
                assert weight / sum(weights.values()) == pytest.approx(expected, abs=V / sum(weights.values()))


def test_budgets_do_not_depend_on_the_tokens_drawn():
    """With one distribution everywhere, the trees of all seeds have the same shape."""
    law = torch.tensor([[0.0, -0.5, -1.0, -1.5, -2.0]])
    everywhere = lambda prefixes: law.expand(len(prefixes), -1)  # noqa: E731
    grown = grow_all([()] * 40, np.arange(40), DynamicTreePolicy(3, 3), rule=Rule.TRAVERSAL, drafted=everywhere)
    size = int(grown.trees.offsets[1])
    parents = grown.trees.parent_N.view(40, size)
    assert (parents == parents[0]).all() and len(grown.trees.token_N.view(40, size).unique(dim=0)) > 10


def test_thresholds_keep_every_drawn_node_and_expand_fewer():
    prefixes, seeds = [(t,) for t in range(V)] * 4, np.arange(4 * V)
    for policy in SHAPES.values():
        whole = grow_all(prefixes, seeds, policy, rule=Rule.TRAVERSAL).trees
        cut = grow_all(prefixes, seeds, policy, rule=Rule.TRAVERSAL, path_prob=0.2).trees
        fewer = 0
        for request in range(len(prefixes)):
            kept, all_ = oracles.paths_of(cut, request), oracles.paths_of(whole, request)
            q = {path: log_law(2, [prefixes[request] + path]).softmax(-1)[0] for path in all_}
            chance = {path: float(np.prod([q[path[:n]][token] for n, token in enumerate(path)])) for path in all_}
            assert kept == oracles.without_descendants(all_, lambda path, chance=chance: chance[path] >= 0.2)
            fewer += len(kept) < len(all_)
        assert fewer


def test_a_support_of_one_token_has_one_child():
    only = torch.tensor([[0.0, *[-torch.inf] * (V - 1)]])
    grown = grow_all([()], np.zeros(1), SHAPES["2x2"], rule=Rule.TRAVERSAL, drafted=lambda p: only.expand(len(p), -1))
    assert oracles.paths_of(grown.trees) == [(), (0,), (0, 0)]


def test_requests_of_every_rule_grow_together_as_alone():
    rules = [Rule.COUPLED, Rule.TRAVERSAL, Rule.TARGET_ONLY, Rule.RECURSIVE, Rule.COUPLED]
    prefixes: list[Path] = [(t,) for t in range(V)]
    sampling = [SamplingSettings(seed=7 + i, temperature=0.0 if i == 4 else 1.0) for i in range(V)]

    def run(own: list[int], auto: bool) -> GrownTrees:
        paths = {(b, 0): prefixes[i] for b, i in enumerate(own)}

        def expand(frontier: Frontier) -> torch.Tensor:
            rows = zip(frontier.request_F, frontier.row_F, frontier.parent_row_F, frontier.token_F, strict=True)
            paths.update({(b, row): (*paths[b, parent], int(token)) for b, row, parent, token in rows})
            return log_law(2, [paths[b, row] for b, row in zip(frontier.request_F, frontier.row_F, strict=True)])

        return grow(
            log_law(2, [prefixes[i] for i in own]), np.array(own), np.full(len(own), 2),
            limits=oracles.limits(
                [6] * len(own), [3] * len(own), rule=[rules[i] for i in own], auto=[auto and i == 0 for i in own]
            ),
            sampling=SamplingBatch.stack([sampling[i] for i in own]), policy=DynamicTreePolicy(3, 3), expand=expand,
            vocab=DraftVocabulary(target_size=V), costs=FREE if auto else None,
        )  # fmt: skip

    for auto in (False, True):
        together = run(list(range(V)), auto)
        for i in range(int(auto), V):  # the budget of `auto` looks at the whole batch
            alone = run([i], auto)
            assert oracles.paths_of(together.trees, i) == oracles.paths_of(alone.trees)
            assert laws_of(together, i) == laws_of(alone, 0)


def laws_of(grown: GrownTrees, request: int) -> list[list[tuple[int, int]]]:
    """Return for each row of a request the (id, weight) entries that it was drawn from."""
    rows = range(*grown.trees.offsets[request : request + 2].tolist())
    probs: DraftProbs | None = grown.probs
    if probs is None:
        return [[] for _ in rows]
    spans = [probs.offsets[row : row + 2].tolist() for row in rows]
    return [list(zip(probs.id_S[a:b].tolist(), probs.weight_S[a:b].tolist(), strict=True)) for a, b in spans]


@pytest.mark.parametrize("num_fixed", [0, 2])
def test_children_are_drawn_by_the_seed_the_roots_position_and_the_row(num_fixed):
    """The root's three children and the first one's children; other keys would give other texts."""
    seed, prefix = 12345, (3, 1, 4)
    policy = StaticTreePolicy(((0,), (1,), (2,), (0, 0), (0, 1), (0, 2)))
    grown = grow_all([prefix], np.array([seed]), policy, rule=Rule.TRAVERSAL, is_hybrid=num_fixed > 0)
    paths = oracles.paths_of(grown.trees)
    for row, parent in ((0, ()), (1, paths[1])):
        support = quantize(log_law(2, [(*prefix, *parent)]).log_softmax(-1), DraftVocabulary(target_size=V))
        key = (np.array([value]) for value in (seed, len(prefix), row))
        drawn = draw_children(support, np.array([3]), np.array([num_fixed]), DrawBits.of(*key, 3))
        got = [path[-1] for path in paths[1:] if path[:-1] == parent]
        assert got == support.id_FS[0, drawn.column_FK[0]].tolist()


def test_fixed_children_have_probabilities_too():
    """A threshold below all probabilities prunes nothing."""
    whole, pruned = (
        grow_all([(2,)], np.array([7]), SHAPES["2x2"], rule=Rule.TRAVERSAL, is_hybrid=True, path_prob=threshold)
        for threshold in (0.0, 1e-9)
    )
    assert oracles.paths_of(pruned.trees) == oracles.paths_of(whole.trees) and len(whole.trees.token_N) == 7


def test_budgets_before_drawing_count_the_sampled_trees_under_auto_alone():
    """The batch also has a sampled tree without auto and one under auto that is cut afterwards."""
    policy, expensive, max_depth = SHAPES["2x2"], draft_costs.costs(node=0.4, level=0.2), 2
    rules, autos = [Rule.TRAVERSAL, Rule.TRAVERSAL, Rule.COUPLED], [False, True, True]
    paths: dict[tuple[int, int], Path] = {(b, 0): (b,) for b in range(3)}

    def expand(frontier: Frontier) -> torch.Tensor:
        for b, row, parent, token in zip(
            frontier.request_F, frontier.row_F, frontier.parent_row_F, frontier.token_F, strict=True
        ):
            paths[b, row] = (*paths[b, parent], int(token))
        return log_law(2, [paths[b, row] for b, row in zip(frontier.request_F, frontier.row_F, strict=True)])

    grown = grow(
        log_law(2, [(b,) for b in range(3)]), np.arange(3), np.full(3, 2),
        limits=oracles.limits([6] * 3, [max_depth] * 3, rule=rules, auto=autos),
        sampling=SamplingBatch.stack([SamplingSettings(seed=b) for b in range(3)]), policy=policy, expand=expand,
        vocab=DraftVocabulary(target_size=V), costs=expensive,
    )  # fmt: skip
    one, two = (TreeCostModel(expensive).budget_before_drawing(policy.expected_J, count, max_depth) for count in (1, 2))
    assert two < one < 6, "costs that show how many were counted"
    sizes = (grown.trees.offsets.diff() - 1).tolist()
    assert sizes[:2] == [6, one]


def test_weights_of_sampled_trees_are_not_calibrated():
    """Calibration is fitted to children that are known before it is decided whether to verify them."""
    prefixes, seeds = [(t,) for t in range(V)], np.arange(V)
    for policy in SHAPES.values():
        plain, auto = (
            grow_all(prefixes, seeds, policy, rule=Rule.TRAVERSAL, auto=is_auto, costs=draft_costs.FREE)
            for is_auto in (False, True)
        )
        assert plain.trees.token_N.tolist() == auto.trees.token_N.tolist()
        assert plain.trees.weight_N.tolist() == auto.trees.weight_N.tolist()


# ---- scores


def test_target_only_children_are_the_most_likely_with_weight_q():
    logits = log_law(3, [(t,) for t in range(V)])
    params = SamplingBatch.stack([SamplingSettings(temperature=0.7, seed=1)] * V)
    scores = score(logits, params, np.full(V, Rule.TARGET_ONLY), np.arange(V), 3, DraftVocabulary(target_size=V))
    q = (logits / 0.7).softmax(-1).topk(3)
    assert scores.token_FK.tolist() == q.indices.tolist()
    np.testing.assert_allclose(scores.weight_FK, q.values, rtol=1e-5)
    assert set(scores.kind_F) == {NodeKind.DETERMINISTIC}


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.TARGET_ONLY])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_candidates_with_all_mass_score_like_their_logits(rule, temperature):
    log_q = log_law(4, [(t,) for t in range(V)])
    params = SamplingBatch.stack([SamplingSettings(temperature=temperature, seed=9)] * V)
    order = log_q.argsort(dim=-1, descending=True)
    listed = NgramCandidates(order.numpy(), log_q.log_softmax(-1).gather(-1, order).numpy())
    args = (params, np.full(V, rule), np.arange(V), 4, DraftVocabulary(target_size=V))
    dense, sparse = score(log_q, *args), score(listed, *args)
    assert dense.token_FK.tolist() == sparse.token_FK.tolist() and dense.kind_F.tolist() == sparse.kind_F.tolist()
    np.testing.assert_allclose(dense.prob_FK, sparse.prob_FK, rtol=1e-4)
    np.testing.assert_allclose(dense.weight_FK, sparse.weight_FK, rtol=1e-3, atol=1e-6)


def test_a_candidates_weight_is_at_most_its_probability():
    listed = NgramCandidates(np.array([[4, 2, 0]]), np.log(np.array([[0.3, 0.1, 0.0]]) + 1e-30).astype(np.float32))
    params = SamplingBatch.stack([SamplingSettings(temperature=1.0, seed=9)])
    scores = score(listed, params, np.array([Rule.COUPLED]), np.array([5]), 3, DraftVocabulary(target_size=V))
    assert scores.weight_FK.sum() == pytest.approx(0.4, rel=1e-4)


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.TARGET_ONLY])
def test_the_min_threshold_of_lookup_ignores_the_noise(rule):
    listed = NgramCandidates(np.array([[4, 2, 0]] * 20), np.log([[0.3, 0.2, 0.1]] * 20).astype(np.float32))
    params = SamplingBatch.stack([SamplingSettings(temperature=1.0, seed=seed) for seed in range(20)])
    scores = score(listed, params, np.full(20, rule), np.full(20, 5), 3, DraftVocabulary(target_size=V))
    assert len(set(scores.token_FK[:, 0].tolist())) == (3 if rule == Rule.COUPLED else 1)
    np.testing.assert_allclose(scores.top_prob_F, 0.3, rtol=1e-5)
    by_token = {4: 0.3, 2: 0.2, 0: 0.1}
    np.testing.assert_allclose(
        scores.prob_FK, [[by_token[t] for t in row] for row in scores.token_FK.tolist()], rtol=1e-5
    )
