"""The layers of a decoder with tensor parallelism: attention, MLP and LM head.

Legend: N packed rows, D hidden width, H heads, d head width, I intermediate width, V vocabulary, W a shard's width.
Column-parallel weights (q, k, v, gate, up, vocabulary) hold this rank's output rows. Row-parallel weights (o, down)
hold its input columns and are followed by one all-reduce. With size 1 no collective is called.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from workers.kernels.block_scaled import reordered, stacked
from workers.kernels.linear import Linear
from workers.kernels.pointwise import Rotation
from workers.kernels.select import TORCH, AttentionPlan, Kernels
from workers.kv_cache import KVPool
from workers.models.checkpoint import Weights
from workers.models.specs import ModelSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A rank's position among the `size` ranks of one model, and what connects them.

    is_batch_invariant: a row's sum has the same bits, whatever is beside it. From three ranks on gloo and NCCL add in
    an order that depends on an element's place in the tensor.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    is_batch_invariant: bool = False

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Sum over the ranks in place."""
        if self.size > 2 and self.is_batch_invariant:
            parts = [torch.empty_like(x) for _ in range(self.size)]
            dist.all_gather(parts, x.contiguous(), group=self.group)
            return x.copy_(functools.reduce(torch.add, (part.float() for part in parts)))
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x


SINGLE = TensorParallel(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSplit:
    """One rank's heads. Key-value heads are replicated if there are more ranks than heads."""

    num_heads: int
    num_kv_heads: int
    kv_rank: int  # index of this rank's part of the key-value heads, out of `kv_parts`
    kv_parts: int

    @staticmethod
    def of(num_heads: int, num_kv_heads: int, tp: TensorParallel) -> HeadSplit:
        """Split the heads, for sizes that `check_parallel` has accepted."""
        parts = min(tp.size, num_kv_heads)
        assert num_heads % tp.size == 0 and num_kv_heads % parts == 0 and tp.size % parts == 0
        return HeadSplit(
            num_heads=num_heads // tp.size,
            num_kv_heads=num_kv_heads // parts,
            kv_rank=tp.rank * parts // tp.size,
            kv_parts=parts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Where and with what a rank runs a model."""

    tp: TensorParallel = SINGLE
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    kernels: Kernels = TORCH


ON_CPU = Runtime()


class RankWeights(Weights):
    """A checkpoint, and what else a rank needs to build its share of the model.

    rename: see `Weights`. keeps_bits: matrices stay in the bits that they are stored in if the kernels multiply them.
    """

    def __init__(
        self,
        path: Path | str,
        runtime: Runtime = ON_CPU,
        rename: Callable[[str], str] = str,
        *,
        keeps_bits: bool = True,
    ) -> None:
        dtype, device, self.kernels = runtime.dtype, torch.device(runtime.device), runtime.kernels
        kept = self.kernels.kept_types(dtype, device) if keeps_bits else frozenset[torch.dtype]()
        super().__init__(path, dtype, device, rename, kept=kept)
        self.dtype: torch.dtype = dtype
        self.tp = runtime.tp
        if self.quantization is not None:
            is_kept = any(self.kept(name) for name in self.names())
            kernels = f"{self.kernels.NAME} kernels do not multiply them with {dtype} on this device"
            why = f"dequantized, because {kernels if keeps_bits else 'its class multiplies 16 or 32 bits'}"
            told = f"kept in {self.quantization.bits} bits" if is_kept else why
            logger.info("%s: %s weights are %s", path, self.quantization.method, told)


def check_shape(weights: Weights, name: str, expected: tuple[int, ...], fields: str) -> None:
    """Raise ValueError unless a tensor has the shape that follows from config.json's `fields`."""
    found = weights.shape(name)
    if found != expected:
        raise ValueError(f"{weights.path}: {name} is {found}, config.json asks for {expected}: look at its {fields}")


def norm_weight(weights: Weights, name: str, spec: ModelSpec) -> Tensor:
    """Read the weight of an RMSNorm that multiplies by it, or by 1 + weight, which 16 bits would round."""
    if not spec.zero_centred_norms:
        return weights.get(name)
    return weights.get_range(name, 0, 0, None, torch.float32).add_(1)


class Attention:
    """Self-attention of one layer: fused QKV projection, QK norm (Qwen3), rope, paged KV cache, output projection.

    It reads this rank's slices of `prefix`{q,k,v,o}_proj and, with `qk_norm`, {q,k}_norm. in_width: None = the hidden
    width. With `attention_gate`, q_proj has the rows of each head's query, then those of its gate; the fused projection
    has all gates at its end. Raises ValueError for a tensor that is missing or has another shape.
    """

    def __init__(
        self,
        weights: RankWeights,
        prefix: str,
        spec: ModelSpec,
        *,
        in_width: int | None = None,
        window: int | None = None,
    ) -> None:
        self.tp, self.kernels = weights.tp, weights.kernels
        rank, size, head_dim = self.tp.rank, self.tp.size, spec.head_dim
        heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, self.tp)
        in_width, q_rows, kv_rows = (
            in_width or spec.hidden_size,
            spec.num_heads * head_dim,
            spec.num_kv_heads * head_dim,
        )
        shapes: dict[str, tuple[int, ...]] = {
            "q_proj": (q_rows * (2 if spec.attention_gate else 1), in_width),
            "k_proj": (kv_rows, in_width),
            "v_proj": (kv_rows, in_width),
            "o_proj": (spec.hidden_size, q_rows),
        } | ({"q_norm": (head_dim,), "k_norm": (head_dim,)} if spec.qk_norm else {})
        for name, shape in shapes.items():
            fields = "hidden_size, num_attention_heads, num_key_value_heads and head_dim"
            check_shape(weights, f"{prefix}{name}.weight", shape, fields)

        self.num_heads = heads.num_heads
        self.num_rotated = heads.num_heads + heads.num_kv_heads
        self.has_gate = spec.attention_gate
        self.kv_shape = (2, heads.num_kv_heads, head_dim)
        num_fused = self.num_rotated + heads.num_kv_heads + (heads.num_heads if self.has_gate else 0)
        self.qkv_shape = (num_fused, head_dim)
        self.eps, self.scale, self.window = spec.rms_norm_eps, head_dim**-0.5, window
        self.qk_norm_Hd = None
        if spec.qk_norm:  # one weight row per head, so that queries and keys are normalized together
            q_norm, k_norm = (norm_weight(weights, f"{prefix}{name}.weight", spec) for name in ("q_norm", "k_norm"))
            rows = (q_norm.expand(heads.num_heads, -1), k_norm.expand(heads.num_kv_heads, -1))
            self.qk_norm_Hd = torch.cat(rows)
        kv = (0, heads.kv_rank, heads.kv_parts)
        parts = {"q_proj": (0, rank, size), "k_proj": kv, "v_proj": kv}
        row_O = None
        if self.has_gate:
            q_and_gate_H2d = torch.arange(2 * heads.num_heads * head_dim, device=weights.device).view(-1, 2, head_dim)
            others = torch.arange(q_and_gate_H2d.numel(), num_fused * head_dim, device=weights.device)
            row_O = torch.cat((q_and_gate_H2d[:, 0].flatten(), others, q_and_gate_H2d[:, 1].flatten()))
        names = {f"{prefix}{name}": part for name, part in parts.items()}
        self.qkv = fused_linear(weights, names, spec.qkv_bias, row_O)
        self.o = row_parallel_linear(weights, f"{prefix}o_proj", spec.o_bias)

    def __call__(self, x_ND: Tensor, rotation: Rotation, plan: AttentionPlan, kv: KVPool, layer: int) -> Tensor:
        """Attend from normalized x_ND; return [N, D] summed over the ranks, without the residual. Writes their KV."""
        qkv_NHd = self.qkv(x_ND).view(-1, *self.qkv_shape)
        q_NHd = self._write(qkv_NHd, rotation, plan.write_slots_N, kv, layer)
        return self.attend(q_NHd, plan, kv, layer, qkv_NHd[:, -self.num_heads :] if self.has_gate else None)

    def write(self, x_ND: Tensor, rotation: Rotation, slots_N: Tensor, kv: KVPool, layer: int) -> Tensor:
        """Write the rows' KV to these physical slots; return their queries [N, H, d]."""
        return self._write(self.qkv(x_ND).view(-1, *self.qkv_shape), rotation, slots_N, kv, layer)

    def _write(self, qkv_NHd: Tensor, rotation: Rotation, slots_N: Tensor, kv: KVPool, layer: int) -> Tensor:
        num_heads, end = self.num_heads, 2 * self.num_rotated - self.num_heads
        self.kernels.rotate_(qkv_NHd[:, : self.num_rotated], rotation, self.qk_norm_Hd, self.eps)
        kv.write(layer, qkv_NHd[:, num_heads:end].view(-1, *self.kv_shape), slots_N)
        return qkv_NHd[:, :num_heads]

    def attend(
        self, q_NHd: Tensor, plan: AttentionPlan, kv: KVPool, layer: int, gate_NHd: Tensor | None = None
    ) -> Tensor:
        """Attend from queries whose KV is written; return [N, D] summed over the ranks."""
        out = self.kernels.tree_attention(q_NHd, kv.layer(layer), plan, self.scale, self.window)
        if gate_NHd is not None:
            out = out * gate_NHd.sigmoid().flatten(1)
        return self.tp.all_reduce_(self.o(out))


class Mlp:
    """down(silu(gate(x)) * up(x)) with gate and up fused.

    It reads this rank's slices of `prefix`{gate,up,down}_proj; the intermediate width may be split unevenly. Raises
    ValueError for a tensor that is missing or has another shape.
    """

    def __init__(self, weights: RankWeights, prefix: str, spec: ModelSpec) -> None:
        self.tp, self.kernels = weights.tp, weights.kernels
        width, inner_width = spec.hidden_size, spec.intermediate_size
        shapes = {"gate": (inner_width, width), "up": (inner_width, width), "down": (width, inner_width)}
        for name, shape in shapes.items():
            check_shape(weights, f"{prefix}{name}_proj.weight", shape, "hidden_size and intermediate_size")
        part = (0, self.tp.rank, self.tp.size)
        self.gate_up = fused_linear(weights, {f"{prefix}gate_proj": part, f"{prefix}up_proj": part}, spec.mlp_bias)
        self.down = row_parallel_linear(weights, f"{prefix}down_proj", spec.mlp_bias)

    def __call__(self, x_ND: Tensor) -> Tensor:
        """Apply the MLP to normalized x_ND; return [N, D] summed over the ranks, without the residual."""
        return self.tp.all_reduce_(self.share(x_ND))

    def share(self, x_ND: Tensor) -> Tensor:
        """Return this rank's share of that sum."""
        return self.down(self.kernels.silu_mul(self.gate_up(x_ND)))


def fused_linear(
    weights: RankWeights, parts: dict[str, tuple[int, int, int]], has_bias: bool, row_O: Tensor | None = None
) -> Linear:
    """Read a layer of several tensors' rows, each (dimension, rank, size) of its tensor; then take `row_O` of all."""
    matrix = stacked([weights.matrix(f"{name}.weight", *part) for name, part in parts.items()])
    bias = torch.cat([weights.get(f"{name}.bias", *part) for name, part in parts.items()]) if has_bias else None
    if row_O is not None:
        matrix, bias = reordered(matrix, row_O), None if bias is None else bias[row_O]
    return Linear(matrix, bias, weights.kernels)


def row_parallel_linear(weights: RankWeights, name: str, has_bias: bool) -> Linear:
    """Read this rank's columns of a layer. Only rank 0 adds the bias to the sum."""
    matrix = weights.matrix(f"{name}.weight", 1, weights.tp.rank, weights.tp.size)
    bias = weights.get(f"{name}.bias") if has_bias else None
    return Linear(matrix, bias if weights.tp.rank == 0 else None, weights.kernels)


class VocabHead:
    """The LM head: one rank's rows of the output embedding, tokens start .. end - 1, in a shard of `width` columns.

    All shards have the same width, so that they can be gathered. Columns beyond the end of the vocabulary hold -inf.
    """

    def __init__(self, weight_WD: Tensor, start: int, width: int, kernels: Kernels = TORCH) -> None:
        self._linear = Linear(weight_WD, None, kernels)
        self.start = start
        self.end = start + weight_WD.shape[0]
        self.num_padding = width - weight_WD.shape[0]

    @staticmethod
    def load(weights: Weights, name: str, vocab_size: int, tp: TensorParallel, kernels: Kernels = TORCH) -> VocabHead:
        """Read this rank's rows of a tensor."""
        start, end, width = shard_vocab(vocab_size, tp)
        return VocabHead(weights.get_range(name, 0, start, end), start, width, kernels)

    @staticmethod
    def tied(embedding_VD: Tensor, tp: TensorParallel, kernels: Kernels = TORCH) -> VocabHead:
        """Use rows of the (replicated) input embedding. `Linear` may repack them; otherwise they take no memory."""
        start, end, width = shard_vocab(embedding_VD.shape[0], tp)
        return VocabHead(embedding_VD[start:end], start, width, kernels)

    def __call__(self, x_ND: Tensor) -> Tensor:
        """Compute a float32 logits shard [N, W] from final hidden states."""
        logits = self._linear(x_ND).float()
        return logits if not self.num_padding else F.pad(logits, (0, self.num_padding), value=float("-inf"))


def shard_vocab(vocab_size: int, tp: TensorParallel) -> tuple[int, int, int]:
    """Return this rank's (start, end, width). All widths are equal; the last shards may have fewer tokens."""
    width = -(-vocab_size // tp.size)
    start = min(tp.rank * width, vocab_size)
    return start, min(start + width, vocab_size), width


def gather_vocab(shard_NW: Tensor, tp: TensorParallel, vocab_size: int) -> Tensor:
    """Gather all ranks' logits shards: [N, V] on every rank."""
    if tp.size == 1:
        return shard_NW
    shards = [torch.empty_like(shard_NW) for _ in range(tp.size)]
    dist.all_gather(shards, shard_NW.contiguous(), group=tp.group)
    return torch.cat(shards, dim=1)[:, :vocab_size]
