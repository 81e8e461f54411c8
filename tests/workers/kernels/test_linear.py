"""A linear layer equals torch's in every weight layout."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.kernels import linear
from workers.kernels.linear import Linear
from workers.kernels.select import INVARIANT

needs_fbgemm = pytest.mark.skipif(not linear._HAS_FBGEMM, reason="torch without FBGEMM, or a CPU without AVX2")


def stored(dtype: torch.dtype, num_outputs: int, num_inputs: int = 192) -> Tensor:
    """Return a float32 weight as read from a checkpoint of `dtype`."""
    generator = torch.Generator().manual_seed(num_outputs)
    return torch.randn(num_outputs, num_inputs, generator=generator).mul_(0.02).to(dtype).float()


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 7, 17, 200])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_outputs", [1, 130, 1030, 5500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_avx512", [False, True])
def test_linear_equals_torch_for_every_row_count(
    num_rows: int, has_bias: bool, num_outputs: int, dtype: torch.dtype, has_avx512: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(num_rows, 2 * 192)[:, ::2]  # rows need not be contiguous
    weight, bias = stored(dtype, num_outputs), torch.randn(num_outputs) if has_bias else None
    with mock.patch.object(linear, "_HAS_AVX512", has_avx512):
        made = Linear(weight, bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(made(x).double(), exact, atol=2e-6, rtol=1e-6)
    assert made.shape == weight.shape


@needs_fbgemm
@pytest.mark.parametrize(
    ("weight", "is_kept_in_half"),
    [
        (stored(torch.float16, 300), True),
        (stored(torch.bfloat16, 300), True),
        (stored(torch.bfloat16, 300) / 8, True),  # some values below 2^-17
        (torch.zeros(300, 192), True),
        (stored(torch.float32, 300), False),
        (stored(torch.bfloat16, 300) * 2.0**-12, False),  # most of them below it
        (torch.cat((stored(torch.bfloat16, 300), torch.full((1, 192), 2.0**17))), False),  # infinite in half
        (torch.cat((stored(torch.bfloat16, 70_000), stored(torch.float32, 1))), False),  # one row, and it comes last
    ],
)
def test_a_weight_is_kept_in_half_precision_where_that_loses_nothing(weight: Tensor, is_kept_in_half: bool) -> None:
    made = Linear(weight)
    assert (made._product is torch.fbgemm_linear_fp16_weight_fp32_activation) == is_kept_in_half
    assert linear.bytes_per_weight(weight) == (2 if is_kept_in_half else 4)
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    exact = x.double() @ weight.double().t()
    torch.testing.assert_close(made(x).double(), exact, atol=2e-6 * float(exact.abs().max()), rtol=0)


@needs_fbgemm
@pytest.mark.skipif(not linear._HAS_AVX512, reason="without AVX-512 rows are multiplied by kernels of several heights")
def test_with_avx512_the_rows_beside_it_do_not_change_a_row() -> None:
    made, x = Linear(stored(torch.bfloat16, 1030)), torch.randn(70, 192)
    together = made(x)
    for num_rows in range(1, 70):
        assert torch.equal(made(x[:num_rows]), together[:num_rows])


def test_a_large_float32_weight_is_held_once() -> None:
    weight = torch.randn(1030, 192)
    with mock.patch.object(linear, "_HAS_AVX512", True):
        made = Linear(weight)
    if torch.backends.mkldnn.is_available():
        assert made.weight is not weight and made.weight.is_mkldnn


@pytest.mark.skipif(not linear._HAS_BFLOAT16, reason="a CPU that does not multiply bfloat16")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_outputs", [1, 130, 1030])
def test_bfloat16_is_multiplied_from_a_packed_weight_and_added_in_float32(num_outputs: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight = stored(torch.bfloat16, num_outputs, 1536).bfloat16()
    bias = torch.randn(num_outputs).bfloat16() if has_bias else None
    made = Linear(weight, bias)
    assert made.weight.is_mkldnn
    for num_rows in (0, 1, 7, 17, 70):
        x = torch.randn(num_rows, 1536).bfloat16()
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        # One rounding of the sum, to 8 bits; sums in bfloat16 would be off by some sqrt(1536) roundings.
        torch.testing.assert_close(made(x).double(), exact, atol=2e-5, rtol=2**-8)


@pytest.mark.skipif(not linear._HAS_BFLOAT16, reason="a CPU that does not multiply bfloat16")
@pytest.mark.parametrize("has_amx", sorted({linear._HAS_AMX, True}))  # blocks are exact without AMX, too
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(576, 1536), (2048, 2048), (256, 576)])
def test_a_row_has_the_same_bits_alone(
    num_outputs: int, num_inputs: int, has_amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_HAS_AMX", has_amx)
    made = Linear(stored(torch.bfloat16, num_outputs, num_inputs).bfloat16(), None, INVARIANT)
    x = (torch.randn(256, num_inputs, generator=torch.Generator().manual_seed(0)) ** 5).bfloat16()  # some are large
    for num_rows in (1, 2, 5, 17, 64, 100):
        parts = [made(x[at : at + num_rows]) for at in range(0, 256, num_rows)]
        assert torch.equal(torch.cat(parts), made(x)), num_rows
