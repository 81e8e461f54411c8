"""Places a level's children in Triton for trees that do not grow best-first: one launch, a program per request.

    start(shape, table) -> GrowingRows      the counterpart of `DeviceShape.start`, whose torch code is its twin
    _place_static                           the rows of the next depth of a static tree or chain
    _place_budgeted                         splits the budgets of a level's nodes, and appends the children that get any

Rows never move, so that a launch writes only the new rows, into the tensors of the level before. The first one writes
all: the root, and those of later levels as they are without a node.

Legend: as in `drafter.tree.device_rows`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drafter.tree.best_first_device import (
    Candidates,
    DeviceShape,
    GrowingRows,
    NodeTensors,
    RowInputs,
    RowParameters,
)
from drafter.tree.device_rows import BudgetedShape, StaticShape


def start(shape: DeviceShape, table: Tensor) -> GrowingRows:
    """Return trees whose nodes are undefined until the first level is placed. table: see `RowParameters`."""
    if isinstance(shape, StaticShape):
        return _TritonStaticRows(shape, table)
    assert isinstance(shape, BudgetedShape)
    return _TritonBudgetedRows(shape, table)


class _TritonRows:
    """The memory that each level's launch fills further."""

    def __init__(self, table: Tensor, num_nodes: int, num_fields: int) -> None:
        B, R, device = len(table), 1 + num_nodes, table.device
        self._table, self._num_nodes = table, num_nodes
        # Token, parent, depth, column, and what else the shape keeps of a row.
        self._state = torch.empty(num_fields, B, R, dtype=torch.int64, device=device)
        weight_BR = torch.empty(B, R, dtype=torch.float32, device=device)
        path_prob_BR = torch.empty(B, R, dtype=torch.float64, device=device)
        self._inputs_4 = torch.empty(4, B, num_nodes, dtype=torch.int64, device=device)
        token, parent, depth, column = self._state[:4].unbind(0)
        self.nodes = NodeTensors(token, parent, depth, weight_BR, path_prob_BR, column)
        self.pruned_BD: Tensor | None = None


class _TritonStaticRows(_TritonRows):
    """See `drafter.tree.device_rows.StaticShape`."""

    def __init__(self, shape: StaticShape, table: Tensor) -> None:
        super().__init__(table, len(shape.row_R) - 1, num_fields=4)
        self._shape_4R = shape.rows_4R

    def place(self, candidates: Candidates, depth: int) -> RowInputs:
        """See `GrowingRows`."""
        nodes, (B, C) = self.nodes, candidates.weight.shape
        _place_static[(B,)](
            *candidates, self._table, self._shape_4R, self._state, nodes.weight, nodes.path_prob, self._inputs_4,
            self._table.shape[1], B, self._num_nodes, C, depth,
            IS_FIRST=depth == 0, ROWS=triton.next_power_of_2(1 + self._num_nodes),
        )  # fmt: skip
        return RowInputs(*self._inputs_4.unbind(0))


class _TritonBudgetedRows(_TritonRows):
    """See `drafter.tree.device_rows.BudgetedShape`."""

    def __init__(self, shape: BudgetedShape, table: Tensor) -> None:
        super().__init__(table, len(shape.row_R) - 1, num_fields=6)
        assert shape.subtree_DJ.shape[1] == self._num_nodes
        self._subtree_DJ = shape.subtree_DJ
        self.pruned_BD = torch.empty(len(table), len(shape.subtree_DJ), dtype=torch.int64, device=table.device)

    def place(self, candidates: Candidates, depth: int) -> RowInputs:
        """See `GrowingRows`."""
        nodes, (B, C) = self.nodes, candidates.weight.shape
        F = 1 if depth == 0 else self._num_nodes
        _place_budgeted[(B,)](
            *candidates, self._table, self._subtree_DJ,
            self._state, nodes.weight, nodes.path_prob, self._inputs_4, self.pruned_BD,
            self._table.shape[1], B, self._num_nodes, F, C // F, len(self._subtree_DJ), depth,
            IS_FIRST=depth == 0, ROWS=triton.next_power_of_2(1 + self._num_nodes),
            SCORED=triton.next_power_of_2(F), CHILDREN=triton.next_power_of_2(C // F),
        )  # fmt: skip
        return RowInputs(*self._inputs_4.unbind(0))


# Columns of the table of `RowParameters`.
_TOKEN, _BASE, _NUM_NODES, _MAX_DEPTH = (
    tl.constexpr(RowParameters._fields.index(name)) for name in ("token_B", "position_B", "num_nodes_B", "max_depth_B")
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


@triton.jit(do_not_specialize=["num_requests", "num_nodes", "num_scored", "k", "num_levels", "depth"])
def _place_budgeted(
    token_ptr, child_weight_ptr, child_path_prob_ptr, column_ptr, table_ptr, subtree_ptr,
    state_ptr, weight_ptr, path_prob_ptr, rows_ptr, pruned_ptr,
    table_width, num_requests, num_nodes, num_scored, k, num_levels, depth,
    IS_FIRST: tl.constexpr, ROWS: tl.constexpr, SCORED: tl.constexpr, CHILDREN: tl.constexpr,
):  # fmt: skip
    """Split the budgets, then append the children with any, in the order of their parents' rows, then by rank.

    A child's expected nodes have falling values. So merging those of a parent's children gives the order of a stable
    sort by value, whose ties go to the earlier child, and takes as many steps as the largest budget.
    """
    request = tl.program_id(0)
    num_rows = 1 + num_nodes
    field = num_requests * num_rows  # from one field of the rows to the next
    table_ptr += request * table_width
    state_ptr += request * num_rows
    scored = tl.arange(0, SCORED)
    is_scored = scored < num_scored
    if IS_FIRST:
        parent = scored
        budget = tl.where(is_scored, tl.load(table_ptr + _NUM_NODES).to(tl.int64), 0)
        parent_depth = tl.zeros([SCORED], tl.int64)
        ancestors = parent_depth + 1
        count = 1
    else:
        parent = 1 + scored
        parent_depth = tl.load(state_ptr + 2 * field + parent, mask=is_scored, other=0)
        ancestors = tl.load(state_ptr + 4 * field + parent, mask=is_scored, other=0)
        budget = tl.load(state_ptr + 5 * field + parent, mask=is_scored, other=0)
        count = 1 + tl.sum((parent_depth > 0).to(tl.int32), 0)
    rank = tl.arange(0, CHILDREN)[None, :]
    child = (request * num_scored + scored[:, None]) * k + rank
    weight = tl.load(child_weight_ptr + child, mask=is_scored[:, None] & (rank < k), other=0.0)

    levels_left = tl.load(table_ptr + _MAX_DEPTH).to(tl.int32) - depth
    subtree_ptr += (tl.minimum(tl.maximum(levels_left, 1), num_levels) - 1) * num_nodes
    size = tl.zeros([SCORED, CHILDREN], tl.int32)  # of each child's subtree, itself included
    for taken in range(tl.max(tl.where(tl.max(weight, 1) > 0.0, budget, 0), 0)):
        value = weight.to(tl.float64) * tl.load(subtree_ptr + size, mask=size < num_nodes, other=0.0)
        largest = tl.max(value, 1)
        chosen = tl.min(tl.where(value == largest[:, None], rank, CHILDREN), 1)
        is_taken = (largest > 0.0) & (taken < budget)
        size += ((rank == chosen[:, None]) & is_taken[:, None]).to(tl.int32)
    is_new = size > 0
    is_barren = (parent_depth == depth) & (tl.max(size, 1) == 0)
    tl.store(pruned_ptr + request * num_levels + depth, tl.sum(tl.where(is_barren, budget, 0), 0))

    is_new_flat = tl.reshape(is_new.to(tl.int32), [SCORED * CHILDREN])
    row = count - 1 + tl.reshape(tl.cumsum(is_new_flat, 0), [SCORED, CHILDREN])
    token = tl.load(token_ptr + child, mask=is_new, other=0)
    path_prob = tl.load(child_path_prob_ptr + child, mask=is_new, other=0.0)
    column = tl.load(column_ptr + child, mask=is_new, other=0)
    parent = tl.broadcast_to(parent[:, None], [SCORED, CHILDREN]).to(tl.int64)
    new_depth = tl.full([SCORED, CHILDREN], 1, tl.int64) + depth
    own_bit = tl.full([SCORED, CHILDREN], 1, tl.int64) << tl.where(is_new, row, 0).to(tl.int64)
    ancestors = ancestors[:, None] | own_bit
    base = tl.load(table_ptr + _BASE).to(tl.int64)
    field_N = num_requests * num_nodes
    weight_ptr += request * num_rows
    path_prob_ptr += request * num_rows
    rows_ptr += request * num_nodes - 1
    tl.debug_barrier()  # other threads have read the rows that this one writes
    out = state_ptr + row
    tl.store(out, token, mask=is_new)
    tl.store(out + field, parent, mask=is_new)
    tl.store(out + 2 * field, new_depth, mask=is_new)
    tl.store(out + 3 * field, column, mask=is_new)
    tl.store(out + 4 * field, ancestors, mask=is_new)
    tl.store(out + 5 * field, (size - 1).to(tl.int64), mask=is_new)
    tl.store(weight_ptr + row, weight, mask=is_new)
    tl.store(path_prob_ptr + row, path_prob, mask=is_new)
    out = rows_ptr + row
    tl.store(out, token, mask=is_new)
    tl.store(out + field_N, base + new_depth, mask=is_new)
    tl.store(out + 2 * field_N, ancestors, mask=is_new)
    tl.store(out + 3 * field_N, parent, mask=is_new)

    if IS_FIRST:
        # The root, and rows without a node: any valid token, position and parent; each sees the root and itself.
        row_R = tl.arange(0, ROWS)
        is_root = row_R == 0
        is_other = is_root | ((row_R > tl.sum(is_new_flat, 0)) & (row_R < num_rows))
        nothing = tl.zeros([ROWS], tl.int64)
        own_bit_R = 1 | (tl.full([ROWS], 1, tl.int64) << row_R.to(tl.int64))
        root = tl.where(is_root, tl.load(table_ptr + _TOKEN).to(tl.int64), 0)
        out_R = state_ptr + row_R
        tl.store(out_R, root, mask=is_other)
        tl.store(out_R + field, nothing, mask=is_other)
        tl.store(out_R + 2 * field, nothing, mask=is_other)
        tl.store(out_R + 3 * field, nothing, mask=is_other)
        tl.store(out_R + 4 * field, own_bit_R, mask=is_other)
        tl.store(out_R + 5 * field, nothing, mask=is_other)
        tl.store(weight_ptr + row_R, tl.where(is_root, 1.0, 0.0), mask=is_other)
        tl.store(path_prob_ptr + row_R, tl.where(is_root, 1.0, 0.0).to(tl.float64), mask=is_other)
        is_other = is_other & (row_R > 0)
        out_R = rows_ptr + row_R
        tl.store(out_R, nothing, mask=is_other)
        tl.store(out_R + field_N, nothing + base, mask=is_other)
        tl.store(out_R + 2 * field_N, own_bit_R, mask=is_other)
        tl.store(out_R + 3 * field_N, nothing, mask=is_other)
