"""Weights that are read from what a checkpoint stores of them: (code - zero point) * scale.

    PackedCodes       integers of a few bits, several in a stored word
    PerBlock          scales or zero points, one for each block of values
    QuantizedWeight   codes with scales and zero points

A weight is [.., O, I], O outputs and I inputs; some formats store it as [.., I, O]. spans are slices with a start and a
stop, one for each axis. Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from workers.kernels.block_scaled import BlockScaled

FLOAT8, BYTE = "F8_E4M3", "U8"
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_ROWS = 1024
"""Rows that are repacked at a time, which limits the memory of their codes in 32 bits."""


def shape_of(stored: Any) -> tuple[int, ...]:
    """Return the shape of a stored tensor: a slice of safetensors, a tensor of a pickle, or a weight of this module."""
    return tuple(stored.get_shape() if hasattr(stored, "get_shape") else stored.shape)


def dtype_of(stored: Any) -> str:
    """Return the type of a stored tensor in safetensors' notation; of pickles only "F" or "" for most types."""
    import torch

    if isinstance(stored, torch.Tensor):
        known = {torch.float8_e4m3fn: FLOAT8, torch.uint8: BYTE, torch.int8: "I8"}
        return known.get(stored.dtype, "F" if stored.is_floating_point() else "")
    return str(stored.get_dtype()) if hasattr(stored, "get_dtype") else ""


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """Integers of a few bits, several in each stored word along an axis. Words are bytes or have 32 bits."""

    stored: Any
    axis: int
    bits: int
    order: tuple[int, ...] | None = None
    """The place in a word of each of its integers, counted from the lowest bits; None: in order."""
    is_nested: bool = False
    """The words of the next stored axis follow each other along this one, as in gpt-oss."""

    @property
    def _per_word(self) -> int:
        return (8 if dtype_of(self.stored) == BYTE else 32) // self.bits

    @property
    def _per_index(self) -> int:
        return self._per_word * (shape_of(self.stored)[self.axis + 1] if self.is_nested else 1)

    def get_shape(self) -> list[int]:
        """Return the shape of the integers."""
        shape = list(shape_of(self.stored))
        shape[self.axis] *= self._per_index
        if self.is_nested:
            del shape[self.axis + 1]
        return shape

    def __getitem__(self, spans: Sequence[slice]) -> Tensor:
        """Return the integers [..] of these ranges, int32."""
        import torch

        span, per = spans[self.axis], self._per_index
        first = span.start // per
        whole = [*spans]
        whole[self.axis] = slice(first, -(-span.stop // per))
        words = self.stored[tuple(whole)].to(torch.int32)
        if self.is_nested:
            words = words.flatten(self.axis, self.axis + 1)
        shifts = self.bits * torch.tensor(self.order or range(self._per_word), dtype=torch.int32)
        words = words.movedim(self.axis, -1)[..., None]
        codes = ((words >> shifts) & ((1 << self.bits) - 1)).flatten(-2)
        return codes[..., span.start - first * per : span.stop - first * per].movedim(-1, self.axis)


@dataclass(frozen=True, slots=True)
class PerBlock:
    """A stored tensor, or `PackedCodes`, with an item for each block of a weight's values, for each row, or for all."""

    stored: Any
    block: tuple[int, ...]
    """Values of each stored axis of the weight that share an item."""
    axis_I: int = -1
    """The stored axis of the weight's inputs."""
    group_I: Any = None
    """The item of each input (GPTQ's activation order), instead of blocks of them."""

    @property
    def is_in_order(self) -> bool:
        """Return whether inputs with one item lie side by side."""
        import torch

        if self.group_I is None:
            return True
        group_I = self.group_I[:].long()
        return torch.equal(group_I, torch.arange(len(group_I)) // self.block[self.axis_I])

    def of_values(self, spans: Sequence[slice], device: torch.device | str) -> Tensor:
        """Return the item of each value of these spans in float32, or what broadcasts to that."""
        import torch

        shape = shape_of(self.stored)
        if len(shape) < 2:
            found: Tensor = self.stored[...].to(device, torch.float32)
            return found.reshape(()) if found.numel() == 1 else found[spans[0], None]
        read = [slice(span.start // n, -(-span.stop // n)) for span, n in zip(spans, self.block, strict=True)]
        if self.group_I is not None:
            read[self.axis_I] = slice(0, shape[self.axis_I])
        found = self.stored[tuple(read)].to(device, torch.float32)
        for axis, (span, n) in enumerate(zip(spans, self.block, strict=True)):
            if found.shape[axis] == 1:
                continue  # broadcast
            if self.group_I is not None and axis - len(spans) == self.axis_I:
                index = self.group_I[span].to(device).long()
            else:
                index = torch.arange(span.start, span.stop, device=device) // n - read[axis].start
            found = found.index_select(axis, index)
        return found

    def of_blocks(self, rows: slice, blocks: slice, device: torch.device) -> Tensor:
        """Return the items [B, O] of these blocks of a matrix's inputs, for each of these outputs, in float32."""
        is_transposed = self.axis_I == -2
        # As if a block were a column.
        alone = replace(self, group_I=None, block=(1, self.block[1]) if is_transposed else (self.block[0], 1))
        found = alone.of_values((blocks, rows) if is_transposed else (rows, blocks), device)
        found_BO = found if is_transposed or found.dim() < 2 else found.t()
        return found_BO.expand(blocks.stop - blocks.start, rows.stop - rows.start)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight, of which any part is read: its values (code - zero) * scale, or its bits."""

    codes: Any
    """A stored tensor, or `PackedCodes`."""
    scale: PerBlock
    zero: PerBlock | None = None
    """None: `offset` for all."""
    offset: int = 0
    """This is added to every zero point."""
    global_scale: Any = None
    """A stored factor of all scales."""
    is_divisor: bool = False
    """The global scale divides."""
    is_fp4: bool = False
    """Codes are places in the table of 4-bit floats."""
    is_transposed: bool = False
    """[.., I, O] is stored."""
    parts: tuple[str, ...] = ()
    """Names of all stored tensors of the weight."""

    def get_shape(self) -> list[int]:
        """Return the weight's shape."""
        shape = list(shape_of(self.codes))
        return [*shape[:-2], shape[-1], shape[-2]] if self.is_transposed else shape

    def read(self, spans: Sequence[slice], device: torch.device | str) -> Tensor:
        """Return these values in float32 on a device, where they are computed."""
        import torch

        inner = [*spans[:-2], spans[-1], spans[-2]] if self.is_transposed else list(spans)
        values = self.codes[tuple(inner)].to(device)
        if self.is_fp4:
            values = torch.tensor(_FP4, device=device)[values.long()]
        values = values.to(torch.float32)
        if self.zero is not None:
            values -= self.zero.of_values(inner, device) + self.offset
        elif self.offset:
            values -= self.offset
        values *= self._scales(inner, device)
        return values.transpose(-1, -2) if self.is_transposed else values

    def _scales(self, inner: Sequence[slice], device: torch.device | str) -> Tensor:
        """Return the scale of each value, in the order in which codes are stored."""
        import torch

        scale = self.scale.of_values(inner, device)
        if dtype_of(self.scale.stored) == BYTE:  # exponents
            return torch.exp2(scale - 127)
        if self.global_scale is None:
            return scale
        factor = self.global_scale[...].reshape(()).to(device, torch.float32)
        return scale / factor if self.is_divisor else scale * factor

    @property
    def kept_type(self) -> torch.dtype | None:
        """Return the type that its codes may stay in, see `workers.kernels.block_scaled.BlockScaled`; None if none."""
        import torch

        if len(self.scale.block) != 2 or self.is_fp4:
            return None
        if isinstance(self.codes, PackedCodes):
            return {8: torch.int8, 4: torch.uint8}.get(self.codes.bits)
        return {"I8": torch.int8, FLOAT8: torch.float8_e4m3fn}.get(dtype_of(self.codes))

    @property
    def columns(self) -> tuple[int, int]:
        """The columns of a matrix, and those that share a scale."""
        return self.get_shape()[1], self.scale.block[self.scale.axis_I]

    def block_of(self, columns: slice) -> int | None:
        """Return the columns of the blocks of a matrix's part; None if it cannot be kept in its bits."""
        from workers.kernels.block_scaled import PACKED, UNIT, tile_columns

        width, (num_inputs, block) = columns.stop - columns.start, self.columns
        if block == num_inputs:
            block = width
        elif columns.start % block or not self.scale.is_in_order:
            return None
        is_odd = self.kept_type == PACKED and width % UNIT > 0
        return None if is_odd or tile_columns(block) is None else block

    @property
    def bytes_in_bits(self) -> float:
        """Return the bytes per weight, with its share of scales and zero points, of what `in_bits` returns."""
        bits = self.codes.bits if isinstance(self.codes, PackedCodes) else 8
        return bits / 8 + (self._scale_type.itemsize + 2 * (self.zero is not None)) / self.columns[1]

    def in_bits(self, rows: slice, columns: slice, block: int, device: torch.device, dtype: torch.dtype) -> BlockScaled:
        """Return a matrix's part for products in `dtype`. block: what `block_of` returned."""
        import torch

        from workers.kernels.block_scaled import BlockScaled

        num_inputs, stored_block = self.columns
        blocks = slice(columns.start // block, -(-columns.stop // block))
        if stored_block == num_inputs:
            blocks = slice(0, 1)
        values_OI = self._values(rows, columns, device)
        scale_BO = self.scale.of_blocks(rows, blocks, device).to(self._scale_type).contiguous()
        if self.zero is None:
            assert self.offset + self._lowest == 0
            return BlockScaled(values_OI, scale_BO, None, block, dtype)
        zero_BO = self.zero.of_blocks(rows, blocks, device) + (self.offset + self._lowest)
        return BlockScaled(values_OI, scale_BO, zero_BO.to(torch.int16).contiguous(), block, dtype)

    @property
    def _scale_type(self) -> torch.dtype:
        """The type of scales that `in_bits` returns."""
        import torch

        own = {"F16": torch.float16, "BF16": torch.bfloat16}.get(dtype_of(self.scale.stored), torch.float32)
        return torch.float32 if self.kept_type == torch.float8_e4m3fn else own

    @property
    def _lowest(self) -> int:
        """The value that `in_bits` gives to code 0: packed codes have no sign."""
        return -(1 << self.codes.bits - 1) if isinstance(self.codes, PackedCodes) else 0

    def _values(self, rows: slice, columns: slice, device: torch.device) -> Tensor:
        """Return a matrix's codes [O, I] in `kept_type`."""
        import torch

        from workers.kernels.block_scaled import PACKED, packed

        kind = self.kept_type
        assert kind is not None, "`block_of` returned a block"

        def some(rows: slice) -> Tensor:
            codes = self.codes[(columns, rows)].t() if self.is_transposed else self.codes[(rows, columns)]
            codes = codes + self._lowest if self._lowest else codes
            return (packed(codes) if kind == PACKED else codes.to(kind)).to(device).view(torch.uint8)

        pieces = [slice(first, min(first + _ROWS, rows.stop)) for first in range(rows.start, rows.stop, _ROWS)]
        return torch.cat([some(piece) for piece in pieces]).view(kind)
