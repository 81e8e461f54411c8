"""Weights in 8 or 4 bits with a scale for each block of columns, as checkpoints store them.

Legend: N rows, O outputs, I inputs, B blocks of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED = torch.uint8
"""The type of 4-bit values, two in a byte."""
KEPT_TYPES = frozenset({torch.float8_e4m3fn, torch.int8, PACKED})
"""All types of values."""
UNIT = 32
"""Columns that lie together in `packed`."""
FLOAT8_CAPABILITY = (8, 9)
"""The lowest compute capability of GPUs for which Triton converts float8."""
_TILE_COLUMNS = 128
"""The columns of a block as checkpoints have them, and 128 bytes of a weight's row."""
_FEWEST_COLUMNS = UNIT
_OUTPUTS = 64
"""Outputs of a program for few rows."""
_PROGRAMS = 256
"""Sums are split until there are this many programs: about two per multiprocessor of an H100 or H200."""
_COLUMNS_PER_SPLIT = 1024
"""Minimum number of columns per split."""
_MAX_SPLITS = 8
SPLIT_ROWS = 128
"""The most rows whose splits are computed side by side, as float32 sums [S, N, O].

For more it pays to dequantize a weight first: its product takes as long for each 64 rows as that once.
"""


@dataclass(frozen=True, slots=True, eq=False)
class BlockScaled:
    """A weight [O, I]: (value - zero point) * scale, where the columns of a block share the last two.

    Scales are kept for every row, also where a block of the checkpoint has several rows. So rows can be cut and stacked
    anywhere, for 4 bytes per `block` columns (128: 3 %).
    """

    values_OI: Tensor
    """float8_e4m3fn or int8, contiguous; or 4-bit integers, see `packed`."""
    scale_BO: Tensor
    """Scales of columns block * b .. block * (b + 1) - 1: float32, or of integers the stored type."""
    zero_BO: Tensor | None
    """int16; None: 0."""
    block: int
    """Columns of a block; the last one may have fewer."""
    dtype: torch.dtype
    """Type of the dequantized weight, and of inputs and outputs."""

    @property
    def is_packed(self) -> bool:
        """Return whether values are in 4 bits."""
        return self.values_OI.dtype == PACKED

    @property
    def shape(self) -> torch.Size:
        """Return (O, I)."""
        num_outputs, width = self.values_OI.shape
        return torch.Size((num_outputs, 2 * width if self.is_packed else width))

    def dequantized(self) -> Tensor:
        """Return the weight [O, I] in `dtype`: the float32 product, rounded once."""
        values_OI = (unpacked(self.values_OI) if self.is_packed else self.values_OI).to(torch.float32)
        if self.zero_BO is not None:
            values_OI = values_OI - self._spread(self.zero_BO)
        return self._spread(self.scale_BO).mul(values_OI).to(self.dtype)

    def _spread(self, x_BO: Tensor) -> Tensor:
        """Return each column's item in float32, [O, I]."""
        x_OI = x_BO.to(torch.float32).t().repeat_interleave(self.block, dim=1, output_size=self.block * len(x_BO))
        return x_OI[:, : self.shape[1]]


def packed(values_OI: Tensor) -> Tensor:
    """Return integers from -8 to 7 in 4 bits, uint8 [O, I / 2]. I is a multiple of `UNIT`.

    Of each `UNIT` columns a byte has one of the first half in its lower bits, and one of the second, both plus 8. So a
    tile of any number of units reads its inputs in runs.
    """
    low, high = (values_OI + 8).to(PACKED).unflatten(1, (-1, 2, UNIT // 2)).unbind(2)
    return (low | high << 4).flatten(1)


def unpacked(packed_OX: Tensor) -> Tensor:
    """Return the integers of `packed`, int8 [O, I]."""
    bytes_OUx = packed_OX.unflatten(1, (-1, UNIT // 2))
    return torch.stack((bytes_OUx & 15, bytes_OUx >> 4), dim=2).flatten(1).to(torch.int8) - 8


def stacked(parts: Sequence[Tensor | BlockScaled]) -> Tensor | BlockScaled:
    """Return the parts' rows as one weight, which is dequantized unless all parts are of one kind.

    These have values of one type in blocks of the same columns, and all of them have zero points or none has.
    """
    scaled = [part for part in parts if isinstance(part, BlockScaled)]
    kinds = {(part.block, part.values_OI.dtype, part.scale_BO.dtype, part.zero_BO is None) for part in scaled}
    if len(scaled) == len(parts) and len(kinds) == 1:
        return _with_rows(scaled, torch.cat)
    return torch.cat([part.dequantized() if isinstance(part, BlockScaled) else part for part in parts])


def reordered(weight: Tensor | BlockScaled, row_O: Tensor) -> Tensor | BlockScaled:
    """Return a weight with these rows."""
    if not isinstance(weight, BlockScaled):
        return weight.index_select(0, row_O)
    return _with_rows([weight], lambda tensors, dim: tensors[0].index_select(dim, row_O))


def _with_rows(parts: Sequence[BlockScaled], join: Callable[[list[Tensor], int], Tensor]) -> BlockScaled:
    """Return a weight of the parts' kind. join: makes its rows, along a dimension, of the parts'."""
    first = parts[0]
    bytes_OX = join([part.values_OI.view(torch.uint8) for part in parts], 0)  # float8 is not indexed
    zeros = [part.zero_BO for part in parts if part.zero_BO is not None]
    return replace(
        first,
        values_OI=bytes_OX.view(first.values_OI.dtype),
        scale_BO=join([part.scale_BO for part in parts], 1),
        zero_BO=join(zeros, 1) if zeros else None,
    )


def tile_columns(block: int) -> int | None:
    """Return the columns of a tile for blocks of `block` columns, which no tile crosses; None if there is no tile."""
    columns = min(_TILE_COLUMNS, block & -block)
    return columns if columns >= _FEWEST_COLUMNS else None


def num_splits(num_outputs: int, num_inputs: int) -> int:
    """Return the splits of a product's sums over the columns, which depend on nothing but the weight's shape."""
    tiles = -(-num_outputs // _OUTPUTS)
    return max(1, min(-(-_PROGRAMS // tiles), num_inputs // _COLUMNS_PER_SPLIT, _MAX_SPLITS))


def kept_types(dtype: torch.dtype, device: torch.device) -> frozenset[torch.dtype]:
    """See `workers.kernels.select.Kernels.kept_types`. Dequantizing in every product costs more than it saves."""
    return frozenset()


def block_scaled_linear(x_NI: Tensor, weight: BlockScaled, bias_O: Tensor | None) -> Tensor:
    """See `workers.kernels.select.Kernels.block_scaled_linear`."""
    return F.linear(x_NI, weight.dequantized(), bias_O)
