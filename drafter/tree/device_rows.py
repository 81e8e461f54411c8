"""Growth by budgets on the device: which candidates of a level become nodes, and in which rows.

    device_shape(tree, device) -> DeviceShape | None    what a tree's configuration says; None = best-first
    StaticShape(paths, device)                          static trees and chains: every node's row is known beforehand
    BudgetedShape(policy, num_nodes, device)            dynamic trees without `auto`

The trees are those of `drafter.tree.budgeted`, which grows them on the host. Unlike in best-first growth, rows never
move: a level only fills further ones. Nothing is read on the host, so that a CUDA graph can hold a whole growth.
`drafter.tree.triton_rows` has the Triton kernels, one a level where torch launches dozens.

Legend: B requests, N nodes of a tree, R = 1 + N rows, M rows of a level, F rows that are scored (the root, then all
rows but the root), K children, C = F K candidates, J nodes of a typical subtree, X = K J of all children, D levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafter.tree.best_first_device import Candidates, DeviceShape, GrowingRows, NodeTensors, RowInputs, RowParameters
from drafter.tree.policy import DynamicTreePolicy
from workers.config import TreeConfig


def device_shape(tree: TreeConfig, device: torch.device) -> DeviceShape | None:
    """Return how trees grow that keep to a service's configuration, or None if they grow best-first."""
    if tree.paths:
        assert len(tree.paths) == tree.num_speculative_tokens
        return StaticShape(tree.paths, device)
    if tree.prune.auto:
        return None
    policy = DynamicTreePolicy(tree.max_children, tree.max_depth)
    return BudgetedShape(policy, tree.num_speculative_tokens, device)


class _Level(NamedTuple):
    """The rows of one depth of a static tree."""

    first: int
    stop: int
    old_parent_N: Tensor  # int64, the parents of the rows that are filled by then, 0 for the others


class StaticShape:
    """A static tree. paths: breadth-first, e.g. ((0,), (1,), (0, 0)). It counts nothing that thresholds keep out."""

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

    def start(self, parameters: RowParameters) -> GrowingRows:
        """See `DeviceShape`."""
        return _StaticRows(self, parameters)


class _StaticRows:
    """A node is in a tree if its row is among the first `num_nodes` and it is a candidate of a parent that is."""

    pruned_BD = None

    def __init__(self, shape: StaticShape, parameters: RowParameters) -> None:
        self._shape = shape
        self._num_nodes_B1 = parameters.num_nodes_B[:, None]
        size = len(parameters.token_B), len(shape.row_R)
        self._position_BN = parameters.position_B.long()[:, None] + shape.depth_R[1:]
        # Rows that are not filled yet have weight 0, and the parents and depths that they will have.
        self.nodes = _roots(parameters.token_B, shape.row_R)._replace(
            parent=shape.parent_R.expand(size).contiguous(), depth=shape.depth_R.expand(size).contiguous()
        )

    def place(self, candidates: Candidates, depth: int) -> RowInputs:
        """See `GrowingRows`."""
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


class BudgetedShape:
    """Dynamic trees whose nodes split their budgets among their children (`DynamicTreePolicy.split`)."""

    def __init__(self, policy: DynamicTreePolicy, num_nodes: int, device: torch.device) -> None:
        self.subtree_DJ = torch.from_numpy(policy.subtrees[:, :num_nodes].copy()).to(device)
        self.row_R = torch.arange(1 + num_nodes, device=device)

    def start(self, parameters: RowParameters) -> GrowingRows:
        """See `DeviceShape`."""
        return _BudgetedRows(self, parameters)


class _BudgetedRows:
    """Children are appended in the order of their parents' rows, then by rank, as on the host."""

    def __init__(self, shape: BudgetedShape, parameters: RowParameters) -> None:
        self._subtree_DJ, self._row_R = shape.subtree_DJ, shape.row_R
        self._own_R = torch.ones_like(shape.row_R) << shape.row_R
        self._max_depth_B, self._position_B1 = parameters.max_depth_B.long(), parameters.position_B.long()[:, None]
        self.nodes = _roots(parameters.token_B, shape.row_R)
        self._ancestors_BR = (1 | self._own_R).expand_as(self.nodes.token)
        self._budget_BR = parameters.num_nodes_B.long()[:, None] * (shape.row_R == 0)
        self._count_B1 = torch.ones_like(self._position_B1)
        self.pruned_BD = shape.row_R.new_zeros(len(parameters.token_B), len(shape.subtree_DJ))

    def place(self, candidates: Candidates, depth: int) -> RowInputs:
        """See `GrowingRows`."""
        nodes, row_R = self.nodes, self._row_R
        B, C = candidates.weight.shape
        first, F = (0, 1) if depth == 0 else (1, len(row_R) - 1)
        K = C // F
        budget_BF = self._budget_BR[:, first : first + F]
        size_BFK = self._split(candidates.weight.view(B, F, K), budget_BF, depth)
        is_child_BFK = size_BFK > 0
        is_due_BF = nodes.depth[:, first : first + F] == depth
        self.pruned_BD[:, depth] = (budget_BF * (is_due_BF & ~is_child_BFK.any(-1))).sum(1)

        # Candidates that get no row share one behind the last.
        is_child_BC = is_child_BFK.flatten(1)
        end_BC = self._count_B1 + is_child_BC.cumsum(1)
        at_BC = torch.where(is_child_BC, end_BC - 1, len(row_R))
        candidate_BC = torch.arange(C, device=at_BC.device).expand(B, C)
        source_BR = at_BC.new_zeros(B, 1 + len(row_R)).scatter(1, at_BC, candidate_BC)[:, :-1]
        last_B1 = end_BC[:, -1:]
        is_new_BR = (row_R >= self._count_B1) & (row_R < last_B1)
        parent_BR = first + source_BR // K

        def filled(old_BR: Tensor, new_BC: Tensor) -> Tensor:
            return torch.where(is_new_BR, new_BC.gather(1, source_BR), old_BR)

        self.nodes = nodes = NodeTensors(
            token=filled(nodes.token, candidates.token),
            parent=torch.where(is_new_BR, parent_BR, nodes.parent),
            depth=nodes.depth.masked_fill(is_new_BR, depth + 1),
            weight=filled(nodes.weight, candidates.weight),
            path_prob=filled(nodes.path_prob, candidates.path_prob),
            column=filled(nodes.column, candidates.column),
        )
        path_BR = self._ancestors_BR.gather(1, parent_BR) | self._own_R
        self._ancestors_BR = torch.where(is_new_BR, path_BR, self._ancestors_BR)
        self._budget_BR = filled(self._budget_BR, size_BFK.flatten(1) - 1)
        self._count_B1 = last_B1
        fields = (nodes.token, self._position_B1 + nodes.depth, self._ancestors_BR, nodes.parent)
        return RowInputs(*(field_BR[:, 1:].contiguous() for field_BR in fields))

    def _split(self, weight_BFK: Tensor, budget_BF: Tensor, depth: int) -> Tensor:
        """Return the size of each child's subtree, itself included, int64 [B, F, K]; see `DynamicTreePolicy.split`."""
        num_levels_B = (self._max_depth_B - depth).clamp(1, len(self._subtree_DJ))
        subtree_BJ = self._subtree_DJ[num_levels_B - 1]
        value_BFX = (weight_BFK[..., None] * subtree_BJ[:, None, None]).flatten(2)
        ranked = value_BFX.sort(dim=-1, descending=True, stable=True)
        rank_X = torch.arange(value_BFX.shape[-1], device=value_BFX.device)
        is_taken_BFX = (rank_X < budget_BF[..., None]) & (ranked.values > 0)
        child_BFX = ranked.indices // subtree_BJ.shape[1]
        return torch.zeros_like(weight_BFK, dtype=torch.int64).scatter_add(2, child_BFX, is_taken_BFX.long())


def _roots(token_B: Tensor, row_R: Tensor) -> NodeTensors:
    """Return trees of roots alone."""
    is_root_BR = (row_R == 0).expand(len(token_B), -1)
    zeros_BR = torch.zeros_like(is_root_BR, dtype=torch.int64)
    return NodeTensors(
        token=token_B.long()[:, None] * is_root_BR,
        parent=zeros_BR,
        depth=zeros_BR,
        weight=is_root_BR.float(),
        path_prob=is_root_BR.double(),
        column=zeros_BR.clone(),  # static rows are filled in place
    )
