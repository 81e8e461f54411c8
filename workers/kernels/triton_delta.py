"""Gated delta nets over trees and prompt chunks in Triton: the counterpart of `workers.kernels.torch_delta`.

    _prepare    one program per row and head: the convolution along the row's path, the norms of keys and queries, the
                gates and their sum along the path; the rows of trees are stashed
    _advance    one program per request, value head and block of value columns, whose state stays in registers

The formulas and the legend are those of the twin. A request's rows run in *blocks* of up to 16. Those of a chain end
with the state behind them, where the next one begins. Those of a tree all begin with the state before the tree, and
besides read what the blocks before them have left in memory: their keys, and U. So the triangular system that is
solved at once has 16 rows, whatever a tree has, and a program's registers suffice. Products are in three parts of
TF32, which is as exact as float32.

Apart from data, a launch depends only on the numbers of rows and requests, so a captured launch serves every step of
that size; its `DeltaTables` are filled in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.torch_delta import CONV_ROWS, DeltaWeights, LayerStates, conv_rows
from workers.types import AttentionMetadata

BLOCK = 16
"""Rows of a block. Programs of 64 rows spilled 14 KB of registers a thread."""
COLUMNS = 32
"""Value columns of a program."""
_SECTIONS = CONV_ROWS + 4


class DeltaTables:
    """One step of the gated delta layers, on the device in one buffer (int32), its sections padded to an even length.

    path        [N] int64, the bits of a row's path, itself included, counted from its origin
    window      [4, N], the rows that its convolution mixes; -1 - (3 s + i) = input i of seat s
    origin      [N], the first row of its tree; in a chain, of its block
    count       [N], the rows of the block that begins there
    keep        [N], the seat where the state behind the row is kept, too; 0 = none
    stash       [N], the row's place in the stash; -1 = none
    requests    [3, B+1], first rows, seats to read and seats to write; 0 = a tree
    """

    def __init__(self, num_rows: int, num_requests: int, device: torch.device | str) -> None:
        self.num_rows, self.num_requests = num_rows, num_requests
        self.padded_rows = M = num_rows + num_rows % 2
        self._image = np.zeros((2 + _SECTIONS) * M + 3 * (num_requests + 1), dtype=np.int32)
        self._sent = torch.from_numpy(self._image)
        self._path = self._image[: 2 * M].view(np.int64)[:num_rows]
        self._rows = self._image[2 * M : (2 + _SECTIONS) * M].reshape(-1, M)[:, :num_rows]
        self._requests = self._image[(2 + _SECTIONS) * M :].reshape(3, -1)
        self._buffer = torch.zeros(len(self._image), dtype=torch.int32, device=device)
        self.path_N, self.rows = self._buffer[: 2 * M].view(torch.int64), self._buffer[2 * M :]

    def fill(self, metadata: AttentionMetadata) -> None:
        """Write another step of as many rows and requests. Takes one copy."""
        offsets, ancestors_N, num_rows = metadata.query_offsets, metadata.ancestors_N, self.num_rows
        read_B, write_B, row_N = metadata.read_seat_B, metadata.write_seat_B, np.arange(num_rows)
        past = 3 * self.num_requests
        window_CN, _ = conv_rows(metadata)
        before = np.minimum(window_CN, past - 1)
        self._rows[:CONV_ROWS] = np.where(
            window_CN < past, -1 - (3 * read_B[before // 3] + before % 3), window_CN - past
        )
        # Blocks begin with a request, behind a state that is kept, and 16 rows after the one before.
        begins = np.union1d(offsets[:-1], metadata.keep_row_K + 1)
        place_N = row_N - begins[begins.searchsorted(row_N, "right") - 1]
        first_T = np.append(np.flatnonzero(place_N % BLOCK == 0), num_rows)
        count_T = np.diff(first_T)
        is_tree_N = ancestors_N != 0
        origin_N = np.where(is_tree_N, offsets[metadata.owner_N], first_T[:-1].repeat(count_T))
        self._path[:] = np.where(is_tree_N, ancestors_N, (np.int64(2) << np.minimum(row_N - origin_N, 62)) - 1)
        origin, count, keep, stash = self._rows[CONV_ROWS:]
        origin[:], count[:], keep[:], stash[:] = origin_N, 0, 0, -1
        count[first_T[:-1]] = count_T
        keep[metadata.keep_row_K] = metadata.keep_seat_K
        num_tree_rows = int(np.diff(offsets)[write_B == 0].sum())
        stash[:num_tree_rows] = row_N[:num_tree_rows]
        self._requests[0], self._requests[1, :-1], self._requests[2, :-1] = offsets, read_B, write_B
        # The driver stages pageable memory before it returns, so this need not synchronize.
        self._buffer.copy_(self._sent, non_blocking=True)


def delta_plan(
    metadata: AttentionMetadata, device: torch.device | str = "cpu", into: DeltaTables | None = None
) -> DeltaTables:
    """See `workers.kernels.select.Kernels.delta_plan`."""
    num_rows, num_requests = len(metadata.ancestors_N), metadata.num_requests
    into = into or DeltaTables(num_rows, num_requests, device)
    assert (into.num_rows, into.num_requests) == (num_rows, num_requests), (
        "a plan is filled for the size it was made for"
    )
    into.fill(metadata)
    return into


def delta_net(qkv_NC: Tensor, ba_N2H: Tensor, weights: DeltaWeights, plan: DeltaTables, layer: LayerStates) -> Tensor:
    """See `workers.kernels.select.Kernels.delta_net`."""
    H, v = layer.state_SHdv.shape[1], layer.state_SHdv.shape[3]
    out_NHv = torch.empty(plan.num_rows, H, v, dtype=torch.float32, device=qkv_NC.device)
    _launch(qkv_NC, ba_N2H, weights, plan, layer, out_NHv=out_NHv)
    return out_NHv


def delta_fold(row_A: Tensor, weights: DeltaWeights, plan: DeltaTables, layer: LayerStates) -> None:
    """See `workers.kernels.select.Kernels.delta_fold`."""
    _launch(*layer.stash_parts, weights, plan, layer, row_A=row_A)


def _launch(
    x_XC: Tensor,
    ba_X2H: Tensor,
    weights: DeltaWeights,
    plan: DeltaTables,
    layer: LayerStates,
    *,
    out_NHv: Tensor | None = None,
    row_A: Tensor | None = None,
) -> None:
    """Launch both kernels: of a step, with its outputs, or of stashed rows row_A."""
    _, H, d, v = layer.state_SHdv.shape
    N, K, device = plan.num_rows, weights.num_keys, x_XC.device
    if not N:
        return
    mixed_NC = torch.empty(N, layer.inputs_S3C.shape[2], dtype=torch.float32, device=device)
    beta_NH = torch.empty(N, H, dtype=torch.float32, device=device)
    total_NH = torch.empty(N, H, dtype=torch.float64, device=device)
    sizes: dict[str, Any] = dict(HEADS=H, KEY_HEADS=K, KEY_WIDTH=d, VALUE_WIDTH=v, IS_FOLD=row_A is not None)
    row_A = plan.rows if row_A is None else row_A  # else unused
    num_parts = (K if sizes["IS_FOLD"] else 2 * K) + H
    _prepare[(N, num_parts + triton.cdiv(H, BLOCK))](
        x_XC, ba_X2H, layer.inputs_S3C, layer.stash_XY, row_A, plan.path_N, plan.rows,
        weights.conv_4C, weights.decay_H, weights.dt_bias_H, mixed_NC, beta_NH, total_NH,
        plan.padded_rows, len(layer.stash_XY), x_XC.stride(0), ba_X2H.stride(0), d**-0.5,
        **sizes, PADDED_WIDTH=triton.next_power_of_2(max(d, v)), BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
    columns, part = (min(32, max(16, triton.next_power_of_2(width))) for width in (v, d))
    parts = triton.cdiv(v, columns)
    _advance[(plan.num_requests, H, parts)](
        x_XC, layer.inputs_S3C, layer.state_SHdv, row_A, plan.path_N, plan.rows, mixed_NC, beta_NH, total_NH,
        mixed_NC if out_NHv is None else out_NHv, plan.padded_rows, plan.num_requests, x_XC.stride(0), d,
        **sizes, PART=part, PARTS=triton.cdiv(d, part), COLUMNS=columns, BLOCK=BLOCK,
        INPUTS=triton.next_power_of_2(triton.cdiv(mixed_NC.shape[1], H * parts)), num_warps=4, num_stages=1,
    )  # fmt: skip


@triton.jit
def _input(
    place, channel, is_channel, x_ptr, inputs_ptr, source_ptr, x_stride, WIDTH: tl.constexpr, IS_FOLD: tl.constexpr
):  # fmt: skip
    """Load channels of one entry of a window."""
    if place < 0:
        x = tl.load(inputs_ptr + (-1 - place).to(tl.int64) * WIDTH + channel, mask=is_channel, other=0.0)
    else:
        row = place.to(tl.int64)
        if IS_FOLD:
            row = tl.load(source_ptr + row).to(tl.int64)
        x = tl.load(x_ptr + row * x_stride + channel, mask=is_channel, other=0.0)
    return x


@triton.jit(do_not_specialize=["num_rows", "num_stashed"])
def _prepare(
    x_ptr, ba_ptr, inputs_ptr, stash_ptr, source_ptr, path_ptr, rows_ptr, conv_ptr, decay_ptr, bias_ptr,
    mixed_ptr, beta_ptr, total_ptr, num_rows, num_stashed, x_stride, ba_stride, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    IS_FOLD: tl.constexpr, PADDED_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1) + (KEY_HEADS if IS_FOLD else 0)  # queries are not needed
    WIDTH: tl.constexpr = 2 * KEY_HEADS * KEY_WIDTH + HEADS * VALUE_WIDTH
    stashed = tl.load(rows_ptr + 7 * num_rows + row)
    stash = stash_ptr + stashed.to(tl.int64) * (WIDTH + 2 * HEADS)
    is_stashed = (stashed >= 0) & (stashed < num_stashed)
    if part < 2 * KEY_HEADS + HEADS:
        is_key = part < 2 * KEY_HEADS
        begin = tl.where(is_key, part * KEY_WIDTH, WIDTH - (2 * KEY_HEADS + HEADS - part) * VALUE_WIDTH)
        lane = tl.arange(0, PADDED_WIDTH)
        channel, is_channel = begin + lane, lane < tl.where(is_key, KEY_WIDTH, VALUE_WIDTH)
        mixed = tl.zeros([PADDED_WIDTH], dtype=tl.float32)
        for tap in tl.static_range(4):
            place = tl.load(rows_ptr + tap * num_rows + row)
            x = _input(place, channel, is_channel, x_ptr, inputs_ptr, source_ptr, x_stride, WIDTH, IS_FOLD)
            mixed += x.to(tl.float32) * tl.load(conv_ptr + tap * WIDTH + channel, mask=is_channel, other=0.0)
            if tap == 3 and not IS_FOLD:
                if is_stashed:
                    tl.store(stash + channel, x, mask=is_channel)
        mixed = mixed / (1.0 + tl.exp(-mixed))
        if is_key:
            factor = tl.where(part < KEY_HEADS, scale, 1.0)
            mixed = mixed * (tl.rsqrt(tl.sum(mixed * mixed, 0) + 1e-6) * factor)
        tl.store(mixed_ptr + row.to(tl.int64) * WIDTH + channel, mixed, mask=is_channel)
    else:
        head = (part - 2 * KEY_HEADS - HEADS) * BLOCK + tl.arange(0, BLOCK)
        is_head = head < HEADS
        decay, bias = (
            tl.load(decay_ptr + head, mask=is_head, other=0.0),
            tl.load(bias_ptr + head, mask=is_head, other=0.0),
        )
        path, origin = tl.load(path_ptr + row), tl.load(rows_ptr + 4 * num_rows + row)
        # In float64: next to large sums, float32 has no digits left for the small gate between two neighbours.
        total = tl.zeros([BLOCK], dtype=tl.float64)
        for first in range(0, row - origin + 1, BLOCK):
            node = first + tl.arange(0, BLOCK)
            is_seen = (((path >> node.to(tl.int64)) & 1) == 1) & (node <= row - origin)
            other = origin + tl.minimum(node, row - origin)
            if IS_FOLD:
                other = tl.load(source_ptr + other)
            place = other.to(tl.int64)[:, None] * ba_stride + HEADS + head[None, :]
            a = tl.load(ba_ptr + place, mask=is_seen[:, None] & is_head[None, :], other=0.0).to(tl.float32)
            a += bias[None, :]
            # softplus = log(1 + e^a), of which rounding 1 + e^a would take the digits where e^a is small
            power = tl.exp(tl.minimum(a, 20.0))
            rounded = 1.0 + power
            slope = tl.where(rounded == 1.0, 1.0, tl.log(rounded) / tl.where(rounded == 1.0, 1.0, rounded - 1.0))
            g = decay[None, :] * tl.where(a > 20.0, a, power * slope)
            total += tl.sum(tl.where(is_seen[:, None], g, 0.0).to(tl.float64), 0)
        own = row.to(tl.int64)
        if IS_FOLD:
            own = tl.load(source_ptr + row).to(tl.int64)
        b = tl.load(ba_ptr + own * ba_stride + head, mask=is_head, other=0.0)
        tl.store(total_ptr + row * HEADS + head, total, mask=is_head)
        tl.store(beta_ptr + row * HEADS + head, 1.0 / (1.0 + tl.exp(-b.to(tl.float32))), mask=is_head)
        if not IS_FOLD:
            if is_stashed:
                a = tl.load(ba_ptr + own * ba_stride + HEADS + head, mask=is_head, other=0.0)
                tl.store(stash + WIDTH + head, b, mask=is_head)
                tl.store(stash + WIDTH + HEADS + head, a, mask=is_head)


@triton.jit
def _leave(
    state, state_ptr, seat, row, num_rows, rows_ptr, channel, is_channel, is_column, x_ptr, inputs_ptr, source_ptr,
    x_stride, STATE: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEY_WIDTH: tl.constexpr,
    PART: tl.constexpr, IS_FOLD: tl.constexpr,
):  # fmt: skip
    """Write the state behind a row to a seat, and this program's channels of the last three inputs."""
    for part in tl.static_range(len(state)):
        width = part * PART + tl.arange(0, PART)
        place = seat * STATE + width[:, None] * VALUE_WIDTH
        tl.store(state_ptr + place, state[part], mask=(width < KEY_WIDTH)[:, None] & is_column[None, :])
    place0, place1 = tl.load(rows_ptr + num_rows + row), tl.load(rows_ptr + 2 * num_rows + row)
    place2 = tl.load(rows_ptr + 3 * num_rows + row)
    # All are loaded before any is stored, because they move on within a seat.
    x0 = _input(place0, channel, is_channel, x_ptr, inputs_ptr, source_ptr, x_stride, WIDTH, IS_FOLD)
    x1 = _input(place1, channel, is_channel, x_ptr, inputs_ptr, source_ptr, x_stride, WIDTH, IS_FOLD)
    x2 = _input(place2, channel, is_channel, x_ptr, inputs_ptr, source_ptr, x_stride, WIDTH, IS_FOLD)
    own = inputs_ptr + seat * (3 * WIDTH) + channel
    tl.store(own, x0, mask=is_channel)
    tl.store(own + WIDTH, x1, mask=is_channel)
    tl.store(own + 2 * WIDTH, x2, mask=is_channel)


@triton.jit
def _part(row_ptr, is_row, first, KEY_WIDTH: tl.constexpr, PART: tl.constexpr):
    """Load PART widths of keys or queries of a block's rows, from a width on."""
    width = first + tl.arange(0, PART)
    return tl.load(row_ptr[:, None] + width[None, :], mask=is_row[:, None] & (width < KEY_WIDTH)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_rows", "num_requests", "key_width"])
def _advance(
    x_ptr, inputs_ptr, state_ptr, source_ptr, path_ptr, rows_ptr, mixed_ptr, beta_ptr, total_ptr, out_ptr,
    num_rows, num_requests, x_stride, key_width,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    IS_FOLD: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    INPUTS: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0), tl.program_id(1)
    WIDTH: tl.constexpr = 2 * KEY_HEADS * KEY_WIDTH + HEADS * VALUE_WIDTH
    STATE: tl.constexpr = HEADS * KEY_WIDTH * VALUE_WIDTH
    of_request = rows_ptr + 8 * num_rows + request
    first, end = tl.load(of_request), tl.load(of_request + 1)
    read = tl.load(of_request + num_requests + 1).to(tl.int64)
    write = tl.load(of_request + 2 * num_requests + 2).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < VALUE_WIDTH
    share = (head * tl.num_programs(2) + tl.program_id(2)) * INPUTS + tl.arange(0, INPUTS)
    own_state = state_ptr + head * (KEY_WIDTH * VALUE_WIDTH) + column[None, :]
    state = ()
    for part in tl.static_range(PARTS):
        width = part * PART + tl.arange(0, PART)
        is_state = (width < KEY_WIDTH)[:, None] & is_column[None, :]
        state = state + (tl.load(own_state + read * STATE + width[:, None] * VALUE_WIDTH, mask=is_state, other=0.0),)  # type: ignore[assignment]
    query = mixed_ptr + (head // (HEADS // KEY_HEADS)) * KEY_WIDTH
    key = query + KEY_HEADS * KEY_WIDTH
    value = mixed_ptr + 2 * KEY_HEADS * KEY_WIDTH + head * VALUE_WIDTH + column
    if first == end:
        write = write * 0
    while first < end:
        count, origin = tl.load(rows_ptr + 5 * num_rows + first), tl.load(rows_ptr + 4 * num_rows + first)
        row, is_row = (first + lane).to(tl.int64), lane < count
        q_row, k_row, is_value = query + row * WIDTH, key + row * WIDTH, is_row[:, None] & is_column[None, :]
        u = tl.load(value + row[:, None] * WIDTH, mask=is_value, other=0.0)
        beta = tl.load(beta_ptr + row * HEADS + head, mask=is_row, other=0.0)
        total = tl.load(total_ptr + row * HEADS + head, mask=is_row, other=0.0)
        path = tl.load(path_ptr + row, mask=is_row, other=0)
        seen = tl.zeros([BLOCK, COLUMNS], dtype=tl.float32)
        out = tl.zeros([BLOCK, COLUMNS], dtype=tl.float32)
        # Keys and queries are loaded again for each product: kept in the layouts of them all, they would be spilled.
        for part in tl.static_range(len(state)):
            k = _part(k_row, is_row, part * PART, KEY_WIDTH, PART)
            seen = tl.dot(k, state[part], seen, input_precision="tf32x3")
            if not IS_FOLD:
                q = _part(q_row, is_row, part * PART, KEY_WIDTH, PART)
                out = tl.dot(q, state[part], out, input_precision="tf32x3")
        fade = tl.exp(total.to(tl.float32))[:, None]
        u, out = beta[:, None] * (u - fade * seen), fade * out
        link = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
        weight = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
        for before in range(origin, first + 1, BLOCK):
            other = (before + lane).to(tl.int64)
            is_other = other < first + count
            other_row = key + other * WIDTH
            kk = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
            qk = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
            for begin in range(0, key_width, PART):
                k_other = tl.trans(_part(other_row, is_other, begin, KEY_WIDTH, PART))
                k = _part(k_row, is_row, begin, KEY_WIDTH, PART)
                kk = tl.dot(k, k_other, kk, input_precision="tf32x3")
                if not IS_FOLD:
                    q = _part(q_row, is_row, begin, KEY_WIDTH, PART)
                    qk = tl.dot(q, k_other, qk, input_precision="tf32x3")
            is_seen = ((path[:, None] >> (other - origin)[None, :]) & 1) == 1
            between = total[:, None] - tl.load(total_ptr + other * HEADS + head, mask=is_other, other=0.0)[None, :]
            decay = tl.exp(tl.where(is_seen, between.to(tl.float32), float("-inf")))  # before exp, which may overflow
            link, weight = beta[:, None] * kk * decay, qk * decay
            if before < first:
                u_other = tl.load(value + other[:, None] * WIDTH, mask=is_column[None, :], other=0.0)
                u -= tl.dot(link, u_other, input_precision="tf32x3")
                if not IS_FOLD:
                    out += tl.dot(weight, u_other, input_precision="tf32x3")
        link = tl.where(lane[:, None] > lane[None, :], link, 0.0)
        for own in range(count - 1):  # its row is known; take its part out of the rows below it
            to_others = tl.sum(tl.where(lane[None, :] == own, link, 0.0), 1)
            known = tl.sum(tl.where(lane[:, None] == own, u, 0.0), 0)
            u -= to_others[:, None] * known[None, :]
        if not IS_FOLD:
            out += tl.dot(weight, u, input_precision="tf32x3")
            tl.store(out_ptr + (row[:, None] * HEADS + head) * VALUE_WIDTH + column[None, :], out, mask=is_value)
        last = first + count - 1
        if write > 0:
            at_last = tl.sum(tl.where(lane == count - 1, total, 0.0), 0)
            left = tl.where(is_row, tl.exp((at_last - total).to(tl.float32)), 0.0)[:, None] * u
            left_fade = tl.exp(at_last.to(tl.float32))
            moved = ()
            for part in tl.static_range(len(state)):
                k_columns = tl.trans(_part(k_row, is_row, part * PART, KEY_WIDTH, PART))
                moved = moved + (tl.dot(k_columns, left, left_fade * state[part], input_precision="tf32x3"),)  # type: ignore[assignment]
            state = moved
            keep = tl.load(rows_ptr + 6 * num_rows + last).to(tl.int64)
            if keep > 0:
                _leave(
                    state, own_state, keep, last, num_rows, rows_ptr, share, share < WIDTH, is_column, x_ptr,
                    inputs_ptr, source_ptr, x_stride, STATE, WIDTH, VALUE_WIDTH, KEY_WIDTH, PART, IS_FOLD,
                )  # fmt: skip
        elif first + count < end:
            tl.store(value + row[:, None] * WIDTH, u, mask=is_value)  # in place of v, which no one reads again
            tl.debug_barrier()  # the next blocks read what all threads have written
        first += count
    if write > 0:
        _leave(
            state, own_state, write, end - 1, num_rows, rows_ptr, share, share < WIDTH, is_column, x_ptr,
            inputs_ptr, source_ptr, x_stride, STATE, WIDTH, VALUE_WIDTH, KEY_WIDTH, PART, IS_FOLD,
        )  # fmt: skip
