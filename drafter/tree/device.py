"""Growth on the device, in static shapes: what the CUDA graphs of a tree's levels read and write.

    PARAMETERS, GrowInputs, StaticOptions      what `drafter.tree.triton_growth` reads
    static_rows                                the rows of a static tree, which are known beforehand
    TreeTensors                                trees, and what the draft model reads at their rows

`drafter.tree.tree_graphs` owns the buffers, and captures and replays the growth.

A tree has 1 + N rows, whether they hold a node or not; a row without a node has weight 0. Each level takes three steps:

    1. read     run every row of the tree so far, in one forward pass
    2. score    the children of the nodes that the last level added, under the penalties of their own paths
    3. keep     the best of tree and children of each request: the next tree, breadth-first, row 0 the root

Static trees have another third step: their rows never move, and a level only fills further ones.

All rows are computed anyway. So a node is simply computed again at every level, in whatever row it is now, and neither
its keys and values nor the features for its children have to be moved there. For the same reason the cost model is not
consulted while a tree grows: every kept node is run, as long as there are levels. The result is the best tree there is,
where growth on the host may run out of rows; the cut at the end is the same.

Legend: B requests, N nodes of a tree, R = 1 + N rows, D levels, V draft vocabulary, H width of a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafter.tree.frontier import DraftVocabulary, TreeRequests
from drafter.tree.score import confidence_tau
from workers.config import TreeConfig
from workers.kernels.select import Kernels
from workers.settings import Rule

PARAMETERS = (
    "token",  # the root's
    "position",  # the root's, as the draft model counts
    "has_noise",  # 1 = children are ranked under the target's noise
    "num_nodes",
    "max_depth",
    "min_prob",
    "path_prob",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "tau",  # see `drafter.tree.score.confidence_tau`
    "repetition",  # penalties
    "frequency",
    "presence",
    "is_auto",  # 1 = what thresholds keep out frees its place
    "seed",  # the bits of an int64
    "index",  # of the token that the root's children stand for, which keys the target's noise
    "level",  # levels of the tree so far, which growth itself writes
)
"""The columns of the table of requests, float64, which holds all of them exactly. A row of zeros keeps no node."""


def parameter_columns(
    trees: TreeRequests, position_B: np.ndarray, has_noise_B: np.ndarray, penalties_B3: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return the PARAMETERS of a step's trees, [B] each."""
    limits, sampling = trees.limits, trees.sampling
    temperature_B = sampling.temperature_B.numpy()
    return (
        trees.root_token_B, position_B, has_noise_B,
        limits.num_nodes_B, limits.max_depth_B, *limits.rules.values,
        temperature_B, sampling.top_k_B.numpy(), sampling.top_p_B.numpy(), sampling.min_p_B.numpy(),
        confidence_tau(temperature_B, limits.rule_B == Rule.COUPLED.value), *penalties_B3.T,
        limits.is_auto_B, sampling.seed_B.numpy().view(np.float64), trees.root_index_B, np.zeros(len(temperature_B)),
    )  # fmt: skip


LOGITS_AT_ONCE = 1 << 25
"""Logits that exist at once, 134 MB in float32: 1,024 rows of a vocabulary of 32,000 or 220 of 151,936. The products of
so many rows take as long as reading the vocabulary head once more."""


def requests_at_once(num_rows: int, vocab_size: int) -> int:
    """Return of how many requests, with so many rows each, the logits exist at once."""
    return max(1, LOGITS_AT_ONCE // (num_rows * vocab_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticOptions:
    """The choices that a captured graph fixes."""

    tree: TreeConfig
    vocab: DraftVocabulary
    kernels: Kernels
    has_truncation: bool  # some request may have min-p, top-k or top-p
    has_penalties: bool
    has_leaf_siblings: bool = False  # only a node's best child has children; the depth of the others is negative
    static_4R: Tensor | None = None  # see `static_rows`; None = trees grow best-first; contiguous rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowInputs:
    """The tensors that growth reads; a graph reads them anew at every replay."""

    features_BH: Tensor  # each root's feature for its children
    count_BV: Tensor  # the token counts that `workers.sampling.logits_processors.penalize` takes
    table: Tensor  # float64 [B, columns], see PARAMETERS
    log_odds_D: Tensor  # calibration of each level's children

    def rows_of(self, own: slice) -> GrowInputs:
        """Return the part of some requests."""
        parts = {name: getattr(self, name)[own] for name in ("features_BH", "count_BV", "table")}
        return replace(self, **parts)


class TreeTensors(NamedTuple):
    """Trees, and what the draft model reads at all their rows but the roots. A row of weight 0 holds no node."""

    state_5BR: (
        Tensor  # int64 token, parent's row, depth, column in the logits, and ancestors: a bitmask, itself included
    )
    path_prob_BR: Tensor  # float64; negative below a node that failed, see `drafter.tree.thresholds`
    weight_BR: Tensor  # float32
    inputs_4BN: Tensor  # int64 token, position, ancestors, and the row that its parent had at the level before
    feature_BNH: Tensor  # of each row's parent

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.inputs_4BN.shape[2]

    def rows_of(self, own: slice) -> TreeTensors:
        """Return the part of some requests."""
        state_5BR, path_prob_BR, weight_BR, inputs_4BN, feature_BNH = self
        return TreeTensors(state_5BR[:, own], path_prob_BR[own], weight_BR[own], inputs_4BN[:, own], feature_BNH[own])


def static_rows(paths: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """Return the rows of a static tree, int64 [4, R]. paths: breadth-first, e.g. ((0,), (1,), (0, 0)).

    The fields are parent, depth, ancestors, and a row's place among the candidates of the level before.
    """
    num_children = 1 + max(path[-1] for path in paths)
    row_of = {(): 0} | {path: 1 + i for i, path in enumerate(paths)}
    parents = [0, *(row_of[path[:-1]] for path in paths)]
    masks, sources = [1], [0]
    for row, path in enumerate(paths, 1):
        masks.append(masks[parents[row]] | 1 << row)
        sources.append(max(parents[row] - 1, 0) * num_children + path[-1])
    masks = [mask - (1 << 64) if mask >> 63 else mask for mask in masks]
    fields = [parents, [0, *map(len, paths)], masks, sources]
    return torch.tensor(fields, dtype=torch.int64, device=device)
