"""Copies between host and device with few synchronizations: after each one, the device idles until the next launch.

    to_device(values, device) -> Tensor     without synchronizing
    to_host(*tensors) -> list of arrays     with one copy and one synchronization for all tensors

On CPU neither copies anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from workers.pulse import PULSE


def to_device(values: Tensor | np.ndarray | Sequence[int], device: torch.device | str) -> Tensor:
    """Copy host values to a device; Python integers become int64.

    The driver stages pageable memory before this returns, so the caller may overwrite `values` at once.
    """
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(values)
    elif not isinstance(values, Tensor):
        values = torch.from_numpy(np.array(values, dtype=np.int64))  # a fifth of the time of torch.tensor
    return values.to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> list[np.ndarray]:
    """Copy tensors of one device, of any numpy dtypes, to the host."""
    if tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    each = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    on_device = torch.cat(each) if len(each) > 1 else each[0]
    with PULSE.on_device():
        packed = on_device.cpu()
    parts = packed.split([tensor.numel() * tensor.element_size() for tensor in tensors])
    return [
        part.numpy().view(str(tensor.dtype).removeprefix("torch.")).reshape(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]
