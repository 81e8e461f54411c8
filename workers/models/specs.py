"""What checkpoints' config.json say, in plain values: read where an engine is started, and told to its ranks with their
configuration. Reading takes transformers, and those take 3 s and 190 MB to import.

    ModelSpec           a target or draft model, read by `workers.models.readers`
    TransformersSpec    one that runs through transformers' own class, by `workers.models.transformers_spec`
    Eagle3Spec          an EAGLE-3 head, by `workers.models.eagle3_format`
    FcHeadSpec          an EAGLE-1/2 head or prediction layers, by `workers.models.fc_head_format`
    Specs               an engine's, as JSON on the way to its ranks
    check_parallel(spec, size)      ValueError unless `size` ranks can share the model

Importing this file imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TypeAlias

from pydantic import TypeAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Inverse frequencies (head_dim / 2 of them, exact float32 values) and the factor on cos and sin (YaRN)."""

    inv_freq: tuple[float, ...]
    scaling: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder in plain values.

    `rms_norm_eps`, the biases, `qk_norm` and `rope` describe the layers of `workers.models.decoder`; they are empty for
    a model that runs through transformers' own class (`TransformersSpec`), which knows its own.
    """

    family: str  # llama, mistral, qwen2, qwen3, mimo; else transformers' model_type
    num_layers: int
    num_mtp_layers: int  # multi-token prediction layers in the same checkpoint
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeSpec
    windows: tuple[int | None, ...]  # per layer; None = full attention
    max_position_embeddings: int  # positions that a request may have unless max_model_len is given
    max_scaled_positions: int  # the most that max_model_len may be: how far rope scaling reaches
    dtype: str  # float32, bfloat16 or float16: the checkpoint's own
    eos_token_ids: tuple[int, ...]
    can_split: bool = True  # between tensor-parallel ranks
    expert_share: float = 1.0  # of a mixture's experts, that a row goes through


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSpec(ModelSpec):
    """A model that runs through transformers' own class; `ModelSpec` says which fields are then empty."""

    class_name: str
    tp_plan: tuple[tuple[str, str], ...]  # name pattern inside the base model -> style
    attention_name: str  # the first layer's attention, relative to the base model
    has_experts: bool  # stacked in one parameter, of which each row takes some
    copies_from_host: bool  # a forward pass makes tensors of values that lie on the host
    has_taps: bool  # layers hand on one residual stream [1, N, D], which EAGLE-3 can read


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec:
    """One EAGLE-3 head, in plain values. H = hidden_size, D = target_hidden_size."""

    num_layers: int  # the first reads embedding and feature, any others are plain decoder layers
    hidden_size: int
    target_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int  # the target's
    draft_vocab_size: int
    rms_norm_eps: float
    rope: RopeSpec
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # the config says so; outside speculators' format only the tensors do
    windows: tuple[int | None, ...]  # per layer; None = full attention
    tap_layers: tuple[int, int, int]  # residual stream captured BEFORE these target layers, low, mid, high
    norm_before_residual: bool  # the residual is hidden_norm(g) instead of g
    input_norm: bool  # one RMSNorm over the 3 D features before fc
    fc_norm: bool  # one RMSNorm per D-wide feature before fc
    norm_output: bool  # the next step is fed norm(out) instead of out


@dataclass(frozen=True, slots=True, kw_only=True)
class FcHeadSpec:
    """One head: its layers in plain values, and its tensors by name (None = the layout has no such tensor)."""

    layers: ModelSpec  # shapes of the decoder layers, `num_layers` of them; vocabulary and width are the target's
    prefix: str  # of every name the head owns
    fc: str
    fc_bias: bool
    feature_first: bool  # fc reads (feature, embedding) instead of (embedding, feature)
    embedding_norm: str | None
    feature_norm: str | None
    layer_prefixes: tuple[str, ...]
    first_layer_norm: bool  # layer 0 has an input_layernorm
    final_norm: str | None  # its result is what the head's next step is fed, too


DraftSpec: TypeAlias = ModelSpec | TransformersSpec | Eagle3Spec | FcHeadSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Specs:
    """Those of one engine; no `draft` without a drafter or for n-gram lookup, which has no weights."""

    target: ModelSpec | TransformersSpec
    draft: ModelSpec | TransformersSpec | Eagle3Spec | FcHeadSpec | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Specs:
        # Of a union's members that fit, pydantic takes the one with most of the fields that were written.
        return TypeAdapter(Specs).validate_json(text)


def check_parallel(spec: ModelSpec, size: int) -> None:
    """Raise ValueError unless `size` tensor-parallel ranks can share this model's attention heads.

    Intermediate and vocabulary dimensions may be uneven, so heads are the only limit (but for `can_split`).
    """
    if size > 1 and not spec.can_split:
        raise ValueError(f"tensor_parallel_size {size} does not fit a {spec.family} model: it runs on one rank only")
    check_heads(spec.num_heads, spec.num_kv_heads, size)


def check_heads(heads: int, kv_heads: int, size: int) -> None:
    """`check_parallel` for bare head counts (draft heads have no ModelSpec)."""
    legal = [t for t in range(1, heads + 1) if heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)]
    if size not in legal:
        raise ValueError(
            f"tensor_parallel_size {size} does not fit a model with {heads} attention heads and {kv_heads} key-value "
            f"heads: it must divide the attention heads, and divide the key-value heads or be a multiple of them; "
            f"use one of {', '.join(map(str, legal))}"
        )
