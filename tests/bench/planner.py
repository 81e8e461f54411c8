"""Checks the predictions of `secateur plan`: profiles an engine in some configurations, predicts and measures others.

    python -m tests.bench.planner [--target-cost 512x12] [--max-batch 8] [--rounds 3] [--out tests/bench/results]

The other configurations have a batch, a node budget and a context that the profile lacks. Each answers four batches of
requests in a closed loop. A simulation predicts the throughput of the whole run, prompts and end included, and the time
of a decoding step. Profile and measurements alternate in every round, so that other load affects both; results are
medians over the rounds. Writes JSON and Markdown named after the date and the target, and the cost table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from cluster.bench.runner import Runner, StatsSnapshot
from cluster.planner.acceptance import acceptance_curve
from cluster.planner.cost_model import PlannerCostModel
from cluster.planner.fit import fit
from cluster.planner.fleet import SPREAD, Fleet, Load, ReplicaSpec, simulate
from cluster.planner.forecast import hardware_name
from cluster.planner.profile import (
    ProfileCell,
    ProfileGrid,
    Profiler,
    StepSample,
    UniquePrompts,
    accepted,
    decoding_steps,
    profiled,
    watch,
)
from secateur.plan import CostTable
from tests.support.engines import BUNDLED, DYNAMIC, bundled, prompts
from workers.config import EngineConfig

BATCHES_PER_RUN = 4
A_MOMENT = 1e-6
"""Seconds, less than any step takes."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The figures of one configuration, measured or predicted."""

    tokens_per_second: float
    step_ms: float
    tokens_per_step: float


def unseen(grid: ProfileGrid) -> list[ProfileCell]:
    """Return configurations between the profiled ones; the last one has no speculation."""
    low, high = grid.contexts[0], grid.contexts[-1]
    most = grid.requests[-1]
    return [
        ProfileCell(requests=max(2, 3 * most // 4), nodes=12, context=(low + high) // 2),
        ProfileCell(requests=2 if 2 not in grid.requests else 3, nodes=6, context=low + (high - low) // 4),
        ProfileCell(requests=max(2, 3 * most // 4), nodes=3, context=low + (high - low) * 3 // 4),
        ProfileCell(requests=max(2, 3 * most // 4), nodes=0, context=low + (high - low) // 3),
    ]


def measure(runner: Runner, cell: ProfileCell, texts: UniquePrompts) -> Seen:
    asked = [texts.take(cell.prompt) for _ in range(BATCHES_PER_RUN * cell.requests)]
    snapshots = watch(runner, asked, cell.nodes, cell.output, concurrency=cell.requests)
    tokens = len(asked) * cell.output
    steps, trees = full_steps(snapshots, cell), accepted(snapshots, cell)
    return Seen(
        tokens_per_second=tokens / (snapshots[-1].at - snapshots[0].at),
        step_ms=statistics.mean(step.wall_ms for step in steps),
        tokens_per_step=1 + trees.num_accepted / max(1, trees.num_drafts),
    )


def full_steps(snapshots: list[StatsSnapshot], cell: ProfileCell) -> list[StepSample]:
    """Return the steps of the first batch, before the next joins."""
    done = [
        i for i, frame in enumerate(snapshots) if frame.stats.requests_finished > snapshots[0].stats.requests_finished
    ]
    return decoding_steps(snapshots[: done[0]], cell)


def predict(table: CostTable, config: EngineConfig, cell: ProfileCell) -> Seen:
    assert table.acceptance is not None and config.draft is not None
    gained = acceptance_curve(table.acceptance, config.draft, 0.0, cell.context)
    costs = PlannerCostModel(table)
    replica = ReplicaSpec(
        costs=costs,
        accepted=gained,
        nodes_by_batch=[0, *[cell.nodes] * cell.requests],
        max_num_batched_tokens=config.max_num_batched_tokens,
        spread=SPREAD,
    )
    return Seen(
        tokens_per_second=statistics.mean(closed_loop(cell, replica, seed).tokens_per_second for seed in range(20)),
        step_ms=costs.decode(cell.requests, cell.nodes, cell.context).ms,
        tokens_per_step=1 + float(gained[cell.nodes]),
    )


def closed_loop(cell: ProfileCell, replica: ReplicaSpec, seed: int) -> Fleet:
    """Simulate a closed loop with one client per running request.

    A client sends its next request as soon as it has its answer, but the engine's next step has begun by then, so the
    request joins the step after. Each simulation corrects at least one more arrival.
    """
    count = BATCHES_PER_RUN * cell.requests
    load = Load(np.zeros(count), np.full(count, cell.prompt), np.full(count, cell.output))
    while True:
        fleet = simulate(load, replica, seed=seed)
        again_J = np.sort(fleet.finish_J)[: count - cell.requests] + A_MOMENT
        arrival_J = np.concatenate([np.zeros(cell.requests), again_J])
        if np.array_equal(arrival_J, load.arrival_J):
            return fleet
        load = load._replace(arrival_J=arrival_J)


def run(config: EngineConfig, grid: ProfileGrid, rounds: int) -> tuple[CostTable, list[dict[str, object]]]:
    cells, texts = unseen(grid), prompts(50)
    seen: dict[ProfileCell, list[Seen]] = {cell: [] for cell in cells}
    # Measure with other texts than the profile's.
    known, new = UniquePrompts(texts[::2]), UniquePrompts(texts[1::2])
    with Runner(config) as runner:
        profiler = Profiler(runner, grid, known, temperature=0.0)
        profiler.warm_up()
        for number in range(1, rounds + 1):
            print(f"round {number} of {rounds}", file=sys.stderr)
            profiler.round()
            for cell in cells:
                seen[cell].append(measure(runner, cell, new))
    table = fit(profiler.profile, config, hardware_name(config), 0.0)
    rows = []
    for cell in cells:
        measured = {
            name: statistics.median(getattr(one, name) for one in seen[cell])
            for name in ("tokens_per_second", "step_ms", "tokens_per_step")
        }
        predicted = asdict(predict(table, config, cell))
        ratio = {name: predicted[name] / measured[name] for name in measured}
        rows.append({**cell._asdict(), "predicted": predicted, "measured": measured, "ratio": ratio})
    return table, rows


def render(rows: list[dict]) -> str:
    lines = [
        "| requests | nodes | context | tokens/s predicted | measured | ratio | step ms ratio | tokens/step ratio |"
    ]
    lines.append("|---" * 8 + "|")
    for row in rows:
        p, m, r = row["predicted"], row["measured"], row["ratio"]
        lines.append(
            f"| {row['requests']} | {row['nodes']} | {row['context']} | {p['tokens_per_second']:.1f} | "
            f"{m['tokens_per_second']:.1f} | **{r['tokens_per_second']:.2f}** | {r['step_ms']:.2f} | "
            f"{r['tokens_per_step']:.2f} |"
        )
    return "\n".join(lines)


def engine(target_cost: str | None, device: str, max_batch: int, longest: int, cache: Path) -> EngineConfig:
    config = replace(bundled(DYNAMIC, device=device), max_model_len=longest, max_num_seqs=max_batch)
    assert config.draft is not None
    if target_cost is not None:
        from cluster.bench.scaled import scaled_pair
        from secateur.bench import TargetSize

        size = TargetSize.parse(target_cost)
        pair = scaled_pair(BUNDLED / "target", BUNDLED / "eagle3", size, cache, getattr(torch, config.dtype))
        config = replace(config, model_path=str(pair.target), draft=replace(config.draft, model_path=str(pair.head)))
    if device == "cuda" and torch.cuda.device_count() < 2:
        config = replace(config, draft=replace(config.draft, placement="colocated"))
    return profiled(config, max_batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-cost", help="300m, 8b or HIDDENxLAYERS: a target as costly as that [the bundled]")
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--contexts", type=int, nargs=2, default=(128, 512))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cache", type=Path, help="where scaled targets are kept [a temporary folder]")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        cache = args.cache or Path(folder)
        config = engine(args.target_cost, args.device, args.max_batch, args.contexts[1] + 128, cache)
        grid = replace(ProfileGrid.of(config), contexts=tuple(args.contexts))
        table, rows = run(config, grid, args.rounds)
    seconds = time.perf_counter() - began
    name, date = args.target_cost or "bundled", datetime.date.today().isoformat()
    command = "python -m tests.bench.planner " + " ".join(sys.argv[1:])
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"{date}-planner-{name}-{args.device}"
    report = {
        "date": date,
        "hardware": table.hardware,
        "torch": torch.__version__,
        "command": command,
        "seconds": round(seconds),
        "profiled": asdict(grid),
        "rows": rows,
        "costs": table.model_dump(mode="json", exclude={"model"}),
    }
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    text = (
        f"# Predicted and measured, {name} target on {table.hardware}, {date}\n\n`{command.strip()}`, {seconds:.0f} s, "
        f"torch {torch.__version__}; medians of {args.rounds} rounds. Ratios are predicted / measured. Profiled at "
        f"requests {grid.requests}, nodes {grid.nodes}, contexts {grid.contexts}.\n\n{render(rows)}\n"
    )
    stem.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
