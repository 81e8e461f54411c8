"""Times each kernel in torch and in Triton, and products in cuBLAS and in Triton, in us. Needs CUDA.

    python -m bench.kernels [--tiny] [--output DIR]

Trees have 17 rows; attention has 32 query and 8 key-value heads of width 128 in bfloat16, a gated delta net 16 and 32
of width 128. Products are those of an 8B target's matrices.
"""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import command, parser
from cluster.bench.report import Row, reporting
from secateur.cli.bench import say
from tests.support.attention_cases import Batch, trees_behind
from tests.workers.kernels.test_triton_delta import metadata as delta_step
from workers.kernels import fused, reference
from workers.kernels.block_scaled import BlockScaled
from workers.kernels.prompt_attention import PromptPlan
from workers.kernels.torch_delta import DeltaWeights, LayerStates
from workers.settings import SamplingSettings
from workers.types import AttentionMetadata, SamplingBatch

SETS, TWINS = (reference, fused), ("torch", "triton")
PRODUCTS = ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336), (128_256, 4096))
_CACHE_BYTES = 256 << 20
"""Weights read between two products with the same one, of which no cache holds so many."""


def main() -> None:
    tables = {table.__name__: table for table in (products, prompts, attention, delta_nets, draws)}
    options = parser(__doc__)
    options.add_argument("--tiny", action="store_true", help="small shapes, to see that everything runs")
    options.add_argument("--tables", nargs="+", default=list(tables), choices=tables, help="these alone")
    given = options.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels.py: no CUDA device here, so nothing was measured")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: rows so far are kept
    about = {"command": command(), "hardware": torch.cuda.get_device_name(), "torch": torch.__version__}
    with reporting(given.output, "kernels", about, say, "cuda") as report, torch.inference_mode():
        for name in given.tables:
            for row in tables[name](64 if given.tiny else 1):
                say(f"{name}: {report.add(name.replace('_', ' '), row)}")
    print(report.markdown)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda")


def products(less: int) -> Iterator[Row]:
    """Time products of few rows in one CUDA graph, each with another copy of the weight."""
    for outputs, inputs in PRODUCTS:
        outputs, inputs = outputs // less, inputs // less
        copies = 1 if less > 1 else -(-_CACHE_BYTES // (outputs * inputs))
        weight_COI = normal(copies, outputs, inputs)
        value_COI = (100 * weight_COI).to(torch.float8_e4m3fn)
        scale_BO = torch.full((-(-inputs // 128), outputs), 1e-2, device="cuda")
        scaled = [BlockScaled(value_OI, scale_BO, None, 128, torch.bfloat16) for value_OI in value_COI]
        for num_rows in (1, 4, 17, 64, 128, 272):
            x = normal(num_rows, inputs)
            ways = {
                "cublas": partial(products_of, F.linear, x, list(weight_COI)),
                "bf16": partial(products_of, fused.invariant_linear, x, list(weight_COI)),
                "8_bits": partial(products_of, fused.block_scaled_linear, x, scaled),
            }
            us = {way: microseconds(replayed(call), less) / copies for way, call in ways.items()}
            weight_bytes = {way: outputs * inputs * (1 if way == "8_bits" else 2) for way in ways}
            rates = {f"{way}_gbs": weight_bytes[way] / us[way] / 1e3 for way in ways}
            yield (
                {"outputs": outputs, "inputs": inputs, "rows": num_rows} | {f"{w}_us": t for w, t in us.items()} | rates
            )


def products_of(product: Callable[..., Tensor], x: Tensor, weights: Sequence[Any]) -> None:
    for weight in weights:
        product(x, weight, None)


def replayed(call: Callable[[], object]) -> Callable[[], None]:
    """Return a graph of a call, which runs twice before: once to compile, and once to be captured."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def prompts(less: int) -> Iterator[Row]:
    """Time the attention of a prompt's chunk: PyTorch's, what an engine runs, and our kernel.

    PyTorch's has contiguous keys, and behind others all rows see all of them. An engine's lie on scattered pages.
    """
    for num_rows, before in ((2048, 0), (512, 8192), (2048, 8192), (2048, 32_768)):
        num_rows, before = num_rows // less, before // less
        total = before + num_rows
        pages = -(-total // 16)
        row_N = np.arange(before, total, dtype=np.int32)
        step = AttentionMetadata(
            query_offsets=np.array([0, num_rows], dtype=np.int32),
            page_table_BP=1 + np.random.default_rng(1).permutation(pages).astype(np.int32)[None],
            base_B=np.zeros(1, dtype=np.int32),
            slot_N=row_N,
            visible_N=row_N + np.int32(1),
            ancestors_N=np.zeros(num_rows, dtype=np.int64),
        )
        q, kv = normal(num_rows, 32, 128), normal(16 * (1 + pages), 2, 8, 128)
        plan = fused.plan(step, 16, group_size=4, kv_heads=8, dtype=q.dtype, device="cuda")
        tiled = plan.whole if isinstance(plan, PromptPlan) else plan
        k, v = kv[16 : 16 + total].repeat_interleave(4, 2).permute(1, 2, 0, 3)[:, None].contiguous()
        q_1HNd = q.transpose(0, 1)[None].contiguous()
        ways = [
            partial(F.scaled_dot_product_attention, q_1HNd, k, v, is_causal=before == 0),
            *(partial(fused.tree_attention, q, kv, p, 128**-0.5) for p in (plan, tiled)),
        ]
        yield timed(f"{num_rows} rows behind {before}", ("sdpa", "engine", "triton"), ways, less)


def attention(less: int) -> Iterator[Row]:
    """Time the attention of trees behind prefixes of equal and of mixed lengths; PyTorch's would pad them."""
    for given in ([500], [8000], [500] * 16, [4000] * 16, [1000] * 64, [3000] * 32, [64_000, *[1000] * 31]):
        lengths = [length // less for length in given][: 64 if less == 1 else 3]
        step = trees_behind(np.array(lengths), 16)
        q = normal(len(step.slot_N), 32, 128)
        kv = normal(16 * (1 + int(step.page_table_BP.max())), 2, 8, 128)
        plan = fused.plan(step, 16, group_size=4, kv_heads=8, dtype=q.dtype, device="cuda")
        calls = [partial(fused.tree_attention, q, kv, plan, 128**-0.5)]
        yield timed(f"{len(lengths)} requests behind {lengths[0]}, then {lengths[-1]}", TWINS[1:], calls, less)


def delta_nets(less: int) -> Iterator[Row]:
    """Time a gated delta net over trees, and over a prompt's chunk."""
    K, H, d = (2, 4, 16) if less > 1 else (16, 32, 128)
    channels = 2 * K * d + H * d
    weights = DeltaWeights(
        normal(4, channels, dtype=torch.float32),
        -normal(H, dtype=torch.float32).abs(),
        normal(H, dtype=torch.float32),
        K,
    )
    for requests, num_rows in ((1, 17), (8, 17), (64, 17), (1, 2048 // less)):
        total, is_tree = requests * num_rows, num_rows == 17
        seats = list(range(1, 1 + requests))
        masks = [(2 << row) - 1 if is_tree else 0 for row in range(num_rows)] * requests
        step = delta_step([num_rows] * requests, masks, seats, [0] * requests if is_tree else seats)
        layer = LayerStates(
            normal(1 + requests, H, d, d, dtype=torch.float32),
            normal(1 + requests, 3, channels),
            normal(total, channels + 2 * H),
        )
        rows, gates = normal(total, channels), normal(total, 2 * H)
        plans = [k.delta_plan(step, "cuda") for k in SETS]
        calls = [partial(k.delta_net, rows, gates, weights, p, layer) for k, p in zip(SETS, plans, strict=True)]
        yield timed(f"{requests} requests of {num_rows} rows", TWINS, calls, less)


def draws(less: int) -> Iterator[Row]:
    """Time what a step does with logits, and the moves of accepted tokens."""
    pool = torch.zeros(32, 8192 // less, 2, 8, 128, dtype=torch.bfloat16, device="cuda")
    for count in (4, 256 // less):
        source, target = (torch.randperm(8192 // less, device="cuda")[:count] for _ in range(2))
        yield timed(
            f"copy of {count} tokens, 32 layers",
            TWINS,
            [partial(k.copy_slots, pool, source, target) for k in SETS],
            less,
        )
    for rows, vocab in ((17, 128_256 // less), (272, 128_256 // less)):
        logits = normal(rows, vocab, dtype=torch.float32)
        params = SamplingBatch.stack([SamplingSettings(seed=row // 17) for row in range(rows)], device="cuda")
        index = torch.arange(rows, device="cuda") % 17 // 3
        tau = torch.full((rows,), 0.6, device="cuda")
        calls = [partial(k.coupled_argmax, logits, params, index, 0, None) for k in SETS]
        yield timed(f"coupled argmax, {rows} rows of {vocab}", TWINS, calls, less)
        top_k, top_p = (torch.full((rows,), value, device="cuda") for value in (20, 0.9))
        for name, k in (("top-p", 0 * top_k), ("top-k, top-p", top_k)):
            cuts = [partial(kernels.truncation_threshold, 4 * logits, k, top_p) for kernels in SETS]
            yield timed(f"{name}, {rows} rows of {vocab}", TWINS, cuts, less)
        yield timed(
            f"top 8 and sum, {rows} rows of {vocab}", TWINS, [partial(k.top_k, logits, 8, tau) for k in SETS], less
        )


def batch(requests: int, prefix: int) -> Batch:
    rng, parents, floor = random.Random(1), [-1], 0
    for row in range(1, 17):
        floor = rng.randint(floor, row - 1)
        parents.append(floor)
    return Batch([(prefix, parents)] * requests, 16)


def timed(name: str, ways: Sequence[str], calls: Sequence[Callable[[], object]], less: int) -> Row:
    """Return the microseconds of each call."""
    return {"what": name} | {f"{way}_us": microseconds(call, less) for way, call in zip(ways, calls, strict=True)}


def microseconds(call: Callable[[], object], less: int) -> float:
    """Return the mean time of a call, host and device together."""
    repeat = -(-20 // less)
    for _ in range(min(3, repeat)):
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
