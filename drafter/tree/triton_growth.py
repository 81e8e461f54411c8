"""Growth on the device in Triton, in the shapes of `drafter.tree.device`: the trees that grow on the host as well.

Three launches a level, and a fourth that collects the features which the draft model reads next:

    _best_of_block       a program per row and block of columns: its best children, and its part of both sums
    _score_children     a program per row: the best of the blocks, their weights and path probabilities
    _keep_best          a program per request: ranks tree and children, keeps the best, renumbers their rows
    _place_static       the same of static trees, whose rows never move: fills in those of the new level
    _gather_features    a program per row: the feature of its parent, wherever the parent's row was

With truncation or penalties, `_penalize` and `_mask_min_p` edit the logits first, a program per row and block.

The table of requests counts the levels, and the third launch increments it. So the launches of all levels below the
first are the same, and one graph of them is replayed for each. Only the rows of the last level's nodes are scored.

Ranks are counted, not sorted: a candidate's rank is the number of better ones, which needs no memory between threads.

Legend: B requests, N nodes of a tree, R = 1 + N rows, F rows that are read (the root, then all rows but the root),
K children, C = F K children of a level, V draft vocabulary, S blocks of a row, X width of the draft model's output,
H width of a feature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from drafter.tree.device import PARAMETERS, GrowInputs, StaticOptions, TreeTensors, requests_at_once
from workers.kernels.triton_sampling import _gumbel, _log, _philox

_BLOCK = 2048
_FEATURE_BLOCK = 1024


class _Children(NamedTuple):
    """A level's candidate children, in the order of their parents. A weight of 0 = not to be drafted."""

    fields_2BC: Tensor  # int64 token, column
    weight_BC: Tensor  # float32
    path_prob_BC: Tensor  # float64


def add_level(
    trees: TreeTensors,
    inputs: GrowInputs,
    options: StaticOptions,
    logits: Callable[[slice], Tensor],
    hidden_BFX: Tensor,
    *,
    is_first: bool,
) -> None:
    """Add the children of the nodes of the last level; no value is read on the host.

    logits: of some requests' roots (F = 1) or all other rows (F = N), [rows, V]. hidden_BFX: the features for the
    children of all of them, contiguous; not read where the draft model has none.
    """
    B, F = len(inputs.table), 1 if is_first else trees.num_nodes
    K, device = min(options.tree.num_children, options.vocab.size), inputs.table.device
    children = _Children(
        torch.empty(2, B, F * K, dtype=torch.int64, device=device),
        torch.empty(B, F * K, dtype=torch.float32, device=device),
        torch.empty(B, F * K, dtype=torch.float64, device=device),
    )
    count = requests_at_once(F, options.vocab.size)
    for begin in range(0, B, count):
        own = slice(begin, begin + count)
        _score(trees.rows_of(own), inputs.rows_of(own), options, logits(own), children, begin, is_first=is_first)
    (_keep if options.static_4R is None else _place)(trees, inputs.table, options, children, is_first=is_first)
    if H := trees.feature_BNH.shape[2]:
        N, features_BH = trees.num_nodes, inputs.features_BH
        _gather_features[(B * N, triton.cdiv(H, _FEATURE_BLOCK))](
            features_BH, features_BH if is_first else hidden_BFX, trees.inputs_4BN[3], trees.feature_BNH,
            N, H, features_BH.stride(0), BLOCK=_FEATURE_BLOCK,
        )  # fmt: skip


def _score(
    trees: TreeTensors,
    inputs: GrowInputs,
    options: StaticOptions,
    logits_FV: Tensor,
    children: _Children,
    begin: int,
    *,
    is_first: bool,
) -> None:
    """Fill in the children of some requests, of which `begin` is the first. logits_FV: of all their rows."""
    table, device = inputs.table, logits_FV.device
    B, (rows, V) = len(table), logits_FV.shape
    F, K = rows // B, min(options.tree.num_children, options.vocab.size)
    splits, width = triton.cdiv(V, _BLOCK), table.shape[1]
    floor_F, ids = table, options.vocab.target_ids
    depth_BR = trees.state_5BR[2]
    assert logits_FV.is_contiguous() and depth_BR.is_contiguous()
    if is_processed := options.has_truncation or options.has_penalties:
        logits_FV, floor_F = _processed(trees, inputs, options, logits_FV, splits, is_first=is_first)
    value_2 = torch.empty(2, rows, splits, K, dtype=torch.float32, device=device)  # s, x
    column = torch.empty(rows, splits, K, dtype=torch.int64, device=device)
    sums_3 = torch.empty(3, rows, splits, dtype=torch.float32, device=device)
    ids = column if ids is None else ids
    _best_of_block[(rows, splits)](
        logits_FV, table, floor_F, ids, depth_BR, value_2, column, sums_3,
        V, width, F, splits, K, 1 + trees.num_nodes,
        IS_PROCESSED=is_processed, IS_FIRST=is_first, HAS_IDS=ids is not column, BLOCK=_BLOCK,
    )  # fmt: skip
    own = slice(begin, begin + B)
    _score_children[(rows,)](
        value_2, column, sums_3, table, inputs.log_odds_D, ids, depth_BR, trees.weight_BR, trees.path_prob_BR,
        children.fields_2BC[:, own], children.weight_BC[own], children.path_prob_BC[own],
        width, F, splits, K, 1 + trees.num_nodes, children.weight_BC.numel(),
        IS_FIRST=is_first, HAS_IDS=ids is not column,
        FOUND=triton.next_power_of_2(splits * K), SPLITS=triton.next_power_of_2(splits),
    )  # fmt: skip


def _keep(trees: TreeTensors, table: Tensor, options: StaticOptions, children: _Children, *, is_first: bool) -> None:
    """Keep the best of tree and children."""
    (B, C), N, R = children.weight_BC.shape, trees.num_nodes, 1 + trees.num_nodes
    K = min(options.tree.num_children, options.vocab.size)
    new_row_BR = torch.empty(B, R, dtype=torch.int64, device=table.device)
    _keep_best[(B,)](
        *children, table, trees.state_5BR, trees.weight_BR, trees.path_prob_BR, trees.inputs_4BN, new_row_BR,
        table.shape[1], B, N, C, K,
        IS_FIRST=is_first, HAS_LEAF_SIBLINGS=options.has_leaf_siblings,
        ROWS=triton.next_power_of_2(R), CANDIDATES=triton.next_power_of_2(R + C), CHUNK=16,
    )  # fmt: skip


def _place(trees: TreeTensors, table: Tensor, options: StaticOptions, children: _Children, *, is_first: bool) -> None:
    """Put the children into their rows of a static tree.

    The first level writes all rows: the root, and those of later levels as they are without a node. The others write
    the new rows alone.
    """
    (B, C), N = children.weight_BC.shape, trees.num_nodes
    assert options.static_4R is not None
    _place_static[(B,)](
        *children, table, options.static_4R, trees.state_5BR, trees.weight_BR, trees.path_prob_BR, trees.inputs_4BN,
        table.shape[1], B, N, C, options.static_4R.stride(0),
        IS_FIRST=is_first, ROWS=triton.next_power_of_2(1 + N),
    )  # fmt: skip


def _processed(
    trees: TreeTensors,
    inputs: GrowInputs,
    options: StaticOptions,
    logits_FV: Tensor,
    splits: int,
    *,
    is_first: bool,
) -> tuple[Tensor, Tensor]:
    """Return the logits after penalties, temperature and min-p, and the threshold of top-k and top-p [F]."""
    table, count_BV, device, N = inputs.table, inputs.count_BV, logits_FV.device, trees.num_nodes
    rows, V = logits_FV.shape
    F = rows // len(table)
    assert count_BV.stride(1) == 1
    x_FV = torch.empty(rows, V, dtype=torch.float32, device=device)
    maxima = torch.empty(rows, splits, dtype=torch.float32, device=device)
    top_k_F = torch.empty(rows, dtype=torch.int32, device=device)
    top_p_F = torch.empty(rows, dtype=torch.float32, device=device)
    _penalize[(rows, splits)](
        logits_FV, count_BV, trees.inputs_4BN[2], trees.state_5BR[3], table, x_FV, maxima, top_k_F, top_p_F,
        V, count_BV.stride(0), table.shape[1], F, N, splits,
        HAS_PENALTIES=options.has_penalties, IS_FIRST=is_first, BLOCK=_BLOCK,
    )  # fmt: skip
    _mask_min_p[(rows, splits)](
        x_FV, maxima, table, V, table.shape[1], F, splits, BLOCK=_BLOCK, SPLITS=triton.next_power_of_2(splits)
    )
    return x_FV, options.kernels.truncation_threshold(x_FV, top_k_F, top_p_F)


(
    _TOKEN, _BASE, _HAS_NOISE, _NUM_NODES, _MAX_DEPTH, _MIN_PROB, _PATH_PROB, _TEMPERATURE,
    _TOP_K, _TOP_P, _MIN_P, _TAU, _REPETITION, _FREQUENCY, _PRESENCE, _IS_AUTO, _SEED, _INDEX, _LEVEL,
) = map(tl.constexpr, range(len(PARAMETERS)))  # the columns of their table  # fmt: skip


@triton.jit(do_not_specialize=["num_columns", "num_scored", "num_nodes", "num_splits"])
def _penalize(
    logits_ptr, count_ptr, ancestors_ptr, node_column_ptr, table_ptr, out_ptr, maxima_ptr, top_k_ptr, top_p_ptr,
    num_columns, count_stride, table_width, num_scored, num_nodes, num_splits,
    HAS_PENALTIES: tl.constexpr, IS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Penalties along each row's own path (`workers.sampling.logits_processors`), then temperature.

    Also stores the row's top-k and top-p. Greedy rows have none.
    """
    row, split = tl.program_id(0), tl.program_id(1)
    request = row // num_scored
    table_ptr += request * table_width
    column = split * BLOCK + tl.arange(0, BLOCK)
    is_column = column < num_columns
    place = row.to(tl.int64) * num_columns + column
    x = tl.load(logits_ptr + place, mask=is_column, other=float("-inf")).to(tl.float32)
    if HAS_PENALTIES:
        count = tl.load(count_ptr + request.to(tl.int64) * count_stride + column, mask=is_column, other=0.0)
        on_path = tl.zeros([BLOCK], tl.float32)
        if not IS_FIRST:
            ancestors = tl.load(ancestors_ptr + row)
            for node in range(1, 1 + num_nodes):
                node_column = tl.load(node_column_ptr + request * (1 + num_nodes) + node)
                bit = ((ancestors >> node) & 1).to(tl.float32)
                on_path += tl.where(column == node_column, bit, 0.0)
        repetition = tl.load(table_ptr + _REPETITION).to(tl.float32)
        repeated = tl.where(x > 0.0, tl.div_rn(x, repetition + tl.zeros([BLOCK], tl.float32)), x * repetition)
        repeated = tl.where((count != -1.0) | (on_path > 0.0), repeated, x)
        count = tl.maximum(count, 0.0) + on_path
        x = repeated - tl.load(table_ptr + _FREQUENCY).to(tl.float32) * count
        x = x - tl.load(table_ptr + _PRESENCE).to(tl.float32) * (count > 0.0).to(tl.float32)
    temperature = tl.load(table_ptr + _TEMPERATURE).to(tl.float32)
    is_hot = temperature > 0.0
    x = tl.div_rn(x, tl.where(is_hot, temperature, 1.0) + tl.zeros([BLOCK], tl.float32))
    if split == 0:
        tl.store(top_k_ptr + row, tl.where(is_hot, tl.load(table_ptr + _TOP_K).to(tl.int32), 0))
        tl.store(top_p_ptr + row, tl.where(is_hot, tl.load(table_ptr + _TOP_P).to(tl.float32), 1.0))
    tl.store(out_ptr + place, x, mask=is_column)
    tl.store(maxima_ptr + row * num_splits + split, tl.max(tl.where(is_column, x, float("-inf")), 0))


@triton.jit(do_not_specialize=["num_columns", "num_scored", "num_splits"])
def _mask_min_p(
    x_ptr, maxima_ptr, table_ptr, num_columns, table_width, num_scored, num_splits,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0), tl.program_id(1)
    table_ptr += (row // num_scored) * table_width
    min_p = tl.load(table_ptr + _MIN_P).to(tl.float32)
    if (min_p > 0.0) & (tl.load(table_ptr + _TEMPERATURE) > 0.0):
        part = tl.arange(0, SPLITS)
        maxima = tl.load(maxima_ptr + row * num_splits + part, mask=part < num_splits, other=float("-inf"))
        floor = tl.max(maxima, 0) + tl.log(min_p)
        column = split * BLOCK + tl.arange(0, BLOCK)
        place = x_ptr + row.to(tl.int64) * num_columns + column
        x = tl.load(place, mask=column < num_columns, other=0.0)
        tl.store(place, tl.where(x < floor, float("-inf"), x), mask=column < num_columns)


@triton.jit
def _tau(table_ptr):
    tau = tl.load(table_ptr + _TAU)
    return tl.where(tau > 0.0, tau, 1.0).to(tl.float32)  # padding must not produce NaN


@triton.jit
def _num_levels(table_ptr, IS_FIRST: tl.constexpr):
    """Return the levels of a request's tree so far: the depth of the nodes whose children are added."""
    level = tl.full([], 0, tl.int64)
    if not IS_FIRST:
        level = tl.load(table_ptr + _LEVEL).to(tl.int64)
    return level


@triton.jit
def _noise(table_ptr, level, token):
    """Return the target's Gumbel noise for these target ids, as children of nodes at this depth."""
    seed = tl.load(table_ptr + _SEED).to(tl.int64, bitcast=True)
    index = tl.load(table_ptr + _INDEX).to(tl.int64) + level
    r0, r1, r2, r3 = _philox(seed, index, token // 4)
    low, high = tl.where(token % 2 == 0, r0, r1), tl.where(token % 2 == 0, r2, r3)
    return _gumbel(tl.where(token % 4 < 2, low, high))


@triton.jit(do_not_specialize=["num_columns", "num_scored", "num_splits", "k", "num_rows"])
def _best_of_block(
    logits_ptr, table_ptr, floor_ptr, ids_ptr, depth_ptr, values_ptr, columns_ptr, sums_ptr,
    num_columns, table_width, num_scored, num_splits, k, num_rows,
    IS_PROCESSED: tl.constexpr, IS_FIRST: tl.constexpr, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x = logits / temperature, s = x + G: store the k largest s with their x, and max and sum of both."""
    row, split = tl.program_id(0), tl.program_id(1)
    request = row // num_scored
    table_ptr += request * table_width
    level = _num_levels(table_ptr, IS_FIRST)
    if not IS_FIRST:
        if tl.load(depth_ptr + request * num_rows + 1 + row % num_scored) != level:
            return
    column = split * BLOCK + tl.arange(0, BLOCK)
    is_column = column < num_columns
    x = tl.load(logits_ptr + row.to(tl.int64) * num_columns + column, mask=is_column, other=float("-inf"))
    x = x.to(tl.float32)
    if IS_PROCESSED:
        x = tl.where(x < tl.load(floor_ptr + row), float("-inf"), x)
    else:
        temperature = tl.load(table_ptr + _TEMPERATURE).to(tl.float32)
        x = tl.div_rn(x, tl.where(temperature > 0.0, temperature, 1.0))
    s = x
    if tl.load(table_ptr + _HAS_NOISE) > 0.0:
        token = column.to(tl.int64)
        if HAS_IDS:
            token = tl.load(ids_ptr + column, mask=is_column, other=0)
        s = x + _noise(table_ptr, level, token)
    tau = _tau(table_ptr)
    x_max, s_max = tl.max(x, 0), tl.max(s, 0)
    x_anchor = tl.where(x_max == float("-inf"), 0.0, x_max)
    s_anchor = tl.where(s_max == float("-inf"), 0.0, s_max)
    part = row * num_splits + split
    num_parts = tl.num_programs(0) * num_splits
    tl.store(sums_ptr + part, x_max)
    tl.store(sums_ptr + num_parts + part, x_anchor + _log(tl.sum(tl.exp(x - x_anchor), 0)))
    tl.store(sums_ptr + 2 * num_parts + part, s_anchor / tau + _log(tl.sum(tl.exp((s - s_anchor) / tau), 0)))
    is_left = is_column
    found = part.to(tl.int64) * k
    num_found = num_parts.to(tl.int64) * k
    for i in range(k):
        value = tl.max(tl.where(is_left, s, float("-inf")), 0)
        chosen = tl.min(tl.where(is_left & (s == value), column, 0x7FFFFFFF), 0)
        tl.store(values_ptr + found + i, value)
        tl.store(values_ptr + num_found + found + i, tl.max(tl.where(column == chosen, x, float("-inf")), 0))
        tl.store(columns_ptr + found + i, chosen.to(tl.int64))  # 0x7FFFFFFF if the block has no more columns
        is_left = is_left & (column != chosen)


@triton.jit
def _lse(parts_ptr, num_splits, SPLITS: tl.constexpr):
    """Return the log of the sum of the blocks' sums."""
    split = tl.arange(0, SPLITS)
    lses = tl.load(parts_ptr + split, mask=split < num_splits, other=float("-inf"))
    largest = tl.max(lses, 0)
    anchor = tl.where(largest == float("-inf"), 0.0, largest)
    return anchor + _log(tl.sum(tl.exp(lses - anchor), 0))


@triton.jit(do_not_specialize=["num_scored", "num_splits", "k", "num_rows", "num_children"])
def _score_children(
    values_ptr, columns_ptr, sums_ptr, table_ptr, log_odds_ptr, ids_ptr, depth_ptr, weight_ptr, path_prob_ptr,
    children_ptr, child_weight_ptr, child_path_prob_ptr,
    table_width, num_scored, num_splits, k, num_rows, num_children,
    IS_FIRST: tl.constexpr, HAS_IDS: tl.constexpr, FOUND: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge a row's blocks; a child's weight is 0 unless its parent is open (`drafter.tree.thresholds`)."""
    row = tl.program_id(0)
    request = row // num_scored
    table_ptr += request * table_width
    level = _num_levels(table_ptr, IS_FIRST)
    out = row.to(tl.int64) * k
    if not IS_FIRST:
        if tl.load(depth_ptr + request * num_rows + 1 + row % num_scored) != level:
            for i in range(k):
                tl.store(child_weight_ptr + out + i, 0.0)
            return
    tau = _tau(table_ptr)
    num_parts = tl.num_programs(0) * num_splits
    split = tl.arange(0, SPLITS)
    maxima = tl.load(sums_ptr + row * num_splits + split, mask=split < num_splits, other=float("-inf"))
    x_lse = _lse(sums_ptr + num_parts + row * num_splits, num_splits, SPLITS)
    s_lse = _lse(sums_ptr + 2 * num_parts + row * num_splits, num_splits, SPLITS)
    top_prob = tl.exp(tl.max(maxima, 0) - x_lse)
    log_odds = tl.load(log_odds_ptr + level)
    parent_weight = tl.full([], 1.0, tl.float32)
    parent_prob = tl.full([], 1.0, tl.float64)
    is_open = level < tl.load(table_ptr + _MAX_DEPTH)
    if not IS_FIRST:
        parent = request * num_rows + 1 + row % num_scored
        parent_weight = tl.load(weight_ptr + parent)
        parent_prob = tl.load(path_prob_ptr + parent)
    passes = parent_prob >= tl.load(table_ptr + _PATH_PROB)
    passes = passes & (top_prob.to(tl.float64) >= tl.load(table_ptr + _MIN_PROB))
    is_open = is_open & (passes | (tl.load(table_ptr + _IS_AUTO) == 0.0))
    place = tl.arange(0, FOUND)
    is_found = place < num_splits * k
    mine = row.to(tl.int64) * num_splits * k + place
    values = tl.load(values_ptr + mine, mask=is_found, other=float("-inf"))
    xs = tl.load(values_ptr + num_parts.to(tl.int64) * k + mine, mask=is_found, other=float("-inf"))
    columns = tl.load(columns_ptr + mine, mask=is_found, other=0x7FFFFFFF)
    is_left = columns != 0x7FFFFFFF
    for i in range(k):
        value = tl.max(tl.where(is_left, values, float("-inf")), 0)
        chosen = tl.min(tl.where(is_left & (values == value), columns, 0x7FFFFFFF), 0)
        x = tl.max(tl.where(columns == chosen, xs, float("-inf")), 0)
        is_left = is_left & (columns != chosen)
        column = tl.where(chosen == 0x7FFFFFFF, 0, chosen)  # with NaN logits no value is the largest
        confidence = tl.exp(value / tau - s_lse)
        # `drafter.tree.cost_model.calibrate`
        inner = tl.minimum(tl.maximum(confidence, 1e-12), 1.0 - 1e-6)
        calibrated = 1.0 / (1.0 + tl.exp(-(tl.log(inner / (1.0 - inner)) + log_odds)))
        weight = parent_weight * calibrated
        is_child = is_open & (confidence > 0.0) & (weight > 0.0)  # NaN is no child
        token = column
        if HAS_IDS:
            token = tl.load(ids_ptr + column)
        tl.store(children_ptr + out + i, token)
        tl.store(children_ptr + num_children + out + i, column)
        tl.store(child_weight_ptr + out + i, tl.where(is_child, weight, 0.0))
        path_prob = parent_prob * tl.exp(x - x_lse).to(tl.float64)
        tl.store(child_path_prob_ptr + out + i, tl.where(passes, path_prob, -tl.abs(path_prob)))


@triton.jit(do_not_specialize=["num_requests", "num_nodes", "num_children", "k"])
def _keep_best(
    children_ptr, child_weight_ptr, child_path_prob_ptr, table_ptr,
    state_ptr, weight_ptr, path_prob_ptr, rows_ptr, new_row_ptr,
    table_width, num_requests, num_nodes, num_children, k,
    IS_FIRST: tl.constexpr, HAS_LEAF_SIBLINGS: tl.constexpr,
    ROWS: tl.constexpr, CANDIDATES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Keep a request's root and its best candidates in their order; ties go to the earlier one.

    Candidates are the rows of the tree, then the children of its rows in their order. The new tree replaces the old
    one: every load of the old precedes the barrier, every store of the new follows it.
    """
    request = tl.program_id(0)
    num_rows = 1 + num_nodes
    table_ptr += request * table_width
    depth = _num_levels(table_ptr, IS_FIRST)
    old = request * num_rows
    field = num_requests * num_rows  # from one field of the rows to the next
    own_children = request * num_children
    candidate = tl.arange(0, CANDIDATES)
    is_row = candidate < num_rows
    is_child = (candidate >= num_rows) & (candidate < num_rows + num_children)
    child = own_children + candidate - num_rows
    child_weight = tl.load(child_weight_ptr + child, mask=is_child, other=0.0)
    child_prob = tl.load(child_path_prob_ptr + child, mask=is_child, other=0.0)
    child_token = tl.load(children_ptr + child, mask=is_child, other=0)
    child_column = tl.load(children_ptr + num_requests * num_children + child, mask=is_child, other=0)
    if IS_FIRST:
        is_root = candidate == 0
        old_weight = tl.where(is_root, 1.0, 0.0)
        old_prob = tl.where(is_root, 1.0, 0.0).to(tl.float64)
        old_token = tl.where(is_root, tl.load(table_ptr + _TOKEN).to(tl.int64), 0)
        old_parent = tl.zeros([CANDIDATES], tl.int64)
        old_depth = old_parent
        old_column = old_parent
        parent = old_parent
        old_ancestors = old_parent + 1
    else:
        row = old + candidate
        old_weight = tl.load(weight_ptr + row, mask=is_row, other=0.0)
        old_prob = tl.load(path_prob_ptr + row, mask=is_row, other=0.0)
        old_token = tl.load(state_ptr + row, mask=is_row, other=0)
        old_parent = tl.load(state_ptr + field + row, mask=is_row, other=0)
        old_depth = tl.load(state_ptr + 2 * field + row, mask=is_row, other=0)
        old_column = tl.load(state_ptr + 3 * field + row, mask=is_row, other=0)
        parent = tl.where(is_row, old_parent, 1 + (candidate - num_rows) // k)
        known = tl.where(is_row, candidate, parent)  # a child's path is its parent's and itself
        old_ancestors = tl.load(state_ptr + 4 * field + old + known, mask=is_row | is_child, other=0)
    weight = tl.where(is_row, old_weight, child_weight)

    rank = tl.zeros([CANDIDATES], tl.int32)
    for begin in range(0, num_rows + num_children, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        other_weight = tl.load(
            child_weight_ptr + own_children + other - num_rows,
            mask=(other >= num_rows) & (other < num_rows + num_children),
            other=0.0,
        )
        if IS_FIRST:
            other_weight = tl.where(other == 0, 1.0, other_weight)
        else:
            own_weight = tl.load(weight_ptr + old + other, mask=other < num_rows, other=0.0)
            other_weight = tl.where(other < num_rows, own_weight, other_weight)
        is_better = (other_weight[None, :] > weight[:, None]) | (
            (other_weight[None, :] == weight[:, None]) & (other[None, :] < candidate[:, None])
        )
        rank += tl.sum(is_better.to(tl.int32), 1)
    is_kept = (weight > 0.0) & (rank <= tl.load(table_ptr + _NUM_NODES)) & (rank < num_rows)
    new_row = tl.cumsum(is_kept.to(tl.int32), 0).to(tl.int64) - 1
    num_kept = tl.sum(is_kept.to(tl.int32), 0)

    tl.store(new_row_ptr + old + candidate, new_row, mask=is_row)
    tl.debug_barrier()  # other threads read what this one has written
    new_parent = tl.load(new_row_ptr + old + parent, mask=is_kept, other=0)
    one = tl.full([CANDIDATES], 1, tl.int64)
    ancestors = tl.where(is_child, one << tl.where(is_kept, new_row, 0), 0)
    for ancestor in range(num_rows):
        ancestors |= ((old_ancestors >> ancestor) & 1) << tl.maximum(tl.load(new_row_ptr + old + ancestor), 0)

    token = tl.where(is_row, old_token, child_token)
    new_depth = tl.where(is_row, old_depth, depth + 1)
    if HAS_LEAF_SIBLINGS:  # whose depth is negative, so that they are never nodes of the last level
        is_leaf = is_child & ((candidate - num_rows) % k > 0)
        new_depth = tl.where(is_leaf, -new_depth, new_depth)
    out = state_ptr + old + new_row
    tl.store(out, token, mask=is_kept)
    tl.store(out + field, new_parent, mask=is_kept)
    tl.store(out + 2 * field, new_depth, mask=is_kept)
    tl.store(out + 3 * field, tl.where(is_row, old_column, child_column), mask=is_kept)
    tl.store(out + 4 * field, ancestors, mask=is_kept)
    tl.store(weight_ptr + old + new_row, weight, mask=is_kept)
    tl.store(path_prob_ptr + old + new_row, tl.where(is_row, old_prob, child_prob), mask=is_kept)
    base = tl.load(table_ptr + _BASE).to(tl.int64)
    is_input = is_kept & (new_row > 0)
    out = rows_ptr + request * num_nodes + new_row - 1
    field_N = num_requests * num_nodes
    tl.store(out, token, mask=is_input)
    tl.store(out + field_N, base + new_depth, mask=is_input)
    tl.store(out + 2 * field_N, ancestors, mask=is_input)
    tl.store(out + 3 * field_N, parent, mask=is_input)

    # Rows without a node: any valid token, position and parent; each sees the root and itself.
    row_R = tl.arange(0, ROWS)
    is_empty = (row_R >= num_kept) & (row_R < num_rows)
    nothing = tl.zeros([ROWS], tl.int64)
    own_bit = 1 | (tl.full([ROWS], 1, tl.int64) << tl.where(is_empty, row_R, 0).to(tl.int64))
    out = state_ptr + old + row_R
    tl.store(out, nothing, mask=is_empty)
    tl.store(out + field, nothing, mask=is_empty)
    tl.store(out + 2 * field, nothing, mask=is_empty)
    tl.store(out + 3 * field, nothing, mask=is_empty)
    tl.store(out + 4 * field, own_bit, mask=is_empty)
    tl.store(weight_ptr + old + row_R, tl.zeros([ROWS], tl.float32), mask=is_empty)
    tl.store(path_prob_ptr + old + row_R, tl.zeros([ROWS], tl.float64), mask=is_empty)
    is_input = is_empty & (row_R > 0)
    out = rows_ptr + request * num_nodes + row_R - 1
    tl.store(out, nothing, mask=is_input)
    tl.store(out + field_N, nothing + base, mask=is_input)
    tl.store(out + 2 * field_N, own_bit, mask=is_input)
    tl.store(out + 3 * field_N, nothing, mask=is_input)
    tl.store(table_ptr + _LEVEL, (depth + 1).to(tl.float64))


@triton.jit(do_not_specialize=["num_requests", "num_nodes", "num_children", "shape_stride"])
def _place_static(
    children_ptr, child_weight_ptr, child_path_prob_ptr, table_ptr, shape_ptr,
    state_ptr, weight_ptr, path_prob_ptr, rows_ptr,
    table_width, num_requests, num_nodes, num_children, shape_stride,
    IS_FIRST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    num_rows = 1 + num_nodes
    table_ptr += request * table_width
    depth = _num_levels(table_ptr, IS_FIRST)
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    parent = tl.load(shape_ptr + row, mask=is_row, other=0)
    row_depth = tl.load(shape_ptr + shape_stride + row, mask=is_row, other=0)
    is_new = row_depth == depth + 1
    child = request * num_children + tl.load(shape_ptr + 3 * shape_stride + row, mask=is_new, other=0)
    is_allowed = is_new & (row <= tl.load(table_ptr + _NUM_NODES))
    token = tl.load(children_ptr + child, mask=is_new, other=0)
    weight = tl.load(child_weight_ptr + child, mask=is_allowed, other=0.0)
    path_prob = tl.load(child_path_prob_ptr + child, mask=is_new, other=0.0)
    column = tl.load(children_ptr + num_requests * num_children + child, mask=is_new, other=0)
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
        ancestors = tl.load(shape_ptr + 2 * shape_stride + row, mask=is_row, other=0)
        tl.store(out + field_N, base + row_depth, mask=is_input)
        tl.store(out + 2 * field_N, ancestors, mask=is_input)
    tl.debug_barrier()  # other threads have read the level
    tl.store(table_ptr + _LEVEL, (depth + 1).to(tl.float64))


@triton.jit(do_not_specialize=["num_nodes"])
def _gather_features(roots_ptr, hidden_ptr, parent_ptr, out_ptr, num_nodes, width, root_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    request = row // num_nodes
    parent = tl.load(parent_ptr + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < width
    if parent == 0:
        feature = tl.load(roots_ptr + request * root_stride + column, mask=is_column)
    else:
        feature = tl.load(hidden_ptr + (request * num_nodes + parent - 1) * width + column, mask=is_column)
    tl.store(out_ptr + row * width + column, feature, mask=is_column)
