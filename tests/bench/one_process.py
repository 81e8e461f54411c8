"""`auto` and the fixed shapes beside no speculation, all in one process on one copy of the weights.

    python tests/bench/one_process.py [--target-cost 300m] [--batches 2 8] [--shapes auto] [--rounds 6] [--processes 3]
        [--temperatures 0.7 --top-k 20 --top-p 0.8 --repetition-penalty 1.05] [--out DIR]

`secateur bench throughput` compares running services, each with its own copy of the target. On a shared machine such
copies are not equal: the same forward takes up to a fifth longer in one process than in another, for as long as they
live, and by some hundredths longer with one engine's KV memory than with another's. So here every engine answers the
prompts of a round twice, with its shape and without speculation, and only those two times are compared. The drafter
answers in the engine's process, over the wire's format; a second core is not used, nor needed, since one side always
waits for the other. Each round has the next prompts, and the order turns around; a first round does not count. Time per
output token after the first, medians over the rounds of its ratio. `no drafter` is an engine that has none: its time
over that of the others without speculation. With --processes all is measured anew so often, and medians are taken.
Prints Markdown; --out also writes JSON named after the date and the target, after every process.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]

import cluster.bench  # noqa: E402, F401, I001  # memory as workers have it, before torch is asked for any
import torch  # noqa: E402
from cluster.bench.setup import scaled, workload  # noqa: E402
from cluster.bench.speed import drafter_of  # noqa: E402
from engine_here import EngineHere, Pair, engine_here  # noqa: E402
from secateur.bench import Contestant as Name  # noqa: E402
from secateur.bench import SpeedPlan, TargetSize  # noqa: E402
from secateur.config import EngineArgs  # noqa: E402
from secateur.prompts import BUNDLED_PROMPTS, read_prompts  # noqa: E402
from workers.config import EngineConfig  # noqa: E402
from workers.heap import freeze_start_up  # noqa: E402
from workers.ipc import Speculation, Submit  # noqa: E402
from workers.types import Constraints, SamplingParams  # noqa: E402

OFF = Speculation(enabled=False)
SHAPES: tuple[Name, ...] = ("chain", "static", "auto")


@dataclass
class Contestant:
    """One shape's engine."""

    here: EngineHere
    speculation: Speculation
    _num_turns: int = 0

    def seconds_per_token(
        self, prompts: list[list[int]], num_tokens: int, sampling: SamplingParams, *, speculates: bool
    ) -> float:
        """After the first, mean over the prompts, all asked at once. Nothing is left of earlier turns, no prefix and no
        seed's noise."""
        self._num_turns += 1
        seed = 1000 * self._num_turns
        for number, prompt in enumerate(prompts):
            submit = Submit(
                id=number, prompt=prompt, max_tokens=num_tokens, ignore_eos=True, cache_salt=str(seed),
                sampling=replace(sampling, seed=seed + number), speculation=self.speculation if speculates else OFF,
            )  # fmt: skip
            self.here.submit(submit)
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        while len(last) < len(prompts):
            chunks = self.here.step()
            now = time.perf_counter()
            for chunk in chunks:
                first.setdefault(chunk.id, now)
                if chunk.finish_reason is not None:
                    last[chunk.id] = now
        return statistics.mean((last[i] - first[i]) / (num_tokens - 1) for i in first)


@contextmanager
def contestant(name: Name, config: EngineConfig, pair: Pair) -> Iterator[Contestant]:
    assert config.draft is not None
    draft = drafter_of(name, config.draft, SpeedPlan.throughput())
    with engine_here(replace(config, draft=draft), pair) as here:
        yield Contestant(here, Speculation(auto=name == "auto"))


def measure(args: argparse.Namespace) -> list[dict[str, float]]:
    """Prints each row as it is known."""
    torch.set_num_threads(1)
    rows: list[dict[str, float]] = []
    with scaled(EngineArgs(), args.target_cost, args.cache, print) as engine_args, ExitStack() as stack:
        texts = read_prompts(BUNDLED_PROMPTS, 50)
        config, prompts = workload(engine_args, texts, max_tokens=args.max_tokens, max_num_seqs=max(args.batches))
        assert config.draft is not None
        pair = Pair.load(config.model_path, config.draft.model_path)
        names: tuple[Name, ...] = ("off", *args.shapes)
        contestants = {name: stack.enter_context(contestant(name, config, pair)) for name in names}
        turns = [("off", False), *((name, speculates) for name in args.shapes for speculates in (True, False))]
        freeze_start_up()  # as workers do
        print(head(args.shapes))
        for temperature in args.temperatures:
            sampling = SamplingParams(
                temperature=temperature,
                top_k=args.top_k,
                top_p=args.top_p,
                constraints=Constraints(repetition_penalty=args.repetition_penalty),
            )
            for batch in args.batches:
                endless = cycle(prompts)
                seen: list[dict[tuple[str, bool], float]] = []
                for number in range(args.rounds + 1):
                    asked = list(islice(endless, batch)), args.max_tokens, sampling
                    order = turns if number % 2 else turns[::-1]
                    seen.append({(n, on): contestants[n].seconds_per_token(*asked, speculates=on) for n, on in order})
                del seen[0]
                rows.append(
                    {
                        "temperature": temperature,
                        "batch": batch,
                        "off_ms": 1e3 * statistics.median(_off(t) for t in seen),
                        **{n: statistics.median(t[n, False] / t[n, True] for t in seen) for n in args.shapes},
                        "no_drafter": statistics.median(_off(t) / t["off", False] for t in seen),
                    }
                )
                print(line(rows[-1]), flush=True)
    return rows


def _off(turn: dict[tuple[str, bool], float]) -> float:
    """Without speculation, mean of the engines that could."""
    return statistics.mean(seconds for (name, speculates), seconds in turn.items() if name != "off" and not speculates)


def head(shapes: Sequence[Name]) -> str:
    cells = ("T", "requests", "ms per token, off", *shapes, "no drafter")
    return f"| {' | '.join(cells)} |\n{'|---' * len(cells)}|"


def line(row: dict[str, float]) -> str:
    temperature, batch, off_ms, *ratios = row.values()
    cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
    return f"| {temperature:g} | {batch:g} | {off_ms:.1f} | {cells} |"


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
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs: list[list[dict[str, float]]] = []
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as fresh:
        for _ in range(args.processes):
            runs.append(fresh.submit(measure, args).result())
            rows = [
                {key: round(statistics.median(row[key] for row in same), 3) for key in same[0]}
                for same in zip(*runs, strict=True)
            ]
            if args.out is not None:
                write(args, rows, len(runs))
    if len(runs) > 1:
        print(f"\nMedians over {len(runs)} processes\n\n{head(args.shapes)}", *map(line, rows), sep="\n")


def write(args: argparse.Namespace, rows: list[dict[str, float]], num_processes: int) -> None:
    mark = args.target_cost or "bundled"
    about = {"hardware": "CPU, one thread", "torch": torch.__version__, "dtype": "float32", "target": str(mark)}
    settings = ("rounds", "max_tokens", "top_k", "top_p", "repetition_penalty")
    about |= {"processes": num_processes} | {name: getattr(args, name) for name in settings}
    path = args.out / f"{datetime.date.today()}-one-process-{mark}.json"
    path.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
