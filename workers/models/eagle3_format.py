"""EAGLE-3 checkpoints: three published formats, normalized to one `Eagle3Spec` and one set of tensor names.

    read_eagle3_spec(path, target) -> Eagle3Spec
    open_eagle3(path, dtype, device, kernels) -> Weights   with SafeAILab's tensor names, for all formats
    load_target_ids(weights, draft_vocab_size, vocab_size) -> int64 [draft_vocab]
    FeatureFusion.load(path, spec, device, dtype)(taps_N3D) -> [N, H]

Formats: (a) SafeAILab (`midlayer.*`, LlamaConfig fields), (b) SpecForge / SGLang (same tensors, `eagle_config` with
layer ids counted AFTER a layer), (c) vLLM speculators (`layers.0.*`, `transformer_layer_config`, EAGLE-3.1's flags).
The verifier runs the feature fusion, so that a drafter receives H values per token instead of 3 D.
Legend: N packed rows, D target hidden width, H draft hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from workers.kernels.linear import Linear
from workers.kernels.pointwise import rms_norm
from workers.kernels.select import TORCH, Kernels
from workers.models.checkpoint import Weights
from workers.models.config_json import read_json
from workers.models.head_layers import check_eagle3, layer_config, layer_windows
from workers.models.layers import open_weights
from workers.models.rope import rope_spec
from workers.models.specs import Eagle3Spec, ModelSpec

FUSION_TENSORS = ("fc.weight", "input_norm.weight", "fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight")
"""Tensors that the verifier reads and the drafter ignores."""

UNUSED_TENSORS = ("t2d",)
"""The target-to-draft mask is redundant given d2t."""


def default_tap_layers(num_layers: int) -> tuple[int, int, int]:
    """Return EAGLE-3's feature layers (captured before them): 2, L // 2, L - 3. Below 7 layers some coincide."""
    low, mid, high = sorted((2, num_layers // 2, num_layers - 3))
    if low < 0 or high > num_layers:
        raise ValueError(f"EAGLE-3 needs a target of at least 3 layers (got {num_layers})")
    return low, mid, high


def read_eagle3_spec(path: Path | str, target: ModelSpec) -> Eagle3Spec:
    """Read and check a head's config.json against its target.

    Raises:
        FileNotFoundError: no config.json.
        ValueError: not an EAGLE-3 head, or one made for another target.
    """
    path = Path(path)
    raw = read_json(path / "config.json")
    if not raw:
        raise FileNotFoundError(f"no config.json in {path}")
    check_eagle3(raw, path)
    inner: dict[str, Any] = raw.get("transformer_layer_config") or raw
    kind = _layer_kind(inner, path) if inner is not raw else "llama"
    config = layer_config(inner, path, kind)
    vocab_size = inner.get("vocab_size") or target.vocab_size
    if vocab_size != target.vocab_size:
        raise ValueError(f"{path} is for a vocabulary of {vocab_size} tokens, the target has {target.vocab_size}")
    target_hidden = raw.get("target_hidden_size") or target.hidden_size
    if target_hidden != target.hidden_size:
        raise ValueError(f"{path} is for a target of hidden size {target_hidden}, this one has {target.hidden_size}")
    bias = bool(inner.get("attention_bias", False))
    return Eagle3Spec(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        target_hidden_size=target_hidden,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=vocab_size,
        draft_vocab_size=raw.get("draft_vocab_size") or vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        rope=rope_spec(config),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(inner.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
        windows=layer_windows(config, path),
        tap_layers=_tap_layers(raw, target.num_layers, path),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        input_norm=bool(raw.get("norm_before_fc", False)),
        fc_norm=bool(raw.get("fc_norm", False)),
        norm_output=bool(raw.get("norm_output", False)),
    )


def _layer_kind(inner: dict[str, Any], path: Path) -> Literal["llama", "qwen3"]:
    """Return the layer type of a head in speculators' format, the only one whose `model_type` is reliable."""
    match inner.get("model_type", "llama"):
        case "llama" | "qwen3" as kind:
            return kind
        case kind:
            raise ValueError(f"{path}: draft layers of type {kind!r} are not supported; supported: llama, qwen3")


def _tap_layers(raw: dict[str, Any], num_layers: int, path: Path) -> tuple[int, int, int]:
    """Return the layers before which features are captured.

    speculators stores these ids; SpecForge's `eagle_config` stores the layers after which they are captured.
    """
    nested = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    plain = raw.get("eagle_aux_hidden_state_layer_ids")
    ids = [layer + 1 for layer in nested] if nested else plain or default_tap_layers(num_layers)
    if len(ids) != 3:
        raise ValueError(f"{path} reads {len(ids)} feature layers of its target, {list(ids)}: only 3 are supported")
    if nested and max(nested) == num_layers:
        raise ValueError(
            f"{path}: the feature layers {nested} of eagle_config do not fit a target of {num_layers} layers, whose "
            f"last is {num_layers - 1}: they are read as SpecForge and SGLang write them, a layer's number for its "
            "output. If they count the boundaries between layers, as some of NVIDIA's heads do, write each one less"
        )
    if not all(0 <= layer <= num_layers for layer in ids):
        raise ValueError(f"{path}: feature layers {list(ids)} do not fit a target of {num_layers} layers")
    return ids[0], ids[1], ids[2]


def canonical_name(name: str) -> str:
    """Convert a stored tensor name to SafeAILab's: `layers.0.` (speculators) becomes `midlayer.`."""
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def open_eagle3(
    path: Path | str, dtype: torch.dtype, device: torch.device | str = "cpu", kernels: Kernels = TORCH
) -> Weights:
    """Open a head's tensors under their canonical names."""
    return open_weights(path, dtype, device, kernels, canonical_name)


def load_target_ids(weights: Weights, draft_vocab_size: int, vocab_size: int) -> Tensor:
    """Return the target token of each draft token, int64 [draft_vocab]. The file's `d2t` holds the differences.

    Raises:
        ValueError: `d2t` is missing although the vocabulary is reduced, or points outside the target's vocabulary.
    """
    ids = torch.arange(draft_vocab_size, device=weights.device)
    if draft_vocab_size < vocab_size or weights.has("d2t"):
        ids = ids + weights.get("d2t").to(torch.int64)
    if ids.unique().numel() != draft_vocab_size or ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"{weights.path}: d2t does not map to distinct tokens of a vocabulary of {vocab_size}")
    return ids


class FeatureFusion:
    """The first operation of the head, run by the verifier: fc(taps), after EAGLE-3.1's norms."""

    def __init__(self, fc_H3D: Tensor, norm: Callable[[Tensor], Tensor] | None) -> None:
        self._fc = Linear(fc_H3D)
        self.norm = norm

    @staticmethod
    @torch.inference_mode()
    def load(
        path: Path | str, spec: Eagle3Spec, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> FeatureFusion:
        """Read the fusion's tensors. Raises ValueError if one is missing or unknown."""
        weights = open_eagle3(path, dtype, device)
        fc_H3D = weights.get("fc.weight")
        expected = (spec.hidden_size, 3 * spec.target_hidden_size)
        if fc_H3D.shape != expected:
            raise ValueError(f"{path}: fc.weight is {tuple(fc_H3D.shape)}, this target needs {expected}")
        norm = _fusion_norm(weights, spec)
        weights.finish(allowed=lambda name: name not in FUSION_TENSORS)
        return FeatureFusion(fc_H3D, norm)

    @torch.inference_mode()
    def __call__(self, taps_N3D: Tensor) -> Tensor:
        """Convert the decoder's taps [N, 3 D] to features [N, H], in the weights' dtype."""
        return self._fc(taps_N3D if self.norm is None else self.norm(taps_N3D))


def _fusion_norm(weights: Weights, spec: Eagle3Spec) -> Callable[[Tensor], Tensor] | None:
    eps = spec.rms_norm_eps
    if spec.input_norm:
        weight_3D = weights.get("input_norm.weight")
        return lambda taps_N3D: rms_norm(taps_N3D, weight_3D, eps)
    if spec.fc_norm:
        weight_3_D = torch.stack([weights.get(f"fc_norm.{i}.weight") for i in range(3)])
        return lambda taps_N3D: rms_norm(taps_N3D.view(-1, *weight_3_D.shape), weight_3_D, eps).flatten(1)
    return None
