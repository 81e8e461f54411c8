"""Rotary position embedding: from a config's rope fields to the cos and sin of one step.

    reach(config) -> Reach                             positions a request may have
    rope_spec(config) -> RopeSpec                      every stateless variant that transformers computes
    Rope(spec, dtype, device)(positions_N) -> Rotation  once per step, shared by all layers

Legend: N packed rows, d head width. `workers.kernels.pointwise.rotate_` applies it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from workers.models.specs import RopeSpec

SUPPORTED_ROPE = ("default", "linear", "dynamic", "yarn", "llama3")


class Reach(NamedTuple):
    """Positions that a request may have: unless max_model_len is given, and the most that it may be."""

    default: int
    most: int


class Rotation(NamedTuple):
    """cos and sin of one step's positions; sin carries the minus sign of `rotate_half` in its first half."""

    cos_N1d: Tensor
    sin_N1d: Tensor


def reach(config: Any) -> Reach:
    """How far a transformers config's rope scaling reaches, which max_position_embeddings does not always say.

    YaRN: `factor` times the original length, as in vLLM. Qwen's model cards tell users to write YaRN into config.json
    and to leave max_position_embeddings. Linear: `factor` times max_position_embeddings, but only where that is asked
    for: Vicuna's 16k models do not count the factor in, DeepSeek Coder and Gemma 3 (by layer type) do, and nothing
    tells which. "longrope": the original length, for which text is exactly the model's (see
    `workers.models.transformers_spec.freeze_rope`), and max_position_embeddings where that is asked for.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    default: int = config.max_position_embeddings
    most = default
    for kind in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        factor, original = kind.get("factor") or 1.0, kind.get("original_max_position_embeddings")
        original = original or getattr(config, "original_max_position_embeddings", None) or default
        match kind.get("rope_type"):
            case "yarn":
                default = most = max(most, int(original * factor))
            case "linear" if kind is parameters:
                most = max(most, int(most * factor))
            case "longrope":
                default = min(default, original)
    return Reach(default, most)


def rope_spec(config: Any) -> RopeSpec:
    """RopeSpec of a transformers config (`rope_parameters`, into which transformers folds `rope_scaling`).

    "dynamic" only changes frequencies beyond max_position_embeddings, which is then our limit for any request, so its
    start value is exact here. "longrope" switches factors as a sequence grows, which would invalidate cached keys.

    Raises:
        ValueError: a rope type that is not in SUPPORTED_ROPE, or one that rotates only a part of the head.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in SUPPORTED_ROPE:
        raise ValueError(f"rope type {kind!r} is not supported; supported: {', '.join(SUPPORTED_ROPE)}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if kind == "default":
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inv_freq, scaling = 1.0 / (parameters["rope_theta"] ** exponent), 1.0
    else:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if parameters.get("partial_rotary_factor", 1.0) != 1.0 or 2 * inv_freq.numel() != head_dim:
        raise ValueError("partial_rotary_factor is not supported: the whole head must be rotated")
    return RopeSpec(inv_freq=tuple(inv_freq.tolist()), scaling=float(scaling))


class Rope:
    """Turns positions into a Rotation. No table: a few small operations per step serve every layer."""

    def __init__(self, spec: RopeSpec, dtype: torch.dtype, device: torch.device | str) -> None:
        inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32, device=device)
        self.signed_freq_d = torch.cat((-inv_freq, inv_freq))  # cos(-x) = cos x, and sin(-x) = -sin x is what is wanted
        self.scaling = spec.scaling
        self.dtype = dtype

    def __call__(self, positions_N: Tensor) -> Rotation:
        """Rotation of int positions [N], computed in float32 and then cast, as transformers does."""
        angle_N1d = positions_N[:, None, None] * self.signed_freq_d
        cos_N1d, sin_N1d = angle_N1d.cos(), angle_N1d.sin()
        if self.scaling != 1:
            cos_N1d, sin_N1d = cos_N1d * self.scaling, sin_N1d * self.scaling
        return Rotation(cos_N1d.to(self.dtype), sin_N1d.to(self.dtype))
