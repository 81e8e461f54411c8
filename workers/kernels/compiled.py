"""`workers.kernels.fused` with compiled pointwise chains: one or two Triton kernels where plain torch launches many.

A chain is compiled up to three times: for its first number of rows, for any number and for a single row. Other sizes
compile nothing further. Graph capture runs each chain once before it records it. Matrix products, attention and the
all-reduce between them are not part of any chain.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import ParamSpec, TypeVar

import torch
import torch._inductor.config

from workers.kernels import fused, pointwise

# Each rank has a few small chains to compile, and would start a process per core for them.
torch._inductor.config.compile_threads = 1

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def compiled(chain: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Compile a chain with the rounding of its eager form.

    Widths are compile-time constants, which allows vectorized loads (`dynamic=True` would make them variables). The
    number of rows becomes a variable at its second value.
    """
    return torch.compile(chain, options={"emulate_precision_casts": True})


_CHAINS = {name: compiled(getattr(pointwise, name)) for name in pointwise.__all__}
KERNELS = SimpleNamespace(**vars(fused) | _CHAINS)
