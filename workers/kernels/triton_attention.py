"""Tree attention over the paged KV cache in Triton: the counterpart of `workers.kernels.torch_attention`.

Split-KV over the sequence as in Flash-Decoding (Dao et al. 2023), with the online softmax of FlashAttention-2
(Dao 2023). A *tile* is a few packed rows of one request, whose keys the plan cuts into *pieces*; a program takes one
piece and one key-value head, and the query heads that share this key-value head are folded into the rows:

    m, l, o  =  running max, sum and weighted values over the piece's blocks of keys, per (row, query head)
    S = q K^T scale     a row sees slot s if  low <= s < visible  or  bit s - base of its ancestors is set
    m' = max(m, S)      l = l e^(m - m') + sum e^(S - m')      o = o e^(m - m') + e^(S - m') V
    combine:            out = sum_i w_i o_i / l_i,   w = softmax_i (m_i + log l_i)  over the pieces i of a tile

A softcap c replaces S with c tanh(S / c). A sink is an additional score without a value, added in the first piece.

The plan lists the pieces, the longest tiles first. No piece has more keys than a fixed share of all tiles' keys, so one
long request among short ones occupies as many programs as its length deserves. How many pieces a tile has, and with it
the order in which a row's values are added, thus depends on the lengths of the other requests of the step.

If results must be batch-invariant, pieces have a fixed length instead, tiles one size, and keys the order of their
positions: near the end of its prefix, where a tree begins, a tile takes the paths of its rows in turn, and a block has
the keys of one path. The rows of other paths see none of them, which changes no bit of their sums.

Sliding windows need no kernel code: the plan converts a window along a row's path into a higher `low` and an ancestor
mask without the oldest bits, and has a list for each window. Apart from data, a launch depends only on `PlanShape`, so
a captured launch serves every step of that shape; its plan is filled in place.

Legend: N packed rows, B requests, P pages of a request, T tiles, S pieces, W windows, M (row, query head) pairs of a
tile, H key-value heads, G query heads of each, d head width.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.host import BITS, KEYS_PER_BLOCK, PlanShape, bits_of, keys_N, paths_of, power_of_2
from workers.kernels.interpreted import is_interpreted
from workers.kernels.prompt_attention import PromptPlan, is_flash_width, long_chunks
from workers.transfer import to_device
from workers.types import AttentionMetadata

_NO_TREE = 1 << 30
"""The base of rows that are in no tree: beyond all of their keys."""
_COMBINED_BLOCKS = 64
"""The most blocks of rows among which `_combine` is divided: most rows of many have nothing to combine."""
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
    """One step's attention, for all layers: on the device, all but the page table in one buffer (int64).

    A piece has its tile's first row, number of rows, request and base, its own first slot and one past its last, and
    the number of its tile's pieces if it is the first of them, else 0.
    """

    def __init__(self, shape: PlanShape, device: torch.device | str) -> None:
        sizes, W = shape.sizes, len(shape.windows)
        self.shape = shape
        self.buffer = torch.zeros(sum(sizes.values()), dtype=torch.int64, device=device)
        parts = dict(zip(sizes, self.buffer.split(list(sizes.values())), strict=True))
        self.write_slots_N = parts["write_slots"][: shape.num_rows]
        self.visible_N, self.pieces_W7S = parts["visible"], parts["pieces"].view(W, 7, -1)
        self.lows_WN, self.ancestors_WN, self.first_pieces_WN = (
            parts[name].view(W, -1) for name in ("lows", "ancestors", "first_pieces")
        )
        self.nodes = parts["nodes"].view(torch.uint8)
        self._table = DeviceTable(shape.num_requests, shape.table_width, device)
        self.table_BP = self._table.on_device_BP
        # The host's image of the buffer, by the same parts: one vectorised pass fills it, and one copy sends it.
        self._image = np.zeros(len(self.buffer), dtype=np.int64)
        rows, nodes, pieces = np.split(self._image, [-sizes["pieces"] - sizes["nodes"], -sizes["pieces"]])
        self._rows, self._pieces = rows.reshape(2 + 3 * W, -1)[:, : shape.num_rows], pieces.reshape(W, 7, -1)
        self._nodes_N64 = nodes.view(np.uint8).reshape(-1, 64)
        self._tiles = np.zeros((5 + W, shape.num_tiles), dtype=np.int64)
        self._sent = torch.from_numpy(self._image)
        self._tile_rows, self._num_cuts = shape.tile_rows, shape.num_cuts

    def fill(self, metadata: AttentionMetadata, first_slot: int) -> None:
        """Write another step of the same shape; its page table may be narrower. Takes one copy and `DeviceTable`'s."""
        shape, W = self.shape, len(self.shape.windows)
        owner_N = metadata.owner_N
        rows = self._rows
        rows[0] = metadata.physical(owner_N, metadata.slot_N, shape.page_size)
        rows[1] = metadata.visible_N
        for w, window in enumerate(shape.windows):
            rows[2 + w], rows[2 + W + w] = _narrowed(metadata, owner_N, window, first_slot)
        lowest_WN = _lowest(metadata, owner_N, rows[2 : 2 + W], shape.windows, first_slot)
        _fill_tiles(self._tiles, metadata, owner_N, lowest_WN, self._tile_rows)
        if shape.keys_per_piece is not None:
            assert shape.windows == (None,) and not first_slot, "paths are for full attention from the first slot on"
            self._fill_paths(metadata, owner_N)
        self._metadata, self._owner_N, self._first_slot = metadata, owner_N, first_slot
        self._send()

    def _fill_paths(self, metadata: AttentionMetadata, owner_N: np.ndarray) -> None:
        """Let every row see the beginning of a path: its keys in the order of their positions.

        A row's path leads to a leaf below it. So several rows share one, which has the node of every position, and a
        row sees its positions up to the row's own. In place of ancestors a row has the packed row of its leaf, or -1 -
        leaf if an earlier row of its tile has the same one.
        """
        ancestors_N, tiles = metadata.ancestors_N, self._tiles
        tile_N = np.arange(tiles.shape[1]).repeat(tiles[1])
        leaf_N, nodes_N64 = paths_of(ancestors_N)
        _, opens_N = np.unique(tile_N * len(leaf_N) + leaf_N, return_index=True)
        self._rows[1] += bits_of(ancestors_N).sum(-1)
        self._rows[3] = -1 - leaf_N
        self._rows[3, opens_N] = leaf_N[opens_N]
        self._nodes_N64[: len(leaf_N)] = nodes_N64
        has_tree_T = np.zeros(tiles.shape[1], dtype=bool)
        has_tree_T[tile_N[ancestors_N != 0]] = True
        tiles[3, ~has_tree_T] = _NO_TREE
        (used_T,) = (tiles[1] > 0).nonzero()
        np.maximum.reduceat(self._rows[1], tiles[0, used_T], out=tiles[4, : len(used_T)])

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
        for w, window in enumerate(self.shape.windows):
            if window is not None:
                np.maximum(tiles[3] + 1 - window, self._first_slot, out=tiles[5 + w])
        self._send()

    def _send(self) -> None:
        tiles_5T, lows_WT, first_pieces_WN = self._tiles[:5], self._tiles[5:], self._rows[-len(self._pieces) :]
        for pieces_7S, first_piece_N, low_T in zip(self._pieces, first_pieces_WN, lows_WT, strict=True):
            _fill_pieces(pieces_7S, first_piece_N, tiles_5T, low_T, self._num_cuts, self.shape.keys_per_piece)
        # The driver stages pageable memory before it returns, so this need not synchronize.
        self.buffer.copy_(self._sent, non_blocking=True)
        self._table.update(self._metadata.page_table_BP)

    def set_ancestors(self, ancestors_N: Tensor) -> None:
        """Replace the ancestors (int64, on the device) of the rows of the last `fill`.

        Everything else stays, so that `fill` must have covered every ancestor that a row may get. No slot of a tree may
        be below `first_slot`. With windows, a row's prefix must end at its tree's base.
        """
        num_rows = self.shape.num_rows
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


def plan(
    metadata: AttentionMetadata,
    page_size: int,
    *,
    windows: Sequence[int | None] = (None,),
    group_size: int = 1,
    kv_heads: int = 1,
    first_slot: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    into: TiledPlan | None = None,
    keys_per_piece: int | None = None,
) -> TiledPlan | PromptPlan:
    """See `workers.kernels.select.Kernels.plan`. keys_per_piece: see `PlanShape`; then results are batch-invariant."""

    def tiled(step: AttentionMetadata) -> TiledPlan:
        shape = PlanShape(
            num_rows=len(step.slot_N),
            num_requests=len(step.base_B),
            table_width=step.page_table_BP.shape[1],
            page_size=page_size,
            group_size=group_size,
            kv_heads=kv_heads,
            windows=tuple(dict.fromkeys(windows)),
            is_float32=dtype == torch.float32,
            keys_per_piece=keys_per_piece,
        )
        made = TiledPlan(shape, device)
        made.fill(step, first_slot)
        return made

    if into is None:
        chunks = long_chunks(metadata, first_slot, dtype, device) if keys_per_piece is None and None in windows else []
        if chunks:
            return PromptPlan(metadata, page_size, chunks, first_slot=first_slot, device=device, tiled=tiled)
        return tiled(metadata)
    room, (num_requests, table_width) = into.shape, metadata.page_table_BP.shape
    num_rows = len(metadata.slot_N)
    assert (room.num_rows, room.num_requests) == (num_rows, num_requests) and room.table_width >= table_width, (
        f"a plan for {room} cannot be filled for {num_rows} rows of {num_requests} requests and {table_width} pages"
    )
    into.fill(metadata, first_slot)
    return into


def tree_attention(
    q_NHd: Tensor,
    kv_slots: Tensor,
    plan: TiledPlan | PromptPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """See `workers.kernels.select.Kernels.tree_attention`. A row that attends to nothing gets 0."""
    if isinstance(plan, PromptPlan):
        if window is None and softcap is None and sink_H is None and is_flash_width(q_NHd.shape[2]):
            return plan.attend(q_NHd, kv_slots, scale, tree_attention)
        return tree_attention(q_NHd, kv_slots, plan.whole, scale, window, softcap, sink_H)
    shape = plan.shape
    N, num_heads, d = q_NHd.shape
    H = kv_slots.shape[2]
    assert num_heads == H * shape.group_size and q_NHd.stride(2) == 1 and kv_slots.is_contiguous()
    out_NHd = q_NHd.new_empty(N, num_heads, d)
    if not N:
        return out_NHd.view(0, num_heads * d)
    w = shape.windows.index(window)
    pieces_7S, first_pieces_N = plan.pieces_W7S[w], plan.first_pieces_WN[w]
    num_pieces, sizes = pieces_7S.shape[1], (shape.num_parts, H, shape.part_pairs)
    part = torch.empty(*sizes, d, dtype=torch.float32, device=q_NHd.device)
    lse = torch.empty(*sizes, dtype=torch.float32, device=q_NHd.device)
    padded_d = max(16, power_of_2(d))
    keys = keys_of_block(shape.tile_pairs, padded_d, q_NHd.element_size(), _shared_bytes(q_NHd.device))
    _attend[(H, num_pieces)](
        q_NHd, kv_slots, out_NHd, part, lse, q_NHd if sink_H is None else sink_H,
        pieces_7S, plan.table_BP, plan.visible_N, plan.lows_WN[w], plan.ancestors_WN[w], plan.nodes,
        scale, softcap or 0.0, num_pieces, shape.table_width, shape.part_pairs, q_NHd.stride(0), q_NHd.stride(1),
        KV_HEADS=H, GROUP=shape.group_size, WIDTH=d, PADDED_WIDTH=padded_d, PAGE=shape.page_size,
        PAIRS=shape.tile_pairs, KEYS=keys, HAS_PATHS=shape.keys_per_piece is not None,
        HAS_SOFTCAP=softcap is not None, HAS_SINKS=sink_H is not None, UPCAST=is_interpreted(),
        num_warps=warps_of_tile(shape.tile_pairs), num_stages=2,
    )  # fmt: skip
    rows_each = power_of_2(-(-N // _COMBINED_BLOCKS))
    _combine[(triton.cdiv(N, rows_each), num_heads)](
        part, lse, out_NHd, pieces_7S, first_pieces_N, N, num_pieces, shape.part_pairs,
        KV_HEADS=H, GROUP=shape.group_size, WIDTH=d, PADDED_WIDTH=padded_d, ROWS=rows_each, PIECES=32, num_warps=4,
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
    tiles_XT: np.ndarray, metadata: AttentionMetadata, owner_N: np.ndarray, lowest_WN: np.ndarray, tile_rows: int
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
    np.minimum.reduceat(lowest_WN, first, axis=1, out=own[5:])


def _lowest(
    metadata: AttentionMetadata,
    owner_N: np.ndarray,
    low_WN: np.ndarray,
    windows: Sequence[int | None],
    first_slot: int,
) -> np.ndarray:
    """Return [W, N], the first slot of each row: `low`, or that of a root, for any ancestors that it may get."""
    if not metadata.has_ancestors:
        return low_WN
    behind_root_W1 = np.array([[1 - (window or 1)] for window in windows])
    root_low_WN = np.maximum(metadata.base_B[owner_N] + behind_root_W1, first_slot)
    return np.where(metadata.ancestors_N != 0, np.minimum(low_WN, root_low_WN), low_WN)


def _fill_pieces(
    pieces_7S: np.ndarray,
    first_piece_N: np.ndarray,
    tiles_5T: np.ndarray,
    low_T: np.ndarray,
    num_cuts: int,
    keys_per_piece: int | None,
) -> None:
    """List the pieces of the tiles, and the first piece of each row; unused pieces have neither rows nor keys."""
    minus_T = np.minimum(low_T - tiles_5T[4], -1)  # minus the keys of each tile, because // rounds down
    order_T = minus_T.argsort(kind="stable")
    minus_T = minus_T.take(order_T)
    if keys_per_piece is not None:
        each_T = np.full_like(minus_T, keys_per_piece)
    else:
        most = max(KEYS_PER_BLOCK, -(int(minus_T.sum()) // num_cuts))
        each_T = minus_T // (minus_T // most * -KEYS_PER_BLOCK) * -KEYS_PER_BLOCK
    count_T = -(minus_T // each_T)
    first_T = count_T.cumsum() - count_T
    place_T = np.empty_like(first_T)
    place_T[order_T] = first_T
    first_piece_N[:] = place_T.repeat(tiles_5T[1])
    tile_S, each_S = order_T.repeat(count_T), each_T.repeat(count_T)
    own = pieces_7S[:, : len(tile_S)]
    own[:4], last_S = tiles_5T[:4].take(tile_S, axis=1), tiles_5T[4].take(tile_S)
    own[4] = (np.arange(len(tile_S)) - place_T.take(tile_S)) * each_S + low_T.take(tile_S)
    own[5] = np.minimum(own[4] + each_S, last_S)
    own[6] = 0
    own[6, first_T] = count_T
    pieces_7S[:, len(tile_S) :] = 0


@triton.jit
def _add_block(
    q, m, total, out, start, end, row_low, row_visible, ancestors, base, kv_ptr, table_ptr, nodes_ptr, path, scale,
    softcap,
    KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr, HAS_PATHS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend to KEYS slots from `start`. Without masks every row sees all of them.

    With paths, slots are positions of a path, or of the prefix alone if `path` is -1.
    """
    slot = start + tl.arange(0, KEYS)
    dim = tl.arange(0, PADDED_WIDTH)
    here = (dim < WIDTH)[None, :]
    if IS_MASKED:
        is_slot = slot < end
        if HAS_PATHS:
            is_seen = (slot[None, :] < row_visible[:, None]) & ((ancestors == path)[:, None] | (path < 0))
            is_node = is_slot & (slot >= base)
            node = tl.load(nodes_ptr + path * 64 + slot - base, mask=is_node, other=0).to(tl.int32)
            slot = tl.where(is_node, base + node, slot)
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
        if not HAS_PATHS:
            node = slot - base
            bit = tl.minimum(tl.maximum(node, 0), 63)
            is_ancestor = ((ancestors[:, None] >> bit[None, :].to(tl.int64)) & 1) == 1
            is_ancestor = is_ancestor & ((node >= 0) & (node < 64))[None, :]
            is_prefix = (slot[None, :] >= row_low[:, None]) & (slot[None, :] < row_visible[:, None])
            is_seen = is_prefix | is_ancestor
        score = tl.where(is_seen & is_slot[None, :], score, float("-inf"))
    new_m = tl.maximum(m, tl.max(score, 1))
    anchor = tl.where(new_m == float("-inf"), 0.0, new_m)  # no key so far: -inf - -inf would be NaN
    weight = tl.exp2(score - anchor[:, None])
    shrink = tl.exp2(m - anchor)
    total = total * shrink + tl.sum(weight, 1)
    out = out * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
    return new_m, total, out


# Numbers that change between steps are not specialized, because each value could compile another kernel.
@triton.jit(do_not_specialize=["num_pieces", "table_width", "part_pairs"])
def _attend(
    q_ptr, kv_ptr, out_ptr, part_ptr, lse_ptr, sink_ptr,
    pieces_ptr, table_ptr, visible_ptr, lows_ptr, ancestors_ptr, nodes_ptr,
    scale, softcap, num_pieces, table_width, part_pairs, q_row_stride, q_head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, PAGE: tl.constexpr,
    PAIRS: tl.constexpr, KEYS: tl.constexpr, HAS_PATHS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    head, piece = tl.program_id(0), tl.program_id(1)  # programs start in this order: all heads of the longest first
    first_row = tl.load(pieces_ptr + piece)
    tile_rows = tl.load(pieces_ptr + num_pieces + piece).to(tl.int32)
    request = tl.load(pieces_ptr + 2 * num_pieces + piece)
    base = tl.load(pieces_ptr + 3 * num_pieces + piece).to(tl.int32)
    begin = tl.load(pieces_ptr + 4 * num_pieces + piece).to(tl.int32)
    end = tl.load(pieces_ptr + 5 * num_pieces + piece).to(tl.int32)

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

    # Blocks begin .. plain_begin are masked where windows differ, and those from plain_end on where rows end; between
    # them every row of the tile sees every slot.
    common_low = tl.max(tl.where(is_row, low, 0), 0)
    common_end = tl.min(tl.where(is_row, visible, end), 0)
    if HAS_PATHS:
        common_end = tl.minimum(common_end, base)
        ancestors = tl.where(ancestors < 0, -1 - ancestors, ancestors)  # the leaf of the row's path
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
            q, m, total, out, begin + block * KEYS, end, low, visible, ancestors, base, kv_ptr, table_ptr, nodes_ptr,
            -1, scale, softcap, KV_HEADS, WIDTH, PADDED_WIDTH, PAGE, KEYS, False, HAS_PATHS, HAS_SOFTCAP,
        )  # fmt: skip
    for masked in range(num_blocks - num_plain):
        block = tl.where(masked < num_before, masked, masked + num_plain)
        start = begin + block * KEYS
        if HAS_PATHS:
            # Where a tree begins, each path in turn; it changes nothing of the rows of the others.
            has_nodes = start + KEYS > base
            for i in range(tl.where(has_nodes, tile_rows, 1)):
                path = tl.where(has_nodes, tl.load(ancestors_ptr + first_row + i), -1).to(tl.int32)
                if (path >= 0) | (not has_nodes):
                    m, total, out = _add_block(
                        q, m, total, out, start, end, low, visible, ancestors, base, kv_ptr, table_ptr, nodes_ptr, path,
                        scale, softcap, KV_HEADS, WIDTH, PADDED_WIDTH, PAGE, KEYS, True, HAS_PATHS, HAS_SOFTCAP,
                    )  # fmt: skip
        else:
            m, total, out = _add_block(
                q, m, total, out, start, end, low, visible, ancestors, base, kv_ptr, table_ptr, nodes_ptr, -1,
                scale, softcap, KV_HEADS, WIDTH, PADDED_WIDTH, PAGE, KEYS, True, HAS_PATHS, HAS_SOFTCAP,
            )  # fmt: skip
    count = tl.load(pieces_ptr + 6 * num_pieces + piece)
    if HAS_SINKS:
        if count > 0:  # the first of its tile
            sink = tl.load(sink_ptr + q_head).to(tl.float32) * 1.4426950408889634
            new_m = tl.maximum(m, sink)
            shrink = tl.exp2(m - new_m)
            total = total * shrink + tl.exp2(sink - new_m)
            out = out * shrink[:, None]
            m = new_m
    is_empty = total == 0.0  # the row has no key in this piece
    total = tl.where(is_empty, 1.0, total)
    out = out / total[:, None]

    is_out = is_row[:, None] & is_dim[None, :]
    if count == 1:
        place = row * (KV_HEADS * GROUP) + q_head
        tl.store(out_ptr + place[:, None] * WIDTH + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=is_out)
    else:
        place = (piece.to(tl.int64) * KV_HEADS + head) * part_pairs + pair
        tl.store(part_ptr + place[:, None] * WIDTH + dim[None, :], out, mask=is_out)
        tl.store(lse_ptr + place, tl.where(is_empty, float("-inf"), m + tl.log2(total)), mask=is_row)


@triton.jit(do_not_specialize=["num_rows", "num_pieces", "part_pairs"])
def _combine(
    part_ptr, lse_ptr, out_ptr, pieces_ptr, first_pieces_ptr, num_rows, num_pieces, part_pairs,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Add up the pieces of ROWS rows, PIECES at a time; rows whose tile has one piece are done."""
    q_head = tl.program_id(1)
    begin = tl.program_id(0) * ROWS
    rows = begin + tl.arange(0, ROWS)
    firsts = tl.load(first_pieces_ptr + rows, mask=rows < num_rows, other=0)
    if tl.max(tl.load(pieces_ptr + 6 * num_pieces + firsts, mask=rows < num_rows, other=0), 0) > 1:
        dim = tl.arange(0, PADDED_WIDTH)
        is_dim = dim < WIDTH
        for row in range(begin, tl.minimum(begin + ROWS, num_rows)):
            first = tl.load(first_pieces_ptr + row).to(tl.int32)
            count = tl.load(pieces_ptr + 6 * num_pieces + first).to(tl.int32)
            if count > 1:
                pair = (row - tl.load(pieces_ptr + first).to(tl.int32)) * GROUP + q_head % GROUP
                m = float("-inf")
                total = 0.0
                out = tl.zeros([PADDED_WIDTH], tl.float32)
                for done in range(0, count, PIECES):
                    piece = done + tl.arange(0, PIECES)
                    is_piece = piece < count
                    place = ((first + piece) * KV_HEADS + q_head // GROUP) * part_pairs + pair
                    lse = tl.load(lse_ptr + place, mask=is_piece, other=float("-inf"))
                    part = tl.load(
                        part_ptr + place[:, None] * WIDTH + dim[None, :],
                        mask=is_piece[:, None] & is_dim[None, :],
                        other=0.0,
                    )
                    new_m = tl.maximum(m, tl.max(lse, 0))
                    anchor = tl.where(new_m == float("-inf"), 0.0, new_m)
                    weight, shrink = tl.exp2(lse - anchor), tl.exp2(m - anchor)
                    total = total * shrink + tl.sum(weight, 0)
                    out = out * shrink + tl.sum(part * weight[:, None], 0)
                    m = new_m
                out = out / tl.where(total == 0.0, 1.0, total)
                place = (row * KV_HEADS * GROUP + q_head) * WIDTH + dim
                tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=is_dim)
