"""On a process's PYTHONPATH: it starts with the simulated device, and has gloo where it asks for NCCL.

Benchmarks and tests of GPUs find a device, too. Their events tell the host's time, and profiles have no kernels.

SIGUSR1 stops the device: its replays and collectives never end, as when a peer is missing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
import torch
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


class Receipt:
    """Stands for what `dist.irecv` returns. gloo's is complete only once someone has waited for it, just once."""

    def __init__(self, work: Any) -> None:
        self._work, self._is_hung = work, work is None

    def is_completed(self) -> bool:
        self.wait()
        return not self._is_hung

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()


dist.init_process_group = _init_with_gloo
_device = simulated_cuda()  # held: it would end with its generator
_cuda = _device.__enter__()
for _name in ("all_gather", "all_reduce", "broadcast", "recv", "send"):
    setattr(dist, _name, _on_stream(getattr(dist, _name)))
_irecv = _on_stream(dist.irecv)
dist.irecv = lambda *args, **options: Receipt(_irecv(*args, **options))
signal.signal(signal.SIGUSR1, lambda *_: _cuda.hang())


class Event:
    """torch.cuda.Event by the host's clock."""

    def __init__(self, **_: Any) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end._at - self._at)


class Generator(torch.Generator):
    """torch.Generator, whose numbers are drawn on the CPU."""

    def __new__(cls, device: Any = None) -> Generator:
        return super().__new__(cls)


torch.Generator = Generator  # type: ignore[misc]
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_name = lambda device=None: "simulated device"
torch.cuda.Event = Event  # type: ignore[misc,assignment]
