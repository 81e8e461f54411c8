"""Matrix products with a fixed weight; on CPU in float32 also from a weight packed once for oneDNN.

Verifying a tree should cost little more than decoding one token. torch's linear on CPU reads an unpacked weight slowly,
and from two rows slower still: at hidden 1024 (300 M parameters, one thread, 2026-11) a forward of 1, 2, 5, 9 and 17
rows takes 67, 136, 147, 62 and 87 ms unpacked below 8 rows, and 41, 43, 53, 64 and 87 ms packed for all. Calling the
packed product costs some 10 us more, which matters for small weights: they are kept in both forms, large ones only
packed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_LARGE = 1 << 17  # elements
_SMALL_PACKED_FROM_ROWS = 3
_TYPICAL_ROWS = 16  # what oneDNN lays the packed weight out for; laid out for 1, it is half as fast with any number


class Linear:
    """y = x W^T + b for x [N, I], weight [O, I], bias [O] or None."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.bias_O = bias_O
        self._packed = _packed(weight_OI)
        is_large = weight_OI.numel() >= _LARGE
        self._packed_from_rows = 1 if is_large else _SMALL_PACKED_FROM_ROWS
        # A packed tensor has the weight's shape, if not its elements in a readable order.
        self.weight_OI = self._packed if is_large and self._packed is not None else weight_OI

    def __call__(self, x_NI: Tensor) -> Tensor:
        if self._packed is None or x_NI.shape[0] < self._packed_from_rows:
            if x_NI.shape[0] == 0:
                return x_NI.new_empty(0, self.weight_OI.shape[0])
            return F.linear(x_NI, self.weight_OI, self.bias_O)
        # torch has no public door to a packed float32 linear; this is the operator its own compiler emits.
        return torch.ops.mkldnn._linear_pointwise(x_NI.contiguous(), self._packed, self.bias_O, "none", [], "")


def _packed(weight_OI: Tensor) -> Tensor | None:
    """The weight as oneDNN likes it; None where it would not help."""
    on_cpu = weight_OI.device.type == "cpu" and weight_OI.dtype == torch.float32
    if not (on_cpu and torch.backends.mkldnn.is_available() and weight_OI.numel()):
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _TYPICAL_ROWS)
