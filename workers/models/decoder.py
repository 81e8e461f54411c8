"""The target and the draft model: one config-driven decoder for the Llama, Mistral, Qwen2, Qwen3 and MiMo families.

    Decoder.load(source, spec, tp=SINGLE, device="cpu", dtype=float32, tap_layers=(), kernels=TORCH) -> Decoder
        .plan(metadata, page_size) -> AttentionPlan                    once per step
        .forward(tokens_N, positions_N, plan, kv) -> Hidden            every rank of `tp` together
        .logits(hidden_ND) -> [N, W] float32 shard                     tokens vocab_range[0] .. vocab_range[1] - 1
        .full_logits(hidden_ND) -> [N, V] float32                      gathered over `tp`
        .new_kv_pool(num_slots) -> KVPool                              of this rank's kv heads
    load_layer(weights, prefix, spec, tp) -> DecoderLayer              for draft heads too

Legend: N packed rows (no batch axis), D hidden width, V vocabulary, W = ceil(V / T) columns of a logits shard.
A rank's share is read straight from the checkpoint's slices; the input embedding is replicated, which saves one
all-reduce per step for V * D values of memory.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.kernels.select import TORCH, AttentionPlan, Kernels
from workers.kv_cache import KVPool
from workers.models.checkpoint import MTP_PREFIXES, Weights
from workers.models.layers import (
    SINGLE,
    Attention,
    HeadSplit,
    Mlp,
    TensorParallel,
    VocabHead,
    check_shape,
    gather_vocab,
    shard_vocab,
)
from workers.models.rope import Rope, Rotation
from workers.models.specs import Eagle3Spec, ModelSpec, check_parallel
from workers.types import AttentionMetadata, Hidden

logger = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class DecoderLayer(NamedTuple):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    input_norm_D: Tensor | None  # None: the first layer of an EAGLE head reads x as it is
    attention: Attention
    post_norm_D: Tensor
    mlp: Mlp

    def __call__(self, x_ND: Tensor, rotation: Rotation, plan: AttentionPlan, kv: KVPool, index: int) -> Tensor:
        eps, kernels = self.attention.eps, self.attention.kernels
        normed_ND = x_ND if self.input_norm_D is None else kernels.rms_norm(x_ND, self.input_norm_D, eps)
        delta_ND = self.attention(normed_ND, rotation, plan, kv, index)
        x_ND, normed_ND = kernels.add_rms_norm(x_ND, delta_ND, self.post_norm_D, eps)
        return x_ND + self.mlp(normed_ND)


class Decoder:
    """A decoder-only model over flat packed tokens and paged KV. Build it with `load`."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        tp: TensorParallel,
        embedding_VD: Tensor,
        layers: tuple[DecoderLayer, ...],
        final_norm_D: Tensor,
        head: VocabHead,
        rope: Rope,
        tap_layers: tuple[int, ...],
        kernels: Kernels = TORCH,
    ) -> None:
        self.spec = spec
        self.tp = tp
        self.device = embedding_VD.device
        self.dtype = embedding_VD.dtype
        self.heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, tp)
        self.vocab_range = (head.start, head.end)
        self.tap_layers = tap_layers
        self.kernels = kernels
        self._embedding_VD = embedding_VD
        self._layers = layers
        self._final_norm_D = final_norm_D
        self._head = head
        self._rope = rope

    @staticmethod
    @torch.inference_mode()
    def load(
        source: Path | str | Weights,
        spec: ModelSpec,
        tp: TensorParallel = SINGLE,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        tap_layers: tuple[int, ...] = (),
        kernels: Kernels = TORCH,
    ) -> Decoder:
        """Read this rank's share of a checkpoint folder.

        Args:
            source: the folder, or Weights already opened with the same dtype and device.
            tap_layers: capture the residual stream before these layers (0 .. L), for EAGLE-3.
            kernels: what attention runs on.

        Raises:
            ValueError: tp.size does not fit the heads; a tap outside the model; a missing or unknown tensor, named.
        """
        check_parallel(spec, tp.size)
        for tap in tap_layers:
            if not 0 <= tap <= spec.num_layers:
                raise ValueError(f"feature layer {tap} is outside a model of {spec.num_layers} layers")
        weights = source if isinstance(source, Weights) else Weights(source, dtype, device)
        for name in (_EMBEDDING, *(() if spec.tie_embeddings and not weights.has(_HEAD) else (_HEAD,))):
            check_shape(weights, name, (spec.vocab_size, spec.hidden_size), "vocab_size and hidden_size")
        embedding_VD = weights.get(_EMBEDDING)
        layers = tuple(
            load_layer(weights, f"model.layers.{index}.", spec, tp, window=window, kernels=kernels)
            for index, window in enumerate(spec.windows)
        )
        final_norm_D = weights.get("model.norm.weight")
        if spec.tie_embeddings and not has_own_head(weights, _HEAD, _EMBEDDING, spec.vocab_size, tp):
            head = VocabHead.tied(embedding_VD, tp)
        else:
            head = VocabHead.load(weights, _HEAD, spec.vocab_size, tp)
        weights.finish(allowed=lambda name: _is_no_part(name, spec))
        return Decoder(
            spec=spec,
            tp=tp,
            embedding_VD=embedding_VD,
            layers=layers,
            final_norm_D=final_norm_D,
            head=head,
            rope=Rope(spec.rope, dtype, device),
            tap_layers=tuple(tap_layers),
            kernels=kernels,
        )

    def plan(self, metadata: AttentionMetadata, page_size: int, into: Any = None) -> AttentionPlan:
        """Prepare one step's attention for this model's heads, windows, dtype and device, see `Kernels.plan`."""
        return self.kernels.plan(
            metadata,
            page_size,
            windows=self.spec.windows,
            group_size=self.heads.num_heads // self.heads.num_kv_heads,
            dtype=self.dtype,
            device=self.device,
            into=into,
        )

    @property
    def can_be_captured(self) -> bool:
        """A forward pass asks nothing of the host."""
        return True

    def new_kv_pool(self, num_slots: int) -> KVPool:
        """A pool for this rank's key-value heads; num_slots = pages (the null page included) * page_size."""
        spec = self.spec
        kv_heads = self.heads.num_kv_heads
        return KVPool(spec.num_layers, num_slots, kv_heads, spec.head_dim, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, tokens_N: Tensor, positions_N: Tensor, plan: AttentionPlan, kv: KVPool) -> Hidden:
        """One packed pass; writes every row's key and value into `kv` and attends as the plan says.

        Args:
            tokens_N, positions_N: int32 or int64 [N] on the model's device.

        Returns:
            Hidden: final_ND after the final norm; taps_N3D in tap order, or None without taps. Equal on every rank.
        """
        rotation = self._rope(positions_N)
        captured: dict[int, Tensor] = {}
        x_ND = F.embedding(tokens_N, self._embedding_VD)
        for index, layer in enumerate(self._layers):
            if index in self.tap_layers:
                captured[index] = x_ND
            x_ND = layer(x_ND, rotation, plan, kv, index)
        captured[len(self._layers)] = x_ND
        taps_N3D = torch.cat([captured[tap] for tap in self.tap_layers], dim=-1) if self.tap_layers else None
        return Hidden(self.kernels.rms_norm(x_ND, self._final_norm_D, self.spec.rms_norm_eps), taps_N3D)

    @torch.inference_mode()
    def logits(self, hidden_ND: Tensor) -> Tensor:
        """float32 [N, W] logits of this rank's tokens; columns past the vocabulary's end (if any) are -inf."""
        return self._head(hidden_ND)

    @torch.inference_mode()
    def full_logits(self, hidden_ND: Tensor) -> Tensor:
        """float32 [N, V] logits on every rank; a collective over `tp`."""
        return gather_vocab(self._head(hidden_ND), self.tp, self.spec.vocab_size)


def load_layer(
    weights: Weights,
    prefix: str,
    spec: ModelSpec | Eagle3Spec,
    tp: TensorParallel,
    *,
    window: int | None = None,
    has_input_norm: bool = True,
    kernels: Kernels = TORCH,
) -> DecoderLayer:
    """This rank's share of the decoder layer whose tensors start with `prefix`. ValueError names one that is missing
    or misshapen."""
    return DecoderLayer(
        input_norm_D=weights.get(f"{prefix}input_layernorm.weight") if has_input_norm else None,
        attention=load_attention(weights, f"{prefix}self_attn.", spec, tp, window=window, kernels=kernels),
        post_norm_D=weights.get(f"{prefix}post_attention_layernorm.weight"),
        mlp=load_mlp(weights, f"{prefix}mlp.", spec, tp, kernels=kernels),
    )


def load_attention(
    weights: Weights,
    prefix: str,
    spec: ModelSpec | Eagle3Spec,
    tp: TensorParallel,
    *,
    in_width: int | None = None,
    window: int | None = None,
    kernels: Kernels = TORCH,
) -> Attention:
    """This rank's heads of the attention whose tensors start with `prefix`. in_width: None = the hidden width."""
    return Attention.load(
        weights,
        prefix,
        heads=HeadSplit.of(spec.num_heads, spec.num_kv_heads, tp),
        head_dim=spec.head_dim,
        in_width=in_width or spec.hidden_size,
        out_width=spec.hidden_size,
        qkv_bias=spec.qkv_bias,
        o_bias=spec.o_bias,
        qk_norm=spec.qk_norm,
        eps=spec.rms_norm_eps,
        window=window,
        tp=tp,
        kernels=kernels,
    )


def has_own_head(weights: Weights, head: str, embedding: str, vocab_size: int, tp: TensorParallel) -> bool:
    """Whether a checkpoint whose configuration ties head and embedding stores a head that is not the embedding.

    Then the configuration is wrong and the stored head counts, as in transformers. Each rank compares its own rows:
    where those are equal, it does not matter to it which of the two it multiplies with.
    """
    start, end, _ = shard_vocab(vocab_size, tp)
    if not weights.has(head) or weights.are_equal(head, embedding, start, end):
        return False
    logger.info("%s says tie_word_embeddings, but stores another %s: that is used", weights.path, head)
    return True


def load_mlp(
    weights: Weights, prefix: str, spec: ModelSpec | Eagle3Spec, tp: TensorParallel, *, kernels: Kernels = TORCH
) -> Mlp:
    """This rank's share of the MLP whose tensors start with `prefix`."""
    return Mlp.load(
        weights,
        prefix,
        width=spec.hidden_size,
        inner_width=spec.intermediate_size,
        bias=spec.mlp_bias,
        tp=tp,
        kernels=kernels,
    )


def is_legacy(name: str) -> bool:
    """Buffers that old checkpoints stored although they follow from the config."""
    return name.endswith("rotary_emb.inv_freq")


def _is_no_part(name: str, spec: ModelSpec) -> bool:
    """What a checkpoint may hold beside the decoder: old buffers, prediction layers."""
    is_mtp = spec.num_mtp_layers > 0 and name.startswith(MTP_PREFIXES)
    return is_legacy(name) or is_mtp
