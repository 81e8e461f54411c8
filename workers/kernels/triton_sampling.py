"""Sampling kernels in Triton, which read each row of logits once and write no full-width result.

    coupled_argmax     argmax_x [log p(x) + G(seed, index, x)], with G computed in place (see `workers.sampling.philox`)
    top_k              the k largest logits and log sum exp (x / tau), for draft children
    gumbel             G itself, for drafts that follow it

The first two distribute a row's columns over several programs; a second, small launch combines their results. Of equal
values the lowest column wins, as in torch's argmax on CPU.

Legend: R rows, V columns, S splits of a row, K kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.reference import TopK
from workers.sampling.gumbel_cache import GumbelCache
from workers.types import SamplingBatch

_DRAW_BLOCK = 1024
_PROGRAMS = 512
"""Rows are split until there are this many programs, or one block per program. A power of 2; also the most splits."""
_TOP_BLOCK = 2048


def coupled_argmax(
    logits_RV: Tensor,
    params: SamplingBatch,
    index_R: Tensor,
    start: int,
    row_max_R: Tensor | None,
    noise: GumbelCache | None = None,
) -> tuple[Tensor, Tensor]:
    """See `workers.kernels.select.Kernels.coupled_argmax`."""
    R, V = logits_RV.shape
    device = logits_RV.device
    assert logits_RV.stride(1) == 1 and logits_RV.dtype == torch.float32
    score_R = torch.empty(R, dtype=torch.float32, device=device)
    id_R = torch.empty(R, dtype=torch.int64, device=device)
    if not R:
        return score_R, id_R
    floor_R = logits_RV.new_full((R,), -torch.inf)
    if row_max_R is not None:
        hot = params.temperature_B > 0
        scale_R = torch.where(hot, params.temperature_B, 1.0)
        floor_R = row_max_R / scale_R + torch.log(torch.where(hot, params.min_p_B, 0.0))
    # A counter serves four adjacent ids, so blocks start at multiples of four.
    first = start // 4 * 4
    blocks = triton.cdiv(start + V - first, _DRAW_BLOCK)
    splits = min(blocks, triton.next_power_of_2(triton.cdiv(_PROGRAMS, R)))
    scores_RS = torch.empty(R, splits, dtype=torch.float32, device=device)
    ids_RS = torch.empty(R, splits, dtype=torch.int64, device=device)
    _draw[(R, splits)](
        logits_RV, params.temperature_B, params.seed_B, index_R.to(torch.int64), floor_R, scores_RS, ids_RS,
        V, logits_RV.stride(0), start, first, triton.cdiv(blocks, splits), splits, BLOCK=_DRAW_BLOCK,
    )  # fmt: skip
    _choose[(R,)](scores_RS, ids_RS, score_R, id_R, splits, SPLITS=_PROGRAMS, num_warps=1)
    return score_R, id_R


def top_k(x_RV: Tensor, k: int, tau_R: Tensor) -> TopK:
    """See `workers.kernels.select.Kernels.top_k`."""
    R, V = x_RV.shape
    device = x_RV.device
    assert x_RV.stride(1) == 1 and x_RV.dtype == torch.float32
    k = min(k, V)
    value_RK = torch.empty(R, k, dtype=torch.float32, device=device)
    index_RK = torch.empty(R, k, dtype=torch.int64, device=device)
    lse_R = torch.empty(R, dtype=torch.float32, device=device)
    if not R or not k:
        return TopK(value_RK, index_RK, x_RV.new_full((R,), -torch.inf))
    splits = triton.cdiv(V, _TOP_BLOCK)
    values_RSK = torch.empty(R, splits, k, dtype=torch.float32, device=device)
    indices_RSK = torch.empty(R, splits, k, dtype=torch.int64, device=device)
    lse_RS = torch.empty(R, splits, dtype=torch.float32, device=device)
    _top_of_block[(R, splits)](
        x_RV, tau_R, values_RSK, indices_RSK, lse_RS, V, x_RV.stride(0), splits, k, BLOCK=_TOP_BLOCK
    )
    _top_of_row[(R,)](
        values_RSK, indices_RSK, lse_RS, value_RK, index_RK, lse_R, splits, k,
        FOUND=triton.next_power_of_2(splits * k), SPLITS=triton.next_power_of_2(splits),
    )  # fmt: skip
    return TopK(value_RK, index_RK, lse_R)


def gumbel(seed_R: Tensor, index_R: Tensor, start: int, stop: int) -> Tensor:
    """See `workers.kernels.select.Kernels.gumbel`."""
    out_RV = torch.empty(len(seed_R), stop - start, dtype=torch.float32, device=seed_R.device)
    if out_RV.numel():
        first = start // 4 * 4
        grid = (len(seed_R), triton.cdiv(stop - first, _DRAW_BLOCK))
        seeds, indices = seed_R.contiguous(), index_R.to(torch.int64).contiguous()
        _fill[grid](seeds, indices, out_RV, stop - start, start, first, BLOCK=_DRAW_BLOCK)
    return out_RV


@triton.jit
def _philox(seed, index, group):
    """Return the four Philox4x32-10 words that `workers.sampling.philox.gumbel` uses for ids 4 group .. 4 group + 3.

    A round: (c0, c1, c2, c3) <- (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)). Key: the seed.
    Counter: token id // 4, index of the token drawn, 0, stream TARGET_GUMBEL = 0.
    """
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    M0 = tl.full([], 0xD2511F53, tl.uint32)
    M1 = tl.full([], 0xCD9E8D57, tl.uint32)
    W0 = tl.full([], 0x9E3779B9, tl.uint32)
    W1 = tl.full([], 0xBB67AE85, tl.uint32)
    c0 = group.to(tl.uint32)
    c2 = c0 * 0
    c1 = c2 + (index & 0xFFFFFFFF).to(tl.uint32)
    c3 = c2
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, M0), c0 * M0
        high1, low1 = tl.umulhi(c2, M1), c2 * M1
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + W0
        k1 = k1 + W1
    return c0, c1, c2, c3


@triton.jit
def _gumbel(word):
    """Return -log(-log u) with u = (r + 0.5) 2^-32 for a 32-bit word r, in float32 (the host uses float64).

    For r >= 2^31, where u may round to 1, log u = log1p(-v) with the exact v = 1 - u. This equals
    -2 artanh(v / (2 - v)), whose series in z = v / (2 - v) <= 1/3 is exact to float32 after z^15 and needs no logarithm
    near 1.
    """
    is_upper = word >= 0x80000000
    v = (tl.where(is_upper, 0xFFFFFFFF - word, word).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    z = v / (2.0 - v)
    y = z * z
    series = 1.0 / 13 + y * (1.0 / 15)
    series = 1.0 / 11 + y * series
    series = 1.0 / 9 + y * series
    series = 1.0 / 7 + y * series
    series = 1.0 / 5 + y * series
    series = 1.0 / 3 + y * series
    upper = 2.0 * (z + z * y * series)
    return -tl.log(tl.where(is_upper, upper, -tl.log(v)))


@triton.jit
def _fill(seed_ptr, index_ptr, out_ptr, num_columns, start, first, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    id0 = first + tl.program_id(1) * BLOCK + 4 * tl.arange(0, BLOCK // 4)
    r0, r1, r2, r3 = _philox(tl.load(seed_ptr + row), tl.load(index_ptr + row), id0 // 4)
    out_ptr += row.to(tl.int64) * num_columns
    column = id0 - start
    tl.store(out_ptr + column, _gumbel(r0), mask=(column >= 0) & (column < num_columns))
    tl.store(out_ptr + column + 1, _gumbel(r1), mask=(column >= -1) & (column + 1 < num_columns))
    tl.store(out_ptr + column + 2, _gumbel(r2), mask=(column >= -2) & (column + 2 < num_columns))
    tl.store(out_ptr + column + 3, _gumbel(r3), mask=(column >= -3) & (column + 3 < num_columns))


@triton.jit
def _score(logits_ptr, column, num_columns, scale, floor, noise):
    """Return log p + G up to a constant; -inf for tokens that min-p excludes and for padding."""
    x = tl.load(logits_ptr + column, mask=(column >= 0) & (column < num_columns), other=float("-inf"))
    x = tl.div_rn(x, scale)
    return tl.where(x < floor, float("-inf"), x) + noise


@triton.jit(do_not_specialize=["blocks_each", "num_splits"])
def _draw(
    logits_ptr, temperature_ptr, seed_ptr, index_ptr, floor_ptr, scores_ptr, ids_ptr,
    num_columns, row_stride, start, first, blocks_each, num_splits, BLOCK: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    is_hot = temperature > 0.0
    scale = tl.where(is_hot, temperature, 1.0)
    floor = tl.load(floor_ptr + row)
    seed = tl.load(seed_ptr + row)
    index = tl.load(index_ptr + row)
    logits_ptr += row.to(tl.int64) * row_stride
    lane = tl.arange(0, BLOCK // 4)
    best = tl.full([BLOCK // 4], float("-inf"), tl.float32)
    best_id = tl.full([BLOCK // 4], 0, tl.int32) + start  # the result if every token is masked
    for block in range(split * blocks_each, (split + 1) * blocks_each):
        id0 = first + block * BLOCK + 4 * lane
        if is_hot:
            r0, r1, r2, r3 = _philox(seed, index, id0 // 4)
            g0, g1, g2, g3 = _gumbel(r0), _gumbel(r1), _gumbel(r2), _gumbel(r3)
        else:
            g0 = tl.zeros([BLOCK // 4], tl.float32)
            g1, g2, g3 = g0, g0, g0
        s0 = _score(logits_ptr, id0 - start, num_columns, scale, floor, g0)
        s1 = _score(logits_ptr, id0 + 1 - start, num_columns, scale, floor, g1)
        s2 = _score(logits_ptr, id0 + 2 - start, num_columns, scale, floor, g2)
        s3 = _score(logits_ptr, id0 + 3 - start, num_columns, scale, floor, g3)
        best, best_id = tl.where(s0 > best, s0, best), tl.where(s0 > best, id0, best_id)
        best, best_id = tl.where(s1 > best, s1, best), tl.where(s1 > best, id0 + 1, best_id)
        best, best_id = tl.where(s2 > best, s2, best), tl.where(s2 > best, id0 + 2, best_id)
        best, best_id = tl.where(s3 > best, s3, best), tl.where(s3 > best, id0 + 3, best_id)
    score = tl.max(best, 0)
    token = tl.min(tl.where(best == score, best_id, 0x7FFFFFFF), 0)
    tl.store(scores_ptr + row * num_splits + split, score)
    tl.store(ids_ptr + row * num_splits + split, token.to(tl.int64))


@triton.jit(do_not_specialize=["num_splits"])
def _choose(scores_ptr, ids_ptr, score_ptr, id_ptr, num_splits, SPLITS: tl.constexpr):
    row = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    is_split = split < num_splits
    scores = tl.load(scores_ptr + row * num_splits + split, mask=is_split, other=float("-inf"))
    ids = tl.load(ids_ptr + row * num_splits + split, mask=is_split, other=0x7FFFFFFF)
    score = tl.max(scores, 0)
    tl.store(score_ptr + row, score)
    tl.store(id_ptr + row, tl.min(tl.where(scores == score, ids, 0x7FFFFFFF), 0))


@triton.jit
def _log(total):
    """Return log(total), -inf for 0."""
    return tl.where(total > 0.0, tl.log(tl.where(total > 0.0, total, 1.0)), float("-inf"))


@triton.jit(do_not_specialize=["num_splits", "k"])
def _top_of_block(
    x_ptr, tau_ptr, values_ptr, indices_ptr, lse_ptr, num_columns, row_stride, num_splits, k, BLOCK: tl.constexpr
):
    """Take the largest of the block, in registers, k times."""
    row, split = tl.program_id(0), tl.program_id(1)
    column = split * BLOCK + tl.arange(0, BLOCK)
    is_column = column < num_columns
    x = tl.load(x_ptr + row.to(tl.int64) * row_stride + column, mask=is_column, other=float("-inf"))
    tau = tl.load(tau_ptr + row)
    largest = tl.max(x, 0)
    anchor = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp((x - anchor) / tau), 0)
    tl.store(lse_ptr + row * num_splits + split, anchor / tau + _log(total))
    is_left = is_column
    found = (row * num_splits + split).to(tl.int64) * k
    for i in range(k):
        value = tl.max(tl.where(is_left, x, float("-inf")), 0)
        chosen = tl.min(tl.where(is_left & (x == value), column, 0x7FFFFFFF), 0)
        tl.store(values_ptr + found + i, value)
        tl.store(indices_ptr + found + i, chosen.to(tl.int64))  # 0x7FFFFFFF if the block has no more columns
        is_left = is_left & (column != chosen)


@triton.jit(do_not_specialize=["num_splits", "k"])
def _top_of_row(
    values_ptr, indices_ptr, lses_ptr, value_ptr, index_ptr, lse_ptr, num_splits, k,
    FOUND: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Take the largest of the blocks' results k times, and add their sums."""
    row = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    lses = tl.load(lses_ptr + row * num_splits + split, mask=split < num_splits, other=float("-inf"))
    largest = tl.max(lses, 0)
    anchor = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(lse_ptr + row, anchor + _log(tl.sum(tl.exp(lses - anchor), 0)))
    place = tl.arange(0, FOUND)
    mine = row.to(tl.int64) * num_splits * k + place
    values = tl.load(values_ptr + mine, mask=place < num_splits * k, other=float("-inf"))
    indices = tl.load(indices_ptr + mine, mask=place < num_splits * k, other=0x7FFFFFFF)
    is_left = indices != 0x7FFFFFFF
    for i in range(k):
        value = tl.max(tl.where(is_left, values, float("-inf")), 0)
        chosen = tl.min(tl.where(is_left & (values == value), indices, 0x7FFFFFFF), 0)
        tl.store(value_ptr + row * k + i, value)
        # With NaN logits no value is the largest, but callers that gather by index still need a valid column.
        tl.store(index_ptr + row * k + i, tl.where(chosen == 0x7FFFFFFF, 0, chosen))
        is_left = is_left & (indices != chosen)
