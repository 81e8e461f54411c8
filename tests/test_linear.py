"""The packed product is the plain one."""

import pytest
import torch
import torch.nn.functional as F

from workers.kernels.linear import Linear


@pytest.mark.parametrize("num_rows", [0, 1, 7, 8, 17, 200])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_equals_torch_for_every_row_count(num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(num_rows, 2 * 192)[:, ::2]  # rows need not be contiguous
    weight, bias = torch.randn(130, 192), torch.randn(130) if has_bias else None
    torch.testing.assert_close(Linear(weight, bias)(x), F.linear(x, weight, bias), atol=1e-4, rtol=1e-5)
