"""Measures the cost of structured outputs: time per token and per step with a JSON schema and without one.

    python -m tests.bench.structured [--rounds 5] [--schemas 80] [--out FOLDER]

Every written schema that is followed gets a greedy answer, and the same prompt one of as many tokens without a schema,
in alternating order, with and without speculation. A token's time also depends on how many drafted tokens are accepted,
and the two texts differ; the time of a step tells what the masks cost. Results are medians over the rounds, also of the
ratios to "no schema".
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

from cluster.http.tokenizer import Tokenizer
from tests.support.engines import BUNDLED, DYNAMIC, GenerationJob, Runner, bundled
from tests.support.json_schemas import WRITTEN
from workers.comm.ipc import Speculation
from workers.sampling.grammar import GrammarError, TokenTable, grammar_text
from workers.settings import Constraints, SamplingSettings

PROMPT = "data = "
MAX_TOKENS, MIN_TOKENS = 96, 8
END_TOKENS = (0, 2)


class Cost(NamedTuple):
    """The time of all answers of one kind in a round."""

    token_ms: float
    step_ms: float
    tokens_per_step: float


def grammars(most: int) -> dict[str, str]:
    """Return the grammars of the last written schemas that are followed, by their names: the last are the largest."""
    table, found = TokenTable(str(BUNDLED / "target"), 2048, END_TOKENS), {}
    for name, schema in WRITTEN.items():
        try:
            grammar = grammar_text("json", schema, whitespace="none")
            table.compile(grammar)
        except GrammarError:
            continue
        found[name] = grammar
    return dict(list(found.items())[-most:])


def measure(runner: Runner, job: GenerationJob) -> tuple[int, int, float]:
    """Return an answer's number of tokens, its steps and its seconds."""
    steps, began = runner.stats.steps, time.perf_counter()
    [answer] = runner.run([job])
    return len(answer.tokens), runner.stats.steps - steps, time.perf_counter() - began


def one_round(runner: Runner, prompt: list[int], own: dict[str, str], number: int, drafted: bool) -> dict[str, Cost]:
    totals = {"schema": [0, 0, 0.0], "no schema": [0, 0, 0.0]}
    speculation = Speculation(enabled=drafted)
    for place, grammar in enumerate(own.values()):
        sampling = SamplingSettings(temperature=0.0, constraints=Constraints(grammar=grammar))
        with_schema = GenerationJob(
            prompt=prompt, max_tokens=MAX_TOKENS, sampling=sampling, ignore_eos=False, speculation=speculation
        )
        length, _, _ = measure(runner, with_schema)  # also computes the masks' lexers, which are kept
        if length < MIN_TOKENS:
            continue
        without = GenerationJob(prompt=prompt, max_tokens=length, speculation=speculation)
        pair = [("schema", with_schema), ("no schema", without)]
        for kind, job in pair if (number + place) % 2 else reversed(pair):
            totals[kind] = [total + part for total, part in zip(totals[kind], measure(runner, job), strict=True)]
    return {
        kind: Cost(1e3 * seconds / tokens, 1e3 * seconds / steps, tokens / steps)
        for kind, (tokens, steps, seconds) in totals.items()
    }


def run(rounds: int, num_schemas: int) -> list[dict[str, float | str]]:
    """Return a row for each kind of answer, with and without speculation."""
    rows: list[dict[str, float | str]] = []
    prompt, own = Tokenizer(str(BUNDLED / "target")).encode(PROMPT), grammars(num_schemas)
    with Runner(bundled(DYNAMIC, eos_token_ids=END_TOKENS, enable_prefix_caching=False)) as runner:
        for drafted in (False, True):
            seen = [one_round(runner, prompt, own, number, drafted) for number in range(rounds)]
            for kind in ("no schema", "schema"):
                token_ms, step_ms, length = map(statistics.median, zip(*(turn[kind] for turn in seen), strict=True))
                ratios = [turn[kind].step_ms / turn["no schema"].step_ms for turn in seen]
                rows.append(
                    {
                        "speculation": "on" if drafted else "off",
                        "answers": kind,
                        "ms_per_token": token_ms,
                        "ms_per_step": step_ms,
                        "ratio_per_step": statistics.median(ratios),
                        "tokens_per_step": length,
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds; the median counts")
    parser.add_argument("--schemas", type=int, default=len(WRITTEN), help="at most so many")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    rows, date = run(args.rounds, args.schemas), datetime.date.today().isoformat()
    report = {
        "date": date,
        "hardware": f"{platform.machine()} CPU, 1 thread a rank",
        "command": shlex.join(["python", "-m", "tests.bench.structured", *sys.argv[1:]]),
        "rows": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{date}-structured-cpu.json").write_text(json.dumps(report, indent=1) + "\n")
    print("| speculation | answers | ms/token | ms/step | ratio per step | tokens/step |\n|---|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(f"{c:.3f}" if isinstance(c, float) else c for c in row.values()) + " |")


if __name__ == "__main__":
    main()
