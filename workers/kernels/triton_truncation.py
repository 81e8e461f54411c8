"""The truncation threshold of top-k and top-p in Triton, without sorting.

Floats are mapped to integers in the same order, among which the threshold is found by binary search. Usually few tokens
are kept, so the search reads only a list of them, and a row is read once, by several programs:

    _groups               a program per row and block: the largest value of each group of columns, and the group's mass
    _bound                a program per row: a lower bound of the threshold, from the groups
    _list                 a program per row and block: the values from the bound on, if the block has any
    _search               a program per row: the threshold, in the list, or in the whole row if the list overflows

Programs append to the list in any order. Masses are therefore added as integers, whose sum does not depend on it. Where
blocks begin depends on the width alone, so a row's threshold does not depend on other rows.

Legend: R rows, V columns, S blocks of a row, G groups of a row, L listed values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _GROUP = 2048, 32
_LISTED = 8192
_ROW_BLOCK = 4096


def truncation_threshold(x_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """See `workers.kernels.select.Kernels.truncation_threshold`."""
    R, V = x_RV.shape
    assert x_RV.stride(1) == 1 and x_RV.dtype == torch.float32
    threshold_R = torch.empty(R, dtype=torch.float32, device=x_RV.device)
    if not R:
        return threshold_R
    splits, groups = triton.cdiv(V, _BLOCK), _BLOCK // _GROUP
    found, listed = triton.next_power_of_2(splits * groups), min(_LISTED, max(16, triton.next_power_of_2(V)))
    group_2RG, row_2R = x_RV.new_empty(2, R, splits * groups), x_RV.new_empty(2, R)  # largest value and mass
    bound_R, count_R = torch.empty(2, R, dtype=torch.int32, device=x_RV.device).unbind(0)
    lists_RL = x_RV.new_empty(R, listed)
    stride = x_RV.stride(0)
    _groups[(R, splits)](x_RV, top_k_R, top_p_R, *group_2RG.unbind(0), V, stride, splits, GROUP=_GROUP, BLOCK=_BLOCK)
    _bound[(R,)](
        top_k_R, top_p_R, *group_2RG.unbind(0), *row_2R.unbind(0), bound_R, count_R, V, splits,
        GROUP=_GROUP, GROUPS=groups, FOUND=found, num_warps=_warps(found),
    )  # fmt: skip
    _list[(R, splits)](
        x_RV, top_k_R, top_p_R, group_2RG[0], bound_R, count_R, lists_RL, V, stride, splits,
        GROUPS=groups, BLOCK=_BLOCK, LISTED=listed,
    )  # fmt: skip
    _search[(R,)](
        x_RV, top_k_R, top_p_R, *row_2R.unbind(0), bound_R, count_R, lists_RL, threshold_R, V, stride,
        LISTED=listed, BLOCK=_ROW_BLOCK, num_warps=_warps(listed),
    )  # fmt: skip
    return threshold_R


def _warps(values: int) -> int:
    """Return the warps of a program that holds this many values: 16 for each thread, at most 16 warps."""
    return max(4, min(16, values // 512))


_LOWEST = tl.constexpr(-2139095041)
"""The key of -inf."""
_UNIT = tl.constexpr(float(1 << 40))
"""The mass of a row's largest value, as an integer: as many as 2^23 of them fit into 64 bits."""
_ROUGH = tl.constexpr(1 << 15)
"""The bound is searched up to so many floats; the list is longer by the values among them."""


@triton.jit
def _key(x):
    """Map float32 to int32 in the same order, with equal keys for both zeros."""
    bits = tl.where(x == 0.0, 0, x.to(tl.int32, bitcast=True))
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key):
    """Return the float32 that has this key, an int64."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _halfway(low, high):
    return low + ((high - low) >> 1)


@triton.jit
def _anchor(largest):
    return tl.where(largest == float("-inf"), 0.0, largest)  # -inf - -inf would be NaN


@triton.jit
def _mass(x, anchor):
    return (tl.exp(x - anchor) * _UNIT).to(tl.int64)


@triton.jit(do_not_specialize=["num_columns", "num_splits"])
def _groups(
    x_ptr, top_k_ptr, top_p_ptr, maxima_ptr, sums_ptr, num_columns, row_stride, num_splits,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store each group's largest value, and its mass if that value had mass 1."""
    row, split = tl.program_id(0), tl.program_id(1)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    if (top_k > 0) | (top_p < 1.0):
        group, place = tl.arange(0, BLOCK // GROUP), tl.arange(0, GROUP)
        column = split * BLOCK + group[:, None] * GROUP + place[None, :]
        x = tl.load(x_ptr + row.to(tl.int64) * row_stride + column, mask=column < num_columns, other=float("-inf"))
        maxima = tl.max(x, 1)
        at = (row.to(tl.int64) * num_splits + split) * (BLOCK // GROUP) + group
        tl.store(maxima_ptr + at, maxima)
        if top_k == 0:
            tl.store(sums_ptr + at, tl.sum(tl.exp(x - _anchor(maxima)[:, None]), 1))


@triton.jit(do_not_specialize=["num_columns", "num_splits"])
def _bound(
    top_k_ptr, top_p_ptr, maxima_ptr, sums_ptr, largest_ptr, total_ptr, bound_ptr, count_ptr, num_columns, num_splits,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, FOUND: tl.constexpr,
):  # fmt: skip
    """At least top_k groups have a value from the bound on; or all values below it have at most 1 - top_p of the mass.

    Below the bound are all values of the groups whose largest one is; of any other group, all but the largest at most,
    and each of them has less mass than the bound.
    """
    row = tl.program_id(0)
    top_k, top_p = tl.minimum(tl.load(top_k_ptr + row), num_columns), tl.load(top_p_ptr + row)
    if (top_k > 0) | (top_p < 1.0):
        group, at = tl.arange(0, FOUND), row.to(tl.int64) * num_splits * GROUPS
        is_group = group < num_splits * GROUPS
        maxima = tl.load(maxima_ptr + at + group, mask=is_group, other=float("-inf"))
        largest = tl.max(maxima, 0)
        anchor = _anchor(largest)
        mass = tl.zeros([FOUND], tl.float32)
        if top_k == 0:
            mass = tl.load(sums_ptr + at + group, mask=is_group, other=0.0) * tl.exp(maxima - anchor)
        total = tl.sum(mass, 0)
        key, rest = _key(maxima), mass - tl.exp(maxima - anchor)
        most_below = (1.0 - top_p - 2e-6) * total  # the sums are rounded, and the bound must not be too high
        low, high = tl.full([], _LOWEST, tl.int64), _key(largest).to(tl.int64) + 1
        while low + _ROUGH < high:
            middle = _halfway(low, high)
            is_above = key >= middle.to(tl.int32)
            if top_k > 0:
                is_bound = tl.sum(is_above.to(tl.int32), 0) >= top_k
            else:
                others = (GROUP - 1) * tl.exp(_value(middle) - anchor)
                is_bound = tl.sum(tl.where(is_above, tl.minimum(rest, others), mass), 0) <= most_below
            low, high = tl.where(is_bound, middle, low), tl.where(is_bound, high, middle)
        tl.store(largest_ptr + row, largest)
        tl.store(total_ptr + row, total)
        tl.store(bound_ptr + row, low.to(tl.int32))
        tl.store(count_ptr + row, 0)


@triton.jit(do_not_specialize=["num_columns", "num_splits"])
def _list(
    x_ptr, top_k_ptr, top_p_ptr, maxima_ptr, bound_ptr, count_ptr, lists_ptr, num_columns, row_stride, num_splits,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0), tl.program_id(1)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    if (top_k > 0) | (top_p < 1.0):
        bound = tl.load(bound_ptr + row)
        block = row.to(tl.int64) * num_splits + split
        maxima = tl.load(maxima_ptr + block * GROUPS + tl.arange(0, GROUPS))
        if tl.max(_key(maxima), 0) >= bound:
            column = split * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row.to(tl.int64) * row_stride + column, mask=column < num_columns, other=float("-inf"))
            # With fewer than top_k possible tokens the bound is -inf; masked tokens must not be listed.
            is_listed = (_key(x) >= bound) & (x != float("-inf"))
            begin = tl.atomic_add(count_ptr + row, tl.sum(is_listed.to(tl.int32), 0))
            place = begin + tl.cumsum(is_listed.to(tl.int32), 0) - 1
            tl.store(lists_ptr + row.to(tl.int64) * LISTED + place, x, mask=is_listed & (place < LISTED))


@triton.jit
def _above(x_ptr, num_columns, key, anchor, key_L, weight_L, is_listed, IS_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Count the values whose key is at least `key`, or sum their masses: those of the list, or of the whole row."""
    result = tl.full([], 0, tl.int64)
    if is_listed:
        result = tl.sum(tl.where(key_L >= key, weight_L, 0), 0)
    else:
        for begin in range(0, num_columns, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + column, mask=column < num_columns, other=float("-inf"))
            is_above = (_key(x) >= key) & (column < num_columns)
            if IS_MASS:
                result += tl.sum(tl.where(is_above, _mass(x, anchor), 0), 0)
            else:
                result += tl.sum(is_above.to(tl.int64), 0)
    return result


@triton.jit(do_not_specialize=["num_columns"])
def _search(
    x_ptr, top_k_ptr, top_p_ptr, largest_ptr, total_ptr, bound_ptr, count_ptr, lists_ptr, threshold_ptr,
    num_columns, row_stride, LISTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    top_k, top_p = tl.minimum(tl.load(top_k_ptr + row), num_columns), tl.load(top_p_ptr + row)
    threshold_key = tl.full([], _LOWEST, tl.int64)
    if (top_k > 0) | (top_p < 1.0):
        x_ptr += row.to(tl.int64) * row_stride
        largest, count = tl.load(largest_ptr + row), tl.load(count_ptr + row)
        anchor, largest_key = _anchor(largest), _key(largest).to(tl.int64)
        bound = tl.load(bound_ptr + row).to(tl.int64)
        is_listed = count <= LISTED
        place = tl.arange(0, LISTED)
        listed_ptr = lists_ptr + row.to(tl.int64) * LISTED + place
        listed = tl.load(listed_ptr, mask=place < tl.where(is_listed, count, 0), other=float("-inf"))
        key_L, mass_L = _key(listed), _mass(listed, anchor)
        one_L = tl.full([LISTED], 1, tl.int64)
        total = tl.load(total_ptr + row).to(tl.float64) * _UNIT
        if top_k > 0:
            low, high = bound, largest_key + 1
            while low + 1 < high:
                key = _halfway(low, high)
                above = _above(x_ptr, num_columns, key.to(tl.int32), anchor, key_L, one_L, is_listed, False, BLOCK)
                low, high = tl.where(above >= top_k, key, low), tl.where(above >= top_k, high, key)
            threshold_key = low
            key32 = threshold_key.to(tl.int32)
            total = _above(x_ptr, num_columns, key32, anchor, key_L, mass_L, is_listed, True, BLOCK).to(tl.float64)
        if top_p < 1.0:
            needed = top_p.to(tl.float64) * total
            low, high = tl.maximum(threshold_key, bound) - 1, largest_key
            while low + 1 < high:
                key = _halfway(low, high)
                key32 = (key + 1).to(tl.int32)
                above = _above(x_ptr, num_columns, key32, anchor, key_L, mass_L, is_listed, True, BLOCK)
                is_kept = above.to(tl.float64) < needed
                low, high = tl.where(is_kept, low, key), tl.where(is_kept, key, high)
            threshold_key = high
    tl.store(threshold_ptr + row, _value(threshold_key))
