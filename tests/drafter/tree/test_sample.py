"""Children are drawn from exactly the weights on the wire, follow their distribution and depend on their keys alone."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import scipy.stats
import torch

from drafter.tree.frontier import DraftVocabulary
from drafter.tree.sample import (
    MAX_WEIGHT,
    SUPPORT,
    DrawBits,
    DrawnChildren,
    Support,
    draw_children,
    expected_survival,
    mask_fixed,
    num_children,
    quantize,
)
from drafter.tree.score import score
from tests.support import oracles
from workers.sampling.philox import Stream
from workers.settings import Rule, SamplingSettings
from workers.types import NodeKind, SamplingBatch

torch.set_num_threads(1)


def vocabulary(size: int) -> DraftVocabulary:
    return DraftVocabulary(target_size=size)


def support_of(*weights: int, rows: int = 1) -> Support:
    weight_FS = np.tile(np.array(weights, dtype=np.int64), (rows, 1))
    return Support(np.arange(100, 100 + len(weights))[None, :].repeat(rows, 0), weight_FS)


def draw(
    support: Support, count: int, num_fixed: int = 0, max_children: int | None = None, seed: int = 0
) -> DrawnChildren:
    """Draw every row under a different seed."""
    rows = len(support.id_FS)
    full = lambda value: np.full(rows, value, dtype=np.int64)  # noqa: E731
    seeds = np.arange(rows, dtype=np.int64) + seed
    bits = DrawBits.of(seeds, full(17), full(3), max_children or count)
    return draw_children(support, full(count), full(num_fixed), bits)


# ---- quantization


def test_a_draft_distribution_keeps_its_most_likely_tokens_as_integers():
    log_q_FV = torch.randn(6, 700, generator=torch.Generator().manual_seed(0))
    support = quantize(log_q_FV, vocabulary(700))
    q_FV = log_q_FV.double().softmax(-1).numpy()
    assert support.id_FS.shape == support.weight_FS.shape == (6, SUPPORT)
    assert (support.weight_FS[:, 0] == MAX_WEIGHT).all() and (np.diff(support.weight_FS) <= 0).all()
    for ids, weights, q in zip(support.id_FS, support.weight_FS, q_FV, strict=True):
        assert set(ids) == set(np.argsort(-q)[:SUPPORT])
        np.testing.assert_allclose(weights / MAX_WEIGHT, q[ids] / q.max(), atol=0.6 / MAX_WEIGHT)


def test_tokens_that_round_to_weight_zero_are_dropped():
    log_q_FV = torch.tensor([[0.0, -1.0, -30.0, -40.0], [0.0, -1.0, -2.0, -30.0]])
    assert quantize(log_q_FV, vocabulary(4)).weight_FS.tolist() == [[65535, 24109, 0], [65535, 24109, 8869]]


def test_tokens_that_round_to_weight_one_are_kept():
    ratios = torch.tensor([[1.0, 1.4 / MAX_WEIGHT, 0.6 / MAX_WEIGHT, 0.4 / MAX_WEIGHT]])
    assert quantize(ratios.log(), vocabulary(4)).weight_FS.tolist() == [[MAX_WEIGHT, 1, 1]]


def test_supports_of_a_reduced_vocabulary_hold_target_ids():
    vocab = DraftVocabulary(target_size=90, target_ids=torch.tensor([8, 3, 77]))
    support = quantize(torch.tensor([[0.0, 2.0, 1.0]]), vocab)
    assert support.id_FS.tolist() == [[3, 77, 8]]


def test_equal_weights_are_sorted_by_target_id():
    vocab = DraftVocabulary(target_size=90, target_ids=torch.tensor([50, 40, 30, 20]))
    assert quantize(torch.tensor([[1.0, 2.0, 1.0, 1.0]]), vocab).id_FS.tolist() == [[40, 20, 30, 50]]


def test_the_last_bit_of_a_probability_may_change_drawn_children():
    """So under `rejection` a seed promises no tokens: products of another batch round differently. Here a weight rounds
    to 11 instead of 10, which puts it in front of 400 weights of 10, and a draw among these hits a neighbour."""
    half, rows = torch.tensor(10.5 / MAX_WEIGHT).log(), 2000
    tokens = []
    for limit in (-torch.inf, torch.inf):
        log_q_V = torch.cat(
            [torch.zeros(1), torch.full((400,), 10 / MAX_WEIGHT).log(), half.nextafter(torch.tensor(limit))[None]]
        )
        support = quantize(log_q_V.tile(rows, 1), vocabulary(402))
        tokens.append(np.take_along_axis(support.id_FS, draw(support, 1).column_FK, axis=1))
    assert 0.02 < (tokens[0] != tokens[1]).mean() < 0.2


def test_masked_and_nan_rows_have_no_support():
    inf, nan = torch.inf, torch.nan
    support = quantize(
        torch.tensor([[0.0, -inf, -1.0, -inf], [-inf] * 4, [nan] * 4, [0.0, -30.0, -inf, 0.0]]), vocabulary(4)
    )
    assert num_children(support).tolist() == [2, 0, 0, 2]
    assert draw(support, 3).column_FK.tolist()[1:3] == [[-1] * 3] * 2


# ---- drawing


def test_draws_follow_the_integer_law_without_replacement():
    weights, num = np.array([9, 5, 3, 2, 1]), 40000
    first, second = draw(support_of(*weights, rows=num), 2).column_FK.T
    assert scipy.stats.chisquare(np.bincount(first, minlength=5), weights / 20 * num).pvalue > 1e-3
    for i, rest in enumerate(20 - weights):
        after = second[first == i]
        law = np.where(np.arange(5) == i, 0, weights) / rest
        count = np.bincount(after, minlength=5)
        assert count[i] == 0
        kept = np.arange(5) != i
        assert scipy.stats.chisquare(count[kept], law[kept] * len(after)).pvalue > 1e-3


def test_hybrid_nodes_draw_from_what_their_fixed_children_leave():
    weights, num = np.array([9, 5, 3, 2, 1]), 20000
    children = draw(support_of(*weights, rows=num), 3, num_fixed=2)
    assert (children.column_FK[:, :2] == [0, 1]).all()
    assert children.kind_FK[0].tolist() == [NodeKind.DETERMINISTIC, NodeKind.DETERMINISTIC, NodeKind.SAMPLED]
    count = np.bincount(children.column_FK[:, 2], minlength=5)
    assert count[:2].tolist() == [0, 0]
    assert scipy.stats.chisquare(count[2:], weights[2:] / 6 * num).pvalue > 1e-3


@pytest.mark.parametrize("num_fixed", [0, 1, 4])
def test_the_draws_are_the_integer_inverse_cdf_of_the_weights_on_the_wire(num_fixed):
    support = quantize(torch.randn(50, 300, generator=torch.Generator().manual_seed(1)) * 2, vocabulary(300))
    children = draw(support, 8, num_fixed)
    told = mask_fixed(support, np.full(50, num_fixed))
    for seed, (weights, places) in enumerate(zip(told.tolist(), children.column_FK.tolist(), strict=True)):
        for k in range(num_fixed, 8):
            words = oracles.philox((seed, 0), (k, 17, 3, Stream.DRAFT))
            r = (words[0] << 32 | words[1]) * sum(weights) >> 64
            edges = [0, *np.cumsum(weights).tolist()]
            assert [i for i, (low, high) in enumerate(pairwise(edges)) if low <= r < high] == [places[k]]
            weights[places[k]] = 0


def test_more_draws_begin_with_the_same_ones():
    support = quantize(torch.randn(40, 30, generator=torch.Generator().manual_seed(2)), vocabulary(30))
    most = draw(support, 8).column_FK
    for count in range(1, 8):
        fewer = draw(support, count, max_children=8).column_FK
        assert (fewer[:, :count] == most[:, :count]).all() and (fewer[:, count:] == -1).all()


def test_children_end_where_the_weight_runs_out():
    places = draw(support_of(3, 1, 0, 0), 4, num_fixed=1).column_FK
    assert places.tolist() == [[0, 1, -1, -1]]
    assert draw(support_of(3, 1, 0, 0), 4, num_fixed=3).column_FK.tolist() == [[0, 1, -1, -1]]
    assert sorted(draw(support_of(3, 1, 0), 3).column_FK[0].tolist()) == [-1, 0, 1]


def test_a_node_draws_alone_what_it_draws_in_a_batch():
    support = quantize(torch.randn(20, 100, generator=torch.Generator().manual_seed(3)), vocabulary(100))
    together = draw(support, 4).column_FK
    for f in range(20):
        one = Support(support.id_FS[f : f + 1], support.weight_FS[f : f + 1])
        assert (draw(one, 4, seed=f).column_FK == together[f : f + 1]).all()


@pytest.mark.parametrize("changed", ["seed", "root position", "row"])
def test_draws_under_different_keys_are_independent(changed):
    num = 20000
    keys = {"seed": np.arange(num), "root position": np.full(num, 8), "row": np.full(num, 2)}
    support, one = support_of(1, 1, rows=num), np.ones(num, dtype=np.int64)
    a, b = (
        draw_children(support, one, 0 * one, DrawBits.of(*each.values(), 1)).column_FK[:, 0]
        for each in (keys, keys | {changed: keys[changed] + num})
    )
    assert scipy.stats.chisquare(np.bincount(2 * a + b, minlength=4)).pvalue > 1e-3


def test_no_global_generator_is_touched():
    torch_before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    draw(quantize(torch.zeros(3, 10), vocabulary(10)), 3)
    assert torch.equal(torch.random.get_rng_state(), torch_before)
    assert (np.random.get_state()[1] == numpy_before).all()


# ---- the expected survival of a child before it is drawn


def test_survival_falls_and_sums_to_at_most_one():
    for scale, temperature in product((0.1, 1.0, 3.0, 10.0), (0.01, 0.3, 0.5, 1.0, 2.0)):
        log_q_FV = torch.randn(50, 200, generator=torch.Generator().manual_seed(4)) * scale
        survival = expected_survival(quantize(log_q_FV, vocabulary(200)), np.full(50, temperature), 8)
        assert survival.dtype == np.float32 and survival.shape == (50, 8)
        assert (np.diff(survival) <= 0).all() and (survival >= 0).all() and (survival.sum(-1) <= 1 + 1e-6).all()


@pytest.mark.parametrize(("temperature", "warmth"), [(0.1, 0.4), (0.28, 0.4), (0.49, 0.7), (0.7, 1.0), (2.0, 1.0)])
def test_survival_follows_its_formula(temperature, warmth):
    weights = np.array([6, 3, 1])
    q = weights / weights.sum()
    entropy = -(q * np.log(q)).sum()
    floor = 0.58 * np.sqrt(warmth)
    first = floor + (1 - floor) * np.exp(-0.85 * entropy / warmth)
    second = (0.12 + 0.5 * 0.6) * (1 - first)
    third = (0.12 + 0.5 * 0.6) * 0.72 * (1 - first) * (1 - (0.12 + 0.5 * 0.6))
    survival = expected_survival(support_of(*weights), np.array([temperature]), 3)[0]
    np.testing.assert_allclose(survival, [first, second, third], rtol=1e-5)


def test_a_child_beyond_the_support_has_weight_zero():
    survival = expected_survival(support_of(5, 2, 0, 0), np.ones(1), 6)[0]
    assert (survival[:2] > 0).all() and (survival[2:] == 0).all()


def test_a_confident_draft_expects_to_be_accepted():
    sure, lost = support_of(MAX_WEIGHT, 1), support_of(*[1] * 64)
    assert expected_survival(sure, np.ones(1), 2)[0, 0] > 0.99 > 0.6 > expected_survival(lost, np.ones(1), 2)[0, 0]


def test_equal_entropy_at_a_lower_temperature_predicts_less_acceptance():
    support = support_of(5, 2, rows=3)
    first = expected_survival(support, np.array([0.3, 0.5, 1.0]), 2)[:, 0]
    assert first[0] < first[1] < first[2]


def test_each_sampled_row_reports_its_largest_probability():
    """`min_prob` is compared with that probability."""
    logits = torch.zeros(2, 8)
    logits[1, 3] = 9.0
    params = SamplingBatch.stack([SamplingSettings(seed=1), SamplingSettings(seed=2)])
    rule_F = np.full(2, Rule.TRAVERSAL.value)
    scores = score(logits, params, rule_F, np.array([5, 5]), 3, DraftVocabulary(target_size=8))
    assert scores.top_prob_F.tolist() == pytest.approx([1 / 8, np.exp(9) / (np.exp(9) + 7)], rel=1e-5)
