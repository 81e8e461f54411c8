"""Ratio tests with real noise: distributions by chi-square, sparse arithmetic by a dense oracle, batches."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import scipy.stats
import torch

import verifier.acceptance.coupled
import verifier.acceptance.rejection
from drafter.tree.sample import DrawBits, Support, draw_children
from tests.support import oracles
from tests.support.oracles import Path
from tests.support.sampled_trees import CHAIN, FIXED, TREE, Drafted, draft, pack
from tests.support.verdicts import accept
from verifier.acceptance.coupled import walk
from verifier.acceptance.rejection import Residual, RowLaw, Tree, accept_rejection, decide
from workers.sampling.philox import Stream, uniform
from workers.sampling.sampler import process_logits
from workers.settings import Rule, SamplingSettings
from workers.types import NodeKind, SamplingBatch, Verdict

torch.set_num_threads(1)

RULES = [Rule.TRAVERSAL, Rule.RECURSIVE]


def judge(
    each: list[Drafted],
    logits_NV: torch.Tensor,
    params: list[SamplingSettings],
    root_positions: list[int],
    rules: list[Rule],
    with_probs: bool = True,
) -> list[Verdict]:
    trees, probs = pack(each)
    batch = SamplingBatch.stack(params)
    rows = torch.arange(len(each)).repeat_interleave(trees.offsets.diff())
    processed_NV = process_logits(logits_NV, batch.rows(rows))
    return accept_rejection(trees, processed_NV, batch, np.array(root_positions), probs if with_probs else None, rules)


# ---- the law, on real noise


@cache
def small_p(last: int) -> np.ndarray:
    return np.random.default_rng([last, 1]).dirichlet(np.full(4, 1.5))


@cache
def small_q(last: int) -> np.ndarray:
    return np.random.default_rng([last, 2]).integers(1, 9, size=4)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_fixed", [0, 1])
def test_text_follows_the_targets_law_over_several_rounds(num_fixed, rule):
    """Requests that differ by seed alone; in each round the root has two children with one child each."""
    num, length = 10000, 3
    support = Support(
        np.stack([np.lexsort((np.arange(4), -small_q(t))) for t in range(4)]),
        -np.sort(-np.stack([small_q(t) for t in range(4)]), axis=1),
    )

    def children(of: np.ndarray, seeds: np.ndarray, roots: np.ndarray, row: int, count: int, fixed: int) -> np.ndarray:
        own, one = Support(support.id_FS[of], support.weight_FS[of]), np.ones(len(of), dtype=np.int64)
        places = draw_children(own, count * one, fixed * one, DrawBits.of(seeds, roots, row * one, count)).column_FK
        return np.take_along_axis(own.id_FS, places, 1)

    def weights_below(token: int, fixed: int) -> np.ndarray:
        weight = small_q(token).copy()
        weight[support.id_FS[token, :fixed]] = 0
        return weight

    texts: list[Path] = [(0,)] * num
    while open_ := [i for i, text in enumerate(texts) if len(text) <= length]:
        roots, seeds = np.array([len(texts[i]) - 1 for i in open_]), np.array(open_) * 7919
        last = np.array([texts[i][-1] for i in open_])
        firsts = children(last, seeds, roots, 0, 2, num_fixed)
        seconds = np.stack([children(firsts[:, r], seeds, roots, r + 1, 1, 0)[:, 0] for r in (0, 1)], axis=1)
        kinds = [NodeKind.ROOT, NodeKind.DETERMINISTIC if num_fixed else NodeKind.SAMPLED, *[NodeKind.SAMPLED] * 3]
        each = []
        for root, pair, below in zip(last.tolist(), firsts.tolist(), seconds.tolist(), strict=True):
            weights = [weights_below(root, num_fixed), *(weights_below(t, 0) for t in pair), *[0 * small_q(0)] * 2]
            each.append(Drafted([-1, 0, 0, 1, 2], [root, *pair, *below], list(kinds), weights))
        logits_NV = torch.tensor(np.log(np.stack([small_p(t) for tree in each for t in tree.tokens])))
        params = [SamplingSettings(seed=int(seed)) for seed in seeds]
        for i, verdict in zip(open_, judge(each, logits_NV, params, roots.tolist(), [rule] * len(each)), strict=True):
            texts[i] += verdict.tokens
    law = oracles.product_law(lambda prefix: small_p(prefix[-1] if prefix else 0), length)
    outcomes = sorted(law, key=lambda x: law[x])
    count = {x: 0 for x in outcomes}
    for text in texts:
        count[text[1 : 1 + length]] += 1
    # Outcomes expected less than ten times are one.
    rare = [x for x in outcomes if law[x] * num < 10]
    observed = [sum(count[x] for x in rare), *(count[x] for x in outcomes[len(rare) :])]
    expected = [sum(law[x] for x in rare) * num, *(law[x] * num for x in outcomes[len(rare) :])]
    assert scipy.stats.chisquare(observed, np.array(expected) * num / sum(expected)).pvalue > 1e-3


def test_the_token_after_a_rejection_follows_the_residual():
    """One fixed child with probability 0.5: half of the requests reject it and draw from the residual."""
    num, p = 20000, np.array([0.5, 0.2, 0.05, 0.15, 0.1])
    each = [Drafted([-1, 0], [0, 0], [NodeKind.ROOT, NodeKind.DETERMINISTIC], [np.zeros(5, dtype=np.int64)] * 2)] * num
    logits = torch.tensor(np.log(p)).expand(2 * num, -1)
    verdicts = judge(each, logits, [SamplingSettings(seed=i) for i in range(num)], [4] * num, [Rule.RECURSIVE] * num)
    rest = np.bincount([v.tokens[0] for v in verdicts if not v.path], minlength=5)
    assert rest[0] == 0
    assert scipy.stats.chisquare(rest[1:], p[1:] / 0.5 * rest.sum()).pvalue > 1e-3
    assert scipy.stats.binomtest(int(rest.sum()), num, 0.5).pvalue > 1e-3


def test_last_tokens_of_different_rounds_and_rows_are_independent():
    num, p = 5000, np.array([0.4, 0.3, 0.2, 0.1])
    params = [SamplingSettings(seed=i) for i in range(num)]
    weights = [np.zeros(4, dtype=np.int64)] * 2
    bare = [Drafted([-1], [0], [NodeKind.ROOT], weights[:1])] * num
    # A fixed child that is always accepted: the last token is drawn at row 1.
    deeper = [Drafted([-1, 0], [0, 0], [NodeKind.ROOT, NodeKind.DETERMINISTIC], weights)] * num
    log_p, sure = torch.tensor(np.log(p)), torch.tensor([0.0, *[-torch.inf] * 3])
    rules = [Rule.TRAVERSAL] * num
    draws = [
        np.array([v.bonus_token for v in judge(bare, log_p.expand(num, -1), params, [position] * num, rules)])
        for position in (3, 4)
    ]
    rows = torch.stack([sure, log_p]).repeat(num, 1)
    draws.append(np.array([v.bonus_token for v in judge(deeper, rows, params, [3] * num, rules)]))
    for i, j in ((0, 1), (0, 2), (1, 2)):
        count = np.bincount(4 * draws[i] + draws[j], minlength=16)
        assert scipy.stats.chisquare(count, np.outer(p, p).ravel() * num).pvalue > 1e-3


def test_the_last_token_is_where_a_uniform_of_its_own_row_falls():
    p = torch.tensor([0.1, 0.0, 0.4, 0.3, 0.2])
    # A fixed child that is always accepted, so that the last token is drawn at row 1.
    tree = Drafted([-1, 0], [0, 2], [NodeKind.ROOT, NodeKind.DETERMINISTIC], [np.zeros(5, dtype=np.int64)] * 2)
    logits = torch.stack([torch.tensor([0, 0, 1.0, 0, 0]), p]).log()
    for seed in range(200):
        (verdict,) = judge([tree], logits, [SamplingSettings(seed=seed)], [7], [Rule.TRAVERSAL])
        u = uniform(seed, 7, 1, 0, Stream.RESIDUAL)
        heaviest_first = [2, 3, 4, 0]
        place = int(np.searchsorted(np.cumsum([0.4, 0.3, 0.2, 0.1]), u, side="right"))
        assert verdict.tokens == (2, heaviest_first[place])


def test_last_tokens_are_drawn_from_touched_ids_and_the_scaled_rest():
    log_p = torch.tensor([0.1, 0.2, 0.4, 0.3, 0.0]).log()
    touched = Residual(np.array([9, 2, 0]), np.array([0.0, 0.0, 0.25]), 1.5)  # ids of another vocabulary count nothing
    most = 1 - 2.0**-53
    u = [0.0, 0.249, 0.251, 0.549, 0.551, most]
    assert verifier.acceptance.rejection._draw_residual([touched] * 6, log_p.expand(6, -1), u) == [0, 0, 1, 1, 3, 3]
    nothing = Residual(np.array([0, 1, 2, 3]), np.zeros(4), 1.0)
    untouched = Residual(np.array([], dtype=np.int64), np.array([]), 1.0)
    drawn = verifier.acceptance.rejection._draw_residual(
        [nothing, untouched, touched], log_p.expand(3, -1), [0.31, 0.09, most]
    )
    assert drawn == [2, 2, 3]
    rest = Residual(np.array([2]), np.zeros(1), 1.0)  # nothing is left of id 2, and 0 is where its mass would begin
    assert verifier.acceptance.rejection._draw_residual([rest], log_p[None], [0.0]) == [3]


def test_rounding_of_a_likely_token_hardly_moves_the_edges_between_unlikely_ones():
    """Two likely tokens with 1,000 between them that have a hundredth of the mass: told by id, an error of the first
    would move each draw among the 1,000 to another."""
    rng, num_draws = np.random.default_rng(0), 4000
    u = rng.random(num_draws).tolist()
    laws = [Residual(np.array([], dtype=np.int64), np.array([]), 1.0)] * num_draws
    drawn = []
    for error in (0.0, 1e-4):
        mass = torch.tensor([0.5 * (1 + error), *[1e-5] * 1000, 0.49], dtype=torch.float64)
        drawn.append(verifier.acceptance.rejection._draw_residual(laws, mass.log().expand(num_draws, -1), u))
    assert sum(0 < token < 1001 for token in drawn[0]) > 20
    assert sum(a != b for a, b in zip(*drawn, strict=True)) < 10


# ---- the arithmetic


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("counts", [CHAIN, TREE, FIXED], ids=["chain", "tree", "fixed"])
def test_sixty_four_weights_and_a_scale_represent_whole_distributions(counts, rule):
    vocab = 40
    for case in range(40):
        rng = np.random.default_rng([case, rule])
        tree = draft(rng, vocab, counts, seed=case, root_position=3)
        p_rows = rng.dirichlet(np.full(vocab, 0.3), size=len(tree.parents))
        p_rows[:, rng.integers(vocab)] = 0
        p_rows /= p_rows.sum(1, keepdims=True)
        uniforms = rng.random(len(tree.parents)) ** 2

        def law(row: int, tree: Drafted = tree, p_rows: np.ndarray = p_rows) -> RowLaw:
            fixed = [t for t, p, k in zip(*tree[1::-1], tree.kinds, strict=True) if p == row and k != NodeKind.SAMPLED]
            ids = np.concatenate([np.flatnonzero(tree.weights[row]), np.array(fixed, dtype=np.int64)])
            return RowLaw(ids, p_rows[row][ids], tree.weights[row][ids])

        coin = lambda row, chance, uniforms=uniforms: bool(uniforms[row] < chance)  # noqa: E731
        decision = decide(Tree(tree.parents, tree.tokens, tree.kinds), law, rule, coin)
        path, expected = oracles.reject(*tree[:3], p_rows.tolist(), tree.weights, rule, uniforms.tolist())  # type: ignore[arg-type]
        assert decision.path == path
        dense = decision.residual.scale * p_rows[decision.final_row]
        dense[decision.residual.id_E] = decision.residual.prob_E
        np.testing.assert_allclose(dense, expected, atol=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_a_rejection_by_rounding_still_leaves_a_distribution(rule):
    # The draft is the target: every ratio is 1 and nothing is left over, but these coins say no.
    law = RowLaw(np.arange(3), np.array([0.5, 0.25, 0.25]), np.array([2, 1, 1]))
    tree = Tree([-1, 0, 0], [9, 0, 2], [NodeKind.ROOT, NodeKind.SAMPLED, NodeKind.SAMPLED])
    decision = decide(tree, lambda row: law, rule, lambda row, chance: False)
    assert decision.path == () and decision.residual.prob_E.sum() == pytest.approx(1)


@pytest.mark.parametrize("rule", RULES)
def test_a_rejection_by_rounding_gives_a_valid_token(rule, monkeypatch):
    monkeypatch.setattr(verifier.acceptance.rejection, "_toss", lambda *_: False)
    weights = np.array([0, 0, 7, 5, 3, 0])
    tree = Drafted([-1, 0], [0, 2], [NodeKind.ROOT, NodeKind.SAMPLED], [weights, 0 * weights])
    logits = (
        torch.tensor(np.log(np.maximum(weights, 0) + 1e-30))
        .repeat(2, 1)
        .masked_fill(torch.tensor(weights == 0), -torch.inf)
    )
    for seed in range(20):
        (verdict,) = judge([tree], logits, [SamplingSettings(seed=seed)], [5], [rule])
        assert weights[verdict.bonus_token] > 0


def test_rules_without_ratio_tests_are_refused():
    with pytest.raises(ValueError, match="COUPLED"):
        decide(Tree([-1], [0], [0]), lambda row: RowLaw(*[np.zeros(0)] * 3), Rule.COUPLED, lambda row, chance: True)


def test_an_untouched_row_is_p_itself():
    decision = decide(Tree([-1], [0], [0]), lambda row: RowLaw(*[np.zeros(0)] * 3), Rule.TRAVERSAL, lambda *_: True)
    assert decision.residual == Residual(decision.residual.id_E, decision.residual.prob_E, 1.0)


# ---- temperature 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("counts", [CHAIN, TREE, FIXED], ids=["chain", "tree", "fixed"])
def test_greedy_requests_walk_along_the_argmax(counts, rule):
    vocab, each, logits = 5, [], []
    for case in range(60):
        rng = np.random.default_rng([case, 5])
        each.append(draft(rng, vocab, counts, seed=case, root_position=case))
        logits.append(torch.tensor(rng.normal(size=(len(each[-1].parents), vocab))).float())
    logits_NV = torch.cat(logits)
    verdicts = judge(each, logits_NV, [SamplingSettings(temperature=0.0)] * 60, list(range(60)), [rule] * 60)
    assert verdicts == walk(pack(each)[0], logits_NV.argmax(-1).tolist())
    assert max(len(verdict.path) for verdict in verdicts) > 1


# ---- batches


def ragged_batch() -> tuple[list[Drafted], list[torch.Tensor], list[SamplingSettings], list[int], list[Rule]]:
    vocab, positions = 50, [3, 77, 0, 12, 400, 9, 21]
    shapes = [CHAIN, TREE, [[(0, 0)]], TREE, FIXED, [[(4, 2)]], TREE]
    params = [
        SamplingSettings(seed=1),
        SamplingSettings(temperature=0.0),
        SamplingSettings(temperature=0.8, top_k=3, seed=2),
        SamplingSettings(temperature=0.6, top_p=0.7, seed=4),
        SamplingSettings(seed=2**63 + 5),
        SamplingSettings(min_p=0.2, seed=6),
        SamplingSettings(temperature=1.5, seed=7),
    ]
    rng = np.random.default_rng(8)
    each = [
        draft(rng, vocab, shape, seed=p.seed & 0xFFFF, root_position=position)
        for shape, p, position in zip(shapes, params, positions, strict=True)
    ]
    logits = [torch.tensor(2 * rng.normal(size=(len(tree.parents), vocab))).float() for tree in each]
    return each, logits, params, positions, [RULES[i % 2] for i in range(len(each))]


def test_a_ragged_batch_gives_every_request_its_result_alone():
    each, logits, params, positions, rules = ragged_batch()
    together = judge(each, torch.cat(logits), params, positions, rules)
    for i, verdict in enumerate(together):
        assert judge([each[i]], logits[i], [params[i]], [positions[i]], [rules[i]]) == [verdict]


def test_only_legal_tokens_are_emitted():
    each, logits, params, positions, rules = ragged_batch()
    batch = SamplingBatch.stack(params)
    for shift in range(50):
        verdicts = judge(each, torch.cat(logits), params, [p + shift for p in positions], rules)
        for i, verdict in enumerate(verdicts):
            processed = process_logits(logits[i], batch.rows(torch.full((len(logits[i]),), i)))
            if params[i].temperature > 0:
                rows = (0, *verdict.path)
                assert all(processed[row, t] > -torch.inf for row, t in zip(rows, verdict.tokens, strict=True))


def test_a_verdict_counts_the_nodes_it_was_given():
    each, logits, params, positions, rules = ragged_batch()
    for tree, verdict in zip(each, judge(each, torch.cat(logits), params, positions, rules), strict=True):
        assert verdict.num_drafted == verdict.num_verified == len(tree.parents) - 1
        assert verdict.tokens[:-1] == tuple(tree.tokens[row] for row in verdict.path)


def test_fixed_drafts_need_no_draft_probabilities():
    rng = np.random.default_rng(3)
    tree = draft(rng, 20, FIXED, seed=1, root_position=5)
    logits = torch.tensor(rng.normal(size=(len(tree.parents), 20))).float()
    arguments = ([tree], logits, [SamplingSettings(seed=9)], [5], [Rule.TRAVERSAL])
    assert judge(*arguments) == judge(*arguments, with_probs=False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_placeholder_is_never_accepted(temperature):
    weights = np.zeros(6, dtype=np.int64)
    tree = Drafted([-1, 0, 1], [0, 3, -1], [NodeKind.ROOT, *[NodeKind.DETERMINISTIC] * 2], [weights] * 3)
    logits = torch.full((3, 6), -100.0)
    logits[:, 3] = 100.0
    for rule in RULES:
        (verdict,) = judge([tree], logits, [SamplingSettings(temperature=temperature)], [0], [rule])
        assert verdict.tokens == (3, 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_give_a_short_valid_answer(temperature):
    each, logits, params, positions, rules = ragged_batch()
    params = [SamplingSettings(temperature=temperature, top_p=0.9)] * len(each)
    for verdict in judge(each, torch.full_like(torch.cat(logits), torch.nan), params, positions, rules):
        assert 1 <= len(verdict.tokens) <= 5
        assert all(0 <= token < 50 for token in verdict.tokens)


def test_logits_have_one_row_per_tree_row_exactly():
    trees, probs = pack([draft(np.random.default_rng(0), 9, CHAIN, 0, 0)])
    with pytest.raises(AssertionError):
        accept_rejection(
            trees,
            torch.zeros(6, 9),
            SamplingBatch.stack([SamplingSettings()]),
            np.array([0]),
            probs,
            [Rule.TRAVERSAL],
        )


def test_coupled_drafts_are_refused():
    with pytest.raises(AssertionError, match="coupled"):
        params = SamplingBatch.stack([SamplingSettings()])
        accept_rejection(oracles.tree([-1, 0], [0, 1]), torch.zeros(2, 9), params, np.array([0]), None, RULES[:1])


def test_no_global_generator_is_touched():
    each, logits, params, positions, rules = ragged_batch()
    torch_before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    judge(each, torch.cat(logits), params, positions, rules)
    assert torch.equal(torch.random.get_rng_state(), torch_before)
    assert (np.random.get_state()[1] == numpy_before).all()


def test_each_request_of_a_mixed_batch_is_judged_by_its_own_rule():
    """In a batch of coupled and sampled requests, each gets the same result as alone."""
    each, logits, params, positions, rules = ragged_batch()
    drafted = Drafted(
        [-1, 0, 1], [0, 3, 4], [NodeKind.ROOT, *[NodeKind.COUPLED] * 2], [np.zeros(50, dtype=np.int64)] * 3
    )
    own_logits = 100 * torch.nn.functional.one_hot(torch.tensor([3, 4, 5]), 50).float()
    for place in (1, 4, len(each)):
        each.insert(place, drafted)
        logits.insert(place, own_logits)
        params.insert(place, SamplingSettings(seed=place))
        positions.insert(place, 30 + place)
        rules.insert(place, Rule.COUPLED)
    trees, probs = pack(each)
    together = accept(trees, torch.cat(logits), SamplingBatch.stack(params), torch.tensor(positions), rules, probs)
    for i, (verdict, rule) in enumerate(zip(together, rules, strict=True)):
        if rule == Rule.COUPLED:
            assert (verdict.path, verdict.tokens) == ((1, 2), (3, 4, 5))
        else:
            assert judge([each[i]], logits[i], [params[i]], [positions[i]], [rule]) == [verdict]


def test_a_batch_of_sampled_requests_alone_is_judged_too():
    each, logits, params, positions, rules = ragged_batch()
    trees, probs = pack(each)
    batch = SamplingBatch.stack(params)
    verdicts = accept(trees, torch.cat(logits), batch, torch.tensor(positions), rules, probs)
    assert verdicts == judge(each, torch.cat(logits), params, positions, rules)


@pytest.mark.parametrize("most_rows", [1, 9])
def test_a_large_batch_is_judged_in_blocks_with_the_same_verdicts(most_rows, monkeypatch):
    """Each row takes several rows of a vocabulary of float32 in memory."""
    each, logits, params, positions, rules = ragged_batch()
    trees, probs = pack(each)
    batch, sizes, judged = SamplingBatch.stack(params), trees.offsets.diff().tolist(), []

    def recorded(trees, processed_NV, *rest):
        judged.append(len(processed_NV))
        return accept_rejection(trees, processed_NV, *rest)

    monkeypatch.setattr(verifier.acceptance.coupled, "accept_rejection", recorded)
    whole = accept(trees, torch.cat(logits), batch, torch.tensor(positions), rules, probs)
    assert judged == [sum(sizes)] and sum(sizes) <= 64
    monkeypatch.setattr(verifier.acceptance.coupled, "SCORED_ROWS", most_rows)
    assert accept(trees, torch.cat(logits), batch, torch.tensor(positions), rules, probs) == whole
    assert sum(judged[1:]) == sum(sizes) and max(judged[1:]) <= max(most_rows, *sizes) and len(judged) > 4
