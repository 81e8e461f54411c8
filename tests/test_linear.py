"""A product is torch's own, in whichever layout the weight is kept."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from workers.kernels import linear
from workers.kernels.linear import Linear


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 7, 17, 200])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_outputs", [130, 1030, 1400, 5500])
@pytest.mark.parametrize("has_avx512", [False, True])
def test_linear_equals_torch_for_every_row_count(
    num_rows: int, has_bias: bool, num_outputs: int, has_avx512: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(num_rows, 2 * 192)[:, ::2]  # rows need not be contiguous
    weight, bias = torch.randn(num_outputs, 192), torch.randn(num_outputs) if has_bias else None
    with mock.patch.object(linear, "_HAS_AVX512", has_avx512):
        made = Linear(weight, bias)
    torch.testing.assert_close(made(x), F.linear(x, weight, bias), atol=1e-4, rtol=1e-5)
    assert made.weight_OI.shape == weight.shape


def test_with_avx512_a_large_weight_is_held_once() -> None:
    weight = torch.randn(1030, 192)
    with mock.patch.object(linear, "_HAS_AVX512", True):
        made = Linear(weight)
    if torch.backends.mkldnn.is_available():
        assert made.weight_OI is not weight and made.weight_OI.is_mkldnn
