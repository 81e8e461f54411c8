"""The sampler: from logits to the processed target distribution, in one definition for drafter and verifier.

The order is temperature, min-p, top-k, top-p, as in vLLM. All truncation is by a threshold on values, so equal logits
are treated alike and no result depends on the order of a sort. Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from workers.sampling.gumbel_cache import GumbelCache
from workers.transfer import to_device, to_host
from workers.types import SamplingBatch

ThresholdKernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`Kernels.truncation_threshold`."""

_LISTED, _GROWTH = 32, 8
"""A row's threshold is searched among this many of its largest logits, and then among `_GROWTH` times as many."""


def process_logits(logits_RV: Tensor, params: SamplingBatch) -> Tensor:
    """Return float32 log probabilities up to a constant, -inf for tokens that the sampling parameters exclude.

    Rows with temperature 0 keep their raw logits: the target takes their argmax, and the drafter reads them at
    temperature 1. `params` has one entry per row.
    """
    needs = params.needs
    if not needs.is_sampled:
        return logits_RV.float()
    return process_logits_static(logits_RV, params, has_min_p=needs.min_p, has_top=needs.top)


def truncation_threshold(x_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Return the smallest value of each row that top-k and then top-p keep, see `Kernels.truncation_threshold`.

    Usually few logits are kept, so only the largest are sorted, and more of them for rows whose threshold is lower.
    Sorting whole rows of 128,256 takes ten to fifty times as long. A row's threshold does not depend on other rows.
    """
    top_k, top_p = to_host(top_k_R, top_p_R)
    threshold_R = _threshold_among(x_RV, top_k, top_p, _LISTED)
    return to_device(threshold_R, x_RV.device)


def process_logits_static(
    logits_RV: Tensor,
    params: SamplingBatch,
    *,
    has_min_p: bool,
    has_top: bool,
    threshold: ThresholdKernel = truncation_threshold,
    in_place: bool = False,
) -> Tensor:
    """`process_logits` without data-dependent control flow, as CUDA graphs need it.

    has_min_p, has_top: some row may use min-p, or top-k or top-p; other rows are unaffected. threshold: the
    `truncation_threshold` of the kernels in use. in_place: float32 logits may be overwritten.
    """
    is_hot_R = params.temperature_B > 0
    x, temperature_R1 = logits_RV.float(), torch.where(is_hot_R, params.temperature_B, 1.0)[:, None]
    x = x.div_(temperature_R1) if in_place else x / temperature_R1
    if has_min_p:
        x.masked_fill_(x < (x.amax(-1, keepdim=True) + _min_p_offset(params)[:, None]), -torch.inf)
    if has_top:
        top_k_R, top_p_R = torch.where(is_hot_R, params.top_k_B, 0), torch.where(is_hot_R, params.top_p_B, 1.0)
        x.masked_fill_(x < threshold(x, top_k_R, top_p_R)[:, None], -torch.inf)
    return x


def coupled_scores(
    processed_RV: Tensor, params: SamplingBatch, index_R: Tensor, start: int = 0, noise: GumbelCache | None = None
) -> Tensor:
    """Return log p + G per token, whose argmax is a sample from p (Gumbel-max). Temperature-0 rows get no noise.

    index_R: position of the token that each row draws. start: first target id of this vocabulary shard. noise: cache of
    G for these ids.
    """
    if not params.needs.is_sampled:
        return processed_RV
    if noise is None:
        noise = GumbelCache(start, start + processed_RV.shape[-1])
    seeds, indices = (column.tolist() for column in to_host(params.seed_B, index_R))
    G_RV = noise.rows(seeds, indices, processed_RV.device)
    # A masked token stays masked, because G is finite.
    noisy_RV = processed_RV + G_RV
    if not params.needs.is_greedy:
        return noisy_RV
    return torch.where(params.temperature_B[:, None] > 0, noisy_RV, processed_RV)


def draw(logits_RV: Tensor, params: SamplingBatch, index_R: Tensor) -> Tensor:
    """Draw the target's token of each row, int64 [R]. It depends only on logits, parameters, seed and index."""
    return coupled_scores(process_logits(logits_RV, params), params, index_R).argmax(-1)


def shard_best(
    logits_RV: Tensor,
    params: SamplingBatch,
    index_R: Tensor,
    start: int,
    row_max_R: Tensor | None,
    noise: GumbelCache | None = None,
) -> tuple[Tensor, Tensor]:
    """Return a vocabulary shard's (best score [R] float32, target id [R] int64), for rows without top-k and top-p.

    The shard with the largest score holds `draw`'s token. row_max_R: each row's largest logit over *all* shards, needed
    if some row has min-p. noise: as in `coupled_scores`.
    """
    # With the shard's own largest logit, min-p would remove too little.
    x = process_logits(logits_RV, params if row_max_R is None else _without_truncation(params))
    if row_max_R is not None:
        t = torch.where(params.temperature_B > 0, params.temperature_B, 1.0)
        x = x.masked_fill(x < (row_max_R / t + _min_p_offset(params))[:, None], -torch.inf)
    best = coupled_scores(x, params, index_R, start, noise).max(-1)
    return best.values, best.indices + start if start else best.indices


def params_after_processing(params: SamplingBatch) -> SamplingBatch:
    """Return the parameters of rows that `process_logits` has processed: a plain draw, or argmax at temperature 0."""
    return replace(_without_truncation(params), temperature_B=(params.temperature_B > 0).float())


def _without_truncation(params: SamplingBatch) -> SamplingBatch:
    return replace(
        params,
        top_k_B=torch.zeros_like(params.top_k_B),
        top_p_B=torch.ones_like(params.top_p_B),
        min_p_B=torch.zeros_like(params.min_p_B),
    )


def _min_p_offset(params: SamplingBatch) -> Tensor:
    return torch.log(torch.where(params.temperature_B > 0, params.min_p_B, 0.0))  # log 0 = -inf disables it


def _threshold_among(x_RV: Tensor, top_k_R: np.ndarray, top_p_R: np.ndarray, listed: int) -> np.ndarray:
    """Search each row's threshold among its `listed` largest logits (at least one more than the smallest k).

    A row is settled if all tokens that top-k keeps are listed, ties with the k-th included, or if fewer tokens are
    possible than are listed. The other rows are searched again among more logits.
    """
    V = x_RV.shape[-1]
    listed = min(max(listed, int(top_k_R.min(initial=V)) + 1), V)
    best = x_RV.topk(listed).values
    (best_RK,), row_R = to_host(best), np.arange(len(x_RV))
    has_k_R, has_p_R = top_k_R > 0, top_p_R < 1
    kth_R = best_RK[row_R, np.minimum(top_k_R, listed) - 1]
    kth_R[~has_k_R] = -np.inf
    with np.errstate(invalid="ignore"):  # rows of NaN, or with every token masked
        weight_RK = np.exp(best_RK - best_RK[:, :1], dtype=np.float64)
    weight_RK[best_RK < kth_R[:, None]] = 0
    mass_RK = weight_RK.cumsum(1)
    total_R = mass_RK[:, -1]
    if (has_p_R > has_k_R).any():
        (whole_R,) = to_host((x_RV - best[:, :1]).exp_().sum(-1))
        total_R = np.where(has_k_R, total_R, whole_R)
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
