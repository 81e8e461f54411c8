"""Times each kernel in torch and in Triton, and forwards and trees with and without graphs, in us. Needs CUDA.

    python -m bench.kernels [--output DIR]

Trees have 17 rows; attention has 32 query and 8 key-value heads of width 128 in bfloat16.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from bench.harness import command, parser
from cluster.bench.report import Row, reporting
from drafter.drafter import Drafter
from drafter.proposers.base import FeatureProposer, head_graphs, head_tree_graphs
from drafter.tree.policy import make_tree_policy
from secateur.cli.bench import say
from tests.drafter.tree.test_tree_graphs import message
from tests.support.attention_cases import Batch, trees_behind
from tests.support.checkpoints import load_eagle3
from tests.support.engines import AUTO, BUNDLED, DYNAMIC, bundled
from workers.cuda_graphs import decoder_graphs
from workers.kernels import fused, reference
from workers.models.layers import Runtime
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.settings import SamplingSettings
from workers.types import SamplingBatch

SETS, TWINS = (reference, fused), ("torch", "triton")
WAYS = ("launched", "replayed", "replayed_at_once")


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("kernels.py: no CUDA device here, so nothing was measured")
    options = parser(__doc__).parse_args()
    about = {"command": command(), "hardware": torch.cuda.get_device_name(), "torch": torch.__version__}
    with reporting(options.output, "kernels", about, say, "cuda") as report:
        for table, rows in (("kernels", kernels()), ("whole passes", passes())):
            for row in rows:
                say(str(report.add(table, row)))
    print(report.markdown)


def kernels() -> Iterator[Row]:
    """Time each kernel beside its twin."""
    generator = torch.Generator("cuda").manual_seed(0)
    for lengths in ([500], [8000], [500] * 16, [4000] * 16, [1000] * 64, [3000] * 32, [64_000, *[1000] * 31]):
        step = trees_behind(np.array(lengths), 16)
        num_slots = 16 * (1 + int(step.page_table_BP.max()))
        kv = torch.randn(num_slots, 2, 8, 128, dtype=torch.bfloat16, device="cuda", generator=generator)
        q = torch.randn(len(step.slot_N), 32, 128, dtype=torch.bfloat16, device="cuda", generator=generator)
        plans = [k.plan(step, 16, group_size=4, kv_heads=8, dtype=q.dtype, device="cuda") for k in SETS]
        calls = [partial(k.tree_attention, q, kv, p, 128**-0.5) for k, p in zip(SETS, plans, strict=True)]
        yield timed(f"attention, {len(lengths)} requests behind {lengths[0]}, then {lengths[-1]}", TWINS, calls)
    pool = torch.zeros(32, 8192, 2, 8, 128, dtype=torch.bfloat16, device="cuda")
    for count in (4, 256):
        source = torch.randperm(8192, device="cuda")[:count]
        target = torch.randperm(8192, device="cuda")[:count]
        copies = [partial(k.copy_slots, pool, source, target) for k in SETS]
        yield timed(f"copy of {count} tokens, 32 layers", TWINS, copies)
    for rows, vocab in ((17, 128_256), (272, 128_256)):
        logits = torch.randn(rows, vocab, device="cuda", generator=generator)
        params = SamplingBatch.stack([SamplingSettings(seed=row // 17) for row in range(rows)], device="cuda")
        index = torch.arange(rows, device="cuda") % 17 // 3
        tau = torch.full((rows,), 0.6, device="cuda")
        draws = [partial(k.coupled_argmax, logits, params, index, 0, None) for k in SETS]
        yield timed(f"coupled argmax, {rows} rows of {vocab}", TWINS, draws)
        top_k, top_p = (torch.full((rows,), value, device="cuda") for value in (20, 0.9))
        for name, k in (("top-p", 0 * top_k), ("top-k, top-p", top_k)):
            cuts = [partial(kernels.truncation_threshold, 4 * logits, k, top_p) for kernels in SETS]
            yield timed(f"{name}, {rows} rows of {vocab}", TWINS, cuts)
        sums = [partial(k.top_k, logits, 8, tau) for k in SETS]
        yield timed(f"top 8 and sum, {rows} rows of {vocab}", TWINS, sums)


def passes() -> Iterator[Row]:
    """Time whole passes of the bundled pair, launched and replayed."""
    yield from forward_pass()
    yield from trees()


def forward_pass() -> Iterator[Row]:
    """Time the bundled target, which is so small that launches dominate."""
    path, config = BUNDLED / "target", bundled(DYNAMIC)
    model = load_decoder(path, read_spec(path), Runtime(device="cuda", kernels=fused))
    pool = model.new_kv_pool(4096)
    graphs = decoder_graphs(model, pool, config)
    say(str(graphs.report))
    for requests in (1, 8):
        step = batch(requests, 100)
        tokens = torch.zeros(17 * requests, dtype=torch.int32)

        def launched(step: Batch = step, tokens: torch.Tensor = tokens) -> None:
            on_device = tokens.cuda()
            model.forward(on_device, on_device, model.plan(step.metadata, 16), pool)

        @torch.inference_mode()
        def replayed(step: Batch = step, tokens: torch.Tensor = tokens) -> None:
            graphs(step.metadata, tokens, tokens)

        yield timed(f"forward of {requests} requests, plan included", WAYS, [launched, replayed])


def trees() -> Iterator[Row]:
    """Time a whole reply of the bundled EAGLE-3 head, which is so small that launches dominate.

    With one child per node, every kind of growth runs all eight levels.
    """
    tree = replace(AUTO, max_children=1)
    config = bundled(tree)
    head = load_eagle3(BUNDLED / "eagle3", BUNDLED / "target", Runtime(device="cuda", kernels=fused))
    pool = head.new_kv_pool(4096)
    graphs, tree_graphs = head_graphs(head, pool, config), head_tree_graphs(head, pool, config)
    say(f"{graphs.report}, {tree_graphs.report}")
    ways = [(None, None), (graphs, None), (graphs, tree_graphs)]
    proposers = [FeatureProposer(head, pool, config.page_size, config.tree_rows, *way) for way in ways]
    for requests in (1, 8):
        step = dict.fromkeys(range(requests), (4, 16, 8))
        request = message(step, [100] * requests, head.width, torch.Generator().manual_seed(0), "cuda")
        answers = [
            partial(Drafter(proposer, make_tree_policy(tree), kernels=fused).draft, request) for proposer in proposers
        ]
        assert {answer().num_levels for answer in answers} == {8}
        yield timed(f"{requests} trees of 8 levels", WAYS, answers)


def batch(requests: int, prefix: int) -> Batch:
    rng, parents, floor = random.Random(1), [-1], 0
    for row in range(1, 17):
        floor = rng.randint(floor, row - 1)
        parents.append(floor)
    return Batch([(prefix, parents)] * requests, 16)


def timed(name: str, ways: Sequence[str], calls: Sequence[Callable[[], object]]) -> Row:
    """Return the microseconds of each call, of which there may be fewer than ways."""
    return {"what": name} | {f"{way}_us": microseconds(call) for way, call in zip(ways, calls, strict=False)}


def microseconds(call: Callable[[], object], repeat: int = 50) -> float:
    """Return the mean time of a call, host and device together."""
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeat):
        call()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / repeat


if __name__ == "__main__":
    main()
