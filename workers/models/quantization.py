"""Quantized checkpoints: how their files store a weight, and the values that it stands for.

A weight is (code - zero point) * scale, where a block of rows and columns shares a scale. How it is stored:

    FP8                   weight (float8) and weight_scale or weight_scale_inv: one, one per row, or one per block
    compressed-tensors    likewise in float8 or int8; integers of a few bits in weight_packed, rows behind each other
    ModelOpt              FP8 likewise; NVFP4: two 4-bit floats per byte in weight, weight_scale and weight_scale_2
    AWQ, GPTQ             qweight, qzeros, scales, g_idx, of the transposed weight
    MXFP4 (gpt-oss)       stacked experts in *_blocks and *_scales, of the transposed weight

`workers.models.quantized_weight` computes the values. Inputs are never quantized here, so scales of inputs are not
read, nor are scales of the KV cache. Importing this module imports no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workers.models.config_json import read_json
from workers.models.quantized_weight import BYTE, FLOAT8, PackedCodes, PerBlock, QuantizedWeight, dtype_of, shape_of

logger = logging.getLogger(__name__)

_INSTEAD = (
    "write the original weights, or a version of them in FP8, compressed-tensors, ModelOpt's FP8 or NVFP4, AWQ, GPTQ "
    "or GGUF"
)
_UNREAD = (
    ".input_scale",
    ".activation_scale",
    ".input_scale_ub",
    ".input_global_scale",
    ".weight_shape",
    ".input_zero_point",
)
_KV_SCALES = (
    ".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_output_scale", "k_proj.output_scale", "v_proj.output_scale",
)  # fmt: skip
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each output among the four-bit numbers of a word


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
            offset = {"gptq": 1, "gptq_v2": 0}.get(given.get("checkpoint_format") or "gptq")
            if offset is not None and not given.get("is_marlin_format"):
                return Quantization(method="GPTQ", block=_group(given), bits=given["bits"], zero_offset=offset)
        case "modelopt" | "modelopt_fp4":
            if (algorithm := given.get("quant_algo")) in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
                return Quantization(method="ModelOpt FP8")
            if algorithm == "NVFP4":
                return Quantization(method="NVFP4", block=(1, 16), bits=4)
            raise _unsupported(path, f"ModelOpt's {algorithm}")
        case "compressed-tensors":
            return _compressed(path, given)
    variants = {name: given[name] for name in ("bits", "version", "dynamic", "checkpoint_format") if name in given}
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


def weights_of(stored: dict[str, Any], how: Quantization, path: Path) -> dict[str, Any]:
    """Replace the tensors of each quantized weight by one `QuantizedWeight` under the weight's name.

    Scales of inputs and of the KV cache are left out.

    Raises:
        ValueError: a part is missing, or the shapes of two parts do not fit.
    """
    found = {name: weight for name in stored if (weight := _Layout(name, stored, how, path).weight()) is not None}
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


@dataclass(frozen=True, slots=True)
class _Layout:
    """A stored tensor that may hold the codes of a weight, and the tensors beside it."""

    name: str
    stored: dict[str, Any]
    how: Quantization
    path: Path

    def weight(self) -> QuantizedWeight | None:
        """Return the weight whose codes the tensor holds; None if it holds none. Raises ValueError."""
        name, how, codes, bits = self.name, self.how, self.stored[self.name], self.how.bits
        base, _, leaf = name.rpartition(".")
        if leaf == "qweight":  # AWQ packs along the outputs, GPTQ along the inputs
            axis, order = (1, _AWQ_ORDER) if how.method == "AWQ" else (0, None)
            zeros = PackedCodes(self._part(f"{base}.qzeros"), 1, bits, order)
            return self._made(
                PackedCodes(codes, axis, bits, order), f"{base}.scales", zeros, f"{base}.g_idx",
                offset=how.zero_offset, is_transposed=True, parts=(f"{base}.qzeros",),
            )  # fmt: skip
        if leaf == "weight_packed" and "FP4" not in how.method:
            own = f"{base}.weight_zero_point"
            zero = PackedCodes(self.stored[own], 0, bits) if own in self.stored else None
            return self._made(
                PackedCodes(codes, 1, bits), f"{base}.weight_scale", zero, f"{base}.weight_g_idx",
                offset=0 if zero else 1 << bits - 1, parts=(own,),
            )  # fmt: skip
        if leaf == "weight_packed":
            return self._fp4(f"{base}.weight_scale", f"{base}.weight_global_scale", is_divisor=True)
        if leaf.endswith("_blocks"):
            experts = PackedCodes(codes, 2, 4, is_nested=True)
            return self._made(experts, name.removesuffix("_blocks") + "_scales", is_fp4=True, is_transposed=True)
        kind, own = dtype_of(codes), f"{name}_scale_inv"
        scale = own if own in self.stored else f"{name}_scale"
        if kind == BYTE and scale in self.stored and how.method == "NVFP4":
            return self._fp4(scale, f"{name}_scale_2")
        if scale in self.stored and kind in (FLOAT8, "I8"):
            return self._made(codes, scale, self.stored.get(f"{name}_zero_point"), parts=(f"{name}_zero_point",))
        if kind == FLOAT8 and not name.endswith(("_scale", "_scale_inv")):  # NVFP4's scales are float8
            raise ValueError(f"{self.path}: float8 tensor {name!r} has no block scales {own!r}")
        return None

    def _fp4(self, scale: str, factor: str, *, is_divisor: bool = False) -> QuantizedWeight:
        """Return a weight in NVFP4, or in MXFP4, which has no factor of all scales."""
        codes = PackedCodes(self.stored[self.name], 1, 4)
        found = self._part(factor) if self.how.method == "NVFP4" else None
        return self._made(codes, scale, parts=(factor,), is_fp4=True, global_scale=found, is_divisor=is_divisor)

    def _made(
        self, codes: Any, scale: str, zero: Any = None, group: str = "", *, parts: Sequence[str] = (), **fields: Any
    ) -> QuantizedWeight:
        """Return a weight of these codes and zero points. scale, group, parts: names of the tensors beside them."""
        shared = PerBlock(
            self._part(scale),
            self._block(codes, scale),
            -2 if "is_transposed" in fields else -1,
            self.stored.get(group),
        )
        zeros = None if zero is None else replace(shared, stored=zero)
        present = tuple(own for own in (self.name, scale, group, *parts) if own in self.stored)
        return QuantizedWeight(codes=codes, scale=shared, zero=zeros, parts=present, **fields)

    def _part(self, name: str) -> Any:
        if name not in self.stored:
            raise ValueError(f"{self.path}: {self.name} has no {name}: fetch or copy the checkpoint again")
        return self.stored[name]

    def _block(self, codes: Any, scale: str) -> tuple[int, ...]:
        """Return the items of each axis that share a scale: all, one, or as many as the configuration says."""
        shape, scales = shape_of(codes), shape_of(self.stored[scale])
        if scales in ((), (1,)):
            return shape
        if len(scales) == 1:  # of each row
            scales += (1,)
        given = ((0,) * len(shape) + (self.how.block or (0, 0)))[-len(shape) :]
        block = tuple(
            1 if number == length else length if number == 1 else own
            for length, number, own in zip(shape, scales, given, strict=True)
        )
        if any(not n or -(-length // n) != number for length, number, n in zip(shape, scales, block, strict=True)):
            raise ValueError(
                f"{self.path}: {self.name} {shape} does not fit its scales {scales} in blocks of {self.how.block}"
            )
        return block
