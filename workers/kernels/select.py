"""The interface of a kernel set, and its selection at start-up: plain torch or Triton.

A kernel set has the functions below: `workers.kernels.reference` in torch, which runs everywhere,
`workers.kernels.fused` in Triton, and that of `workers.kernels.compiled`, which is the Triton set with compiled
pointwise chains. All have the same signatures and semantics.
Legend: N packed rows, I intermediate or input width, O outputs, H heads, L layers, d head width, R rows of logits, V
columns of them. That of delta nets is in `workers.kernels.torch_delta`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from workers.kernels import reference
from workers.kernels.block_scaled import BlockScaled
from workers.kernels.interpreted import is_interpreted
from workers.kernels.pointwise import Rotation
from workers.kernels.reference import TopK
from workers.kernels.torch_attention import plan_by_paths
from workers.kernels.torch_delta import DeltaWeights, LayerStates
from workers.sampling.gumbel_cache import GumbelCache
from workers.types import AttentionMetadata, SamplingBatch

KernelsName = Literal["auto", "torch", "triton"]


class AttentionPlan(Protocol):
    """One step's attention, for all layers: the result of `Kernels.plan`, for `tree_attention` of the same set."""

    @property
    def write_slots_N(self) -> Tensor:
        """int64, the physical slot that each row writes."""
        ...


class DeltaPlan(Protocol):
    """One step of the gated delta layers: the result of `Kernels.delta_plan`, for the same set."""


class Kernels(Protocol):
    """A kernel set."""

    NAME: str
    IS_BATCH_INVARIANT: bool
    """Every row has the same bits, whatever is computed beside it: other requests, a tree, the rest of a prompt."""

    @property
    def invariant_linear(self) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
        """x W^T + b for a weight in 16 bits, with sums in an order that its shape decides; None = torch's have one."""
        ...

    def plan(
        self,
        metadata: AttentionMetadata,
        page_size: int,
        *,
        windows: Sequence[int | None] = (None,),
        group_size: int = 1,
        kv_heads: int = 1,
        first_slot: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        into: Any = None,
    ) -> AttentionPlan:
        """Prepare one step's attention. The metadata is on the CPU and is copied once.

        Args:
            windows: the distinct sliding windows of the model's layers (None = full attention). A window w lets a row
                see itself and the w - 1 positions before it, along its own path.
            group_size: query heads per key-value head (on this rank).
            kv_heads: key-value heads (on this rank): the more there are, the less need their work be cut.
            first_slot: rows never attend to logical slots below it (1 for an EAGLE drafter, whose slot 0 is empty).
            dtype: dtype of the queries.
            into: an earlier plan for the same numbers of rows and requests, and at least as many pages. Triton kernels
                fill its tensors in place, so that captured graphs read the new step; torch kernels ignore it.
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
        """Compute the attention of packed rows over their slots in one layer, [N, Hq * d] in q's dtype.

        Args:
            q_NHd: [N, Hq, d] rotated queries (any strides; d contiguous).
            kv_slots: [slots, 2, Hkv, d], one layer of a KVPool that already contains this step's keys and values. They
                have q's dtype or are float8_e4m3fn, and are then converted to it.
            plan: the result of this set's `plan`.
            scale: factor on the scores, 1 / sqrt(d).
            window: one of the windows given to `plan`.
            softcap: replaces scores with softcap * tanh(score / softcap) before masking (Gemma-2).
            sink_H: [Hq], an additional score per head in the denominator of the softmax, without a value (Granite-SWA).
        """
        ...

    def delta_plan(
        self, metadata: AttentionMetadata, device: torch.device | str = "cpu", into: Any = None
    ) -> DeltaPlan:
        """Prepare one step of the gated delta layers, or a fold, which is a step of chains.

        Trees come first among the requests; their rows wait for a verdict, and write no state. into: see `plan`.
        """
        ...

    def delta_net(self, qkv_NC: Tensor, ba_N2H: Tensor, weights: DeltaWeights, plan: Any, layer: LayerStates) -> Tensor:
        """Run one layer's convolution, gates and delta rule over packed rows, see `workers.kernels.torch_delta`.

        The rows of trees are stashed, as many as there is room for; the states of other requests move on.

        Args:
            qkv_NC: projected rows, of any stride. ba_N2H: the inputs of beta, then those of the gates.
            plan: the result of this set's `delta_plan`.

        Returns:
            The outputs of all rows, float32 [N, H, v].
        """
        ...

    def delta_fold(self, row_A: Tensor, weights: DeltaWeights, plan: Any, layer: LayerStates) -> None:
        """Move states on by these stashed rows, the chains of `plan`."""
        ...

    def gated_norm(self, x_NHv: Tensor, z_NX: Tensor, weight_v: Tensor, eps: float) -> Tensor:
        """Return the `rms_norm` of each head of x times silu(z), in float32, cast to z's dtype: [N, H * v]."""
        ...

    def copy_slots(self, pool: Tensor, source_C: Tensor, target_C: Tensor) -> None:
        """Move tokens between physical slots (int64 [C] each) in every layer of a pool [L, slots, 2, Hkv, d].

        This is path compaction. All reads happen before any write, because a path may overlap its target.
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
        """Return a vocabulary shard's best (score [R] float32, target id [R] int64): argmax of log p + G, no top-k/p.

        Args:
            params: one entry per row; temperature 0 takes the largest logit.
            index_R: position of the token that each row draws, a key of the noise.
            start: first target id of the shard.
            row_max_R: each row's largest logit over all shards, needed if some row has min-p.
            noise: the cache from which torch kernels read G; Triton kernels compute G in place.
        """
        ...

    def truncation_threshold(self, x_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
        """Return the smallest value of each row that top-k and then top-p keep, float32 [R].

        Top-k keeps values that are at least the k-th largest. Of these, top-p keeps each value with less than p of
        their probability mass above it. Equal values are treated alike.

        Args:
            x_RV: float32 logits, -inf for masked tokens.
            top_k_R: int32, 0 = disabled. top_p_R: float32 in (0, 1], 1 = disabled.
        """
        ...

    def gumbel(self, seed_R: Tensor, index_R: Tensor, start: int, stop: int) -> Tensor:
        """Return the noise G(seed, index, token) of target ids [start, stop), float32 [R, stop - start]."""
        ...

    def top_k(self, x_RV: Tensor, k: int, tau_R: Tensor) -> TopK:
        """Return each row's k largest values in descending order, and its log sum exp(x / tau) with tau > 0."""
        ...

    def kept_types(self, dtype: torch.dtype, device: torch.device) -> frozenset[torch.dtype]:
        """Return the types of the values, see `BlockScaled`, that `block_scaled_linear` multiplies in this dtype."""
        ...

    def block_scaled_linear(self, x_NI: Tensor, weight: BlockScaled, bias_O: Tensor | None) -> Tensor:
        """Return x W^T + b, [N, O] in x's dtype, which is the weight's; rows of x may have any stride.

        Every element of the weight is first rounded to that dtype, as when it is dequantized on reading. Sums are in
        float32; in a batch-invariant set in an order that depends on the weight's shape alone.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / rms(x) over the last dimension in float32, cast back, then multiplied by weight."""
        ...

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return x + delta and its `rms_norm`."""
        ...

    def head_input(
        self,
        tokens_N: Tensor,
        embedding_VD: Tensor,
        token_norm_D: Tensor,
        feature_ND: Tensor,
        feature_norm_D: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the `rms_norm` of the tokens' embeddings beside that of their features, [N, 2 D], and the latter."""
        ...

    def rotation(self, positions_N: Tensor, signed_freq_d: Tensor, scaling: float, dtype: torch.dtype) -> Rotation:
        """Return scaling times the cos and sin of every position's angles, computed in float32, as `dtype`."""
        ...

    def silu_mul(self, gate_up_N2I: Tensor) -> Tensor:
        """Return silu(gate) * up, [N, I], of the two halves of the input."""
        ...

    def rotate_(self, qk_NHd: Tensor, rotation: Rotation, norm_Hd: Tensor | None = None, eps: float = 0.0) -> None:
        """Apply the rotary embedding to queries and keys in place (any row stride), after `rms_norm` of each head if
        `norm_Hd` is given."""
        ...


TORCH: Kernels = reference
INVARIANT = cast(Kernels, SimpleNamespace(**vars(reference) | {"plan": plan_by_paths, "IS_BATCH_INVARIANT": True}))
"""The batch-invariant set for bfloat16 on CPUs that multiply it; on CUDA it is `fused.invariant`."""


def multiplies_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16 on this processor (AVX-512-BF16, AMX)."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def kernels_for(
    device: torch.device | str,
    name: KernelsName = "auto",
    enforce_eager: bool = False,
    *,
    batch_invariant: int | None = None,
) -> Kernels:
    """Select the kernels for `device`; auto means Triton on CUDA and torch elsewhere. enforce_eager: compile no chains.

    batch_invariant: the most tokens of a request, for kernels that are so; None = others.

    Raises:
        ValueError: Triton is selected and is not installed, or cannot run on this device; or no kernels are
            batch-invariant on this processor.
    """
    device = torch.device(device)
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        if batch_invariant is None:
            return TORCH
        if not multiplies_bfloat16():
            raise ValueError(
                "batch_invariant needs a processor that multiplies bfloat16 (AVX-512-BF16 or AMX), and this one does "
                "not: leave it out, and write dtype float32, in which texts rarely part"
            )
        return INVARIANT
    if importlib.util.find_spec("triton") is None:
        raise ValueError(f"Triton kernels for {device} need the package triton: install it, or set kernels='torch'")
    if device.type != "cuda" and not is_interpreted():
        raise ValueError(f"Triton kernels need a CUDA device, not {device}: set kernels='torch'")
    # Imported here, because torch kernels do not need Triton, and importing the compiler takes seconds.
    if enforce_eager or is_interpreted() or batch_invariant is not None:
        from workers.kernels import fused

        return fused if batch_invariant is None else cast(Kernels, fused.invariant(batch_invariant))
    from workers.kernels import compiled

    return cast(Kernels, compiled.KERNELS)
