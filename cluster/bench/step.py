"""`secateur bench step`: the parts of a decoding step, and the cost of a forward by rows, requests and context.

There are two tables. `forwards` times the target's forward alone, in this process (V). `steps` reports whole steps of a
running engine by its own clock, without speculation (0 nodes) and with dynamic trees. On CUDA there is also the time to
read all weights once at the measured memory bandwidth, a lower bound of any forward.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cluster.bench.contestants import StepBreakdown, decoding_steps, median_steps
from cluster.bench.output import (
    About,
    Say,
    about,
    device_mark,
    draw,
    heading,
    markdown,
    rounded,
    stem_of,
    write_json,
    write_text,
)
from cluster.bench.runner import GenerationJob, Runner
from cluster.bench.setup import scaled, workload
from cluster.bench.target_forward import ForwardShape, loaded
from secateur.bench import StepPlan
from secateur.config import EngineArgs
from secateur.prompts import BenchPrompt
from workers.comm.ipc import Speculation
from workers.config import EngineConfig, PruneConfig
from workers.models.readers import read_spec

HIDDEN = ("rows", "batches", "contexts", "nodes", "target_cost")
NOTES = (
    "forwards: the target alone on one rank, chains of rows behind a context of random contents; medians",
    "steps: means over steps in which all requests decode, medians over the rounds, T = 0, held-out prompts",
    "forward: the target's, until its tokens are on the host; draft: by the drafter's own clock; transfer: what the "
    "exchange takes beyond that, in which the last step's tokens are sent; between: taking requests, scheduling",
)
_BANDWIDTH_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRow:
    """V: one forward of the target over `batch` requests, each with `rows` rows and `context` cached tokens."""

    rows: int
    batch: int
    context: int
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """Mean milliseconds of decoding steps; see `StepBreakdown`."""

    batch: int
    nodes: int
    num_steps: int
    tokens_per_step: float
    verified_per_step: float
    draft_ms: float
    transfer_ms: float
    pack_ms: float
    forward_ms: float
    accept_ms: float
    commit_ms: float
    between_ms: float
    total_ms: float
    outside_models: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """The lower bound of a forward on a GPU: reading all weights once."""

    bandwidth_gbs: float
    """Measured by a copy on the device; reads and writes both count."""
    weight_gb: float
    floor_ms: float
    share: float
    """The bound over V(1 row, 1 request, the shortest context)."""


def run(
    args: EngineArgs,
    plan: StepPlan,
    prompts: Sequence[BenchPrompt],
    output: Path,
    say: Say,
    *,
    as_json: bool = False,
    cache: Path | None = None,
) -> str:
    """Measure, write DATE-step.json, .md and .png, and return the Markdown, or the JSON.

    If the run is interrupted, the JSON keeps the rows so far. Raises ConfigError before anything is started, and
    EngineDead.
    """
    with scaled(args, plan.size, cache, say) as args_:
        config, tokens = workload(args_, prompts, max_tokens=plan.max_tokens, max_num_seqs=max(plan.batches))
        stem = stem_of(output, "step", plan.target_cost, device_mark(config))
        head = about(args, config, plan.model_dump(), NOTES)
        forwards: list[VerifyRow] = []
        steps: list[StepRow] = []
        streaming: list[Streaming] = []
        try:
            forwards += _forwards(config, plan, say)
            if config.device == "cuda":
                streaming.append(_streaming(config, forwards))
                torch.cuda.empty_cache()  # the engines need the memory that this process caches
            for row in _steps(config, plan, tokens, say):
                steps.append(row)
        finally:
            tables = {"forwards": forwards, "steps": steps, "streaming": streaming}
            write_json(stem, head, {name: [asdict(row) for row in rows] for name, rows in tables.items()})  # type: ignore[attr-defined]
    text = render(head, forwards, steps, streaming)
    shown = write_text(stem, text, as_json=as_json)
    draw(say, stem, "step", forwards, steps)
    return shown


def _forwards(config: EngineConfig, plan: StepPlan, say: Say) -> list[VerifyRow]:
    """Time all shapes in turn in every round."""
    limit = read_spec(config.model_path).max_scaled_positions
    shapes = [
        ForwardShape(rows=rows, batch=batch, context=context)
        for context in plan.contexts
        for batch in plan.batches
        for rows in plan.rows
        if context + rows <= limit
    ]
    say(f"timing {len(shapes)} forwards of the target")
    threads = torch.get_num_threads()
    if config.device == "cpu":
        torch.set_num_threads(1)
    ms: dict[ForwardShape, list[float]] = {shape: [] for shape in shapes}
    try:
        with loaded(config, shapes) as target:
            for _ in range(plan.rounds + 1):
                for shape in shapes:
                    ms[shape].append(target.milliseconds(shape))
    finally:
        torch.set_num_threads(threads)
    return [VerifyRow(**asdict(shape), ms=rounded(statistics.median(times[1:]))) for shape, times in ms.items()]


def _streaming(config: EngineConfig, forwards: Sequence[VerifyRow]) -> Streaming:
    spec, size = read_spec(config.model_path), getattr(torch, config.dtype).itemsize
    attention = 2 * spec.head_dim * (spec.num_heads + spec.num_kv_heads)
    layers = spec.num_layers * spec.hidden_size * (attention + 3 * spec.intermediate_size)
    weight_gb = size * (layers + spec.vocab_size * spec.hidden_size) / 1e9
    bandwidth = measured_bandwidth_gbs(torch.device(config.device))
    floor_ms = 1e3 * weight_gb / bandwidth
    single = min((row for row in forwards if row.batch == 1), key=lambda row: (row.rows, row.context))
    return Streaming(
        bandwidth_gbs=rounded(bandwidth),
        weight_gb=rounded(weight_gb),
        floor_ms=rounded(floor_ms),
        share=rounded(floor_ms / single.ms),
    )


def measured_bandwidth_gbs(device: torch.device) -> float:
    """Return the best bandwidth of several copies within the device's memory."""
    source = torch.empty(_BANDWIDTH_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(8):
        _wait(device)
        began = time.perf_counter()
        target.copy_(source)
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return 2 * _BANDWIDTH_BYTES / best / 1e9


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _steps(config: EngineConfig, plan: StepPlan, prompts: Sequence[list[int]], say: Say) -> Iterator[StepRow]:
    """Measure all cells in turn. One engine serves all tree sizes: its requests set the number of nodes."""
    assert config.draft is not None
    most = max(plan.nodes)
    tree = replace(config.draft.tree, kind="dynamic", num_speculative_tokens=max(most, 1), prune=PruneConfig())
    cells = [(batch, nodes) for batch in plan.batches for nodes in plan.nodes]
    found: dict[tuple[int, int], list[StepBreakdown]] = {cell: [] for cell in cells}
    with ExitStack() as stack:
        say("starting the engines")
        plain = stack.enter_context(Runner(replace(config, draft=None))) if 0 in plan.nodes else None
        trees = stack.enter_context(Runner(replace(config, draft=replace(config.draft, tree=tree)))) if most else None
        for number in range(plan.rounds + 1):
            for batch, nodes in cells:
                runner = trees if nodes else plain
                assert runner is not None
                jobs = [
                    GenerationJob(
                        prompt=prompts[i % len(prompts)],
                        max_tokens=plan.max_tokens,
                        speculation=Speculation(num_speculative_tokens=nodes or None),
                    )
                    for i in range(batch)
                ]
                runner.run(jobs, concurrency=batch)
                if number and (costs := decoding_steps(runner.snapshots, batch)) is not None:  # the first warms up
                    found[batch, nodes].append(costs)
            say(f"round {number} of {plan.rounds}")
    for (batch, nodes), turns in found.items():
        if (costs := median_steps(turns)) is not None:
            yield _row(batch, nodes, costs)


def _row(batch: int, nodes: int, costs: StepBreakdown) -> StepRow:
    values: dict[str, Any] = {key: rounded(value) for key, value in asdict(costs).items() if key != "acceptance_length"}
    return StepRow(
        batch=batch,
        nodes=nodes,
        total_ms=rounded(costs.total_ms),
        outside_models=rounded(costs.outside_models),
        **values | {"num_steps": costs.num_steps},
    )


# -- the report ------------------------------------------------------------------------------------------------------


def render(head: About, forwards: Sequence[VerifyRow], steps: Sequence[StepRow], streaming: Sequence[Streaming]) -> str:
    """Return the whole report."""
    parts = [heading("Step", head, HIDDEN), _step_table(steps), _forward_tables(forwards)]
    parts += [
        f"## Streaming the weights\n\nThe device copies {found.bandwidth_gbs:.0f} GB/s; reading {found.weight_gb:.2f} "
        f"GB of weights takes {found.floor_ms:.2f} ms, which is {found.share:.0%} of the forward of one row."
        for found in streaming
    ]
    return "\n\n".join(parts) + "\n"


def _step_table(steps: Sequence[StepRow]) -> str:
    parts = ("draft", "transfer", "pack", "forward", "accept", "commit", "between", "total")
    lines = [
        [row.batch, row.nodes, f"{row.tokens_per_step:.2f}", *(f"{getattr(row, f'{p}_ms'):.2f}" for p in parts)]
        + [f"{row.outside_models:.0%}"]
        for row in steps
    ]
    return "## A decoding step, milliseconds\n\n" + markdown(
        ["requests", "nodes", "tokens/step", *parts, "outside both models"], lines
    )


def _forward_tables(forwards: Sequence[VerifyRow]) -> str:
    rows = sorted({row.rows for row in forwards})
    by_key = {(row.batch, row.context, row.rows): row.ms for row in forwards}
    lines = []
    for batch, context in sorted({(row.batch, row.context) for row in forwards}):
        line = [by_key.get((batch, context, number)) for number in rows]
        one = by_key.get((batch, context, min(rows)))
        lines.append([batch, context, *(f"{ms:.2f} ({ms / one:.2f})" if ms and one else "" for ms in line)])
    return "## The target's forward, milliseconds (times that of the fewest rows)\n\n" + markdown(
        ["requests", "context", *(f"{number} rows" for number in rows)], lines
    )
