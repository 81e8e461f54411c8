"""Matrix products with a fixed weight; on CPU in float32 from the layouts that are fast there.

Verifying a tree should cost little more than decoding one token. torch's linear on CPU reads an unpacked weight slowly,
and from two rows slower still: at hidden 1024 (300 M parameters, one thread with AVX-512, 2026-11) a forward of 1, 2,
5, 9 and 17 rows takes 67, 136, 147, 62 and 87 ms unpacked below 8 rows, and 41, 43, 53, 64 and 87 ms from weights
packed once for oneDNN. Calling the packed product costs some 10 us more, which matters for small weights: they are kept
in both forms, large ones only packed.

Without AVX-512 the call costs 50 us more, and small weights are faster unpacked at any number of rows if they lie
column by column: the 33 products of the bundled target take 1.7, 2.3, 3.6 and 4.8 ms with 1, 2, 8 and 17 rows instead
of 2.6, 3.1, 3.8 and 5.1 as torch has them, and 3.6, 3.4, 4.2 and 5.1 packed. A single row is faster by columns whatever
the size (300 M parameters: 55 ms, 70 as torch has them, 84 packed; two rows 102, 125 and 85), so that large weights are
kept in both forms there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
_TYPICAL_ROWS = 16  # what oneDNN lays the packed weight out for; laid out for 1, it is half as fast with any number


class Linear:
    """y = x W^T + b for x [N, I], weight [O, I], bias [O] or None."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        # A packed tensor has the weight's shape, if not its elements in a readable order.
        self.weight_OI, self.bias_O = weight_OI, bias_O
        self._packed: Tensor | None = None
        self._packed_from_rows = 0
        on_cpu = weight_OI.device.type == "cpu" and weight_OI.dtype == torch.float32
        if not (on_cpu and torch.backends.mkldnn.is_available() and weight_OI.numel()):
            return
        if not _HAS_AVX512:
            self.weight_OI = weight_OI.t().contiguous().t()
        if from_rows := _worth_packing_from(weight_OI.numel()):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _TYPICAL_ROWS)
            self._packed_from_rows = from_rows
            if from_rows == 1:
                self.weight_OI = self._packed

    def __call__(self, x_NI: Tensor) -> Tensor:
        if self._packed is None or x_NI.shape[0] < self._packed_from_rows:
            if x_NI.shape[0] == 0:
                return x_NI.new_empty(0, self.weight_OI.shape[0])
            return F.linear(x_NI, self.weight_OI, self.bias_O)
        # torch has no public door to a packed float32 linear; this is the operator its own compiler emits.
        return torch.ops.mkldnn._linear_pointwise(x_NI.contiguous(), self._packed, self.bias_O, "none", [], "")


def _worth_packing_from(num_elements: int) -> int | None:
    """From how many rows the packed product is faster, None = never; 1: the weight is kept in no other form."""
    if _HAS_AVX512:
        return 1 if num_elements >= 1 << 17 else 3
    if num_elements < 1 << 18:
        return None
    return 2 if num_elements >= 1 << 20 else 3
