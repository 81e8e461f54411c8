"""What the formats of draft heads have in common: which method a config.json is for, and the heads' decoder layers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from workers.models.hybrid_format import text_config
from workers.models.quantization import read_quantization
from workers.models.specs import ModelSpec

MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
INSTEAD_OF_MTP = "use 'eagle3', 'draft_model' or 'ngram'"
_SLIDING, _FULL = "sliding_attention", "full_attention"
_BLOCK_TYPES = ("dspark", "dflash")
_BLOCK_ARCHITECTURES = {"Qwen3DSparkModel", "DSparkDraftModel", "DFlashDraftModel", "Gemma4DSparkModel"}
_OTHER_LAYERS = ("Deepseek", "DeepSeek", "Gemma4", "MiniCPM", "MistralLarge3", "Cohere", "Llama4")
"""Parts of the names of heads whose layers are no Llama or Qwen3 layers. Names of models say nothing: some heads bear
that of their target."""
_OTHER_HEADS = {
    "medusa": "a Medusa head",
    "hydra": "a Hydra head",
    "mlp_speculator": "an MLP speculator",
    "gemma4_assistant": "a Gemma 4 assistant, which reads its target's keys and values",
    "eagle": "an EAGLE head in the format of vLLM's first versions",
}
"""By their `model_type`, or by what the names of their fields begin with."""
_EAGLE_CONFIG = {"use_aux_hidden_state": True, "use_mtp_layernorm": False, "use_last_layernorm": True}
"""Fields of ModelOpt that change what a head computes, with the values that EAGLE-3 has."""
MASK_FIELDS = ("mask_token_id", "ptd_token_id", "pard_token")
"""Names of the mask token of a P-EAGLE head."""
_NOT_THE_LAYERS = ("architectures", "model_type", "transformers_version", "quantization_config")


def check_known(raw: dict[str, Any], path: Path) -> None:
    """Raise ValueError if config.json describes a head of a kind that nothing here reads, or layers of another kind."""
    own = raw.get("model_type", "")
    kind = own if own in _OTHER_HEADS else next((kind for kind in _OTHER_HEADS if f"{kind}_num_heads" in raw), None)
    if kind is not None:
        raise ValueError(
            f"{path} is {_OTHER_HEADS[kind]}, which is not supported: take an EAGLE, EAGLE-3, DSpark or DFlash head, "
            "or a draft model of the target's family"
        )
    for name in raw.get("architectures") or ():
        is_head = re.search("Eagle|EAGLE|DSpark|DFlash", name)
        if is_head and (layers := next((other for other in _OTHER_LAYERS if other in name), None)):
            raise ValueError(
                f"{path} is a {name}, whose layers are those of {layers}: heads with Llama's or Qwen3's layers are "
                "supported; take such a head"
            )


def check_mtp(raw: dict[str, Any], path: Path) -> None:
    """Raise ValueError if a target's config.json names no prediction layers."""
    if not num_mtp_layers(raw):
        raise ValueError(
            "method 'mtp': the target must natively support multi-token prediction, and "
            f"{path}/config.json has neither {' nor '.join(MTP_FIELDS)}; {INSTEAD_OF_MTP}"
        )


def check_dspark(raw: dict[str, Any], path: Path) -> None:
    """Raise ValueError if config.json does not describe a DSpark head, which has a Markov head."""
    _check_block(raw, path, "dspark", "has no markov_rank")


def check_dflash(raw: dict[str, Any], path: Path) -> None:
    """Raise ValueError if config.json does not describe a block head without a Markov head."""
    _check_block(raw, path, "dflash", "has no dflash_config and names none in architectures")


def _check_block(raw: dict[str, Any], path: Path, method: str, lacks: str) -> None:
    check_known(raw, path)
    kind = block_kind(raw)
    if kind is not None and kind != method:
        raise ValueError(f"{path} is a block head of another kind: write method {kind!r}")
    if kind is None:
        raise ValueError(f"{path} is not a block head that method {method!r} reads: its config.json {lacks}")


def block_kind(raw: dict[str, Any]) -> Literal["dspark", "dflash"] | None:
    """Return the method of a block head, None for anything else. With a Markov head it is DSpark, whatever its name."""
    own = raw.get("dflash_config") or {}
    names = set(raw.get("architectures") or ())
    is_block = own or names & _BLOCK_ARCHITECTURES or raw.get("speculators_model_type") in _BLOCK_TYPES
    if not is_block:
        return None
    return "dspark" if raw.get("markov_rank") or own.get("markov_rank") else "dflash"


def check_eagle(raw: dict[str, Any], path: Path) -> None:
    """Raise ValueError if config.json describes a head of another kind, or one in a format that only those have."""
    _check_eagle_kind(raw, path)
    if "draft_vocab_size" in raw or "speculators_model_type" in raw:
        raise ValueError(f"{path} is an EAGLE-3 head: write method 'eagle3'")


def check_eagle3(raw: dict[str, Any], path: Path) -> None:
    """Raise ValueError if config.json does not describe an EAGLE-3 head."""
    _check_eagle_kind(raw, path)
    if ((raw.get("eagle_config") or raw).get("parallel_draft_step") or 1) > 1:
        raise ValueError(
            f"{path} drafts several tokens at once with parallel heads (parallel_draft_step), which is not supported: "
            "take a head that drafts one after the other, or a DSpark or DFlash head"
        )
    for name, value in _EAGLE_CONFIG.items():
        if (found := (raw.get("eagle_config") or {}).get(name, value)) != value:
            raise ValueError(f"{path}: {name} {found} of eagle_config is not supported; take a head with {value}")
    is_named = any("Eagle3" in name for name in raw.get("architectures") or []) or is_parallel(raw)
    if "draft_vocab_size" not in raw and not is_named:
        raise ValueError(f"{path} is not an EAGLE-3 head: its config.json has no draft_vocab_size")


def is_parallel(raw: dict[str, Any]) -> bool:
    """Return whether the config.json of an EAGLE-3 head describes P-EAGLE, which drafts several tokens in one pass."""
    names = [*(raw.get("architectures") or ()), raw.get("speculators_model_type") or ""]
    return any("peagle" in name.lower() for name in names) or any(raw.get(name) is not None for name in MASK_FIELDS)


def num_mtp_layers(raw: dict[str, Any]) -> int:
    """Return the number of prediction layers that a target's config.json names."""
    text = text_config(raw)
    return next((text[name] for name in MTP_FIELDS if text.get(name)), 0)


def _check_eagle_kind(raw: dict[str, Any], path: Path) -> None:
    """Raise ValueError for a block head, and for one of speculators' format that is not an EAGLE-3 head."""
    check_known(raw, path)
    if kind := block_kind(raw):
        raise ValueError(f"{path} is a head that drafts a block in one pass: write method {kind!r}")
    speculator = raw.get("speculators_model_type", "eagle3")
    if speculator not in ("eagle3", "peagle"):
        raise ValueError(
            f"{path} is a head of type {speculator!r} in the format of speculators, of which 'eagle3', 'peagle', "
            "'dspark' and 'dflash' are supported; for EAGLE-1/2 use the checkpoint that it was converted from, in "
            "SafeAILab's layout, with method 'eagle'"
        )


def head_layers(
    raw: dict[str, Any],
    path: Path,
    target: ModelSpec,
    kind: Literal["llama", "qwen3"] = "llama",
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
) -> ModelSpec:
    """Return the layers of this kind that a head's config.json describes, for this target."""
    from workers.models.rope import rope_spec

    config = _layer_config(raw, path, kind)
    return ModelSpec(
        family=kind,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=kind == "qwen3",
        rope=rope_spec(config),
        windows=_layer_windows(config, path),
        max_position_embeddings=config.max_position_embeddings,
        max_scaled_positions=config.max_position_embeddings,
        dtype=target.dtype,
        eos_token_ids=target.eos_token_ids,
    )


def check_target(path: Path, target: ModelSpec, vocab_size: int, hidden_size: int) -> None:
    """Raise ValueError for a head that was made for a target of another vocabulary or width."""
    for what, found, wanted in (
        ("a vocabulary", vocab_size, target.vocab_size),
        ("a hidden size", hidden_size, target.hidden_size),
    ):
        if found != wanted:
            raise ValueError(f"{path} is for a target with {what} of {found}, this one has {wanted}")


def _layer_config(raw: dict[str, Any], path: Path, kind: Literal["llama", "qwen3"]) -> Any:
    """Parse the layers' fields with transformers' configuration classes, which fill in defaults (rope base 10000).

    kind: the type of the layers. Most implementations only have Llama layers, but `architectures` and `model_type` are
    often copied from the target (phi3, qwen2, mixtral), so both are ignored.

    Raises:
        ValueError: values that transformers rejects, an activation other than silu, or unsupported quantization.
    """
    from transformers import LlamaConfig, Qwen3Config

    read_quantization(path, raw)
    known = {name: value for name, value in raw.items() if value is not None and name not in _NOT_THE_LAYERS}
    if set(known.get("layer_types", ())) == {_FULL}:  # may list all layers of the target
        known["layer_types"] = [_FULL] * known.get("num_hidden_layers", 1)
    try:
        config = (Qwen3Config if kind == "qwen3" else LlamaConfig)(**{"num_hidden_layers": 1} | known)
    except Exception as error:  # transformers' validation raises various types
        raise ValueError(f"{path}/config.json does not describe layers of type {kind}: {error}") from error
    if config.hidden_act != "silu":
        raise ValueError(f"{path}: activation {config.hidden_act!r} is not supported; supported: silu")
    # Qwen3Config has other defaults for these fields, but null means the same as for Llama.
    for name, value in (
        ("num_key_value_heads", config.num_attention_heads),
        ("head_dim", config.hidden_size // config.num_attention_heads),
    ):
        if name in raw and raw[name] is None:
            setattr(config, name, value)
    return config


def _layer_windows(config: Any, path: Path) -> tuple[int | None, ...]:
    """Return each layer's sliding window, None for full attention. config: LlamaConfig or Qwen3Config.

    Only `layer_types` decides, as in speculators (whose trainer writes it) and vLLM. A `sliding_window` without it is
    ignored: Llama layers have no windows, and heads for Qwen targets repeat the target's value. Qwen3Config derives
    missing `layer_types` from `use_sliding_window`.

    Raises:
        ValueError: another layer type, or a window without a width.
    """
    kinds = getattr(config, "layer_types", None) or [_FULL] * config.num_hidden_layers
    if not set(kinds) <= {_SLIDING, _FULL}:
        raise ValueError(f"{path}: layer_types {kinds} are not supported: write {_SLIDING!r} or {_FULL!r}")
    window = getattr(config, "sliding_window", None)
    if _SLIDING in kinds and not window:
        raise ValueError(
            f"{path}: layer_types asks for {_SLIDING!r}, which has no width: write sliding_window (and "
            f"use_sliding_window: true), or {_FULL!r}"
        )
    return tuple(window if kind == _SLIDING else None for kind in kinds)
