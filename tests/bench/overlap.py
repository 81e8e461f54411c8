"""Measures what overlapping drafting and verification gains, for each `overlap` and without a drafter.

    python -m tests.bench.overlap [--target-cost 300m] [--batches 1 8] [--temperatures 0 1]
    python -m tests.bench.overlap --model smollm2 --drafter bundled:smollm2-eagle3 --prompts FILE

All stay loaded and take turns over the same prompts. Prints, per temperature and number of requests: tokens per second
(the median of the rounds), their ratio to drafting in turn and to decoding without drafts, how long a step waits for
the drafter, how much of that is hidden, and the share of trees that were ready.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import mean, median, stdev

from cluster.bench.runner import GenerationJob, Runner
from cluster.bench.setup import scaled, workload
from cluster.convert import with_overlap
from secateur.bench import TargetSize
from secateur.config import EngineArgs
from secateur.prompts import read_prompts
from workers.comm.ipc import EngineStats
from workers.config import EngineConfig, Overlap
from workers.settings import SamplingSettings

BUNDLED_PROMPTS = Path(__file__).parents[2] / "secateur" / "bundled" / "prompts.jsonl"
OVERLAPS: tuple[Overlap, ...] = ("none", "auto", "predraft", "alternate")
ENGINES = (*OVERLAPS, "off")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:target")
    parser.add_argument("--drafter", default="bundled:eagle3")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=Path, default=BUNDLED_PROMPTS, help="as for `secateur bench`")
    parser.add_argument("--target-cost")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--prune", default="off")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    return parser.parse_args()


def configurations(options: argparse.Namespace, stack: ExitStack) -> tuple[dict[str, EngineConfig], list[list[int]]]:
    """Return the engines' configurations, and the prompts."""
    args = EngineArgs.load(
        {
            "model": options.model,
            "dtype": options.dtype,
            "device": "cpu",
            "speculative_config": {
                "model": options.drafter,
                "num_speculative_tokens": options.nodes,
                "speculative_tree_prune": options.prune,
            },
        }
    )
    size = TargetSize.parse(options.target_cost) if options.target_cost else None
    args = stack.enter_context(scaled(args, size, options.cache, print))
    texts = read_prompts(options.prompts, 32)
    config, prompts = workload(args, texts, max_tokens=options.max_tokens, max_num_seqs=max(options.batches))
    engines = {name: with_overlap(args, config, name) for name in OVERLAPS}
    return {**engines, "off": replace(config, draft=None)}, prompts


def main() -> None:
    """Print one line per cell."""
    options = parse_arguments()
    with ExitStack() as stack:
        engines, prompts = configurations(options, stack)
        runners = {name: stack.enter_context(Runner(config)) for name, config in engines.items()}
        print("| T | requests | overlap | tokens/s | to in turn | to none | wait, ms a step | hidden | ready |")
        print("| --- |" + " --- |" * 8)
        for temperature in options.temperatures:
            for batch in options.batches:
                print_cell(runners, prompts, options, temperature, batch)


def print_cell(
    runners: dict[str, Runner], prompts: list[list[int]], options: argparse.Namespace, temperature: float, batch: int
) -> None:
    """Let all engines answer the same prompts in turns, and print their medians."""
    rates: dict[str, list[float]] = {name: [] for name in ENGINES}
    before = {name: runner.stats for name, runner in runners.items()}
    for number in range(options.rounds):
        jobs = [
            GenerationJob(
                prompt=prompts[(number * batch + i) % len(prompts)],
                max_tokens=options.max_tokens,
                sampling=SamplingSettings(temperature=temperature, seed=i),
            )
            for i in range(max(batch, 2))
        ]
        texts = set()
        for name in ENGINES if number % 2 else ENGINES[::-1]:
            began = time.perf_counter()
            answers = runners[name].run(jobs, batch)
            seconds = time.perf_counter() - began
            rates[name].append(sum(len(answer.tokens) for answer in answers) / seconds)
            texts.add(str([answer.tokens for answer in answers]))
        assert len(texts) == 1, "overlap changed a token"
    waits = {name: wait_ms(before[name], runner.stats) for name, runner in runners.items()}
    for name, runner in runners.items():
        ready = runner.stats.num_predrafted - before[name].num_predrafted
        trees = runner.stats.num_trees - before[name].num_trees
        columns = [f"{median(rates[name]):.0f}", ratio(rates[name], rates["none"]), ratio(rates[name], rates["off"])]
        columns += [f"{waits[name]:.2f}", f"{1 - waits[name] / waits['none']:.0%}", f"{ready / max(1, trees):.2f}"]
        print(f"| {temperature:g} | {batch} | {name} | " + " | ".join(columns) + " |", flush=True)


def wait_ms(before: EngineStats, after: EngineStats) -> float:
    """Return how long a step waited for the drafter, exchange included."""
    spent = after.draft_seconds + after.transfer_seconds - before.draft_seconds - before.transfer_seconds
    return 1e3 * spent / max(1, after.steps - before.steps)


def ratio(rates: list[float], to: list[float]) -> str:
    """Return the mean ratio over the rounds with its standard error."""
    ratios = [a / b for a, b in zip(rates, to, strict=True)]
    return f"{mean(ratios):.3f} ± {stdev(ratios) / len(ratios) ** 0.5:.3f}"


if __name__ == "__main__":
    main()
