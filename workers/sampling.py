"""Logits -> the processed target distribution: the one definition that drafter and verifier share.

Order: temperature, min-p, top-k, top-p (as vLLM). Every cut is a threshold on values, so equal logits share their
fate and no result depends on sort order. Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from workers.noise import NoiseBook
from workers.types import SamplingBatch

MOST_SORTED = 1 << 24
"""Logits that are cut at once. It takes some 40 bytes each, beside the copies of all that `workers.memory` keeps room
for: it would be 5 GiB for 64 trees of 17 rows over 128,256 tokens."""


def process_logits(logits_RV: Tensor, params: SamplingBatch) -> Tensor:
    """Log-probabilities up to a constant, float32, with -inf where the request's parameters forbid a token.

    Rows with temperature 0 keep their raw logits: the target takes their argmax, the drafter reads them at
    temperature 1. `params` has one entry per row.
    """
    asked = params.asked
    if not asked.is_sampled:
        return logits_RV.float()
    return process_blindly(logits_RV, params, has_min_p=asked.min_p, has_top=asked.top)


def process_blindly(logits_RV: Tensor, params: SamplingBatch, *, has_min_p: bool, has_top: bool) -> Tensor:
    """`process_logits` without a look at any value: the caller knows whether some row may have min-p, or top-k or
    top-p. Rows that have not are none the worse for it."""
    sampled = params.temperature_B > 0
    x = logits_RV.float() / torch.where(sampled, params.temperature_B, 1.0)[:, None]
    if has_min_p:
        x = x.masked_fill(x < (x.amax(-1, keepdim=True) + _min_p_offset(params)[:, None]), -torch.inf)
    if not has_top:
        return x
    at_once = max(1, MOST_SORTED // x.shape[-1])
    if len(x) <= at_once:
        return _top_k_top_p(x, params, sampled)
    for rows in torch.arange(len(x), device=x.device).split(at_once):
        x[rows] = _top_k_top_p(x[rows], params.rows(rows), sampled[rows])
    return x


def coupled_scores(
    processed_RV: Tensor, params: SamplingBatch, index_R: Tensor, start: int = 0, noise: NoiseBook | None = None
) -> Tensor:
    """log p + G per token: its argmax is a draw from p (Gumbel-max); temperature-0 rows get no noise.

    index_R: index of the token each row draws. start: first target id of this vocabulary shard. noise: what keeps G
    of these ids from one step to the next.
    """
    if not params.asked.is_sampled:
        return processed_RV
    if noise is None:
        noise = NoiseBook(start, start + processed_RV.shape[-1])
    G_RV = noise.rows(params.seed_B.tolist(), index_R.tolist(), processed_RV.device)
    # A masked token stays masked: -inf + G is -inf, G being finite.
    noisy_RV = processed_RV + G_RV
    if not params.asked.is_greedy:
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
    noise: NoiseBook | None = None,
) -> tuple[Tensor, Tensor]:
    """One vocabulary shard's (best score [R] float32, target id [R] int64), for rows without top-k and top-p.

    The shard with the largest score holds `draw`'s token. row_max_R: each row's largest logit over *all* shards,
    needed when some row has min-p. noise: as in `coupled_scores`.
    """
    # This shard's own largest logit would cut too little.
    x = process_logits(logits_RV, params if row_max_R is None else _without_cuts(params))
    if row_max_R is not None:
        t = torch.where(params.temperature_B > 0, params.temperature_B, 1.0)
        x = x.masked_fill(x < (row_max_R / t + _min_p_offset(params))[:, None], -torch.inf)
    best = coupled_scores(x, params, index_R, start, noise).max(-1)
    return best.values, best.indices + start if start else best.indices


def of_processed(params: SamplingBatch) -> SamplingBatch:
    """What `process_logits` leaves to be done with rows that went through it: a draw, or at temperature 0 an argmax."""
    return replace(_without_cuts(params), temperature_B=(params.temperature_B > 0).float())


def _without_cuts(params: SamplingBatch) -> SamplingBatch:
    return replace(
        params,
        top_k_B=torch.zeros_like(params.top_k_B),
        top_p_B=torch.ones_like(params.top_p_B),
        min_p_B=torch.zeros_like(params.min_p_B),
    )


def _min_p_offset(params: SamplingBatch) -> Tensor:
    return torch.log(torch.where(params.temperature_B > 0, params.min_p_B, 0.0))  # log 0 = -inf: off


def _top_k_top_p(x: Tensor, params: SamplingBatch, sampled: Tensor) -> Tensor:
    descending = x.sort(-1, descending=True).values
    vocab = x.shape[-1]
    top_k = torch.where(sampled & (params.top_k_B > 0), params.top_k_B, vocab).clamp(max=vocab).long()
    kth = descending.gather(-1, (top_k - 1)[:, None])
    descending = descending.masked_fill(descending < kth, -torch.inf)
    # top-p keeps the smallest prefix of the sorted tokens whose mass reaches p: a token stays while the mass
    # before it is below p. The first always stays.
    probs = descending.softmax(-1)
    before = probs.cumsum(-1) - probs
    top_p = torch.where(sampled, params.top_p_B, 1.0)[:, None]
    keep = (before < top_p) | (top_p >= 1)
    keep[:, 0] = True
    cut = torch.where(keep, descending, torch.inf).amin(-1, keepdim=True)
    return x.masked_fill(x < torch.maximum(kth, cut), -torch.inf)
