"""Quantized checkpoints: how their files store a weight, and the values that it stands for.

A weight is (code - zero point) * scale, where a block of rows and columns shares a scale. How it is stored:

    FP8                   weight (float8) and weight_scale or weight_scale_inv: one, one per row, or one per block
    compressed-tensors    likewise in float8 or int8; integers of a few bits in weight_packed, rows behind each other
    ModelOpt              FP8 likewise; NVFP4: two 4-bit floats per byte in weight, weight_scale and weight_scale_2
    AWQ, GPTQ             qweight, qzeros, scales, g_idx, of the transposed weight
    MXFP4 (gpt-oss)       stacked experts in *_blocks and *_scales, of the transposed weight

Inputs are never quantized here, so scales of inputs are not read, nor are scales of the KV cache.
Importing this module imports no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.models.config_json import read_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from workers.kernels.block_scaled import BlockScaled

logger = logging.getLogger(__name__)

_INSTEAD = (
    "write the original weights, or a version of them in FP8, compressed-tensors, ModelOpt's FP8 or NVFP4, AWQ, GPTQ "
    "or GGUF"
)
_ROWS = 1024
"""Rows that are repacked at a time, which limits the memory of their codes in 32 bits."""
_FLOAT8, _BYTE = "F8_E4M3", "U8"
_UNREAD = (".input_scale", ".input_scale_ub", ".input_global_scale", ".weight_shape", ".input_zero_point")
_KV_SCALES = (
    ".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_output_scale", "k_proj.output_scale", "v_proj.output_scale",
)  # fmt: skip
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each output among the four-bit numbers of a word
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Describes the quantized weights of a checkpoint, by its configuration.

    block: rows and columns that share a scale, where the shape of the scales leaves it open. bits: of a weight.
    zero_offset: what is added to stored zero points.
    """

    method: str
    block: tuple[int, int] | None = None
    bits: int = 8
    zero_offset: int = 0

    def columns_of(self, num_inputs: int) -> tuple[int, float]:
        """Return the columns that share a scale, and the bytes per weight with it, as far as config.json tells them."""
        is_float8, is_transposed = "FP8" in self.method or "float8" in self.method, self.method in ("AWQ", "GPTQ")
        block = (self.block[0 if is_transposed else 1] if self.block else None) or num_inputs
        return block, self.bits / 8 + (4 if is_float8 or is_transposed else 2) / block


def read_quantization(path: Path, raw: dict[str, Any] | None = None) -> Quantization | None:
    """Return how a folder's weights are quantized, by its config.json (`raw`) or ModelOpt's own file; None if not.

    Raises:
        ValueError: a method or a variant that is not supported.
    """
    whole = read_json(path / "config.json") if raw is None else raw
    given = whole.get("quantization_config") or (whole.get("text_config") or {}).get("quantization_config")
    given = given or (read_json(path / "hf_quant_config.json").get("quantization") or {}) | {"quant_method": "modelopt"}
    if given == {"quant_method": "modelopt"}:
        return None
    method = given.get("quant_method", "unknown")
    match method:
        case "fp8" | "fbgemm_fp8":
            return Quantization(method="FP8", block=_pair(given.get("weight_block_size")))
        case "mxfp4":
            return Quantization(method="MXFP4", block=(1, 32), bits=4)
        case "awq" if given.get("bits", 4) == 4 and given.get("version", "gemm").lower() == "gemm":
            return Quantization(method="AWQ", block=_group(given), bits=4)
        case "gptq" if given.get("bits") in (2, 4, 8) and not given.get("dynamic"):
            offset = 0 if given.get("checkpoint_format") == "gptq_v2" else 1
            return Quantization(method="GPTQ", block=_group(given), bits=given["bits"], zero_offset=offset)
        case "modelopt" | "modelopt_fp4":
            if (algorithm := given.get("quant_algo")) in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
                return Quantization(method="ModelOpt FP8")
            if algorithm == "NVFP4":
                return Quantization(method="NVFP4", block=(1, 16), bits=4)
            raise _unsupported(path, f"ModelOpt's {algorithm}")
        case "compressed-tensors":
            return _compressed(path, given)
    variants = {name: given[name] for name in ("bits", "version", "dynamic") if name in given}
    raise _unsupported(path, f"{method} {variants}" if method in ("awq", "gptq") else method)


def _compressed(path: Path, given: dict[str, Any]) -> Quantization:
    """Read the configuration of compressed-tensors. Raises ValueError."""
    groups = [group for group in (given.get("config_groups") or {}).values() if group.get("weights")]
    kinds = {tuple(str(group["weights"].get(name)) for name in ("num_bits", "type", "strategy", "group_size",
                                                              "block_structure")) for group in groups}  # fmt: skip
    for name in ("transform_config", "sparsity_config"):
        if given.get(name):
            raise _unsupported(path, f"compressed-tensors with {name}")
    if len(kinds) != 1:
        raise _unsupported(path, f"compressed-tensors in {len(kinds)} kinds of weights")
    weights, form = groups[0]["weights"], given.get("format") or groups[0].get("format")
    block = _pair(weights.get("block_structure")) or ((1, weights["group_size"]) if weights.get("group_size") else None)
    match form:
        case "float-quantized" | "naive-quantized" | "int-quantized" if weights["num_bits"] == 8:
            return Quantization(method=f"compressed-tensors {weights['type']}8", block=block)
        case "pack-quantized" if weights["num_bits"] in (2, 4, 8):
            bits = weights["num_bits"]
            return Quantization(method=f"compressed-tensors W{bits}", block=block, bits=bits)
        case "nvfp4-pack-quantized" | "mxfp4-pack-quantized":
            block = block or (1, 16 if form[0] == "n" else 32)
            return Quantization(method=form.split("-")[0].upper(), block=block, bits=4)
    raise _unsupported(path, f"compressed-tensors in the format {form}")


def _pair(block: Any) -> tuple[int, int] | None:
    if isinstance(block, str):
        block = block.split("x")
    return (int(block[0]), int(block[1])) if block else None


def _group(given: dict[str, Any]) -> tuple[int, int] | None:
    """Return the block of a transposed weight: `group_size` rows of one column; -1: all rows."""
    size = given.get("group_size", 128)
    return (size, 1) if size > 0 else None


def _unsupported(path: Path, kind: str) -> ValueError:
    return ValueError(f"{path}: weights quantized by {kind} are not supported; {_INSTEAD}")


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """Integers of a few bits, several in each stored word along an axis.

    order: the place in a word of each of its integers, counted from the lowest bits. With a further stored axis, all
    words of it belong together, as in gpt-oss.
    """

    stored: Any
    axis: int
    word_bits: int
    bits: int
    order: tuple[int, ...] | None = None

    def get_shape(self) -> list[int]:
        """Return the shape of the integers."""
        shape = list(shape_of(self.stored))
        if len(shape) > self.axis + 1 and self.word_bits == 8:
            shape = [*shape[: self.axis + 1], *shape[self.axis + 2 :]]
        shape[self.axis] *= self._per
        return shape

    @property
    def _per(self) -> int:
        """Integers that lie at one stored index of the axis."""
        shape = shape_of(self.stored)
        together = shape[-1] if len(shape) > self.axis + 1 and self.word_bits == 8 else 1
        return int(together * self.word_bits // self.bits)

    def __getitem__(self, spans: Sequence[slice]) -> Tensor:
        """Return the integers [..] of these ranges, int32."""
        import torch

        per, span = self._per, spans[self.axis]
        first = span.start // per
        whole = [*spans[: self.axis], slice(first, -(-span.stop // per)), *spans[self.axis + 1 :]]
        words = self.stored[tuple(whole)].to(torch.int32)
        if words.dim() == len(spans):
            words = words.movedim(self.axis, -1)
        places = self.order or range(self.word_bits // self.bits)
        shifts = torch.tensor([place * self.bits for place in places], dtype=torch.int32)
        codes = ((words[..., None] >> shifts) & ((1 << self.bits) - 1)).flatten(words.dim() - 1)
        codes = codes.flatten(len(spans) - 1) if codes.dim() > len(spans) else codes
        return codes[..., span.start - first * per : span.stop - first * per].movedim(-1, self.axis)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight, read like a stored tensor: `[spans]` gives float32 values, (code - zero) * scale.

    The fields are stored tensors, or `PackedCodes`. spans, one for each axis, have a start and a stop.
    """

    codes: Any
    """[.., O, I], or [.., I, O] if it is transposed."""
    scale: Any
    block: tuple[int, ...]
    """Items of each axis that share a scale."""
    zero: Any = None
    """As many as scales; None: `offset` for all."""
    offset: int = 0
    """Of every zero point."""
    group_I: Any = None
    """The scale of each of the columns (GPTQ's activation order), instead of blocks of them."""
    global_scale: Any = None
    """A factor of all scales."""
    is_divisor: bool = False
    """The global scale divides."""
    is_fp4: bool = False
    """Codes are places in the table of 4-bit floats."""
    is_transposed: bool = False
    parts: tuple[str, ...] = ()
    """Names of all stored tensors of the weight."""

    def get_shape(self) -> list[int]:
        """Return the weight's shape."""
        shape = list(shape_of(self.codes))
        return [*shape[:-2], shape[-1], shape[-2]] if self.is_transposed else shape

    @property
    def kept_type(self) -> torch.dtype | None:
        """Return the type that its codes may stay in, see `workers.kernels.block_scaled.BlockScaled`; None if none."""
        import torch

        if len(self.block) != 2 or self.is_fp4:
            return None
        if isinstance(self.codes, PackedCodes):
            return {8: torch.int8, 4: torch.uint8}.get(self.codes.bits)
        return {"I8": torch.int8, _FLOAT8: torch.float8_e4m3fn}.get(dtype_of(self.codes))

    def block_of(self, columns: slice) -> int | None:
        """Return the columns of the blocks of a matrix's part; None if it cannot be kept in its bits."""
        import torch

        from workers.kernels.block_scaled import PACKED, UNIT, tile_columns

        width, (num_inputs, block) = columns.stop - columns.start, self.columns
        is_cut = is_mixed = False
        if block == num_inputs:
            block = width
        else:
            is_cut = columns.start % block > 0
            order_I = torch.arange(num_inputs) // block
            is_mixed = self.group_I is not None and not torch.equal(self.group_I[:].long(), order_I)
        is_odd = self.kept_type == PACKED and width % UNIT > 0
        return None if is_cut or is_mixed or is_odd or tile_columns(block) is None else block

    @property
    def columns(self) -> tuple[int, int]:
        """The columns of a matrix, and those that share a scale."""
        return self.get_shape()[1], self.block[0 if self.is_transposed else 1]

    @property
    def _scale_type(self) -> torch.dtype:
        import torch

        own = {"F16": torch.float16, "BF16": torch.bfloat16}.get(dtype_of(self.scale), torch.float32)
        return torch.float32 if self.kept_type == torch.float8_e4m3fn else own

    @property
    def bytes_in_bits(self) -> float:
        """Return the bytes per weight, with its share of scales and zero points, of what `in_bits` returns."""
        bits = self.codes.bits if isinstance(self.codes, PackedCodes) else 8
        return bits / 8 + (self._scale_type.itemsize + 2 * (self.zero is not None)) / self.columns[1]

    def in_bits(self, rows: slice, columns: slice, block: int, device: torch.device, dtype: torch.dtype) -> BlockScaled:
        """Return a matrix's part for products in `dtype`. block: what `block_of` returned."""
        import torch

        from workers.kernels.block_scaled import PACKED, BlockScaled, packed

        kind, num_rows = self.kept_type, rows.stop - rows.start
        assert kind is not None, "`block_of` returned a block"
        lowest = {PACKED: -8, torch.int8: -128}[kind] if isinstance(self.codes, PackedCodes) else 0

        def values(rows: slice) -> Tensor:
            codes = self.codes[(columns, rows) if self.is_transposed else (rows, columns)]
            codes = codes.t() if self.is_transposed else codes
            return packed(codes + lowest) if kind == PACKED else (codes + lowest if lowest else codes).to(kind)

        pieces = [slice(first, min(first + _ROWS, rows.stop)) for first in range(rows.start, rows.stop, _ROWS)]
        values_OI = torch.cat([values(piece).to(device).view(torch.uint8) for piece in pieces]).view(kind)
        is_one = self.columns[0] == self.columns[1]
        blocks = slice(0, 1) if is_one else slice(columns.start // block, -(-columns.stop // block))
        # As if a block were a column.
        by_block = replace(self, group_I=None, block=(1, self.block[1]) if self.is_transposed else (self.block[0], 1))
        spans = (blocks, rows) if self.is_transposed else (rows, blocks)

        def of_blocks(x: Tensor, own: torch.dtype) -> Tensor:
            x_BO = x.reshape(1, 1) if x.dim() < 2 else x if self.is_transposed else x.t()
            return x_BO.expand(blocks.stop - blocks.start, num_rows).to(own).contiguous()

        scale_BO = of_blocks(by_block.scales(spans, device), self._scale_type)
        if self.zero is None:
            assert self.offset + lowest == 0
            return BlockScaled(values_OI, scale_BO, None, block, dtype)
        zero_BO = of_blocks(by_block._spread(self.zero, spans, device) + (self.offset + lowest), torch.int16)
        return BlockScaled(values_OI, scale_BO, zero_BO, block, dtype)

    def __getitem__(self, spans: Sequence[slice]) -> Tensor:
        """Return these values in float32."""
        return self.read(spans, "cpu")

    def read(self, spans: Sequence[slice], device: torch.device | str) -> Tensor:
        """Return these values in float32 on a device, where they are computed."""
        import torch

        inner = [*spans[:-2], spans[-1], spans[-2]] if self.is_transposed else list(spans)
        values = self.codes[tuple(inner)].to(device)
        if self.is_fp4:
            values = torch.tensor(_FP4, device=device)[values.long()]
        values = values.to(torch.float32)
        if self.zero is not None:
            values -= self._spread(self.zero, inner, device) + self.offset
        elif self.offset:
            values -= self.offset
        values *= self.scales(inner, device)
        return values.transpose(-1, -2) if self.is_transposed else values

    def scales(self, spans: Sequence[slice], device: torch.device | str) -> Tensor:
        """Return the float32 scale of each value, in the order in which codes are stored."""
        import torch

        scale = self._spread(self.scale, spans, device)
        if dtype_of(self.scale) == _BYTE:  # exponents
            return torch.exp2(scale - 127)
        if self.global_scale is None:
            return scale
        factor = self.global_scale[...].reshape(()).to(device, torch.float32)
        return scale / factor if self.is_divisor else scale * factor

    def _spread(self, stored: Any, spans: Sequence[slice], device: torch.device | str) -> Tensor:
        """Return, in float32, the item of `stored` that each value has."""
        import torch

        if not shape_of(stored):
            return stored[...].to(device, torch.float32)
        if len(shape_of(stored)) == 1:  # one for all, whatever the number of axes
            return stored[0:1].to(device, torch.float32)
        first = [span.start // block for span, block in zip(spans, self.block, strict=True)]
        ends = [-(-span.stop // block) for span, block in zip(spans, self.block, strict=True)]
        by_group = self.group_I is not None
        axis_I = len(spans) - (2 if self.is_transposed else 1)
        if by_group:
            first[axis_I], ends[axis_I] = 0, shape_of(stored)[axis_I]
        found: Tensor = stored[tuple(slice(*pair) for pair in zip(first, ends, strict=True))].to(device, torch.float32)
        for axis, (span, block) in enumerate(zip(spans, self.block, strict=True)):
            if by_group and axis == axis_I:
                index = self.group_I[span].to(device).long()
            elif found.shape[axis] == 1:
                continue  # broadcast
            else:
                index = torch.arange(span.start, span.stop, device=device) // block - first[axis]
            found = found.index_select(axis, index)
        return found


def shape_of(stored: Any) -> tuple[int, ...]:
    """Return the shape of a stored tensor: a slice of safetensors, a tensor of a pickle, or a weight of this module."""
    return tuple(stored.get_shape() if hasattr(stored, "get_shape") else stored.shape)


def dtype_of(stored: Any) -> str:
    """Return the type of a stored tensor in safetensors' notation; of pickles only "F" or "" for most types."""
    import torch

    if isinstance(stored, torch.Tensor):
        known = {torch.float8_e4m3fn: _FLOAT8, torch.uint8: _BYTE, torch.int8: "I8"}
        return known.get(stored.dtype, "F" if stored.is_floating_point() else "")
    return str(stored.get_dtype()) if hasattr(stored, "get_dtype") else ""


def weights_of(stored: dict[str, Any], how: Quantization, path: Path) -> dict[str, Any]:
    """Replace the tensors of each quantized weight by one `QuantizedWeight` under the weight's name.

    Scales of inputs and of the KV cache are left out.

    Raises:
        ValueError: a part is missing, or the shapes of two parts do not fit.
    """
    found = {name: weight for name in stored if (weight := _weight(name, stored, how, path)) is not None}
    parts = {part for weight in found.values() for part in weight.parts}
    rest = {
        name: tensor for name, tensor in stored.items()
        if name not in parts and not name.endswith(_UNREAD) and not name.endswith(_KV_SCALES)
    }  # fmt: skip
    if any(name.endswith(_KV_SCALES) for name in stored):
        logger.info("%s: its scales for a KV cache in 8 bits are not used", path)
    return rest | {_logical_name(name): weight for name, weight in found.items()}


def _logical_name(name: str) -> str:
    for suffix in (".qweight", ".weight_packed"):
        if name.endswith(suffix):
            return name.removesuffix(suffix) + ".weight"
    return name.removesuffix("_blocks")


def _weight(name: str, stored: dict[str, Any], how: Quantization, path: Path) -> QuantizedWeight | None:
    """Return the weight whose codes are in a stored tensor, None for other tensors. Raises ValueError."""
    base, _, leaf = name.rpartition(".")
    codes = stored[name]

    def part(*names: str) -> Any:
        return next((stored[own] for own in names if own in stored), None)

    def made(scale: Any, parts: Sequence[str], **fields: Any) -> QuantizedWeight:
        weight = QuantizedWeight(**{"codes": codes, "scale": scale, "block": (), **fields})
        if how.method == "NVFP4" and weight.is_fp4 and weight.global_scale is None:
            raise ValueError(f"{path}: {name} has no global scale: fetch or copy the checkpoint again")
        present = tuple(own for own in (name, *parts) if own in stored)
        return replace(weight, block=_blocks(name, weight, how, path), parts=present)

    if leaf == "qweight":
        names = [f"{base}.{own}" for own in ("scales", "qzeros", "g_idx")]
        scale, zeros, group_I = (part(own) for own in names)
        if scale is None or zeros is None:
            raise ValueError(f"{path}: {name} has no scales or qzeros: fetch or copy the checkpoint again")
        is_awq, bits = how.method == "AWQ", how.bits
        order = _AWQ_ORDER if is_awq else None
        return made(
            scale, names, codes=PackedCodes(codes, 1 if is_awq else 0, 32, bits, order),
            zero=PackedCodes(zeros, 1, 32, bits, order), offset=how.zero_offset, group_I=group_I, is_transposed=True,
        )  # fmt: skip
    if leaf == "weight_packed":
        own = ("weight_scale", "weight_zero_point", "weight_g_idx", "weight_global_scale")
        names = [f"{base}.{leaf}" for leaf in own]
        scale, zeros, group_I, global_scale = (part(own) for own in names)
        if "FP4" in how.method:
            return made(
                scale, names, codes=PackedCodes(codes, 1, 8, 4), global_scale=global_scale, is_divisor=True, is_fp4=True
            )
        zero = None if zeros is None else PackedCodes(zeros, 0, 32, how.bits)
        offset = 1 << how.bits - 1 if zeros is None else 0
        return made(scale, names, codes=PackedCodes(codes, 1, 32, how.bits), zero=zero, offset=offset, group_I=group_I)
    if leaf.endswith("_blocks"):
        scales = name.removesuffix("_blocks") + "_scales"
        return made(part(scales), [scales], codes=PackedCodes(codes, 2, 8, 4), is_fp4=True, is_transposed=True)
    names = [f"{name}_scale_inv", f"{name}_scale", f"{name}_scale_2", f"{name}_zero_point"]
    scale = part(*names[:2])
    kind = dtype_of(codes)
    if kind == _FLOAT8 and scale is None and not name.endswith(("_scale", "_scale_inv")):  # NVFP4's scales are float8
        raise ValueError(f"{path}: float8 tensor {name!r} has no block scales {names[0]!r}")
    if (kind == _FLOAT8 and scale is not None) or (kind == "I8" and scale is not None):
        return made(scale, names, zero=part(names[3]))
    if kind == _BYTE and how.method == "NVFP4" and scale is not None:
        return made(scale, names, codes=PackedCodes(codes, 1, 8, 4), global_scale=part(names[2]), is_fp4=True)
    return None


def _blocks(name: str, weight: QuantizedWeight, how: Quantization, path: Path) -> tuple[int, ...]:
    """Return the items of each axis that share a scale: all, one, or as many as the configuration says."""
    shape = shape_of(weight.codes)
    if weight.scale is None:
        raise ValueError(f"{path}: {name} has no scales: fetch or copy the checkpoint again")
    scales = shape_of(weight.scale)
    if len(scales) < 2:
        return shape
    blocks = []
    for axis, (length, number) in enumerate(zip(shape, scales, strict=True)):
        at = axis - len(shape) + 2
        given = how.block[at] if how.block is not None and at >= 0 else 0
        block = 1 if number == length else length if number == 1 else given
        if not block or -(-length // block) != number:
            raise ValueError(f"{path}: {name} {shape} does not fit its scales {scales} in blocks of {how.block}")
        blocks.append(block)
    return tuple(blocks)
