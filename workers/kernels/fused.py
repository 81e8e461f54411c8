"""The kernel set in Triton, for CUDA: the counterpart of `workers.kernels.reference`.

`workers.kernels.select.Kernels` documents each function. Importing this module requires triton.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

from workers.kernels.host import invariant_keys_per_piece
from workers.kernels.pointwise import add_rms_norm, gated_norm, head_input, rms_norm, rotate_, rotation, silu_mul
from workers.kernels.triton_attention import plan, tree_attention
from workers.kernels.triton_copy import copy_slots
from workers.kernels.triton_delta import delta_fold, delta_net, delta_plan
from workers.kernels.triton_linear import block_scaled_linear, invariant_block_scaled_linear, kept_types
from workers.kernels.triton_linear import linear as invariant_linear
from workers.kernels.triton_sampling import coupled_argmax, gumbel, top_k
from workers.kernels.triton_truncation import truncation_threshold

__all__ = [
    "IS_BATCH_INVARIANT",
    "NAME",
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

NAME = "triton"
IS_BATCH_INVARIANT = False


def invariant(max_model_len: int) -> SimpleNamespace:
    """Return the set that is batch-invariant in 16 bits, for requests of so many tokens.

    Chains are not compiled: for one row the compiler may reduce in another order than for many.
    """
    own_plan = partial(plan, keys_per_piece=invariant_keys_per_piece(max_model_len))
    own = {"IS_BATCH_INVARIANT": True, "plan": own_plan, "block_scaled_linear": invariant_block_scaled_linear}
    return SimpleNamespace(**globals() | own)
