"""The kernel set in plain torch, for CPU and for CUDA without Triton: the counterpart of `workers.kernels.fused`.

`workers.kernels.select.Kernels` documents each function. Legend: R rows, V columns, K kept, C copied tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workers.kernels.block_scaled import block_scaled_linear, kept_types
from workers.kernels.pointwise import add_rms_norm, gated_norm, head_input, rms_norm, rotate_, rotation, silu_mul
from workers.kernels.torch_attention import plan, tree_attention
from workers.kernels.torch_delta import delta_fold, delta_net, delta_plan
from workers.sampling.philox import gumbel
from workers.sampling.sampler import shard_best as coupled_argmax
from workers.sampling.sampler import truncation_threshold

__all__ = [
    "IS_BATCH_INVARIANT",
    "NAME",
    "TopK",
    "add_rms_norm",
    "block_scaled_linear",
    "copy_slots",
    "coupled_argmax",
    "delta_fold",
    "delta_net",
    "delta_plan",
    "gated_norm",
    "gumbel",
    "head_input",
    "invariant_linear",
    "kept_types",
    "plan",
    "rms_norm",
    "rotate_",
    "rotation",
    "silu_mul",
    "top_k",
    "tree_attention",
    "truncation_threshold",
]

NAME = "torch"
IS_BATCH_INVARIANT = False
invariant_linear = None


class TopK(NamedTuple):
    """The largest entries of each row, and the row's log-sum-exp."""

    value_RK: Tensor  # float32, descending
    index_RK: Tensor  # int64 columns
    lse_R: Tensor  # float32, log sum exp(x / tau)


def copy_slots(pool: Tensor, source_C: Tensor, target_C: Tensor) -> None:
    """See `workers.kernels.select.Kernels.copy_slots`."""
    if pool.element_size() == 1:
        pool = pool.view(torch.uint8)  # torch cannot copy 8-bit floats by index on a CPU
    pool.index_copy_(1, target_C, pool.index_select(1, source_C))


def top_k(x_RV: Tensor, k: int, tau_R: Tensor) -> TopK:
    """See `workers.kernels.select.Kernels.top_k`."""
    best = x_RV.topk(min(k, x_RV.shape[-1]), dim=-1)
    return TopK(best.values, best.indices, (x_RV / tau_R[:, None]).logsumexp(-1))
