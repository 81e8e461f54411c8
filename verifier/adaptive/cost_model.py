"""The cost model: milliseconds of a verification step and of an exchange with the drafter.

The start-up profile gives the shape of the target's cost and the prices of drafting. Measured steps correct what it
cannot tell: the load of the machine, and what drafts take beside their rows.
Legend: T table entries, J terms of a cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

_NOISE = 0.1  # of a measurement, as a share of it
_LOAD_DRIFT = 0.05  # of the load, in a step
_DRIFT = 0.02  # of every other price, in a measurement, as a share of it

_Quantity = Any  # a number, or an array for several alternatives at once


class RowCosts(NamedTuple):
    """Milliseconds of a forward as a non-decreasing function of its number of rows."""

    rows_T: np.ndarray  # ascending from 1
    ms_T: np.ndarray

    def ms(self, num_rows: np.ndarray | float) -> np.ndarray:
        """Interpolate linearly; extrapolate with the slope of the table's upper half."""
        rows = np.asarray(num_rows, dtype=np.float64)
        ms = np.interp(rows, self.rows_T, self.ms_T)
        if rows.max(initial=0) <= self.rows_T[-1]:
            return ms
        middle = len(self.rows_T) // 2
        slope = (self.ms_T[-1] - self.ms_T[middle]) / max(1, self.rows_T[-1] - self.rows_T[middle])
        return ms + slope * np.maximum(rows - self.rows_T[-1], 0)

    def in_buckets(self, largest: int) -> RowCosts:
        """Return the costs if n rows run as `bucket(n)` rows, up to the bucket `largest`.

        The table becomes a staircase that is flat within each bucket. Between two buckets it stays linear, for
        fractional numbers of rows.
        """
        ends = [n for n in range(1, largest + 1) if bucket(n) == n]
        edges = sorted({*ends, *(end + 1 for end in ends[:-1])})
        is_beyond_T = self.rows_T > largest
        return RowCosts(
            np.concatenate([np.array(edges, dtype=np.float64), self.rows_T[is_beyond_T]]),
            np.concatenate([self.ms(np.array([bucket(n) for n in edges])), self.ms_T[is_beyond_T]]),
        )


UNPROFILED = RowCosts(np.array([1.0, 1024.0]), np.array([10.0, 60.0]))
"""The costs of an arbitrary machine. Measured steps correct the scale, not the shape."""


class DraftWork(NamedTuple):
    """The quantities that determine the cost of an exchange with the drafter."""

    messages: _Quantity = 0.0
    rows_fed: _Quantity = 0.0
    levels: _Quantity = 0.0  # beyond the first
    nodes_run: _Quantity = 0.0  # on those levels; all rows of the graph for static growth


class TimedExchange(NamedTuple):
    """An exchange with the drafter at start-up."""

    work: DraftWork
    ms: float


class LinearCost:
    """Milliseconds as a sum of prices x terms. The prices follow measurements: a Kalman filter.

    A measurement moves a price by how uncertain it is, so a term that was never measured alone is still told from the
    others once their prices are known. A hiccup counts as a noisy measurement and moves little.

    price_J: the guess. deviation_J: its standard deviation. drift_J: that of the change of all prices together from one
    measurement to the next; None = a share of each.
    """

    def __init__(self, price_J: np.ndarray, deviation_J: np.ndarray, drift_J: np.ndarray | None = None) -> None:
        self.price_J, self._drift_J, self._cov_JJ = price_J, drift_J, np.diag(deviation_J**2)

    def tie(self, deviation: float) -> None:
        """From now on all prices change together, in their present ratio. deviation: of their scale, as a share."""
        self._cov_JJ = np.outer(deviation * self.price_J, deviation * self.price_J)

    def ms(self, terms: Iterable[_Quantity]) -> _Quantity:
        """Return the predicted time, in milliseconds."""
        return sum(map(mul, self.price_J.tolist(), terms))

    def observe(self, ms: float, terms: Iterable[float]) -> None:
        """Move the prices to a measurement."""
        term_J = np.array(list(terms), dtype=np.float64)
        drift_J = _DRIFT * self.price_J if self._drift_J is None else self._drift_J
        self._cov_JJ += np.outer(drift_J, drift_J)
        along_J, error = self._cov_JJ @ term_J, ms - float(self.price_J @ term_J)
        gain_J = along_J / (term_J @ along_J + (_NOISE * max(ms, ms - error)) ** 2)
        self.price_J = np.maximum(self.price_J + gain_J * error, 0.1 * self.price_J)  # none is negative, the load not 0
        self._cov_JJ -= np.outer(gain_J, along_J)


class CostModel:
    """Forecasts the milliseconds of steps.

    row_costs, exchanges: the start-up profile. prices: if given, they replace the profile and all measurements.
    """

    def __init__(
        self, row_costs: RowCosts, prices: SimulatedCosts | None, exchanges: Sequence[TimedExchange] = ()
    ) -> None:
        self.is_given = prices is not None
        if prices is not None:
            rows_T = np.array([1.0, 4096.0])
            self._table = RowCosts(rows_T, prices.step_ms + rows_T * prices.row_ms)
            guess, row = DraftWork(messages=prices.draft_ms, levels=prices.level_ms), 0.0
        else:
            self._table = row_costs
            row = float(row_costs.ms(1))
            guess = DraftWork(messages=0.2 * row, rows_fed=0.01 * row, levels=0.1 * row, nodes_run=0.01 * row)
        # The load, what a step with drafts takes beside its rows, and what each tree does.
        self._verifying = LinearCost(
            np.array([1.0, 0.1 * row, 0.005 * row]),
            np.array([0.1, 0.05 * row, 0.2 * row]),
            np.array([_LOAD_DRIFT, 0, 0]),
        )
        self._drafting = LinearCost(np.array(guess), row * np.array([1.0, 0.01, 0.2, 0.01]))
        for work, ms in exchanges:
            self._drafting.observe(ms, work)
        self._drafting.tie(0.1 if exchanges else 1.0)

    def verify_ms(self, step: Step, num_nodes: np.ndarray | float, num_trees: np.ndarray | float) -> np.ndarray:
        """Return the predicted time of the step without drafting and prompts, in milliseconds; inputs may be arrays.

        Prompts are left out because they must be computed in any case.
        """
        table_ms = self._table.ms(num_step_rows(step) + num_nodes)
        return self._verifying.ms((table_ms, np.minimum(num_trees, 1), num_trees)) - self.prefill_ms(step)

    def prefill_ms(self, step: Step) -> float:
        """Return the predicted time that the step's prompts add, in milliseconds."""
        if not step.prefill:
            return 0.0
        return self._load * float(self._table.ms(num_step_rows(step)) - self._table.ms(len(step.decode)))

    @property
    def _load(self) -> float:
        return float(self._verifying.price_J[0])

    def for_drafter(self, inputs: Mapping[Request, DraftInput], step: Step, log_odds_D: np.ndarray) -> DraftCosts:
        """Return the costs by which the drafter sizes this step's trees."""
        first_row, most = num_step_rows(step), sum(own.num_nodes for own in inputs.values())
        num_trees = sum(own.num_nodes > 0 for own in inputs.values())
        knots = self._table.rows_T - first_row
        nodes_T = np.array([0, *knots[(knots > 0) & (knots < most)], most])
        work = DraftWork(messages=1, rows_fed=num_rows(inputs)), DraftWork(levels=1), DraftWork(nodes_run=1)
        return DraftCosts(
            nodes_T=torch.from_numpy(nodes_T.astype(np.int32)),
            verify_ms_T=torch.from_numpy(self.verify_ms(step, nodes_T, num_trees).astype(np.float32)),
            draft_ms_3=torch.from_numpy(np.array([self.draft_ms(part) for part in work], dtype=np.float32)),
            base_tokens_1=torch.from_numpy(np.array([len(step.decode)], dtype=np.float32)),
            log_odds_D=torch.from_numpy(log_odds_D),
        )

    def draft_ms(self, work: DraftWork) -> _Quantity:
        """Return the predicted time of an exchange with the drafter, in milliseconds."""
        return self._load * self._drafting.ms(work)

    def observe_exchange(self, inputs: Mapping[Request, DraftInput], reply: DraftReply, ms: float) -> float:
        """Learn from an exchange with the drafter. Return its milliseconds, by the given prices if there are any."""
        levels = reply.num_levels - 1
        work = DraftWork(messages=1, rows_fed=num_rows(inputs), levels=levels, nodes_run=reply.num_run)
        if self.is_given:
            return float(self.draft_ms(work))
        self._drafting.observe(ms / self._load, work)
        return ms

    def believed_ms(self, step: Step, num_nodes: int, num_trees: int, ms: float) -> float:
        """Return a step's milliseconds without drafting: as measured, or by the given prices if there are any."""
        if not self.is_given:
            return ms
        return float(self.verify_ms(step, num_nodes, num_trees)) + self.prefill_ms(step)

    def observe_step(self, step: Step, num_nodes: int, num_trees: int, ms: float) -> None:
        """Learn from a step's time without drafting. Steps with prompts are ignored: they blur the cost of rows."""
        if not self.is_given and not step.prefill:
            table_ms = float(self._table.ms(len(step.decode) + num_nodes))
            self._verifying.observe(ms, (table_ms, min(num_trees, 1), num_trees))


def num_step_rows(step: Step) -> int:
    """Return the step's rows without drafts."""
    return len(step.decode) + sum(chunk.stop - chunk.start for _, chunk in step.prefill)
