"""Padding a step to its bucket does not change its results; without a GPU, the padded steps run uncaptured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from drafter.proposers.base import head_graphs
from tests.support import checkpoints
from tests.support.attention_cases import CHAIN, RAGGED, TWO_BY_TWO, Batch
from tests.support.clockwork import AUTO, OFF, Bench, ClockCosts, bench
from tests.support.engines import DYNAMIC, bundled
from workers import cuda_graphs
from workers.cuda_graphs import MAX_ROWS, MOST_ROWS, Size, bucket, can_capture, decoder_graphs, fitting, padded, sizes
from workers.kernels.select import TORCH
from workers.models.layers import Runtime
from workers.models.load import load_decoder
from workers.models.readers import read_spec

torch.set_num_threads(1)

STEPS = [
    Batch([(20, CHAIN)], 16),
    Batch([(5, RAGGED), (0, 5), (33, [-1])], 16),
    Batch([(9, [-1])], 16),
    Batch([(5, TWO_BY_TWO), (0, 0), (40, CHAIN), (31, [-1]), (0, 3)], 16),
    Batch([(0, 40)], 16),
    Batch([(0, 70)], 16),
]
"""Steps; the last two are prompt chunks, one of them larger than every bucket."""


def test_buckets_have_at_most_a_third_of_padding() -> None:
    buckets = [bucket(n) for n in range(1, 1000)]
    assert buckets[:13] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    assert all(n <= rows and 3 * (rows - n) <= rows for n, rows in enumerate(buckets, 1))
    assert [bucket(rows) for rows in buckets] == buckets == sorted(buckets)


@pytest.mark.parametrize(("max_requests", "num_nodes"), [(1, 0), (8, 16), (64, 16), (5, 63)])
def test_every_step_up_to_the_budget_has_a_bucket(max_requests: int, num_nodes: int) -> None:
    """One prompt of any length, trees beside a chunk, 32 trees of 17 rows: nothing runs without a graph."""
    tree = replace(DYNAMIC, num_speculative_tokens=num_nodes) if num_nodes else None
    config = bundled(tree, max_num_seqs=max_requests, max_num_batched_tokens=1500)
    made = sizes(config)
    assert len(set(made)) == len(made) and made[0] == Size(1536, max(size.requests for size in made))
    for num_requests in range(1, max_requests + 1):
        for num_rows in range(num_requests, 1501):
            size = fitting(Size.of(num_rows, num_requests), made, made[0].requests)
            assert size is not None and size.rows == bucket(num_rows) and size.requests >= num_requests
    assert fitting(Size.of(1537, 1), made, made[0].requests) is None


def test_a_step_of_trees_runs_with_as_few_requests_as_it_has() -> None:
    made = sizes(bundled(DYNAMIC, max_num_seqs=64))
    for num_requests in (1, 2, 3, 8, 20):
        trees = Size.of(17 * num_requests, num_requests)
        assert fitting(trees, made, 64) == trees
    assert fitting(Size.of(200, 4), made, 64) == Size(256, 16)


def test_padding_rows_are_one_request_on_the_null_page() -> None:
    batch = STEPS[1]
    step = padded(batch.metadata, Size(24, 4))
    assert step.query_offsets.tolist() == [0, 8, 13, 14, 14, 24]
    assert (step.physical(step.owner_N, step.slot_N, 16)[14:] == 0).all() and (step.visible_N[14:] == 1).all()
    assert not step.ancestors_N[14:].any() and not step.page_table_BP[3:].any()


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_padded_steps_have_the_same_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """Steps of all sizes run one after the other through the same buffers and write the same KV."""
    kernels = TORCH
    if name == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("runs on the GPU in gpu/")
        from workers.kernels import fused as kernels  # type: ignore[no-redef]
    path = checkpoints.write_model(tmp_path, "llama", num_hidden_layers=2)
    model = load_decoder(path, read_spec(path), Runtime(kernels=kernels), tap_layers=(0, 2))
    monkeypatch.setattr(cuda_graphs, "MOST_ROWS", 64)
    config = bundled(DYNAMIC, max_num_seqs=8, max_model_len=128)
    pools = [model.new_kv_pool(32 * 16) for _ in range(2)]
    context = torch.randn(pools[0].data[:, 16:].shape, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        for pool in pools:
            pool.data[:, 16:] = context
    replayed = decoder_graphs(model, pools[1], config, is_captured=False)
    fits = [fitting(Size.of(len(step.keys), len(step.metadata.base_B)), replayed._buckets, 8) for step in STEPS]
    assert all(fits[:-1]) and fits[-1] is None
    for number, step in enumerate(STEPS):
        tokens = torch.randint(0, 96, (len(step.keys),), generator=torch.Generator().manual_seed(number))
        positions = torch.tensor([len(keys) - 1 for keys in step.keys], dtype=torch.int32)
        alone = model.forward(tokens, positions, model.plan(step.metadata, 16), pools[0])
        with torch.inference_mode():
            final_ND, taps_N3D = replayed(step.metadata, tokens, positions)
        assert (final_ND - alone.final_ND).abs().max() < 2e-4
        assert (taps_N3D - alone.taps_N3D).abs().max() < 2e-4
    assert (pools[1].data[:, 16:] - pools[0].data[:, 16:]).abs().max() < 2e-4


@pytest.fixture
def padding() -> Iterator[Bench]:
    """Both models of the bundled pair run padded steps."""
    with bench(ClockCosts(fixed=20, row=0.5, message=2, fed=0.1, level=1, node=0.1)) as engine_bench:
        config = bundled(DYNAMIC)
        target = engine_bench.engine._target
        target.graphs = decoder_graphs(target._decoder, target._kv, config, is_captured=False)
        proposer = engine_bench.engine._drafter.channel.drafter.proposer  # type: ignore[union-attr]
        proposer.graphs = head_graphs(proposer._head, proposer._kv, config, is_captured=False)
        plans = []
        for replayed in (target.graphs, proposer.graphs):
            plans.append(mock.Mock(wraps=replayed._plan))
            replayed._plan = plans[-1]
        yield engine_bench
        num_padded = [sum("into" in call.kwargs for call in plan.call_args_list) for plan in plans]
        assert min(num_padded) > 20, f"the steps were not padded: {num_padded}"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_engines_emit_the_same_tokens_with_padding(padding: Bench, temperature: float) -> None:
    work = dict(batch=3, temperature=temperature, num_prompts=4, num_tokens=24)
    padded_runs = [padding.run(speculation, **work) for speculation in (AUTO, OFF)]
    with bench(padding.clock.costs) as plain:
        assert [run.tokens for run in padded_runs] == [plain.run(way, **work).tokens for way in (AUTO, OFF)]


def test_graphs_need_cuda_and_kernels_that_stay_in_place() -> None:
    assert not can_capture(TORCH, torch.device("cpu"), False)
    assert not can_capture(TORCH, torch.device("cuda"), False)
    fused = pytest.importorskip("workers.kernels.fused")
    assert can_capture(fused, torch.device("cuda"), False) and not can_capture(fused, torch.device("cuda"), True)
    assert bucket(MAX_ROWS) == cuda_graphs.MAX_ROWS and bucket(MOST_ROWS) == MOST_ROWS
