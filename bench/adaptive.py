"""Measures the gain of `auto` and of each of its parts on a simulated clock with given costs, without noise.

    python -m bench.adaptive [--jobs 2] [--batches 1 8] [--temperatures 0 1] [--variants "no calibration"]

The bundled pair generates its real tokens. Gains are tokens per millisecond, prompts included, relative to no
speculation. Each variant replaces one part of the controller by a plainer or a richer one, or one constant by another
value. There are two tables: the gains of the controller as it is, beside trees of 16 and of 2 nodes; and the gains of
each variant relative to it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch

from bench.harness import command, parser
from cluster.bench.report import reporting
from secateur.cli.bench import say
from tests.support.clockwork import AUTO, FIXED, H200, OFF, ClockCosts, bench
from verifier.adaptive import calibration, controller, cost_model, gate, prompt_lookup
from workers.comm.ipc import Speculation

PRICES = {
    "H200, 8 B": H200,
    "two quiet CPU cores": ClockCosts(fixed=2, row=0.2, message=0.4, fed=0.02, level=0.75, node=0.03),
    "a target of 300 M parameters": ClockCosts(fixed=38, row=2.9, message=0.7, fed=0.03, level=1, node=0.05),
    "the same, a tree takes 8 ms more": ClockCosts(
        fixed=38, row=2.9, message=0.7, fed=0.03, level=1, node=0.05, tree=8
    ),
    "a step 20 ms, rows nearly free": ClockCosts(fixed=20, row=0.05, message=0.5, fed=0.01, level=1, node=0.01),
    "expensive drafting": ClockCosts(fixed=3, row=0.5, message=4, fed=0.05, level=3, node=0.3),
}
NUM_TOKENS = 48
NUM_LATER = 3


# ---- parts to put in place of the controller's


class EverRarerProbes(gate.SpeculationGate):
    """Probes after 32 steps, then 64, up to 1024, independent of their loss."""

    def weigh(self, advantage: float, num_decoding: int) -> bool:
        was_on = self.is_on
        drafts = super().weigh(advantage, num_decoding)
        if self.is_on != was_on:
            self._gap = 32
        return drafts

    def observe_probe(self, loss: float) -> None:
        gap = self._gap
        super().observe_probe(loss)
        self._gap = gap if self._probes_left else min(2 * gap, 1024)


class NoCalibration(calibration.Calibration):
    def learn(self, *_: Any) -> None:
        pass


class LookupByTemperature(prompt_lookup.PromptLookup):
    """Separate averages for three ranges of temperature: 0, up to 0.5, above."""

    def __init__(self, count_allowed: prompt_lookup.CountAllowed) -> None:
        super().__init__(count_allowed)
        self._kinds = [prompt_lookup.PromptLookup(count_allowed)._chance_L for _ in range(3)]

    def _draft(self, request: Any, most: int) -> Any:
        temperature = request.submit.sampling.temperature
        self._chance_L = self._kinds[(temperature > 0) + (temperature > 0.5)]
        return super()._draft(request, most)


class OneAverage(prompt_lookup.PromptLookup):
    """The same probability for matches of every length."""

    def _chance(self, length: int) -> prompt_lookup.Average:
        return super()._chance(1)


Patch = tuple[Any, str, Any]
AS_IT_IS = "as it is"
VARIANTS: dict[str, list[Patch]] = {
    "costs as at start-up": [(cost_model, "_NOISE", 1e9)],
    "no calibration": [(controller, "Calibration", NoCalibration)],
    "lookup by temperature": [(controller, "PromptLookup", LookupByTemperature)],
    "lookup by one average": [(controller, "PromptLookup", OneAverage)],
    "no factor per request": [(prompt_lookup, "_PRIOR_TOKENS", 1e9)],
    "no lookup": [(prompt_lookup, "_MOST_PLACES", 0)],
    "no probes": [(gate, "_FIRST_GAP", 10**9)],
    "ever rarer probes": [(controller, "SpeculationGate", EverRarerProbes)],
    "probes twice as often": [(gate, "_PROBE_SHARE", 0.006)],
    "probes half as often": [(gate, "_PROBE_SHARE", 0.0015)],
    "costs twice as noisy": [(cost_model, "_NOISE", 0.2)],
    "drafting drifts twice as fast": [(cost_model, "_DRIFT", 0.04)],
    "an average of 50 trees": [(controller, "_TREE_RATE", 0.02)],
    "lookup without a margin": [(prompt_lookup, "_MARGIN", 1.0)],
}


@contextmanager
def variant(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, attribute, value in VARIANTS.get(name, []):
            stack.enter_context(mock.patch.object(owner, attribute, value))
        yield


@dataclass(frozen=True, order=True)
class Cell:
    """A load on a market."""

    market: str
    temperature: float
    requests: int

    def __str__(self) -> str:
        return f"{self.market}, T={self.temperature:g}, {self.requests}"


def rates(cell: Cell, ways: Sequence[Speculation]) -> list[float]:
    """Return the tokens per millisecond of each way, in turn on one engine."""
    num_prompts = max(8, cell.requests, min(2 * cell.requests, 32))
    with bench(PRICES[cell.market], max_num_seqs=max(16, cell.requests)) as engine:
        return [engine.run(way, cell.requests, cell.temperature, num_prompts, NUM_TOKENS).rate for way in ways]


def gains(name: str, cell: Cell) -> tuple[float, float, float]:
    """Return the variant's gain at first, its mean gain once it has seen the prompts twice, and that mean's error."""
    torch.set_num_threads(1)
    with variant(name):
        off, first, _, *later = rates(cell, [OFF, AUTO, AUTO, *[AUTO] * NUM_LATER])
    return first / off, statistics.mean(later) / off, statistics.stdev(later) / off / math.sqrt(NUM_LATER)


def whole_trees(cell: Cell) -> tuple[float, float]:
    """Return the gains of trees of 16 and of 2 nodes, without any adaptive part."""
    torch.set_num_threads(1)
    off, large, small = rates(cell, [OFF, FIXED, Speculation(auto=False, num_speculative_tokens=2)])
    return large / off, small / off


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--jobs", type=int, default=1, help="processes")
    made.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    made.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    made.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS, metavar="NAME")
    args = made.parse_args()
    cells = [Cell(*own) for own in product(PRICES, args.temperatures, args.batches)]
    with (
        ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool,
        reporting(args.output, "adaptive", {"command": command()}, say) as report,
    ):
        whole, own = pool.map(whole_trees, cells), pool.map(partial(gains, AS_IT_IS), cells)
        others = {name: pool.map(partial(gains, name), cells) for name in args.variants}
        base = []
        for cell, (large, small), (first, later, error) in zip(cells, whole, own, strict=True):
            base.append(later)
            key = {"prices": cell.market, "temperature": cell.temperature, "requests": cell.requests}
            auto = {"auto_at_first": first, "auto_later": later, "error": error}
            say(str(report.add("gains", {**key, "16_nodes": large, "2_nodes": small, **auto})))
        for name, found in others.items():
            ratio_C = [later / own for (_, later, _), own in zip(found, base, strict=True)]
            (least, worst), *_, (most, best) = sorted(zip(ratio_C, cells, strict=True))
            mean = {"variant": name, "geometric_mean": statistics.geometric_mean(ratio_C)}
            row = {**mean, "least": least, "least_at": str(worst), "most": most, "most_at": str(best)}
            say(str(report.add("variants", row)))
    print(report.markdown)


if __name__ == "__main__":
    main()
