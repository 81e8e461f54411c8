"""The target and the draft model: one configurable decoder for the Llama, Mistral, Qwen2, Qwen3 and MiMo families.

Legend: N packed rows (no batch axis), D hidden width, V vocabulary, W = ceil(V / T) columns of a logits shard.
Each rank reads only its slices of the checkpoint. The input embedding is replicated, which saves one all-reduce per
step at the cost of V * D values of memory.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.kernels.pointwise import Rotation
from workers.kernels.select import AttentionPlan
from workers.kv_cache import KVPool
from workers.models.base import BaseDecoder
from workers.models.checkpoint import MTP_PREFIXES, Weights
from workers.models.layers import (
    Attention,
    HeadSplit,
    Mlp,
    RankWeights,
    TensorParallel,
    VocabHead,
    check_shape,
    shard_vocab,
)
from workers.models.rope import Rope
from workers.models.specs import ModelSpec
from workers.types import Hidden

logger = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class DecoderLayer:
    """x += attention(norm(x)); x += mlp(norm(x)).

    It reads this rank's share of the tensors whose names start with `prefix`. Raises ValueError for one that is missing
    or has another shape. has_input_norm: False in the first layer of an EAGLE head.
    """

    def __init__(
        self,
        weights: RankWeights,
        prefix: str,
        spec: ModelSpec,
        *,
        window: int | None = None,
        has_input_norm: bool = True,
    ) -> None:
        self.input_norm_D = weights.get(f"{prefix}input_layernorm.weight") if has_input_norm else None
        self.attention = Attention(weights, f"{prefix}self_attn.", spec, window=window)
        self.post_norm_D = weights.get(f"{prefix}post_attention_layernorm.weight")
        self.mlp = Mlp(weights, f"{prefix}mlp.", spec)

    def __call__(self, x_ND: Tensor, rotation: Rotation, plan: AttentionPlan, kv: KVPool, index: int) -> Tensor:
        """Run the layer on [N, D]. index: its layer in the KV pool."""
        eps, kernels = self.attention.eps, self.attention.kernels
        normed_ND = x_ND if self.input_norm_D is None else kernels.rms_norm(x_ND, self.input_norm_D, eps)
        delta_ND = self.attention(normed_ND, rotation, plan, kv, index)
        x_ND, normed_ND = kernels.add_rms_norm(x_ND, delta_ND, self.post_norm_D, eps)
        return x_ND + self.mlp(normed_ND)


class Decoder(BaseDecoder):
    """A decoder with our own layers. Raises ValueError if a tensor is missing or unknown, or has another shape."""

    @torch.inference_mode()
    def __init__(self, weights: RankWeights, spec: ModelSpec, tap_layers: tuple[int, ...] = ()) -> None:
        tp = weights.tp
        for name in (_EMBEDDING, *(() if spec.tie_embeddings and not weights.has(_HEAD) else (_HEAD,))):
            check_shape(weights, name, (spec.vocab_size, spec.hidden_size), "vocab_size and hidden_size")
        heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, tp)
        super().__init__(weights, spec, heads, tap_layers)
        self._embedding_VD = weights.get(_EMBEDDING)
        self._layers = tuple(
            DecoderLayer(weights, f"model.layers.{index}.", spec, window=window)
            for index, window in enumerate(spec.windows)
        )
        self._final_norm_D = weights.get("model.norm.weight")
        if spec.tie_embeddings and not has_own_head(weights, _HEAD, _EMBEDDING, spec.vocab_size, tp):
            self._head = VocabHead.tied(self._embedding_VD, tp)
        else:
            self._head = VocabHead.load(weights, _HEAD, spec.vocab_size, tp)
        self._rope = Rope(spec.rope, self.dtype, self.device, self.kernels.rotation)
        weights.finish(allowed=lambda name: _is_ignored(name, spec))

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


def is_legacy(name: str) -> bool:
    """Return True for buffers that old checkpoints store although the configuration determines them."""
    return name.endswith("rotary_emb.inv_freq")


def _is_ignored(name: str, spec: ModelSpec) -> bool:
    """Return True for tensors that are not part of the decoder: legacy buffers and MTP layers."""
    is_mtp = spec.num_mtp_layers > 0 and name.startswith(MTP_PREFIXES)
    return is_legacy(name) or is_mtp
