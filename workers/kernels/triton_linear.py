"""Products in Triton with weights in 8 or 4 bits, the counterpart of `workers.kernels.block_scaled`, and in 16 bits.

The inputs are in 16 bits. A program converts a tile of a weight in fewer bits to float32, subtracts the zero points of
its blocks, multiplies it with their scales and rounds it to the inputs' dtype, all in registers, which gives the values
of the dequantized weight. These are multiplied with the inputs on the tensor cores:

    y^T = sum over the K columns of each block of  round((w - zero) * scale) x^T        in float32, then + bias

The product is transposed, so that few rows fill a tile of 16. Weights in fewer bits are a batch of as many parts as a
program has warps. For a batch Triton takes a warp's own tensor core instructions on every GPU, between which the next
weights are converted, and reads a thread's weights in runs of 4. With Hopper's instructions for four warps, which 16
bits use, each conversion would wait for the product before it. A sum over all columns is in *splits*, whose sums are
added in order. How many there are depends on the weight's shape alone. For few rows each split is a program's, or a
weight with few outputs would not keep a GPU's memory busy, and a second kernel adds them; for many rows one program
computes them in turn. So a row's result does not depend on the rows beside it, provided that the tensor cores add alike
in every tile. That is why batch-invariant kernels multiply all weights by this kernel, for any number of rows. Others
take it for weights in fewer bits and few rows; for many they dequantize the weight into a temporary, by a kernel that
only reads and writes, and leave the product to cuBLAS.

Legend: N rows, O outputs, I inputs, B blocks of columns, S splits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.block_scaled import (
    FLOAT8_CAPABILITY,
    PACKED,
    SPLIT_ROWS,
    UNIT,
    BlockScaled,
    num_splits,
    tile_columns,
)
from workers.kernels.interpreted import is_interpreted

_SUM_BLOCK = 1024
_UNSCALED_COLUMNS = 64
"""The columns of a tile of a weight in 16 bits: 128 bytes of a row."""
_UNIT = tl.constexpr(UNIT)


class Tile(NamedTuple):
    """The rows and outputs of a program, and how it is launched."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


TILES = (Tile(16, 64, 4, 5), Tile(32, 64, 4, 5), Tile(64, 64, 4, 4), Tile(128, 128, 8, 3))
"""The last one is for more than `SPLIT_ROWS` rows."""
_DEQUANTIZED = 32
"""The outputs that a program dequantizes, in a tile's columns."""


def kept_types(dtype: torch.dtype, device: torch.device) -> frozenset[torch.dtype]:
    """See `workers.kernels.select.Kernels.kept_types`. For float8, GPUs need `FLOAT8_CAPABILITY`."""
    if dtype not in (torch.bfloat16, torch.float16):
        return frozenset()
    has_float8 = device.type == "cpu" or torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY
    return frozenset({torch.int8, PACKED, *((torch.float8_e4m3fn,) if has_float8 else ())})


def block_scaled_linear(x_NI: Tensor, weight: BlockScaled, bias_O: Tensor | None) -> Tensor:
    """See `workers.kernels.select.Kernels.block_scaled_linear`. For more than `SPLIT_ROWS` rows it takes cuBLAS'."""
    if len(x_NI) > SPLIT_ROWS:
        return F.linear(x_NI, dequantized(weight), bias_O)
    return invariant_block_scaled_linear(x_NI, weight, bias_O)


def invariant_block_scaled_linear(x_NI: Tensor, weight: BlockScaled, bias_O: Tensor | None) -> Tensor:
    """Do as `block_scaled_linear` with sums in the same order for any number of rows."""
    assert x_NI.dtype == weight.dtype
    columns, scales = _tiled(weight)
    return _product(x_NI, weight.values_OI, weight.shape, bias_O, columns, scales)


def dequantized(weight: BlockScaled) -> Tensor:
    """Return `weight.dequantized()`, to the bit, in one pass over it and without other temporaries."""
    columns, (scale_BO, zero_BO, tiles_per_block) = _tiled(weight)
    num_outputs, num_inputs = weight.shape
    out_OI = weight.values_OI.new_empty(weight.shape, dtype=weight.dtype)
    _dequantize[(triton.cdiv(num_inputs, columns), triton.cdiv(num_outputs, _DEQUANTIZED))](
        weight.values_OI, scale_BO, _or_any(zero_BO, out_OI), out_OI, num_outputs, num_inputs,
        OUTPUTS=_DEQUANTIZED, COLUMNS=columns, TILES_PER_BLOCK=tiles_per_block, IS_PACKED=weight.is_packed,
        HAS_ZERO=zero_BO is not None, IS_INTERPRETED=is_interpreted(),
    )  # fmt: skip
    return out_OI


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """See `workers.kernels.select.Kernels.invariant_linear`."""
    assert x_NI.dtype == weight_OI.dtype and x_NI.dtype in (torch.bfloat16, torch.float16)
    return _product(x_NI, weight_OI, weight_OI.shape, bias_O, _UNSCALED_COLUMNS, None)


class _Scales(NamedTuple):
    """The factors that turn values into weights, see `BlockScaled`."""

    scale_BO: Tensor
    zero_BO: Tensor | None
    tiles_per_block: int


def _tiled(weight: BlockScaled) -> tuple[int, _Scales]:
    """Return the columns of a weight's tiles, and its factors."""
    columns = tile_columns(weight.block)
    assert columns is not None and weight.values_OI.is_contiguous() and weight.scale_BO.is_contiguous()
    return columns, _Scales(weight.scale_BO, weight.zero_BO, weight.block // columns)


def _product(
    x_NI: Tensor, values_OI: Tensor, shape: torch.Size, bias_O: Tensor | None, columns: int, scales: _Scales | None
) -> Tensor:
    """Return x W^T + b. shape: of the weight. columns: of a tile. scales: None = the values are the weight."""
    num_rows, (num_outputs, num_inputs) = len(x_NI), shape
    assert x_NI.shape[1] == num_inputs and values_OI.is_contiguous()
    x_NI = x_NI if x_NI.stride(1) == 1 else x_NI.contiguous()
    out_NO = x_NI.new_empty(num_rows, num_outputs)
    if not num_rows:
        return out_NO
    is_many = num_rows > SPLIT_ROWS
    tile = TILES[-1] if is_many else next((tile for tile in TILES[:-2] if num_rows <= tile.rows), TILES[-2])
    splits, num_tiles = num_splits(num_outputs, num_inputs), triton.cdiv(num_inputs, columns)
    in_turn = splits if is_many else 1
    is_split = in_turn < splits
    partial_SNO = out_NO.new_empty(splits, num_rows, num_outputs, dtype=torch.float32) if is_split else out_NO
    grid = (triton.cdiv(num_rows, tile.rows), triton.cdiv(num_outputs, tile.outputs), splits // in_turn)
    scale_BO, zero_BO, tiles_per_block = scales or (None, None, 1)
    _multiply[grid](
        x_NI, values_OI, _or_any(scale_BO, out_NO), _or_any(zero_BO, out_NO), _or_any(bias_O, out_NO), partial_SNO,
        num_rows, num_outputs, num_inputs, x_NI.stride(0), triton.cdiv(num_tiles, splits), in_turn,
        ROWS=tile.rows, OUTPUTS=tile.outputs, PARTS=tile.num_warps if scales else 1, COLUMNS=columns,
        TILES_PER_BLOCK=tiles_per_block, IS_WHOLE=num_inputs % columns == 0, IS_IN_TURN=in_turn > 1,
        HAS_BIAS=bias_O is not None and not is_split, IS_PACKED=values_OI.dtype == PACKED,
        HAS_SCALE=scale_BO is not None, HAS_ZERO=zero_BO is not None, IS_INTERPRETED=is_interpreted(),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if is_split:
        _add_splits[(num_rows, triton.cdiv(num_outputs, _SUM_BLOCK))](
            partial_SNO, _or_any(bias_O, out_NO), out_NO, num_rows, num_outputs,
            SPLITS=splits, BLOCK=_SUM_BLOCK, HAS_BIAS=bias_O is not None, IS_INTERPRETED=is_interpreted(),
        )  # fmt: skip
    return out_NO


def _or_any(tensor: Tensor | None, any_one: Tensor) -> Tensor:
    """Return a tensor to pass where a kernel has a pointer that it may not read."""
    return any_one if tensor is None else tensor


@triton.jit
def _rounded(x, dtype: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Round float32 to `dtype`, to even. The interpreter would cut off bits of bfloat16, so they are rounded first."""
    if IS_INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _load(ptr, is_there, IS_WHOLE: tl.constexpr):
    if IS_WHOLE:
        return tl.load(ptr)
    return tl.load(ptr, mask=is_there, other=0.0)


@triton.jit
def _add_scaled(total, value, zero, scale, x, IS_INTERPRETED: tl.constexpr):
    """Return total + w x^T of the float32 values [*OUTPUTS, K] of a weight and inputs [ROWS, K]."""
    return _add_product(total, _rounded((value - zero) * scale, x.dtype, IS_INTERPRETED), x, IS_INTERPRETED)


@triton.jit
def _add_product(total, weight, x, IS_INTERPRETED: tl.constexpr):
    if IS_INTERPRETED:  # its arithmetic in 16 bits is wrong; products of two such numbers are exact in float32
        weight = weight.to(tl.float32)
        x = x.to(tl.float32)
    x = tl.trans(x)
    if len(weight.shape) == 3:
        x = tl.broadcast_to(x[None], [weight.shape[0], x.shape[0], x.shape[1]])
    return tl.dot(weight, x, total, input_precision="ieee")


@triton.jit
def _sum_of_split(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, first, last, num_outputs, num_inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
    TILES_PER_BLOCK: tl.constexpr, IS_WHOLE: tl.constexpr, IS_PACKED: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_ZERO: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return the sum [*OUTPUTS, ROWS] over the tiles first .. last - 1 of columns. Pointers are to columns 0."""
    if PARTS > 1:
        total = tl.zeros([PARTS, OUTPUTS // PARTS, ROWS], tl.float32)
    else:
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    WIDTH: tl.constexpr = COLUMNS // 2 if IS_PACKED else COLUMNS  # of a tile, as stored
    place = tl.arange(0, WIDTH)[None, :]
    column = place // (_UNIT // 2) * _UNIT + place % (_UNIT // 2) if IS_PACKED else place
    for tile in range(first, last):
        block = (tile // TILES_PER_BLOCK) * num_outputs
        scale = tl.load(scale_ptr + block).to(tl.float32) if HAS_SCALE else 1.0
        zero = tl.load(zero_ptr + block).to(tl.float32) if HAS_ZERO else 0.0
        is_column = column < num_inputs - tile * COLUMNS
        stored = _load(weight_ptr + tile * WIDTH + place, is_column, IS_WHOLE)
        x = _load(x_ptr + tile * COLUMNS + column, is_column, IS_WHOLE)
        if IS_PACKED:
            low, high = (stored & 15).to(tl.float32) - 8.0, (stored >> 4).to(tl.float32) - 8.0
            total = _add_scaled(total, low, zero, scale, x, IS_INTERPRETED)
            x = _load(x_ptr + tile * COLUMNS + column + _UNIT // 2, is_column, IS_WHOLE)
            total = _add_scaled(total, high, zero, scale, x, IS_INTERPRETED)
        elif HAS_SCALE:
            total = _add_scaled(total, stored.to(tl.float32), zero, scale, x, IS_INTERPRETED)
        else:
            total = _add_product(total, stored, x, IS_INTERPRETED)
    return total


@triton.jit
def _dequantize(
    weight_ptr, scale_ptr, zero_ptr, out_ptr, num_outputs, num_inputs,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, TILES_PER_BLOCK: tl.constexpr, IS_PACKED: tl.constexpr,
    HAS_ZERO: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    output = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS))[:, None]
    is_output = output < num_outputs
    factor = (tile // TILES_PER_BLOCK) * num_outputs + output
    scale = tl.load(scale_ptr + factor, mask=is_output, other=0.0).to(tl.float32)
    zero = tl.load(zero_ptr + factor, mask=is_output, other=0).to(tl.float32) if HAS_ZERO else 0.0
    WIDTH: tl.constexpr = COLUMNS // 2 if IS_PACKED else COLUMNS  # of a tile, as stored
    place = tl.arange(0, WIDTH)[None, :]
    column = tile * COLUMNS + (place // (_UNIT // 2) * _UNIT + place % (_UNIT // 2) if IS_PACKED else place)
    is_own = is_output & (column < num_inputs)
    weight_ptr += output.to(tl.int64) * (num_inputs // 2 if IS_PACKED else num_inputs) + tile * WIDTH + place
    out_ptr += output.to(tl.int64) * num_inputs + column
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    stored = _load(weight_ptr, is_own, False)
    if IS_PACKED:
        low, high = (stored & 15).to(tl.float32) - 8.0, (stored >> 4).to(tl.float32) - 8.0
        tl.store(out_ptr, _rounded((low - zero) * scale, dtype, IS_INTERPRETED), mask=is_own)
        tl.store(out_ptr + _UNIT // 2, _rounded((high - zero) * scale, dtype, IS_INTERPRETED), mask=is_own)
    else:
        tl.store(out_ptr, _rounded((stored.to(tl.float32) - zero) * scale, dtype, IS_INTERPRETED), mask=is_own)


# The number of rows changes from step to step, and each value could compile another kernel.
@triton.jit(do_not_specialize=["num_rows", "tiles_each", "in_turn"])
def _multiply(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr,
    num_rows, num_outputs, num_inputs, x_stride, tiles_each, in_turn,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
    TILES_PER_BLOCK: tl.constexpr, IS_WHOLE: tl.constexpr, IS_IN_TURN: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_PACKED: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_ZERO: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    # Beyond the ends the last row and output are read again, which needs no masks, and not stored.
    own_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    own_output = tl.minimum(output, num_outputs - 1)
    weight_output = own_output[:, None]
    if PARTS > 1:
        weight_output = tl.reshape(own_output, [PARTS, OUTPUTS // PARTS, 1])
    x_ptr += own_row[:, None] * x_stride
    weight_ptr += weight_output.to(tl.int64) * (num_inputs // 2 if IS_PACKED else num_inputs)
    scale_ptr += weight_output
    zero_ptr += weight_output
    num_tiles = tl.cdiv(num_inputs, COLUMNS)
    first = tl.program_id(2) * tiles_each
    total = _sum_of_split(
        x_ptr, weight_ptr, scale_ptr, zero_ptr, first, tl.minimum(first + tiles_each, num_tiles), num_outputs,
        num_inputs, ROWS, OUTPUTS, PARTS, COLUMNS, TILES_PER_BLOCK, IS_WHOLE, IS_PACKED, HAS_SCALE, HAS_ZERO,
        IS_INTERPRETED,
    )  # fmt: skip
    if IS_IN_TURN:
        for split in range(1, in_turn):
            first = split * tiles_each
            total += _sum_of_split(
                x_ptr, weight_ptr, scale_ptr, zero_ptr, first, tl.minimum(first + tiles_each, num_tiles), num_outputs,
                num_inputs, ROWS, OUTPUTS, PARTS, COLUMNS, TILES_PER_BLOCK, IS_WHOLE, IS_PACKED, HAS_SCALE,
                HAS_ZERO, IS_INTERPRETED,
            )  # fmt: skip
    total = tl.reshape(total, [OUTPUTS, ROWS])
    if HAS_BIAS:
        total += tl.load(bias_ptr + own_output).to(tl.float32)[:, None]
    place = (tl.program_id(2).to(tl.int64) * num_rows + row[None, :]) * num_outputs + output[:, None]
    is_own = (row < num_rows)[None, :] & (output < num_outputs)[:, None]
    tl.store(out_ptr + place, _rounded(total, out_ptr.dtype.element_ty, IS_INTERPRETED), mask=is_own)


@triton.jit(do_not_specialize=["num_rows"])
def _add_splits(
    partial_ptr, bias_ptr, out_ptr, num_rows, num_outputs,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_output = output < num_outputs
    place = tl.program_id(0).to(tl.int64) * num_outputs + output
    total = tl.load(partial_ptr + place, mask=is_output)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial_ptr + split * num_rows.to(tl.int64) * num_outputs + place, mask=is_output)
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=is_output).to(tl.float32)
    tl.store(out_ptr + place, _rounded(total, out_ptr.dtype.element_ty, IS_INTERPRETED), mask=is_output)
