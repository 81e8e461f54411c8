"""Reads model descriptions from config.json.

torch and transformers are only imported when a configuration is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workers.models.config_json import SUPPORTED_ARCHITECTURES, eos_ids, read_config, read_json
from workers.models.head_layers import block_kind, check_known, num_mtp_layers
from workers.models.hybrid_format import check_hybrid, delta_spec, is_hybrid, moe_spec, text_config
from workers.models.latent_format import check_latent, latent_family, latent_moe_spec, latent_spec
from workers.models.quantization import read_quantization
from workers.models.specs import ModelSpec


def read_spec(path: Path | str) -> ModelSpec:
    """Read a target's or a draft model's config.json (and the end-of-text ids of generation_config.json).

    Raises:
        FileNotFoundError: no config.json.
        ValueError: an unsupported architecture, activation, quantization or rope variant; the message lists the
            supported ones.

    Returns:
        ModelSpec: a `TransformersSpec` for architectures other than SUPPORTED_ARCHITECTURES.
    """
    path = Path(path)
    raw = read_config(path)
    check_model(raw, path)
    family = _family(raw)
    if family is None:
        from workers.models.transformers_spec import read_transformers_spec

        return read_transformers_spec(path, raw)
    from transformers import CONFIG_MAPPING, AutoConfig, Qwen2Config

    from workers.models.rope import reach, rope_spec

    try:
        if family == "mimo":  # unknown to transformers; its own code derives from Qwen2
            whole = Qwen2Config(**raw)
        elif latent_family(raw):
            whole = CONFIG_MAPPING[family](**text_config(raw))
        else:
            whole = AutoConfig.from_pretrained(path, trust_remote_code=False)
        config = whole.get_text_config(decoder=True)
    except Exception as error:  # transformers' validation raises various types, even KeyError
        raise ValueError(f"{path}/config.json is not a valid {family} configuration: {error}") from error
    if config.hidden_act != "silu":
        raise ValueError(f"{path}: activation {config.hidden_act!r} is not supported; supported: silu")
    bias, positions = bool(getattr(config, "attention_bias", False)), reach(config)
    has_delta, text = is_hybrid(raw), text_config(raw)
    latent = latent_spec(config) if latent_family(raw) else None
    moe = moe_spec(config) if has_delta else latent_moe_spec(config) if latent else None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = raw.get("dtype") or raw.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype") or "float32"
    return ModelSpec(
        family=config.model_type if has_delta else family,
        num_layers=config.num_hidden_layers,
        num_mtp_layers=num_mtp_layers(raw),
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=1 if latent else config.num_key_value_heads,
        head_dim=latent.rank + latent.rope_dim if latent else head_dim,
        intermediate_size=config.intermediate_size
        if moe is None or moe.dense_layers
        else moe.num_chosen * moe.inner_size + moe.shared_size,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        tie_embeddings=bool((config if family == "mistral" else whole).tie_word_embeddings),
        qkv_bias=bias or family in ("qwen2", "mimo"),  # Qwen2 always has biases on q, k and v
        o_bias=bias and family not in ("qwen2", "mimo"),
        mlp_bias=bool(getattr(config, "mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3" or has_delta,
        zero_centred_norms=has_delta,
        attention_gate=has_delta,
        rope=rope_spec(config, is_partial=has_delta),
        delta=delta_spec(config, path) if has_delta else None,
        latent=latent,
        moe=moe,
        expert_share=moe.num_chosen / moe.num_experts if moe else 1.0,
        windows=_windows(config, family),
        max_position_embeddings=positions.default,
        max_scaled_positions=positions.most,
        dtype=str(dtype).removeprefix("torch."),
        eos_token_ids=eos_ids(raw, text, read_json(path / "generation_config.json")),
    )


def check_model(raw: dict[str, Any], path: Path) -> None:
    """Raise ValueError for a draft head, quantization that cannot be read, and hybrids that do not run here.

    The raw JSON is checked, because transformers' own errors would not say what is supported here.
    """
    read_quantization(path, raw)
    check_known(raw, path)
    if kind := block_kind(raw):
        raise ValueError(
            f"{path} is a draft head, not a model that can run by itself; "
            f'write speculative_config: {{"method": "{kind}", "model": "{path}"}}'
        )
    if "draft_vocab_size" in raw or "speculators_model_type" in raw:
        raise ValueError(
            f"{path} is an EAGLE-3 draft head, not a model that can run by itself; "
            f'write speculative_config: {{"method": "eagle3", "model": "{path}"}}'
        )
    check_hybrid(raw, path)
    check_latent(raw, path)


def _family(raw: dict[str, Any]) -> str | None:
    """Return the model family of `workers.models.decoder`, or None for other architectures."""
    architectures = raw.get("architectures") or []
    by_type = {family: family for family in SUPPORTED_ARCHITECTURES.values()}
    kind = latent_family(raw) or raw.get("model_type", "")
    if kind == "mistral3":
        kind = text_config(raw).get("model_type", "mistral")
    family = SUPPORTED_ARCHITECTURES.get(architectures[0]) if architectures else by_type.get(kind)
    return family if (kind or family) == family else None


def _windows(config: Any, family: str) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if family == "mistral":
        return (window,) * config.num_hidden_layers
    if family == "llama" or window is None:
        return (None,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)
