"""Draft heads of the form fc(embedding, feature) -> decoder layers -> norm: EAGLE-1/2 and MTP.

The feature of a token is the target's last hidden state, after its final norm. Layouts, names without `.weight`:

    EAGLE-1/2 (SafeAILab)   fc(+ bias), layers.{i}.*; layer 0 has no input_layernorm; [embed_tokens] [lm_head]
    MTP, Qwen3 type         mtp.{fc, pre_fc_norm_embedding, pre_fc_norm_hidden, norm}, mtp.layers.0.*; a hybrid's
                            is a layer with attention, its gates, norms and experts as in the target
    MTP, MiMo               model.mtp_layers.0.{input_proj, token_layernorm, hidden_layernorm, final_layernorm}, and
                            the names of a Qwen2 layer beside them; input_proj reads the feature first
    MTP, DeepSeek-V3, GLM   model.layers.{L}.{eh_proj, enorm, hnorm, shared_head.norm} behind the L layers of the
                            model, and the names of one of those beside them; copies of the target's embed_tokens and,
                            as shared_head.head, of its lm_head
Sources: SafeAILab's cnets1.py, vLLM's qwen3_next_mtp.py and mimo_mtp.py, transformers' MtpLayer.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from workers.models.config_json import read_config, read_json
from workers.models.head_layers import INSTEAD_OF_MTP, check_eagle, check_mtp, check_target, head_layers
from workers.models.hybrid_format import text_config
from workers.models.latent_format import latent_moe_spec
from workers.models.specs import FcHeadSpec, ModelSpec, TransformersSpec


def read_eagle_spec(path: Path | str, target: ModelSpec) -> FcHeadSpec:
    """Read and check an EAGLE-1/2 head's config.json: a Llama configuration, "bias" (of fc, default true), "qkv_bias".

    The layers are Llama layers, as in SafeAILab's and SGLang's code, with Qwen2's biases if "qkv_bias" is set.

    Raises:
        FileNotFoundError: no config.json.
        ValueError: another kind of head, or a head for another target.
    """
    path = Path(path)
    raw = read_config(path)
    check_eagle(raw, path)
    layers = head_layers(raw, path, target, qkv_bias=bool(raw.get("qkv_bias", False)))
    check_target(path, target, layers.vocab_size, layers.hidden_size)
    return FcHeadSpec(
        layers=layers,
        prefix="",
        fc="fc",
        fc_bias=bool(raw.get("bias", True)),
        feature_first=False,
        embedding_norm=None,
        feature_norm=None,
        layer_prefixes=tuple(f"layers.{index}." for index in range(layers.num_layers)),
        first_layer_norm=False,
        final_norm=None,
    )


def read_mtp_spec(path: Path | str, target: ModelSpec) -> FcHeadSpec:
    """Read the multi-token prediction layer of a target; its layout follows from the model family.

    One layer serves every depth: its output is the next depth's feature. A second layer would need the first layer's
    outputs at the committed tokens, which a stateless drafter does not have.

    Raises:
        ValueError: the target has no such layer, or several.
    """
    raw = read_json(Path(path) / "config.json")
    if target.num_mtp_layers == 0:
        check_mtp(raw, Path(path))
        raise ValueError(
            f"method 'mtp': the prediction layers of a {target.family} model are not implemented; {INSTEAD_OF_MTP}"
        )
    if target.num_mtp_layers > 1:
        raise ValueError(
            f"{path}: {target.num_mtp_layers} multi-token prediction layers are not supported, only one, which is "
            "used at every depth"
        )
    if text_config(raw).get("mtp_use_dedicated_embeddings"):
        raise ValueError(f"{path}: mtp_use_dedicated_embeddings is not implemented for method 'mtp'; {INSTEAD_OF_MTP}")
    if isinstance(target, TransformersSpec):
        layers = _glm_layer(Path(path), target)
    else:  # full attention even if the target's layers have windows, as in vLLM
        moe = replace(target.moe, dense_layers=()) if target.moe else None
        layers = replace(target, num_layers=1, windows=(None,), delta=None, moe=moe)
    if target.latent is not None or isinstance(target, TransformersSpec):
        own = f"model.layers.{target.num_layers}."
        return FcHeadSpec(
            layers=layers,
            prefix=own,
            fc=f"{own}eh_proj",
            fc_bias=False,
            feature_first=False,
            embedding_norm=f"{own}enorm",
            feature_norm=f"{own}hnorm",
            layer_prefixes=(own,),
            first_layer_norm=True,
            final_norm=f"{own}shared_head.norm",
        )
    if target.family == "mimo":
        own = "model.mtp_layers.0."
        return FcHeadSpec(
            layers=layers,
            prefix="model.mtp_layers.",
            fc=f"{own}input_proj",
            fc_bias=False,
            feature_first=True,
            embedding_norm=f"{own}token_layernorm",
            feature_norm=f"{own}hidden_layernorm",
            layer_prefixes=(own,),
            first_layer_norm=True,
            final_norm=f"{own}final_layernorm",
        )
    return FcHeadSpec(
        layers=layers,
        prefix="mtp.",
        fc="mtp.fc",
        fc_bias=False,
        feature_first=False,
        embedding_norm="mtp.pre_fc_norm_embedding",
        feature_norm="mtp.pre_fc_norm_hidden",
        layer_prefixes=("mtp.layers.0.",),
        first_layer_norm=True,
        final_norm="mtp.norm",
    )


def _glm_layer(path: Path, target: TransformersSpec) -> ModelSpec:
    """Return the prediction layer of a GLM-4.5 to 4.7, whose other layers run in transformers' class."""
    from transformers import AutoConfig

    from workers.models.rope import rope_spec

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    moe = latent_moe_spec(config)
    assert moe is not None
    return ModelSpec(
        family=target.family,
        num_layers=1,
        hidden_size=target.hidden_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=moe.num_chosen * moe.inner_size + moe.shared_size,
        vocab_size=target.vocab_size,
        rms_norm_eps=target.rms_norm_eps,
        qkv_bias=config.attention_bias,
        qk_norm=config.use_qk_norm,
        rope=rope_spec(config, is_partial=True),
        moe=replace(moe, dense_layers=()),
        expert_share=target.expert_share,
        windows=(None,),
        max_position_embeddings=target.max_position_embeddings,
        max_scaled_positions=target.max_scaled_positions,
        dtype=target.dtype,
        eos_token_ids=target.eos_token_ids,
    )
