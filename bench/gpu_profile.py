"""Tells where a GPU's time goes, kernel by kernel: a verify step with its draws, and a drafter's trees.

    python -m bench.gpu_profile [--parts verify tree block] [--target-cost 8b+v128256] [--cache DIR]
                                [--requests 1 8 33 64] [--rows 14] [--repeat 10]

`verify` has one row, and then trees of 17 rows of each number of requests; `tree` the trees of 16 nodes of the padded
head; `block` those of a random DSpark head of two layers as wide, which drafts them in one pass.
Times are microseconds: `wall` around whole calls without a profiler (medians), `device` from the profiler. Below each
table are the Python functions in which a call spends most time; a profiled call takes longer than `wall`.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

from bench.forward import ForwardShape, target_step
from bench.scaled import ScaledPair, TargetSize, scaled_pair
from cluster.bench.report import markdown
from drafter.drafter import Drafter
from drafter.proposers.base import FeatureProposer, Proposer, head_graphs, head_tree_graphs
from drafter.proposers.block import BlockHead
from drafter.proposers.one_pass import OnePassProposer, ScratchPages, block_tree_graphs
from drafter.tree.policy import make_tree_policy
from tests.drafter.tree.test_tree_graphs import message
from tests.support.checkpoints import load_eagle3, write_block
from tests.support.engines import AUTO, BUNDLED, bundled
from verifier.target import Target
from workers.config import EngineConfig
from workers.cuda_graphs import Graphs, Size
from workers.kernels.select import AttentionPlan, kernels_for
from workers.models.block_format import read_block_spec
from workers.models.layers import Runtime
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.sampling.grammar import Grammars, TokenTable
from workers.settings import SamplingSettings
from workers.types import DraftRequest, SamplingBatch

DTYPE, PAGE, TREE_ROWS = torch.bfloat16, 16, 17
PARTS = ("verify", "tree", "block")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-cost", type=TargetSize.parse, default=TargetSize.parse("8b+v128256"))
    parser.add_argument("--cache", type=Path, help="keep the padded models here")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--requests", nargs="+", type=int, default=(1, 8, 33, 64))
    parser.add_argument("--rows", type=int, default=14, help="kernels shown of each call")
    parser.add_argument("--repeat", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)  # as ranks do
    if not torch.cuda.is_available():
        sys.exit("gpu_profile.py: no CUDA device here, so nothing was measured")
    show = partial(report, shown=options.rows, repeat=options.repeat)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        cache = options.cache or Path(folder)
        pair = scaled_pair(BUNDLED / "target", BUNDLED / "eagle3", options.target_cost, cache, DTYPE)
        runtime = Runtime(device="cuda", dtype=DTYPE, kernels=kernels_for("cuda"))
        config = bundled(
            AUTO, max_num_seqs=max(options.requests), max_model_len=1024, max_num_batched_tokens=64, dtype="bfloat16"
        )
        if "verify" in options.parts:
            verify(pair.target, runtime, options.requests, show)
        for part, proposer in (("tree", head_of), ("block", block_of)):
            if part in options.parts:
                trees(part, proposer(pair, runtime, config, Path(folder)), options.requests, show)


def verify(path: Path, runtime: Runtime, requests: list[int], show: Callable[..., None]) -> None:
    """Profile steps of the target behind 500 tokens, until their draws are on the host."""
    spec = read_spec(path)
    model = load_decoder(path, spec, runtime)
    steps = [ForwardShape(rows=1, context=500)]
    steps += [ForwardShape(rows=TREE_ROWS, batch=batch, context=500) for batch in requests]
    pages = -(-(500 + TREE_ROWS) // PAGE)
    pool = model.new_kv_pool(PAGE * (1 + pages * max(requests)))
    one = torch.zeros(1, dtype=torch.int32, device="cuda")

    def run(plan: AttentionPlan, tokens_N: Tensor, positions_N: Tensor) -> tuple[Tensor, ...]:
        return tuple(rows for rows in model.forward(tokens_N, positions_N, plan, pool) if rows is not None)

    sizes = sorted({Size.of(step.rows * step.batch, step.batch) for step in steps}, reverse=True)
    plan = partial(model.plan, page_size=PAGE)
    graphs = Graphs(run, plan, (one, one), buckets=sizes, table_width=pages)
    grammars = Grammars(TokenTable.of(replace(bundled(), model_path=str(path)), spec.vocab_size))
    target = Target(model, pool, PAGE, None, None, None, graphs, grammars)
    print(f"\n# verify, {spec.num_layers} layers, {spec.vocab_size} tokens: {graphs.report}", flush=True)
    for step in steps:
        call = partial(target.run, target_step(PAGE, step), 0)
        show(f"{step.batch} requests of {step.rows} rows", call)


def head_of(pair: ScaledPair, runtime: Runtime, config: EngineConfig, folder: Path) -> Proposer:
    head = load_eagle3(pair.head, pair.target, runtime)
    pool = head.new_kv_pool(256 * config.max_num_seqs)
    graphs, tree_graphs = head_graphs(head, pool, config), head_tree_graphs(head, pool, config)
    print(f"\n# an EAGLE-3 head of {pair.head.name}: {graphs.report}, {tree_graphs.report}", flush=True)
    return FeatureProposer(head, pool, PAGE, config.tree_rows, graphs, tree_graphs)


def block_of(pair: ScaledPair, runtime: Runtime, config: EngineConfig, folder: Path) -> Proposer:
    """Write a head without an embedding and a vocabulary head, which are then the target's, and load it."""
    target = read_spec(pair.target)
    path = write_block(
        folder / "block",
        style="specforge",
        markov_rank=256,
        taps=(2, 4, 6),
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_attention_heads=target.num_heads,
        num_key_value_heads=target.num_kv_heads,
        head_dim=target.head_dim,
    )
    spec = read_block_spec(path, target)
    head = BlockHead.load(spec, path, str(pair.target), runtime)
    num_slots = 256 * config.max_num_seqs
    scratch = ScratchPages(num_slots // PAGE, PAGE, head.num_behind)
    pool = head.new_kv_pool(num_slots + config.max_num_seqs * scratch.per_request * PAGE)
    graphs = head_graphs(head, pool, config, scratch.per_request)
    tree_graphs = block_tree_graphs(head, config, has_leaf_siblings=spec.has_marginals)
    print(f"\n# a DSpark head: {graphs.report}, {tree_graphs.report}", flush=True)
    return OnePassProposer(head, pool, PAGE, scratch, graphs, tree_graphs)


def trees(part: str, proposer: Proposer, requests: list[int], show: Callable[..., None]) -> None:
    drafter = Drafter(proposer, make_tree_policy(AUTO), kernels=kernels_for("cuda"))
    for batch in requests:
        for temperature in (0.0, 1.0) if batch == 1 else (0.0,):
            call = partial(drafter.draft, drafting(batch, proposer.width, temperature))
            show(f"{part}: {batch} trees of 16 nodes, T={temperature:g}", call)


def drafting(requests: int, width: int, temperature: float) -> DraftRequest:
    """Return a message for trees of unconstrained requests, each behind 100 tokens and fed 4."""
    step = dict.fromkeys(range(requests), (4, 16, 8))
    request = message(step, [100] * requests, width, torch.Generator().manual_seed(0), "cuda")
    sampling = SamplingBatch.stack([SamplingSettings(temperature=temperature, seed=b) for b in range(requests)])
    assert request.features_MH is not None
    constraints = torch.zeros(0, dtype=torch.uint8)
    features = request.features_MH.to(DTYPE)
    return replace(request, sampling=sampling, constraints_U=constraints, features_MH=features)


def report(name: str, call: Callable[[], object], shown: int, repeat: int) -> None:
    """Print a call's time and its kernels, those that take longest first."""
    for _ in range(min(5, repeat)):
        call()
    walls = [wall(call) for _ in range(repeat)]
    activities = supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    with profile(activities=activities) as found:
        for _ in range(repeat):
            call()
        torch.cuda.synchronize()
    events = found.key_averages()
    on_device = [event for event in events if event.device_type == DeviceType.CUDA]
    on_host = [event for event in events if event.device_type == DeviceType.CPU and event.key.startswith("cu")]
    rows = sorted(((e.self_device_time_total / repeat, e.count / repeat, e.key) for e in on_device), reverse=True)
    total, num_kernels = (sum(row[column] for row in rows) for column in (0, 1))
    print(f"\n## {name}: wall {statistics.median(walls):.0f}, device {total:.0f}, kernels {num_kernels:.0f}")
    calls = (f"{e.key} {e.count / repeat:.1f} ({e.self_cpu_time_total / repeat:.0f} us)" for e in on_host)
    print("host calls: " + ", ".join(calls))
    table = [[f"{time:.1f}", f"{count:.1f}", f"{time / count:.2f}", key[:90]] for time, count, key in rows[:shown]]
    print(markdown(["device us", "launches", "each", "kernel"], table), flush=True)
    python = cProfile.Profile()
    for _ in range(repeat):
        python.runcall(call)
    text = io.StringIO()
    pstats.Stats(python, stream=text).strip_dirs().sort_stats("tottime").print_stats(shown)
    print("\n".join(line for line in text.getvalue().splitlines() if line.strip()), flush=True)


def wall(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
