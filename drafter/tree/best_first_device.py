"""Growth on the device, in static shapes: one CUDA graph grows every level of every tree.

    grow_on_device(...) -> NodeTensors      a function of tensors that reads no value on the host
    Levels                                  its steps 2 and 3, in torch (`TorchLevels`) or in Triton

`drafter.tree.tree_graphs` owns the buffers with its inputs, and captures and replays it. `drafter.tree.triton_growth`
has the Triton kernels, three a level where torch launches eighty.

A tree has 1 + N rows, whether they hold a node or not; a row without a node has weight 0. Each level takes three steps:

    1. read     run every row of the tree so far, in one forward pass
    2. score    the children of the nodes that the last level added, under the penalties of their own paths
    3. keep     the best of tree and children of each request: the next tree, breadth-first, row 0 the root

Static trees have another third step, and share the types of rows (`drafter.tree.device_rows`).

All rows are computed anyway. So a node is simply computed again at every level, in whatever row it is now, and neither
its keys and values nor the features for its children have to be moved there. For the same reason the cost model is not
consulted while a tree grows: every kept node is run, as long as there are levels. The result is the best tree there is,
where `BestFirstGrowth` may run out of rows; the cut at the end is the same.

Legend: B requests, N nodes of a tree, R = 1 + N rows, F rows that are scored, K children, C = R + F K candidates,
D levels, V draft vocabulary, H width of a feature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from drafter.tree.cost_model import calibrate
from drafter.tree.device_rows import (
    Candidates,
    NodeTensors,
    RowInputs,
    RowParameters,
    ScoringParameters,
    StaticRows,
    StaticShape,
    roots,
)
from drafter.tree.frontier import DraftVocabulary
from drafter.tree.score import TopChildren, top_children
from drafter.tree.thresholds import below_failed, passes_min, passes_path
from workers.config import TreeConfig
from workers.kernels.select import Kernels
from workers.sampling.logits_processors import penalize
from workers.sampling.sampler import process_logits_static

ReadRows = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The draft model: (token, feature, position, ancestors) of all rows but the roots -> (features for the children,
logits), each [B, N, ...] and contiguous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticOptions:
    """The choices that a captured graph fixes."""

    tree: TreeConfig
    vocab: DraftVocabulary
    kernels: Kernels
    has_truncation: bool  # some request may have min-p, top-k or top-p
    has_penalties: bool
    shape: StaticShape | None = None  # None = trees grow best-first


@dataclass(frozen=True, kw_only=True)  # no slots, because of the cached properties
class GrowInputs:
    """The tensors that growth reads; a graph reads them anew at every replay."""

    features_BH: Tensor  # each root's feature for its children
    noise_BDV: Tensor  # the target's noise for the children of each level; stale where a request has none
    count_BV: Tensor  # the token counts that `penalize` takes
    table: Tensor  # [B, columns], see `RowParameters`
    log_odds_D: Tensor  # calibration of each level's children
    num_nodes: int

    @cached_property
    def parameters(self) -> RowParameters:
        """The columns of the table."""
        return RowParameters(*self.table.unbind(1))

    def scoring(self, num_rows: int) -> ScoringParameters:
        """Return the parameters of a level that scores this many rows of each request: 1 or N."""
        return self._root_scoring if num_rows == 1 else self._scoring

    @cached_property
    def _root_scoring(self) -> ScoringParameters:
        return self.parameters.scoring(1)

    @cached_property
    def _scoring(self) -> ScoringParameters:
        return self.parameters.scoring(self.num_nodes)


class Levels(Protocol):
    """Trees that grow level by level. Made from `GrowInputs` and `StaticOptions`."""

    @property
    def nodes(self) -> NodeTensors:
        """The trees so far."""
        ...

    def add(self, logits_BFV: Tensor, depth: int) -> RowInputs:
        """Add the children of the nodes of this depth, keep the best of all, and return the inputs of the new rows.

        logits_BFV: at the roots (depth 0, F = 1), or at all other rows (F = N).
        """
        ...

    def features(self, rows: RowInputs, hidden_BNH: Tensor | None) -> Tensor:
        """Return the feature of each row's parent [B, N, H]. hidden_BNH: of the level before; None behind the roots."""
        ...


def grow_on_device(levels: Levels, roots_BV: Tensor, read: ReadRows, max_depth: int) -> None:
    """Grow the trees, which are `levels.nodes` then. roots_BV: the draft's logits at each root."""
    rows = hidden_BNH = None
    logits_BFV = roots_BV[:, None]
    for depth in range(max_depth):
        if rows is not None:
            feature_BNH = levels.features(rows, hidden_BNH)
            hidden_BNH, logits_BFV = read(rows.token, feature_BNH, rows.position, rows.ancestors)
        rows = levels.add(logits_BFV, depth)


class TorchLevels:
    """`Levels` in torch, the twin of `drafter.tree.triton_growth.TritonLevels`."""

    def __init__(self, inputs: GrowInputs, options: StaticOptions) -> None:
        self._inputs, self._options = inputs, options
        self._rows: RowInputs | None = None
        self._static = None if options.shape is None else StaticRows(options.shape, inputs.parameters)
        self.nodes = self._static.nodes if self._static is not None else roots(inputs.parameters, 1 + inputs.num_nodes)

    def add(self, logits_BFV: Tensor, depth: int) -> RowInputs:
        """See `Levels`."""
        parameters = self._inputs.parameters
        if self._options.has_penalties:
            logits_BFV = self._penalized(logits_BFV.float())
        top = self._score(logits_BFV, depth)
        children = _children(self.nodes, depth, top, parameters, self._inputs.log_odds_D[depth])
        if self._static is not None:
            candidates = Candidates(children.token, children.weight, children.path_prob, children.column)
            self._rows = self._static.place(candidates, depth)
            return self._rows
        self.nodes, old_parent_BR = _keep_best(self.nodes, children, parameters.num_nodes_B)
        position_BR = parameters.position_B.long()[:, None] + self.nodes.depth
        fields = (self.nodes.token, position_BR, _ancestors(self.nodes.parent, depth + 1), old_parent_BR)
        self._rows = RowInputs(*(field[:, 1:].contiguous() for field in fields))
        return self._rows

    def features(self, rows: RowInputs, hidden_BNH: Tensor | None) -> Tensor:
        """See `Levels`."""
        hidden_BRH = self._inputs.features_BH[:, None]
        if hidden_BNH is not None:
            hidden_BRH = torch.cat((hidden_BRH, hidden_BNH), dim=1)
        return hidden_BRH.gather(1, rows.old_parent[:, :, None].expand(-1, -1, hidden_BRH.shape[-1]))

    def _penalized(self, logits_BFV: Tensor) -> Tensor:
        """Apply penalties as `workers.sampling.logits_processors` does, to all columns at once."""
        inputs, on_path_BFV = self._inputs, torch.zeros_like(logits_BFV)
        if self._rows is not None:
            row_N = torch.arange(1, 1 + inputs.num_nodes, device=logits_BFV.device)
            # 1 = this row, of those below the root, is on the path to the scored one
            path_BFN = (self._rows.ancestors[:, :, None] >> row_N & 1).to(logits_BFV.dtype)
            on_path_BFV.scatter_add_(2, self.nodes.column[:, None, 1:].expand_as(path_BFN), path_BFN)
        parameters = inputs.parameters
        penalties = (parameters.repetition_B, parameters.frequency_B, parameters.presence_B)
        return penalize(
            logits_BFV, inputs.count_BV[:, None], on_path_BFV, *(each_B.float()[:, None, None] for each_B in penalties)
        )

    def _processed(self, logits_BFV: Tensor) -> Tensor:
        """Return the logits after temperature and truncation, whose softmax is q."""
        options = self._options
        x_FV = process_logits_static(
            logits_BFV.flatten(0, 1),
            self._inputs.scoring(logits_BFV.shape[1]).params,
            has_min_p=options.has_truncation,
            has_top=options.has_truncation,
            threshold=options.kernels.truncation_threshold,
        )
        return x_FV.view_as(logits_BFV)

    def _score(self, logits_BFV: Tensor, depth: int) -> TopChildren:
        """Return the candidate children of each row, [B, F, ...]."""
        inputs, options = self._inputs, self._options
        # Requests without noise have stale values in the buffer.
        noise_BV = torch.where(inputs.parameters.has_noise_B[:, None] > 0, inputs.noise_BDV[:, depth], 0.0)
        log_q_BFV = self._processed(logits_BFV).log_softmax(-1)
        scored_FV = (log_q_BFV + noise_BV[:, None]).flatten(0, 1)
        top = top_children(
            log_q_BFV.flatten(0, 1),
            scored_FV,
            inputs.scoring(logits_BFV.shape[1]).tau_F,
            options.tree.num_children,
            options.vocab,
            options.kernels,
        )
        return TopChildren(*(field.unflatten(0, logits_BFV.shape[:2]) for field in top))


def _children(
    nodes: NodeTensors, depth: int, top: TopChildren, parameters: RowParameters, log_odds: Tensor
) -> NodeTensors:
    """Return the candidates [B, F K] below the rows of this depth, in the order of their parents, best first.

    top: the children of the root (depth 0), or of all other rows.
    """
    first, num_scored = min(depth, 1), top.top_prob_F.shape[1]
    parents = NodeTensors(*(field[:, first : first + num_scored] for field in nodes))
    passes_BF = passes_path(parents.path_prob, parameters.path_prob_B[:, None])
    passes_BF &= passes_min(top.top_prob_F, parameters.min_prob_B[:, None])
    is_open_BF = (parents.depth == depth) & (depth < parameters.max_depth_B[:, None])
    is_open_BF &= passes_BF | (parameters.is_auto_B[:, None] == 0)
    path_prob_BFK = parents.path_prob[:, :, None] * top.prob_FK
    weight_BFK = parents.weight[:, :, None] * calibrate(top.weight_FK, log_odds)
    is_child_BFK = is_open_BF[:, :, None] & (weight_BFK > 0)  # NaN is no child
    row_F1 = torch.arange(first, first + num_scored, device=weight_BFK.device)[:, None]
    return NodeTensors(
        token=top.token_FK.flatten(1),
        parent=row_F1.expand_as(weight_BFK).flatten(1),
        depth=torch.full_like(weight_BFK, depth + 1, dtype=torch.int64).flatten(1),
        weight=torch.where(is_child_BFK, weight_BFK, 0.0).flatten(1),
        path_prob=torch.where(passes_BF[:, :, None], path_prob_BFK, below_failed(path_prob_BFK)).flatten(1),
        column=top.column_FK.flatten(1),
    )


def _keep_best(nodes: NodeTensors, children: NodeTensors, num_nodes_B: Tensor) -> tuple[NodeTensors, Tensor]:
    """Keep each request's root and its num_nodes best candidates in their order; ties go to the earlier one.

    Also returns [B, R] the row in `nodes` of each kept one's parent.
    """
    candidates = NodeTensors(*(torch.cat(pair, dim=1) for pair in zip(nodes, children, strict=True)))
    (_, R), (_, C) = nodes.weight.shape, candidates.weight.shape
    ranked = candidates.weight.sort(dim=1, descending=True, stable=True)
    rank_R = torch.arange(R, device=candidates.weight.device)
    is_kept_BR = (ranked.values[:, :R] > 0) & (rank_R <= num_nodes_B[:, None])
    kept_BR = torch.where(is_kept_BR, ranked.indices[:, :R], C).sort(dim=1).values  # C = empty
    at_BR = kept_BR.clamp(max=C - 1)
    chosen = NodeTensors(*(field.gather(1, at_BR) for field in candidates))
    new_row_BC = torch.zeros_like(candidates.parent).scatter(1, at_BR, rank_R.expand_as(at_BR))
    parent_BR, weight_BR = new_row_BC.gather(1, chosen.parent), chosen.weight * (kept_BR < C)
    return chosen._replace(parent=parent_BR, weight=weight_BR), chosen.parent


def _ancestors(parent_BR: Tensor, depth: int) -> Tensor:
    """Return int64 bitmasks [B, R] of each row's path, itself included, in trees of that depth.

    Each iteration doubles the distance covered.
    """
    row_R = torch.arange(parent_BR.shape[1], device=parent_BR.device)
    mask_BR = (torch.ones_like(row_R) << row_R).expand_as(parent_BR)
    for _ in range(depth.bit_length()):
        mask_BR = mask_BR | mask_BR.gather(1, parent_BR)
        parent_BR = parent_BR.gather(1, parent_BR)
    return mask_BR
