"""On a worker's PYTHONPATH: it starts with the simulated device, and has gloo where it asks for NCCL."""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
import torch.distributed as dist

from tests.support.simulated_cuda import simulated_cuda

_init = dist.init_process_group


def _init_with_gloo(backend: str, **options: Any) -> None:
    assert backend == "cpu:gloo,cuda:nccl"
    _init("gloo", **options)


dist.init_process_group = _init_with_gloo
_device = simulated_cuda()  # held: it would end with its generator
_device.__enter__()
