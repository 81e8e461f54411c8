"""The base classes of heads that read the target's features.

An entry is a pair, (token j, feature of token j - 1). It is stored in KV slot j with rotary position j - 1. Token 0 has
no feature before it, so slot 0 stays empty and masked.
Legend: M packed rows, V vocabulary, H draft hidden width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter.tree.frontier import DraftVocabulary
from workers.kernels.select import AttentionPlan, Kernels
from workers.kv_cache import KVPool
from workers.models.checkpoint import Weights
from workers.models.layers import HeadSplit, TensorParallel, VocabHead
from workers.models.rope import Rope
from workers.models.specs import Eagle3Spec, ModelSpec
from workers.models.transformers_load import text_name
from workers.types import AttentionMetadata

_FIRST_SLOT = 1


class DraftHead:
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
        self._rope = Rope(layers.rope, self.dtype, self.device, kernels.rotation)

    def plan(
        self,
        metadata: AttentionMetadata,
        page_size: int,
        into: Any = None,
        *,
        windows: Sequence[int | None] | None = None,
    ) -> AttentionPlan:
        """Prepare one step's attention, see `Kernels.plan`; slot 0 is masked. windows: None = those of all layers."""
        return self.kernels.plan(
            metadata,
            page_size,
            windows=self._layer_shapes.windows if windows is None else windows,
            group_size=self.heads.num_heads // self.heads.num_kv_heads,
            first_slot=_FIRST_SLOT,
            dtype=self.dtype,
            device=self.device,
            into=into,
        )

    def bytes_per_slot(self, dtype: torch.dtype) -> int:
        """Bytes of one token's entry on this rank, with keys and values of `dtype`."""
        layers = self._layer_shapes
        return KVPool.bytes_per_slot(layers.num_layers, self.heads.num_kv_heads, layers.head_dim, dtype)

    def new_kv_pool(self, num_slots: int, dtype: torch.dtype | None = None) -> KVPool:
        """Allocate a pool for this rank's key-value heads; num_slots = pages (the null page included) * page_size.

        dtype: of keys and values (see `kv_dtype`); None = the head's.
        """
        layers, kv_heads = self._layer_shapes, self.heads.num_kv_heads
        return KVPool(layers.num_layers, num_slots, kv_heads, layers.head_dim, dtype or self.dtype, self.device)


class FeatureHead(DraftHead, ABC):
    """A head that drafts the next token alone: EAGLE and MTP."""

    @staticmethod
    @abstractmethod
    def load(
        spec: Any,
        path: Path | str,
        target_path: Path | str,
        tp: TensorParallel,
        device: torch.device | str,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> FeatureHead:
        """Load this rank's shard of the head that its description `spec` describes."""

    @abstractmethod
    def forward(
        self, tokens_M: Tensor, features_MH: Tensor, positions_M: Tensor, plan: AttentionPlan, kv: KVPool
    ) -> Tensor:
        """Run one packed forward pass and write every row's key and value into `kv`.

        Args:
            tokens_M: int32 or int64 target token ids.
            features_MH: the target's feature of the token before each row, or the parent's output; any float dtype.
            positions_M: rotary positions, one less than the tokens' own.

        Returns:
            [M, H] features for the rows' children, which `logits` takes too; equal on every rank.
        """

    @abstractmethod
    def logits(self, hidden_MH: Tensor) -> Tensor:
        """Return float32 [M, draft_vocab] for rows of `forward`'s output, equal on every rank. A collective."""


def name_in_target(target: Weights, name: str) -> str:
    """Return the name under which a target stores a tensor of its text model.

    Beside vision or audio towers (Gemma-3, Mistral-Small-3.x) the text model has a prefix. A tensor that is not stored
    keeps its name, and loading it raises the error.
    """
    return next((stored for stored in target.names() if text_name(stored) == name), name)


def load_embedding(weights: Weights, target: Weights, layers: ModelSpec | Eagle3Spec) -> Tensor:
    """Load the head's input embedding [V, H], or the target's if it has none. Raises ValueError for another shape."""
    if weights.has("embed_tokens.weight"):
        embedding_VH = weights.get("embed_tokens.weight")
    else:
        embedding_VH = target.get(name_in_target(target, "model.embed_tokens.weight"))
    if embedding_VH.shape != (layers.vocab_size, layers.hidden_size):
        raise ValueError(
            f"{weights.path}: the embedding is {tuple(embedding_VH.shape)}, "
            f"the head needs {(layers.vocab_size, layers.hidden_size)}"
        )
    return embedding_VH


def load_vocab_head(
    weights: Weights, target: Weights, layers: ModelSpec | Eagle3Spec, draft_vocab_size: int, tp: TensorParallel
) -> VocabHead:
    """Load the head's own lm_head; a head with the full vocabulary may share the target's (tied or not)."""
    if weights.has("lm_head.weight") or draft_vocab_size != layers.vocab_size:
        source, name = weights, "lm_head.weight"
    else:
        source, name = target, name_in_target(target, "lm_head.weight")
        if not target.has(name):
            name = name_in_target(target, "model.embed_tokens.weight")
    rows = source.shape(name)
    if rows != (draft_vocab_size, layers.hidden_size):
        raise ValueError(f"{weights.path}: {name} is {rows}, not {(draft_vocab_size, layers.hidden_size)}")
    return VocabHead.load(source, name, draft_vocab_size, tp)
