"""Tree attention over the paged KV cache equals dense attention over each row's keys."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from tests.support import attention_cases
from tests.support.attention_cases import CHAIN, LONG_CHAIN, RAGGED, TWO_BY_TWO, Batch
from workers.kernels import reference
from workers.kernels.reference import plan, tree_attention
from workers.kernels.select import INVARIANT, TORCH, Kernels, multiplies_bfloat16
from workers.types import AttentionMetadata

torch.set_num_threads(1)

compare = partial(attention_cases.compare, reference)


@pytest.mark.parametrize(
    ("parents", "expected"),
    [
        (CHAIN, ["1000", "1100", "1110", "1111"]),
        (TWO_BY_TWO, ["1000000", "1100000", "1010000", "1101000", "1100100", "1010010", "1010001"]),
    ],
    ids=["chain", "2x2"],
)
def test_a_node_sees_its_ancestors_and_itself(parents: list[int], expected: list[str]) -> None:
    (group,) = plan(Batch([(0, parents)], 16).metadata, 16).groups
    seen = group.masks[None][0, 0] == 0
    assert ["".join(str(int(bit)) for bit in row) for row in seen.tolist()] == expected


@pytest.mark.parametrize("parents", [CHAIN, TWO_BY_TWO], ids=["chain", "2x2"])
@pytest.mark.parametrize("q_heads", [2, 4])
@pytest.mark.parametrize(("batch_size", "prefix"), [(1, 16), (16, 16), (32, 16), (1, 1024), (16, 1024), (1, 2048)])
def test_nodes_equal_causal_attention_on_their_path(
    parents: list[int], q_heads: int, batch_size: int, prefix: int
) -> None:
    compare(Batch([(prefix, parents)] * batch_size, 32), q_heads=q_heads, head_dim=128)


@pytest.mark.slow
def test_the_largest_batch_of_long_prefixes_in_bfloat16() -> None:
    batch = Batch([(2048, TWO_BY_TWO)] * 32, 32)
    compare(batch, head_dim=128, dtype=torch.bfloat16, tolerance=7.81e-3)


MIXED: list[tuple[int, list[int] | int]] = [
    (33, CHAIN),
    (700, TWO_BY_TWO),
    (40, [-1]),
    (0, 50),
    (31, RAGGED),
    (64, 20),
    (5, LONG_CHAIN),
    (0, 1),
    (700, RAGGED),
]


@pytest.mark.parametrize("kernels", [TORCH, INVARIANT], ids=["torch", "invariant"])
@pytest.mark.parametrize("first_slot", [0, 1])
@pytest.mark.parametrize("window", [None, 3, 40])
def test_mixed_trees_and_prompt_rows_share_one_batch(window: int | None, first_slot: int, kernels: Kernels) -> None:
    requests = MIXED[:-2] + MIXED[-1:] if first_slot else MIXED  # a single token in slot 0 would attend to nothing
    requests = [(max(start, first_slot), shape) for start, shape in requests]
    attention_cases.compare(kernels, Batch(requests, 16), window=window, first_slot=first_slot)


@pytest.mark.skipif(not multiplies_bfloat16(), reason="a CPU that does not multiply bfloat16")
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((8, 2), 128), ((4, 4), 32)])
@pytest.mark.parametrize("window", [None, 40])
def test_a_row_has_the_same_bits_alone(heads: tuple[int, int], head_dim: int, window: int | None) -> None:
    """Alone a row is the only one of its pass, and its keys follow one another."""
    options = {"windows": (window,), "group_size": heads[0] // heads[1], "dtype": torch.bfloat16}
    generator = torch.Generator().manual_seed(1)
    batch = Batch([*MIXED, (509, LONG_CHAIN)], 16)
    q = torch.randn(len(batch.owner), heads[0], head_dim, generator=generator).bfloat16()
    kv = torch.randn(batch.num_slots, 2, heads[1], head_dim, generator=generator).bfloat16()
    out = tree_attention(q, kv, INVARIANT.plan(batch.metadata, 16, **options), 0.1, window)
    for row in range(0, len(batch.owner), 3):
        keys = batch.keys[row]
        alone = Batch([(len(keys) - 1, [-1])], 16)
        own = torch.zeros(alone.num_slots, 2, heads[1], head_dim).bfloat16()
        own[alone.physical(0, list(range(len(keys))))] = kv[batch.physical(batch.owner[row], keys)]
        same = tree_attention(q[row : row + 1], own, INVARIANT.plan(alone.metadata, 16, **options), 0.1, window)
        assert torch.equal(out[row], same[0]), row


@pytest.mark.parametrize("seed", range(20))
def test_random_batches(seed: int) -> None:
    rng = random.Random(seed)
    requests: list[tuple[int, list[int] | int]] = []
    for _ in range(rng.randint(1, 12)):
        start = rng.choice([1, rng.randint(1, 60), rng.randint(60, 300)])
        if rng.random() < 0.3:
            requests.append((start, rng.randint(1, 40)))
            continue
        parents, floor = [-1], 0
        for row in range(1, rng.randint(1, 64)):
            floor = rng.randint(floor, row - 1)
            parents.append(floor)
        requests.append((start, parents))
    heads = rng.choice([(1, 1), (4, 2), (6, 2), (3, 3)])
    compare(
        Batch(requests, rng.choice([1, 4, 16]), seed), q_heads=heads[0], kv_heads=heads[1], window=rng.choice([None, 9])
    )


def test_rows_are_written_to_the_slot_of_their_page() -> None:
    batch = Batch([(33, CHAIN), (0, 5)], 16)
    prepared = plan(batch.metadata, 16)
    expected = [int(batch.physical(batch.owner[n], [int(s)])) for n, s in enumerate(batch.metadata.slot_N)]
    assert prepared.write_slots_N.tolist() == expected


def test_nan_in_one_request_does_not_affect_others() -> None:
    """NaN in one request's keys, in the null page and in unwritten slots does not reach other requests' padding."""
    batch = Batch([(15, CHAIN), (40, RAGGED), (33, CHAIN)], 16)
    prepared = plan(batch.metadata, 16, group_size=2)
    assert len(prepared.groups) == 1, "the requests should share one padded group"
    kv = torch.full((batch.num_slots, 2, 2, 8), float("nan"))
    for request, length in ((0, 19), (2, 37)):
        kv[batch.physical(request, list(range(length)))] = 1.0
    out = tree_attention(torch.randn(16, 4, 8), kv, prepared, 0.3)
    assert out[4:12].isnan().all() and not out[:4].isnan().any() and not out[12:].isnan().any()


@pytest.mark.parametrize("where", [(4,), (2, 9)])
def test_single_rows_stay_together_beside_chains_of_any_context(where: tuple[int, ...]) -> None:
    """Sorted by keys, the chains would split the single rows of long contexts into several groups."""
    requests = [(600 + 20 * n, LONG_CHAIN[:9] if n in where else [-1]) for n in range(12)]
    batch = Batch(requests, 16)
    shapes = sorted(group.shape[:2] for group in plan(batch.metadata, 16).groups)
    assert shapes == [(len(where), 9), (12 - len(where), 1)]
    compare(batch)


def test_pages_that_follow_one_another_are_read_in_place() -> None:
    batch = Batch([(70, RAGGED)], 16)
    pages = batch.metadata.page_table_BP
    in_order = replace(batch.metadata, page_table_BP=np.arange(3, 3 + pages.shape[1], dtype=np.int32)[None])
    scattered, run = plan(batch.metadata, 16), plan(in_order, 16)
    assert isinstance(scattered.groups[0].slots, torch.Tensor) and isinstance(run.groups[0].slots, slice)
    kv = torch.randn(16 * (3 + pages.shape[1]), 2, 1, 8)
    moved = torch.zeros(batch.num_slots, 2, 1, 8)
    moved[scattered.groups[0].slots] = kv[run.groups[0].slots]
    q = torch.randn(len(batch.owner), 1, 8)
    assert torch.equal(tree_attention(q, kv, run, 0.3), tree_attention(q, moved, scattered, 0.3))


def test_an_empty_batch_is_empty() -> None:
    empty = np.zeros(0, dtype=np.int32)
    metadata = AttentionMetadata(
        query_offsets=np.zeros(1, dtype=np.int32),
        page_table_BP=np.zeros((0, 1), dtype=np.int32),
        base_B=empty,
        slot_N=empty,
        visible_N=empty,
        ancestors_N=empty.astype(np.int64),
    )
    assert tree_attention(torch.zeros(0, 4, 8), torch.zeros(16, 2, 2, 8), plan(metadata, 16), 1.0).shape == (0, 32)
