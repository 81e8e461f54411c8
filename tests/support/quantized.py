"""Quantized copies of small checkpoints, in the layouts in which they are published.

quantize(path, form) -> the same weights, dequantized by the format's own rule, float32, by name      FORMS: those known
quantize_experts(path) -> the same, of a gpt-oss model, whose stacked experts are in MXFP4

`pack` gives the words of compressed-tensors 0.20.0, for 2, 4 and 8 bits along both axes; AWQ and GPTQ weights have the
values of AutoAWQ's `dequantize_gemm` and of AutoGPTQ's `QuantLinear` (compared once, 2026-11).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import edit_config

GROUP = 32
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FP8 = torch.float8_e4m3fn
_PYTORCH = {"format": "pt"}


def pack(codes: Tensor, axis: int, order: tuple[int, ...] = tuple(range(8)), bits: int = 4) -> Tensor:
    """Pack integers along an axis into int32, integer i of a word at place order[i]."""
    per = 32 // bits
    words = codes.long().movedim(axis, -1)
    words = words.reshape(*words.shape[:-1], -1, per)
    shifts = torch.tensor(order[:per] if bits == 4 else range(per)) * bits
    packed = (words << shifts).sum(-1)
    return (packed - ((packed >> 31) << 32)).to(torch.int32).movedim(-1, axis).contiguous()


def nibbles(codes: Tensor) -> Tensor:
    """Pack integers of 4 bits along the last axis, two in a byte, the first in the lower bits."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def spread(scale: Tensor, shape: torch.Size) -> Tensor:
    for axis, length in enumerate(shape):
        scale = scale.repeat_interleave(length // scale.shape[axis], axis)
    return scale


def nearest_fp4(values: Tensor) -> Tensor:
    return (values[..., None] - FP4).abs().argmin(-1)


def float8(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return codes, and one scale for each of rows x columns parts."""
    height, width = weight.shape[0] // rows, weight.shape[1] // columns
    blocks = weight.reshape(rows, height, columns, width)
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    return (weight / spread(scale, weight.shape)).to(FP8), scale


def integers(weight: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [O, I], scales and zero points [O, G] of asymmetric groups, in float16 as published."""
    parts = weight.reshape(len(weight), -1, group)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).half().float()
    zero = (-low / scale).round().clamp(1, 2**bits - 1)
    codes = (parts / scale[..., None] + zero[..., None]).round().clamp(0, 2**bits - 1)
    return codes.reshape(weight.shape).long(), scale, zero.long()


def int8(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Store symmetric integers with a scale for each row, in bfloat16 as published."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scale.float()).round().clamp(-128, 127)
    return {name: codes.to(torch.int8), f"{name}_scale": scale}, codes * scale.float()


def fp8(
    name: str,
    weight: Tensor,
    parts: tuple[int, int],
    suffix: str,
    inputs: str = "input_scale",
    *,
    is_flat: bool = False,
) -> tuple[dict[str, Tensor], Tensor]:
    """Store float8, with a scale of the inputs. is_flat: the scales of the rows have one axis."""
    codes, scale = float8(weight, *parts)
    plain = codes.float() * spread(scale, weight.shape)
    stored = scale.reshape(()) if parts == (1, 1) else scale.flatten() if is_flat else scale
    return {name: codes, f"{name}{suffix}": stored, f"{name[:-6]}{inputs}": torch.tensor(0.5)}, plain


def packed(
    name: str, weight: Tensor, *, is_symmetric: bool, has_order: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    base = name[:-6]
    if has_order:
        group_I = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0)) // GROUP
        order = group_I.argsort(stable=True)
        codes, scale, zero = integers(weight[:, order], GROUP, 4)
        codes = codes[:, order.argsort()]
    else:
        group_I = torch.arange(weight.shape[1]) // GROUP
        codes, scale, zero = integers(weight, GROUP, 4)
    if is_symmetric:
        zero = torch.full_like(zero, 8)
    plain = (codes - zero[:, group_I]) * scale[:, group_I]
    tensors = {f"{base}weight_packed": pack(codes, 1), f"{base}weight_scale": scale,
               f"{base}weight_shape": torch.tensor(weight.shape)}  # fmt: skip
    if not is_symmetric:
        tensors[f"{base}weight_zero_point"] = pack(zero, 0)
    if has_order:
        tensors[f"{base}weight_g_idx"] = group_I.int()
    return tensors, plain


def transposed(name: str, weight: Tensor, form: str) -> tuple[dict[str, Tensor], Tensor]:
    """AWQ and GPTQ store the transposed weight."""
    base, bits = name[:-6], 8 if form.endswith("8") else 4
    group_I = torch.arange(weight.shape[1]) // GROUP
    if form == "gptq, order":
        group_I = group_I[torch.randperm(len(group_I), generator=torch.Generator().manual_seed(0))]
    order = group_I.argsort(stable=True)
    codes, scale, zero = integers(weight[:, order], GROUP, bits)
    codes = codes[:, order.argsort()]
    plain = (codes - zero[:, group_I]) * scale[:, group_I]
    tensors = {f"{base}scales": scale.t().half().contiguous()}
    if form == "awq":
        order = (0, 4, 1, 5, 2, 6, 3, 7)
        return tensors | {f"{base}qweight": pack(codes.t(), 1, order), f"{base}qzeros": pack(zero.t(), 1, order)}, plain
    less = 0 if form == "gptq, v2" else 1
    stored = {f"{base}qweight": pack(codes.t(), 0, bits=bits), f"{base}qzeros": pack(zero.t() - less, 1, bits=bits)}
    return tensors | stored | {f"{base}g_idx": group_I.int()}, plain


def nvfp4(name: str, weight: Tensor, *, is_modelopt: bool) -> tuple[dict[str, Tensor], Tensor]:
    base, parts = name[:-6], weight.reshape(len(weight), -1, 16)
    whole = parts.abs().max() / 6 / 448
    scale = (parts.abs().amax(-1) / 6 / whole).to(FP8)
    if not is_modelopt:
        whole = 1 / whole
    real = scale.float() * whole if is_modelopt else scale.float() / whole
    codes = nearest_fp4(parts / real[..., None]).reshape(weight.shape)
    plain = FP4[codes] * spread(real, weight.shape)
    if is_modelopt:
        return {name: nibbles(codes), f"{name}_scale": scale, f"{name}_scale_2": whole}, plain
    tensors = {f"{base}weight_packed": nibbles(codes), f"{base}weight_scale": scale}
    return tensors | {f"{base}weight_global_scale": whole.reshape(1)}, plain


def powers(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return 4-bit codes, the exponents of blocks of 32 columns as bytes, and what both stand for."""
    exponent = (weight.unflatten(-1, (-1, 32)).abs().amax(-1) / 6).log2().ceil()
    factors = spread(2**exponent, weight.shape)
    codes = nearest_fp4(weight / factors)
    return codes, (exponent + 127).to(torch.uint8), FP4[codes] * factors


def mxfp4(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    base, (codes, scale, plain) = name[:-6], powers(weight)
    return {f"{base}weight_packed": nibbles(codes), f"{base}weight_scale": scale}, plain


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "group_size": None, **weights}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "sym": False}
FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "FP8 in blocks": (
        {"quant_method": "fp8", "weight_block_size": [16, 32]},
        lambda name, w: fp8(name, w, (w.shape[0] // 16, w.shape[1] // 32), "_scale_inv"),
    ),
    "FP8, one scale": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        lambda name, w: fp8(name, w, (1, 1), "_scale_inv", "activation_scale"),
    ),
    "compressed-tensors FP8, one scale": (
        compressed("float-quantized", type="float", strategy="tensor"),
        lambda name, w: fp8(name, w, (1, 1), "_scale"),
    ),
    "compressed-tensors FP8, a scale per row": (
        compressed("float-quantized", type="float", strategy="channel"),
        lambda name, w: fp8(name, w, (len(w), 1), "_scale"),
    ),
    "compressed-tensors FP8 in blocks": (
        compressed("float-quantized", type="float", strategy="block", block_structure=[16, 32]),
        lambda name, w: fp8(name, w, (w.shape[0] // 16, w.shape[1] // 32), "_scale"),
    ),
    "compressed-tensors INT8, a scale per row": (
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int8
    ),
    "compressed-tensors W4A16": (
        compressed("pack-quantized", **_INT4), lambda name, w: packed(name, w, is_symmetric=True)
    ),
    "compressed-tensors W4A16, zero points": (
        compressed("pack-quantized", **_INT4), lambda name, w: packed(name, w, is_symmetric=False)
    ),
    "compressed-tensors W4A16, activation order": (
        compressed("pack-quantized", **_INT4), lambda name, w: packed(name, w, is_symmetric=False, has_order=True)
    ),
    "ModelOpt FP8": (
        {"quant_method": "modelopt", "quant_algo": "FP8"}, lambda name, w: fp8(name, w, (1, 1), "_scale")
    ),
    "ModelOpt FP8, a scale per row": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        lambda name, w: fp8(name, w, (len(w), 1), "_scale", is_flat=True),
    ),
    "ModelOpt NVFP4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, lambda name, w: nvfp4(name, w, is_modelopt=True)
    ),
    "compressed-tensors NVFP4": (
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        lambda name, w: nvfp4(name, w, is_modelopt=False),
    ),
    "compressed-tensors MXFP4": (
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32), mxfp4
    ),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": GROUP}, lambda name, w: transposed(name, w, "awq")),
    "GPTQ": (_GPTQ | {"bits": 4}, lambda name, w: transposed(name, w, "gptq")),
    "GPTQ, activation order": (
        _GPTQ | {"bits": 4, "desc_act": True}, lambda name, w: transposed(name, w, "gptq, order")
    ),
    "GPTQ, format 2": (
        _GPTQ | {"bits": 4, "checkpoint_format": "gptq_v2"}, lambda name, w: transposed(name, w, "gptq, v2")
    ),
    "GPTQ in 8 bits": (_GPTQ | {"bits": 8}, lambda name, w: transposed(name, w, "gptq8")),
}  # fmt: skip
"""The `quantization_config` of each form, and what stores a weight [O, I] so: name, weight -> tensors, plain weight."""


def quantize(path: Path, form: str) -> dict[str, Tensor]:
    """Quantize the layers' matrices of a single-file checkpoint. Returns all weights as they are then."""
    config, store = FORMS[form]
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, weight in load_file(path / "model.safetensors").items():
        if weight.dim() != 2 or "_proj.weight" not in name:
            tensors[name] = plain[name] = weight
            continue
        own, plain[name] = store(name, weight)
        tensors |= own
    save_file(tensors, path / "model.safetensors", _PYTORCH)
    edit_config(path, quantization_config=config)
    return plain


def quantize_experts(path: Path) -> dict[str, Tensor]:
    """Store a gpt-oss model's experts as published. Returns all weights as they are then."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, weight in load_file(path / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            codes, scale, values = powers(weight.transpose(1, 2))
            tensors[f"{name}_blocks"] = nibbles(codes).unflatten(-1, (-1, 16))
            tensors[f"{name}_scales"], plain[name] = scale, values.transpose(1, 2)
        else:
            tensors[name] = plain[name] = weight
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors", _PYTORCH)
    edit_config(path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return plain
