"""Reads model descriptions from config.json.

    read_spec(path) -> ModelSpec                     raises ValueError for unsupported models
    read_draft_spec(draft, target) -> DraftSpec      None for a drafter without weights
    read_specs(config) -> Specs                      both models of an engine
    check_kinds(target, draft) -> None               ValueError for models of the wrong kinds, without slow imports

torch and transformers are only imported when a configuration is read, so that rules which need no model files can be
checked first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workers.config import DraftConfig, EngineConfig
from workers.models.config_json import SUPPORTED_ARCHITECTURES, eos_ids, fp8_block, read_json
from workers.models.head_layers import check_head, num_mtp_layers
from workers.models.specs import DraftSpec, ModelSpec, Specs


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
    raw = _read_raw(path)
    _check_kind(raw, path)
    family = _family(raw)
    if family is None:
        from workers.models.transformers_spec import read_transformers_spec

        return read_transformers_spec(path, raw)
    from transformers import AutoConfig, Qwen2Config

    from workers.models.rope import reach, rope_spec

    try:
        if family == "mimo":  # unknown to transformers; its own code derives from Qwen2
            config = Qwen2Config(**raw)
        else:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers' validation raises various types, even KeyError
        raise ValueError(f"{path}/config.json is not a valid {family} configuration: {error}") from error
    if config.hidden_act != "silu":
        raise ValueError(f"{path}: activation {config.hidden_act!r} is not supported; supported: silu")
    bias, positions = bool(getattr(config, "attention_bias", False)), reach(config)
    return ModelSpec(
        family=family,
        num_layers=config.num_hidden_layers,
        num_mtp_layers=num_mtp_layers(raw),
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        tie_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=bias or family in ("qwen2", "mimo"),  # Qwen2 always has biases on q, k and v
        o_bias=bias and family not in ("qwen2", "mimo"),
        mlp_bias=bool(getattr(config, "mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        rope=rope_spec(config),
        windows=_windows(config, family),
        max_position_embeddings=positions.default,
        max_scaled_positions=positions.most,
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=eos_ids(raw, read_json(path / "generation_config.json")),
    )


def check_kinds(target: Path, draft: DraftConfig | None) -> None:
    """Check what config.json says of a target and of its drafter, which may differ from what `draft` expects.

    Takes milliseconds, where `read_specs`, which checks the same, imports torch and transformers. Raises like that.
    """
    raw = _read_raw(target)
    _check_kind(raw, target)
    match draft:
        case None | DraftConfig(method="ngram"):
            return
        case DraftConfig(method="mtp"):
            check_head(raw, target, "mtp")
        case DraftConfig(method="draft_model", model_path=path):
            _check_kind(_read_raw(Path(path)), Path(path))
        case DraftConfig(method="eagle" | "eagle3" as method, model_path=path):
            check_head(_read_raw(Path(path)), Path(path), method)


def _read_raw(path: Path) -> dict[str, Any]:
    if raw := read_json(path / "config.json"):
        return raw
    raise FileNotFoundError(f"no config.json in {path}")


def _check_kind(raw: dict[str, Any], path: Path) -> None:
    """Raise ValueError for a draft head, and for quantization other than in FP8 blocks.

    The raw JSON is checked, because transformers' own errors would not say what is supported here.
    """
    quantization = raw.get("quantization_config")
    if quantization:
        fp8_block(quantization, path)
    if "draft_vocab_size" in raw or "speculators_model_type" in raw:
        raise ValueError(
            f"{path} is an EAGLE-3 draft head, not a model that can run by itself; "
            f'write speculative_config: {{"method": "eagle3", "model": "{path}"}}'
        )


def _family(raw: dict[str, Any]) -> str | None:
    """Return the model family of `workers.models.decoder`, or None for other architectures."""
    architectures = raw.get("architectures") or []
    by_type = {family: family for family in SUPPORTED_ARCHITECTURES.values()}
    family = SUPPORTED_ARCHITECTURES.get(architectures[0]) if architectures else by_type.get(raw.get("model_type", ""))
    return family if raw.get("model_type", family) == family else None


def _windows(config: Any, family: str) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if family == "mistral":
        return (window,) * config.num_hidden_layers
    if family == "llama" or window is None:
        return (None,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def read_specs(config: EngineConfig) -> Specs:
    """Read both models of an engine. Raises FileNotFoundError and ValueError like `read_spec` and `read_draft_spec`."""
    target = read_spec(config.model_path)
    return Specs(target=target, draft=read_draft_spec(config.draft, target) if config.draft else None)


def read_draft_spec(draft: DraftConfig, target: ModelSpec) -> DraftSpec | None:
    """Read the config.json of a drafter and check that it fits the target.

    Raises:
        FileNotFoundError: no config.json.
        ValueError: it is invalid, or does not fit the target.
    """
    # Imported here, because torch takes seconds to import.
    from workers.models.eagle3_format import read_eagle3_spec
    from workers.models.fc_head_format import read_eagle_spec, read_mtp_spec

    match draft.method:
        case "ngram":
            return None
        case "eagle3":
            return read_eagle3_spec(draft.model_path, target)
        case "eagle":
            return read_eagle_spec(draft.model_path, target)
        case "mtp":
            return read_mtp_spec(draft.model_path, target)
        case "draft_model":
            spec = read_spec(draft.model_path)
            if spec.vocab_size != target.vocab_size:
                raise ValueError(
                    "the target and the draft model should have the same vocabulary size "
                    f"(got {target.vocab_size} and {spec.vocab_size}); use a draft model of the target's family"
                )
            return spec
