"""The pointwise chains match their formulas, and compiling them changes nothing but speed.

Without a GPU the compiler emits C++, which shows all but the Triton code; `gpu/` compiles them for CUDA.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.support.attention_cases import CHAIN, RAGGED, Batch
from tests.support.engines import BUNDLED
from tests.support.pairs import pairs
from workers.kernels import pointwise, reference
from workers.models.layers import Runtime
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.models.rope import Rope
from workers.models.specs import RopeSpec

torch.set_num_threads(1)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, WIDTH, HEAD_DIM, EPS = 6, 2, 192, 32, 1e-6
CHAINS = ["rms_norm", "add_rms_norm", "head_input", "silu_mul", "rotation", "rotate_", "norm_rotate_"]

needs_compiler = pytest.mark.skipif(
    DEVICE == "cpu" and not (shutil.which("g++") or shutil.which("clang++")),
    reason="no C++ compiler: nothing was shown about compiled chains",
)
DTYPES = [torch.float32, torch.bfloat16]
both = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@cache
def compiled_chain(name: str) -> Callable[..., Any]:
    compiled = pytest.importorskip("workers.kernels.compiled", reason="Triton is not installed")
    return compiled.compiled(getattr(pointwise, name))  # type: ignore[no-any-return]


def run(chain: Callable[..., Any], name: str, num_rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Run a chain on random rows; return its results, or the tensors that it may write."""
    draw = torch.Generator().manual_seed(num_rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(DEVICE, dtype)

    with torch.inference_mode():
        match name:
            case "rms_norm":
                return [chain(random(num_rows, WIDTH), random(WIDTH), EPS)]
            case "add_rms_norm":
                return [*chain(random(num_rows, WIDTH), random(num_rows, WIDTH), random(WIDTH), EPS)]
            case "head_input":
                tokens = torch.arange(num_rows, device=DEVICE) % 7
                norms = random(WIDTH), random(WIDTH)
                return [*chain(tokens, random(7, WIDTH), norms[0], random(num_rows, WIDTH), norms[1], EPS)]
            case "rotation":
                freq = rope(dtype).signed_freq_d
                return [*chain(torch.arange(num_rows, device=DEVICE), freq, 1.5, dtype)]
            case "silu_mul":
                return [chain(random(num_rows, 2 * WIDTH))]
            case _:
                qkv_NHd = random(num_rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
                qk_NHd = qkv_NHd[:, : HEADS + KV_HEADS]
                norm = (random(HEADS + KV_HEADS, HEAD_DIM), EPS) if name.startswith("norm_") else ()
                chain(qk_NHd, rope(dtype)(torch.arange(num_rows, device=DEVICE)), *norm)
                return [qkv_NHd]


def rope(dtype: torch.dtype) -> Rope:
    return Rope(RopeSpec(inv_freq=tuple(0.5**i for i in range(HEAD_DIM // 2)), scaling=1.5), dtype, DEVICE)


# Formulas


def test_a_norm_divides_by_the_root_mean_square() -> None:
    x, weight = torch.tensor([[3.0, -4.0]]), torch.tensor([1.0, 2.0])
    assert pointwise.rms_norm(x, weight, 0.0).tolist() == [pytest.approx([3 / 12.5**0.5, -8 / 12.5**0.5])]
    total, normed = pointwise.add_rms_norm(torch.tensor([[1.0, -5.0]]), torch.tensor([[2.0, 1.0]]), weight, 0.0)
    assert torch.equal(total, x) and torch.equal(normed, pointwise.rms_norm(x, weight, 0.0))


def test_gates_multiply_the_other_half() -> None:
    out = pointwise.silu_mul(torch.tensor([[0.0, 2.0, 5.0, 3.0]]))
    assert out.tolist() == [pytest.approx([0.0, 3 * 2 / (1 + torch.e**-2)])]


def test_rotation_turns_pairs_of_a_head_and_leaves_values_alone() -> None:
    (qkv_NHd,) = run(lambda qk, rotation: pointwise.rotate_(qk, rotation), "rotate_", 5, torch.float32)
    (before_NHd,) = run(lambda qk, rotation: None, "rotate_", 5, torch.float32)
    assert torch.equal(qkv_NHd[:, HEADS + KV_HEADS :], before_NHd[:, HEADS + KV_HEADS :])
    half = HEAD_DIM // 2
    as_pairs = [torch.complex(x[..., :half], x[..., half:]) for x in (before_NHd.cpu(), qkv_NHd.cpu())]
    angle_N1d = torch.arange(5.0)[:, None, None] * 0.5 ** torch.arange(half)
    turned = as_pairs[0] * torch.polar(torch.full_like(angle_N1d, 1.5), angle_N1d)
    torch.testing.assert_close(as_pairs[1][:, : HEADS + KV_HEADS], turned[:, : HEADS + KV_HEADS])


# Compiled


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(("name", "dtype"), pairs(CHAINS, DTYPES))
def test_compiled_chains_equal_eager_ones(name: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()  # after eight variants of one function torch would go on without compiling
    chain = name.removeprefix("norm_")
    for num_rows in (8, 17, 1, 3):
        wanted = run(getattr(pointwise, chain), name, num_rows, dtype)
        for got, want in zip(run(compiled_chain(chain), name, num_rows, dtype), wanted, strict=True):
            assert got.dtype == dtype and got.shape == want.shape
            # A step of bfloat16 apart where a sum in another order rounds differently; float32 likewise.
            torch.testing.assert_close(got, want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_compiled_at_most_three_times(name: str) -> None:
    """For the first number of rows, for one row, and for any number."""
    torch._dynamo.reset()
    counters.clear()
    for num_rows in (8, 1, 3, 2, 64, 17, 8, 1, 33, 512):
        run(compiled_chain(name.removeprefix("norm_")), name, num_rows, torch.float32)
    assert 1 <= counters["stats"]["unique_graphs"] <= 3 and not counters["graph_break"]


@pytest.mark.slow
@needs_compiler
def test_compiled_chains_do_not_change_a_model() -> None:
    spec = read_spec(BUNDLED / "target")
    chains = {name: compiled_chain(name) for name in pointwise.__all__}
    plain = {name: getattr(reference, name) for name in reference.__all__}
    models = [
        load_decoder(BUNDLED / "target", spec, Runtime(device=DEVICE, kernels=SimpleNamespace(**plain | more)))  # type: ignore[arg-type]
        for more in ({}, chains)
    ]
    for step in (Batch([(20, CHAIN)], 16), Batch([(9, [-1])], 16), Batch([(5, RAGGED), (33, [-1])], 16)):
        tokens = torch.arange(len(step.keys), device=DEVICE)
        said = []
        for model in models:
            kv = model.new_kv_pool(16 * 16)
            with torch.inference_mode():
                kv.data.normal_(generator=torch.Generator(DEVICE).manual_seed(1))
            said.append(model.forward(tokens, tokens, model.plan(step.metadata, 16), kv).final_ND)
        torch.testing.assert_close(said[1], said[0], rtol=1e-4, atol=1e-4)
