"""Measures the cost of draft probabilities: time per token with and without them in one engine.

    python -m tests.bench.sampler [--rounds 9] [--prompts 6] [--temperatures 0.3] [--target-cost 300m] [--out FOLDER]

With a target cost, the target computes the bundled one's function at the cost of a larger model. Each prompt is
answered under `rejection` with draft probabilities (minimum temperature 0), without them (deterministic drafts), and
under `coupled`, in alternating order. Results are medians over the rounds, also of the ratios to "without".
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from cluster.bench.scaled import ScaledPair, scaled_pair
from secateur.bench import TargetSize
from tests.support.engines import DYNAMIC, GenerationJob, Runner, bundled, prompts
from workers.comm.ipc import Speculation
from workers.config import AcceptanceConfig, EngineConfig
from workers.settings import SamplingSettings

WAYS = {
    "without": Speculation(acceptance="rejection", draft_probs=False),
    "with": Speculation(acceptance="rejection", draft_probs=True),
    "coupled": Speculation(acceptance="coupled"),
}
NUM_TOKENS = 64


def engine(cost: TargetSize | None, cache: Path) -> EngineConfig:
    config = bundled(DYNAMIC, enable_prefix_caching=False)  # the same requests in all settings and rounds
    assert config.draft is not None
    pair = ScaledPair(Path(config.model_path), Path(config.draft.model_path))
    if cost is not None:
        pair = scaled_pair(*pair, cost, cache, torch.float32)
    draft = replace(config.draft, model_path=str(pair.head), acceptance=AcceptanceConfig(min_temperature=0.0))
    return replace(config, model_path=str(pair.target), draft=draft)


def run(config: EngineConfig, temperatures: list[float], rounds: int, num_prompts: int) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    with Runner(config) as runner:
        for temperature in temperatures:
            seen = [_round(runner, temperature, round_, prompts(num_prompts)) for round_ in range(rounds + 1)][1:]
            for way in WAYS:
                token_ms, step_ms, length = map(statistics.median, zip(*(turn[way] for turn in seen), strict=True))
                rows.append(
                    {
                        "temperature": temperature,
                        "draft_probabilities": way,
                        "ms_per_token": token_ms,
                        "ratio": statistics.median(turn[way].token_ms / turn["without"].token_ms for turn in seen),
                        "ms_per_step": step_ms,
                        "acceptance_length": length,
                    }
                )
    return rows


class Turn(NamedTuple):
    """The time of one setting for all prompts of a round."""

    token_ms: float
    step_ms: float
    acceptance_length: float


def _round(runner: Runner, temperature: float, number: int, asked: list[list[int]]) -> dict[str, Turn]:
    """Answer each prompt in all settings before the next one, because the machine's speed changes slowly."""
    ways = list(WAYS.items())
    seconds, steps, drafts, accepted = ({way: 0.0 for way in WAYS} for _ in range(4))
    for i, prompt in enumerate(asked):
        first = (number + i) % len(ways)
        for way, speculation in ways[first:] + ways[:first]:
            sampling = SamplingSettings(temperature=temperature, seed=number)
            job = GenerationJob(prompt=prompt, max_tokens=NUM_TOKENS, sampling=sampling, speculation=speculation)
            steps_before, began = runner.stats.steps, time.perf_counter()
            (answer,) = runner.run([job])
            seconds[way] += time.perf_counter() - began
            steps[way] += runner.stats.steps - steps_before
            drafts[way] += answer.stats.num_drafts
            accepted[way] += answer.stats.num_accepted_tokens
    return {
        way: Turn(
            token_ms=1e3 * seconds[way] / (NUM_TOKENS * len(asked)),
            step_ms=1e3 * seconds[way] / steps[way],
            acceptance_length=1 + accepted[way] / max(1, drafts[way]),
        )
        for way in WAYS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds; the median counts")
    parser.add_argument("--prompts", type=int, default=6, help="held-out prompts per round")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.3, 0.5, 0.7])
    parser.add_argument("--target-cost", metavar="COST", type=TargetSize.parse, help="300m, 8b or HIDDENxLAYERS")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        rows = run(engine(args.target_cost, Path(cache)), args.temperatures, args.rounds, args.prompts)
    label = "" if args.target_cost is None else f"-{args.target_cost}"
    date = datetime.date.today().isoformat()
    report = {
        "date": date,
        "hardware": f"{platform.machine()} CPU, 1 thread a rank",
        "command": shlex.join(["python", "-m", "tests.bench.sampler", *sys.argv[1:]]),
        "target": "the bundled one"
        if args.target_cost is None
        else f"cost-scaled to {args.target_cost}, same function",
        "rows": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{date}-sampler{label}-cpu.json").write_text(json.dumps(report, indent=1) + "\n")
    print("| T | draft probabilities | ms/token | ratio | ms/step | acceptance length |\n|---|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(f"{c:.3f}" if isinstance(c, float) else c for c in row.values()) + " |")


if __name__ == "__main__":
    main()
