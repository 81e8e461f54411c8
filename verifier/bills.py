"""What steps took, as bills that follow every measurement, and so what the next ones are expected to take.

Legend: J terms of a cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import mul
from typing import Any, NamedTuple

import numpy as np
import torch

from verifier.costs import RowCosts, given
from verifier.feeds import Feed, num_fed
from verifier.request import Request
from verifier.scheduler import Step
from workers.config import Prices
from workers.types import DraftCosts, DraftReply

_UNPAID = 2  # first exchanges that bring trees: what the drafter has not met yet is loaded and compiled in them

_Amount = Any  # a number or, for several bills at once, an array


class Bill:
    """A cost as a sum of terms, price x quantity, whose prices follow what was really paid.

    A Kalman filter: every price has its doubt, and a measurement moves most what is least known of what it contains.
    So a term that is rarely paid (a tree, in a try after many steps without) is not blamed for what the others explain,
    nor they for it; it keeps what it has learnt and, the longer ago that was, the more readily it learns anew. Errors
    count up to half the estimate: a hiccup of the machine passes unnoticed, and the estimate tends to the median.

    prices: first guesses; doubts: their standard deviations, none for prices that stay as they are. has_scale: whether
    the guesses are in milliseconds of this machine; if not, the first measurement puts them all to scale.
    """

    _NOISE = 0.15  # of a measurement, relative
    _DRIFT = 0.03  # how much a price may change in a step, in doubts
    _MAX_ERROR = 0.5
    _LEAST = 0.05  # of its first guess; a term is never for nothing

    def __init__(self, prices: Sequence[float], doubts: Sequence[float] = (), *, has_scale: bool = True) -> None:
        self._price_J = list(prices)
        self._doubt_J = list(doubts)
        self._covariance_JJ = [[a * a if i == j else 0.0 for j in range(len(doubts))] for i, a in enumerate(doubts)]
        self._least_J = [self._LEAST * price for price in prices]
        self._has_scale = has_scale
        self._last_step = 0

    def price(self, quantities: Sequence[_Amount]) -> np.ndarray:
        """Of one bill, or of several if some quantities are arrays."""
        return sum(map(mul, self._price_J, quantities))

    def hopeful(self) -> Bill:
        """With every price as low as it may well be, which the longer is lower, the longer ago it was paid."""
        doubt_J = [math.sqrt(row[j]) for j, row in enumerate(self._covariance_JJ)]
        return Bill([max(p - d, least) for p, d, least in zip(self._price_J, doubt_J, self._least_J, strict=True)])

    def paid(self, step: int, amount: float, quantities: Sequence[float]) -> None:
        """In this step, of an ever growing number. Of plain numbers: arrays of this size take longer."""
        if not self._doubt_J:
            return
        estimate = sum(map(mul, self._price_J, quantities))
        passed, self._last_step = step - self._last_step, step
        if not self._has_scale:
            return self._rescale(amount / estimate)
        most = self._MAX_ERROR * estimate
        error = min(max(amount - estimate, -most), most)
        self._forget(passed)
        spread_J = [sum(map(mul, row, quantities)) for row in self._covariance_JJ]
        variance = sum(map(mul, spread_J, quantities)) + (self._NOISE * estimate) ** 2
        for j, spread in enumerate(spread_J):
            gain = spread / variance
            self._price_J[j] = max(self._price_J[j] + gain * error, self._least_J[j])
            self._covariance_JJ[j] = [c - gain * s for c, s in zip(self._covariance_JJ[j], spread_J, strict=True)]

    def _rescale(self, factor: float) -> None:
        self._has_scale = True
        for values in (self._price_J, self._doubt_J, self._least_J):
            values[:] = [factor * value for value in values]
        self._covariance_JJ = [[factor**2 * value for value in row] for row in self._covariance_JJ]

    def _forget(self, num_steps: int) -> None:
        """No price becomes less certain than its first guess was."""
        for j, doubt in enumerate(self._doubt_J):
            row, most = self._covariance_JJ[j], doubt * doubt
            row[j] += min(num_steps * self._DRIFT**2 * most, max(most - row[j], 0.0))


class Drafting(NamedTuple):
    """What drafting is billed by."""

    messages: _Amount = 0.0
    fed: _Amount = 0.0  # rows
    levels: _Amount = 0.0  # beyond the first
    run: _Amount = 0.0  # nodes on those; all there are, where trees grow at once


class Rest(NamedTuple):
    """What the rest of a step is billed by. What the table of rows does not know, such as how attention copes with many
    requests of several rows, is billed by having trees at all and by tree."""

    steps: _Amount = 0.0
    table_ms: _Amount = 0.0
    requests: _Amount = 0.0
    has_trees: _Amount = 0.0
    trees: _Amount = 0.0


class StepPrices:
    """What steps are billed. verify: what start-up measured. prices, if given: believed instead, whatever happens."""

    def __init__(self, verify: RowCosts, prices: Prices | None) -> None:
        self.is_given = prices is not None
        self._num_exchanges = 0
        if prices is not None:
            self._verify = given(prices)
            self._draft_bill = Bill(Drafting(messages=prices.draft, levels=prices.level))
            self._rest_bill = Bill(Rest(table_ms=1.0))
        else:
            self._verify = verify
            row = float(verify.ms(1))
            draft = Drafting(messages=0.2 * row, fed=0.01 * row, levels=0.1 * row, run=0.01 * row)
            self._draft_bill = Bill(draft, doubts=draft, has_scale=False)
            self._rest_bill = Bill(
                Rest(steps=0.05 * row, table_ms=1.0, requests=0.02 * row, has_trees=0.02 * row, trees=0.02 * row),
                doubts=Rest(steps=0.1 * row, table_ms=0.25, requests=0.05 * row, has_trees=0.3 * row, trees=0.1 * row),
            )
        # The batch is mostly that of the step before.
        self._table_ms = lru_cache(maxsize=2)(self._verify.ms_up_to)
        self._rows_ms = lru_cache(maxsize=64)(lambda num_rows: float(self._verify.ms(num_rows)))

    @property
    def has_drafted(self) -> bool:
        """Whether what drafting takes is more than a guess."""
        return self.is_given or self._num_exchanges > _UNPAID

    def draft_ms(self, bill: Drafting) -> np.ndarray:
        return self._draft_bill.price(bill)

    def step_ms(self, step: Step, num_nodes: np.ndarray | float, num_trees: np.ndarray | float) -> np.ndarray:
        """What a step with so many nodes takes beside drafting and prompts: those must be computed some time whatever
        is drafted, and make no token of this step dearer."""
        return self._rest_bill.price(self._rest(step, num_nodes, num_trees)) - self.prompts_ms(step)

    def prompts_ms(self, step: Step) -> float:
        """What the step's prompts add to it."""
        if not step.prefill:
            return 0.0
        table_ms = self._verify.ms(_num_rows(step)) - self._verify.ms(len(step.decode))
        return float(self._rest_bill.price(Rest(table_ms=table_ms)))

    def step_ms_of(self, step: Step) -> Callable[[int, int], float]:
        """`step_ms`, for one (nodes, trees) at a time and many of them."""
        most = sum(r.limits.num_nodes for r in step.decode if r.limits)
        table_ms_N = self._table_ms(_num_rows(step), most)
        terms = Rest(steps=1, requests=len(step.decode)), Rest(table_ms=1), Rest(has_trees=1), Rest(trees=1)
        plain_ms, scale, trees_ms, tree_ms = (float(self._rest_bill.price(bill)) for bill in terms)
        plain_ms -= self.prompts_ms(step)
        return lambda nodes, trees: (
            plain_ms + scale * table_ms_N[nodes] + (trees_ms + trees * tree_ms if trees else 0.0)
        )

    def for_drafter(
        self, feeds: dict[Request, Feed], step: Step, calibration_D2: np.ndarray, *, is_trial: bool
    ) -> DraftCosts:
        """The prices of this step, for the drafter. In a try of drafts they are hopeful: where levels look dear trees
        have few, and nobody would ever learn that levels have become cheap."""
        num_rows, most = _num_rows(step), sum(feed.num_nodes for feed in feeds.values())
        num_trees = sum(feed.num_nodes > 0 for feed in feeds.values())
        knots = self._verify.rows_T - num_rows
        nodes_T = np.array([0, *knots[(knots > 0) & (knots < most)], most])
        draft = self._draft_bill.hopeful() if is_trial and not self.is_given else self._draft_bill
        bills = Drafting(messages=1, fed=num_fed(feeds)), Drafting(levels=1), Drafting(run=1)
        return DraftCosts(
            nodes_T=torch.from_numpy(nodes_T.astype(np.int32)),
            verify_ms_T=torch.from_numpy(self.step_ms(step, nodes_T, num_trees).astype(np.float32)),
            draft_ms_3=torch.tensor([draft.price(bill) for bill in bills], dtype=torch.float32),
            sure_1=torch.tensor([len(step.decode)], dtype=torch.float32),
            calibration_D2=torch.from_numpy(calibration_D2),
        )

    def exchange_took(self, number: int, feeds: dict[Request, Feed], reply: DraftReply, seconds: float) -> float:
        """Learns from an exchange with the drafter in step `number`; its milliseconds, as they are to be believed."""
        bill = Drafting(messages=1, fed=num_fed(feeds), levels=max(reply.num_levels - 1, 0), run=reply.num_run)
        ms = float(self.draft_ms(bill)) if self.is_given else 1e3 * seconds
        self._num_exchanges += len(reply.trees.offsets) > 1
        if self.has_drafted:
            self._draft_bill.paid(number, ms, bill)
        return ms

    def rest_took(self, step: Step, num_nodes: int, num_trees: int, ms: float) -> float:
        """The rest of a step's milliseconds, as they are to be believed."""
        return float(self.step_ms(step, num_nodes, num_trees)) + self.prompts_ms(step) if self.is_given else ms

    def learn_rest(self, number: int, step: Step, num_nodes: int, num_trees: int, ms: float) -> None:
        if not step.prefill:  # prompts would blur what a tree's rows cost
            table_ms = self._rows_ms(len(step.decode) + num_nodes)
            self._rest_bill.paid(number, ms, Rest(1, table_ms, len(step.decode), num_trees > 0, num_trees))

    def _rest(self, step: Step, num_nodes: np.ndarray | float, num_trees: np.ndarray | float) -> Rest:
        table_ms, has_trees = self._verify.ms(_num_rows(step) + num_nodes), np.minimum(num_trees, 1)
        return Rest(steps=1, table_ms=table_ms, requests=len(step.decode), has_trees=has_trees, trees=num_trees)


def _num_rows(step: Step) -> int:
    """Rows of the target that the step holds without any draft."""
    return len(step.decode) + sum(chunk.stop - chunk.start for _, chunk in step.prefill)
