"""Logits -> the processed target distribution: the one definition that drafter and verifier share.

Order: temperature, min-p, top-k, top-p (as vLLM). Every cut is a threshold on values, so equal logits share their
fate and no result depends on sort order. Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from workers.sampling.gumbel_cache import GumbelCache
from workers.types import SamplingBatch

ThresholdKernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`Kernels.truncation_threshold`."""

_LISTED, _GROWTH = 32, 8
"""Among how many of its largest logits a row's cut is sought first, and among how many times as many next."""


def process_logits(logits_RV: Tensor, params: SamplingBatch) -> Tensor:
    """Log-probabilities up to a constant, float32, with -inf where the request's parameters forbid a token.

    Rows with temperature 0 keep their raw logits: the target takes their argmax, the drafter reads them at
    temperature 1. `params` has one entry per row.
    """
    needs = params.needs
    if not needs.is_sampled:
        return logits_RV.float()
    return process_logits_static(logits_RV, params, has_min_p=needs.min_p, has_top=needs.top)


def truncation_threshold(x_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Return the smallest value of each row that top-k and then top-p keep, see `Kernels.truncation_threshold`.

    Few logits are kept as a rule, so the largest are listed, more of them for rows whose cut lies deeper: sorting rows
    of 128,256 takes ten to fifty times as long. A row's cut does not depend on the rows beside it.
    """
    threshold_R = _threshold_among(x_RV, top_k_R.cpu().numpy(), top_p_R.cpu().numpy(), _LISTED)
    return torch.from_numpy(threshold_R).to(x_RV.device)


def process_logits_static(
    logits_RV: Tensor,
    params: SamplingBatch,
    *,
    has_min_p: bool,
    has_top: bool,
    threshold: ThresholdKernel = truncation_threshold,
) -> Tensor:
    """`process_logits` without a look at any value: the caller knows whether some row may have min-p, or top-k or
    top-p. Rows that have not are none the worse for it. cut: that of the kernels in use."""
    is_hot_R = params.temperature_B > 0
    x = logits_RV.float() / torch.where(is_hot_R, params.temperature_B, 1.0)[:, None]
    if has_min_p:
        x.masked_fill_(x < (x.amax(-1, keepdim=True) + _min_p_offset(params)[:, None]), -torch.inf)
    if has_top:
        top_k_R, top_p_R = torch.where(is_hot_R, params.top_k_B, 0), torch.where(is_hot_R, params.top_p_B, 1.0)
        x.masked_fill_(x < threshold(x, top_k_R, top_p_R)[:, None], -torch.inf)
    return x


def coupled_scores(
    processed_RV: Tensor, params: SamplingBatch, index_R: Tensor, start: int = 0, noise: GumbelCache | None = None
) -> Tensor:
    """log p + G per token: its argmax is a draw from p (Gumbel-max); temperature-0 rows get no noise.

    index_R: index of the token each row draws. start: first target id of this vocabulary shard. noise: what keeps G
    of these ids from one step to the next.
    """
    if not params.needs.is_sampled:
        return processed_RV
    if noise is None:
        noise = GumbelCache(start, start + processed_RV.shape[-1])
    G_RV = noise.rows(params.seed_B.tolist(), index_R.tolist(), processed_RV.device)
    # A masked token stays masked: -inf + G is -inf, G being finite.
    noisy_RV = processed_RV + G_RV
    if not params.needs.is_greedy:
        return noisy_RV
    return torch.where(params.temperature_B[:, None] > 0, noisy_RV, processed_RV)


def draw(logits_RV: Tensor, params: SamplingBatch, index_R: Tensor) -> Tensor:
    """The target's own token per row, int64 [R]: a function of (logits, parameters, seed, index) alone."""
    return coupled_scores(process_logits(logits_RV, params), params, index_R).argmax(-1)


def shard_best(
    logits_RV: Tensor,
    params: SamplingBatch,
    index_R: Tensor,
    start: int,
    row_max_R: Tensor | None,
    noise: GumbelCache | None = None,
) -> tuple[Tensor, Tensor]:
    """One vocabulary shard's (best score [R] float32, target id [R] int64), for rows without top-k and top-p.

    The shard with the largest score holds `draw`'s token. row_max_R: each row's largest logit over *all* shards,
    needed when some row has min-p. noise: as in `coupled_scores`.
    """
    # This shard's own largest logit would cut too little.
    x = process_logits(logits_RV, params if row_max_R is None else _without_truncation(params))
    if row_max_R is not None:
        t = torch.where(params.temperature_B > 0, params.temperature_B, 1.0)
        x = x.masked_fill(x < (row_max_R / t + _min_p_offset(params))[:, None], -torch.inf)
    best = coupled_scores(x, params, index_R, start, noise).max(-1)
    return best.values, best.indices + start if start else best.indices


def of_processed(params: SamplingBatch) -> SamplingBatch:
    """What `process_logits` leaves to be done with rows that went through it: a draw, or at temperature 0 an argmax."""
    return replace(_without_truncation(params), temperature_B=(params.temperature_B > 0).float())


def _without_truncation(params: SamplingBatch) -> SamplingBatch:
    return replace(
        params,
        top_k_B=torch.zeros_like(params.top_k_B),
        top_p_B=torch.ones_like(params.top_p_B),
        min_p_B=torch.zeros_like(params.min_p_B),
    )


def _min_p_offset(params: SamplingBatch) -> Tensor:
    return torch.log(torch.where(params.temperature_B > 0, params.min_p_B, 0.0))  # log 0 = -inf: off


def _threshold_among(x_RV: Tensor, top_k_R: np.ndarray, top_p_R: np.ndarray, listed: int) -> np.ndarray:
    """`cut`, sought among so many of each row's largest, or one more than everybody's k; deeper if it is not there.

    Of what top-k leaves all is listed wherever the row is settled, ties with the k-th included. It is also settled when
    fewer are possible than are listed.
    """
    V = x_RV.shape[-1]
    listed = min(max(listed, int(top_k_R.min(initial=V)) + 1), V)
    best = x_RV.topk(listed).values
    best_RK, row_R = best.cpu().numpy(), np.arange(len(x_RV))
    has_k_R, has_p_R = top_k_R > 0, top_p_R < 1
    kth_R = best_RK[row_R, np.minimum(top_k_R, listed) - 1]
    kth_R[~has_k_R] = -np.inf
    with np.errstate(invalid="ignore"):  # rows where nothing is a number, or all is forbidden
        weight_RK = np.exp(best_RK - best_RK[:, :1], dtype=np.float64)
    weight_RK[best_RK < kth_R[:, None]] = 0
    mass_RK = weight_RK.cumsum(1)
    total_R = mass_RK[:, -1]
    if (has_p_R > has_k_R).any():
        total_R = np.where(has_k_R, total_R, (x_RV - best[:, :1]).exp_().sum(-1).cpu().numpy())
    # A token stays while the mass before it is below p. The first always stays.
    num_kept_R = (mass_RK[:, :-1] < (top_p_R * total_R)[:, None]).sum(1)
    last_R = best_RK[row_R, num_kept_R]
    threshold_R = np.where(has_p_R, last_R, kth_R)
    lowest_R = best_RK[:, -1]
    is_settled_R = (lowest_R < np.where(has_k_R, kth_R, last_R)) | np.isneginf(lowest_R) | ~(has_k_R | has_p_R)
    if listed < x_RV.shape[-1] and not is_settled_R.all():
        deeper = np.flatnonzero(~is_settled_R)
        threshold_R[deeper] = _threshold_among(x_RV[deeper], top_k_R[deeper], top_p_R[deeper], listed * _GROWTH)
    return threshold_R
