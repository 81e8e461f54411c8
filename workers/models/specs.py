"""Model descriptions in plain values, read from config.json where an engine starts and sent to its ranks.

Reading them needs transformers, whose import takes 3 s and 190 MB; so the ranks get them as JSON.

    ModelSpec           a target or draft model, read by `workers.models.readers`
    TransformersSpec    a model that runs in transformers' own class, read by `workers.models.transformers_spec`
    Eagle3Spec          an EAGLE-3 head, read by `workers.models.eagle3_format`
    FcHeadSpec          an EAGLE-1/2 head or MTP layers, read by `workers.models.fc_head_format`
    BlockSpec           a DSpark or DFlash head, read by `workers.models.block_format`
    Specs               the descriptions of one engine, as JSON on the way to its ranks
    latent_shapes(latent, ..)       the matrices of latent attention
    check_parallel(spec, size)      ValueError unless `size` ranks can share the model

Every description of a drafter says the same things of it: `layers`, the shapes of its decoder layers; `tap_layers`,
where the target's states are captured for it; `draft_vocab_size`; `matrix_shapes`; `max_depth`, how many tokens one
pass drafts (None = as many as a tree has levels, in one pass or in several); and `has_marginals`, whether what it says
of a depth is the same below every node.

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import ClassVar, TypeAlias

from pydantic import TypeAdapter

Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""The shapes of tensors, by their names in a checkpoint."""


MTP_PREFIXES = ("mtp.", "model.mtp_layers.")
"""Prefixes of the MTP layers in a target's checkpoint, which the drafter reads (`workers.models.fc_head_format`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Inverse frequencies (exact float32 values), and the factor on cos and sin (YaRN).

    The first 2 len(inv_freq) widths of a head are rotated, mostly all of them.
    """

    inv_freq: tuple[float, ...]
    scaling: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """The layers with a gated delta net instead of attention (`workers.models.delta`), in a hybrid model.

    A key head serves num_value_heads / num_key_heads consecutive value heads.
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int  # width of a head
    value_dim: int

    @property
    def num_channels(self) -> int:
        """Values of a row's queries, keys and values, which a convolution mixes with those of the rows before it."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def state_items(self, ranks: int = 1) -> int:
        """Return the float32 values of one request's state on one rank."""
        return len(self.layers) * self.num_value_heads * self.key_dim * self.value_dim // ranks

    def input_items(self, ranks: int = 1) -> int:
        """Return the values that the convolutions of one request remember on one rank: three rows."""
        return len(self.layers) * 3 * self.num_channels // ranks

    def stash_items(self, ranks: int = 1) -> int:
        """Return the values that one row of a tree keeps on one rank until its verdict."""
        return len(self.layers) * (self.num_channels + 2 * self.num_value_heads) // ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (`workers.models.latent`): one latent of a token stands for the keys of all heads.

    In the KV cache it is one key-value head, which is `ModelSpec.head_dim` = rank + rope_dim wide.
    """

    query_rank: int | None  # width of the queries' own latent; None = they have none
    rank: int  # width of the latent without its rotated part
    plain_dim: int  # widths of a query head that are not rotated
    rope_dim: int  # and that are
    value_dim: int  # of a head
    scale: float  # of scores, with the factor that YaRN adds
    is_interleaved: bool  # a rotation's two widths are neighbours


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """DeepSeek-V3's choice of experts, by the sigmoid of scores: first of groups, then of experts within them."""

    num_groups: int
    num_chosen_groups: int
    scaling: float  # of the chosen experts' weights


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """The mixture of experts in place of an MLP (`workers.models.moe`)."""

    num_experts: int
    num_chosen: int  # experts of a row
    inner_size: int
    shared_size: int  # of the expert that every row uses
    router: RouterSpec | None = None  # None = softmax, and a gate for the shared expert
    dense_layers: tuple[int, ...] = ()  # those that have an MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only model.

    `rms_norm_eps` to `moe` describe the layers of `workers.models.decoder`. A `TransformersSpec` leaves them empty.
    """

    family: str  # of `config_json.SUPPORTED_ARCHITECTURES`; else transformers' model_type
    num_layers: int
    num_mtp_layers: int = 0  # multi-token prediction layers in the same checkpoint
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of an MLP; if no layer has one, of all experts of a row together
    vocab_size: int
    rms_norm_eps: float = 0.0
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    zero_centred_norms: bool = False  # those of the residual stream and of heads multiply by 1 + weight
    attention_gate: bool = False  # sigmoid of q_proj's other half multiplies each head's output
    rope: RopeSpec = RopeSpec(inv_freq=())
    delta: DeltaSpec | None = None
    latent: LatentSpec | None = None
    moe: MoeSpec | None = None
    windows: tuple[int | None, ...]  # per layer; None = full attention
    max_position_embeddings: int  # default of max_model_len
    max_scaled_positions: int  # upper limit of max_model_len, with rope scaling
    dtype: str  # of the checkpoint: float32, bfloat16 or float16
    eos_token_ids: tuple[int, ...]
    can_split: bool = True  # over tensor-parallel ranks
    expert_share: float = 1.0  # share of the experts that a row uses in a mixture of experts

    tap_layers: ClassVar[tuple[int, ...]] = ()
    max_depth: ClassVar[int | None] = None
    has_marginals: ClassVar[bool] = False

    @property
    def layers(self) -> ModelSpec:
        """The model itself."""
        return self

    @property
    def draft_vocab_size(self) -> int:
        """Columns of its logits, as a drafter."""
        return self.vocab_size

    @property
    def num_kv_layers(self) -> int:
        """Layers that have keys and values."""
        return self.num_layers - (len(self.delta.layers) if self.delta else 0)

    @property
    def num_parts(self) -> int:
        """Parts of a token's entry in the KV cache: a key and a value, or a latent, which is both."""
        return 1 if self.latent else 2

    @property
    def mtp_prefixes(self) -> tuple[str, ...]:
        """Prefixes of its MTP layers, which DeepSeek-V3 numbers behind the others."""
        return MTP_PREFIXES + tuple(f"model.layers.{self.num_layers + i}." for i in range(self.num_mtp_layers))

    @property
    def can_be_captured(self) -> bool:
        """Whether CUDA graphs can hold a forward pass: all of its shapes follow from the number of rows."""
        return self.latent is None and self.moe is None

    def matrix_shapes(self) -> Shapes:
        """Return the matrices of its checkpoint."""
        shapes: Shapes = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes | _layer_shapes(self, "model.layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSpec(ModelSpec):
    """A model that runs in transformers' own class."""

    class_name: str
    tp_plan: tuple[tuple[str, str], ...]  # name pattern within the base model -> style; empty: one rank only
    layers_name: str  # the list of layers, relative to the base model
    attention_name: str  # the first layer's attention, likewise
    has_experts: bool  # all experts of a layer in one parameter
    copies_from_host: bool  # a forward pass creates tensors from host values
    has_taps: bool  # layers pass on one residual stream [1, N, D], which EAGLE-3 can read


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec:
    """An EAGLE-3 or P-EAGLE head. H = hidden width, D = target_hidden_size."""

    layers: ModelSpec  # the first reads embedding and feature, the others are plain; the vocabulary is the target's
    target_hidden_size: int
    draft_vocab_size: int
    tap_layers: tuple[int, ...]  # residual stream captured BEFORE these target layers, mostly low, mid and high
    norm_before_residual: bool  # the residual is hidden_norm(g) instead of g
    input_norm: bool  # one RMSNorm over all features before fc
    fc_norm: bool  # one RMSNorm per D-wide feature before fc
    norm_output: bool  # the next level's feature is norm(out) instead of out
    mask_token_id: int | None = None  # of P-EAGLE, which drafts several tokens in one pass; None = EAGLE-3
    max_depth: int | None = None  # tokens that a pass of P-EAGLE was trained to draft

    @property
    def has_marginals(self) -> bool:
        """Return whether the distribution at a depth does not depend on the token before it."""
        return self.mask_token_id is not None

    def matrix_shapes(self) -> Shapes:
        """Return the matrices of its checkpoint, without an embedding, which may be the target's."""
        hidden = self.layers.hidden_size
        shapes: Shapes = {"fc.weight": (hidden, len(self.tap_layers) * self.target_hidden_size)}
        shapes |= _layer_shapes(self.layers, "layers", first_input=2 * hidden)
        return shapes | {"lm_head.weight": (self.draft_vocab_size, hidden)}


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

    tap_layers: ClassVar[tuple[int, ...]] = ()
    max_depth: ClassVar[int | None] = None
    has_marginals: ClassVar[bool] = False

    @property
    def draft_vocab_size(self) -> int:
        """Columns of its logits."""
        return self.layers.vocab_size

    def matrix_shapes(self) -> Shapes:
        """Return the matrices of its checkpoint, without an embedding and a vocabulary head."""
        hidden = self.layers.hidden_size
        return {f"{self.fc}.weight": (hidden, 2 * hidden)} | _layer_shapes(self.layers, "layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """A DSpark or DFlash head, which drafts a block of tokens in one pass. H = hidden width, D = target_hidden_size."""

    layers: ModelSpec  # Qwen3 layers; the vocabulary is the target's
    target_hidden_size: int
    draft_vocab_size: int
    tap_layers: tuple[int, ...]  # residual stream captured BEFORE these target layers
    block_size: int  # slots of a pass: the anchor, then mask tokens
    from_anchor: bool  # a slot predicts the token behind its own, and the anchor's slot predicts, too; else its own
    mask_token_id: int
    is_causal: tuple[bool, ...]  # per layer: a slot sees no later slots of its block
    markov_rank: int  # of the bias that a token puts on the logits of its child; 0 = no bias
    is_gated: bool  # the bias depends on the slot, too

    @property
    def max_depth(self) -> int:
        """Tokens that one pass drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def has_marginals(self) -> bool:
        """Return whether the distribution at a depth does not depend on the token before it."""
        return not self.markov_rank

    def matrix_shapes(self) -> Shapes:
        """Return the matrices of its checkpoint, without an embedding, which may be the target's."""
        hidden, rank = self.layers.hidden_size, self.markov_rank
        shapes: Shapes = {"fc.weight": (hidden, len(self.tap_layers) * self.target_hidden_size)}
        if rank:
            shapes["markov_head.markov_w1.weight"] = (self.layers.vocab_size, rank)
            shapes["markov_head.markov_w2.weight"] = (self.draft_vocab_size, rank)
        if self.is_gated:
            shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
        if self.draft_vocab_size < self.layers.vocab_size:
            shapes["lm_head.weight"] = (self.draft_vocab_size, hidden)
        return shapes | _layer_shapes(self.layers, "layers")


DraftSpec: TypeAlias = ModelSpec | TransformersSpec | Eagle3Spec | FcHeadSpec | BlockSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Specs:
    """The model descriptions of one engine. `draft` is None without a drafter and for n-gram lookup."""

    target: ModelSpec | TransformersSpec
    draft: DraftSpec | None = None

    def to_json(self) -> str:
        """Serialize for another process."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Specs:
        """Parse the result of `to_json`."""
        # Of several matching union members, pydantic chooses the one with the most fields set.
        return TypeAdapter(Specs).validate_json(text)


def _layer_shapes(spec: ModelSpec, prefix: str, first_input: int | None = None) -> Shapes:
    """Return the matrix shapes of decoder layers. first_input: input width of the first layer's attention."""
    heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inner, delta = spec.hidden_size, spec.intermediate_size, spec.delta
    shapes: Shapes = {}
    for number in range(spec.num_layers):
        wide = first_input if first_input is not None and number == 0 else hidden
        has_experts = spec.moe and number not in spec.moe.dense_layers
        layer = _moe_shapes(spec.moe, hidden) if spec.moe and has_experts else _mlp_shapes("mlp", inner, hidden)
        if delta is not None and number in delta.layers:
            values = delta.num_value_heads * delta.value_dim
            layer |= {
                "linear_attn.in_proj_qkv": (delta.num_channels, hidden),
                "linear_attn.in_proj_z": (values, hidden),
                "linear_attn.in_proj_b": (delta.num_value_heads, hidden),
                "linear_attn.in_proj_a": (delta.num_value_heads, hidden),
                "linear_attn.out_proj": (hidden, values),
            }
        elif spec.latent:
            own = latent_shapes(spec.latent, spec.num_heads, hidden)
            layer |= {f"self_attn.{name}": shape for name, shape in own.items()}
        else:
            layer |= {
                "self_attn.q_proj": (heads * (2 if spec.attention_gate else 1), wide),
                "self_attn.k_proj": (kv, wide),
                "self_attn.v_proj": (kv, wide),
                "self_attn.o_proj": (hidden, heads),
            }
        shapes |= {f"{prefix}.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def _mlp_shapes(name: str, inner: int, hidden: int) -> Shapes:
    return {
        f"{name}.gate_proj": (inner, hidden),
        f"{name}.up_proj": (inner, hidden),
        f"{name}.down_proj": (hidden, inner),
    }


def latent_shapes(latent: LatentSpec, num_heads: int, hidden: int) -> Shapes:
    """Return the matrices of a layer's latent attention, by their names within it."""
    queries = num_heads * (latent.plain_dim + latent.rope_dim)
    shapes: Shapes = {
        "kv_a_proj_with_mqa": (latent.rank + latent.rope_dim, hidden),
        "kv_b_proj": (num_heads * (latent.plain_dim + latent.value_dim), latent.rank),
        "o_proj": (hidden, num_heads * latent.value_dim),
    }
    if latent.query_rank is None:
        return shapes | {"q_proj": (queries, hidden)}
    return shapes | {"q_a_proj": (latent.query_rank, hidden), "q_b_proj": (queries, latent.query_rank)}


def _moe_shapes(moe: MoeSpec, hidden: int) -> Shapes:
    shapes: Shapes = {"mlp.gate": (moe.num_experts, hidden)}
    if moe.router is None:
        shapes["mlp.shared_expert_gate"] = (1, hidden)
    shapes |= _mlp_shapes("mlp.shared_expert" if moe.router is None else "mlp.shared_experts", moe.shared_size, hidden)
    for number in range(moe.num_experts):
        shapes |= _mlp_shapes(f"mlp.experts.{number}", moe.inner_size, hidden)
    return shapes


def check_parallel(spec: DraftSpec, size: int) -> None:
    """Raise ValueError unless `size` tensor-parallel ranks can split this model or head.

    Only the attention heads (and `can_split`) limit the size: other dimensions may be split unevenly.
    """
    layers = spec.layers
    if size > 1 and not layers.can_split:
        raise ValueError(f"tensor_parallel_size {size} does not fit a {layers.family} model: it runs on one rank only")
    heads, kv_heads = layers.num_heads, layers.num_kv_heads
    legal = [t for t in range(1, heads + 1) if heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)]
    if size in legal and layers.delta is not None and layers.delta.num_key_heads % size:
        legal = [t for t in legal if layers.delta.num_key_heads % t == 0]
        raise ValueError(
            f"tensor_parallel_size {size} must divide the {layers.delta.num_key_heads} key heads of a gated delta net; "
            f"use one of {', '.join(map(str, legal))}"
        )
    if size not in legal:
        raise ValueError(
            f"tensor_parallel_size {size} does not fit a model with {heads} attention heads and {kv_heads} key-value "
            f"heads: it must divide the attention heads, and divide the key-value heads or be a multiple of them; "
            f"use one of {', '.join(map(str, legal))}"
        )
