"""Compares `auto` and fixed trees with plain decoding, in one process on one copy of the weights.

    python -m tests.bench.one_process [--target-cost 300m] [--batches 2 8] [--shapes auto] [--rounds 8] [--seconds 60]
        [--temperatures 0.7 --top-k 20 --top-p 0.8 --repetition-penalty 1.05] [--processes 3] [--out DIR]

`secateur bench throughput` compares running engines, each with its own copy of the target. On a shared machine such
copies differ: the same forward takes up to a fifth longer in one process than in another as long as they live, a few
percent longer with one engine's KV memory than with another's, and varies from second to second. So here two engines of
a kind and one without a drafter answer the same prompts in lockstep: they alternate step by step, and each has a clock
that runs in its own steps only. One of the two speculates, in the next round the other one; the result is the geometric
mean of both rounds. The drafter runs in the engine's process and uses the wire format. A second core would not help,
because engine and drafter wait for each other.

Every round uses the next prompts. Rounds continue until there are --rounds and --seconds have passed; the first two do
not count. The result is the time per token after the first: the median ratio to plain decoding, with its standard
error. `no drafter` is the engine without a drafter relative to the one that does not speculate. --processes repeats
everything in new processes and pools the rounds. Prints Markdown; --out also writes JSON named after the date and the
target, after every process.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count, cycle, islice, product, starmap
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

from cluster.bench.setup import scaled, workload
from cluster.bench.speed import drafter_of
from secateur.bench import ContestantName, SpeedPlan, TargetSize
from secateur.config import EngineArgs
from secateur.prompts import BUNDLED_PROMPTS, read_prompts
from tests.support.engine_here import EngineHere, Pair, engine_here
from workers.comm.ipc import Speculation, Submit
from workers.gc_freeze import freeze_start_up
from workers.settings import Constraints, SamplingSettings

OFF = Speculation(enabled=False)
SHAPES: tuple[ContestantName, ...] = ("chain", "static", "auto")


@dataclass
class Seat:
    """An engine and its requests of a round."""

    here: EngineHere
    speculation: Speculation
    seconds: float = 0.0  # in its own steps
    _first: dict[int, float] = field(default_factory=dict)
    _last: dict[int, float] = field(default_factory=dict)

    def step(self) -> None:
        began = time.perf_counter()
        chunks = self.here.step()
        self.seconds += time.perf_counter() - began
        for chunk in chunks:
            self._first.setdefault(chunk.id, self.seconds)
            if chunk.finish_reason is not None:
                self._last[chunk.id] = self.seconds

    @property
    def num_finished(self) -> int:
        return len(self._last)

    def seconds_per_token(self, num_tokens: int) -> float:
        """Return the time per token after the first, as the mean over the prompts."""
        return statistics.mean((self._last[i] - self._first[i]) / (num_tokens - 1) for i in self._first)


def race(seats: list[Seat], prompts: list[list[int]], num_tokens: int, sampling: SamplingSettings, turn: int) -> None:
    """Run all prompts at once, alternating between the engines' steps, without cached prefixes or noise."""
    for seat in seats:
        for number, prompt in enumerate(prompts):
            submit = Submit(
                id=number, prompt=prompt, max_tokens=num_tokens, ignore_eos=True, cache_salt=str(turn),
                sampling=replace(sampling, seed=1000 * turn + number), speculation=seat.speculation,
            )  # fmt: skip
            seat.here.submit(submit)
    order = random.Random(turn)
    while racing := [seat for seat in seats if seat.num_finished < len(prompts)]:
        order.shuffle(racing)  # a fixed order could favour an engine
        for seat in racing:
            seat.step()


class Contest:
    """Two engines that can speculate and one that cannot. turns: unused seeds."""

    def __init__(self, name: ContestantName, engines: list[EngineHere], turns: Iterator[int]) -> None:
        self.name = name
        self._engines = engines
        self._turns = turns

    def rounds(self, prompts: list[list[int]], num_tokens: int, sampling: SamplingSettings) -> Ratios:
        """Run two rounds, in which the engines swap roles."""
        *pair, alone = self._engines
        took: list[list[float]] = []  # on, off, no drafter
        for on, off in (pair, pair[::-1]):
            seats = [Seat(on, Speculation(auto=self.name == "auto")), Seat(off, OFF), Seat(alone, OFF)]
            race(seats, prompts, num_tokens, sampling, next(self._turns))
            took.append([seat.seconds_per_token(num_tokens) for seat in seats])
        on_s, off_s, alone_s = map(statistics.geometric_mean, zip(*took, strict=True))
        return Ratios(off_ms=1e3 * off_s, speed=off_s / on_s, no_drafter=off_s / alone_s)


class Ratios(NamedTuple):
    off_ms: float
    speed: float
    no_drafter: float


Cell = tuple[float, int]
"""Temperature and requests."""


def measure(args: argparse.Namespace) -> dict[Cell, dict[str, list[Ratios]]]:
    """Return the results by cell and kind of tree; print each cell's row when it is measured."""
    torch.set_num_threads(1)
    cells: dict[Cell, dict[str, list[Ratios]]] = {}
    with scaled(EngineArgs(), args.target_cost, args.cache, print) as engine_args, ExitStack() as stack:
        texts = read_prompts(BUNDLED_PROMPTS, 50)
        config, prompts = workload(engine_args, texts, max_tokens=args.max_tokens, max_num_seqs=max(args.batches))
        assert config.draft is not None
        pair = Pair.load(config.model_path, config.draft.model_path)

        def engine(name: ContestantName) -> EngineHere:
            assert config.draft is not None
            own = replace(config, draft=drafter_of(name, config.draft, SpeedPlan.throughput()))
            return stack.enter_context(engine_here(own, pair))

        alone = engine("off")
        turns = count(1)
        contests = [Contest(name, [engine(name), engine(name), alone], turns) for name in args.shapes]
        freeze_start_up()  # as workers do
        print(head(args.shapes))
        for temperature, batch in product(args.temperatures, args.batches):
            sampling = SamplingSettings(
                temperature=temperature,
                top_k=args.top_k,
                top_p=args.top_p,
                constraints=Constraints(repetition_penalty=args.repetition_penalty),
            )
            seen: dict[str, list[Ratios]] = {contest.name: [] for contest in contests}
            endless = cycle(prompts)
            began = time.perf_counter()
            for number in count(0, 2):
                if number > args.rounds and time.perf_counter() - began > args.seconds:
                    break
                asked = list(islice(endless, batch))
                for contest in contests:
                    seen[contest.name].append(contest.rounds(asked, args.max_tokens, sampling))
            cells[temperature, batch] = {name: ratios[1:] for name, ratios in seen.items()}
            print(line((temperature, batch), cells[temperature, batch]), flush=True)
    return cells


def summary(cell: Cell, seen: dict[str, list[Ratios]]) -> dict[str, float]:
    every = [ratios for ratios_of_one in seen.values() for ratios in ratios_of_one]
    row = {"temperature": cell[0], "batch": cell[1], "rounds": 2 * len(every) // len(seen)}
    row["off_ms"] = statistics.median(ratios.off_ms for ratios in every)
    columns = {name: [ratios.speed for ratios in own] for name, own in seen.items()}
    columns["no_drafter"] = [ratios.no_drafter for ratios in every]
    for name, values in columns.items():
        row[name], row[f"{name}_error"] = statistics.median(values), _error_of_median(values)
    return row


def _error_of_median(values: list[float]) -> float:
    """Return the median's standard error, for normal values with outliers."""
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return math.sqrt(math.pi / 2 / len(values)) * deviation


def head(shapes: Sequence[ContestantName]) -> str:
    cells = ("T", "requests", "rounds", "ms per token, off", *shapes, "no drafter")
    return f"| {' | '.join(cells)} |\n{'|---' * len(cells)}|"


def line(cell: Cell, seen: dict[str, list[Ratios]]) -> str:
    row = summary(cell, seen)
    ratios = " | ".join(f"{row[name]:.3f} ± {row[f'{name}_error']:.3f}" for name in (*seen, "no_drafter"))
    return f"| {row['temperature']:g} | {row['batch']} | {row['rounds']} | {row['off_ms']:.1f} | {ratios} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-cost", type=TargetSize.parse)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES, help="beside no speculation")
    parser.add_argument("--rounds", type=int, default=8, help="of a cell, at least")
    parser.add_argument("--seconds", type=float, default=0.0, help="of a cell, at least")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pooled: dict[Cell, dict[str, list[Ratios]]] = {}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as fresh:
        for number in range(args.processes):
            for cell, seen in fresh.submit(measure, args).result().items():
                for name, ratios in seen.items():
                    pooled.setdefault(cell, {}).setdefault(name, []).extend(ratios)
            if args.out is not None:
                write(args, [summary(*item) for item in pooled.items()], number + 1)
    if args.processes > 1:
        print(f"\nAll {args.processes} processes\n\n{head(args.shapes)}", *starmap(line, pooled.items()), sep="\n")


def write(args: argparse.Namespace, rows: list[dict[str, float]], num_processes: int) -> None:
    mark = args.target_cost or "bundled"
    about = {"hardware": "CPU, one thread", "torch": torch.__version__, "dtype": "float32", "target": str(mark)}
    settings = ("seconds", "max_tokens", "top_k", "top_p", "repetition_penalty")
    about |= {"processes": num_processes} | {name: getattr(args, name) for name in settings}
    rounded = [{key: round(value, 4) for key, value in row.items()} for row in rows]
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{datetime.date.today()}-one-process-{mark}.json"
    path.write_text(json.dumps({"about": about, "rows": rounded}, indent=1) + "\n")


if __name__ == "__main__":
    main()
