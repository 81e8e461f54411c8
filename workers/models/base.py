"""What a rank's share of a model offers: target and draft models, and the heads of `drafter.proposers`.

Legend: N packed rows, D hidden width, V vocabulary, W = ceil(V / T) columns of a logits shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from workers.kernels.prompt_attention import is_flash_width, long_chunks
from workers.kernels.select import TORCH, AttentionPlan, DeltaPlan
from workers.kernels.torch_delta import chains
from workers.kv_cache import KVPool, StatePool
from workers.models.layers import HeadSplit, RankWeights, gather_vocab, shard_vocab
from workers.models.specs import ModelSpec
from workers.transfer import to_device
from workers.types import AttentionMetadata, Folds, Hidden


class PagedModel:
    """Layers that attend over the paged KV cache. layers: their shapes. heads: this rank's of them."""

    first_slot: ClassVar[int] = 0
    """Rows never attend to logical slots below it."""

    def __init__(self, weights: RankWeights, layers: ModelSpec, heads: HeadSplit) -> None:
        self.tp, self.kernels = weights.tp, weights.kernels
        self.device, self.dtype = weights.device, weights.dtype
        self.heads = heads
        self._layer_shapes = layers

    def plan(
        self,
        metadata: AttentionMetadata,
        page_size: int,
        into: Any = None,
        *,
        windows: Sequence[int | None] | None = None,
    ) -> AttentionPlan:
        """Plan one step's attention, see `Kernels.plan`. windows: None = those of all layers."""
        is_latent = self._layer_shapes.latent is not None
        return (TORCH if is_latent else self.kernels).plan(
            metadata,
            page_size,
            windows=self._layer_shapes.windows if windows is None else windows,
            group_size=1 if is_latent else self.heads.num_heads // self.heads.num_kv_heads,
            kv_heads=self.heads.num_kv_heads,
            first_slot=self.first_slot,
            dtype=self.dtype,
            device=self.device,
            into=into,
        )

    def has_long_chunks(self, metadata: AttentionMetadata) -> bool:
        """Return whether flash attention takes some of a step's rows, if it is not run from a graph."""
        layers, kernels = self._layer_shapes, self.kernels
        if kernels.NAME != "triton" or kernels.IS_BATCH_INVARIANT or layers.latent is not None:
            return False
        is_taken = None in layers.windows and is_flash_width(layers.head_dim)
        return is_taken and bool(long_chunks(metadata, self.first_slot, self.dtype, self.device))

    @property
    def can_be_captured(self) -> bool:
        """True if a CUDA graph can hold a forward pass."""
        return self._layer_shapes.can_be_captured

    def bytes_per_slot(self, dtype: torch.dtype) -> int:
        """Bytes of one token's entry on this rank, with keys and values of `dtype`."""
        layers = self._layer_shapes
        widths = self.heads.num_kv_heads, layers.head_dim
        return KVPool.bytes_per_slot(layers.num_kv_layers, *widths, dtype, layers.num_parts)

    def new_kv_pool(
        self, num_slots: int, dtype: torch.dtype | None = None, *, num_seats: int = 0, num_tree_rows: int = 0
    ) -> KVPool:
        """Allocate a pool for this rank's key-value heads; num_slots = pages (with the null page) * page_size.

        dtype: of keys and values (see `kv_dtype`); None = the model's. num_seats, num_tree_rows: of the states of a
        hybrid, see `StatePool`.
        """
        layers, kv_heads, states = self._layer_shapes, self.heads.num_kv_heads, None
        if (delta := layers.delta) is not None:
            shape = (delta.num_value_heads // self.tp.size, delta.key_dim, delta.value_dim)
            channels, sizes = delta.num_channels // self.tp.size, (num_seats, num_tree_rows)
            states = StatePool(len(delta.layers), shape, channels, *sizes, self.dtype, self.device)
        sizes_LSHd = layers.num_kv_layers, num_slots, kv_heads, layers.head_dim
        return KVPool(*sizes_LSHd, dtype or self.dtype, self.device, states, layers.num_parts)


class BaseDecoder(PagedModel, ABC):
    """A decoder-only model over packed tokens: `Decoder`, or `TransformersDecoder`.

    All ranks of `tp` call `forward` and what gives logits together. tap_layers: the residual stream is captured before
    these layers (0 .. L), for EAGLE-3.
    """

    def __init__(self, weights: RankWeights, spec: ModelSpec, heads: HeadSplit, tap_layers: tuple[int, ...]) -> None:
        super().__init__(weights, spec, heads)
        self.spec = spec
        self.tap_layers = tap_layers
        start, end, self._shard_width = shard_vocab(spec.vocab_size, self.tp)
        self.vocab_range = (start, end)

    @property
    def logits_dtype(self) -> torch.dtype:
        """The type that holds the values of `logits` exactly: what the head computes in."""
        return self.dtype

    @abstractmethod
    def forward(self, tokens_N: Tensor, positions_N: Tensor, plan: AttentionPlan, kv: KVPool) -> Hidden:
        """Run one packed forward pass, which writes every row's key and value into `kv`.

        Args:
            tokens_N, positions_N: int32 or int64 [N] on the model's device.

        Returns:
            Hidden: final_ND after the final norm; taps_N3D in tap order, or None without taps. Equal on every rank.
        """

    def fold(self, folds: Folds, kv: KVPool) -> None:
        """Move recurrent states on by the accepted rows of the last forward pass's trees, before the next one."""
        plan = self.kernels.delta_plan(chains(folds), self.device)
        self.fold_rows(to_device(folds.row_A, self.device), plan, kv)

    def fold_rows(self, row_A: Tensor, plan: DeltaPlan, kv: KVPool) -> None:  # most models have no recurrent states
        """Move recurrent states on by these stashed rows, the chains of `plan`."""

    @abstractmethod
    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Return float32 [N, W] logits of this rank's tokens; columns beyond the vocabulary are -inf."""

    @torch.inference_mode()
    def full_logits(self, hidden_ND: Tensor) -> Tensor:
        """Return float32 [N, V] logits on every rank. Collective over `tp`."""
        return gather_vocab(self.logits(hidden_ND), self.tp, self.spec.vocab_size)
