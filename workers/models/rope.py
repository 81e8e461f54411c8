"""Rotary position embedding, from a configuration's rope fields to the cos and sin of one step.

Legend: N packed rows, d head width. `workers.kernels.pointwise.rotate_` applies it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workers.kernels.pointwise import Rotation, rotation
from workers.models.specs import RopeSpec

SUPPORTED_ROPE = ("default", "mrope", "linear", "dynamic", "yarn", "llama3")


class Reach(NamedTuple):
    """The default and the upper limit of max_model_len."""

    default: int
    most: int


def reach(config: Any) -> Reach:
    """Return the context lengths that a rope scaling supports, which max_position_embeddings does not always include.

    YaRN: `factor` times the original length, as in vLLM, because Qwen's model cards tell users to add YaRN to
    config.json without changing max_position_embeddings. Linear: `factor` times max_position_embeddings, but only on
    request: Vicuna's 16k models do not include the factor in it, DeepSeek Coder and Gemma 3 (by layer type) do, and no
    field tells which. "longrope": the original length, for which the output is exactly the model's (see
    `workers.models.transformers_spec.freeze_rope`), and max_position_embeddings on request.
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


def rope_spec(config: Any, *, is_partial: bool = False) -> RopeSpec:
    """Return the RopeSpec of a transformers config (from `rope_parameters`, which includes `rope_scaling`).

    "dynamic" only changes frequencies beyond max_position_embeddings, which is the limit of all requests, so the
    initial frequencies are exact. "mrope" gives time, height and width a part of the head each; a text's are all its
    position, as by default. "longrope" changes factors as a sequence grows, which would invalidate cached keys.
    is_partial: the model's class reads `partial_rotary_factor`.

    Raises:
        ValueError: the rope type is not in SUPPORTED_ROPE, or rotates only a part of the head and may not.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in SUPPORTED_ROPE:
        raise ValueError(f"rope type {kind!r} is not supported; supported: {', '.join(SUPPORTED_ROPE)}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    factor = parameters.get("partial_rotary_factor", 1.0)
    width = int(head_dim * factor)
    if kind in ("default", "mrope"):
        exponent = torch.arange(0, width, 2, dtype=torch.float32) / width
        inv_freq, scaling = 1.0 / (parameters["rope_theta"] ** exponent), 1.0
    else:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if (factor != 1.0 and not is_partial) or 2 * inv_freq.numel() != width:
        raise ValueError("partial_rotary_factor is not supported: the whole head must be rotated")
    return RopeSpec(inv_freq=tuple(inv_freq.tolist()), scaling=float(scaling))


class Rope:
    """Computes the Rotation of positions once per step for all layers, without a table.

    compute: the `rotation` of the kernels in use.
    """

    def __init__(
        self,
        spec: RopeSpec,
        dtype: torch.dtype,
        device: torch.device | str,
        compute: Callable[[Tensor, Tensor, float, torch.dtype], Rotation] = rotation,
    ) -> None:
        inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32, device=device)
        self.signed_freq_d = torch.cat((-inv_freq, inv_freq))  # cos(-x) = cos x and sin(-x) = -sin x
        self.scaling = spec.scaling
        self.dtype = dtype
        self._compute = compute

    def __call__(self, positions_N: Tensor) -> Rotation:
        """Return the Rotation of integer positions [N]."""
        return self._compute(positions_N, self.signed_freq_d, self.scaling, self.dtype)
