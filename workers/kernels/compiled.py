"""`workers.kernels.fused` with every pointwise chain compiled: a Triton kernel or two where plain torch launches many.

A chain is compiled when it is first run on rows of a new kind: once for their exact number, once for any number and
once for a single row; later steps of other sizes compile nothing. Captured graphs run it once before they record it.
What does not fit a chain stays outside: products, attention, and the reduction over the ranks between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from workers.kernels import pointwise
from workers.kernels.fused import (
    NAME,
    copy_slots,
    coupled_argmax,
    gumbel,
    plan,
    top_k,
    tree_attention,
    truncation_threshold,
)

__all__ = [
    "NAME",
    "add_rms_norm",
    "copy_slots",
    "coupled_argmax",
    "gumbel",
    "plan",
    "rms_norm",
    "rotate_",
    "silu_mul",
    "top_k",
    "tree_attention",
    "truncation_threshold",
]

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def compiled(chain: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """The chain as few kernels, rounding where it rounds. Widths are constants to the compiler, so that it reads whole
    vectors (`dynamic=True` would hide them); numbers of rows become a variable as soon as there are two."""
    return torch.compile(chain, options={"emulate_precision_casts": True})


rms_norm = compiled(pointwise.rms_norm)
add_rms_norm = compiled(pointwise.add_rms_norm)
silu_mul = compiled(pointwise.silu_mul)
rotate_ = compiled(pointwise.rotate_)
