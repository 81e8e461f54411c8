"""Static trees and chains on the device: each node's row is known before it is drafted.

    FixedShape(paths, device)        rows, parents and ancestors of all nodes, breadth-first
        .place(...)                  put a level's children into their rows

Rows never move, so a level only fills those of the next depth. A node is in a request's tree if its row is among the
first `num_nodes`, its parent is in it, and it is one of its parent's candidates.

Legend: B requests, N nodes of a tree, R = 1 + N rows, M rows of a level, F rows that are scored, K children,
C = F K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafter.tree.frontier import NodeTensors, RowInputs


class _Level(NamedTuple):
    """The rows of one depth."""

    first: int
    stop: int
    source_M: Tensor  # int64, each row's place among the candidates [F K] of the level before
    old_parent_N: Tensor  # int64, the parents of the rows that are filled by then, 0 for the others


class FixedShape:
    """The shape of a static tree. paths: breadth-first, e.g. ((0,), (1,), (0, 0))."""

    def __init__(self, paths: Sequence[tuple[int, ...]], device: torch.device) -> None:
        num_children = 1 + max(path[-1] for path in paths)
        row_of = {(): 0} | {path: 1 + i for i, path in enumerate(paths)}
        parents = [0, *(row_of[path[:-1]] for path in paths)]
        masks = [1]
        for row in range(1, len(parents)):
            masks.append(masks[parents[row]] | 1 << row)

        def on_device(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self.parent_R, self.depth_R = on_device(parents), on_device([0, *map(len, paths)])
        self.ancestors_R = on_device([mask - (1 << 64) if mask >> 63 else mask for mask in masks])
        self._row_R = on_device(range(len(parents)))
        self._levels: list[_Level] = []
        for depth in range(len(paths[-1])):
            rows = [row_of[path] for path in paths if len(path) == depth + 1]
            scored = [max(parents[row] - 1, 0) for row in rows]  # the root alone, or all rows but the root
            source = [at * num_children + paths[row - 1][-1] for at, row in zip(scored, rows, strict=True)]
            filled = [parent if row <= rows[-1] else 0 for row, parent in enumerate(parents)]
            self._levels.append(_Level(rows[0], rows[-1] + 1, on_device(source), on_device(filled[1:])))

    def roots(self, token_B: Tensor) -> NodeTensors:
        """Return trees of roots alone: all other rows have weight 0, and the parents and depths that they will have."""
        B, R = len(token_B), len(self.parent_R)
        is_root_BR = (self._row_R == 0).expand(B, R)
        return NodeTensors(
            token=token_B.long()[:, None] * is_root_BR,
            parent=self.parent_R.expand(B, R).contiguous(),
            depth=self.depth_R.expand(B, R).contiguous(),
            weight=is_root_BR.float(),
            path_prob=is_root_BR.double(),
            column=torch.zeros(B, R, dtype=torch.int64, device=token_B.device),
        )

    def place(
        self,
        nodes: NodeTensors,
        depth: int,
        num_nodes_B: Tensor,
        position_B: Tensor,
        *,
        token_BC: Tensor,
        weight_BC: Tensor,
        path_prob_BC: Tensor,
        column_BC: Tensor,
    ) -> RowInputs:
        """Fill the rows below depth `depth` from the candidates, and return what the draft model reads at all rows.

        position_B: the roots'. The four candidate tensors are those of the rows that were scored, in their order.
        """
        first, stop, source_M, old_parent_N = self._levels[depth]
        nodes.token[:, first:stop] = token_BC[:, source_M]
        nodes.path_prob[:, first:stop] = path_prob_BC[:, source_M]
        nodes.column[:, first:stop] = column_BC[:, source_M]
        nodes.weight[:, first:stop] = weight_BC[:, source_M] * (self._row_R[first:stop] <= num_nodes_B[:, None])
        shape = nodes.token[:, 1:].shape
        return RowInputs(
            token=nodes.token[:, 1:].contiguous(),
            position=position_B.long()[:, None] + self.depth_R[1:],
            ancestors=self.ancestors_R[1:].expand(shape).contiguous(),
            old_parent=old_parent_N.expand(shape).contiguous(),
        )
