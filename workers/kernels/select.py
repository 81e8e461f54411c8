"""Which kernels this process runs, chosen once at start-up: plain torch or Triton.

    kernels_for(device, name="auto", enforce_eager=False) -> Kernels        TORCH

A set of kernels is a module that has all of the functions below: `workers.kernels.reference` in torch, which runs
everywhere, `workers.kernels.fused` in Triton, and `workers.kernels.compiled`, which is that with its pointwise chains
compiled. They have the same signatures and the same meaning.
Legend: N packed rows, I intermediate width, H heads, L layers, d head width, R rows of logits, V columns of them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from workers.kernels import reference
from workers.kernels.interpreted import is_interpreted
from workers.kernels.reference import TopK
from workers.models.rope import Rotation
from workers.sampling.gumbel_cache import GumbelCache
from workers.types import AttentionMetadata, SamplingBatch

KernelsName = Literal["auto", "torch", "triton"]


class AttentionPlan(Protocol):
    """One step's attention, ready for every layer; made by `Kernels.plan` for the same set's `tree_attention`."""

    @property
    def write_slots_N(self) -> Tensor:
        """int64, the physical slot that each row writes."""
        ...


class Kernels(Protocol):
    """One set of kernels: a module."""

    NAME: str

    def plan(
        self,
        metadata: AttentionMetadata,
        page_size: int,
        *,
        windows: Sequence[int | None] = (None,),
        group_size: int = 1,
        first_slot: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        into: Any = None,
    ) -> AttentionPlan:
        """Prepare one step's attention. Metadata lies on the CPU and is moved once.

        Args:
            windows: the distinct sliding windows of the model's layers (None = full attention). A window w lets a row
                see itself and the w - 1 positions before it, along its own path.
            group_size: query heads per key-value head (on this rank).
            first_slot: logical slots below it are never attended to (1 for an EAGLE drafter, whose slot 0 is empty).
            dtype: that of the queries.
            into: an earlier plan for as many rows and requests, and no fewer pages. Triton kernels fill its tensors in
                place, which is how captured graphs see a new step; torch kernels have no use for it.
        """
        ...

    def tree_attention(
        self,
        q_NHd: Tensor,
        kv_slots: Tensor,
        plan: Any,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        """Attention of packed rows over their own slots of one layer, [N, Hq * d] in q's dtype.

        Args:
            q_NHd: [N, Hq, d] rotated queries (any strides; d contiguous).
            kv_slots: [slots, 2, Hkv, d] one layer of a KVPool, this step's keys already written.
            plan: what this set's `plan` returned.
            scale: factor on the scores, 1 / sqrt(d).
            window: one of the windows given to `plan`.
            softcap: scores become softcap * tanh(score / softcap) before they are masked (Gemma-2).
            sink_H: [Hq] one more score per head in the softmax's denominator, which attends to nothing (Granite-SWA).
        """
        ...

    def copy_slots(self, pool: Tensor, source_C: Tensor, target_C: Tensor) -> None:
        """Move tokens between physical slots (int64 [C] each) in every layer of a pool [L, slots, 2, Hkv, d].

        All reads happen before any write: this is path compaction, and a path may overlap its new place.
        """
        ...

    def coupled_argmax(
        self,
        logits_RV: Tensor,
        params: SamplingBatch,
        index_R: Tensor,
        start: int,
        row_max_R: Tensor | None,
        noise: GumbelCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Best (score [R] float32, target id [R] int64) of a vocabulary shard: argmax of log p + G, without top-k/p.

        Args:
            params: one entry per row; temperature 0 takes the largest logit.
            index_R: index of the token that each row draws, the noise's key.
            start: first target id of the shard.
            row_max_R: each row's largest logit over all shards, needed when some row has min-p.
            noise: torch kernels keep G of the shard's columns there; Triton kernels make G where it is used.
        """
        ...

    def truncation_threshold(self, x_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
        """The smallest value that top-k and then top-p leave of each row, float32 [R]. Equal values share their fate.

        Top-k leaves what is no smaller than the k-th largest; top-p, of that, what has less than p of its mass
        (softmax) above it.

        Args:
            x_RV: float32 logits, -inf where a token is forbidden.
            top_k_R: int32, 0 = off. top_p_R: float32 in (0, 1], 1 = off.
        """
        ...

    def gumbel(self, seed_R: Tensor, index_R: Tensor, start: int, stop: int) -> Tensor:
        """The target's noise G(seed, index, token) of target ids [start, stop), float32 [R, stop - start]."""
        ...

    def top_k(self, x_RV: Tensor, k: int, tau_R: Tensor) -> TopK:
        """The k largest of each row, best first, and log sum exp(x / tau) over the row. tau > 0."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) over the last dimension in float32, cast back, then times weight."""
        ...

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x + delta, and its `rms_norm`."""
        ...

    def silu_mul(self, gate_up_N2I: Tensor) -> Tensor:
        """silu(gate) * up, [N, I], of gate and up side by side."""
        ...

    def rotate_(self, qk_NHd: Tensor, rotation: Rotation, norm_Hd: Tensor | None = None, eps: float = 0.0) -> None:
        """Rotate the heads of queries and keys in place (any stride between rows), after `rms_norm` of each if there
        are weights for it."""
        ...


TORCH: Kernels = reference


def kernels_for(device: torch.device | str, name: KernelsName = "auto", enforce_eager: bool = False) -> Kernels:
    """The kernels to run on `device`; auto = Triton on CUDA, torch elsewhere. enforce_eager: compile no chains.

    Raises:
        ValueError: Triton is asked for (or meant by auto) and is not installed, or cannot run on this device.
    """
    device = torch.device(device)
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return TORCH
    if importlib.util.find_spec("triton") is None:
        raise ValueError(f"Triton kernels for {device} need the package triton: install it, or set kernels='torch'")
    if device.type != "cuda" and not is_interpreted():
        raise ValueError(f"Triton kernels need a CUDA device, not {device}: set kernels='torch'")
    # Only here: Triton need not be installed for torch kernels, and getting the compiler ready takes seconds.
    if enforce_eager or is_interpreted():
        from workers.kernels import fused

        return fused
    from workers.kernels import compiled

    return compiled
