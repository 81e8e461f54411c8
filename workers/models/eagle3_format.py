"""EAGLE-3 checkpoints: three published formats, normalized to one `Eagle3Spec` and one set of tensor names.

Formats: (a) SafeAILab (`midlayer.*`, LlamaConfig fields), (b) SpecForge / SGLang (same tensors, `eagle_config` with
layer ids counted AFTER a layer), (c) vLLM speculators (`layers.0.*`, `transformer_layer_config`, EAGLE-3.1's flags).

P-EAGLE heads come in all three. They also name a mask token, under one of `MASK_FIELDS`, and have the tensor
`mask_hidden`, the features of its rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from workers.models.config_json import read_config
from workers.models.head_layers import MASK_FIELDS, check_eagle3, head_layers, is_parallel
from workers.models.specs import Eagle3Spec, ModelSpec

_DEPTH_FIELDS = ("num_depths", "para_num")


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
    raw = read_config(path)
    check_eagle3(raw, path)
    inner: dict[str, Any] = raw.get("transformer_layer_config") or raw
    vocab_size = inner.get("vocab_size") or target.vocab_size
    bias = bool(inner.get("attention_bias", False))
    layers = head_layers(
        inner | {"vocab_size": vocab_size},
        path,
        target,
        _layer_kind(inner, path) if inner is not raw else "llama",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(inner.get("mlp_bias", False)),
    )
    if vocab_size != target.vocab_size:
        raise ValueError(f"{path} is for a vocabulary of {vocab_size} tokens, the target has {target.vocab_size}")
    target_hidden = raw.get("target_hidden_size") or target.hidden_size
    if target_hidden != target.hidden_size:
        raise ValueError(f"{path} is for a target of hidden size {target_hidden}, this one has {target.hidden_size}")
    return Eagle3Spec(
        layers=layers,
        target_hidden_size=target_hidden,
        draft_vocab_size=raw.get("draft_vocab_size") or vocab_size,
        tap_layers=_tap_layers(raw, target.num_layers, path),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        input_norm=bool(raw.get("norm_before_fc", False)),
        fc_norm=bool(raw.get("fc_norm", False)),
        norm_output=bool(raw.get("norm_output", False)),
        **_mask(raw, vocab_size, path),
    )


def _mask(raw: dict[str, Any], vocab_size: int, path: Path) -> dict[str, int | None]:
    """Return the fields of `Eagle3Spec` that only P-EAGLE sets."""
    if not is_parallel(raw):
        return {}
    mask = next((raw[name] for name in MASK_FIELDS if raw.get(name) is not None), None)
    if type(mask) is not int or not 0 <= mask < vocab_size:
        raise ValueError(
            f"{path}: the mask token of a P-EAGLE head is {mask}; write the one that it was trained with as "
            f"mask_token_id in config.json, 0 to {vocab_size - 1}"
        )
    proposals = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    depths = [*(raw.get(name) for name in _DEPTH_FIELDS), proposals[0].get("speculative_tokens")]
    return {"mask_token_id": mask, "max_depth": next((depth for depth in depths if depth), None)}


def _layer_kind(inner: dict[str, Any], path: Path) -> Literal["llama", "qwen3"]:
    """Return the layer type of a head in speculators' format, the only one whose `model_type` is reliable."""
    match inner.get("model_type", "llama"):
        case "llama" | "qwen3" as kind:
            return kind
        case kind:
            raise ValueError(f"{path}: draft layers of type {kind!r} are not supported; supported: llama, qwen3")


def _tap_layers(raw: dict[str, Any], num_layers: int, path: Path) -> tuple[int, ...]:
    """Return the layers before which features are captured.

    speculators stores these ids; SpecForge's `eagle_config` stores the layers after which they are captured.
    """
    nested = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    plain = raw.get("eagle_aux_hidden_state_layer_ids")
    ids = [layer + 1 for layer in nested] if nested else plain or default_tap_layers(num_layers)
    if nested and max(nested) == num_layers:
        raise ValueError(
            f"{path}: the feature layers {nested} of eagle_config do not fit a target of {num_layers} layers, whose "
            f"last is {num_layers - 1}: they are read as SpecForge and SGLang write them, a layer's number for its "
            "output. If they count the boundaries between layers, as some of NVIDIA's heads do, write each one less"
        )
    if not all(0 <= layer <= num_layers for layer in ids):
        raise ValueError(f"{path}: feature layers {list(ids)} do not fit a target of {num_layers} layers")
    return tuple(ids)


def canonical_name(stored: str) -> str:
    """Convert a stored tensor name to SafeAILab's: `layers.0.` (speculators) becomes `midlayer.`."""
    return "midlayer." + stored.removeprefix("layers.0.") if stored.startswith("layers.0.") else stored
