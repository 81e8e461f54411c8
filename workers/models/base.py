"""The interface of a rank's share of a target or draft model, and what its two implementations have in common.

Implemented by `workers.models.decoder.Decoder` and `workers.models.transformers_model.TransformersDecoder`; every
method but `plan` and `new_kv_pool` is called by all ranks of `tp` together.
Legend: N packed rows, D hidden width, V vocabulary, W = ceil(V / T) columns of a logits shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from workers.kernels.select import AttentionPlan, Kernels
from workers.kv_cache import KVPool
from workers.models.layers import HeadSplit, TensorParallel, gather_vocab, shard_vocab
from workers.models.specs import ModelSpec, check_parallel
from workers.types import AttentionMetadata, Hidden


class BaseDecoder(ABC):
    """A decoder-only model over packed tokens and the paged KV cache."""

    def __init__(
        self,
        spec: ModelSpec,
        tp: TensorParallel,
        heads: HeadSplit,
        embedding_VD: Tensor,
        tap_layers: tuple[int, ...],
        kernels: Kernels,
    ) -> None:
        self.spec = spec
        self.tp = tp
        self.heads = heads
        self.device = embedding_VD.device
        self.dtype = embedding_VD.dtype
        self.tap_layers = tap_layers
        self.kernels = kernels
        start, end, self._shard_width = shard_vocab(spec.vocab_size, tp)
        self.vocab_range = (start, end)

    @property
    def logits_dtype(self) -> torch.dtype:
        """The type that holds the values of `logits` exactly: what the head computes in."""
        return self.dtype

    @property
    def can_be_captured(self) -> bool:
        """True if a forward pass on CUDA does not synchronize with the host."""
        return True

    def plan(self, metadata: AttentionMetadata, page_size: int, into: Any = None) -> AttentionPlan:
        """Plan one step's attention for this model's heads, windows, dtype and device, see `Kernels.plan`."""
        return self.kernels.plan(
            metadata,
            page_size,
            windows=self.spec.windows,
            group_size=self.heads.num_heads // self.heads.num_kv_heads,
            dtype=self.dtype,
            device=self.device,
            into=into,
        )

    def new_kv_pool(self, num_slots: int, dtype: torch.dtype | None = None) -> KVPool:
        """Allocate a pool for this rank's key-value heads; num_slots = pages (with the null page) * page_size.

        dtype: of keys and values (see `kv_dtype`); None = the model's.
        """
        spec, kv_heads = self.spec, self.heads.num_kv_heads
        return KVPool(spec.num_layers, num_slots, kv_heads, spec.head_dim, dtype or self.dtype, self.device)

    @abstractmethod
    def forward(self, tokens_N: Tensor, positions_N: Tensor, plan: AttentionPlan, kv: KVPool) -> Hidden:
        """Run one packed forward pass, which writes every row's key and value into `kv`.

        Args:
            tokens_N, positions_N: int32 or int64 [N] on the model's device.

        Returns:
            Hidden: final_ND after the final norm; taps_N3D in tap order, or None without taps. Equal on every rank.
        """

    @abstractmethod
    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Return float32 [N, W] logits of this rank's tokens; columns beyond the vocabulary are -inf."""

    @torch.inference_mode()
    def full_logits(self, hidden_ND: Tensor) -> Tensor:
        """Return float32 [N, V] logits on every rank. Collective over `tp`."""
        return gather_vocab(self.logits(hidden_ND), self.tp, self.spec.vocab_size)


def check_load(spec: ModelSpec, tp: TensorParallel, tap_layers: tuple[int, ...]) -> None:
    """Raise ValueError unless the ranks can split the model and the model has the tap layers."""
    check_parallel(spec, tp.size)
    for tap in tap_layers:
        if not 0 <= tap <= spec.num_layers:
            raise ValueError(f"feature layer {tap} is outside a model of {spec.num_layers} layers")
