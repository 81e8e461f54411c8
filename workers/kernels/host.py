"""Host computations that planners share: the sizes of a plan, bitmasks of ancestors, and where a row's keys end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workers.types import AttentionMetadata

BITS = np.arange(64)

_PROGRAMS = 256
"""No program has more keys than this part of all: then there are about two per multiprocessor of an H100 or H200."""
KEYS_PER_BLOCK = 64
"""Keys that a program reads at once, at most; pieces are cut at multiples of it."""
_MAX_PAIRS = 128
"""With four query heads to a key-value head, the 17 rows of the default tree fill one tile, and read every key once."""
_INVARIANT_PAIRS, _INVARIANT_KEYS, _INVARIANT_PIECES = 64, 1024, 8
"""Batch-invariant: pairs of a tile, the fewest keys of a piece, and the most pieces of a tile, which take memory."""
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
    kv_heads: int
    windows: tuple[int | None, ...]
    is_float32: bool = False
    keys_per_piece: int | None = None
    """Every piece of keys has this many, whatever the other rows are; None = as many as share the work best."""

    @property
    def tile_pairs(self) -> int:
        """M: (row, query head) pairs per tile: those of an average request, between 16 and 128.

        In a graph's bucket the last request owns the padding alone, so it is not counted.
        """
        if self.keys_per_piece is not None:  # for any number of rows the same instructions
            return max(_INVARIANT_PAIRS, power_of_2(self.group_size))
        rows = -(-self.num_rows // max(1, self.num_requests - 1))
        most = _MAX_FLOAT32_PAIRS if self.is_float32 else _MAX_PAIRS
        return max(16, min(most, power_of_2(rows * self.group_size)), power_of_2(self.group_size))

    @property
    def tile_rows(self) -> int:
        """Rows per tile."""
        return self.tile_pairs // self.group_size

    @property
    def num_tiles(self) -> int:
        """Number of tiles, sufficient for any distribution of the rows over the requests."""
        return self.num_rows // self.tile_rows + self.num_requests

    @property
    def num_cuts(self) -> int:
        """Number by which the keys of all tiles are divided for the most keys of a piece."""
        blocks = self.num_tiles * (self.table_width * self.page_size // KEYS_PER_BLOCK)
        return max(1, min(_PROGRAMS // self.kv_heads, blocks))

    @property
    def num_pieces(self) -> int:
        """S: number of pieces, sufficient for any lengths: rounding up adds less than one to a tile's share."""
        return self.num_tiles * self._most_pieces if self.keys_per_piece else self.num_tiles + self.num_cuts

    @property
    def num_parts(self) -> int:
        """Number of pieces, sufficient for the tiles that are cut: each has more than one share of the keys."""
        if self.keys_per_piece:
            return self.num_pieces if self._most_pieces > 1 else 1
        return self.num_cuts + min(self.num_tiles, self.num_cuts)

    @property
    def _most_pieces(self) -> int:
        """The most pieces of a tile, where every piece has as many keys."""
        assert self.keys_per_piece is not None
        return -(-self.table_width * self.page_size // self.keys_per_piece)

    @property
    def part_pairs(self) -> int:
        """Pairs of a part: those of the most rows that a tile can have."""
        return min(self.num_rows, self.tile_rows) * self.group_size

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of the plan's parts on the device; rows have even widths, so that each begins at 16 bytes."""
        N, S, W = even(self.num_rows), even(self.num_pieces), len(self.windows)
        return {
            "write_slots": N,
            "visible": N,
            "lows": W * N,  # first slot of its prefix that a row attends to
            "ancestors": W * N,  # or the row's path, see `paths_of`
            "first_pieces": W * N,  # of the row's tile; its other pieces follow
            "nodes": 8 * N if self.keys_per_piece else 0,  # uint8 [N, 64], see `paths_of`
            "pieces": W * 7 * S,  # see `workers.kernels.triton_attention.TiledPlan`
        }


def invariant_keys_per_piece(max_model_len: int) -> int:
    """Return the keys of every piece where results are batch-invariant, for requests of up to so many tokens."""
    blocks = -(-max_model_len // (_INVARIANT_PIECES * KEYS_PER_BLOCK))
    return max(_INVARIANT_KEYS, blocks * KEYS_PER_BLOCK)


def even(value: int) -> int:
    """Round up to an even number."""
    return value + value % 2


def power_of_2(value: int) -> int:
    """Round up to a power of 2."""
    return 1 << max(0, value - 1).bit_length()


def bits_of(mask: np.ndarray) -> np.ndarray:
    """Expand int64 [...] bitmasks to int64 [..., 64] of 0 and 1 (the arithmetic shift handles bit 63 correctly)."""
    return (mask[..., None] >> BITS) & 1


def highest_bit(mask_N: np.ndarray) -> np.ndarray:
    """Return the highest set bit of each int64, from 1; 0 = none is set."""
    # Each half is exact in float64, whose exponent gives the highest bit: a tenth of the time of testing all 64.
    high_N, low_N = mask_N >> 32 & 0xFFFFFFFF, mask_N & 0xFFFFFFFF
    return np.where(high_N > 0, 32 + np.frexp(high_N)[1], np.frexp(low_N)[1])


def keys_N(metadata: AttentionMetadata, owner_N: np.ndarray) -> np.ndarray:
    """Return one past the last slot that each row may attend to."""
    if not metadata.has_ancestors:
        return metadata.visible_N
    highest_N = highest_bit(metadata.ancestors_N)
    return np.maximum(metadata.visible_N, np.where(highest_N > 0, metadata.base_B[owner_N] + highest_N, 0))


def paths_of(ancestors_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the packed row of a leaf below each row of the trees, and the nodes on its path, uint8 [N, 64].

    Rows in a tree are packed in the order of its nodes, so a parent lies as many rows before a child as nodes before.
    Rows in no tree are their own leaves, without nodes.
    """
    bit_N64 = bits_of(ancestors_N)
    is_on_path_N64 = bit_N64.astype(bool)
    depth_N = bit_N64.sum(-1)
    leaf_N = np.arange(len(ancestors_N))
    nodes_N64 = np.zeros(bit_N64.shape, dtype=np.uint8)
    row_P, node_P = is_on_path_N64.nonzero()
    place_P = np.arange(len(row_P)) - (depth_N.cumsum() - depth_N)[row_P]
    nodes_N64[row_P, place_P] = node_P
    (child,) = (depth_N > 1).nonzero()
    last = depth_N[child] - 1
    parent = child - nodes_N64[child, last] + nodes_N64[child, last - 1]
    leaf_N[parent[::-1]] = child[::-1]  # of several children the first
    for _ in range(6):  # 2^6 levels
        leaf_N = leaf_N[leaf_N]
    return leaf_N, nodes_N64
