"""The packed product is the plain one."""

import pytest
import torch
import torch.nn.functional as F

from workers.kernels.linear import Linear


@pytest.mark.parametrize("num_rows", [0, 1, 7, 8, 17, 200])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_outputs", [130, 1030], ids=["small", "large"])
def test_linear_equals_torch_for_every_row_count(num_rows: int, has_bias: bool, num_outputs: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(num_rows, 2 * 192)[:, ::2]  # rows need not be contiguous
    weight, bias = torch.randn(num_outputs, 192), torch.randn(num_outputs) if has_bias else None
    linear = Linear(weight, bias)
    torch.testing.assert_close(linear(x), F.linear(x, weight, bias), atol=1e-4, rtol=1e-5)
    assert linear.weight_OI.shape == weight.shape


def test_a_large_weight_is_held_once() -> None:
    weight = torch.randn(1030, 192)
    linear = Linear(weight)
    if torch.backends.mkldnn.is_available():
        assert linear.weight_OI is not weight and linear.weight_OI.is_mkldnn
