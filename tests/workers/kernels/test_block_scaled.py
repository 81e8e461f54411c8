"""Products with weights in 8-bit blocks equal those with the dequantized weights, in both kernel sets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: nothing was shown about its kernels")

from workers.kernels import fused, reference, triton_linear
from workers.kernels.block_scaled import (
    KEPT_TYPES,
    PACKED,
    SPLIT_ROWS,
    BlockScaled,
    num_splits,
    packed,
    reordered,
    stacked,
    tile_columns,
    unpacked,
)
from workers.kernels.interpreted import is_interpreted
from workers.kernels.linear import Linear
from workers.kernels.select import Kernels

DEVICE = "cpu" if is_interpreted() else "cuda"
IS_OLD = DEVICE == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9)
needs_float8 = pytest.mark.skipif(IS_OLD, reason="a GPU that does not convert float8")
both = pytest.mark.parametrize("kernels", [reference, pytest.param(fused, marks=needs_float8)], ids=["torch", "triton"])
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-10}
"""Half a unit in the last place of the largest output, and what the order of summation changes."""


def scaled(
    num_outputs: int, num_inputs: int, dtype: torch.dtype, *, block: int = 128, seed: int = 0, kind: str = "float8"
) -> BlockScaled:
    """Return a random weight. kind: of its values; in 4 bits it has whole units of columns."""
    generator = torch.Generator().manual_seed(seed)
    values = 100 * torch.randn(num_outputs, num_inputs, generator=generator)
    scale = 1e-3 * torch.rand(-(-num_inputs // block), num_outputs, generator=generator)
    if kind == "float8":
        stored = values.clamp(-448, 448).to(torch.float8_e4m3fn).to(DEVICE)
        return BlockScaled(stored, scale.to(DEVICE), None, block, dtype)
    few = kind == "4 bits"
    integers = values.div(15 if few else 1).round().clamp(*((-8, 7) if few else (-128, 127))).to(torch.int8)
    zero = torch.randint(-9, 9, scale.shape, generator=generator).to(torch.int16)
    stored = packed(integers) if few else integers
    return BlockScaled(stored.to(DEVICE), scale.to(dtype).to(DEVICE), zero.to(DEVICE), block, dtype)


def rows(num_rows: int, num_inputs: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, num_inputs, generator=generator).to(dtype).to(DEVICE)


@needs_float8
@halves
def test_every_float8_value_is_rounded_as_when_it_is_dequantized(dtype: torch.dtype) -> None:
    """Each row of an identity matrix selects one input, and adding zeros to it changes nothing."""
    codes = torch.arange(256, dtype=torch.uint8)
    values_I = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)  # without NaN
    values_OI = values_I.view(torch.uint8).expand(70, -1).contiguous().view(torch.float8_e4m3fn)
    scale_BO = torch.rand(2, 70, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 2, 70)
    weight = BlockScaled(values_OI.to(DEVICE), scale_BO.to(DEVICE), None, 128, dtype)
    identity = torch.eye(len(values_I), dtype=dtype, device=DEVICE)
    exact = (values_OI.float() * scale_BO.t().repeat_interleave(128, 1)[:, : len(values_I)]).to(dtype)
    assert torch.equal(weight.dequantized().cpu(), exact)
    for num_rows in (16, SPLIT_ROWS, len(values_I)):
        assert torch.equal(fused.block_scaled_linear(identity[:num_rows], weight, None).cpu(), exact.t()[:num_rows])


ROWS = (0, 1, 16, 17, 33, 65, SPLIT_ROWS, SPLIT_ROWS + 1)
SHAPES = [(64, 128, 128), (1, 32, 32), (130, 200, 128), (97, 90, 64), (65, 384, 256), (70, 2304, 128), (33, 3089, 128)]
"""Outputs, inputs and the inputs of a block."""


@needs_float8
@halves
@pytest.mark.parametrize("kind", ["float8", "int8", "4 bits"])
@pytest.mark.parametrize("shape", [*SHAPES[:5], (40, 192, 192)], ids=str)
def test_a_temporary_has_the_values_of_the_dequantized_weight(
    shape: tuple[int, int, int], kind: str, dtype: torch.dtype
) -> None:
    """To the bit, beyond no end of it, and where blocks have several tiles."""
    num_outputs, num_inputs, block = shape
    num_inputs = num_inputs // 32 * 32 if kind == "4 bits" else num_inputs
    weight = scaled(num_outputs, num_inputs, dtype, block=block, kind=kind)
    found = triton_linear.dequantized(weight)
    assert found.dtype == dtype and torch.equal(found, weight.dequantized())


@both
@pytest.mark.parametrize(
    ("dtype", "num_rows", "num_outputs", "num_inputs", "block", "kind"),
    [
        pytest.param(dtype, num_rows, *shape, kind, marks=[pytest.mark.slow] if shape[1] > 2000 else [])
        for (i, num_rows), (k, shape) in product(enumerate(ROWS), enumerate(SHAPES))
        for dtype in ((torch.bfloat16, torch.float16)[(i + k) % 2],)  # each with every number of rows and every shape
        for kind in ("float8", *((("int8", "4 bits")[(i + k // 2) % 2],) if shape[1] < 2000 else ()))
    ],
)
def test_a_product_equals_that_with_the_dequantized_weight(
    kernels: Kernels, dtype: torch.dtype, num_rows: int, num_outputs: int, num_inputs: int, block: int, kind: str
) -> None:
    """Blocks and tiles end outside of the weight; the last two shapes are split."""
    num_inputs = num_inputs // 32 * 32 if kind == "4 bits" else num_inputs
    weight = scaled(num_outputs, num_inputs, dtype, block=block, kind=kind)
    x = rows(num_rows, 2 * num_inputs + 8, dtype)
    bias = rows(1, num_outputs, dtype)[0]
    for part, added in ((x[:, :num_inputs], None), (x[:, 8 : 8 + 2 * num_inputs : 2], bias)):
        exact = F.linear(part.double(), weight.dequantized().double(), None if added is None else added.double())
        made = Linear(weight, added, kernels)(part)
        assert made.dtype == dtype and made.shape == exact.shape == (num_rows, num_outputs)
        if num_rows:
            rounds_parts = kernels is reference and DEVICE == "cuda"  # cuBLAS may add parts of a sum in 16 bits
            assert (made.double() - exact).abs().max() <= (1 + rounds_parts) * TOLERANCE[dtype] * exact.abs().max()


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(130, 200), (1, 64), pytest.param(70, 2304, marks=pytest.mark.slow)]
)
def test_a_product_with_a_weight_in_16_bits_equals_torchs(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    weight, bias = rows(num_outputs, num_inputs, torch.bfloat16), rows(1, num_outputs, torch.bfloat16)[0]
    x = rows(num_rows, 2 * num_inputs, torch.bfloat16)[:, ::2]
    exact = F.linear(x.double(), weight.double(), bias.double())
    made = Linear(weight, bias, cast(Kernels, fused.invariant(1024)))(x)
    assert made.dtype == torch.bfloat16 and made.shape == exact.shape
    if num_rows:
        assert (made.double() - exact).abs().max() <= TOLERANCE[torch.bfloat16] * exact.abs().max()


@needs_float8
@pytest.mark.parametrize("num_inputs", [200, pytest.param(2304, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_rows", [16, 32, 64, SPLIT_ROWS, 200])
def test_the_rows_beside_it_do_not_change_a_row(num_rows: int, num_inputs: int) -> None:
    weight, x = scaled(70, num_inputs, torch.bfloat16), rows(num_rows, num_inputs, torch.bfloat16)
    product = fused.invariant(1024).block_scaled_linear
    together = product(x, weight, None)
    for row in (0, num_rows // 2, num_rows - 1):
        other = torch.full_like(x, torch.nan)
        other[row] = x[row]
        assert torch.equal(product(other, weight, None)[row], together[row])
    fewer = num_rows // 2 + 3  # in the same tile, some of whose rows are then missing
    if num_rows < 200:
        assert torch.equal(product(x[:fewer], weight, None), together[:fewer])


@needs_float8
@pytest.mark.usefixtures("sums_in_order")
@pytest.mark.parametrize("num_inputs", [200, pytest.param(2304, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_the_number_of_rows_does_not_change_a_row(num_inputs: int, is_scaled: bool) -> None:
    x, kernels = rows(200, num_inputs, torch.bfloat16), cast(Kernels, fused.invariant(1024))
    weight = scaled(70, num_inputs, torch.bfloat16) if is_scaled else rows(70, num_inputs, torch.bfloat16)
    product = Linear(weight, None, kernels)
    together = product(x)
    for first, num_rows in ((0, 1), (7, 2), (3, 16), (1, 17), (9, 33), (130, 64), (0, 65), (40, 150)):
        assert torch.equal(product(x[first : first + num_rows]), together[first : first + num_rows])


def test_sums_are_split_for_narrow_weights_alone() -> None:
    assert [num_splits(*shape) for shape in ((4096, 4096), (4096, 12288), (6144, 4096), (24576, 4096))] == [4, 4, 3, 1]
    assert num_splits(64, 128) == 1 and num_splits(64, 1 << 20) == 8


@pytest.mark.parametrize(("block", "columns"), [(128, 128), (256, 128), (96, 32), (64, 64), (24, None), (1, None)])
def test_a_tile_never_crosses_blocks(block: int, columns: int | None) -> None:
    assert tile_columns(block) == columns


def test_every_integer_has_its_own_4_bits() -> None:
    values = torch.randint(-8, 8, (5, 192), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    assert packed(values).shape == (5, 96) and torch.equal(unpacked(packed(values)), values)
    assert packed(torch.arange(-8, 8).repeat(2)[None]).tolist() == [[17 * code for code in range(16)]]
    weight = BlockScaled(packed(values), torch.full((2, 5), 0.5), torch.full((2, 5), 3), 128, torch.float32)
    assert weight.shape == (5, 192) and torch.equal(weight.dequantized(), (values.float() - 3) / 2)


@both
@pytest.mark.parametrize("kind", ["float8", "int8", "4 bits"])
def test_stacked_parts_are_one_weight(kernels: Kernels, kind: str) -> None:
    width = 192 if kind == "4 bits" else 200
    parts = [scaled(count, width, torch.bfloat16, seed=count, kind=kind) for count in (48, 16, 17)]
    whole, x = stacked(parts), rows(5, width, torch.bfloat16)
    assert isinstance(whole, BlockScaled) and whole.shape == (81, width)
    apart = torch.cat([part.dequantized() for part in parts])
    assert torch.equal(whole.dequantized(), apart)
    other = reordered(whole, torch.arange(81, device=DEVICE).flip(0))
    assert isinstance(other, BlockScaled) and torch.equal(other.dequantized(), apart.flip(0))
    expected = torch.cat([kernels.block_scaled_linear(x, part, None) for part in parts], dim=1)
    torch.testing.assert_close(kernels.block_scaled_linear(x, whole, None), expected, atol=0.02, rtol=2**-7)


def test_parts_of_several_kinds_are_dequantized() -> None:
    one = scaled(48, 200, torch.bfloat16)
    others: Sequence[Tensor | BlockScaled] = (
        torch.ones(3, 200, dtype=torch.bfloat16, device=DEVICE),
        scaled(48, 200, torch.bfloat16, block=64),
        scaled(48, 200, torch.bfloat16, kind="int8"),
    )
    for other in others:
        whole = stacked([one, other])
        plain = other.dequantized() if isinstance(other, BlockScaled) else other
        assert isinstance(whole, Tensor) and torch.equal(whole, torch.cat([one.dequantized(), plain]))


def test_only_half_precision_on_a_device_that_converts_float8_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    for capability, is_kept in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        expected = KEPT_TYPES if is_kept else {torch.int8, PACKED}
        assert fused.kept_types(torch.bfloat16, device) == fused.kept_types(torch.float16, device) == expected
        assert not fused.kept_types(torch.float32, device) and not reference.kept_types(torch.bfloat16, device)
