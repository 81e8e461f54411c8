"""Python functions in processes that are forks of one that has imported what ranks need, which takes seconds.

context() -> multiprocessing's context                      for `Process` and `Queue`
in_ranks(function, size, *args)                             function(rank, *args) in so many processes, to their ends
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any

import torch.multiprocessing

_IMPORTED = ["torch", "torch.distributed", "msgpack", "numpy", "pytest", "tests.support.fakes"]
_IMPORTED += ["tests.support.checkpoints", "transformers", "drafter.worker", "verifier.worker"]


def context() -> BaseContext:
    """Return the context that starts such processes."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_IMPORTED)
    return found


def in_ranks(function: Callable[..., None], size: int, *args: Any) -> None:
    """Run function(rank, *args) in `size` processes. Raises what one of them raises."""
    context()
    torch.multiprocessing.start_processes(function, args=args, nprocs=size, start_method="forkserver")
