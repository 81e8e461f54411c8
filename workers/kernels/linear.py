"""Linear layers; on CPU with weights in faster layouts, on CUDA with weights in 8-bit blocks if they are stored so.

Decoding reads every weight for a few rows, so the bytes read and the overhead per call determine the time. Published
weights are stored in 16 bits, and half precision usually represents them exactly. Such a weight is packed for FBGEMM,
which reads float16, and multiplies and adds in float32. Milliseconds for all products of a forward pass, on one thread
of an AMD EPYC with AVX-512 (2026-11):

    rows                              1      2      4      8     17
    bundled   torch's linear        2.1    3.0    2.6    3.1    4.5
              packed for oneDNN     1.7    2.1    1.5    2.0    3.1
              halves for FBGEMM     0.4    0.4    0.5    0.9    1.7
    300 M     torch's linear         66    120    125    145    225
              packed for oneDNN      67     85     59     74    113
              halves for FBGEMM      17     19     30     50    102

Checking and packing a billion weights takes about 9 s at start-up, and oneDNN's packing 3 s. With AVX-512 disabled on
this CPU, the bundled shapes gain as much. Then a row's product may differ in the last bit depending on the number of
rows in the batch; with AVX-512 it never does. FBGEMM's product runs on one thread, as a CPU worker does.

With `dtype` bfloat16, weights are packed for oneDNN where the processor multiplies bfloat16 (AVX-512-BF16, AMX). Sums
are in float32. A forward pass then costs nearly the same for 1 and for 17 rows, which is what makes trees pay.
Milliseconds for all products of a 135 M model without its output layer, on one thread of a Xeon with AMX beside other
load (2026-11):

    rows                              1      2      4      8     17     32     64
    halves for FBGEMM, float32       18     18     22     31     51     73    109
    bfloat16, torch's linear         29     31     31     31     36     35     45
    bfloat16, packed for oneDNN      20     20     21     21     24     24     29

With AVX-512-BF16 a row's product has the same bits for any number of rows but one, so `batch_invariant` adds a row of
zeros to a single one. With AMX the order of sums depends on the number of rows, and `batch_invariant` multiplies blocks
of always 64. The same model with its output layer, on one thread of that Xeon; the last line has AMX switched off
(ONEDNN_MAX_CPU_ISA), which would be exact, too:

    rows                              1      2      5     17     32     64    128    256
    packed for oneDNN                28     25     27     32     33     35     53     81
    in blocks of 32                  37     37     37     38     38     72    128    229
    in blocks of 64                  40     40     40     43     43     45     84    159
    with AVX-512-BF16                35     33     36     73    122    241    462    907

Attention differs more often, see `workers.kernels.torch_attention.plan_by_paths`. Without either a near-tie may
be decided differently in another batch, and float32 is the safer choice.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.kernels.block_scaled import BlockScaled
from workers.kernels.select import TORCH, Kernels, multiplies_bfloat16

_HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines  # built in, and supported by the CPU
_HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
_HAS_BFLOAT16 = multiplies_bfloat16()
_HAS_AMX = _HAS_BFLOAT16 and torch.cpu._is_amx_tile_supported()
_BLOCK_ROWS = 64  # of batch-invariant products with AMX
_WORTH_PACKING = 1 << 17  # elements from which oneDNN's product is faster, although a call takes 10 us longer
_COMPARED_AT_ONCE = 1 << 20  # elements compared at once, to avoid a copy of the whole weight
_TYPICAL_ROWS = 16  # oneDNN packs for this number of rows; packed for 1 it is half as fast for any number

# The alternative entry point, torch.ops.quantized.linear_dynamic_fp16, takes 10 us longer per call.
warnings.filterwarnings("ignore", "fbgemm_.* is deprecated", UserWarning)

_Product = Callable[[Tensor, Any, Tensor | None], Tensor]
"""(x_NI, weight, bias_O) -> [N, O]"""


class Linear:
    """y = x W^T + b for x [N, I], weight [O, I], bias [O] or None.

    weight: a tensor in any layout that its product reads, or 8-bit blocks, which `kernels` multiply.
    """

    weight: Any
    _product: _Product

    def __init__(self, weight_OI: Tensor | BlockScaled, bias_O: Tensor | None = None, kernels: Kernels = TORCH) -> None:
        self.shape = weight_OI.shape
        self.bias_O = bias_O
        self._is_invariant = False
        if isinstance(weight_OI, BlockScaled):
            self.weight, self._product = weight_OI, kernels.block_scaled_linear
        elif kernels.IS_BATCH_INVARIANT and kernels.invariant_linear is not None:
            self.weight, self._product = weight_OI, kernels.invariant_linear
        else:
            self.weight, self._product = _pack(weight_OI)
            self._is_invariant = kernels.IS_BATCH_INVARIANT

    def __call__(self, x_NI: Tensor) -> Tensor:
        """Apply the layer."""
        if x_NI.shape[0] == 0:
            return x_NI.new_empty(0, self.shape[0])
        if not self._is_invariant:
            return self._product(x_NI, self.weight, self.bias_O)
        if _HAS_AMX:
            return torch.cat([self._padded(part, _BLOCK_ROWS) for part in x_NI.split(_BLOCK_ROWS)])
        return self._padded(x_NI, max(2, x_NI.shape[0]))

    def _padded(self, x_NI: Tensor, num_rows: int) -> Tensor:
        """Apply the layer to so many rows, of which those after x are zeros."""
        own = x_NI.shape[0]
        return self._product(F.pad(x_NI, (0, 0, 0, num_rows - own)), self.weight, self.bias_O)[:own]


def bytes_per_weight(weight_OI: Tensor) -> int:
    """Return the bytes that `Linear` keeps of each element of this weight, and reads for every product."""
    return 2 if _is_kept_half(weight_OI) else weight_OI.element_size()


def _pack(weight_OI: Tensor) -> tuple[Tensor, _Product]:
    """Return the packed weight and the product that reads it. A packed weight may be opaque to other operations."""
    if weight_OI.device.type != "cpu" or not weight_OI.numel():
        return weight_OI, F.linear
    if weight_OI.dtype == torch.bfloat16 and _HAS_BFLOAT16:
        return torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _TYPICAL_ROWS), _onednn_linear
    if _is_kept_half(weight_OI):
        packed = torch.fbgemm_pack_gemm_matrix_fp16(weight_OI.contiguous())
        return packed, torch.fbgemm_linear_fp16_weight_fp32_activation
    is_packed = _HAS_AVX512 and torch.backends.mkldnn.is_available() and weight_OI.numel() >= _WORTH_PACKING
    if weight_OI.dtype == torch.float32 and is_packed:
        return torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _TYPICAL_ROWS), _onednn_linear
    return weight_OI, F.linear


def _is_kept_half(weight_OI: Tensor) -> bool:
    is_float32_on_cpu = weight_OI.device.type == "cpu" and weight_OI.dtype == torch.float32
    return is_float32_on_cpu and weight_OI.numel() > 0 and _HAS_FBGEMM and _is_half(weight_OI)


def _is_half(weight_OI: Tensor) -> bool:
    """Return True if half precision represents the weight well enough.

    The rounding error must be below that of a float32 sum of a few hundred products, and in each row below four times
    that. This holds for weights stored in float16, and for bfloat16 unless they are very small (only values below 2^-17
    lose a bit). The limit per row detects single rows that were trained or averaged in float32.
    """
    num_outputs, num_inputs = weight_OI.shape
    most = 2**-20 * float(torch.linalg.vector_norm(weight_OI))
    squares = 0.0
    for rows_RI in weight_OI.split(max(1, _COMPARED_AT_ONCE // num_inputs)):
        error_R = torch.linalg.vector_norm(rows_RI.half().float() - rows_RI, dim=1)
        squares += float(error_R.square().sum())
        if not (squares <= most**2 and float(error_R.max()) <= 4 * most / math.sqrt(num_outputs)):
            return False
    return True


def _onednn_linear(x_NI: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
    # torch has no public API for a packed float32 linear; its compiler emits this operator.
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI.contiguous(), packed, bias_O, "none", [], "")
    return out
