"""Weights in 8 bits with a scale for each block, as FP8 checkpoints store them.

Legend: N rows, O outputs, I inputs, B blocks of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

FLOAT8_CAPABILITY = (8, 9)
"""The lowest compute capability of GPUs for which Triton converts float8."""
_TILE_COLUMNS = 128
"""The columns of a block as checkpoints have them, and 128 bytes of a weight's row."""
_FEWEST_COLUMNS = 32
_OUTPUTS = 64
"""Outputs of a program for few rows."""
_PROGRAMS = 256
"""Sums are split until there are this many programs: about two per multiprocessor of an H100 or H200."""
_COLUMNS_PER_SPLIT = 1024
"""Minimum number of columns per split."""
_MAX_SPLITS = 8
SPLIT_ROWS = 64
"""The most rows whose splits are computed side by side, as float32 sums [S, N, O]."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockScaled:
    """A weight [O, I]: each float8 value times the scale of its block.

    Scales are kept for every row, also where a block of the checkpoint has several rows. So rows can be cut and stacked
    anywhere, for 4 bytes per `block` columns (128: 3 %).
    """

    values_OI: Tensor
    """float8_e4m3fn, contiguous."""
    scale_BO: Tensor
    """float32, of columns block * b .. block * (b + 1) - 1."""
    block: int
    """Columns of a block; the last one may have fewer."""
    dtype: torch.dtype
    """Type of the dequantized weight, and of inputs and outputs."""

    @property
    def shape(self) -> torch.Size:
        """Return (O, I)."""
        return self.values_OI.shape

    def dequantized(self) -> Tensor:
        """Return the weight [O, I] in `dtype`: the float32 product, rounded once."""
        scale_OI = self.scale_BO.t().repeat_interleave(self.block, dim=1, output_size=self.block * len(self.scale_BO))
        return scale_OI[:, : self.shape[1]].mul(self.values_OI.to(torch.float32)).to(self.dtype)


def stacked(parts: Sequence[Tensor | BlockScaled]) -> Tensor | BlockScaled:
    """Return the parts' rows as one weight, which is dequantized unless all parts are in blocks of the same columns."""
    scaled = [part for part in parts if isinstance(part, BlockScaled)]
    if len(scaled) == len(parts) and len({part.block for part in scaled}) == 1:
        values_OI = torch.cat([part.values_OI.view(torch.uint8) for part in scaled]).view(torch.float8_e4m3fn)
        scale_BO = torch.cat([part.scale_BO for part in scaled], dim=1)
        return BlockScaled(values_OI, scale_BO, scaled[0].block, scaled[0].dtype)
    return torch.cat([part.dequantized() if isinstance(part, BlockScaled) else part for part in parts])


def reordered(weight: Tensor | BlockScaled, row_O: Tensor) -> Tensor | BlockScaled:
    """Return a weight with these rows."""
    if not isinstance(weight, BlockScaled):
        return weight.index_select(0, row_O)
    values_OI = weight.values_OI.view(torch.uint8).index_select(0, row_O).view(torch.float8_e4m3fn)
    return BlockScaled(values_OI, weight.scale_BO.index_select(1, row_O), weight.block, weight.dtype)


def tile_columns(block: int) -> int | None:
    """Return the columns of a tile for blocks of `block` columns, which no tile crosses; None if there is no tile."""
    columns = min(_TILE_COLUMNS, block & -block)
    return columns if columns >= _FEWEST_COLUMNS else None


def num_splits(num_outputs: int, num_inputs: int) -> int:
    """Return the splits of a product's sums over the columns, which depend on nothing but the weight's shape."""
    tiles = -(-num_outputs // _OUTPUTS)
    return max(1, min(-(-_PROGRAMS // tiles), num_inputs // _COLUMNS_PER_SPLIT, _MAX_SPLITS))


def keeps_float8(dtype: torch.dtype, device: torch.device) -> bool:
    """See `workers.kernels.select.Kernels.keeps_float8`. Dequantizing in every product costs more than it saves."""
    return False


def block_scaled_linear(x_NI: Tensor, weight: BlockScaled, bias_O: Tensor | None) -> Tensor:
    """See `workers.kernels.select.Kernels.block_scaled_linear`."""
    return F.linear(x_NI, weight.dequantized(), bias_O)
