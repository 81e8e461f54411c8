"""The target's forward alone, in this process, by rows, requests and context: python -m bench.forward.

KV pages are not initialised, since time does not depend on their contents.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import torch
from pydantic import Field

from bench.harness import BenchmarkPlan, Run, main, scaled
from cluster.bench.report import Report
from cluster.bench.setup import workload
from secateur.bench import PositiveInt, Some
from secateur.cli.bench import say
from verifier.request import Request
from verifier.step_inputs import StepInputs
from verifier.target import Target
from verifier.tree import chains
from verifier.worker import load
from workers.comm import groups
from workers.comm.ipc import Submit
from workers.config import DraftConfig, EngineConfig, TreeConfig
from workers.models.draft_methods import read_specs
from workers.models.readers import read_spec
from workers.settings import Rule
from workers.types import TargetStep

NOTES = ("one rank, chains of rows behind a context of random contents; medians over the rounds",)


class ForwardPlan(BenchmarkPlan):
    """The forwards to time."""

    rows: Some[PositiveInt] = (1, 2, 4, 5, 8, 9, 17, 33)
    """Rows per request."""
    batches: Some[PositiveInt] = (1, 4, 8)
    """Requests."""
    contexts: Some[PositiveInt] = (128, 512, 1024)
    """Cached tokens before those rows."""
    rounds: Annotated[int, Field(ge=1)] = 3
    """Rounds, in each of which all forwards take turns."""


def measure(run: Run) -> Report:
    """Measure. Raises ConfigError before anything is loaded."""
    plan: ForwardPlan = run.plan
    with scaled(run.args, plan.target_cost, plan.cache, say) as args:
        config, _ = workload(args, run.texts(1), max_tokens=1, max_num_seqs=max(plan.batches))
        limit = read_spec(config.model_path).max_scaled_positions
        shapes = [
            ForwardShape(rows=rows, batch=batch, context=context)
            for context in plan.contexts
            for batch in plan.batches
            for rows in plan.rows
            if context + rows <= limit
        ]
        say(f"timing {len(shapes)} forwards of the target")
        with run.report("forward", config, NOTES) as report:
            ms = timed(config, shapes, plan.rounds)
            for shape in shapes:
                fewest = replace(shape, rows=min(plan.rows))
                report.add("forwards", {**asdict(shape), "ms": ms[shape], "times_fewest_rows": ms[shape] / ms[fewest]})
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardShape:
    """One step: `batch` requests, each with a tree of `rows` rows (the root is one) after `context` tokens."""

    rows: int
    batch: int = 1
    context: int = 128


def timed(config: EngineConfig, shapes: Sequence[ForwardShape], rounds: int) -> dict[ForwardShape, float]:
    """Return the median milliseconds of a forward of each shape; every round runs all of them in turn.

    Loads the target of `config` as one rank in this process, which on CPU computes with one thread.
    """
    tokens = [(shape.context + shape.rows + config.page_size, shape.batch) for shape in shapes]
    pages = max(batch * -(-length // config.page_size) for length, batch in tokens)
    alone = replace(
        config,
        draft=None,
        tensor_parallel_size=1,
        max_num_seqs=max(shape.batch for shape in shapes),
        max_model_len=max(length for length, _ in tokens),
        num_pages=1 + pages,
    )
    most = max(shape.rows for shape in shapes)
    trees = DraftConfig(method="ngram", model_path="", tree=TreeConfig(num_speculative_tokens=max(1, most - 1)))
    threads = torch.get_num_threads()
    if config.device == "cpu":
        torch.set_num_threads(1)
    store, address = groups.open_store()
    try:
        target, _ = load(groups.join(alone, 0, address), read_specs(alone), graphs_of=replace(alone, draft=trees))
        ms: dict[ForwardShape, list[float]] = {shape: [] for shape in shapes}
        for _ in range(rounds + 1):
            for shape in shapes:
                ms[shape].append(_milliseconds(target, alone.page_size, shape))
    finally:
        groups.leave()
        del store
        torch.set_num_threads(threads)
    return {shape: statistics.median(times[1:]) for shape, times in ms.items()}  # the first round warms up


def target_step(page_size: int, shape: ForwardShape) -> TargetStep:
    """Return a step of chains, each behind its own pages."""
    num_pages = -(-(shape.context + shape.rows) // page_size)
    requests = []
    for b in range(shape.batch):
        submit = Submit(id=b, prompt=[0] * shape.context, max_tokens=1)
        pages = array("i", range(1 + b * num_pages, 1 + (b + 1) * num_pages))
        requests.append(Request(submit, Rule.COUPLED, None, 0, pages=pages))
    return StepInputs(page_size, ()).target_step(chains([[0] * shape.rows] * shape.batch), requests)


def _milliseconds(target: Target, page_size: int, shape: ForwardShape) -> float:
    step = target_step(page_size, shape)
    began = time.perf_counter()
    target.run(step, 0)  # returns with the sampled tokens on the host, so the GPU has finished
    return 1e3 * (time.perf_counter() - began)


if __name__ == "__main__":
    main(ForwardPlan, measure, {"rows": (1, 9), "batches": (1, 2), "contexts": (128, 256), "rounds": 2})
