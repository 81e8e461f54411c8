"""The truncation threshold of top-k and top-p in Triton, without sorting.

Floats are mapped to integers in the same order, among which the threshold is found by binary search. Usually few tokens
are kept, so a row is read about three times: for the largest value of each lane, which gives a lower bound of the
threshold; for the total mass, without top-k; and for a list of the values above the bound. The search reads only this
list, or the row if the list overflows.

Legend: R rows, V columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_LISTED = 8192


def truncation_threshold(x_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """See `workers.kernels.select.Kernels.truncation_threshold`."""
    R, V = x_RV.shape
    assert x_RV.stride(1) == 1 and x_RV.dtype == torch.float32
    threshold_R = torch.empty(R, dtype=torch.float32, device=x_RV.device)
    if R:
        lists = torch.empty(R, _LISTED, dtype=torch.float32, device=x_RV.device)
        _threshold[(R,)](
            x_RV, top_k_R, top_p_R, lists, threshold_R, V, x_RV.stride(0), LISTED=_LISTED, BLOCK=_BLOCK, num_warps=16
        )
    return threshold_R


@triton.jit
def _key(x):
    """Map float32 to int32 in the same order, with equal keys for both zeros."""
    bits = tl.where(x == 0.0, 0, x.to(tl.int32, bitcast=True))
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _halfway(low, high):
    return low + ((high - low) >> 1)


@triton.jit
def _count(x_ptr, num_columns, key, BLOCK: tl.constexpr):
    """Count the values of x[0 .. num_columns - 1] whose key is at least `key`."""
    count = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, num_columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < num_columns, other=float("-inf"))
        count += ((_key(x) >= key) & (column < num_columns)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _mass(x_ptr, num_columns, key, anchor, BLOCK: tl.constexpr):
    """Sum exp(x - anchor) over the values of x[0 .. num_columns - 1] whose key is at least `key`."""
    mass = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, num_columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < num_columns, other=float("-inf"))
        mass += tl.where(_key(x) >= key, tl.exp(x - anchor), 0.0)
    return tl.sum(mass, 0)


@triton.jit(do_not_specialize=["num_columns"])
def _threshold(
    x_ptr,
    top_k_ptr,
    top_p_ptr,
    lists_ptr,
    threshold_ptr,
    num_columns,
    row_stride,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    top_k, top_p = tl.minimum(tl.load(top_k_ptr + row), num_columns), tl.load(top_p_ptr + row)
    x_ptr += row.to(tl.int64) * row_stride
    list_ptr = lists_ptr + row.to(tl.int64) * LISTED
    lowest = tl.full([], -2139095041, tl.int64)  # the key of -inf
    threshold_key = lowest
    if (top_k > 0) | (top_p < 1.0):
        largest_B = tl.full([BLOCK], float("-inf"), tl.float32)
        for begin in range(0, num_columns, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + column, mask=column < num_columns, other=float("-inf"))
            largest_B = tl.maximum(largest_B, x)
        largest = tl.max(largest_B, 0)
        anchor = tl.where(largest == float("-inf"), 0.0, largest)
        largest_key = _key(largest).to(tl.int64)
        total = tl.full([], 0.0, tl.float32)
        if top_k == 0:
            total = _mass(x_ptr, num_columns, lowest.to(tl.int32), anchor, BLOCK)

        # The bound: at least top_k lanes, or lanes with at least top_p of the mass, have a value above it.
        key_B, mass_B = _key(largest_B), tl.exp(largest_B - anchor)
        low, high = lowest, largest_key + 1
        while low + 1 < high:
            key = _halfway(low, high)
            is_above_B = key_B >= key.to(tl.int32)
            if top_k > 0:
                is_bound = tl.sum(is_above_B.to(tl.int32), 0) >= top_k
            else:
                is_bound = tl.sum(tl.where(is_above_B, mass_B, 0.0), 0) >= top_p * total
            low, high = tl.where(is_bound, key, low), tl.where(is_bound, high, key)
        bound, bound32 = low, low.to(tl.int32)

        listed = tl.full([], 0, tl.int32)
        for begin in range(0, num_columns, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + column, mask=column < num_columns, other=float("-inf"))
            # With fewer than top_k possible tokens the bound is -inf; masked tokens must not be listed.
            is_listed = (_key(x) >= bound32) & (x != float("-inf"))
            found = tl.sum(is_listed.to(tl.int32), 0)
            if found > 0:
                place = listed + tl.cumsum(is_listed.to(tl.int32), 0) - 1
                tl.store(list_ptr + place, x, mask=is_listed & (place < LISTED))
            listed += found
        tl.debug_barrier()  # the list is read by other threads than those that wrote it
        if listed <= LISTED:
            source_ptr, num_sources = list_ptr, listed
        else:
            source_ptr, num_sources = x_ptr, num_columns

        if top_k > 0:
            low, high = bound, largest_key + 1
            while low + 1 < high:
                key = _halfway(low, high)
                is_enough = _count(source_ptr, num_sources, key.to(tl.int32), BLOCK) >= top_k
                low, high = tl.where(is_enough, key, low), tl.where(is_enough, high, key)
            threshold_key = low
            total = _mass(source_ptr, num_sources, threshold_key.to(tl.int32), anchor, BLOCK)
        if top_p < 1.0:
            low, high = tl.maximum(threshold_key, bound) - 1, largest_key
            while low + 1 < high:
                key = _halfway(low, high)
                is_kept = _mass(source_ptr, num_sources, (key + 1).to(tl.int32), anchor, BLOCK) < top_p * total
                low, high = tl.where(is_kept, low, key), tl.where(is_kept, key, high)
            threshold_key = high
    bits = tl.where(threshold_key < 0, threshold_key ^ 0x7FFFFFFF, threshold_key).to(tl.int32)
    tl.store(threshold_ptr + row, bits.to(tl.float32, bitcast=True))
