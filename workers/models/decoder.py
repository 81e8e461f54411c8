"""The target and the draft model: one configurable decoder for the Llama, Mistral, Qwen2, Qwen3 and MiMo families.

    Decoder.load(source, spec, tp=SINGLE, device="cpu", dtype=float32, tap_layers=(), kernels=TORCH) -> Decoder
        .plan(metadata, page_size) -> AttentionPlan                    once per step
        .forward(tokens_N, positions_N, plan, kv) -> Hidden            on all ranks of `tp` together
        .logits(hidden_ND) -> [N, W] float32 shard                     tokens vocab_range[0] .. vocab_range[1] - 1
        .full_logits(hidden_ND) -> [N, V] float32                      gathered over `tp`
        .new_kv_pool(num_slots) -> KVPool                              for this rank's key-value heads
    load_layer(weights, prefix, spec, tp) -> DecoderLayer              also for draft heads

Legend: N packed rows (no batch axis), D hidden width, V vocabulary, W = ceil(V / T) columns of a logits shard.
Each rank reads only its slices of the checkpoint. The input embedding is replicated, which saves one all-reduce per
step at the cost of V * D values of memory.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.kernels.pointwise import Rotation
from workers.kernels.select import TORCH, AttentionPlan, Kernels
from workers.kv_cache import KVPool
from workers.models.base import BaseDecoder, check_load
from workers.models.checkpoint import MTP_PREFIXES, Weights
from workers.models.layers import (
    SINGLE,
    Attention,
    HeadSplit,
    Mlp,
    TensorParallel,
    VocabHead,
    check_shape,
    open_weights,
    shard_vocab,
)
from workers.models.rope import Rope
from workers.models.specs import Eagle3Spec, ModelSpec
from workers.types import Hidden

logger = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class DecoderLayer(NamedTuple):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    input_norm_D: Tensor | None  # None: the first layer of an EAGLE head has no input norm
    attention: Attention
    post_norm_D: Tensor
    mlp: Mlp

    def __call__(self, x_ND: Tensor, rotation: Rotation, plan: AttentionPlan, kv: KVPool, index: int) -> Tensor:
        """Run the layer on [N, D]. index: its layer in the KV pool."""
        eps, kernels = self.attention.eps, self.attention.kernels
        normed_ND = x_ND if self.input_norm_D is None else kernels.rms_norm(x_ND, self.input_norm_D, eps)
        delta_ND = self.attention(normed_ND, rotation, plan, kv, index)
        x_ND, normed_ND = kernels.add_rms_norm(x_ND, delta_ND, self.post_norm_D, eps)
        return x_ND + self.mlp(normed_ND)


class Decoder(BaseDecoder):
    """A decoder with our own layers. Construct it with `load`."""

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
        heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, tp)
        super().__init__(spec, tp, heads, embedding_VD, tap_layers, kernels)
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
            source: the folder, or Weights already opened for the same dtype, device and kernels.
            tap_layers: capture the residual stream before these layers (0 .. L), for EAGLE-3.

        Raises:
            ValueError: tp.size does not fit the heads, a tap is outside the model, or a tensor is missing or unknown.
        """
        check_load(spec, tp, tap_layers)
        weights = source if isinstance(source, Weights) else open_weights(source, dtype, device, kernels)
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
        weights.finish(allowed=lambda name: _is_ignored(name, spec))
        return Decoder(
            spec=spec,
            tp=tp,
            embedding_VD=embedding_VD,
            layers=layers,
            final_norm_D=final_norm_D,
            head=head,
            rope=Rope(spec.rope, dtype, device, kernels.rotation),
            tap_layers=tuple(tap_layers),
            kernels=kernels,
        )

    @torch.inference_mode()
    def forward(self, tokens_N: Tensor, positions_N: Tensor, plan: AttentionPlan, kv: KVPool) -> Hidden:
        """See `BaseDecoder.forward`."""
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
        """See `BaseDecoder.logits`."""
        return self._head(hidden_ND)


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
    """Read this rank's share of the decoder layer whose tensor names start with `prefix`.

    Raises ValueError for a tensor that is missing or has another shape.
    """
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
    """Read this rank's heads of an attention layer. in_width: None = the hidden width."""
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
    """Return True if a checkpoint with tied embeddings in its configuration stores a different head.

    Then the configuration is wrong, and the stored head is used, as in transformers. Each rank compares only its rows;
    if they are equal, either tensor gives the same result.
    """
    start, end, _ = shard_vocab(vocab_size, tp)
    if not weights.has(head) or weights.are_equal(head, embedding, start, end):
        return False
    logger.info("%s sets tie_word_embeddings, but stores a different %s, which is used", weights.path, head)
    return True


def load_mlp(
    weights: Weights, prefix: str, spec: ModelSpec | Eagle3Spec, tp: TensorParallel, *, kernels: Kernels = TORCH
) -> Mlp:
    """Read this rank's share of an MLP."""
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
    """Return True for buffers that old checkpoints store although the configuration determines them."""
    return name.endswith("rotary_emb.inv_freq")


def _is_ignored(name: str, spec: ModelSpec) -> bool:
    """Return True for tensors that are not part of the decoder: legacy buffers and MTP layers."""
    is_mtp = spec.num_mtp_layers > 0 and name.startswith(MTP_PREFIXES)
    return is_legacy(name) or is_mtp
