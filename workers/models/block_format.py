"""Block heads, DSpark and DFlash: four published layouts, normalized to one `BlockSpec` and one set of tensor names.

A slot of the block holds the anchor, which is the newest token, or the mask token. What differs between the layouts:

    DeepSpec      `Qwen3DSparkModel`; ids at the top, of the layers AFTER which states are captured; a slot predicts
                  the token behind its own. Without a Markov head it is called DFlash, and is the same network
    z-lab         `DFlashDraftModel`; ids in `dflash_config`, counted likewise; a slot predicts its own token, and the
                  anchor's predicts nothing; embedding and vocabulary head are the target's
    SpecForge     as z-lab; with `projector_type` "dspark" as DeepSpec, the Markov head's fields in `dflash_config`
    speculators   `speculators_model_type`, layers in `transformer_layer_config`; ids of the layers BEFORE which states
                  are captured; `sample_from_anchor` tells what a slot predicts
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workers.models.config_json import read_config
from workers.models.head_layers import block_kind, check_target, head_layers
from workers.models.specs import BlockSpec, ModelSpec

_MAX_BLOCK = 64
"""Slots that a row's mask has bits for."""
_DFLASH_FIELDS = frozenset(
    {
        "attention_mode", "block_size", "causal", "confidence_head_with_markov", "enable_confidence_head",
        "markov_head_type", "markov_rank", "mask_token_id", "projector_type", "sample_from_anchor", "target_layer_ids",
    }
)  # fmt: skip
_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "projector_type": (None, "dflash", "dspark"),
    "attention_mode": (None, "gqa"),
    "markov_head_type": (None, "vanilla", "gated"),
    "is_neox_style": (None, True),
    "input_embedding_scale": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
}
"""Values of fields that change what a head computes."""


def read_block_spec(path: Path | str, target: ModelSpec) -> BlockSpec:
    """Read and check a head's config.json against its target.

    Raises:
        FileNotFoundError: no config.json.
        ValueError: not such a head, one made for another target, or a variant that is not supported.
    """
    path = Path(path)
    raw = read_config(path)
    if block_kind(raw) is None:
        raise ValueError(f"{path} is not a DSpark or DFlash head")
    inner: dict[str, Any] = raw.get("transformer_layer_config") or raw
    own = raw | (raw.get("dflash_config") or {})
    _check_fields(raw, own, path)
    bias = bool(inner.get("attention_bias", False))
    layers = head_layers({"vocab_size": target.vocab_size} | inner, path, target, "qwen3", qkv_bias=bias, o_bias=bias)
    target_hidden = raw.get("target_hidden_size") or target.hidden_size
    check_target(path, target, layers.vocab_size, target_hidden)
    block_size = _number(own, "block_size", range(2, _MAX_BLOCK + 1), path)
    rank = own.get("markov_rank") or 0
    return BlockSpec(
        layers=layers,
        target_hidden_size=target_hidden,
        draft_vocab_size=raw.get("draft_vocab_size") or layers.vocab_size,
        tap_layers=_tap_layers(raw, own, target.num_layers, path),
        block_size=block_size,
        from_anchor=_is_from_anchor(raw, own, block_size, path),
        mask_token_id=_number(own, "mask_token_id", range(target.vocab_size), path),
        is_causal=_causal_layers(own, layers.windows, path),
        markov_rank=rank,
        is_gated=rank > 0 and own.get("markov_head_type") == "gated",
    )


def _check_fields(raw: dict[str, Any], own: dict[str, Any], path: Path) -> None:
    """Raise ValueError for fields and values of variants that compute something else."""
    if unknown := sorted((raw.get("dflash_config") or {}).keys() - _DFLASH_FIELDS):
        raise ValueError(
            f"{path}: dflash_config has {', '.join(unknown)}, which is not supported; take a head without it"
        )
    for name, supported in _SUPPORTED_VALUES.items():
        if own.get(name) not in supported:
            values = ", ".join(map(str, supported[1:])) or "none"
            raise ValueError(f"{path}: {name} {own[name]!r} is not supported; supported: {values}")


def _number(own: dict[str, Any], name: str, allowed: range, path: Path) -> int:
    value = own.get(name)
    if type(value) is not int or value not in allowed:
        raise ValueError(
            f"{path}: {name} in config.json is {value}; for this target it must be {allowed.start} to "
            f"{allowed.stop - 1}"
        )
    return value


def _tap_layers(raw: dict[str, Any], own: dict[str, Any], num_layers: int, path: Path) -> tuple[int, ...]:
    """Return the layers before which states are captured, 0 for the embeddings."""
    if "speculators_model_type" in raw:
        ids = taps = own.get("aux_hidden_state_layer_ids") or []
    else:
        ids = own.get("target_layer_ids") or []
        taps = [layer + 1 for layer in ids]
    if not ids or not all(0 <= tap < num_layers for tap in taps):
        raise ValueError(f"{path}: its layer ids {list(ids)} do not fit a target of {num_layers} layers")
    return tuple(taps)


def _is_from_anchor(raw: dict[str, Any], own: dict[str, Any], block_size: int, path: Path) -> bool:
    """Return whether a slot predicts the token behind its own. A wrong answer raises no error, it only costs drafts."""
    if own.get("sample_from_anchor") is not None:
        return bool(own["sample_from_anchor"])
    if "speculators_model_type" not in raw:
        return "Qwen3DSparkModel" in (raw.get("architectures") or []) or bool(own.get("markov_rank"))
    proposals = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    num_tokens = proposals[0].get("speculative_tokens")
    if num_tokens not in (block_size, block_size - 1):
        raise ValueError(
            f"{path}: config.json does not say which token a slot predicts; write sample_from_anchor: true if a slot "
            "predicts the token behind its own, false if it predicts its own"
        )
    return bool(num_tokens == block_size)


def _causal_layers(own: dict[str, Any], windows: tuple[int | None, ...], path: Path) -> tuple[bool, ...]:
    """Return which layers hide later slots: by default those with a window."""
    is_causal = own.get("is_causal", own.get("causal"))
    causal = tuple(window is not None if is_causal is None else bool(is_causal) for window in windows)
    is_open = own.get("sliding_window_non_causal") or is_causal is False
    if is_open and any(windows):
        raise ValueError(
            f"{path}: slots that see later slots within a sliding window are not supported; "
            "take a head with full attention, or with causal windows"
        )
    return causal


def canonical_name(stored: str) -> str:
    """Convert a stored tensor name: early heads of SpecForge put the Markov and confidence heads in `logit_head.`."""
    return stored.removeprefix("logit_head.")
