"""Sampling from logits equals plain Python, in any batch and for any vocabulary shards."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import oracles
from workers.sampling.sampler import (
    draw,
    params_after_processing,
    process_logits,
    process_logits_static,
    shard_best,
    truncation_threshold,
)
from workers.settings import SamplingSettings
from workers.types import SamplingBatch

torch.set_num_threads(1)

PARAMS = st.builds(
    SamplingSettings,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 2, 5, 40]),
    top_p=st.sampled_from([1.0, 0.95, 0.62, 0.11, 1e-6]),
    min_p=st.sampled_from([0.0, 0.03, 0.37, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


def law(params: SamplingSettings, logits: list[float]) -> list[float]:
    row = process_logits(torch.tensor([logits]), SamplingBatch.stack([params]))[0]
    return row.double().softmax(-1).tolist()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.lists(PARAMS, min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
    st.integers(1, 40) | st.sampled_from([34, 300]),  # more than are listed at first
)
def test_processing_is_the_plain_rule_in_any_mixture_of_rows(params, seed, vocab):
    logits_RV = np.random.default_rng(seed).normal(scale=3, size=(len(params), vocab)).astype(np.float32)
    got_RV = process_logits(torch.from_numpy(logits_RV), SamplingBatch.stack(params)).tolist()
    for p, logits, got in zip(params, logits_RV.tolist(), got_RV, strict=True):
        expected = oracles.process(logits, p.temperature, p.top_k, p.top_p, p.min_p)
        assert [v == -math.inf for v in got] == [v == -math.inf for v in expected]
        assert got == pytest.approx(expected, rel=1e-5)


def test_equal_logits_are_kept_or_removed_together():
    assert law(SamplingSettings(top_k=2), [3.0, 1.0, 1.0, 1.0, 0.0]).count(0.0) == 1
    assert law(SamplingSettings(top_p=0.3), [1.0, 1.0, 1.0, -9.0]) == pytest.approx([1 / 3] * 3 + [0.0])
    assert law(SamplingSettings(min_p=1.0), [2.0, 2.0, 1.9]) == pytest.approx([0.5, 0.5, 0.0])
    assert law(SamplingSettings(top_k=1), [2.0, 2.0, 1.9]) == pytest.approx([0.5, 0.5, 0.0])


def test_some_rows_of_a_batch_may_keep_many_tokens():
    """Each row follows its own parameters, also if more of its logits must be searched than of earlier rows."""
    rng = np.random.default_rng(1)
    scales, num = (9.0, 0.1, 5.0, 0.05, 0.2), 400
    params = [SamplingSettings(top_p=p, top_k=k) for p, k in ((0.3, 0), (0.9, 0), (0.5, 7), (0.4, 0), (0.97, 300))]
    logits_RV = np.stack([rng.normal(scale=scale, size=num) for scale in scales]).astype(np.float32)
    got_RV = process_logits(torch.from_numpy(logits_RV), SamplingBatch.stack(params))
    for own, logits, got in zip(params, logits_RV.tolist(), got_RV.tolist(), strict=True):
        expected = oracles.process(logits, own.temperature, own.top_k, own.top_p, own.min_p)
        assert [v > -math.inf for v in got] == [v > -math.inf for v in expected]


def test_all_that_are_tied_with_the_kth_count_in_the_mass_that_top_k_leaves():
    """One token is ten times as likely as each of forty: top-k 5 keeps all, top-p .22 needs a second one."""
    logits = [math.log(10.0)] + [0.0] * 40 + [-1.0] * 19
    assert law(SamplingSettings(top_k=5, top_p=0.22), logits) == pytest.approx([10 / 50] + [1 / 50] * 40 + [0] * 19)
    assert law(SamplingSettings(top_k=5, top_p=0.19), logits) == pytest.approx([1] + [0] * 59)


def test_top_p_counts_the_mass_that_top_k_left():
    # Of .4 .3 .2 .1, top-k 2 leaves 4/7 and 3/7: top-p .5 is reached by the first alone.
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert law(SamplingSettings(top_k=2, top_p=0.5), logits) == pytest.approx([1, 0, 0, 0])
    assert law(SamplingSettings(top_p=0.5), logits) == pytest.approx([4 / 7, 3 / 7, 0, 0])


def test_min_p_is_read_after_the_temperature():
    logits = [0.0, math.log(0.5)]  # at temperature 2 the ratio is .71
    assert law(SamplingSettings(min_p=0.6), logits)[1] == 0
    assert law(SamplingSettings(min_p=0.6, temperature=2.0), logits)[1] > 0


def test_greedy_rows_keep_their_raw_logits():
    greedy = SamplingSettings(temperature=0.0, top_k=1, top_p=0.1, min_p=0.9)
    logits_RV = torch.randn(2, 20, generator=torch.Generator().manual_seed(1))
    params = SamplingBatch.stack([greedy, SamplingSettings(top_k=3, top_p=0.9, min_p=0.1)])
    assert torch.equal(process_logits(logits_RV, params)[0], logits_RV[0])
    assert draw(logits_RV, params, torch.tensor([4, 4]))[0] == logits_RV[0].argmax()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(PARAMS, min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_a_row_draws_the_same_token_alone_and_in_a_batch(params, seed):
    rng = np.random.default_rng(seed)
    logits_RV = torch.from_numpy(rng.normal(scale=2, size=(len(params), 37)).astype(np.float32))
    index_R = torch.from_numpy(rng.integers(0, 5000, size=len(params)))
    together = draw(logits_RV, SamplingBatch.stack(params), index_R).tolist()
    alone = [
        draw(logits_RV[i : i + 1], SamplingBatch.stack([p]), index_R[i : i + 1]).item() for i, p in enumerate(params)
    ]
    assert together == alone


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(PARAMS, min_size=1, max_size=4),
    st.lists(st.integers(1, 52), max_size=4, unique=True),
    st.integers(0, 2**32 - 1),
)
def test_the_best_shard_holds_the_drawn_token_for_any_shards(params, cuts, seed):
    params = [SamplingSettings(temperature=p.temperature, min_p=p.min_p, seed=p.seed) for p in params]
    rng = np.random.default_rng(seed)
    logits_RV = torch.from_numpy(rng.normal(scale=2, size=(len(params), 53)).astype(np.float32))
    batch, index_R = SamplingBatch.stack(params), torch.from_numpy(rng.integers(0, 5000, size=len(params)))
    assert not batch.needs.top
    edges = [0, *sorted(cuts), 53]
    best = [shard_best(logits_RV[:, a:b], batch, index_R, a, logits_RV.amax(-1)) for a, b in itertools.pairwise(edges)]
    winner = torch.stack([score for score, _ in best]).argmax(0)
    ids = torch.stack([id for _, id in best]).gather(0, winner[None])[0]
    assert torch.equal(ids, draw(logits_RV, batch, index_R))


def test_only_sampled_rows_with_top_k_or_top_p_need_whole_rows():
    def needs(*params: SamplingSettings) -> bool:
        return SamplingBatch.stack(list(params)).needs.top

    assert needs(SamplingSettings(), SamplingSettings(top_k=5)) and needs(SamplingSettings(top_p=0.9))
    assert not needs(SamplingSettings(temperature=0, top_k=5, top_p=0.5), SamplingSettings(min_p=0.5))


@pytest.mark.parametrize(
    "params",
    [
        SamplingSettings(seed=1),
        SamplingSettings(seed=2, temperature=0.6),
        SamplingSettings(seed=3, top_k=7),
        SamplingSettings(seed=4, top_p=0.8),
        SamplingSettings(seed=5, min_p=0.1, temperature=1.4),
        SamplingSettings(seed=2**64 - 1, temperature=0.9, top_k=20, top_p=0.9, min_p=0.02),
    ],
    ids=["plain", "temperature", "top-k", "top-p", "min-p", "all"],
)
def test_draws_over_many_indices_follow_the_processed_law(params):
    num, vocab = 20000, 30
    logits = np.random.default_rng(8).normal(scale=1.5, size=vocab)
    logits_RV = torch.tensor(logits, dtype=torch.float32).expand(num, -1)
    batch = SamplingBatch.stack([params]).rows(torch.zeros(num, dtype=torch.long))
    count = np.bincount(draw(logits_RV, batch, torch.arange(num)).numpy(), minlength=vocab)
    expected = np.array(
        oracles.softmax(oracles.process(logits.tolist(), params.temperature, params.top_k, params.top_p, params.min_p))
    )
    assert count[expected == 0].sum() == 0
    common = expected * num >= 5
    observed = [*count[common], count[~common].sum()]
    predicted = [*expected[common] * num, expected[~common].sum() * num]
    if predicted[-1] == 0:
        observed, predicted = observed[:-1], predicted[:-1]
    assert scipy.stats.chisquare(observed, np.array(predicted) * (num / sum(predicted))).pvalue > 1e-3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cuts", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}])
def test_invalid_logits_still_draw_a_token_of_the_vocabulary(temperature, cuts):
    params = SamplingBatch.stack([SamplingSettings(temperature=temperature, **cuts)])
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert 0 <= draw(torch.full((1, 9), bad), params, torch.tensor([1])).item() < 9


def test_top_p_may_leave_every_token():
    assert law(SamplingSettings(top_p=0.99), [2.0, 1.0, 0.0]).count(0.0) == 0
    assert law(SamplingSettings(top_p=0.99), [0.5, 0.5]).count(0.0) == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(PARAMS, min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_processed_rows_draw_what_their_logits_draw(params, seed):
    rng = np.random.default_rng(seed)
    logits_RV = torch.from_numpy(rng.normal(scale=2, size=(len(params), 37)).astype(np.float32))
    batch, index_R = SamplingBatch.stack(params), torch.from_numpy(rng.integers(0, 5000, size=len(params)))
    processed_RV, left = process_logits(logits_RV, batch), params_after_processing(batch)
    assert torch.equal(process_logits(processed_RV, left), processed_RV)
    assert torch.equal(draw(processed_RV, left, index_R), draw(logits_RV, batch, index_R))
    own_RV, which = logits_RV.clone(), {"has_min_p": batch.needs.min_p, "has_top": batch.needs.top}
    assert torch.equal(process_logits_static(own_RV, batch, **which, in_place=True), processed_RV)
    assert torch.equal(own_RV, processed_RV)


def test_nan_logits_are_truncated_without_a_warning(recwarn):
    broken = torch.tensor([[torch.nan] * 9, [-torch.inf] * 9, [torch.inf] * 9])
    truncation_threshold(broken, torch.tensor([3, 0, 2]), torch.tensor([1.0, 0.5, 0.5]))
    assert not recwarn.list


def test_no_rows_have_no_thresholds():
    assert truncation_threshold(torch.empty(0, 9), torch.empty(0, dtype=torch.int32), torch.empty(0)).shape == (0,)


def test_rows_with_only_top_k_or_only_top_p_may_keep_many_tokens():
    """More tokens are kept than are listed first: of 300 flat logits, 40 by top-k and about 200 by top-p."""
    logits_RV = np.random.default_rng(3).normal(size=(4, 300)).astype(np.float32)
    params = [SamplingSettings(), SamplingSettings(top_k=40), SamplingSettings(top_p=0.95), SamplingSettings(top_k=2)]
    got_RV = process_logits(torch.from_numpy(logits_RV), SamplingBatch.stack(params)).tolist()
    for own, logits, got in zip(params, logits_RV.tolist(), got_RV, strict=True):
        expected = oracles.process(logits, own.temperature, own.top_k, own.top_p, own.min_p)
        assert [v > -math.inf for v in got] == [v > -math.inf for v in expected]
