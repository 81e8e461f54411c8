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
from operator import mul
from typing import Any
from unittest import mock

import numpy as np
import torch

from bench.harness import command, parser
from cluster.bench.report import reporting
from secateur.cli.bench import say
from tests.support.clockwork import AUTO, FIXED, OFF, ClockCosts, bench
from verifier.adaptive import calibration, controller, cost_model, gate, prompt_lookup
from workers.comm.ipc import Speculation

PRICES = {
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


class _Kalman:
    """A sum of terms whose prices follow a Kalman filter: a measurement changes the least certain prices most."""

    def __init__(self, prices: Sequence[float], doubts: Sequence[float]) -> None:
        self.price_J, self._doubt_J = list(prices), list(doubts)
        self._covariance_JJ = [[a * a if i == j else 0.0 for j in range(len(doubts))] for i, a in enumerate(doubts)]

    def ms(self, quantity_J: Sequence[Any]) -> Any:
        return sum(map(mul, self.price_J, quantity_J))

    def observe(self, ms: float, quantity_J: Sequence[float]) -> None:
        estimate = self.ms(quantity_J)
        error = min(max(ms - estimate, -0.5 * estimate), 0.5 * estimate)
        for j, doubt in enumerate(self._doubt_J):
            row = self._covariance_JJ[j]
            row[j] += min((0.03 * doubt) ** 2, max(doubt * doubt - row[j], 0.0))
        spread_J = [sum(map(mul, row, quantity_J)) for row in self._covariance_JJ]
        variance = sum(map(mul, spread_J, quantity_J)) + (0.15 * estimate) ** 2
        for j, spread in enumerate(spread_J):
            gain = spread / variance
            self.price_J[j] = max(self.price_J[j] + gain * error, 0.0)
            self._covariance_JJ[j] = [c - gain * s for c, s in zip(self._covariance_JJ[j], spread_J, strict=True)]


class KalmanVerifyCost:
    def __init__(self) -> None:
        self._cost: _Kalman | None = None

    def ms(self, table_ms: Any, num_trees: Any) -> Any:
        return table_ms if self._cost is None else self._cost.ms((1, table_ms, np.minimum(num_trees, 1), num_trees))

    def observe(self, ms: float, table_ms: float, num_trees: int) -> None:
        if self._cost is None:
            step = table_ms
            self._cost = _Kalman(
                (0.05 * step, 1.0, 0.02 * step, 0.02 * step), (0.1 * step, 0.25, 0.3 * step, 0.1 * step)
            )
        self._cost.observe(ms, (1, table_ms, min(num_trees, 1), num_trees))


class KalmanDraftCost(cost_model._DraftCost):
    def __init__(self, guess: cost_model.DraftWork, *, is_fixed: bool = False) -> None:
        super().__init__(guess, is_fixed=is_fixed)
        self._filter: _Kalman | None = None

    def ms(self, work: cost_model.DraftWork) -> Any:
        return self._filter.ms(work) if self._filter else super().ms(work)

    def observe(self, ms: float, work: cost_model.DraftWork, *, is_probe: bool) -> None:
        if self._filter:
            self._filter.observe(ms, work)
            return
        super().observe(ms, work, is_probe=is_probe)
        if self._is_measured and not self._is_fixed:
            prices = [self._scale * price for price in self._guess]
            self._filter = _Kalman(prices, prices)


class PricePerTerm(cost_model._DraftCost):
    """Normalised least mean squares: each term's price moves in proportion to its contribution."""

    def __init__(self, guess: cost_model.DraftWork, *, is_fixed: bool = False) -> None:
        super().__init__(guess, is_fixed=is_fixed)
        self._least: list[float] = []

    def observe(self, ms: float, work: cost_model.DraftWork, *, is_probe: bool) -> None:
        if not self._is_measured:
            super().observe(ms, work, is_probe=is_probe)
            self._guess = cost_model.DraftWork(*[self._scale * price for price in self._guess])
            self._scale, self._least = 1.0, [0.05 * price for price in self._guess]
        elif not self._is_fixed:
            estimate = self.ms(work)
            step_J = [price**2 * quantity for price, quantity in zip(self._guess, work, strict=True)]
            gain = cost_model._DRAFT_RATE * cost_model._bounded_error(ms, estimate) / sum(map(mul, step_J, work))
            moved_J = (price + gain * step for price, step in zip(self._guess, step_J, strict=True))
            self._guess = cost_model.DraftWork(*map(max, moved_J, self._least))


class EverRarerProbes(gate.SpeculationGate):
    """Probes after 32 steps, then 64, up to 1024, independent of their loss."""

    def weigh(self, advantage: float, num_decoding: int) -> None:
        was_on = self.is_on
        super().weigh(advantage, num_decoding)
        if self.is_on != was_on:
            self._gap = 32

    def observe_probe(self, loss: float) -> None:
        gap = self._gap
        super().observe_probe(loss)
        self._gap = gap if self._probes_left else min(2 * gap, 1024)


class NoCalibration(calibration.Calibration):
    def learn(self, *_: Any) -> None:
        pass


class RatioCalibration(calibration.Calibration):
    """One factor per depth on the odds of survival: observed over expected survivors."""

    def __init__(self) -> None:
        super().__init__()
        self._survived_D, self._expected_D = np.full(8, 4.0), np.full(8, 4.0)

    def learn(self, *step: Any) -> None:
        logit_O, survived_O, depth_O = calibration._observations([step])
        depth_O = np.minimum(depth_O, 7)
        raw_O = 1 / (1 + np.exp(-logit_O)) * (self._expected_D / self._survived_D)[depth_O]
        for total_D, seen_O in ((self._survived_D, survived_O), (self._expected_D, raw_O)):
            total_D[:] = 0.99 * total_D + 0.04 + np.bincount(depth_O, seen_O, 8)
        self._fit_D2[:, 1] = np.log(self._survived_D / self._expected_D)


class LookupByTemperature(prompt_lookup.PromptLookup):
    """Separate averages for three ranges of temperature: 0, up to 0.5, above."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds = [prompt_lookup.AcceptanceEstimator() for _ in range(3)]

    def _kind(self, request: Any) -> prompt_lookup.AcceptanceEstimator:
        temperature = request.submit.sampling.temperature
        return self._kinds[(temperature > 0) + (temperature > 0.5)]

    def _draft(self, request: Any, most: int) -> Any:
        self._acceptance = self._kind(request)
        return super()._draft(request, most)


class OneAverage(prompt_lookup.AcceptanceEstimator):
    """The same probability for matches of every length."""

    def of(self, length: int) -> float:
        return super().of(1)

    def observe(self, length: int, goes_on: bool) -> None:
        super().observe(1, goes_on)


Patch = tuple[Any, str, Any]
AS_IT_IS = "as it is"
VARIANTS: dict[str, list[Patch]] = {
    "Kalman costs": [(cost_model, "_VerifyCost", KalmanVerifyCost), (cost_model, "_DraftCost", KalmanDraftCost)],
    "a price for each term of drafting": [(cost_model, "_DraftCost", PricePerTerm)],
    "costs as first measured": [(cost_model, "_RATE", 0.0), (cost_model, "_DRAFT_RATE", 0.0)],
    "no calibration": [(controller, "Calibration", NoCalibration)],
    "calibration by a ratio": [(controller, "Calibration", RatioCalibration)],
    "lookup by temperature": [(controller, "PromptLookup", LookupByTemperature)],
    "lookup by one average": [(prompt_lookup, "AcceptanceEstimator", OneAverage)],
    "no factor per request": [(prompt_lookup, "_PRIOR_TOKENS", 1e9)],
    "no lookup": [(prompt_lookup, "_MOST_PLACES", 0)],
    "no probes": [(gate, "_FIRST_GAP", 10**9)],
    "ever rarer probes": [(controller, "SpeculationGate", EverRarerProbes)],
    "probes twice as often": [(gate, "_PROBE_SHARE", 0.006)],
    "probes half as often": [(gate, "_PROBE_SHARE", 0.0015)],
    "no hysteresis": [(gate, "_HYSTERESIS", 1.0)],
    "hysteresis 1.15": [(gate, "_HYSTERESIS", 1.15)],
    "cost rates halved": [(cost_model, "_RATE", 0.05), (cost_model, "_DRAFT_RATE", 0.1)],
    "cost rates doubled": [(cost_model, "_RATE", 0.2), (cost_model, "_DRAFT_RATE", 0.4)],
    "tree averages twice as fast": [(controller, "_RATE", 0.04)],
    "lookup averages twice as fast": [(prompt_lookup, "_RATE", 0.04)],
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
    num_prompts = max(8, min(2 * cell.requests, 32))
    with bench(PRICES[cell.market]) as engine:
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
