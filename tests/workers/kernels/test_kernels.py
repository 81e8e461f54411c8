"""Both kernel sets, torch and Triton, agree with slow reference implementations.

Without a GPU the Triton kernels run in Triton's interpreter (`conftest.py`), so shapes are small; `gpu/` has real ones.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.attention_cases import (
    CHAIN,
    LONG_CHAIN,
    RAGGED,
    TWO_BY_TWO,
    Batch,
    busiest,
    compare,
    moved,
    trees_behind,
)

pytest.importorskip("triton", reason="Triton is not installed: nothing was shown about its kernels")
import triton
import triton.language as tl

from drafter.tree.frontier import DraftVocabulary
from workers.cuda_graphs import Size, padded
from workers.kernels import compiled, fused, prompt_attention, reference, triton_attention, triton_truncation
from workers.kernels.interpreted import is_interpreted
from workers.kernels.prompt_attention import PromptPlan, long_chunks
from workers.kernels.select import TORCH, Kernels, kernels_for
from workers.kernels.triton_attention import DeviceTable
from workers.kernels.triton_sampling import _gumbel, _philox
from workers.kv_cache import FP8
from workers.sampling import sampler
from workers.sampling.philox import gumbel
from workers.sampling.sampler import draw
from workers.settings import SamplingSettings
from workers.types import AttentionMetadata, SamplingBatch

DEVICE = "cpu" if is_interpreted() else "cuda"
both = pytest.mark.parametrize("kernels", [reference, fused], ids=["torch", "triton"])
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-2}
NEIGHBOURS: list[tuple[int, list[int] | int]] = [(20, CHAIN), (0, 0), (0, 5), (33, [-1]), (5, RAGGED), (16, 3)]
"""Trees, a request without rows, prompt chunks and plain decoding."""


# Choice


def test_cpu_runs_torch_unless_triton_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels_for("cpu") is TORCH and kernels_for("cuda", "torch") is TORCH
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels_for("cpu", "triton") is kernels_for("cuda") is fused
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="need a CUDA device, not cpu: set kernels='torch'"):
        kernels_for("cpu", "triton")


def test_cuda_runs_triton_with_compiled_chains_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert kernels_for("cuda") is compiled.KERNELS and kernels_for("cuda", enforce_eager=True) is fused


def test_missing_triton_is_an_error_and_not_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="need the package triton: install it, or set kernels='torch'"):
        kernels_for("cuda")


# Tree attention


@both
@pytest.mark.parametrize(
    ("head_dim", "dtype", "page_size"),
    [
        (64, torch.float32, 16),
        (80, torch.float32, 32),
        (96, torch.bfloat16, 16),
        (128, torch.bfloat16, 32),
        (128, torch.float16, 16),
        (256, torch.float32, 16),
    ],
)
def test_every_row_of_a_mixed_batch_equals_causal_attention_on_its_path(
    kernels: Kernels, head_dim: int, dtype: torch.dtype, page_size: int
) -> None:
    batch = Batch(NEIGHBOURS, page_size)
    compare(kernels, batch, device=DEVICE, head_dim=head_dim, dtype=dtype, tolerance=TOLERANCE[dtype], causal=True)


@both
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (7, 1), (4, 4)], ids=str)
def test_any_number_of_query_heads_shares_a_key_value_head(kernels: Kernels, heads: tuple[int, int]) -> None:
    compare(kernels, Batch([(9, RAGGED), (0, 3)], 16), device=DEVICE, q_heads=heads[0], kv_heads=heads[1], causal=True)


@both
@pytest.mark.parametrize("prefix", [0, 1, 255, 2048])
def test_a_prefix_of_any_length_is_split_and_merged(kernels: Kernels, prefix: int) -> None:
    batch = Batch([(prefix, TWO_BY_TWO)], 32)
    compare(kernels, batch, device=DEVICE, q_heads=2, kv_heads=1, causal=True)


@pytest.mark.parametrize(
    ("width", "heads", "window", "dtype", "has_sinks"),
    [
        (64, (1, 2), None, torch.float32, True),
        (80, (2, 3), 9, FP8, False),
        (96, (1, 5), 250, torch.float32, True),
        (128, (2, 1), 250, FP8, True),
        (256, (1, 3), None, torch.float32, False),
    ],
    ids=str,
)
def test_random_batches_get_what_torch_computes(
    width: int, heads: tuple[int, int], window: int | None, dtype: torch.dtype, has_sinks: bool
) -> None:
    """Planned for more heads, work is cut into fewer pieces, which the interpreter runs one by one."""
    _skip_without_fp8(fused)
    rng = random.Random(width)
    trees = [[-1, *(rng.randrange(row) for row in range(1, rng.randint(1, 24)))] for _ in range(3)]
    requests: list[tuple[int, list[int] | int]] = [(rng.choice([0, 40, 200, 700]), tree) for tree in trees]
    batch = Batch([*requests, (rng.randint(0, 200), rng.randint(1, 30)), (600, [-1])], 16, seed=width)
    kv_heads, group_size = heads
    q = torch.randn(len(batch.owner), kv_heads * group_size, width).to(DEVICE)
    kv = torch.randn(batch.num_slots, 2, kv_heads, width).to(dtype).to(DEVICE)
    sink = torch.linspace(-1, 4, q.shape[1], device=DEVICE) if has_sinks else None
    options: dict[str, Any] = {"windows": (None, window), "group_size": group_size, "kv_heads": 16, "device": DEVICE}
    expected, out = (
        kernels.tree_attention(
            q, kv, kernels.plan(batch.metadata, 16, first_slot=width // 16 % 2, **options), 0.1, window, None, sink
        )
        for kernels in (reference, fused)
    )
    assert (out - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kv_heads", [1, 8, 300])
def test_every_tile_is_cut_into_pieces_of_at_most_a_fixed_share(kv_heads: int) -> None:
    """The pieces of a tile follow one another and cover its keys; those of tiles that are cut come first."""
    rng = np.random.default_rng(kv_heads)
    for _ in range(30):
        base_B, num_rows = rng.integers(0, 10 ** rng.integers(2, 6, rng.integers(1, 40))), int(rng.integers(1, 40))
        step = trees_behind(base_B, 16, num_rows=num_rows)
        options: dict[str, Any] = {"group_size": 4, "kv_heads": kv_heads, "dtype": torch.bfloat16}
        plan = fused.plan(step, 16, windows=(None, 300), **options)
        for window, pieces_7S, first_piece_N in zip((1, 300), plan.pieces_W7S, plan.first_pieces_WN, strict=True):
            first, rows, request, base, begin, end, count = pieces_7S[:, pieces_7S[1] > 0].numpy()
            heads = count.nonzero()[0]
            assert sorted(first[heads]) == sorted(set(first)) and rows[heads].sum() == len(step.slot_N)
            for head, n in zip(heads, count[heads], strict=True):
                own = slice(head, head + n)
                assert (first[own] == first[head]).all() and (begin[own][1:] == end[own][:-1]).all()
                assert (n == 1) or head + n <= plan.shape.num_parts
                last_row = first[head] + rows[head] - 1
                assert end[own][-1] == step.slot_N[last_row] + 1 and base[head] == base_B[request[head]]
                assert begin[head] == (0 if window == 1 else max(0, base[head] + 1 - window))
                assert (first_piece_N[first[head] : last_row + 1] == head).all()
            share = -(-(end - begin).sum() // plan.shape.num_cuts)
            assert (end - begin).max() < max(64, share) + 64


@pytest.mark.parametrize("num_rows", [1, 17])
def test_a_long_request_keeps_no_processor_longer_than_the_same_work_evenly(num_rows: int) -> None:
    work = []
    for lengths in ([3072] * 32, [*[1024] * 31, 65536]):
        step = trees_behind(np.array(lengths), 16, num_rows=num_rows)
        pieces_7S = fused.plan(step, 16, group_size=4, kv_heads=8, dtype=torch.bfloat16).pieces_W7S[0]
        work.append(busiest((pieces_7S[5] - pieces_7S[4]).repeat_interleave(8)))
    assert work[1] < 1.3 * work[0]


@both
@pytest.mark.parametrize("first_slot", [0, 1])
@pytest.mark.parametrize("window", [1, 3, 24])
def test_a_window_counts_along_the_path(kernels: Kernels, window: int, first_slot: int) -> None:
    batch = Batch([(20, RAGGED), (1, 6), (1, CHAIN)], 16)
    compare(kernels, batch, device=DEVICE, window=window, first_slot=first_slot)


@both
@pytest.mark.parametrize("prefix", [9, 1500])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.7, False), (None, True), (1.5, True)])
def test_scores_are_capped_and_sinks_take_their_share(
    kernels: Kernels, prefix: int, softcap: float | None, has_sinks: bool
) -> None:
    """The longer prefix is split, and a sink is added once."""
    batch = Batch([(prefix, RAGGED), (3, [-1])] if prefix < 1500 else [(prefix, CHAIN)], 16)
    options = dict(q_heads=6, kv_heads=2, softcap=softcap, has_sinks=has_sinks)
    compare(kernels, batch, device=DEVICE, window=None if prefix < 1500 else 1200, **options)  # type: ignore[arg-type]


def _skip_without_fp8(kernels: Kernels) -> None:
    if kernels is fused and DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton converts no e4m3 on this GPU")


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("requests", "head_dim"), [([(17, CHAIN), (0, 8), (40, RAGGED)], 20), ([(700, CHAIN)], 32)])
def test_keys_and_values_in_8_bits_are_attended_to_as_converted(
    kernels: Kernels, requests: list[tuple[int, list[int] | int]], head_dim: int, dtype: torch.dtype
) -> None:
    """Conversion from e4m3 is exact in every dtype of queries; a single request's slots are read in place."""
    _skip_without_fp8(kernels)
    batch = Batch(requests, 16)
    q = torch.randn(len(batch.owner), 4, head_dim).to(dtype)
    stored = torch.randn(batch.num_slots, 2, 2, head_dim).to(FP8)
    plan = kernels.plan(batch.metadata, 16, group_size=2, dtype=dtype, device=DEVICE)
    out, expected = (
        kernels.tree_attention(q.to(DEVICE), kv.to(DEVICE), plan, 0.3).cpu() for kv in (stored, stored.to(dtype))
    )
    # Compiled, the multiplication may have another layout behind a conversion.
    tolerance = 0.0 if kernels is reference or is_interpreted() else TOLERANCE[dtype]
    assert out.dtype == dtype and (out - expected).abs().max() <= tolerance
    assert (out - batch.dense(q, stored.to(dtype), 0.3)).abs().max() < 0.03 + 1e-5


@both
def test_all_values_of_8_bits_are_converted(kernels: Kernels) -> None:
    """One key for each byte: a row that sees a single one returns its value."""
    _skip_without_fp8(kernels)
    stored = torch.arange(256, dtype=torch.uint8).view(FP8)
    kv = torch.zeros(256, 2, 1, 16, dtype=torch.uint8).view(FP8)
    kv.view(torch.uint8)[:, 1] = torch.arange(256, dtype=torch.uint8)[:, None, None]
    table = np.arange(256, dtype=np.int32)[:, None]
    some = np.zeros(256, dtype=np.int32)
    metadata = AttentionMetadata(
        query_offsets=np.arange(257, dtype=np.int32), page_table_BP=table, base_B=some, slot_N=some,
        visible_N=some + 1, ancestors_N=np.zeros(256, dtype=np.int64),
    )  # fmt: skip
    plan = kernels.plan(metadata, 1, device=DEVICE)
    out = kernels.tree_attention(torch.zeros(256, 1, 16, device=DEVICE), kv.to(DEVICE), plan, 0.3).cpu()
    expected = stored.float()
    if kernels is fused and is_interpreted():  # the interpreter knows no NaN of 8 bits
        expected[[127, 255]] = torch.tensor([480.0, -480.0])
    assert torch.equal(out.nan_to_num(1000), expected.nan_to_num(1000)[:, None].expand(-1, 16))


@both
@pytest.mark.parametrize("window", [None, 20])
def test_a_tree_of_64_rows_fills_its_mask(kernels: Kernels, window: int | None) -> None:
    compare(kernels, Batch([(2, LONG_CHAIN)], 16), device=DEVICE, q_heads=1, kv_heads=1, window=window)


@both
def test_an_empty_batch_is_empty(kernels: Kernels) -> None:
    prepared = kernels.plan(Batch([(3, 0)], 16).metadata, 16, group_size=2, device=DEVICE)
    q, kv = torch.zeros(0, 4, 8, device=DEVICE), torch.zeros(32, 2, 2, 8, device=DEVICE)
    assert kernels.tree_attention(q, kv, prepared, 1.0).shape == (0, 32)


def _attended(requests: list[tuple[int, list[int] | int]], own: int, path: tuple[Tensor, Tensor]) -> Tensor:
    """Return what batch-invariant attention gives the request `own`'s rows on the path of its last row.

    Interpreted it is in float32, in which no rounding hides another order of sums; a GPU promises it in 16 bits only.

    path: keys and values [positions, 2, H, d] and queries [positions, Hq, d] of its positions. All else is random.
    """
    batch, (kv_P, q_P) = Batch(requests, 16), path
    generator = torch.Generator().manual_seed(len(batch.keys))
    kv = torch.randn(batch.num_slots, *kv_P.shape[1:], generator=generator)
    q = torch.randn(len(batch.keys), *q_P.shape[1:], generator=generator)
    keys = batch.keys[max(row for row, owner in enumerate(batch.owner) if owner == own)]
    kv[batch.physical(own, keys)] = kv_P[: len(keys)]
    rows = [row for row, seen in enumerate(batch.keys) if batch.owner[row] == own and seen == keys[: len(seen)]]
    q[rows] = q_P[[len(batch.keys[row]) - 1 for row in rows]]
    plan = fused.plan(batch.metadata, 16, group_size=3, kv_heads=2, device=DEVICE, keys_per_piece=64)
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    attended = fused.tree_attention(q.to(DEVICE, dtype), kv.to(DEVICE, dtype), plan, 0.25).cpu()
    return torch.stack([attended[row] for row in rows])


@pytest.mark.usefixtures("sums_in_order")
@pytest.mark.parametrize("last", [66, *(pytest.param(last, marks=pytest.mark.slow) for last in (10, 64, 130))])
def test_a_row_has_the_same_bits_alone_in_a_crowd_in_a_prompt_and_on_any_path_of_a_tree(last: int) -> None:
    generator = torch.Generator().manual_seed(last)
    kv_P = torch.randn(last + 1, 2, 2, 16, generator=generator)
    path = (kv_P, torch.randn(last + 1, 6, 16, generator=generator))
    neighbours: list[tuple[int, list[int] | int]] = [(90, RAGGED), (3, 40), (150, [-1])]
    alone = _attended([(last, [-1])], 0, path)[0]
    wide = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 7]  # the last row's path has rows 0, 1, 4, 7 and 9
    for requests, own in (
        ([*neighbours, (last, [-1])], 3),
        ([(0, last + 1)], 0),
        ([(last - 8, 9), *neighbours], 0),
        ([(last - 4, wide)], 0),
        ([neighbours[0], (last - 4, wide), neighbours[1]], 1),
    ):
        assert torch.equal(_attended(requests, own, path)[-1], alone), requests


@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_every_part_of_a_plan_begins_at_16_bytes(num_rows: int) -> None:
    """Triton recompiles a kernel for less aligned pointers, and steps have all sizes."""
    plan = fused.plan(Batch([(3, num_rows), (0, 2)], 16).metadata, 16, windows=(None, 8, 3), device=DEVICE)
    rows = [plan.visible_N, plan.table_BP, *plan.lows_WN, *plan.ancestors_WN, *plan.first_pieces_WN, *plan.pieces_W7S]
    assert all(row.data_ptr() % 16 == plan.buffer.data_ptr() % 16 for row in rows)


def test_a_plan_filled_in_place_is_the_plan_of_the_new_step() -> None:
    """A captured graph reads the addresses of its capture."""
    first, second = Batch([(17, CHAIN), (0, 8), (40, RAGGED)], 16), Batch([(2, 8), (40, RAGGED), (9, CHAIN)], 16, 7)
    options = {"windows": (None, 8), "group_size": 2, "device": DEVICE}
    plan = fused.plan(first.metadata, 16, **options)
    before = {name: tensor.data_ptr() for name, tensor in vars(plan).items() if isinstance(tensor, torch.Tensor)}
    assert fused.plan(second.metadata, 16, **options, into=plan) is plan
    assert before == {name: tensor.data_ptr() for name, tensor in vars(plan).items() if name in before}
    assert torch.equal(plan.buffer, fused.plan(second.metadata, 16, **options).buffer)


@pytest.mark.parametrize("small", [0, 1 << 15])
def test_the_changes_of_a_page_table_give_what_sending_it_whole_gives(
    monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    """Requests gain pages, leave and join; tables have all widths. The twin receives every table whole."""
    monkeypatch.setattr(triton_attention, "_SMALL_TABLE", small)
    rng = np.random.default_rng(1)
    table, twin_BP = DeviceTable(4, 40, DEVICE), np.zeros((4, 40), dtype=np.int32)
    pages = [list(rng.integers(1, 1000, rng.integers(1, 30))) for _ in range(4)]
    num_alone = 0
    for step in range(200):
        for own in pages:
            own.extend(rng.integers(1, 1000, rng.integers(0, 2)))
        if step % 20 == 0 or max(map(len, pages)) > 40:
            pages = [own for own in pages if len(own) <= 30][-3:]
            pages += [list(rng.integers(1, 1000, rng.integers(1, 30))) for _ in range(4 - len(pages))]
        new_BP = np.zeros((4, max(map(len, pages))), dtype=np.int32)
        for row, own in enumerate(pages):
            new_BP[row, : len(own)] = own
        num_alone += 0 < (twin_BP[:, : new_BP.shape[1]] != new_BP).sum() <= new_BP.size // 8
        twin_BP[:, : new_BP.shape[1]] = new_BP
        table.update(new_BP)
        assert (table.on_device_BP.cpu().numpy() == twin_BP).all()
    assert num_alone > 100


@pytest.mark.parametrize("first_slot", [0, 1])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 24])
def test_a_plan_takes_other_ancestors_than_it_was_filled_with(window: int | None, first_slot: int) -> None:
    """A captured graph that grows trees changes the ancestors at every level."""
    batch = Batch([(17, CHAIN), (3, 0), (40, RAGGED)], 16)
    whole_tree_N = np.full_like(batch.metadata.ancestors_N, 0xFF)
    metadata = replace(batch.metadata, ancestors_N=whole_tree_N)
    options = {"windows": (None, window), "group_size": 2, "first_slot": first_slot, "device": DEVICE}
    plan = fused.plan(metadata, 16, **options)
    q, kv = torch.randn(12, 4, 8), torch.randn(batch.num_slots, 2, 2, 8)
    plan.set_ancestors(torch.from_numpy(batch.metadata.ancestors_N).to(DEVICE))
    out = fused.tree_attention(q.to(DEVICE), kv.to(DEVICE), plan, 0.3, window).cpu()
    assert (out - batch.dense(q, kv, 0.3, window, first_slot)).abs().max() < 1e-5


@pytest.mark.parametrize("window", [None, 3])
def test_a_moved_plan_is_the_plan_of_the_same_trees_elsewhere(window: int | None) -> None:
    """A drafter's trees have the same rows in every step, behind other roots and on other pages."""
    there, here = Batch([(40, CHAIN), (70, RAGGED)], 16), Batch([(70, CHAIN), (3, RAGGED)], 16, 7)
    options = {"windows": (None, window), "group_size": 2, "device": DEVICE}
    plan = fused.plan(there.metadata, 16, **options)
    plan.move(here.metadata.base_B, here.metadata.page_table_BP)
    anew = fused.plan(moved(there.metadata, here.metadata.base_B, here.metadata.page_table_BP), 16, **options)
    assert torch.equal(plan.table_BP, anew.table_BP) and torch.equal(plan.write_slots_N, anew.write_slots_N)
    assert window is not None or torch.equal(plan.buffer, anew.buffer)
    plan.set_ancestors(torch.from_numpy(here.metadata.ancestors_N).to(DEVICE))
    q, kv = torch.randn(12, 4, 8), torch.randn(here.num_slots, 2, 2, 8)
    out = fused.tree_attention(q.to(DEVICE), kv.to(DEVICE), plan, 0.3, window).cpu()
    assert (out - here.dense(q, kv, 0.3, window)).abs().max() < 1e-5
    fused.plan(there.metadata, 16, **options, into=plan)
    assert torch.equal(plan.buffer, fused.plan(there.metadata, 16, **options).buffer)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # from the interpreter's maximum
def test_nan_in_one_request_does_not_affect_others() -> None:
    """NaN in another request's keys, in the null page and in unwritten slots has no effect on other requests."""
    batch = Batch([(15, CHAIN), (40, RAGGED), (33, CHAIN)], 16)
    kv = torch.full((batch.num_slots, 2, 2, 8), float("nan"))
    for request, length in ((0, 19), (2, 37)):
        kv[batch.physical(request, list(range(length)))] = 1.0
    q = torch.randn(16, 4, 8).to(DEVICE)
    for kernels in (reference, fused):
        prepared = kernels.plan(batch.metadata, 16, group_size=2, device=DEVICE)
        out = kernels.tree_attention(q, kv.to(DEVICE), prepared, 0.3)
        assert out[4:12].isnan().all() and not out[:4].isnan().any() and not out[12:].isnan().any()


# Path compaction


@both
@pytest.mark.parametrize(
    ("source", "target"),
    [([7], [3]), ([4, 6, 9], [3, 4, 5]), ([2, 1, 5], [1, 2, 3]), (range(10, 30), range(9, 29)), ([], [])],
    ids=["one", "path", "swap", "long", "none"],
)
@pytest.mark.parametrize(("head_dim", "dtype"), [(6, torch.float16), (20, torch.float32), (6, FP8), (64, FP8)], ids=str)
def test_all_moving_tokens_are_read_before_any_is_written(
    kernels: Kernels, source: list[int], target: list[int], head_dim: int, dtype: torch.dtype
) -> None:
    pool = torch.randn(3, 32, 2, 1, head_dim).to(dtype)
    expected = pool.clone()
    for layer in range(3):
        rows = [pool[layer, slot].clone() for slot in source]
        for row, slot in zip(rows, target, strict=True):
            expected[layer, slot] = row
    moved = pool.to(DEVICE)
    slots = (torch.tensor(list(values), dtype=torch.int64, device=DEVICE) for values in (source, target))
    kernels.copy_slots(moved, *slots)
    assert torch.equal(moved.cpu().float(), expected.float())


# Drawing


@triton.jit
def _write_words(out_ptr, seed, index, BLOCK: tl.constexpr):
    group = tl.arange(0, BLOCK)
    r0, r1, r2, r3 = _philox(seed, index, group)
    tl.store(out_ptr + 4 * group, r0.to(tl.int64))
    tl.store(out_ptr + 4 * group + 1, r1.to(tl.int64))
    tl.store(out_ptr + 4 * group + 2, r2.to(tl.int64))
    tl.store(out_ptr + 4 * group + 3, r3.to(tl.int64))


@triton.jit
def _write_gumbel(out_ptr, word_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out_ptr + place, _gumbel(tl.load(word_ptr + place).to(tl.uint32)))


@pytest.mark.parametrize(("seed", "index"), [(0, 0), (5, 17), (-1, 2**31 + 3), (-(2**63), 4_000_000)])
def test_random_words_are_philox_bit_for_bit(seed: int, index: int) -> None:
    from workers.sampling.philox import Stream, philox

    actual = torch.empty(4 * 16, dtype=torch.int64, device=DEVICE)
    seeds, indices = torch.tensor([seed]), torch.tensor([index])
    _write_words_at[(1,)](actual, seeds.to(DEVICE), indices.to(DEVICE), BLOCK=16)
    words = philox(seeds, torch.arange(16), indices, torch.zeros(16, dtype=torch.int64), Stream.TARGET_GUMBEL)
    assert torch.equal(actual.cpu(), torch.stack(words, dim=-1).reshape(-1))


@triton.jit
def _write_words_at(out_ptr, seed_ptr, index_ptr, BLOCK: tl.constexpr):
    _write_words(out_ptr, tl.load(seed_ptr), tl.load(index_ptr), BLOCK)


def test_noise_is_exact_at_every_kind_of_word() -> None:
    edges = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1, 2**32 - 2**20, 2**24]
    random_words = torch.randint(0, 2**32, (1024 - len(edges),), generator=torch.Generator().manual_seed(1))
    words = torch.cat([torch.tensor(edges), random_words])
    actual = torch.empty(1024, device=DEVICE)
    _write_gumbel[(1,)](actual, words.to(DEVICE), BLOCK=1024)
    u = (words.double() + 0.5) * 2.0**-32
    exact = -torch.log(-torch.log(u))
    assert ((actual.cpu() - exact).abs() <= 2e-6 * exact.abs().clamp(min=1)).all()


PARAMS = [
    SamplingSettings(seed=5),
    SamplingSettings(temperature=0, seed=2, min_p=0.3),
    SamplingSettings(temperature=0.7, min_p=0.1, seed=-1),
    SamplingSettings(temperature=2.0, seed=1 << 63),
    SamplingSettings(min_p=0.5, seed=77),
]


@both
@pytest.mark.parametrize("start", [0, 3, 5001])
def test_shards_draw_what_the_whole_row_draws(kernels: Kernels, start: int) -> None:
    """start: where the second shard begins; the first may be empty. Some tokens are forbidden, one row's shard all."""
    logits = 3 * torch.randn(len(PARAMS), 6003, generator=torch.Generator().manual_seed(3))
    logits[:, 100:200] = -torch.inf
    logits[3, start:] = -torch.inf if start else 0.0
    index = torch.tensor([0, 5, 17, 100_000, 3])
    params = SamplingBatch.stack(PARAMS)
    shards = [(0, start), (start, 6003)] if start else [(0, 6003)]
    best = [
        kernels.coupled_argmax(
            logits[:, a:b].contiguous().to(DEVICE), params.to(DEVICE), index.to(DEVICE), a, logits.amax(-1).to(DEVICE)
        )
        for a, b in shards
    ]
    scores, ids = (torch.stack([pair[i].cpu() for pair in best]) for i in (0, 1))
    drawn = ids.gather(0, scores.argmax(0)[None])[0]
    assert torch.equal(drawn, draw(logits, params, index))


@both
@pytest.mark.parametrize(("start", "stop"), [(0, 2050), (3, 4), (1023, 1026), (9, 9)])
def test_noise_for_drafts_is_the_targets(kernels: Kernels, start: int, stop: int) -> None:
    keys = torch.tensor([[5, 0], [-1, 7], [1 << 62, 100_000], [5, 1]])
    made = kernels.gumbel(*keys.to(DEVICE).unbind(1), start, stop)
    expected = gumbel(keys[:, 0], keys[:, 1], start, stop)
    assert made.shape == (4, stop - start) and made.dtype == torch.float32
    assert ((made.cpu() - expected).abs() <= 2e-6 * expected.abs().clamp(min=1)).all()
    vocab = DraftVocabulary(target_size=5003, target_ids=torch.arange(start, stop).to(DEVICE), kernels=kernels)
    assert torch.equal(vocab.noise.rows(*keys.T.tolist(), DEVICE), made)


@both
def test_scores_are_log_p_plus_noise(kernels: Kernels) -> None:
    logits, index = torch.zeros(40, 1), torch.arange(40)
    params = SamplingBatch.stack([SamplingSettings(seed=9)] * 40)
    score, ids = kernels.coupled_argmax(logits.to(DEVICE), params.to(DEVICE), index.to(DEVICE), 7, None)
    assert (score.cpu() - gumbel(params.seed_B, index, 7, 8)[:, 0]).abs().max() < 5e-6 and (ids == 7).all()


@both
def test_a_fully_masked_row_yields_the_lowest_token(kernels: Kernels) -> None:
    params = SamplingBatch.stack([SamplingSettings(seed=9), SamplingSettings(temperature=0)]).to(DEVICE)
    nothing = torch.full((2, 1500), -torch.inf, device=DEVICE)
    score, ids = kernels.coupled_argmax(nothing, params, torch.zeros(2, dtype=torch.int64, device=DEVICE), 30, None)
    assert ids.tolist() == [30, 30] and (score == -torch.inf).all()


# Top-k and top-p


@both
@pytest.mark.parametrize(("width", "scale"), [(1, 1.0), (30, 9.0), (300, 2.0), (9000, 0.0), (9000, 0.3), (9000, 9.0)])
def test_the_threshold_matches_sorting(kernels: Kernels, width: int, scale: float) -> None:
    """Flat rows keep more values than either kernel set lists, steep rows a few; every fifth row has ties."""
    x = scale * torch.randn(5, width, generator=torch.Generator().manual_seed(width))
    x[4] = x[4].round()
    x[1, : width // 2] = -torch.inf
    cuts = [(0, 1.0), (20, 1.0), (0, 0.9), (20, 0.7), (width // 3, 0.99), (3, 0.5), (2 * width, 0.3), (0, 1e-6)]
    for first in (0, 4):
        top_k, top_p = zip(*(cuts[first:] + cuts)[:5], strict=True)
        k_R, p_R = torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p)
        cut_R = kernels.truncation_threshold(x.to(DEVICE), k_R.to(DEVICE), p_R.to(DEVICE)).cpu()
        for row, k, p, lowest in zip(x.double(), top_k, top_p, cut_R.tolist(), strict=True):
            kth = -torch.inf if k == 0 else row.sort(descending=True).values[min(k, width) - 1].item()
            left = row[row >= kth]
            mass = left.softmax(-1)
            if p == 1:
                assert lowest == kth
            else:
                assert lowest in left and mass[left > lowest].sum() < p + 1e-6
                assert mass[left >= lowest].sum() >= p - 1e-6


@pytest.mark.skipif(not is_interpreted(), reason="runs on the GPU in gpu/")
@pytest.mark.parametrize("width", [31, 2047, 2048, 2049, 6200])
def test_rows_split_over_programs_keep_the_tokens_that_sorted_rows_keep(width: int) -> None:
    """Lists of one value, of ties and of nearly all values, and where a block ends."""
    generator = torch.Generator().manual_seed(width)
    x = torch.tensor([0.1, 1.0, 8.0, 2.0, 2.0])[:, None] * torch.randn(5, width, generator=generator)
    x[3] = x[3].round()
    x[4, 1::2] = -torch.inf
    for k, p in ((0, 0.9), (50, 0.95), (3000, 0.8)):
        top_k, top_p = torch.full((5,), k, dtype=torch.int32), torch.full((5,), p)
        found = fused.truncation_threshold(x, top_k, top_p)
        assert torch.equal(found, sampler.truncation_threshold(x, top_k, top_p))
    alone = fused.truncation_threshold(x[3:4], top_k[:1], top_p[:1])
    assert torch.equal(alone, found[3:4]), "other rows change nothing"


@pytest.mark.skipif(not is_interpreted(), reason="reads a list that the GPU's kernels keep to themselves")
@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.95])
def test_few_values_are_listed_wherever_the_likely_tokens_are(top_p: float) -> None:
    """Likely tokens of neighbouring ids share a group; the bound must hold, and still be close to the threshold."""
    x = torch.randn(3, 16_000, generator=torch.Generator().manual_seed(1))
    x[0, 640:664] += 12
    x[1, ::640] += 12
    x[2] = -2 * torch.arange(1, 16_001).log()
    listed = []
    search = triton_truncation._search

    class Looked:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def run(*args: Any, **options: Any) -> None:
                listed.extend(args[6].tolist())
                search[grid](*args, **options)

            return run

    with mock.patch.object(triton_truncation, "_search", Looked()):
        cut = fused.truncation_threshold(x, torch.zeros(3, dtype=torch.int32), torch.full((3,), top_p))
    kept = (x >= cut[:, None]).sum(-1).tolist()
    assert all(n <= count <= 2 * n + 100 for n, count in zip(kept, listed, strict=True)), (kept, listed)


@both
def test_a_token_stays_while_the_mass_above_it_is_below_p(kernels: Kernels) -> None:
    """Masses are 1/2, 1/4, 1/8 and 1/8; equal values are kept together."""
    x = torch.tensor([[3.0, 2.0, 1.0, 1.0]]) * torch.tensor(2.0).log()
    for top_p, kept in ((0.1, 1), (0.499, 1), (0.501, 2), (0.749, 2), (0.751, 4), (0.99, 4)):
        cut = kernels.truncation_threshold(
            x.to(DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.tensor([top_p]).to(DEVICE)
        )
        assert (x >= cut.cpu()).sum() == kept


@both
def test_rows_with_fewer_possible_tokens_than_top_k_keep_all_of_them(kernels: Kernels) -> None:
    """As after min-p or allowed ids; no kernel set searches for more tokens."""
    x = torch.full((2, 9000), -torch.inf)
    x[0, [5, 8000]], x[1, 7] = torch.tensor([1.0, 2.0]), -3.0
    k_R, p_R = torch.tensor([20, 20], dtype=torch.int32), torch.tensor([1.0, 0.5])
    with mock.patch.object(sampler, "_GROWTH", None):  # to look deeper would raise
        cut_R = kernels.truncation_threshold(x.to(DEVICE), k_R.to(DEVICE), p_R.to(DEVICE)).cpu()
    assert cut_R.tolist() == [-torch.inf, -3.0]


@both
def test_zeros_of_both_signs_are_equal(kernels: Kernels) -> None:
    x = torch.tensor([[1.0, 0.0, 0.0, -0.0, -0.0, -0.0, -0.0, -1.0]])
    k_R = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    assert kernels.truncation_threshold(x.to(DEVICE), k_R, torch.tensor([0.55], device=DEVICE)).tolist() == [0.0]


@both
def test_a_threshold_does_not_depend_on_other_rows(kernels: Kernels) -> None:
    x = torch.linspace(0.1, 4.0, 12)[:, None] * torch.randn(12, 3000, generator=torch.Generator().manual_seed(5))
    x, p_R = x.to(DEVICE), torch.full((12,), 0.9, device=DEVICE)
    k_R = torch.tensor([0, 0, 0, 0, 700, 40, 30, 5] + 4 * [0], dtype=torch.int32, device=DEVICE)
    alone = [kernels.truncation_threshold(x[r : r + 1], k_R[r : r + 1], p_R[r : r + 1]) for r in range(12)]
    assert torch.equal(kernels.truncation_threshold(x, k_R, p_R), torch.cat(alone))
    assert kernels.truncation_threshold(x[:0], k_R[:0], p_R[:0]).shape == (0,)


# Drafting


@both
@pytest.mark.parametrize(("width", "k"), [(1, 4), (7, 3), (2048, 1), (5001, 8)])
def test_top_k_returns_the_largest_values_and_the_sum(kernels: Kernels, width: int, k: int) -> None:
    x = 3 * torch.randn(3, width, generator=torch.Generator().manual_seed(3))
    x[1, : width // 2] = -torch.inf
    tau = torch.tensor([1.0, 0.6, 0.3])
    found = kernels.top_k(x.to(DEVICE), k, tau.to(DEVICE))
    order = x.argsort(dim=-1, descending=True)[:, :k]
    is_token = x.gather(1, order) > -torch.inf
    assert torch.equal(found.value_RK.cpu(), x.gather(1, order))
    assert torch.equal(found.index_RK.cpu()[is_token], order[is_token])
    exact = torch.logsumexp(x.double() / tau[:, None], -1)
    assert (found.lse_R.cpu() - exact).abs().max() < 1e-5 * exact.abs().clamp(min=1).max()


@both
def test_a_nan_row_has_weight_zero_and_valid_columns(kernels: Kernels) -> None:
    """Callers gather by the best columns, and a column out of range kills a process on CUDA."""
    x = torch.stack([torch.full((7,), torch.nan), torch.arange(7.0)]).to(DEVICE)
    found = kernels.top_k(x, 3, torch.full((2,), 0.6, device=DEVICE))
    assert ((found.index_RK >= 0) & (found.index_RK < 7)).all() and found.index_RK[1].tolist() == [6, 5, 4]
    weight_RK = torch.exp(found.value_RK / 0.6 - found.lse_R[:, None])
    assert not (weight_RK[0] > 0).any() and (weight_RK[1] > 0).all()


# Compilation


@pytest.mark.parametrize("options", [(), ("--archs", "86", "89", "120", "--only", "attend: bf16, 256")], ids=" ".join)
def test_every_kernel_compiles_for_hopper_and_attention_for_devices_with_less_shared_memory(
    options: tuple[str, ...],
) -> None:
    """Compile ahead of time, which needs no GPU, because the interpreter accepts more than the compiler."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.support.compile_kernels", "--quiet", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


# Prompts


LONG: list[tuple[int, list[int] | int]] = [(20, CHAIN), (9, 24), (5, RAGGED), (1, 32), (7, 3), (0, 0), (40, [-1])]
"""Two long chunks among trees and a short chunk. The second one's only key before it is in slot 0."""


@pytest.fixture
def short_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_attention, "FEWEST_ROWS", 16)
    monkeypatch.setattr(prompt_attention, "FEWEST_PAIRS", 16 * 32)


@pytest.mark.usefixtures("short_is_long")
@pytest.mark.parametrize(
    ("requests", "dtype", "first_slot"),
    [
        (LONG, torch.bfloat16, 0),
        (LONG, torch.float16, 1),
        ([(0, 40)], torch.bfloat16, 0),
        ([(33, 20), (9, [-1])], FP8, 1),
    ],
    ids=["mixed", "mixed, of a head", "a first chunk", "8 bits"],
)
def test_long_chunks_take_flash_attention_and_other_rows_take_ours(
    requests: list[tuple[int, list[int] | int]], dtype: torch.dtype, first_slot: int
) -> None:
    """A layer with a window takes ours for all of them."""
    _skip_without_fp8(fused)
    batch, wide = Batch(requests, 16), torch.bfloat16 if dtype == FP8 else dtype
    q = torch.randn(len(batch.owner), 3, 16).to(wide)
    kv = torch.randn(batch.num_slots, 2, 1, 16).to(dtype)
    windows = (None, 9) if first_slot else (None,)
    options: dict[str, Any] = {"windows": windows, "group_size": 3, "kv_heads": 16, "first_slot": first_slot}
    plan = fused.plan(batch.metadata, 16, dtype=wide, device=DEVICE, **options)
    assert isinstance(plan, PromptPlan)
    written = [int(batch.physical(owner, keys[-1:])) for owner, keys in zip(batch.owner, batch.keys, strict=True)]
    assert plan.write_slots_N.tolist() == written
    for window in windows:
        out = fused.tree_attention(q.to(DEVICE), kv.to(DEVICE), plan, 0.25, window).cpu()
        assert (out - batch.dense(q, kv.to(wide), 0.25, window, first_slot)).abs().max() < TOLERANCE[wide]


@pytest.mark.usefixtures("short_is_long")
def test_only_causal_rows_in_16_bits_are_a_long_chunk() -> None:
    """Nor are short ones, a graph's padding, rows that see themselves alone, and rows that see no slot."""
    step, half = Batch([(20, CHAIN), (9, 24), (0, 40), (9, 15), (0, 17)], 16).metadata, torch.float16
    assert long_chunks(step, 0, half, "cpu") == [1, 2]
    assert long_chunks(step, 1, half, "cpu") == [1], "the first row of the other one sees no slot"
    assert not long_chunks(step, 0, torch.float32, "cpu")
    assert not long_chunks(padded(Batch([(9, [-1])], 16).metadata, Size(1024, 4)), 0, half, "cpu")
    (same_N,) = np.ones((1, len(step.slot_N)), dtype=np.int32)
    assert not long_chunks(replace(step, visible_N=40 * same_N), 0, half, "cpu")
    assert not long_chunks(replace(step, ancestors_N=same_N.astype(np.int64)), 0, half, "cpu")
    plans = [plan(step, 16, dtype=half) for plan in (fused.plan, fused.invariant(128).plan)]
    assert [isinstance(plan, PromptPlan) for plan in plans] == [True, False]
    assert not isinstance(fused.plan(step, 16, dtype=half, windows=(9,)), PromptPlan)
