"""The cost model: milliseconds of a verification step and of an exchange with the drafter.

A table of the target's forward, timed at start-up, gives the shape. Every measured step corrects what it cannot know:
how busy the machine is, what a tree costs beside its rows, what the drafter costs. Each correction is bounded, so that
a hiccup of the machine does not flip a decision.
Legend: T table entries, J terms of a cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import mul
from typing import Any, NamedTuple

import numpy as np
import torch

from verifier.draft_inputs import DraftInput, num_rows
from verifier.request import Request
from verifier.scheduler import Step
from workers.config import SimulatedCosts
from workers.cuda_graphs import bucket
from workers.types import DraftCosts, DraftReply

_RATE = 0.1  # share of a measurement's error that the verification cost takes up
_DRAFT_RATE = 0.2  # and the drafting cost, which has more terms to tell apart
_MAX_ERROR = 0.5  # errors count up to this share of the estimate
_LEAST_PRICE = 0.05  # of the first guess: nothing is free
_WARM_UP_EXCHANGES = 2  # the first exchanges with trees load and compile what the drafter has not run yet
_PROBE_DISCOUNT = 0.3

_Amount = Any  # a number, or an array for several alternatives at once


class RowCosts(NamedTuple):
    """Milliseconds of a forward by its number of rows, never falling."""

    rows_T: np.ndarray  # ascending from 1
    ms_T: np.ndarray

    def ms(self, num_rows: np.ndarray | float) -> np.ndarray:
        """Linear between the entries. Beyond the last, the slope is that of the table's upper half."""
        rows = np.asarray(num_rows, dtype=np.float64)
        ms = np.interp(rows, self.rows_T, self.ms_T)
        if rows.max(initial=0) <= self.rows_T[-1]:
            return ms
        middle = len(self.rows_T) // 2
        slope = (self.ms_T[-1] - self.ms_T[middle]) / max(1, self.rows_T[-1] - self.rows_T[middle])
        return ms + slope * np.maximum(rows - self.rows_T[-1], 0)

    def in_buckets(self, largest: int) -> RowCosts:
        """The same target where n rows run as `bucket(n)`, up to the bucket `largest`.

        The table becomes a staircase: flat from the first row of a bucket to its last. Between two buckets it stays
        linear, for numbers of rows that are averages.
        """
        ends = [n for n in range(1, largest + 1) if bucket(n) == n]
        edges = sorted({*ends, *(end + 1 for end in ends[:-1])})
        is_beyond_T = self.rows_T > largest
        return RowCosts(
            np.concatenate([np.array(edges, dtype=np.float64), self.rows_T[is_beyond_T]]),
            np.concatenate([self.ms(np.array([bucket(n) for n in edges])), self.ms_T[is_beyond_T]]),
        )

    @staticmethod
    def of(prices: SimulatedCosts) -> RowCosts:
        """The table of a target whose forward costs a fixed time and so much for each row."""
        rows_T = np.array([1.0, 4096.0])
        return RowCosts(rows_T, prices.step_ms + rows_T * prices.row_ms)


UNPROFILED = RowCosts(np.array([1.0, 1024.0]), np.array([10.0, 60.0]))
"""An arbitrary machine. Measured steps correct its scale, not its shape."""


class DraftWork(NamedTuple):
    """The quantities that the cost of an exchange with the drafter is a sum of."""

    messages: _Amount = 0.0
    rows_fed: _Amount = 0.0
    levels: _Amount = 0.0  # beyond the first
    nodes_run: _Amount = 0.0  # on those levels; all of a graph's rows where whole trees grow in one graph


class _VerifyCost:
    """Milliseconds of a step without its drafting: `scale` x table + `tree_ms` x trees.

    Plain steps teach the scale, steps with trees what a tree adds; so neither is blamed for the other. A step with
    trees that takes less than even free trees explain teaches the scale, too: while drafting is on there are no plain
    steps.
    """

    def __init__(self) -> None:
        self.scale, self.tree_ms = 1.0, 0.0

    def ms(self, table_ms: _Amount, num_trees: _Amount) -> _Amount:
        return self.scale * table_ms + self.tree_ms * num_trees

    def observe(self, ms: float, table_ms: float, num_trees: int) -> None:
        error = _RATE * _bounded_error(ms, self.ms(table_ms, num_trees))
        if num_trees:
            of_trees = max(error, -num_trees * self.tree_ms)
            self.tree_ms += of_trees / num_trees
            error -= of_trees
        self.scale += error / table_ms


class _DraftCost:
    """Milliseconds of an exchange with the drafter: a price for each quantity of `DraftWork`.

    The prices start as guesses of which only the ratios matter: the first measurement sets their scale. Later ones
    move each price in proportion to what it contributed (normalised least mean squares; Widrow and Hoff 1960).
    """

    def __init__(self, guess: DraftWork, *, is_fixed: bool = False) -> None:
        self._price_J: list[float] = list(guess)
        self._least_J: list[float] = []
        self._is_fixed = is_fixed

    def ms(self, work: DraftWork) -> _Amount:
        return sum(map(mul, self._price_J, work))

    def observe(self, ms: float, work: DraftWork) -> None:
        if self._is_fixed:
            return
        estimate = self.ms(work)
        if not self._least_J:
            self._price_J = [ms / estimate * price for price in self._price_J]
            self._least_J = [_LEAST_PRICE * price for price in self._price_J]
            return
        step_J = [price**2 * quantity for price, quantity in zip(self._price_J, work, strict=True)]
        gain = _DRAFT_RATE * _bounded_error(ms, estimate) / sum(map(mul, step_J, work))
        moved_J = (price + gain * step for price, step in zip(self._price_J, step_J, strict=True))
        self._price_J = list(map(max, moved_J, self._least_J))


class CostModel:
    """What steps are expected to take. row_costs: timed at start-up. prices: believed instead of every measurement."""

    def __init__(self, row_costs: RowCosts, prices: SimulatedCosts | None) -> None:
        self.is_given = prices is not None
        self._num_exchanges = 0
        self._verify_cost = _VerifyCost()
        if prices is not None:
            self._table = RowCosts.of(prices)
            self._draft_cost = _DraftCost(DraftWork(messages=prices.draft_ms, levels=prices.level_ms), is_fixed=True)
        else:
            self._table = row_costs
            row = float(row_costs.ms(1))
            guess = DraftWork(messages=0.2 * row, rows_fed=0.01 * row, levels=0.1 * row, nodes_run=0.01 * row)
            self._draft_cost = _DraftCost(guess)
        # The batch is mostly that of the step before.
        self._table_up_to = lru_cache(maxsize=2)(lambda rows, more: self._table.ms(rows + np.arange(more + 1)).tolist())

    @property
    def has_measured_drafting(self) -> bool:
        """Whether the cost of drafting is more than a guess."""
        return self.is_given or self._num_exchanges > _WARM_UP_EXCHANGES

    def draft_ms(self, work: DraftWork) -> np.ndarray:
        return self._draft_cost.ms(work)

    def verify_ms(self, step: Step, num_nodes: np.ndarray | float, num_trees: np.ndarray | float) -> np.ndarray:
        """The step's time beside drafting and prompts, with so many draft nodes in so many trees.

        Prompts must be computed some time whatever is drafted, so they make no token of this step dearer.
        """
        table_ms = self._table.ms(_num_rows(step) + num_nodes)
        return self._verify_cost.ms(table_ms, num_trees) - self.prefill_ms(step)

    def prefill_ms(self, step: Step) -> float:
        """What the step's prompts add to it."""
        if not step.prefill:
            return 0.0
        return float(self._verify_cost.ms(self._table.ms(_num_rows(step)) - self._table.ms(len(step.decode)), 0))

    def verify_ms_of(self, step: Step) -> Callable[[int, int], float]:
        """`verify_ms` as a function of plain numbers (nodes, trees), for many calls."""
        most = sum(r.limits.num_speculative_tokens for r in step.decode if r.limits)
        table_ms_N = self._table_up_to(_num_rows(step), most)
        prefill_ms, cost = self.prefill_ms(step), self._verify_cost
        return lambda num_nodes, num_trees: cost.ms(table_ms_N[num_nodes], num_trees) - prefill_ms

    def for_drafter(
        self, inputs: Mapping[Request, DraftInput], step: Step, calibration_D2: np.ndarray, *, is_probe: bool
    ) -> DraftCosts:
        """The costs that the drafter sizes this step's trees by.

        In a probe, drafting is told cheaper than believed: while levels look dear trees have few of them, so nobody
        would ever measure that levels have become cheap.
        """
        first_row, most = _num_rows(step), sum(own.num_nodes for own in inputs.values())
        num_trees = sum(own.num_nodes > 0 for own in inputs.values())
        knots = self._table.rows_T - first_row
        nodes_T = np.array([0, *knots[(knots > 0) & (knots < most)], most])
        work = DraftWork(messages=1, rows_fed=num_rows(inputs)), DraftWork(levels=1), DraftWork(nodes_run=1)
        discount = _PROBE_DISCOUNT if is_probe and not self.is_given else 1.0
        draft_ms_3 = [discount * self.draft_ms(part) for part in work]
        return DraftCosts(
            nodes_T=torch.from_numpy(nodes_T.astype(np.int32)),
            verify_ms_T=torch.from_numpy(self.verify_ms(step, nodes_T, num_trees).astype(np.float32)),
            draft_ms_3=torch.tensor(draft_ms_3, dtype=torch.float32),
            base_tokens_1=torch.tensor([len(step.decode)], dtype=torch.float32),
            calibration_D2=torch.from_numpy(calibration_D2),
        )

    def observe_exchange(self, inputs: Mapping[Request, DraftInput], reply: DraftReply, ms: float) -> float:
        """Learns from one exchange with the drafter. Returns its milliseconds, by the given prices if there are any."""
        levels = max(reply.num_levels - 1, 0)
        work = DraftWork(messages=1, rows_fed=num_rows(inputs), levels=levels, nodes_run=reply.num_run)
        if self.is_given:
            return float(self.draft_ms(work))
        self._num_exchanges += len(reply.trees.offsets) > 1
        if self.has_measured_drafting:
            self._draft_cost.observe(ms, work)
        return ms

    def believed_ms(self, step: Step, num_nodes: int, num_trees: int, ms: float) -> float:
        """The measured milliseconds of a step without its drafting, or those of the given prices."""
        if not self.is_given:
            return ms
        return float(self.verify_ms(step, num_nodes, num_trees)) + self.prefill_ms(step)

    def observe_step(self, step: Step, num_nodes: int, num_trees: int, ms: float) -> None:
        """Learns from a step without its drafting. One with prompts teaches nothing: they blur what its rows cost."""
        if not self.is_given and not step.prefill:
            self._verify_cost.observe(ms, float(self._table.ms(len(step.decode) + num_nodes)), num_trees)


def _bounded_error(ms: float, estimate: float) -> float:
    return min(max(ms - estimate, -_MAX_ERROR * estimate), _MAX_ERROR * estimate)


def _num_rows(step: Step) -> int:
    """Rows of the target that the step holds without any draft."""
    return len(step.decode) + sum(chunk.stop - chunk.start for _, chunk in step.prefill)
