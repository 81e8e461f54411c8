"""Counts what a step costs around the GPU's arithmetic, without a GPU: launches, host time, instructions.

    python -m bench.gpu_counts [--parts launches calls bytes host ...] [--archs 80 90 100] [--output DIR]

There is one table per part:

    launches   kernels in the graphs of a whole tree, on the simulated device
    trees      launches, calls and bytes of a draft by requests, nodes and levels, and the time that a GPU would take
    mixers     kernels in a step's forward of models whose layers mix rows in other ways, on the simulated device
    calls      launches, copies and replays that the host makes in a step, on the simulated device
    bytes      what a forward's attention plan sends to the device, on the simulated device
    attention  the programs of attention over requests of different lengths, and the host's time for their list
    host       thread CPU time of the host's code in a step; the models' own time is left out
    engine     thread CPU time of the engine's stages for up to 256 requests, beside simulated models
    buckets    the share of steps that are replayed from a graph, in simulated traffic
    cuts       the launches that find the threshold of top-k and top-p, and the programs of each
    kernels    registers, spills, shared memory and instructions of every Triton kernel, compiled ahead of time

Compiling takes minutes. The Triton that PyTorch's CUDA build pins may come first on PYTHONPATH.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")
import numpy as np
import pytest
import torch
from torch import Tensor

import verifier.engine
from bench.harness import command, parser
from cluster.bench.report import reporting
from drafter.drafter import Drafter
from drafter.proposers.base import FeatureProposer, head_graphs, head_tree_graphs
from drafter.proposers.eagle3 import Eagle3Head
from drafter.tree.frontier import TreeRequests
from drafter.tree.policy import make_tree_policy
from drafter.tree.tree_graphs import Shape, TreeGraphs
from secateur.cli.bench import say
from tests.drafter.tree.test_tree_graphs import message
from tests.support import checkpoints
from tests.support.attention_cases import busiest, trees_behind
from tests.support.engine_here import Pair, engine_here
from tests.support.engines import BUNDLED, DYNAMIC, bundled
from tests.support.fakes import Counting, FakeTarget
from tests.support.simulated_cuda import SimulatedCuda, simulated_cuda
from verifier.adaptive.cost_model import RowCosts
from verifier.engine import Engine
from verifier.hidden_states import HiddenStatePool, max_buffered_states
from workers.comm import wire
from workers.comm.channel import Received
from workers.comm.ipc import FrameSocket, Submit
from workers.comm.wire import Kind
from workers.config import DraftConfig, EngineConfig, PruneConfig, SimulatedCosts, TreeConfig
from workers.cuda_graphs import Recorder, Size, decoder_graphs, fitting, padded, sizes
from workers.kernels import fused, pointwise, triton_attention
from workers.kernels.select import TORCH
from workers.models.layers import Runtime
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.settings import Constraints, SamplingSettings
from workers.types import AttentionMetadata, DraftReply, DraftRequest, SamplingBatch, TargetStep, TreeBatch

PARTS = ("launches", "mixers", "trees", "calls", "bytes", "attention", "host", "engine", "buckets", "cuts", "kernels")
BATCHES = (1, 8, 32)
MANY = (1, 32, 64, 128, 256)
NUM_STEPS, WARM_UP, NUM_ROUNDS = 50, 20, 5
AUTO = replace(
    DYNAMIC, prune=PruneConfig(auto=True, prompt_lookup=False, simulated_costs=SimulatedCosts(step_ms=10, row_ms=0.01))
)
"""Trees of 16 nodes and 8 levels, with costs that make every step draft."""
Table = Iterator[list[object]]


# ---- launches


@contextmanager
def as_one_launch(cuda: SimulatedCuda) -> Iterator[Any]:
    """Yield Triton's kernel set with each pointwise chain as one launch, as `workers.kernels.compiled` has it."""

    def chain(name: str, *args: Any, **options: Any) -> Any:
        work = cuda._captured.work if cuda._captured is not None else []
        before = len(work)
        result = getattr(fused, name)(*args, **options)
        merged = work[before:]
        work[before:] = [lambda: [again() for again in merged]]
        return result

    kernels = SimpleNamespace(**{name: getattr(fused, name) for name in fused.__all__})
    for name in pointwise.__all__:
        setattr(kernels, name, partial(chain, name))
    yield kernels


def launches() -> Table:
    """Yield the trees of one request by their kind and sampling parameters; a compiled chain counts as one."""
    yield ["a tree of 8 levels and 16 nodes", "launches", "of the draft model", "others"]
    read_spec(BUNDLED / "target")  # transformers must be imported while torch is as it is
    chain = TreeConfig(kind="chain", num_speculative_tokens=8)
    for shape, tree in (("dynamic", AUTO), ("a chain of 8", chain)):
        config = bundled(tree, max_num_seqs=1, device="cuda")
        with simulated_cuda() as cuda, as_one_launch(cuda) as kernels:
            head = checkpoints.load_eagle3(
                BUNDLED / "eagle3", BUNDLED / "target", Runtime(device="cuda", kernels=kernels)
            )
            in_model = _counted_passes(head, cuda)
            graphs = head_tree_graphs(head, head.new_kv_pool(64 * config.page_size), config)
            for key, first, further in zip(graphs._grow, cuda.graphs[::2], cuda.graphs[1::2], strict=True):
                _, has_truncation, has_penalties = key
                name = "with penalties" if has_penalties else "with top-k and top-p" if has_truncation else "plain"
                whole, inside = (
                    len(first.work) + 7 * len(further.work),
                    in_model[id(first)] + 7 * in_model[id(further)],
                )
                yield [f"{shape}, {name}", whole, inside, whole - inside]


def _counted_passes(head: Eagle3Head, cuda: SimulatedCuda) -> Counter[int]:
    """Count the captured launches of the head's passes from now on, by the graph's id."""
    in_model: Counter[int] = Counter()

    def counted(run: Callable[..., Tensor], *args: Any) -> Tensor:
        graph = cuda._captured
        before = len(graph.work) if graph else 0
        result = run(*args)
        if graph is not None:
            in_model[id(graph)] += len(graph.work) - before
        return result

    head.forward, head.logits = partial(counted, head.forward), partial(counted, head.logits)  # type: ignore[method-assign]
    return in_model


# ---- trees

LEVEL_MS, ROW_US, REPLY_MS, HOST_LEVEL_MS = 0.279, 0.73, 1.2, 1.6
"""A level in a graph, each of its rows, and the rest of a draft, with the head of an 8B model on an H200: by the times
of 16 and of 128 rows in `results/2026-11-27-gpu-h200.md`. A level that the host grows: `2026-11-26-gpu-h200.md`."""
LEVEL_BYTES, ROW_BYTES = 749e6, 4 * 32_000 * 2 + 2 * 4096 * 12
"""Weights of that head, and what a row reads and writes: its logits twice, and a dozen rows of its width."""


def trees() -> Table:
    """Yield drafts by requests, nodes and levels: in graphs, and level by level."""
    yield [
        "requests x nodes x levels", "shape", "kernels in graphs", "calls of the host", "GB moved", "ms in graphs",
        "calls level by level", "ms level by level",
    ]  # fmt: skip
    config = bundled(DYNAMIC, max_num_seqs=128, device="cuda", max_model_len=512)
    read_spec(BUNDLED / "target")
    with simulated_cuda() as cuda:
        head = checkpoints.load_eagle3(BUNDLED / "eagle3", BUNDLED / "target", Runtime(device="cuda", kernels=fused))
        pool = head.new_kv_pool((1 + 9 * 128) * config.page_size)
        passes = head_graphs(head, pool, config)
        whole = head_tree_graphs(head, pool, config)
        for requests, (nodes, depth) in product((1, 8, 32, 64, 128), ((2, 2), (4, 3), (8, 5), (16, 8))):
            calls = []
            for graphs in (whole, None):
                proposer = FeatureProposer(head, pool, config.page_size, config.tree_rows, passes, graphs)
                drafter = Drafter(proposer, make_tree_policy(DYNAMIC), kernels=fused)
                step = dict.fromkeys(range(requests), (4, nodes, depth))
                asked = message(step, [100] * requests, head.width, torch.Generator().manual_seed(0), "cuda")
                none = torch.zeros(0, dtype=torch.uint8)
                sampling = SamplingBatch.stack([SamplingSettings(temperature=0.0)] * requests)
                asked = replace(
                    asked, auto_B=torch.zeros_like(asked.auto_B), costs=None, constraints_U=none, sampling=sampling
                )
                before, runs = cuda.num_calls, [graph.num_replays for graph in cuda.graphs]
                drafter.draft(asked)
                calls.append(cuda.num_calls - before)
                if graphs is not None:
                    size = graphs._size_of(TreeRequests.of(asked))
                    kernels = sum((g.num_replays - n) * len(g.work) for g, n in zip(cuda.graphs, runs, strict=True))
            shape, levels = size or (None, 0)
            rows = shape.requests * shape.nodes if shape else 0
            yield [
                f"{requests} x {nodes} x {depth}", f"{shape.requests} x {shape.nodes}" if shape else "none", kernels,
                calls[0], *_moved(rows, levels), calls[1],
                round(HOST_LEVEL_MS * depth, 1),
            ]  # fmt: skip


def _moved(rows: int, levels: int) -> tuple[float, float]:
    """Return the gigabytes and the milliseconds of a draft of so many rows a level."""
    num_bytes = levels * LEVEL_BYTES + (levels - 1) * rows * ROW_BYTES
    return round(num_bytes / 1e9, 2), round(REPLY_MS + levels * LEVEL_MS + (levels - 1) * rows * ROW_US / 1e3, 2)


# ---- mixers


def mixers() -> Table:
    """Yield a forward of a tree of 17 rows, without the LM head, by models of four dense layers and equal widths."""
    yield ["a tree of 17 rows through 4 layers", "launches", "a layer", "launches of a fold"]
    attention: dict[str, Any] = dict(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    latent = checkpoints.LATENT["youtu"] | {"num_hidden_layers": 4}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        paths = {
            "attention (Qwen3)": checkpoints.write_model(root / "attention", "qwen3", **attention),
            "gated delta nets (Qwen3.5, all layers)": checkpoints.write_hybrid(
                root / "delta", layer_types=["linear_attention"] * 4
            ),
            "gated delta nets in torch": root / "delta",
            "latent attention (Youtu)": checkpoints.write_model(root / "latent", "youtu", **latent),
        }
        for name, path in paths.items():
            spec = read_spec(path)
            with simulated_cuda() as cuda, as_one_launch(cuda) as kernels:
                runtime = Runtime(device="cuda", kernels=TORCH if name.endswith("torch") else kernels)
                model = load_decoder(path, spec, runtime)
                kv = model.new_kv_pool(64, num_seats=1, num_tree_rows=17)
                one, none = np.ones(1, dtype=np.int32), np.zeros(1, dtype=np.int32)
                tree = replace(trees_behind(np.array([20]), 16), read_seat_B=one, write_seat_B=none)
                rows, plan = torch.zeros(17, dtype=torch.int32, device="cuda"), model.plan(tree, 16)
                recorder, fold = Recorder(torch.device("cuda", 0)), 0
                recorder.record(partial(model.forward, rows, rows, plan, kv))
                if kv.states is not None:
                    chain = replace(tree, write_seat_B=one, ancestors_N=np.zeros_like(tree.ancestors_N))
                    recorder.record(partial(model.fold_rows, rows, model.kernels.delta_plan(chain, "cuda"), kv))
                    fold = len(cuda.graphs[1].work)
                count = len(cuda.graphs[0].work)
                yield [name, count, count / spec.num_layers, fold or ""]


# ---- calls


def calls() -> Table:
    """Yield the mean number of device calls of a step by an engine with two requests, its drafter's included."""
    from tests.end_to_end.test_simulated_cuda import config_for, jobs, run

    yield ["two requests, on the engine's and the drafter's side", "calls a step", "steps"]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        checkpoints.write_model(root / "target", "qwen2", num_hidden_layers=3)
        checkpoints.write_eagle3(root / "eagle3")
        checkpoints.write_block(root / "dspark", num_hidden_layers=1)
        greedy = [SamplingSettings(temperature=0.0)] * 2
        for name, method, tree, sampling in (
            ("greedy", "eagle3", AUTO, greedy),
            ("T=1", "eagle3", AUTO, [SamplingSettings(seed=seed) for seed in range(2)]),
            (
                "top-k and top-p",
                "eagle3",
                AUTO,
                [SamplingSettings(top_p=0.9, top_k=20, seed=seed) for seed in range(2)],
            ),
            ("penalties", "eagle3", AUTO, [SamplingSettings(constraints=Constraints(presence_penalty=0.3))] * 2),
            ("greedy, a chain of 5", "eagle3", TreeConfig(kind="chain", num_speculative_tokens=5), greedy),
            ("greedy, without auto", "eagle3", DYNAMIC, greedy),
            ("greedy, a DSpark head of one layer", "dspark", AUTO, greedy),
        ):
            made = run(config_for(root, method, tree), jobs(sampling, "coupled"))
            yield [name, round(made.num_calls / made.num_steps, 1), made.num_steps]


# ---- bytes


def bytes_sent() -> Table:
    """Yield the mean bytes of a decoding step in which every request gains 4 tokens; its tree has 17 rows."""
    yield ["requests and their tokens", "bytes a step of rows and tiles", "of page tables", "whole page tables"]
    for num_requests, num_tokens in ((1, 2048), (32, 2048), (1, 32768), (32, 32768)):
        config = EngineConfig(model_path="", max_model_len=num_tokens + 512)
        size, num_steps = config.page_size, 64
        width = config.pages_for(config.max_model_len)
        with simulated_cuda() as cuda:
            plan: Any = None
            sent = 0
            for step in range(-1, num_steps):
                # Lengths differ, so that some requests gain a page in every step.
                base_B = num_tokens + 4 * step + np.arange(num_requests, dtype=np.int32)
                metadata = trees_behind(base_B, size, pages_each=width)
                table_BP = metadata.page_table_BP
                before = cuda.num_bytes_sent
                if plan is None:  # as a graph's, for the longest request; filled for the first time
                    widest = np.pad(table_BP, ((0, 0), (0, width - table_BP.shape[1])))
                    plan = fused.plan(
                        replace(metadata, page_table_BP=widest), size, group_size=4, kv_heads=8, device="cuda"
                    )
                else:
                    fused.plan(metadata, size, group_size=4, kv_heads=8, device="cuda", into=plan)
                    sent += cuda.num_bytes_sent - before
        assert plan is not None
        rest = plan.buffer.nbytes
        yield [f"{num_requests} x {num_tokens}", rest, round(sent / num_steps) - rest, 4 * table_BP.size]


# ---- attention


def attention() -> Table:
    """Yield the programs of attention by the lengths of requests, with 32 query and 8 key-value heads of width 128.

    A program's work is its number of keys. Programs go in their order to the first of 132 multiprocessors that is free.
    """
    yield [
        "requests and their tokens", "rows each", "programs", "keys of the longest", "of the busiest multiprocessor",
        "of the mean", "of the busiest with as many pieces for every tile", "us for the list", "us for the whole plan",
    ]  # fmt: skip
    one, many = [1024], [1024] * 31
    for name, lengths in (
        ("1 x 1k", one), ("1 x 64k", [65536]), ("32 x 3k", 32 * [3072]), ("31 x 1k, 1 x 64k", [*many, 65536]),
        ("31 x 1k, 1 x 128k", [*many, 131072]), ("256 x 1k", 256 * one), ("255 x 1k, 1 x 64k", [*255 * one, 65536]),
    ):  # fmt: skip
        for num_rows in (1, 17):
            base_B, size = np.array(lengths) - num_rows, Size.of(num_rows * len(lengths), len(lengths))
            step = padded(trees_behind(base_B, 16, num_rows=num_rows), size)
            plan: Any = fused.plan(step, 16, group_size=4, kv_heads=8, dtype=torch.bfloat16)
            _, rows, _, _, begin, end, count = plan.pieces_W7S[0].numpy()
            keys = (end - begin)[rows > 0].repeat(8)
            whole = np.add.reduceat(end - begin, count.nonzero()[0])  # keys of each tile
            alike = 1 << max(0, 32 // plan.shape.num_tiles).bit_length() >> 1 or 1
            lists = plan._pieces[0], plan._rows[-1], plan._tiles[:5], plan._tiles[5], plan.shape.num_cuts
            calls = partial(triton_attention._fill_pieces, *lists), partial(plan.fill, step, 0)
            times = [round(1e3 * _fastest_ms(lambda call: call(), [call] * NUM_STEPS), 1) for call in calls]
            yield [
                name, num_rows, len(keys), int(keys.max()), busiest(keys), round(keys.sum() / 132),
                busiest(np.tile(whole / alike, 8 * alike)), *times,
            ]  # fmt: skip


# ---- the host's time


def host() -> Table:
    """Yield means in ms over decoding steps. Each part runs alone, several times; the fastest round counts."""
    yield ["ms of thread CPU time", *(f"{batch} requests" for batch in BATCHES)]
    gc.freeze()
    with _small_models() as (config, pair):
        columns = [_host_column(config, pair, batch) for batch in BATCHES]
    for name in columns[0]:
        yield [name, *(round(column[name], 3) for column in columns)]
    yield ["together", *(round(sum(column.values()), 3) for column in columns)]
    yardstick = round(_fastest_ms(_yardstick, [None] * NUM_STEPS), 3)
    yield ["yardstick: 100 sums of two arrays of 16", *[yardstick] * len(columns)]


def _yardstick(_: None) -> None:
    """Do a fixed amount of the same kind of work, because the machine's speed varies with its load."""
    one = np.ones(16)
    for _i in range(100):
        one + one


def _fastest_ms(call: Callable[[Any], object], arguments: Sequence[Any]) -> float:
    """Return the mean time of a call in the fastest round over all arguments. Reading the clock is not cheap."""
    rounds = []
    for _ in range(NUM_ROUNDS):
        began = time.thread_time()
        for argument in arguments:
            call(argument)
        rounds.append(time.thread_time() - began)
    return 1e3 * min(rounds) / len(arguments)


@contextmanager
def _small_models() -> Iterator[tuple[EngineConfig, Pair]]:
    """Yield a target of three layers and a head, with a configuration for them."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        checkpoints.write_model(root / "target", "qwen2", num_hidden_layers=3)
        checkpoints.write_eagle3(root / "eagle3")
        draft = DraftConfig(method="eagle3", model_path=str(root / "eagle3"), placement="colocated", tree=AUTO)
        yield (
            EngineConfig(
                model_path=str(root / "target"),
                max_model_len=512,
                max_num_seqs=max(BATCHES),
                num_pages=1 + 32 * max(BATCHES),
                enable_prefix_caching=False,
                draft=draft,
            ),
            Pair.load(root / "target", root / "eagle3"),
        )


def _host_column(config: EngineConfig, pair: Pair, batch: int) -> dict[str, float]:
    recorded = Recorded()
    _run_engine(config, pair, batch, recorded)
    requests, replies = recorded.requests[-NUM_STEPS:], recorded.replies[-NUM_STEPS:]
    assert all(len(reply.pruned_GD) == batch for reply in replies), "every step drafts for every request"
    column = {
        "engine": min(_run_engine(config, pair, batch, replace(recorded, is_replayed=True)) for _ in range(NUM_ROUNDS))
    }
    for name, sent in (("request to and from bytes", requests), ("reply to and from bytes", replies)):
        column[name] = _fastest_ms(lambda message: wire.unpack(*wire.pack(message)), sent)
    column["target's attention plan and inputs"] = _plan_ms(recorded.steps[-NUM_STEPS:], pair, config)
    return column | _drafter_times(requests, pair, config)


@dataclass
class Recorded:
    """The answers of models and drafter in a run of an engine, so that another run takes only the engine's time."""

    steps: list[TargetStep] = field(default_factory=list)
    drawn: list[list[int]] = field(default_factory=list)
    states: list[Tensor | None] = field(default_factory=list)
    requests: list[DraftRequest] = field(default_factory=list)
    replies: list[DraftReply] = field(default_factory=list)
    is_replayed: bool = False


def _run_engine(config: EngineConfig, pair: Pair, batch: int, recorded: Recorded) -> float:
    """Run WARM_UP + NUM_STEPS steps; return the mean of the last ones in ms of thread CPU time."""
    with engine_here(config, pair, RowCosts(np.array([1.0, 512.0]), np.array([10.0, 15.0]))) as here:
        target, drafter = here.engine._target, here.engine._drafter.channel
        if recorded.is_replayed:
            drawn, states, replies = iter(recorded.drawn), iter(recorded.states), iter(recorded.replies)
            features = torch.zeros(1 + 9 * max(BATCHES) + 64 * max(BATCHES), pair.head.width)
            target.run = lambda *_, **__: next(drawn)  # type: ignore[method-assign]
            target.states = lambda: next(states)  # type: ignore[method-assign]
            target.features = lambda state_NX: features[: len(state_NX)]  # type: ignore[method-assign]
            drafter.send = lambda message, step: None  # type: ignore[union-attr, method-assign]
            drafter.receive = lambda: Received(Kind.DRAFT_REPLY, 0, next(replies))  # type: ignore[union-attr, method-assign]
        else:
            for kept_messages in (drafter.requests, drafter.replies):  # type: ignore[union-attr]
                kept_messages.clear()  # those of the start
            run, keep_states = target.run, target.states

            def kept(step: TargetStep, *more: Any, **options: Any) -> list[int]:
                recorded.steps.append(step)
                recorded.drawn.append(run(step, *more, **options))
                return recorded.drawn[-1]

            def kept_states() -> Tensor | None:
                recorded.states.append(keep_states())
                return recorded.states[-1]

            target.run, target.states = kept, kept_states  # type: ignore[method-assign]
        for id in range(batch):
            sampling, prompt = SamplingSettings(temperature=1.0, seed=id), [2 + (7 * id + n) % 90 for n in range(40)]
            here.submit(Submit(id=id, prompt=prompt, max_tokens=450, sampling=sampling, ignore_eos=True))
        for _ in range(WARM_UP):
            here.step()
        began = time.thread_time()
        for _ in range(NUM_STEPS):
            here.engine.step()
        passed = time.thread_time() - began
        if not recorded.is_replayed:
            recorded.requests, recorded.replies = drafter.requests, drafter.replies  # type: ignore[union-attr]
    return 1e3 * passed / NUM_STEPS


def _plan_ms(steps: list[TargetStep], pair: Pair, config: EngineConfig) -> float:
    """Time the host's part of a replayed forward: its plan and the copies of its inputs."""
    decoder = pair.decoder
    with _triton(decoder):
        graphs = decoder_graphs(decoder, decoder.new_kv_pool(16), config, is_captured=False)
        for size, bucket in graphs._buckets.items():
            bucket.replay = partial(tuple, [torch.zeros(size.rows, 1)])
        return _fastest_ms(lambda step: graphs(step.attention, step.token_N, step.position_N), steps)


@contextmanager
def _triton(model: Any) -> Iterator[None]:
    """Let a model plan for Triton kernels."""
    kept, model.kernels = model.kernels, fused
    try:
        yield
    finally:
        model.kernels = kept


def _drafter_times(requests: list[DraftRequest], pair: Pair, config: EngineConfig) -> dict[str, float]:
    """Time `draft` with replays that take no time and return a chain, and the two attention plans in it."""
    head, planned, moved = pair.head, [], []
    with _triton(head):
        pool = head.new_kv_pool(16)
        graphs = head_graphs(head, pool, config, is_captured=False)
        trees = head_tree_graphs(head, pool, config, is_captured=False)
        for size, bucket in graphs._buckets.items():
            bucket.replay = partial(tuple, [torch.zeros(size.rows, head.width)])
        trees._grow = {key: (partial(_write_chains, trees, key[0]), lambda: None) for key in trees._grow}
        proposer = FeatureProposer(head, pool, config.page_size, config.tree_rows, graphs, trees)
        call = Drafter(proposer, make_tree_policy(AUTO), kernels=fused).draft
        plan = graphs._plan
        whole_ms = _fastest_ms(call, requests)

        def kept(metadata: AttentionMetadata, into: Any) -> Any:
            planned.append((metadata, into))
            return plan(metadata, into=into)

        def kept_move(move: Callable[..., None], *given: Any) -> None:
            moved.append((move, given))
            move(*given)

        graphs._plan = kept  # type: ignore[assignment]
        for own in trees._plans.values():
            own.move = partial(kept_move, own.move)
        for request in requests:
            call(request)
        plan_ms = _fastest_ms(lambda given: plan(given[0], into=given[1]), planned)
        plan_ms += _fastest_ms(lambda given: given[0](*given[1]), moved)
    return {"drafter's two attention plans": plan_ms, "drafter's other Python": whole_ms - plan_ms}


def _write_chains(trees: TreeGraphs, shape: Shape) -> None:
    """Do what graphs do, for chains of 8 nodes."""
    own, row = trees._tensors(shape), torch.arange(1 + shape.nodes)
    own.state_5BR[:3] = torch.stack([row, (row - 1).clamp(min=0), row])[:, None]
    own.weight_BR[:], own.path_prob_BR[:] = (row < 9) * 0.8**row, 0.8**row


# ---- the engine's stages


TREE_OF_8 = TreeBatch(
    offsets=torch.tensor([0, 9], dtype=torch.int32),
    token_N=10 + torch.arange(9, dtype=torch.int32),
    parent_N=torch.tensor([-1, 0, 0, 1, 1, 2, 3, 3, 6], dtype=torch.int32),
    depth_N=torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 4], dtype=torch.int32),
    ancestors_N=torch.tensor([1, 3, 5, 11, 19, 37, 75, 139, 331]),
    kind_N=torch.tensor([0, *[2] * 8], dtype=torch.uint8),
    weight_N=torch.ones(9),
)
FIRST_CHILD = np.array([1, 3, 5, 6, 0, 0, 8, 0, 0])
"""It has the first child of each row, or 0 for a leaf."""


class SimulatedTarget(FakeTarget):
    """Draws the token of a row's first child in two of three rows, and none of any child in the others."""

    def run(self, step: TargetStep, number: int, while_waiting: Callable[[], None] = lambda: None) -> list[int]:
        while_waiting()
        self.steps = [step]
        begins = step.attention.query_offsets[step.request_R.numpy()]
        child_R = FIRST_CHILD[np.minimum(step.sample_row_R.numpy() - begins, 8)]
        is_child_R = (child_R > 0) & (np.random.default_rng(number).random(len(child_R)) < 2 / 3)
        drawn: list[int] = np.where(is_child_R, 10 + child_R, 1).tolist()
        return drawn


class SimulatedDrafter:
    """Replies with the same tree for every request that wants one."""

    def send(self, message: DraftRequest, step: int) -> None:
        self._count = int((message.num_nodes_B > 0).sum())

    def receive(self) -> Received:
        return Received(Kind.DRAFT_REPLY, 0, _reply(self._count))

    def heartbeat(self, step: int) -> None: ...


@cache
def _reply(count: int) -> DraftReply:
    columns = {name: getattr(TREE_OF_8, name).repeat(count) for name in TreeBatch.__slots__ if name != "offsets"}
    return DraftReply(
        trees=TreeBatch(offsets=9 * torch.arange(count + 1, dtype=torch.int32), **columns),
        probs=None,
        pruned_GD=torch.zeros(count, 4, dtype=torch.int32),
        num_levels=5,
        num_run=9 * count,
        seconds=0.0,
    )


class StageClock:
    """Thread CPU time of functions, by stage; that of a stage inside another one counts once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open = ["the rest"]
        self._since = time.thread_time()

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        call = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            self._turn()
            self._open.append(stage)
            try:
                return call(*args, **options)
            finally:
                self._turn()
                self._open.pop()

        setattr(owner, name, timed)

    def lap(self) -> dict[str, float]:
        """Return the milliseconds of each stage since the last lap."""
        self._turn()
        lap = {stage: 1e3 * seconds for stage, seconds in self.seconds.items()}
        self.seconds.clear()
        return lap

    def _turn(self) -> None:
        now = time.thread_time()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now


def engine_stages() -> Table:
    """Yield ms of decoding steps, and what each request adds. Of all steps the fastest twentieth counts."""
    yield ["ms of thread CPU time", *(f"{batch} requests" for batch in MANY), "us a request"]
    for name, tree in (("no drafts", None), ("trees of 8", TreeConfig(num_speculative_tokens=8, max_depth=4))):
        gc.collect()
        gc.freeze()
        columns = [_stages(batch, tree) for batch in MANY]
        stages = [stage for stage in columns[0] if stage != SIMULATED]
        rows = {stage: [column[stage] for column in columns] for stage in stages}
        for stage, row in (rows | {"together": [sum(column) for column in zip(*rows.values(), strict=True)]}).items():
            slope = 1e3 * (row[-1] - row[0]) / (MANY[-1] - MANY[0])
            yield [f"{name}: {stage}", *(round(ms, 3) for ms in row), round(slope, 2)]
    yield ["yardstick: 100 sums of two arrays of 16", *[round(_fastest_ms(_yardstick, [None] * NUM_STEPS), 3)] * 5, ""]


SIMULATED = "simulated"


def _stages(batch: int, tree: TreeConfig | None) -> dict[str, float]:
    """Return each stage's ms, exceeded by 95 % of decoding steps, at some 1,000 tokens a request."""
    draft = None if tree is None else DraftConfig(method="eagle3", model_path="", tree=tree)
    config = EngineConfig(model_path="", max_model_len=2048, max_num_seqs=max(MANY), draft=draft)
    waiting = None
    if draft is not None:
        waiting = HiddenStatePool(max_buffered_states(config), 2, dtype=torch.float32, device=torch.device("cpu"))
    target = SimulatedTarget(Counting(), config.page_size, config.max_model_len, waiting)
    drafter: Any = None if draft is None else SimulatedDrafter()
    engine_end, front = socket.socketpair()
    with engine_end, front, pytest.MonkeyPatch.context() as patch:
        made = Engine(config, target, drafter, FrameSocket(engine_end), 1 + batch * config.pages_for(2048))
        for id in range(batch):
            sampling, prompt = SamplingSettings(temperature=1.0, seed=id), [2 + (7 * id + n) % 90 for n in range(1000)]
            made._submit(Submit(id=id, prompt=prompt, max_tokens=1000, sampling=sampling, ignore_eos=True))
        while not (made._running and all(request.num_output > 4 for request in made._running)) or made._waiting:
            made.step()
            front.recv(1 << 24)
        patch.setattr(verifier.engine, "schedule", verifier.engine.schedule)
        clock = StageClock()
        for owner, name, stage in (
            (made, "_take", "take"), (verifier.engine, "schedule", "schedule"), (made, "_make_room", "schedule"),
            (made._drafting, "draft", "draft"), (made._inputs, "draft_request", "pack"),
            (made._inputs, "target_step", "pack"), (target, "run", SIMULATED), (target, "states", SIMULATED),
            (made, "_verdicts", "walk"), (made, "_commit", "commit"), (made, "_catch_up", "emit"),
        ):  # fmt: skip
            clock.wrap(owner, name, stage)
        laps = []
        for _ in range(2 * NUM_STEPS):
            clock.lap()
            made.step()
            laps.append(clock.lap())
            front.recv(1 << 24)
    return {stage: float(np.percentile([lap[stage] for lap in laps], 5)) for stage in laps[0]}


# ---- buckets


def buckets() -> Table:
    """Yield the share of replayed steps by the number of concurrent requests, with trees of up to 17 rows."""
    yield ["concurrent requests", "steps", "replayed", "rows in them that are padding", "largest step"]
    config = EngineConfig(model_path="", draft=DraftConfig(method="ngram", model_path="", tree=AUTO))
    made = sizes(config)
    for concurrency in (1, 4, 16, 32, 64):
        steps = _traffic(concurrency, config.max_num_batched_tokens)
        found = [fitting(Size.of(*step), made, config.max_num_seqs) for step in steps]
        num_rows = [(size.rows, rows) for size, (rows, _) in zip(found, steps, strict=True) if size is not None]
        ran, needed = map(sum, zip(*num_rows, strict=True))
        replayed = f"{sum(size is not None for size in found) / len(steps):.2%}"
        yield [concurrency, len(steps), replayed, f"{1 - needed / ran:.1%}", max(rows for rows, _ in steps)]
    yield ["graphs of a forward", len(made), "", "", made[0].rows]


def _traffic(concurrency: int, most_rows: int, num_steps: int = 4000) -> list[tuple[int, int]]:
    """Return (rows, requests) of the steps of requests that follow one another.

    Prompts have 20 to 8000 tokens, of median 400, and answers of median 200, at 3.5 tokens a step.
    """
    rng = np.random.default_rng(concurrency)
    steps: list[tuple[int, int]] = []
    prompt, left = np.zeros(concurrency, dtype=int), np.zeros(concurrency)
    while len(steps) < num_steps:
        is_new = (prompt == 0) & (left <= 0)
        prompt[is_new] = np.clip(rng.lognormal(6.0, 1.0, is_new.sum()), 20, 8000)
        left[is_new] = rng.lognormal(5.3, 0.7, is_new.sum())
        is_decoding = prompt == 0
        rows, requests = int(rng.integers(1, 18, is_decoding.sum()).sum()), int(is_decoding.sum())
        left[is_decoding] -= rng.uniform(1, 6, is_decoding.sum())
        for request in np.flatnonzero(~is_decoding):
            chunk = min(prompt[request], most_rows - rows)
            rows, requests, prompt[request] = rows + int(chunk), requests + bool(chunk), prompt[request] - chunk
        steps.append((rows, requests))
    return steps


# ---- cuts


def cuts() -> Table:
    """Yield the programs of each launch by the numbers of rows and columns. An H100 has 132 multiprocessors."""
    yield ["rows", "columns", "programs of each launch"]
    with simulated_cuda() as cuda:
        for rows, columns in product((1, 17, 32), (32_000, 128_256, 151_936)):
            cuda.grids.clear()
            x = torch.zeros(rows, columns, device="cuda")
            top_k, top_p = torch.zeros(rows, dtype=torch.int32, device="cuda"), torch.ones(rows, device="cuda")
            fused.truncation_threshold(x, top_k, top_p)
            yield [rows, columns, ", ".join(f"{name} {programs}" for name, programs in cuda.grids)]


# ---- kernels


def kernels(archs: Sequence[int]) -> Table:
    """Yield the resources of every kernel, from a process whose Triton compiles."""
    command = [sys.executable, "-m", "tests.support.compile_kernels", "--json", "--archs", *map(str, archs)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)
    yield [
        f"Triton {found['triton']}", "sm", "registers", "stack bytes", "shared KiB", "instructions",
        "instructions of each loop",
    ]  # fmt: skip
    for row in found["rows"]:
        loops = ", ".join(map(str, row["loops"]))
        yield [
            row["name"], row["arch"], row["registers"], row["stack_bytes"], round(row["shared_bytes"] / 1024, 1),
            row["instructions"], loops,
        ]  # fmt: skip


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    made.add_argument("--archs", type=int, nargs="+", default=[80, 90, 100], help="compute capabilities x 10")
    options = made.parse_args()
    counters: dict[str, Callable[[], Table]] = {
        "launches": launches, "mixers": mixers, "trees": trees, "calls": calls, "bytes": bytes_sent,
        "attention": attention, "host": host, "engine": engine_stages, "buckets": buckets, "cuts": cuts,
        "kernels": partial(kernels, options.archs),
    }  # fmt: skip
    torch.set_num_threads(1)
    about = {"command": command(), "torch": torch.__version__, "hardware": "without a GPU"}
    with reporting(options.output, "gpu-counts", about, say) as report:
        for part in options.parts:
            say(part)
            header, *rows = counters[part]()
            for row in rows:
                report.add(part, dict(zip(map(str, header), row, strict=True)))
    print(report.markdown)


if __name__ == "__main__":
    main()
