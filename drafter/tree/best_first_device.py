"""Whole trees at once: the search of `tree.best_first` in static shapes, so that one CUDA graph grows every level.

    grow_on_device(...) -> Rows      the growth: a function of tensors that looks at no value on the host

What it is given lies in the buffers of `drafter.tree.tree_graphs`, which captures and replays it.

A tree has 1 + N rows, whatever it holds; what is not there weighs nothing. A level is

    1. read     every row of the tree so far, in one forward pass
    2. score    the children of the rows that the last level brought, behind the penalties of their own paths
    3. keep     each request's best of tree and children: the next tree, breadth-first, row 0 the root

Rows are paid for whether they hold a node or not. So a node that was read is simply read again, in whatever row it has
come to, and neither its keys and values nor what it hands to its children has to follow it there. For the same reason
costs are not asked while a tree grows: every node that is kept is read, as long as there are levels. That makes it the
best tree that there is, where `Search` may run out of rows; the cut at the end is the same.

Legend: B requests, N nodes of a tree, R = 1 + N rows, F rows that are scored, K children, C = R + F K candidates,
D levels, V draft vocabulary, H width of a feature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafter.tree.cost_model import calibrated
from drafter.tree.frontier import DraftVocabulary, GrowLimits
from drafter.tree.score import Best, best_children, confidence_tau
from drafter.tree.thresholds import passes_min, passes_path
from workers.config import TreeConfig
from workers.kernels.select import Kernels
from workers.sampling.logits_processors import penalize
from workers.sampling.sampler import process_logits_static
from workers.types import Rule, SamplingBatch

Read = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The draft model: (token, feature, depth, ancestors) of all rows but the roots -> (features for the children, logits),
each [B, N, ...]."""


class Asks(NamedTuple):
    """What each request asks for, float64 [B], in which all of it is exact: it travels to the device as one table.
    Zeros ask for nothing."""

    token_B: Tensor  # the root's
    base_B: Tensor  # the root's slot and position
    has_noise_B: Tensor  # 1 = children follow the target's noise
    num_nodes_B: Tensor
    max_depth_B: Tensor
    min_prob_B: Tensor
    path_prob_B: Tensor
    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    tau_B: Tensor  # see `drafter.tree.score.confidence_tau`
    repetition_B: Tensor  # penalties
    frequency_B: Tensor
    presence_B: Tensor

    @staticmethod
    def table(
        token_B: np.ndarray,
        base_B: Tensor,
        has_noise_B: np.ndarray,
        limits: GrowLimits,
        sampling: SamplingBatch,
        penalties_B3: np.ndarray,
    ) -> Tensor:
        """[B, columns] on the host: `Asks(*table.unbind(1))` is what it tells."""
        columns = (
            token_B, base_B, has_noise_B,
            limits.num_nodes_B, limits.max_depth_B, limits.min_prob_B, limits.path_prob_B,
            sampling.temperature_B, sampling.top_k_B, sampling.top_p_B, sampling.min_p_B,
            confidence_tau(sampling.temperature_B.numpy(), limits.rule_B == Rule.COUPLED.value),
            *penalties_B3.T,
        )  # fmt: skip
        return torch.stack([torch.as_tensor(column).double() for column in columns], dim=1)

    def scoring(self, rows_each: int) -> Scoring:
        """For so many rows of each request."""
        params = SamplingBatch(
            temperature_B=self.temperature_B.float().repeat_interleave(rows_each),
            top_k_B=self.top_k_B.int().repeat_interleave(rows_each),
            top_p_B=self.top_p_B.float().repeat_interleave(rows_each),
            min_p_B=self.min_p_B.float().repeat_interleave(rows_each),
            seed_B=self.token_B.long().repeat_interleave(rows_each),  # of no use: noise is given
        )
        tau_B = torch.where(self.tau_B > 0, self.tau_B, 1).float()  # nobody's rows must not be NaN
        return Scoring(params, tau_B.repeat_interleave(rows_each))


class Scoring(NamedTuple):
    """How logits [F, V] become scores and weights, see `drafter.tree.score`."""

    params: SamplingBatch
    tau_F: Tensor


class Rows(NamedTuple):
    """Nodes, or candidates for one, [B, R] or [B, C]. What weighs 0 is none, whatever else is said of it."""

    token: Tensor  # int64
    parent: Tensor  # int64, its row; a root is its own
    depth: Tensor  # int64
    weight: Tensor  # float32
    path_prob: Tensor  # float64
    column: Tensor  # int64, the token's in the logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a growth of static shape is made for."""

    tree: TreeConfig
    vocab: DraftVocabulary
    kernels: Kernels
    has_truncation: bool  # some request may have min-p, top-k or top-p
    has_penalties: bool


def grow_on_device(
    roots_BV: Tensor,
    features_BH: Tensor,
    noise_BDV: Tensor,
    count_BV: Tensor,
    asks: Asks,
    fit_D2: Tensor,
    read: Read,
    rules: Rules,
) -> Rows:
    """The trees [B, R].

    roots_BV, features_BH: the draft's logits at each root, and what the root hands to its children. noise_BDV: the
    target's noise for the children of each level. count_BV: what `penalize` is told of the text so far. fit_D2:
    calibration of each level's children.
    """
    num_nodes = rules.tree.num_speculative_tokens
    row_N = torch.arange(1, 1 + num_nodes, device=roots_BV.device)
    is_root_R = torch.arange(1 + num_nodes, device=roots_BV.device) == 0
    is_root_BR = is_root_R.expand(len(roots_BV), -1)
    none_BR = torch.zeros_like(is_root_BR, dtype=torch.int64)
    rows = Rows(
        asks.token_B.long()[:, None] * is_root_R, none_BR, none_BR, is_root_BR.float(), is_root_BR.double(), none_BR
    )
    # For the other requests the buffer holds what an earlier step left there.
    noise_BDV = noise_BDV * asks.has_noise_B.float()[:, None, None]
    hidden_BRH, source_BR = features_BH[:, None], none_BR
    logits_BFV, scoring, of_rows = roots_BV[:, None], asks.scoring(1), asks.scoring(num_nodes)
    path_BFN = none_BR[:, None, 1:]  # which rows but the root are on the way to each that is scored
    for depth in range(rules.tree.max_depth):
        if depth > 0:
            feature_BRH = hidden_BRH.gather(1, source_BR[:, :, None].expand(-1, -1, hidden_BRH.shape[-1]))
            ancestors_BR = _ancestors(rows.parent, depth)
            given = (rows.token, feature_BRH, rows.depth, ancestors_BR)
            hidden_BNH, logits_BFV = read(*(field[:, 1:] for field in given))
            hidden_BRH, scoring = torch.cat((features_BH[:, None], hidden_BNH), dim=1), of_rows
            path_BFN = ancestors_BR[:, 1:, None] >> row_N & 1
        if rules.has_penalties:
            logits_BFV = _penalized(logits_BFV.float(), count_BV, path_BFN, rows.column[:, 1:], asks)
        best = _score(logits_BFV, noise_BDV[:, depth], scoring, rules)
        rows, source_BR = _keep(rows, _children(rows, depth, best, asks, fit_D2[depth]), asks.num_nodes_B)
    return rows


def _penalized(logits_BFV: Tensor, count_BV: Tensor, path_BFN: Tensor, column_BN: Tensor, asks: Asks) -> Tensor:
    """As `workers.sampling.logits_processors` does it, of every column at once."""
    on_path_BFV = torch.zeros_like(logits_BFV)
    on_path_BFV.scatter_add_(2, column_BN[:, None].expand_as(path_BFN), path_BFN.to(logits_BFV.dtype))
    settings = (asks.repetition_B, asks.frequency_B, asks.presence_B)
    return penalize(logits_BFV, count_BV[:, None], on_path_BFV, *(each_B.float()[:, None, None] for each_B in settings))


def _score(logits_BFV: Tensor, noise_BV: Tensor, scoring: Scoring, rules: Rules) -> Best:
    """The candidate children of each row, [B, F, ...]."""
    has_truncation, threshold = rules.has_truncation, rules.kernels.truncation_threshold
    x_FV = process_logits_static(
        logits_BFV.flatten(0, 1), scoring.params, has_min_p=has_truncation, has_top=has_truncation, threshold=threshold
    )
    log_q_FV = x_FV.log_softmax(-1)
    scored_FV = (log_q_FV.view_as(logits_BFV) + noise_BV[:, None]).flatten(0, 1)
    best = best_children(log_q_FV, scored_FV, scoring.tau_F, rules.tree.max_children, rules.vocab, rules.kernels)
    return Best(*(field.unflatten(0, logits_BFV.shape[:2]) for field in best))


def _children(rows: Rows, depth: int, best: Best, asks: Asks, fit_2: Tensor) -> Rows:
    """The candidates [B, F K] that the rows of this depth bring, in the order of their parents, best first.

    best: of the root (depth 0), or of all other rows.
    """
    first, num_scored = min(depth, 1), best.top_prob_F.shape[1]
    parents = Rows(*(field[:, first : first + num_scored] for field in rows))
    is_open_BF = (
        (parents.depth == depth)
        & (depth < asks.max_depth_B[:, None])
        & passes_path(parents.path_prob, asks.path_prob_B[:, None])
        & passes_min(best.top_prob_F, asks.min_prob_B[:, None])
    )
    weight_BFK = parents.weight[:, :, None] * calibrated(best.weight_FK, fit_2)
    is_weight_BFK = is_open_BF[:, :, None] & (weight_BFK > 0)  # what is not a number is none
    row_F1 = torch.arange(first, first + num_scored, device=weight_BFK.device)[:, None]
    return Rows(
        token=best.token_FK.flatten(1),
        parent=row_F1.expand_as(weight_BFK).flatten(1),
        depth=torch.full_like(weight_BFK, depth + 1, dtype=torch.int64).flatten(1),
        weight=torch.where(is_weight_BFK, weight_BFK, 0.0).flatten(1),
        path_prob=(parents.path_prob[:, :, None] * best.prob_FK).flatten(1),
        column=best.column_FK.flatten(1),
    )


def _keep(rows: Rows, children: Rows, num_nodes_B: Tensor) -> tuple[Rows, Tensor]:
    """The root and the num_nodes best of each request, in their order; the earlier of equals. Also [B, R] the row that
    each one's parent had in `rows`."""
    pool = Rows(*(torch.cat(pair, dim=1) for pair in zip(rows, children, strict=True)))
    (_, R), (_, C) = rows.weight.shape, pool.weight.shape
    best = pool.weight.sort(dim=1, descending=True, stable=True)
    rank_R = torch.arange(R, device=pool.weight.device)
    is_kept_BR = (best.values[:, :R] > 0) & (rank_R <= num_nodes_B[:, None])
    kept_BR = torch.where(is_kept_BR, best.indices[:, :R], C).sort(dim=1).values  # C = none
    at_BR = kept_BR.clamp(max=C - 1)
    chosen = Rows(*(field.gather(1, at_BR) for field in pool))
    row_BC = torch.zeros_like(pool.parent).scatter(1, at_BR, rank_R.expand_as(at_BR))
    parent_BR, weight_BR = row_BC.gather(1, chosen.parent), chosen.weight * (kept_BR < C)
    return chosen._replace(parent=parent_BR, weight=weight_BR), chosen.parent


def _ancestors(parent_BR: Tensor, depth: int) -> Tensor:
    """int64 bitmasks [B, R] of each row's path, itself included, in trees of that depth; twice as far each time."""
    row_R = torch.arange(parent_BR.shape[1], device=parent_BR.device)
    mask_BR = (torch.ones_like(row_R) << row_R).expand_as(parent_BR)
    for _ in range(depth.bit_length()):
        mask_BR = mask_BR | mask_BR.gather(1, parent_BR)
        parent_BR = parent_BR.gather(1, parent_BR)
    return mask_BR
