"""Reads config.json of hybrids, whose layers have attention or a gated delta net, and refuses those that do not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workers.models.specs import DeltaSpec, MoeSpec

_FAMILIES = {"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"}
_INSTEAD = "take a Qwen3.5, Qwen3.6, Qwen3.8-27B or Qwen3-Next"
_OTHERS = {
    "qwen4_exp": "its layers are not those of Qwen3.5 to 3.8, whatever its name says",
    "olmo_hybrid": "its gated delta nets are of another kind",
    "kimi_linear": "delta nets with a gate for each width (KDA) are not implemented",
    "glm5_next": "delta nets with a gate for each width (KDA) are not implemented",
    "bailing_hybrid": "its linear attention is not implemented",
}
_LINEAR, _FULL = "linear_attention", "full_attention"


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the part of config.json that describes the text model; mostly all of it."""
    text: dict[str, Any] = raw.get("text_config") or raw
    return text


def is_hybrid(raw: dict[str, Any]) -> bool:
    """Return whether config.json describes a hybrid that runs here."""
    return raw.get("model_type") in _FAMILIES


def check_hybrid(raw: dict[str, Any], path: Path) -> None:
    """Raise ValueError for a hybrid that does not run here."""
    if reason := _OTHERS.get(raw.get("model_type", "")):
        raise ValueError(f"{path}: {raw['model_type']} is not supported: {reason}; {_INSTEAD}")
    if not is_hybrid(raw):
        return
    text = text_config(raw)
    for field, others in (
        ("linear_conv_kernel_dim", {None, 4}),
        ("attn_output_gate", {None, True}),
        ("output_gate_type", {None, "swish"}),
        ("decoder_sparse_step", {None, 1}),
        ("norm_topk_prob", {None, True}),
    ):
        if (found := text.get(field)) not in others:
            raise ValueError(f"{path}: {field} {found!r} is not implemented; {_INSTEAD}")

    if text.get("mlp_only_layers"):
        raise ValueError(f"{path}: mlp_only_layers, which have no experts, are not implemented; {_INSTEAD}")


def moe_spec(config: Any) -> MoeSpec | None:
    """Return the experts of a transformers config; None for a dense model."""
    if not getattr(config, "num_experts", None):
        return None
    return MoeSpec(
        num_experts=config.num_experts,
        num_chosen=config.num_experts_per_tok,
        inner_size=config.moe_intermediate_size,
        shared_size=config.shared_expert_intermediate_size,
    )


def delta_spec(config: Any, path: Path) -> DeltaSpec:
    """Return the gated delta nets of a transformers config. Raises ValueError for sizes that are not implemented."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    widths = config.linear_key_head_dim, config.linear_value_head_dim
    if values % keys or any(width % 16 for width in widths):
        raise ValueError(
            f"{path}: linear_num_value_heads {values} must be a multiple of linear_num_key_heads {keys}, and the head "
            f"widths linear_key_head_dim and linear_value_head_dim {widths} multiples of 16; {_INSTEAD}"
        )
    if others := set(config.layer_types) - {_LINEAR, _FULL}:
        raise ValueError(f"{path}: layers of type {', '.join(sorted(others))} are not implemented; {_INSTEAD}")
    return DeltaSpec(
        layers=tuple(index for index, kind in enumerate(config.layer_types) if kind == _LINEAR),
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=widths[0],
        value_dim=widths[1],
    )
