"""What `auto` earns on a clock of chosen prices, and what each of its parts earns: free of a machine's noise.

    python -m tests.bench.adaptive [--batches 1 8] [--temperatures 0 1] [--variants "as it is" "no calibration"]

The bundled pair's real tokens; for each set of prices the tokens per millisecond, prompts included, relative to no
speculation: of trees of 16 and of 2 nodes, of `auto` as it starts, and of `auto` once it has seen the prompts. Each
variant replaces one part of the controller by a plainer or a richer one, or one constant by another value. Prints one
Markdown table for each variant.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import mul
from typing import Any
from unittest import mock

import numpy as np
import torch

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
    "dear drafts": ClockCosts(fixed=3, row=0.5, message=4, fed=0.05, level=3, node=0.3),
}
NUM_TOKENS = 48


# ---- parts to put in place of the controller's


class _Kalman:
    """A sum of terms whose prices follow a Kalman filter: a measurement moves most what is least known of it."""

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
    def observe(self, ms: float, work: cost_model.DraftWork) -> None:
        if self._is_fixed:
            return
        if not self._least_J:
            super().observe(ms, work)
            self._filter = _Kalman(self._price_J, self._price_J)
            return
        self._filter.observe(ms, work)
        self._price_J = self._filter.price_J


class NoCalibration(calibration.Calibration):
    def learn(self, *_: Any) -> None:
        pass


class RatioCalibration(calibration.Calibration):
    """One factor per depth on the odds of survival: what survived over what was expected to."""

    def __init__(self) -> None:
        super().__init__()
        self._survived_D, self._expected_D = np.full(8, 4.0), np.full(8, 4.0)

    def learn(self, trees: Any, verdicts: Any, is_shown_B: Any) -> None:
        logit_O, survived_O, depth_O = calibration._observations(trees, verdicts, is_shown_B)
        depth_O = np.minimum(depth_O, 7)
        raw_O = 1 / (1 + np.exp(-logit_O)) * (self._expected_D / self._survived_D)[depth_O]
        for total_D, seen_O in ((self._survived_D, survived_O), (self._expected_D, raw_O)):
            total_D[:] = 0.99 * total_D + 0.04 + np.bincount(depth_O, seen_O, 8)
        self._fit_D2[:, 1] = np.log(self._survived_D / self._expected_D)


class LookupByTemperature(prompt_lookup.PromptLookup):
    """Texts of three kinds (T = 0, up to 0.5, hotter), each with averages of its own."""

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
    """The same chance for matches of every length."""

    def of(self, length: int) -> float:
        return super().of(1)

    def observe(self, length: int, goes_on: bool) -> None:
        super().observe(1, goes_on)


Patch = tuple[Any, str, Any]
VARIANTS: dict[str, list[Patch]] = {
    "as it is": [],
    "Kalman costs": [(cost_model, "_VerifyCost", KalmanVerifyCost), (cost_model, "_DraftCost", KalmanDraftCost)],
    "costs as first guessed": [(cost_model, "_RATE", 0.0), (cost_model, "_DRAFT_RATE", 0.0)],
    "no calibration": [(controller, "Calibration", NoCalibration)],
    "calibration by a ratio": [(controller, "Calibration", RatioCalibration)],
    "lookup by temperature": [(controller, "PromptLookup", LookupByTemperature)],
    "lookup by one average": [(prompt_lookup, "AcceptanceEstimator", OneAverage)],
    "no factor per request": [(prompt_lookup, "_PRIOR_TOKENS", 1e9)],
    "no lookup": [(prompt_lookup, "_MOST_PLACES", 0)],
    "no probes": [(gate, "_FIRST_GAP", 10**9)],
    "probes twice as often": [(gate, "_FIRST_GAP", 16), (gate, "_LONGEST_GAP", 128)],
    "probes half as often": [(gate, "_FIRST_GAP", 64), (gate, "_LONGEST_GAP", 512)],
    "no hysteresis": [(gate, "_HYSTERESIS", 1.0)],
    "hysteresis 1.15": [(gate, "_HYSTERESIS", 1.15)],
    "cost rates halved": [(cost_model, "_RATE", 0.05), (cost_model, "_DRAFT_RATE", 0.1)],
    "cost rates doubled": [(cost_model, "_RATE", 0.2), (cost_model, "_DRAFT_RATE", 0.4)],
    "probes told the true costs": [(cost_model, "_PROBE_DISCOUNT", 1.0)],
    "tree averages twice as fast": [(controller, "_RATE", 0.1)],
    "lookup averages twice as fast": [(prompt_lookup, "_RATE", 0.04)],
    "lookup without a margin": [(prompt_lookup, "_MARGIN", 1.0)],
}


@contextmanager
def variant(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, attribute, value in VARIANTS[name]:
            stack.enter_context(mock.patch.object(owner, attribute, value))
        yield


def gains(prices: ClockCosts, temperature: float, batch: int, *, is_whole: bool) -> list[float]:
    """Rates over that of no speculation: with `is_whole` of 16 and 2 nodes, then of `auto` at first and later."""
    ways = [OFF, *([FIXED, Speculation(auto=False, num_speculative_tokens=2)] if is_whole else []), AUTO, AUTO, AUTO]
    with bench(prices) as engine:
        off, *rates, _, later = (
            engine.run(way, batch, temperature, max(8, 2 * batch), NUM_TOKENS).rate for way in ways
        )
    return [rate / off for rate in (*rates, later)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, metavar="NAME")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.variants:
        is_whole = name == "as it is"
        columns = (["16 nodes", "2 nodes"] if is_whole else []) + ["auto at first", "later"]
        print(f"\n**{name}**\n\n| prices | T | requests | {' | '.join(columns)} |\n|{'---|' * (3 + len(columns))}")
        logs = []
        for market, prices in PRICES.items():
            for temperature in args.temperatures:
                for batch in args.batches:
                    with variant(name):
                        found = gains(prices, temperature, batch, is_whole=is_whole)
                    logs.append(math.log(found[-1]))
                    cells = " | ".join(f"{gain:.3f}" for gain in found)
                    print(f"| {market} | {temperature:g} | {batch} | {cells} |", flush=True)
        print(f"\ngeometric mean, later: {math.exp(sum(logs) / len(logs)):.3f}", flush=True)


if __name__ == "__main__":
    main()
