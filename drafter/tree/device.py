"""Growth on the device, in static shapes: what a CUDA graph that grows every level of every tree reads and writes.

    PARAMETERS, GrowInputs, StaticOptions      what `drafter.tree.triton_growth` reads
    static_rows                                the rows of a static tree, which are known beforehand
    NodeTensors, RowInputs                     trees, and what the draft model reads at their rows

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafter.tree.frontier import DraftVocabulary, TreeRequests
from drafter.tree.score import confidence_tau
from workers.config import TreeConfig
from workers.kernels.select import Kernels
from workers.settings import Rule

ReadRows = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The draft model: (token, feature, position, ancestors) of all rows but the roots -> (features for the children,
logits), each [B, N, ...] and contiguous."""


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
        limits.is_auto_B,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticOptions:
    """The choices that a captured graph fixes."""

    tree: TreeConfig
    vocab: DraftVocabulary
    kernels: Kernels
    has_truncation: bool  # some request may have min-p, top-k or top-p
    has_penalties: bool
    static_4R: Tensor | None = None  # see `static_rows`; None = trees grow best-first


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowInputs:
    """The tensors that growth reads; a graph reads them anew at every replay."""

    features_BH: Tensor  # each root's feature for its children
    noise_BDV: Tensor  # the target's noise for the children of each level; stale where a request has none
    count_BV: Tensor  # the token counts that `workers.sampling.logits_processors.penalize` takes
    table: Tensor  # float64 [B, columns], see PARAMETERS
    log_odds_D: Tensor  # calibration of each level's children


class NodeTensors(NamedTuple):
    """Nodes [B, R]. An entry of weight 0 is empty, and its other fields are arbitrary."""

    token: Tensor  # int64
    parent: Tensor  # int64, its row; a root is its own parent
    depth: Tensor  # int64
    weight: Tensor  # float32
    path_prob: Tensor  # float64; negative below a node that failed, see `drafter.tree.thresholds`
    column: Tensor  # int64, the token's column in the logits


class RowInputs(NamedTuple):
    """The draft model's inputs at all rows but the roots, int64 [B, N] each. Rows without a node have valid ones."""

    token: Tensor
    position: Tensor
    ancestors: Tensor  # bitmask over the R rows, itself included
    old_parent: Tensor  # the row that its parent had at the level before


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
