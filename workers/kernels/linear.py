"""Matrix products with a fixed weight; on CPU in float32 also from a weight packed once for oneDNN.

Verifying a tree should cost little more than decoding one token. torch's linear on CPU re-reads an unpacked weight for
every call and at 17 rows costs twice the packed product (hidden 192, one thread, 2026-11: 207 against 112 us a layer);
below 8 rows the unpacked one is faster, so both are kept and the row count decides.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_PACKED_FROM_ROWS = 8
_TYPICAL_ROWS = 16  # what oneDNN lays the packed weight out for


class Linear:
    """y = x W^T + b for x [N, I], weight [O, I], bias [O] or None."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.weight_OI, self.bias_O = weight_OI, bias_O
        self._packed: Tensor | None = None
        on_cpu = weight_OI.device.type == "cpu" and weight_OI.dtype == torch.float32
        if on_cpu and torch.backends.mkldnn.is_available() and weight_OI.numel():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _TYPICAL_ROWS)

    def __call__(self, x_NI: Tensor) -> Tensor:
        if self._packed is None or x_NI.shape[0] < _PACKED_FROM_ROWS:
            return F.linear(x_NI, self.weight_OI, self.bias_O)
        # torch has no public door to a packed float32 linear; this is the operator its own compiler emits.
        return torch.ops.mkldnn._linear_pointwise(x_NI.contiguous(), self._packed, self.bias_O, "none", [], "")
