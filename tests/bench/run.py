"""Speed and acceptance of the bundled pair, side by side in one run: no speculation, chain, static and dynamic tree.

    python tests/bench/run.py [--rounds 5] [--prompts 8] [--device cpu|cuda] [--out tests/bench/results]

All engines stay up and take turns, so that whatever else the machine does hits them alike; medians over the rounds are
reported, and ratios to no speculation. Writes a JSON file and a Markdown table named after the date and the device.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]

import torch  # noqa: E402
from engines import AUTO, CHAIN, DYNAMIC, STATIC, Job, Runner, bundled, prompts  # noqa: E402

from workers.config import EngineConfig  # noqa: E402
from workers.types import SamplingParams  # noqa: E402

SHAPES = {
    "off": ("eagle3", None),
    "chain of 5": ("eagle3", CHAIN),
    "static tree of 9": ("eagle3", STATIC),
    "dynamic tree of 16": ("eagle3", DYNAMIC),
    "dynamic tree of 16, auto": ("eagle3", AUTO),
    "dynamic tree of 16, draft model": ("draft_model", DYNAMIC),
}
TEMPERATURES = (0.0, 1.0)
BATCHES = (1, 8)
NUM_TOKENS = 96


def engine(shape: str, device: str) -> EngineConfig:
    method, tree = SHAPES[shape]
    config = bundled(tree, method=method, device=device, memory_utilization=0.15)
    if device == "cuda" and config.draft and torch.cuda.device_count() < 2:
        config = replace(config, draft=replace(config.draft, placement="colocated"))
    return config


def measure(runner: Runner, jobs: list[Job], batch: int) -> dict[str, float]:
    """One pass over the jobs: tokens per second and what happened inside the steps."""
    before, began = runner.stats, time.perf_counter()
    answers = runner.run(jobs, concurrency=batch)
    seconds = time.perf_counter() - began
    after = runner.stats
    num_tokens = sum(len(answer.tokens) for answer in answers)
    drafts = sum(answer.stats.num_drafts for answer in answers)
    accepted = sum(answer.stats.num_accepted_tokens for answer in answers)
    steps = max(1, after.steps - before.steps)
    return {
        "tokens_per_second": num_tokens / seconds,
        "acceptance_length": 1 + accepted / drafts if drafts else 1.0,
        "verified_per_token": sum(answer.stats.num_verified_tokens for answer in answers) / num_tokens,
        "draft_ms_per_step": 1e3 * (after.draft_seconds - before.draft_seconds) / steps,
        "transfer_ms_per_step": 1e3 * (after.transfer_seconds - before.transfer_seconds) / steps,
        "verify_ms_per_step": 1e3 * (after.verify_seconds - before.verify_seconds) / steps,
        "step_ms": 1e3 * (after.step_seconds - before.step_seconds) / steps,
    }


def run(rounds: int, num_prompts: int, device: str) -> list[dict[str, object]]:
    rows = []
    with ExitStack() as stack:
        runners = {shape: stack.enter_context(Runner(engine(shape, device))) for shape in SHAPES}
        for temperature in TEMPERATURES:
            sampling = SamplingParams(temperature=temperature, seed=7)
            jobs = [Job(prompt=p, max_tokens=NUM_TOKENS, sampling=sampling) for p in prompts(num_prompts)]
            for batch in BATCHES:
                seen: dict[str, list[dict[str, float]]] = {shape: [] for shape in SHAPES}
                for round_ in range(rounds + 1):
                    for shape, runner in runners.items():
                        result = measure(runner, jobs, batch)
                        if round_:  # the first round warms up
                            seen[shape].append(result)
                medians = {
                    shape: {key: statistics.median(r[key] for r in results) for key in results[0]}
                    for shape, results in seen.items()
                }
                for shape, median in medians.items():
                    ratio = median["tokens_per_second"] / medians["off"]["tokens_per_second"]
                    rows.append({"shape": shape, "temperature": temperature, "batch": batch, "ratio": ratio, **median})
    return rows


def table(rows: list[dict[str, object]]) -> str:
    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(f"{c:.2f}" if isinstance(c, float) else str(c) for c in cells) + " |"

    return "\n".join([line(rows[0]), "|---" * len(rows[0]) + "|", *(line(row.values()) for row in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds; the median counts")
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts per round")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    rows = run(args.rounds, args.prompts, args.device)
    hardware = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} CPU, 1 thread a rank"
    date = datetime.date.today().isoformat()
    command = f"python tests/bench/run.py --rounds {args.rounds} --prompts {args.prompts} --device {args.device}"
    report = {"date": date, "hardware": hardware, "torch": torch.__version__, "command": command, "rows": rows}
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"{date}-{args.device}"
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    text = (
        f"# Bundled pair on {hardware}, {date}\n\n`{command}`, torch {torch.__version__}; medians; "
        f"ratio = tokens/s over that of no speculation in the same run.\n\n{table(rows)}\n"
    )
    stem.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
