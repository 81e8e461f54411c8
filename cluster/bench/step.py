"""`secateur bench step`: the parts of a decoding step, by a running engine's own clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from cluster.bench.breakdown import StepBreakdown, decoding_steps, median_steps
from cluster.bench.report import Row, Say, reporting
from cluster.bench.runner import GenerationJob, Runner
from cluster.bench.setup import about, device_mark, workload
from secateur.bench import StepPlan
from secateur.config import EngineArgs
from secateur.prompts import BenchPrompt
from workers.comm.ipc import Speculation
from workers.config import EngineConfig, PruneConfig

NOTES = (
    "means over steps in which all requests decode, medians over the rounds, T = 0; 0 nodes is no speculation, other "
    "numbers are dynamic trees without pruning",
    "forward: the target's, until its tokens are on the host; draft: by the drafter's own clock; transfer: what the "
    "exchange takes beyond that, in which the last step's tokens are sent; between: taking requests, scheduling",
    "outside models: the share of a step in which neither model computes",
)


def run(
    args: EngineArgs,
    plan: StepPlan,
    prompts: Sequence[BenchPrompt],
    output: Path,
    say: Say,
    *,
    as_json: bool = False,
) -> str:
    """Measure, write DATE-step.json and .md, and return the Markdown, or the JSON.

    Raises ConfigError before anything is started, and EngineDead.
    """
    config, tokens = workload(args, prompts, max_tokens=plan.max_tokens, max_num_seqs=max(plan.batches))
    with reporting(output, "step", about(args, config, plan.model_dump(), NOTES), say, device_mark(config)) as report:
        for row in _steps(config, plan, tokens, say):
            report.add("steps", row)
    return report.json if as_json else report.markdown


def _steps(config: EngineConfig, plan: StepPlan, prompts: Sequence[list[int]], say: Say) -> Iterator[Row]:
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
            yield {"batch": batch, "nodes": nodes} | costs.row
