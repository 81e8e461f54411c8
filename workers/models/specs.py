"""Model descriptions in plain values, read from config.json where an engine starts and sent to its ranks.

Reading them needs transformers, whose import takes 3 s and 190 MB; so the ranks get them as JSON.

    ModelSpec           a target or draft model, read by `workers.models.readers`
    TransformersSpec    a model that runs in transformers' own class, read by `workers.models.transformers_spec`
    Eagle3Spec          an EAGLE-3 head, read by `workers.models.eagle3_format`
    FcHeadSpec          an EAGLE-1/2 head or MTP layers, read by `workers.models.fc_head_format`
    Specs               the descriptions of one engine, as JSON on the way to its ranks
    check_parallel(spec, size)      ValueError unless `size` ranks can share the model

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TypeAlias

from pydantic import TypeAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Inverse frequencies (head_dim / 2 exact float32 values), and the factor on cos and sin (YaRN)."""

    inv_freq: tuple[float, ...]
    scaling: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only model.

    `rms_norm_eps`, the biases, `qk_norm` and `rope` describe the layers of `workers.models.decoder`. A
    `TransformersSpec` leaves them empty.
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
    max_position_embeddings: int  # default of max_model_len
    max_scaled_positions: int  # upper limit of max_model_len, with rope scaling
    dtype: str  # of the checkpoint: float32, bfloat16 or float16
    eos_token_ids: tuple[int, ...]
    can_split: bool = True  # over tensor-parallel ranks
    expert_share: float = 1.0  # share of the experts that a row uses in a mixture of experts


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSpec(ModelSpec):
    """A model that runs in transformers' own class."""

    class_name: str
    tp_plan: tuple[tuple[str, str], ...]  # name pattern within the base model -> style
    attention_name: str  # the first layer's attention, relative to the base model
    has_experts: bool  # all experts of a layer in one parameter
    copies_from_host: bool  # a forward pass creates tensors from host values
    has_taps: bool  # layers pass on one residual stream [1, N, D], which EAGLE-3 can read


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec:
    """An EAGLE-3 head. H = hidden_size, D = target_hidden_size."""

    num_layers: int  # the first reads embedding and feature, the others are plain decoder layers
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
    qk_norm: bool  # only set in speculators' format; elsewhere the tensors decide
    windows: tuple[int | None, ...]  # per layer; None = full attention
    tap_layers: tuple[int, int, int]  # residual stream captured BEFORE these target layers, low, mid, high
    norm_before_residual: bool  # the residual is hidden_norm(g) instead of g
    input_norm: bool  # one RMSNorm over the 3 D features before fc
    fc_norm: bool  # one RMSNorm per D-wide feature before fc
    norm_output: bool  # the next level's feature is norm(out) instead of out


@dataclass(frozen=True, slots=True, kw_only=True)
class FcHeadSpec:
    """An EAGLE-1/2 or MTP head: its layers, and its tensors by name (None = not part of the layout)."""

    layers: ModelSpec  # the decoder layers; vocabulary and width are the target's
    prefix: str  # of all its tensor names
    fc: str
    fc_bias: bool
    feature_first: bool  # fc reads (feature, embedding) instead of (embedding, feature)
    embedding_norm: str | None
    feature_norm: str | None
    layer_prefixes: tuple[str, ...]
    first_layer_norm: bool  # layer 0 has an input_layernorm
    final_norm: str | None  # its output is also the next level's feature


DraftSpec: TypeAlias = ModelSpec | TransformersSpec | Eagle3Spec | FcHeadSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Specs:
    """The model descriptions of one engine. `draft` is None without a drafter and for n-gram lookup."""

    target: ModelSpec | TransformersSpec
    draft: ModelSpec | TransformersSpec | Eagle3Spec | FcHeadSpec | None = None

    def to_json(self) -> str:
        """Serialize for another process."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Specs:
        """Parse the result of `to_json`."""
        # Of several matching union members, pydantic chooses the one with the most fields set.
        return TypeAdapter(Specs).validate_json(text)


def check_parallel(spec: ModelSpec, size: int) -> None:
    """Raise ValueError unless `size` tensor-parallel ranks can split this model.

    Only the attention heads (and `can_split`) limit the size: other dimensions may be split unevenly.
    """
    if size > 1 and not spec.can_split:
        raise ValueError(f"tensor_parallel_size {size} does not fit a {spec.family} model: it runs on one rank only")
    check_heads(spec.num_heads, spec.num_kv_heads, size)


def check_heads(heads: int, kv_heads: int, size: int) -> None:
    """Raise ValueError unless `size` tensor-parallel ranks can split these numbers of heads."""
    legal = [t for t in range(1, heads + 1) if heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)]
    if size not in legal:
        raise ValueError(
            f"tensor_parallel_size {size} does not fit a model with {heads} attention heads and {kv_heads} key-value "
            f"heads: it must divide the attention heads, and divide the key-value heads or be a multiple of them; "
            f"use one of {', '.join(map(str, legal))}"
        )
