"""Tree attention over the paged KV cache in Triton: the counterpart of `workers.kernels.torch_attention`.

Split-KV over the sequence as in Flash-Decoding (Dao et al. 2023), with the online softmax of FlashAttention-2
(Dao 2023). A *tile* is a few packed rows of one request; a program takes one tile, one key-value head and one *split*
of the tile's keys, and the query heads that share this key-value head are folded into the rows:

    m, l, o  =  running max, sum and weighted values over the split's blocks of keys, per (row, query head)
    S = q K^T scale     a row sees slot s if  low <= s < visible  or  bit s - base of its ancestors is set
    m' = max(m, S)      l = l e^(m - m') + sum e^(S - m')      o = o e^(m - m') + e^(S - m') V
    combine:            out = sum_i w_i o_i / l_i,   w = softmax_i (m_i + log l_i)  over the splits i

A softcap c replaces S with c tanh(S / c). A sink is an additional score without a value, added in the first split.

Sliding windows need no kernel code: the plan converts a window along a row's path into a higher `low` and an ancestor
mask without the oldest bits. Apart from data, a launch depends only on `PlanShape`, so a captured launch serves every
step of that shape; its plan is filled in place.

Legend: N packed rows, B requests, P pages of a request, T tiles, M (row, query head) pairs of a tile, H key-value
heads, G query heads of each, d head width.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.host import BITS, bits_of, keys_N
from workers.kernels.interpreted import is_interpreted
from workers.transfer import to_device
from workers.types import AttentionMetadata

_PROGRAMS = 256
"""Work is split until there are this many programs: about two per multiprocessor of an H100 or H200."""
_KEYS_PER_SPLIT = 256
"""Minimum number of keys per split."""
_MAX_SPLITS = 64
_MAX_PAIRS = 128
"""With four query heads to a key-value head, the 17 rows of the default tree fill one tile, and read every key once."""
_MAX_FLOAT32_PAIRS = 16
"""float32 is multiplied without tensor cores, and operands wait in registers: 64 pairs spilled 5 to 7 KB a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanShape:
    """The parameters for which a launch is compiled and captured. Everything else in a plan may change."""

    num_rows: int
    num_requests: int
    table_width: int
    page_size: int
    group_size: int
    windows: tuple[int | None, ...]
    is_float32: bool = False

    @property
    def tile_pairs(self) -> int:
        """M: (row, query head) pairs per tile: those of an average request, between 16 and 128.

        In a graph's bucket the last request owns the padding alone, so it is not counted.
        """
        rows = -(-self.num_rows // max(1, self.num_requests - 1))
        most = _MAX_FLOAT32_PAIRS if self.is_float32 else _MAX_PAIRS
        return max(16, min(most, _power_of_2(rows * self.group_size)), _power_of_2(self.group_size))

    @property
    def tile_rows(self) -> int:
        """Rows per tile."""
        return self.tile_pairs // self.group_size

    @property
    def num_tiles(self) -> int:
        """Number of tiles, sufficient for any distribution of the rows over the requests."""
        return self.num_rows // self.tile_rows + self.num_requests

    def num_splits(self, kv_heads: int) -> int:
        """Number of splits of each tile's keys."""
        most = self.table_width * self.page_size // _KEYS_PER_SPLIT
        wanted = _PROGRAMS // max(1, self.num_tiles * kv_heads)
        return _power_of_2(max(1, min(most, wanted, _MAX_SPLITS)))


_SMALL_TABLE = 1 << 15
"""Bytes of a page table that are copied to the device in less time than it takes to launch two kernels more."""


class DeviceTable:
    """A page table [B, P] on the device, int32, and the host's image of it: only what has changed is sent.

    From one step to the next most requests keep their pages, and the others gain one or two. Entries beyond a request's
    pages are never read, so those of an earlier, wider table stay.
    """

    def __init__(self, num_requests: int, width: int, device: torch.device | str) -> None:
        self.on_device_BP = torch.zeros(num_requests, width, dtype=torch.int32, device=device)
        self._image_BP = np.zeros((num_requests, width), dtype=np.int32)

    def update(self, table_BP: np.ndarray) -> None:
        """Bring the table up to date; the new one may be narrower. Few changes of a large one are sent one by one."""
        width = table_BP.shape[1]
        (changed_C,) = (self._image_BP[:, :width] != table_BP).ravel().nonzero()
        if not len(changed_C):
            return
        self._image_BP[:, :width] = table_BP
        if table_BP.nbytes <= _SMALL_TABLE or 8 * len(changed_C) > table_BP.size:
            # The driver stages pageable memory before it returns, so no copy need synchronize.
            self.on_device_BP[:, :width].copy_(torch.from_numpy(table_BP), non_blocking=True)
            return
        row_C, column_C = np.divmod(changed_C, width)
        changes_3C = to_device(np.stack([row_C, column_C, table_BP[row_C, column_C]]), self.on_device_BP.device)
        self.on_device_BP[changes_3C[0], changes_3C[1]] = changes_3C[2].int()


class TiledPlan:
    """One step's attention, for all layers: on the device, all but the page table in one buffer (int64)."""

    def __init__(self, shape: PlanShape, device: torch.device | str) -> None:
        # With even widths, every row starts at a multiple of 16 bytes, and one compiled kernel serves all steps.
        N, T, W = _even(shape.num_rows), _even(shape.num_tiles), len(shape.windows)
        sizes = {
            "write_slots": N,
            "visible": N,
            "lows": W * N,  # first slot of its prefix that a row attends to
            "ancestors": W * N,
            "tiles": 5 * T,  # first row, number of rows, request, its base, one past the last slot
            "tile_lows": W * T,  # first slot
        }
        self.shape = shape
        self.buffer = torch.zeros(sum(sizes.values()), dtype=torch.int64, device=device)
        parts = dict(zip(sizes, self.buffer.split(list(sizes.values())), strict=True))
        self.write_slots_N = parts["write_slots"][: shape.num_rows]
        self.visible_N = parts["visible"]
        self.lows_WN, self.ancestors_WN = parts["lows"].view(W, N), parts["ancestors"].view(W, N)
        self.tiles_5T, self.tile_lows_WT = parts["tiles"].view(5, T), parts["tile_lows"].view(W, T)
        self._table = DeviceTable(shape.num_requests, shape.table_width, device)
        self.table_BP = self._table.on_device_BP
        # The host's image of the buffer, by the same parts: one vectorised pass fills it, and one copy sends it.
        self._image = np.zeros(len(self.buffer), dtype=np.int64)
        rows, tiles = np.split(self._image, [(2 + 2 * W) * N])
        self._rows, self._tiles = rows.reshape(2 + 2 * W, N)[:, : shape.num_rows], tiles.reshape(5 + W, T)
        self._sent = torch.from_numpy(self._image)
        self._tile_rows = shape.tile_rows

    def fill(self, metadata: AttentionMetadata, first_slot: int) -> None:
        """Write another step of the same shape; its page table may be narrower. Takes one copy and `DeviceTable`'s."""
        shape, W = self.shape, len(self.shape.windows)
        owner_N = metadata.owner_N
        rows = self._rows
        rows[0] = metadata.physical(owner_N, metadata.slot_N, shape.page_size)
        rows[1] = metadata.visible_N
        for w, window in enumerate(shape.windows):
            rows[2 + w], rows[2 + W + w] = _narrowed(metadata, owner_N, window, first_slot)
        _fill_tiles(self._tiles, metadata, owner_N, rows[2 : 2 + W], self._tile_rows)
        self._metadata, self._owner_N, self._first_slot = metadata, owner_N, first_slot
        self._send()

    def move(self, base_B: np.ndarray, page_table_BP: np.ndarray) -> None:
        """Move the requests of the last step to other bases and pages: a third of `fill`'s time.

        Their rows keep their places behind their base. With windows, `set_ancestors` must follow.
        """
        last, owner_N, tiles = self._metadata, self._owner_N, self._tiles
        shift_B = base_B - last.base_B
        shift_N = shift_B[owner_N]
        moved = self._metadata = replace(
            last,
            page_table_BP=page_table_BP,
            base_B=base_B,
            slot_N=last.slot_N + shift_N,
            visible_N=last.visible_N + shift_N,
        )
        self._rows[0] = moved.physical(owner_N, moved.slot_N, self.shape.page_size)
        self._rows[1] = moved.visible_N
        tiles[3:5] += shift_B[tiles[2]] * (tiles[1] > 0)
        self._send()

    def _send(self) -> None:
        # The driver stages pageable memory before it returns, so this need not synchronize.
        self.buffer.copy_(self._sent, non_blocking=True)
        self._table.update(self._metadata.page_table_BP)

    def set_ancestors(self, ancestors_N: Tensor) -> None:
        """Replace the ancestors (int64, on the device) of the rows of the last `fill`.

        Everything else stays, so that `fill` must have covered every ancestor that a row may get. No slot of a tree may
        be below `first_slot`. With windows, a row's prefix must end at its tree's base.
        """
        num_rows, base_T = self.shape.num_rows, self.tiles_5T[3]
        for w, window in enumerate(self.shape.windows):
            if window is None:
                self.ancestors_WN[w, :num_rows].copy_(ancestors_N)
                continue
            # The same as `_narrowed`, on the device.
            bit_64 = torch.arange(64, device=ancestors_N.device)
            bit_N64 = ancestors_N[:, None] >> bit_64 & 1
            kept_N64 = bit_N64 * (bit_N64.flip(-1).cumsum(-1).flip(-1) <= window)
            self.ancestors_WN[w, :num_rows].copy_((kept_N64 << bit_64).sum(-1))
            low_N = self.visible_N[:num_rows] + bit_N64.sum(-1) - window
            self.lows_WN[w, :num_rows].copy_(low_N.clamp(min=self._first_slot))
            # Each row has at least itself as ancestor, which bounds the first slot of a tile.
            self.tile_lows_WT[w].copy_((base_T + 1 - window).clamp(min=self._first_slot))


def plan(
    metadata: AttentionMetadata,
    page_size: int,
    *,
    windows: Sequence[int | None] = (None,),
    group_size: int = 1,
    first_slot: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    into: TiledPlan | None = None,
) -> TiledPlan:
    """See `workers.kernels.select.Kernels.plan`."""
    num_rows, (num_requests, table_width) = len(metadata.slot_N), metadata.page_table_BP.shape
    if into is None:
        shape = PlanShape(
            num_rows=num_rows,
            num_requests=num_requests,
            table_width=table_width,
            page_size=page_size,
            group_size=group_size,
            windows=tuple(dict.fromkeys(windows)),
            is_float32=dtype == torch.float32,
        )
        into = TiledPlan(shape, device)
    room = into.shape
    assert (room.num_rows, room.num_requests) == (num_rows, num_requests) and room.table_width >= table_width, (
        f"a plan for {room} cannot be filled for {num_rows} rows of {num_requests} requests and {table_width} pages"
    )
    into.fill(metadata, first_slot)
    return into


def tree_attention(
    q_NHd: Tensor,
    kv_slots: Tensor,
    plan: TiledPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """See `workers.kernels.select.Kernels.tree_attention`. A row that attends to nothing gets 0."""
    shape = plan.shape
    N, num_heads, d = q_NHd.shape
    H = kv_slots.shape[2]
    assert num_heads == H * shape.group_size and q_NHd.stride(2) == 1 and kv_slots.is_contiguous()
    out_NHd = q_NHd.new_empty(N, num_heads, d)
    if not N:
        return out_NHd.view(0, num_heads * d)
    w = shape.windows.index(window)
    splits = shape.num_splits(H)
    partial, lse = out_NHd, out_NHd  # unused
    if splits > 1:
        partial = torch.empty(splits, N, num_heads, d, dtype=torch.float32, device=q_NHd.device)
        lse = torch.empty(splits, N, num_heads, dtype=torch.float32, device=q_NHd.device)
    padded_d = max(16, _power_of_2(d))
    keys = keys_of_block(shape.tile_pairs, padded_d, q_NHd.element_size(), _shared_bytes(q_NHd.device))
    _attend[(shape.num_tiles, H, splits)](
        q_NHd, kv_slots, out_NHd, partial, lse, q_NHd if sink_H is None else sink_H,
        plan.tiles_5T, plan.tile_lows_WT[w], plan.table_BP, plan.visible_N, plan.lows_WN[w], plan.ancestors_WN[w],
        scale, softcap or 0.0, N, plan.tiles_5T.shape[1], shape.table_width, splits, q_NHd.stride(0), q_NHd.stride(1),
        KV_HEADS=H, GROUP=shape.group_size, WIDTH=d, PADDED_WIDTH=padded_d, PAGE=shape.page_size,
        PAIRS=shape.tile_pairs, KEYS=keys, IS_SPLIT=splits > 1,
        HAS_SOFTCAP=softcap is not None, HAS_SINKS=sink_H is not None, UPCAST=is_interpreted(),
        num_warps=warps_of_tile(shape.tile_pairs), num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _combine[(N * num_heads,)](
            partial, lse, out_NHd, N * num_heads, WIDTH=d, PADDED_WIDTH=padded_d, SPLITS=splits,
            num_warps=4 if splits > 16 else 1,
        )  # fmt: skip
    return out_NHd.view(N, num_heads * d)


def keys_of_block(pairs: int, padded_width: int, element_size: int, shared_bytes: int) -> int:
    """Return how many keys a program reads at once: what fits into shared memory, and in float32 into registers.

    shared_bytes: what a program can have. It holds the queries, a block of keys and of values, and their weights.
    """
    if element_size == 4:
        return 16 if padded_width > 64 else 32
    keys = 32 if padded_width > 128 else 64
    while keys > 16 and element_size * ((pairs + 2 * keys) * padded_width + pairs * keys) > shared_bytes:
        keys //= 2
    return keys


@cache
def _shared_bytes(device: torch.device) -> int:
    """Return the shared memory that a program can have: 99 KiB on compute capability 8.6, 8.9 and 12.0, 163 on 8.0."""
    if is_interpreted():
        return sys.maxsize
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return int(properties["max_shared_mem"])  # which Triton compares a kernel's need with


def warps_of_tile(pairs: int) -> int:
    """Return the warps of a program: more than 64 pairs need the registers of eight."""
    return 8 if pairs > 64 else 4


def _even(value: int) -> int:
    return value + value % 2


def _power_of_2(value: int) -> int:
    """Round up to a power of 2."""
    return 1 << max(0, value - 1).bit_length()


def _narrowed(
    metadata: AttentionMetadata, owner_N: np.ndarray, window: int | None, first_slot: int
) -> tuple[np.ndarray | int, np.ndarray]:
    """Restrict each row's prefix and ancestors to a window and the first slot; return (low_N, ancestors_N).

    Along a row's path, the prefix has positions 0 .. visible - 1, followed by the ancestors in row order, with the row
    itself last. A window w keeps the last w positions.
    """
    low_N: np.ndarray | int = first_slot
    ancestors_N = metadata.ancestors_N
    is_behind = not first_slot or not metadata.has_ancestors or metadata.base_B.min(initial=64) >= first_slot
    if window is None and is_behind:
        return low_N, ancestors_N
    bit_N64 = bits_of(ancestors_N)
    keep_N64 = metadata.base_B[owner_N][:, None] + BITS >= first_slot
    if window is not None:
        low_N = np.maximum(low_N, metadata.visible_N + bit_N64.sum(-1) - window)
        keep_N64 &= bit_N64[:, ::-1].cumsum(-1)[:, ::-1] <= window
    kept_N64 = (bit_N64 & keep_N64).astype(np.uint64) << BITS.astype(np.uint64)
    return low_N, np.bitwise_or.reduce(kept_N64, axis=-1).view(np.int64)


def _fill_tiles(
    tiles_XT: np.ndarray, metadata: AttentionMetadata, owner_N: np.ndarray, low_WN: np.ndarray, tile_rows: int
) -> None:
    """Write the tiles of a `TiledPlan` and behind them their first slots; unused tiles have no rows."""
    tiles_XT[:] = 0
    if not len(owner_N):
        return
    R, offsets = tile_rows, metadata.query_offsets
    count_B = offsets[1:] - offsets[:-1]
    if count_B.max() <= R:  # one tile for each request with rows
        (request,) = count_B.nonzero()
        first, count = offsets[request], count_B[request]
    else:
        tiles_B = -(-count_B // R)
        request = np.arange(len(count_B)).repeat(tiles_B)
        ordinal = np.arange(len(request)) - (tiles_B.cumsum() - tiles_B)[request]
        first = offsets[request] + ordinal * R
        count = np.minimum(R, count_B[request] - ordinal * R)
    # The tiles partition the rows in order, so `reduceat` over their first rows reduces each tile.
    own = tiles_XT[:, : len(first)]
    own[0], own[1], own[2], own[3] = first, count, request, metadata.base_B[request]
    np.maximum.reduceat(keys_N(metadata, owner_N), first, out=own[4])
    np.minimum.reduceat(_lowest(metadata, owner_N, low_WN), first, axis=1, out=own[5:])


def _lowest(metadata: AttentionMetadata, owner_N: np.ndarray, low_WN: np.ndarray) -> np.ndarray:
    """Return [W, N], the first slot of each row: `low`, or the tree's base if the window excludes the prefix."""
    if not metadata.has_ancestors:
        return low_WN
    return np.where(metadata.ancestors_N != 0, np.minimum(low_WN, metadata.base_B[owner_N]), low_WN)


@triton.jit
def _add_block(
    q, m, total, out, start, end, row_low, row_visible, ancestors, base, kv_ptr, table_ptr, scale, softcap,
    KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend to KEYS slots from `start`. Without masks every row sees all of them."""
    slot = start + tl.arange(0, KEYS)
    dim = tl.arange(0, PADDED_WIDTH)
    here = (dim < WIDTH)[None, :]
    if IS_MASKED:
        is_slot = slot < end
        here = here & is_slot[:, None]
        page = tl.load(table_ptr + slot // PAGE, mask=is_slot, other=0)
    else:
        page = tl.load(table_ptr + slot // PAGE)
    SLOT: tl.constexpr = 2 * KV_HEADS * WIDTH
    place = page.to(tl.int64) * (PAGE * SLOT) + (slot % PAGE) * SLOT
    if IS_MASKED or WIDTH < PADDED_WIDTH:
        k = tl.load(kv_ptr + place[:, None] + dim[None, :], mask=here, other=0.0)
        v = tl.load(kv_ptr + KV_HEADS * WIDTH + place[:, None] + dim[None, :], mask=here, other=0.0)
    else:
        k = tl.load(kv_ptr + place[:, None] + dim[None, :])
        v = tl.load(kv_ptr + KV_HEADS * WIDTH + place[:, None] + dim[None, :])
    k = k.to(q.dtype)  # from 8 bits; interpreted, from 16
    v = v.to(q.dtype)
    score = tl.dot(q, tl.trans(k), input_precision="ieee")  # in powers of 2
    if HAS_SOFTCAP:  # tanh x = 1 - 2 / (e^2x + 1)
        score = softcap - 2.0 * softcap / (tl.exp(score * (scale * 2.0 / softcap)) + 1.0)
        score = score * 1.4426950408889634
    else:
        score = score * (scale * 1.4426950408889634)
    if IS_MASKED:
        node = slot - base
        bit = tl.minimum(tl.maximum(node, 0), 63)
        is_ancestor = ((ancestors[:, None] >> bit[None, :].to(tl.int64)) & 1) == 1
        is_ancestor = is_ancestor & ((node >= 0) & (node < 64))[None, :]
        is_prefix = (slot[None, :] >= row_low[:, None]) & (slot[None, :] < row_visible[:, None])
        score = tl.where((is_prefix | is_ancestor) & is_slot[None, :], score, float("-inf"))
    new_m = tl.maximum(m, tl.max(score, 1))
    anchor = tl.where(new_m == float("-inf"), 0.0, new_m)  # no key so far: -inf - -inf would be NaN
    weight = tl.exp2(score - anchor[:, None])
    shrink = tl.exp2(m - anchor)
    total = total * shrink + tl.sum(weight, 1)
    out = out * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
    return new_m, total, out


# Numbers that change between steps are not specialized, because each value could compile another kernel.
@triton.jit(do_not_specialize=["num_rows", "num_tiles", "table_width", "num_splits"])
def _attend(
    q_ptr, kv_ptr, out_ptr, partial_ptr, lse_ptr, sink_ptr,
    tiles_ptr, tile_lows_ptr, table_ptr, visible_ptr, lows_ptr, ancestors_ptr,
    scale, softcap, num_rows, num_tiles, table_width, num_splits, q_row_stride, q_head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, PAGE: tl.constexpr,
    PAIRS: tl.constexpr, KEYS: tl.constexpr, IS_SPLIT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(tiles_ptr + tile)
    tile_rows = tl.load(tiles_ptr + num_tiles + tile).to(tl.int32)
    request = tl.load(tiles_ptr + 2 * num_tiles + tile)
    base = tl.load(tiles_ptr + 3 * num_tiles + tile).to(tl.int32)
    last_slot = tl.load(tiles_ptr + 4 * num_tiles + tile).to(tl.int32)
    first_slot = tl.load(tile_lows_ptr + tile).to(tl.int32)

    pair = tl.arange(0, PAIRS)
    is_row = pair // GROUP < tile_rows
    row = first_row + pair // GROUP
    q_head = head * GROUP + pair % GROUP
    dim = tl.arange(0, PADDED_WIDTH)
    is_dim = dim < WIDTH
    q = tl.load(
        q_ptr + row[:, None] * q_row_stride + q_head[:, None] * q_head_stride + dim[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )
    if UPCAST:  # 16-bit arithmetic is silently wrong in Triton 3.9's interpreter; loads, stores and casts are correct
        q = q.to(tl.float32)
    visible = tl.load(visible_ptr + row, mask=is_row, other=0).to(tl.int32)
    low = tl.load(lows_ptr + row, mask=is_row, other=0).to(tl.int32)
    ancestors = tl.load(ancestors_ptr + row, mask=is_row, other=0)

    blocks_each = tl.cdiv(tl.cdiv(last_slot - first_slot, KEYS), num_splits)
    begin = first_slot + split * blocks_each * KEYS
    end = tl.minimum(last_slot, begin + blocks_each * KEYS)
    # Blocks begin .. plain_begin are masked where windows differ, and those from plain_end on where rows end; between
    # them every row of the tile sees every slot.
    common_low = tl.max(tl.where(is_row, low, 0), 0)
    common_end = tl.min(tl.where(is_row, visible, last_slot), 0)
    num_blocks = tl.maximum(tl.cdiv(end - begin, KEYS), 0)
    num_before = tl.minimum(tl.cdiv(tl.maximum(common_low - begin, 0), KEYS), num_blocks)
    num_plain = tl.maximum(tl.maximum(tl.minimum(common_end, end) - begin, 0) // KEYS - num_before, 0)
    m = tl.full([PAIRS], float("-inf"), tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    out = tl.zeros([PAIRS, PADDED_WIDTH], tl.float32)
    kv_ptr += head * WIDTH
    table_ptr += request * table_width
    for block in range(num_before, num_before + num_plain):
        m, total, out = _add_block(
            q, m, total, out, begin + block * KEYS, end, low, visible, ancestors, base, kv_ptr, table_ptr,
            scale, softcap, KV_HEADS, WIDTH, PADDED_WIDTH, PAGE, KEYS, False, HAS_SOFTCAP,
        )  # fmt: skip
    for masked in range(num_blocks - num_plain):
        block = tl.where(masked < num_before, masked, masked + num_plain)
        m, total, out = _add_block(
            q, m, total, out, begin + block * KEYS, end, low, visible, ancestors, base, kv_ptr, table_ptr,
            scale, softcap, KV_HEADS, WIDTH, PADDED_WIDTH, PAGE, KEYS, True, HAS_SOFTCAP,
        )  # fmt: skip
    if HAS_SINKS:
        if split == 0:
            sink = tl.load(sink_ptr + q_head).to(tl.float32) * 1.4426950408889634
            new_m = tl.maximum(m, sink)
            shrink = tl.exp2(m - new_m)
            total = total * shrink + tl.exp2(sink - new_m)
            out = out * shrink[:, None]
            m = new_m
    is_empty = total == 0.0  # the row has no key in this split
    total = tl.where(is_empty, 1.0, total)
    out = out / total[:, None]

    place = row * (KV_HEADS * GROUP) + q_head
    is_out = is_row[:, None] & is_dim[None, :]
    if IS_SPLIT:
        place += split.to(tl.int64) * num_rows * (KV_HEADS * GROUP)
        if not HAS_SINKS:  # the combination reads no values of a split without keys
            is_out = (pair // GROUP < tl.where(num_blocks > 0, tile_rows, 0))[:, None] & is_dim[None, :]
        tl.store(partial_ptr + place[:, None] * WIDTH + dim[None, :], out, mask=is_out)
        tl.store(lse_ptr + place, tl.where(is_empty, float("-inf"), m + tl.log2(total)), mask=is_row)
    else:
        tl.store(out_ptr + place[:, None] * WIDTH + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit(do_not_specialize=["num_pairs"])
def _combine(
    partial_ptr, lse_ptr, out_ptr, num_pairs,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, PADDED_WIDTH)
    is_dim = dim < WIDTH
    place = split * num_pairs + pair
    lse = tl.load(lse_ptr + place)
    best = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(best == float("-inf"), 0.0, best))
    is_read = is_dim[None, :] & (weight > 0.0)[:, None]  # most splits of a short prefix have no key
    partial = tl.load(partial_ptr + place[:, None] * WIDTH + dim[None, :], mask=is_read, other=0.0)
    total = tl.sum(weight, 0)
    out = tl.sum(partial * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + pair * WIDTH + dim, out.to(out_ptr.dtype.element_ty), mask=is_dim)
