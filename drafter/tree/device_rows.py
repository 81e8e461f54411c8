"""Rows of trees on the device: the tensors that hold them, and the rows of static trees and chains.

    RowParameters, NodeTensors, Candidates, RowInputs   what growth on the device reads and writes
    StaticShape(paths, device), StaticRows              every node's row is known beforehand

Unlike in best-first growth, the rows of a static tree never move: a level only fills further ones. The trees are those
that `drafter.tree.budgeted` grows on the host. Nothing is read on the host, so that a CUDA graph can hold a whole
growth. `drafter.tree.triton_rows` has the Triton kernel, one a level where torch launches dozens.

Legend: B requests, N nodes of a tree, R = 1 + N rows, M rows of a level, F rows that are scored (the root, then all
rows but the root), K children, C = F K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafter.tree.frontier import TreeRequests
from drafter.tree.score import confidence_tau
from workers.settings import Rule
from workers.types import SamplingBatch


class RowParameters(NamedTuple):
    """The parameters of each request, float64 [B], which holds all of them exactly: they travel as one table.

    A request of zeros keeps no node.
    """

    token_B: Tensor  # the root's
    position_B: Tensor  # the root's, as the draft model counts
    has_noise_B: Tensor  # 1 = children are ranked under the target's noise
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
    is_auto_B: Tensor  # 1 = what thresholds keep out frees its place

    @staticmethod
    def fill(
        table: np.ndarray,
        trees: TreeRequests,
        position_B: np.ndarray,
        has_noise_B: np.ndarray,
        penalties_B3: np.ndarray,
    ) -> None:
        """Fill in the table [B, columns] on the host; `RowParameters(*table.unbind(1))` reads it."""
        limits, sampling = trees.limits, trees.sampling
        temperature_B = sampling.temperature_B.numpy()
        columns = (
            trees.root_token_B, position_B, has_noise_B,
            limits.num_nodes_B, limits.max_depth_B, *limits.rules.values,
            temperature_B, sampling.top_k_B.numpy(), sampling.top_p_B.numpy(), sampling.min_p_B.numpy(),
            confidence_tau(temperature_B, limits.rule_B == Rule.COUPLED.value), *penalties_B3.T,
            limits.is_auto_B,
        )  # fmt: skip
        for place, column in enumerate(columns):
            table[:, place] = column

    def scoring(self, num_rows: int) -> ScoringParameters:
        """Repeat the parameters of logits and weights for `num_rows` rows of each request."""
        params = SamplingBatch(
            temperature_B=self.temperature_B.float().repeat_interleave(num_rows),
            top_k_B=self.top_k_B.int().repeat_interleave(num_rows),
            top_p_B=self.top_p_B.float().repeat_interleave(num_rows),
            min_p_B=self.min_p_B.float().repeat_interleave(num_rows),
            seed_B=self.token_B.long().repeat_interleave(num_rows),  # never read: the noise is an input
        )
        tau_B = torch.where(self.tau_B > 0, self.tau_B, 1).float()  # padding must not produce NaN
        return ScoringParameters(params, tau_B.repeat_interleave(num_rows))


class ScoringParameters(NamedTuple):
    """The parameters that turn logits [F, V] into scores and weights, see `drafter.tree.score`."""

    params: SamplingBatch
    tau_F: Tensor


class NodeTensors(NamedTuple):
    """Nodes [B, R] or candidates [B, C]. An entry of weight 0 is empty, and its other fields are arbitrary."""

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


class Candidates(NamedTuple):
    """A level's candidate children [B, F K], in the order of their parents. A weight of 0 = not to be drafted."""

    token: Tensor  # int64
    weight: Tensor  # float32
    path_prob: Tensor  # float64
    column: Tensor  # int64


def roots(parameters: RowParameters, num_rows: int) -> NodeTensors:
    """Return trees of roots alone."""
    row_R = torch.arange(num_rows, device=parameters.token_B.device)
    is_root_BR = (row_R == 0).expand(len(parameters.token_B), -1)
    zeros_BR = torch.zeros_like(is_root_BR, dtype=torch.int64)
    return NodeTensors(
        token=parameters.token_B.long()[:, None] * is_root_BR,
        parent=zeros_BR,
        depth=zeros_BR,
        weight=is_root_BR.float(),
        path_prob=is_root_BR.double(),
        column=zeros_BR.clone(),  # static rows are filled in place
    )


class _Level(NamedTuple):
    """The rows of one depth of a static tree."""

    first: int
    stop: int
    old_parent_N: Tensor  # int64, the parents of the rows that are filled by then, 0 for the others


class StaticShape:
    """A static tree. paths: breadth-first, e.g. ((0,), (1,), (0, 0))."""

    def __init__(self, paths: Sequence[tuple[int, ...]], device: torch.device) -> None:
        num_children = 1 + max(path[-1] for path in paths)
        row_of = {(): 0} | {path: 1 + i for i, path in enumerate(paths)}
        parents = [0, *(row_of[path[:-1]] for path in paths)]
        masks, sources = [1], [0]
        for row, path in enumerate(paths, 1):
            masks.append(masks[parents[row]] | 1 << row)
            sources.append(max(parents[row] - 1, 0) * num_children + path[-1])

        def on_device(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        depths, masks = [0, *map(len, paths)], [mask - (1 << 64) if mask >> 63 else mask for mask in masks]
        # source: each row's place among the candidates of the level before
        self.rows_4R = on_device([parents, depths, masks, sources])
        self.parent_R, self.depth_R, self.ancestors_R, self.source_R = self.rows_4R.unbind(0)
        self.row_R = on_device(range(len(parents)))
        self.levels: list[_Level] = []
        for depth in range(len(paths[-1])):
            rows = [row_of[path] for path in paths if len(path) == depth + 1]
            filled = [parent if row <= rows[-1] else 0 for row, parent in enumerate(parents)]
            self.levels.append(_Level(rows[0], rows[-1] + 1, on_device(filled[1:])))


class StaticRows:
    """A node is in a tree if its row is among the first `num_nodes` and it is a candidate of a parent that is."""

    def __init__(self, shape: StaticShape, parameters: RowParameters) -> None:
        self._shape = shape
        self._num_nodes_B1 = parameters.num_nodes_B[:, None]
        size = len(parameters.token_B), len(shape.row_R)
        self._position_BN = parameters.position_B.long()[:, None] + shape.depth_R[1:]
        # Rows that are not filled yet have weight 0, and the parents and depths that they will have.
        self.nodes = roots(parameters, len(shape.row_R))._replace(
            parent=shape.parent_R.expand(size).contiguous(), depth=shape.depth_R.expand(size).contiguous()
        )

    def place(self, candidates: Candidates, depth: int) -> RowInputs:
        """Add children [B, C] of the nodes of this depth; return what the draft model reads at all rows but the roots.

        The next level may overwrite the result, and the nodes' tensors.
        """
        shape, nodes = self._shape, self.nodes
        first, stop, old_parent_N = shape.levels[depth]
        source_M = shape.source_R[first:stop]
        nodes.token[:, first:stop] = candidates.token[:, source_M]
        nodes.path_prob[:, first:stop] = candidates.path_prob[:, source_M]
        nodes.column[:, first:stop] = candidates.column[:, source_M]
        is_allowed_BM = shape.row_R[first:stop] <= self._num_nodes_B1
        nodes.weight[:, first:stop] = candidates.weight[:, source_M] * is_allowed_BM
        size = self._position_BN.shape
        return RowInputs(
            token=nodes.token[:, 1:].contiguous(),
            position=self._position_BN,
            ancestors=shape.ancestors_R[1:].expand(size).contiguous(),
            old_parent=old_parent_N.expand(size).contiguous(),
        )
