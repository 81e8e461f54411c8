"""On a CUDA machine: the tests of `test_kernels.py` with compiled kernels, and shapes too large to interpret."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.drafter.tree.test_device_growth import *  # noqa: F403  # the tests
from tests.support.attention_cases import CHAIN, LONG_CHAIN, RAGGED, TWO_BY_TWO, Batch, compare
from tests.workers.kernels import test_triton_delta as delta_cases
from tests.workers.kernels.conftest import sums_in_order  # noqa: F401  # a fixture of the tests
from tests.workers.kernels.test_block_scaled import *  # noqa: F403  # the tests
from tests.workers.kernels.test_block_scaled import needs_float8, rows, scaled
from tests.workers.kernels.test_kernels import *  # noqa: F403  # the tests
from tests.workers.kernels.test_kernels import TOLERANCE
from tests.workers.kernels.test_pointwise import *  # noqa: F403  # the tests
from workers.kernels import fused, reference, triton_delta
from workers.kernels.prompt_attention import PromptPlan
from workers.settings import SamplingSettings
from workers.types import SamplingBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing was shown about kernels here"),
]


@pytest.mark.parametrize("parents", [CHAIN, TWO_BY_TWO], ids=["chain", "2x2"])
@pytest.mark.parametrize("q_heads", [2, 4])
@pytest.mark.parametrize(("batch_size", "prefix"), [(1, 16), (16, 16), (32, 16), (1, 1024), (16, 1024), (1, 2048)])
def test_nodes_equal_attention_on_their_path(parents: list[int], q_heads: int, batch_size: int, prefix: int) -> None:
    batch = Batch([(prefix, parents)] * batch_size, 32)
    compare(fused, batch, device="cuda", q_heads=q_heads, head_dim=128, tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_width_in_every_type(head_dim: int, dtype: torch.dtype) -> None:
    batch = Batch([(2048, TWO_BY_TWO), (700, RAGGED), (0, 300), (5, LONG_CHAIN), (0, 0), (90, [-1])], 16)
    for heads in ((32, 8), (7, 1)):
        compare(
            fused, batch, device="cuda", q_heads=heads[0], kv_heads=heads[1], head_dim=head_dim, dtype=dtype,
            tolerance=TOLERANCE[dtype],
        )  # fmt: skip


@pytest.mark.parametrize("first_slot", [0, 1])
@pytest.mark.parametrize(
    ("head_dim", "heads", "dtype"),
    [
        (64, (14, 2), torch.float16),
        (80, (4, 4), torch.bfloat16),
        (128, (32, 8), torch.bfloat16),
        (128, (32, 8), torch.float8_e4m3fn),
        (256, (8, 1), torch.bfloat16),
    ],
    ids=str,
)
def test_long_chunks_in_flash_attention_get_what_our_kernel_computes(
    head_dim: int, heads: tuple[int, int], dtype: torch.dtype, first_slot: int
) -> None:
    if dtype.itemsize == 1 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton converts no e4m3 on this GPU")
    batch = Batch([(300, CHAIN), (8192, 600), (16, RAGGED), (1, 2048), (40, 30), (9000, [-1])], 16)
    wide = torch.bfloat16 if dtype.itemsize == 1 else dtype
    q = torch.randn(len(batch.keys), heads[0], head_dim, dtype=wide, device="cuda")
    kv = torch.randn(batch.num_slots, 2, heads[1], head_dim, dtype=wide, device="cuda").to(dtype)
    plan = fused.plan(
        batch.metadata, 16, group_size=heads[0] // heads[1], kv_heads=heads[1], first_slot=first_slot, dtype=wide,
        device="cuda",
    )  # fmt: skip
    assert isinstance(plan, PromptPlan)
    out, ours = (fused.tree_attention(q, kv, p, head_dim**-0.5) for p in (plan, plan.whole))
    assert (out - ours).abs().max() < TOLERANCE[wide]


@pytest.mark.parametrize("seed", range(20))
def test_random_batches_with_windows(seed: int) -> None:
    rng = random.Random(seed)
    requests: list[tuple[int, list[int] | int]] = []
    for _ in range(rng.randint(1, 40)):
        parents, floor = [-1], 0
        for row in range(1, rng.randint(1, 64)):
            floor = rng.randint(floor, row - 1)
            parents.append(floor)
        requests.append((rng.randint(1, 600), parents if rng.random() < 0.5 else rng.randint(0, 200)))
    compare(
        fused, Batch(requests, rng.choice([16, 32]), seed), device="cuda", head_dim=64, tolerance=1e-4,
        window=rng.choice([None, 9, 128]), first_slot=rng.randint(0, 1),
    )  # fmt: skip


@pytest.mark.parametrize("num_tokens", [1, 17, 300, 2000])
def test_overlapping_moves_of_real_pools(num_tokens: int) -> None:
    """Many tokens, because a race between the threads of a program needs them to show."""
    pool = torch.randn(8, 4096, 2, 8, 128, dtype=torch.bfloat16, device="cuda")
    expected = pool.clone()
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(num_tokens)).cuda()
    source, target = order[:num_tokens].contiguous(), order.roll(1)[:num_tokens].contiguous()
    reference.copy_slots(expected, source, target)
    fused.copy_slots(pool, source, target)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize(("rows", "vocab"), [(1, 128_256), (17, 151_936), (300, 32_000)])
def test_whole_vocabularies_are_drawn_from_as_torch_does(rows: int, vocab: int) -> None:
    logits = 4 * torch.randn(rows, vocab, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    params = SamplingBatch.stack(
        [
            SamplingSettings(temperature=(0.0, 0.6, 1.0)[row % 3], seed=row, min_p=0.05 * (row % 2))
            for row in range(rows)
        ],
        device="cuda",
    )
    index = torch.arange(rows, device="cuda") // 2
    tau = torch.full((rows,), 0.6, device="cuda")
    results = [kernels.coupled_argmax(logits, params, index, 0, logits.amax(-1)) for kernels in (reference, fused)]
    (score, ids), (fused_score, fused_ids) = results
    assert (score - fused_score).abs().max() < 1e-4 and torch.equal(ids, fused_ids)
    top_k = torch.tensor([(0, 20, 50)[row % 3] for row in range(rows)], dtype=torch.int32, device="cuda")
    by_k, fused_by_k = (
        kernels.truncation_threshold(logits, top_k, torch.ones_like(tau)) for kernels in (reference, fused)
    )
    assert torch.equal(by_k, fused_by_k)
    for spread in (1.0, 0.1):  # few tokens are kept, and more than fit into the list
        masses = (spread * logits).softmax(-1)
        cut = fused.truncation_threshold(spread * logits, torch.zeros_like(top_k), torch.full_like(tau, 0.9))[:, None]
        assert (torch.where(spread * logits > cut, masses, 0).sum(-1) < 0.9 + 1e-5).all()
        assert (torch.where(spread * logits >= cut, masses, 0).sum(-1) > 0.9 - 1e-5).all()
    plain, found = reference.top_k(logits, 8, tau), fused.top_k(logits, 8, tau)
    assert torch.equal(plain.value_RK, found.value_RK) and (plain.lse_R - found.lse_R).abs().max() < 1e-4


@needs_float8
@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        *((shape, "float8") for shape in ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (5120, 1216))),
        *((shape, kind) for shape in ((6144, 4096), (4096, 12288)) for kind in ("int8", "4 bits")),
    ],
    ids=str,
)
def test_products_of_an_8b_model_in_few_bits(shape: tuple[int, int], kind: str) -> None:
    """The last one in 8 bits is a slice whose columns end inside a block."""
    weight = scaled(*shape, torch.bfloat16, kind=kind)
    x = rows(2048, shape[1], torch.bfloat16)
    exact = reference.block_scaled_linear(x.float(), replace(weight, dtype=torch.float32), None)
    for num_rows in (1, 4, 17, 48, 128, 272, 2048):
        made = fused.block_scaled_linear(x[:num_rows], weight, None)
        plain = reference.block_scaled_linear(x[:num_rows], weight, None)
        # The float32 weight is not rounded to bfloat16 first, which explains most of both errors.
        error, of_plain = ((found - exact[:num_rows]).norm() / exact[:num_rows].norm() for found in (made, plain))
        assert error < 1.1 * of_plain + 1e-4 and (made - plain).abs().max() < 2**-6 * plain.abs().max()


@needs_float8
@pytest.mark.parametrize("kind", ["float8", "int8", "4 bits"])
@pytest.mark.parametrize("num_rows", [1, 17, 64, 300])
def test_the_tile_does_not_change_a_row_in_few_bits(num_rows: int, kind: str) -> None:
    """The columns are added in the same order in every tile, split or in turn."""
    weight, x = scaled(4096, 4096, torch.bfloat16, kind=kind), rows(2048, 4096, torch.bfloat16)
    product = fused.invariant(2048).block_scaled_linear
    most = product(x, weight, None)
    assert torch.equal(product(x[:num_rows], weight, None), most[:num_rows])


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336)], ids=str)
def test_the_number_of_rows_does_not_change_a_row_of_an_8b_model(shape: tuple[int, int]) -> None:
    weight, x = rows(*shape, torch.bfloat16), rows(300, shape[1], torch.bfloat16)
    most = fused.invariant_linear(x, weight, None)
    for num_rows in (1, 4, 17, 64):
        assert torch.equal(fused.invariant_linear(x[:num_rows], weight, None), most[:num_rows])
    exact = x.double() @ weight.double().t()
    assert (most - exact).abs().max() < 2**-8 * exact.abs().max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [(16, 32, 128, 128), (16, 48, 128, 128)], ids=["4B", "27B"])
def test_delta_nets_of_published_widths(
    heads: tuple[int, int, int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees beside a long chunk, and the paths that are accepted."""
    monkeypatch.setitem(delta_cases.HEADS, "published", heads)
    rng, seats = random.Random(1), [1, 2, 3, 4]
    trees = [delta_cases.random_tree(rng, "random", size) for size in (64, 17, 1)]
    net, own = delta_cases.Net(1, "published", dtype=dtype), delta_cases.step(trees, [500], seats)
    given, before = net.rows(582), net.states(82)
    folds = delta_cases.fold_of(rng, trees, seats)
    found, wanted = (delta_cases.run(kernels, net, own, given, before, folds) for kernels in (triton_delta, reference))
    delta_cases.compare(found, wanted, tolerance=1e-4)
