"""The target and the draft model: one configurable decoder for the families of `config_json.SUPPORTED_ARCHITECTURES`.

A layer is a mixer, which reads other rows, and an MLP.
Legend: N packed rows (no batch axis), D hidden width, V vocabulary, W = ceil(V / T) columns of a logits shard.
Each rank reads only its slices of the checkpoint. The input embedding is replicated, which saves one all-reduce per
step at the cost of V * D values of memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.kernels.pointwise import Rotation
from workers.kernels.select import AttentionPlan, DeltaPlan
from workers.kv_cache import KVPool
from workers.models.base import BaseDecoder
from workers.models.checkpoint import Weights
from workers.models.delta import GatedDelta
from workers.models.latent import LatentAttention
from workers.models.layers import (
    Attention,
    HeadSplit,
    Mlp,
    RankWeights,
    TensorParallel,
    VocabHead,
    check_shape,
    norm_weight,
    shard_vocab,
)
from workers.models.moe import Moe
from workers.models.rope import Rope
from workers.models.specs import ModelSpec
from workers.types import AttentionMetadata, Hidden

logger = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_EYES = tuple(
    f"{prefix}{name}."
    for prefix in ("", "model.")
    for name in ("visual", "vision_tower", "mm_projector", "multi_modal_projector")
)
"""Prefixes of what a Qwen3.5, a Kimi-K2.5 and a Mistral-Small-3.1 see with."""


class DecoderLayer:
    """x += mixer(norm(x)); x += mlp(norm(x)).

    It reads this rank's share of the tensors whose names start with `prefix`. Raises ValueError for one that is missing
    or has another shape. has_input_norm: False in the first layer of an EAGLE head. is_delta: the mixer is a gated
    delta net instead of attention. is_dense: it has an MLP, whatever other layers have.
    """

    def __init__(
        self,
        weights: RankWeights,
        prefix: str,
        spec: ModelSpec,
        *,
        window: int | None = None,
        has_input_norm: bool = True,
        is_delta: bool = False,
        is_dense: bool = False,
    ) -> None:
        self.input_norm_D = norm_weight(weights, f"{prefix}input_layernorm.weight", spec) if has_input_norm else None
        self.mixer: Attention | LatentAttention | GatedDelta
        if is_delta:
            self.mixer = GatedDelta(weights, f"{prefix}linear_attn.", spec)
        elif spec.latent is not None:
            self.mixer = LatentAttention(weights, f"{prefix}self_attn.", spec)
        else:
            self.mixer = Attention(weights, f"{prefix}self_attn.", spec, window=window)
        self.post_norm_D = norm_weight(weights, f"{prefix}post_attention_layernorm.weight", spec)
        self.mlp = (Mlp if spec.moe is None or is_dense else Moe)(weights, f"{prefix}mlp.", spec)

    @property
    def attention(self) -> Attention:
        """The mixer of a layer with keys and values."""
        assert isinstance(self.mixer, Attention)
        return self.mixer

    def __call__(self, x_ND: Tensor, rotation: Rotation, plan: Any, kv: KVPool, index: int) -> Tensor:
        """Run the layer on [N, D]. plan: the mixer's. index: its layer among those of the same mixer, in the pool."""
        eps, kernels = self.mixer.eps, self.mixer.kernels
        normed_ND = x_ND if self.input_norm_D is None else kernels.rms_norm(x_ND, self.input_norm_D, eps)
        mixed_ND = self.mixer(normed_ND, rotation, plan, kv, index)
        x_ND, normed_ND = kernels.add_rms_norm(x_ND, mixed_ND, self.post_norm_D, eps)
        return x_ND + self.mlp(normed_ND)


class HybridPlan(NamedTuple):
    """One step's plan of a model with both kinds of mixers."""

    attention: AttentionPlan
    delta: DeltaPlan

    @property
    def write_slots_N(self) -> Tensor:
        """See `AttentionPlan`."""
        return self.attention.write_slots_N


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
        delta_layers = frozenset(spec.delta.layers if spec.delta else ())
        dense_layers = frozenset(spec.moe.dense_layers if spec.moe else ())
        self._layers = tuple(
            DecoderLayer(
                weights,
                f"model.layers.{index}.",
                spec,
                window=window,
                is_delta=index in delta_layers,
                is_dense=index in dense_layers,
            )
            for index, window in enumerate(spec.windows)
        )
        self._final_norm_D = norm_weight(weights, "model.norm.weight", spec)
        if spec.tie_embeddings and not has_own_head(weights, _HEAD, _EMBEDDING, spec.vocab_size, tp):
            self._head = VocabHead.tied(self._embedding_VD, tp, self.kernels)
        else:
            self._head = VocabHead.load(weights, _HEAD, spec.vocab_size, tp, self.kernels)
        self._rope = Rope(spec.rope, self.dtype, self.device, self.kernels.rotation)
        weights.finish(allowed=lambda name: _is_ignored(name, spec))

    def plan(
        self,
        metadata: AttentionMetadata,
        page_size: int,
        into: Any = None,
        *,
        windows: Sequence[int | None] | None = None,
    ) -> AttentionPlan:
        """See `PagedModel.plan`."""
        if self.spec.delta is None:
            return super().plan(metadata, page_size, into, windows=windows)
        attention, delta = into or (None, None)
        attention = super().plan(metadata, page_size, attention, windows=windows)
        return HybridPlan(attention, self.kernels.delta_plan(metadata, self.device, delta))

    @torch.inference_mode()
    def fold_rows(self, row_A: Tensor, plan: DeltaPlan, kv: KVPool) -> None:
        """See `BaseDecoder.fold_rows`."""
        assert kv.states is not None
        nets = [layer.mixer for layer in self._layers if isinstance(layer.mixer, GatedDelta)]
        for index, net in enumerate(nets):
            net.fold(row_A, plan, kv.states, index)

    @torch.inference_mode()
    def forward(self, tokens_N: Tensor, positions_N: Tensor, plan: AttentionPlan, kv: KVPool) -> Hidden:
        """See `BaseDecoder.forward`."""
        rotation = self._rope(positions_N)
        captured: dict[int, Tensor] = {}
        x_ND = F.embedding(tokens_N, self._embedding_VD)
        attention, delta = plan if isinstance(plan, HybridPlan) else (plan, None)
        num_delta = 0
        for index, layer in enumerate(self._layers):
            if index in self.tap_layers:
                captured[index] = x_ND
            if isinstance(layer.mixer, GatedDelta):
                x_ND = layer(x_ND, rotation, delta, kv, num_delta)
                num_delta += 1
            else:
                x_ND = layer(x_ND, rotation, attention, kv, index - num_delta)
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
    """Return True for tensors that are not part of the decoder: legacy buffers, MTP layers, and a text model's eyes."""
    is_mtp = spec.num_mtp_layers > 0 and name.startswith(spec.mtp_prefixes)
    return is_legacy(name) or is_mtp or name.startswith(_EYES)
