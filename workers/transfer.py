"""Copies between host and device with few synchronizations: after each one, the device idles until the next launch.

On CPU nothing is copied.
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


def all_to_device(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[Tensor]:
    """Copy host arrays of any dtypes to a device with one copy; see `to_device`."""
    device = torch.device(device)
    if device.type == "cpu" or len(arrays) < 2:
        return [to_device(array, device) for array in arrays]
    # Wide types first, so that every part is aligned.
    order = sorted(range(len(arrays)), key=lambda i: -arrays[i].itemsize)
    packed = to_device(
        np.concatenate([np.ascontiguousarray(arrays[i]).reshape(-1).view(np.uint8) for i in order]), device
    )
    parts: dict[int, Tensor] = {}
    start = 0
    for i in order:
        stop = start + arrays[i].nbytes
        dtype = torch.from_numpy(arrays[i][:0]).dtype
        parts[i] = packed[start:stop].view(dtype).view(arrays[i].shape)
        start = stop
    return [parts[i] for i in range(len(arrays))]


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
