"""The rows of static trees and chains in Triton: one launch a level, a program per request.

    TritonStaticRows(shape, table)      the counterpart of `drafter.tree.device_rows.StaticRows`

Rows never move, so that a launch writes only the new rows, into the tensors of the level before. The first one writes
all: the root, and those of later levels as they are without a node.

Legend: as in `drafter.tree.device_rows`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drafter.tree.device_rows import Candidates, NodeTensors, RowInputs, RowParameters, StaticShape


class TritonStaticRows:
    """The nodes are undefined until the first level is placed. table: see `RowParameters`."""

    def __init__(self, shape: StaticShape, table: Tensor) -> None:
        B, R, device = len(table), len(shape.row_R), table.device
        self._table, self._num_nodes, self._shape_4R = table, R - 1, shape.rows_4R
        self._state = torch.empty(4, B, R, dtype=torch.int64, device=device)  # token, parent, depth, column
        weight_BR = torch.empty(B, R, dtype=torch.float32, device=device)
        path_prob_BR = torch.empty(B, R, dtype=torch.float64, device=device)
        self._inputs_4 = torch.empty(4, B, R - 1, dtype=torch.int64, device=device)
        token, parent, depth, column = self._state.unbind(0)
        self.nodes = NodeTensors(token, parent, depth, weight_BR, path_prob_BR, column)

    def place(self, candidates: Candidates, depth: int) -> RowInputs:
        """See `StaticRows`."""
        nodes, (B, C) = self.nodes, candidates.weight.shape
        _place_static[(B,)](
            *candidates, self._table, self._shape_4R, self._state, nodes.weight, nodes.path_prob, self._inputs_4,
            self._table.shape[1], B, self._num_nodes, C, depth,
            IS_FIRST=depth == 0, ROWS=triton.next_power_of_2(1 + self._num_nodes),
        )  # fmt: skip
        return RowInputs(*self._inputs_4.unbind(0))


# Columns of the table of `RowParameters`.
_TOKEN, _BASE, _NUM_NODES = (
    tl.constexpr(RowParameters._fields.index(name)) for name in ("token_B", "position_B", "num_nodes_B")
)


@triton.jit(do_not_specialize=["num_requests", "num_nodes", "num_children", "depth"])
def _place_static(
    token_ptr, child_weight_ptr, child_path_prob_ptr, column_ptr, table_ptr, shape_ptr,
    state_ptr, weight_ptr, path_prob_ptr, rows_ptr,
    table_width, num_requests, num_nodes, num_children, depth,
    IS_FIRST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    num_rows = 1 + num_nodes
    table_ptr += request * table_width
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    parent = tl.load(shape_ptr + row, mask=is_row, other=0)
    row_depth = tl.load(shape_ptr + num_rows + row, mask=is_row, other=0)
    is_new = row_depth == depth + 1
    child = request * num_children + tl.load(shape_ptr + 3 * num_rows + row, mask=is_new, other=0)
    is_allowed = is_new & (row <= tl.load(table_ptr + _NUM_NODES))
    token = tl.load(token_ptr + child, mask=is_new, other=0)
    weight = tl.load(child_weight_ptr + child, mask=is_allowed, other=0.0)
    path_prob = tl.load(child_path_prob_ptr + child, mask=is_new, other=0.0)
    column = tl.load(column_ptr + child, mask=is_new, other=0)
    is_written = is_new
    if IS_FIRST:
        is_root = row == 0
        token = tl.where(is_root, tl.load(table_ptr + _TOKEN).to(tl.int64), token)
        weight = tl.where(is_root, 1.0, weight)
        path_prob = tl.where(is_root, 1.0, path_prob)
        is_written = is_row

    field = num_requests * num_rows  # from one field of the rows to the next
    field_N = num_requests * num_nodes
    at = request * num_rows + row
    tl.store(state_ptr + at, token, mask=is_written)
    tl.store(state_ptr + 3 * field + at, column, mask=is_written)
    tl.store(weight_ptr + at, weight, mask=is_written)
    tl.store(path_prob_ptr + at, path_prob, mask=is_written)
    is_input = is_written & (row > 0)
    out = rows_ptr + request * num_nodes + row - 1
    tl.store(out, token, mask=is_input)
    tl.store(out + 3 * field_N, tl.where(is_new, parent, 0), mask=is_input)  # others have no parent's feature yet
    if IS_FIRST:
        # Rows that are not filled yet have the places that they will have.
        tl.store(state_ptr + field + at, parent, mask=is_row)
        tl.store(state_ptr + 2 * field + at, row_depth, mask=is_row)
        base = tl.load(table_ptr + _BASE).to(tl.int64)
        ancestors = tl.load(shape_ptr + 2 * num_rows + row, mask=is_row, other=0)
        tl.store(out + field_N, base + row_depth, mask=is_input)
        tl.store(out + 2 * field_N, ancestors, mask=is_input)
