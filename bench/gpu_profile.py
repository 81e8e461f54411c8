"""Tells where a GPU's time goes, kernel by kernel: the target's layers in a verify step, and a drafter's trees.

    python -m bench.gpu_profile [--parts verify bundled large] [--target-cost 4096x8] [--rows 14]

The target has the width of an 8B model and a few of its layers, so that the times of a layer are those of the whole.
Times are microseconds: `wall` around whole calls without a profiler (medians), `device` from the profiler. Below each
table are the Python functions in which a call spends most time; a profiled call takes longer than `wall`.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.kernels import batch
from bench.scaled import TargetSize, scaled_pair
from cluster.bench.report import markdown
from drafter.drafter import Drafter
from drafter.proposers.base import FeatureProposer, head_graphs, head_tree_graphs
from drafter.tree.policy import make_tree_policy
from tests.drafter.tree.test_tree_graphs import message
from tests.support.attention_cases import Batch
from tests.support.checkpoints import BASE, load_eagle3, write_eagle3
from tests.support.engines import AUTO, BUNDLED, bundled
from workers.cuda_graphs import decoder_graphs
from workers.kernels.select import kernels_for
from workers.models.layers import Runtime
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.settings import SamplingSettings
from workers.types import DraftRequest, SamplingBatch

REPEAT, DTYPE = 20, torch.bfloat16
PARTS = ("verify", "bundled", "large")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-cost", type=TargetSize.parse, default=TargetSize.parse("4096x8"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rows", type=int, default=14, help="kernels shown of each call")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as ranks do
    if not torch.cuda.is_available():
        sys.exit("gpu_profile.py: no CUDA device here, so nothing was measured")
    with tempfile.TemporaryDirectory() as folder:
        pair = scaled_pair(BUNDLED / "target", BUNDLED / "eagle3", options.target_cost, Path(folder), DTYPE)
        with torch.inference_mode():
            if "verify" in options.parts:
                verify(pair.target, options.rows)
            if "bundled" in options.parts:
                trees("the bundled head", pair.head, pair.target, options.rows)
            if "large" in options.parts:
                trees("a head of an 8B model", *write_head(Path(folder)), options.rows)


def verify(path: Path, shown: int) -> None:
    spec = read_spec(path)
    model = load_decoder(
        path, spec, Runtime(device="cuda", dtype=DTYPE, kernels=kernels_for("cuda")), tap_layers=(0, 1, 2)
    )
    config = bundled(AUTO, max_num_seqs=8, max_model_len=2048)
    pool = model.new_kv_pool(8 * 2048)
    graphs = decoder_graphs(model, pool, config)
    print(f"\n# verify, {spec.num_layers} layers: {graphs.report}")
    steps = {
        "1 row": Batch([(500, [-1])], 16),
        "1 tree of 17 rows": batch(1, 500),
        "8 trees of 17 rows": batch(8, 500),
    }
    for name, step in steps.items():
        tokens = torch.zeros(len(step.metadata.slot_N), dtype=torch.int32)
        report(name, partial(graphs, step.metadata, tokens, tokens), shown)


def write_head(folder: Path) -> tuple[Path, Path]:
    """Write a random EAGLE-3 head of the size of those for Llama-3-8B; return it and its target, a configuration."""
    size: dict[str, Any] = {
        "vocab_size": 40_960,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
    }
    head = write_eagle3(folder / "random-head", draft_vocab_size=32_000, aux_layer_ids=(2, 4, 6), **size)
    target = folder / "random-target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(BASE | size | {"model_type": "llama", "num_hidden_layers": 8}))
    save_file({"unused": torch.zeros(1)}, target / "model.safetensors")  # the head has an embedding of its own
    return head, target


def trees(name: str, path: Path, target: Path, shown: int) -> None:
    kernels = kernels_for("cuda")
    head = load_eagle3(path, target, Runtime(device="cuda", dtype=DTYPE, kernels=kernels))
    config = bundled(AUTO, max_num_seqs=8)
    pool = head.new_kv_pool(4096)
    graphs, tree_graphs = head_graphs(head, pool, config), head_tree_graphs(head, pool, config)
    print(f"\n# {name}: {graphs.report}, {tree_graphs.report}")
    ways = {"in one graph": (graphs, tree_graphs), "level by level": (graphs, None)}
    for requests in (1, 8):
        for way, ready in ways.items():
            proposer = FeatureProposer(head, pool, config.page_size, config.tree_rows, *ready)
            for temperature in (0.0, 1.0):
                request = drafting(requests, head.width, temperature)
                report(
                    f"{requests} trees of 16 nodes {way}, T={temperature:g}",
                    partial(Drafter(proposer, make_tree_policy(AUTO), kernels=kernels).draft, request),
                    shown,
                )


def drafting(requests: int, width: int, temperature: float) -> DraftRequest:
    """Return a message for trees of unconstrained requests, each behind 100 tokens and fed 4."""
    step = dict.fromkeys(range(requests), (4, 16, 8))
    request = message(step, [100] * requests, width, torch.Generator().manual_seed(0), "cuda")
    sampling = SamplingBatch.stack([SamplingSettings(temperature=temperature, seed=b) for b in range(requests)])
    assert request.features_MH is not None
    constraints = torch.zeros(0, dtype=torch.uint8)
    features = request.features_MH.to(DTYPE)
    return replace(request, sampling=sampling, constraints_U=constraints, features_MH=features)


def report(name: str, call: Callable[[], object], shown: int) -> None:
    """Print a call's time and its kernels, those that take longest first."""
    for _ in range(5):
        call()
    walls = [wall(call) for _ in range(REPEAT)]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(REPEAT):
            call()
        torch.cuda.synchronize()
    events = found.key_averages()
    on_device = [event for event in events if event.device_type == DeviceType.CUDA]
    on_host = [event for event in events if event.device_type == DeviceType.CPU and event.key.startswith("cu")]
    rows = sorted(((e.self_device_time_total / REPEAT, e.count / REPEAT, e.key) for e in on_device), reverse=True)
    total, num_kernels = (sum(row[column] for row in rows) for column in (0, 1))
    print(f"\n## {name}: wall {statistics.median(walls):.0f}, device {total:.0f}, kernels {num_kernels:.0f}")
    calls = (f"{e.key} {e.count / REPEAT:.1f} ({e.self_cpu_time_total / REPEAT:.0f} us)" for e in on_host)
    print("host calls: " + ", ".join(calls))
    table = [[f"{time:.1f}", f"{count:.1f}", f"{time / count:.2f}", key[:90]] for time, count, key in rows[:shown]]
    print(markdown(["device us", "launches", "each", "kernel"], table), flush=True)
    python = cProfile.Profile()
    for _ in range(REPEAT):
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
