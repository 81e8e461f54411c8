"""What a step costs on this machine: a table of the target's forward timed at start-up, corrected by every step since.

Legend: T table entries, J terms of a cost.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch

from verifier.pack import pack_target
from verifier.request import Request
from verifier.target import Target
from workers.config import EngineConfig, Prices
from workers.graphs import bucket
from workers.graphs import sizes as graph_sizes
from workers.ipc import Submit
from workers.types import NodeKind, Rule, TreeBatch

_FIRST_ROUND_S, _PROFILE_S = 0.4, 1.2
"""Start-up time spent on the table's sizes and on all of it, more or less; a slow target takes what two rounds take."""
_MIN_ROUNDS, _MAX_ROUNDS = 2, 8
_PROFILE_SLOTS = 128
_TREE_ROWS = 8


class RowCosts(NamedTuple):
    """Milliseconds of a forward over so many rows, never falling."""

    rows_T: np.ndarray  # ascending from 1
    ms_T: np.ndarray

    def ms(self, num_rows: np.ndarray | int) -> np.ndarray:
        """Linear between the entries; beyond the last as steep as the table is from its middle."""
        rows = np.asarray(num_rows, dtype=np.float64)
        middle = len(self.rows_T) // 2
        slope = (self.ms_T[-1] - self.ms_T[middle]) / max(1, self.rows_T[-1] - self.rows_T[middle])
        return np.interp(rows, self.rows_T, self.ms_T) + slope * np.maximum(rows - self.rows_T[-1], 0)

    def in_buckets(self, largest: int) -> RowCosts:
        """The same target where n rows run as bucket(n), up to the bucket `largest`: a staircase, flat from the first
        row of every bucket to its last. Between two buckets it stays linear, for numbers of rows that are averages."""
        ends = [n for n in range(1, largest + 1) if bucket(n) == n]
        edges = sorted({*ends, *(end + 1 for end in ends[:-1])})
        is_beyond_T = self.rows_T > largest
        return RowCosts(
            np.concatenate([np.array(edges, dtype=np.float64), self.rows_T[is_beyond_T]]),
            np.concatenate([self.ms(np.array([bucket(n) for n in edges])), self.ms_T[is_beyond_T]]),
        )


UNPROFILED = RowCosts(np.array([1.0, 1024.0]), np.array([10.0, 60.0]))
"""Some machine. The first steps put its scale right, not its shape."""


def profile(target: Target, config: EngineConfig, num_pages: int) -> RowCosts:
    """Times forwards of a growing number of rows, on pages that nobody owns yet. Rank 0; its peers follow.

    Round after round, so that a busy moment of the machine does not tilt the table; the least time counts, and no size
    costs more than a larger one. As many sizes as the first round's share of the time allows, but always some beyond a
    single tree: what is not timed is extrapolated. Where graphs are replayed the sizes are their buckets, and the table
    is a staircase up to the largest of them.
    """
    began = time.perf_counter()
    has_graphs = target.graphs is not None
    least_ms: dict[int, float] = {}
    count, most = 1, config.max_num_batched_tokens
    while count <= most and (time.perf_counter() - began < _FIRST_ROUND_S or count <= 2 * config.tree_rows):
        _timed(target, config, num_pages, count)  # the first of its size prepares what later ones find
        least_ms[count] = _timed(target, config, num_pages, count)
        count = bucket(count + 1) if has_graphs else count + max(1, count // 2)
    for number in range(_MAX_ROUNDS):
        if number >= _MIN_ROUNDS and time.perf_counter() - began > _PROFILE_S:
            break
        for size in least_ms:
            least_ms[size] = min(least_ms[size], _timed(target, config, num_pages, size))
    ms_T = np.minimum.accumulate(list(least_ms.values())[::-1])[::-1]
    timed = RowCosts(np.array(list(least_ms), dtype=np.float64), ms_T)
    if not has_graphs:
        return timed
    return timed.in_buckets(max(size.rows for size in graph_sizes(config.max_num_seqs, config.tree_rows)))


def _timed(target: Target, config: EngineConfig, num_pages: int, num_rows: int) -> float:
    """One forward of so many rows, in trees behind a context of modest length. All share the same pages: what they
    write there is never read."""
    num_slots = min(_PROFILE_SLOTS, config.max_model_len, (num_pages - 1) * config.page_size)
    # A graph is captured for rows and requests: there is one for as few requests as can have so many rows.
    size = min(_TREE_ROWS if target.graphs is None else bucket(config.tree_rows), num_slots)
    sizes = [size] * (num_rows // size) + [num_rows % size] * (num_rows % size > 0)
    request = Request(Submit(id=0, prompt=[0] * (num_slots - size + 1), max_tokens=1), Rule.COUPLED, None, 0)
    request.pages = list(range(1, 1 + -(-num_slots // config.page_size)))
    step = pack_target(_chains(sizes), [request] * len(sizes), [], [], config.page_size, ())
    began = time.perf_counter()
    target.run(step, 0)
    return 1e3 * (time.perf_counter() - began)


def _chains(sizes: list[int]) -> TreeBatch:
    row_N = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
    count = len(row_N)
    return TreeBatch(
        offsets=torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32),
        token_N=torch.zeros(count, dtype=torch.int32),
        parent_N=torch.from_numpy(row_N - 1),
        depth_N=torch.from_numpy(row_N),
        ancestors_N=torch.from_numpy((np.int64(2) << row_N.astype(np.int64)) - 1),
        kind_N=torch.where(torch.from_numpy(row_N) > 0, NodeKind.DETERMINISTIC, NodeKind.ROOT).to(torch.uint8),
        weight_N=torch.ones(count),
    )


def given(prices: Prices) -> RowCosts:
    """The table of a target whose forward is one step and so many rows."""
    rows_T = np.array([1.0, 4096.0])
    return RowCosts(rows_T, prices.step + rows_T * prices.row)


class Bill:
    """A cost as a sum of terms, price x quantity, whose prices follow what was really paid.

    Each measurement moves the prices by the least change, large terms before small ones, that explains part of its
    error (normalised LMS). Errors count up to half the estimate, so that a hiccup of the machine passes unnoticed and
    the estimate tends to the median. What is measured rarely counts for more.
    """

    _RATE, _RARE_RATE = 0.08, 0.4
    _MAX_ERROR = 0.5

    def __init__(self, *prices: float, is_given: bool = False) -> None:
        self._price_J = np.array(prices)
        self._is_given = is_given  # then it follows nothing
        self._num_paid = 0

    def price(self, *quantities: np.ndarray | float) -> np.ndarray:
        """Of one bill, or of several if some quantities are arrays."""
        return sum((price * np.asarray(q) for price, q in zip(self._price_J, quantities, strict=True)), np.zeros(()))

    def follow(self, other: Bill) -> None:
        """Until something was paid on it, what another bill has learnt is the best guess."""
        if not self._num_paid:
            self._price_J = other._price_J.copy()

    def paid(self, amount: float, *quantities: float, is_rare: bool = False) -> None:
        if self._is_given:
            return
        term_J = self._price_J * quantities
        estimate = float(term_J.sum())
        if not self._num_paid:
            self._price_J *= amount / estimate  # the first measurement tells the scale
        else:
            error = np.clip(amount / estimate - 1, -self._MAX_ERROR, self._MAX_ERROR)
            rate = max(self._RARE_RATE if is_rare else self._RATE, 0.5 / self._num_paid)
            self._price_J *= 1 + rate * error * estimate * term_J / float(term_J @ term_J)
        self._num_paid += 1
