"""What all heads that read the target's features have in common: their slots, their vocabulary, their place.

An entry is a pair, (token j, feature of token j - 1), and lies in KV slot j with rotary position j - 1. Token 0 has no
feature before it: slot 0 stays empty and hidden.
Legend: M packed rows, V vocabulary, H draft hidden width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from drafter.tree.frontier import DraftVocabulary
from workers.kernels.select import AttentionPlan, Kernels
from workers.kv_cache import KVPool
from workers.models.checkpoint import Weights
from workers.models.layers import HeadSplit, TensorParallel
from workers.models.rope import Rope
from workers.models.specs import Eagle3Spec, ModelSpec
from workers.models.transformers_load import text_name
from workers.types import AttentionMetadata

_FIRST_SLOT = 1


class FeatureHead(ABC):
    """One rank's share of a head. `layers`: the shapes of its decoder layers."""

    def __init__(
        self,
        layers: ModelSpec | Eagle3Spec,
        *,
        embedding_VH: Tensor,
        target_ids: Tensor | None,
        tp: TensorParallel,
        kernels: Kernels,
    ) -> None:
        self.tp = tp
        self.kernels = kernels
        self.device = embedding_VH.device
        self.dtype = embedding_VH.dtype
        self.width = layers.hidden_size  # of the features, H
        self.vocab = DraftVocabulary(target_size=layers.vocab_size, target_ids=target_ids, kernels=kernels)
        self.heads = HeadSplit.of(layers.num_heads, layers.num_kv_heads, tp)
        self._layer_shapes = layers
        self._embedding_VH = embedding_VH
        self._rope = Rope(layers.rope, self.dtype, self.device)

    @abstractmethod
    def forward(
        self, tokens_M: Tensor, features_MH: Tensor, positions_M: Tensor, plan: AttentionPlan, kv: KVPool
    ) -> Tensor:
        """One packed pass; writes every row's key and value into `kv`.

        Args:
            tokens_M: int32 or int64 target token ids.
            features_MH: what the target says of the token before each, or the parent's result; any float dtype.
            positions_M: rotary positions, one less than the tokens' own.

        Returns:
            [M, H] features for the rows' children and input of `logits`; equal on every rank.
        """

    @abstractmethod
    def logits(self, hidden_MH: Tensor) -> Tensor:
        """float32 [M, draft_vocab] for rows of `forward`'s result, equal on every rank; a collective over `tp`."""

    def plan(self, metadata: AttentionMetadata, page_size: int, into: Any = None) -> AttentionPlan:
        """Prepare one step's attention, see `Kernels.plan`; slot 0 is hidden."""
        return self.kernels.plan(
            metadata,
            page_size,
            windows=self._layer_shapes.windows,
            group_size=self.heads.num_heads // self.heads.num_kv_heads,
            first_slot=_FIRST_SLOT,
            dtype=self.dtype,
            device=self.device,
            into=into,
        )

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one token's entry takes on this rank."""
        layers = self._layer_shapes
        return KVPool.bytes_per_slot(layers.num_layers, self.heads.num_kv_heads, layers.head_dim, self.dtype)

    def new_kv_pool(self, num_slots: int) -> KVPool:
        """A pool for this rank's key-value heads; num_slots = pages (the null page included) * page_size."""
        layers = self._layer_shapes
        kv_heads = self.heads.num_kv_heads
        return KVPool(layers.num_layers, num_slots, kv_heads, layers.head_dim, self.dtype, self.device)


def name_in_target(target: Weights, name: str) -> str:
    """What a target calls a tensor of its text model, which has a prefix beside vision or audio towers (Gemma-3,
    Mistral-Small-3.x); `name` itself if it is not stored, which its reader reports."""
    return next((stored for stored in target.names() if text_name(stored) == name), name)
