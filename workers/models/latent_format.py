"""Reads config.json of models with multi-head latent attention, and refuses those that do not run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from workers.models.hybrid_format import text_config
from workers.models.specs import LatentSpec, MoeSpec, RouterSpec

_FAMILIES = {
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",  # unknown to transformers; the same network
    "kimi_k25": "deepseek_v3",  # its text model alone
    "glm4_moe_lite": "glm4_moe_lite",
    "youtu": "youtu",
}
_INSTEAD = "take a DeepSeek-V3, R1 or V3.1, a Kimi-K2, a GLM-4.7-Flash or a Youtu-LLM"
_SPARSE = "attention to keys that an indexer selects is not implemented"
_OTHERS = {"deepseek_v32": _SPARSE, "glm_moe_dsa": _SPARSE, "deepseek_v4": _SPARSE}
"""Why models with latents do not run, by model_type."""


def latent_family(raw: dict[str, Any]) -> str | None:
    """Return transformers' model_type of a model with latent attention that runs here; None for others."""
    return _FAMILIES.get(raw.get("model_type", ""))


def check_latent(raw: dict[str, Any], path: Path) -> None:
    """Raise ValueError for a model with latent attention that does not run here."""
    if reason := _OTHERS.get(raw.get("model_type", "")):
        raise ValueError(f"{path}: {raw['model_type']} is not supported: {reason}; {_INSTEAD}")
    if latent_family(raw) is None:
        return
    text = text_config(raw)
    for field, others in (
        ("attention_bias", {None, False}),
        ("moe_layer_freq", {None, 1}),
        ("norm_topk_prob", {None, True}),
        ("scoring_func", {None, "sigmoid"}),
        ("topk_method", {None, "noaux_tc"}),
    ):
        if (found := text.get(field)) not in others:
            raise ValueError(f"{path}: {field} {found!r} is not implemented for latent attention; {_INSTEAD}")


def latent_spec(config: Any) -> LatentSpec:
    """Return the latent attention of a transformers config."""
    rope, scale = config.rope_parameters, (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if rope.get("rope_type", "default") != "default" and (factor := rope.get("mscale_all_dim")):
        scale *= (0.1 * factor * math.log(max(rope["factor"], 1.0)) + 1.0) ** 2
    return LatentSpec(
        query_rank=config.q_lora_rank,
        rank=config.kv_lora_rank,
        plain_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        scale=scale,
        is_interleaved=bool(config.rope_interleave),
    )


def latent_moe_spec(config: Any) -> MoeSpec | None:
    """Return the experts of a transformers config with latent attention; None for a dense model."""
    if not getattr(config, "n_routed_experts", None):
        return None
    kinds = getattr(config, "mlp_layer_types", None)
    num_dense = getattr(config, "first_k_dense_replace", 0)
    return MoeSpec(
        num_experts=config.n_routed_experts,
        num_chosen=config.num_experts_per_tok,
        inner_size=config.moe_intermediate_size,
        shared_size=config.moe_intermediate_size * config.n_shared_experts,
        router=RouterSpec(
            num_groups=config.n_group, num_chosen_groups=config.topk_group, scaling=config.routed_scaling_factor
        ),
        dense_layers=tuple(
            index
            for index in range(config.num_hidden_layers)
            if (kinds[index] == "dense" if kinds else index < num_dense)
        ),
    )
