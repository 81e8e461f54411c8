"""Between the host and a device, waiting as little as possible: after a wait the device idles until the next launch.

    sent(values, device) -> Tensor          on the device, without waiting for what that is doing
    fetched(*tensors) -> list of arrays     on the host, with one copy and one wait for all of them

On CPU neither moves anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(values: Tensor | np.ndarray | Sequence[int], device: torch.device | str) -> Tensor:
    """Numbers of the host; plain integers become int64.

    The driver keeps pageable memory for the copy before this returns, so its owner may write there again at once.
    """
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(values)
    elif not isinstance(values, Tensor):
        values = torch.tensor(values, dtype=torch.int64)
    return values.to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> list[np.ndarray]:
    """Tensors of one device, of any types that numpy has."""
    if tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    packed = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors]).cpu()
    parts = packed.split([tensor.numel() * tensor.element_size() for tensor in tensors])
    return [
        part.numpy().view(str(tensor.dtype).removeprefix("torch.")).reshape(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]
