"""On a worker's PYTHONPATH: it starts with the simulated device, and has gloo where it asks for NCCL.

SIGUSR1 stops the device: its replays and collectives never end, as when a peer is missing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import wraps
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from tests.support.simulated_cuda import OnDevice, simulated_cuda

_init = dist.init_process_group


def _init_with_gloo(backend: str, **options: Any) -> None:
    assert backend == "cpu:gloo,cuda:nccl"
    _init("gloo", **options)


def _on_stream(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective that a stopped device never begins; the host does not wait for it."""

    @wraps(collective)
    def called(*args: Any, **options: Any) -> Any:
        is_on_device = any(isinstance(leaf, OnDevice) for leaf in tree_leaves((args, options)))
        return None if _cuda.is_hung and is_on_device else collective(*args, **options)

    return called


dist.init_process_group = _init_with_gloo
_device = simulated_cuda()  # held: it would end with its generator
_cuda = _device.__enter__()
for _name in ("all_gather", "all_reduce", "broadcast", "recv", "send"):
    setattr(dist, _name, _on_stream(getattr(dist, _name)))
signal.signal(signal.SIGUSR1, lambda *_: _cuda.hang())
