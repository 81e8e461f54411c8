"""Whether half-batches take turns, so that the drafter drafts for one while the target verifies the other.

A round of a whole batch takes its verification and the wait for its drafts. A round in turns takes twice the longer of
verifying and drafting half of the batch. So turns pay where drafting is dear and half a batch is verified in much less
time than a whole one. For each size of batch they are tried where that is forecast, and kept while they are measured to
be faster. Every decision depends on past steps only, so it may concern sampled trees as well.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from workers.config import Overlap

_LEAST_ROUNDS = 8  # measured before a decision
_MARGIN = 1.03  # by which turns must be forecast to be faster
_FIRST_PAUSE, _MOST_PAUSE = 256, 4096  # rounds before turns that did not pay are tried again
_MOST_ROUNDS = 4096  # in turns, before whole batches are measured again
_RATE = 0.1  # of the averages, after 1 / _RATE rounds


class Round(NamedTuple):
    """One measured step with trees and without prompts, and a forecast for half of its requests. In milliseconds."""

    verify_ms: float
    wait_ms: float  # for the drafts, as the engine felt it
    half_verify_ms: float
    half_draft_ms: float  # on the drafter's own clock


class Alternation:
    """Decides whether half-batches take turns, for each size of batch. It changes in `observe` and `rest` alone."""

    def __init__(self, overlap: Overlap, *, is_possible: bool) -> None:
        self._is_forced = overlap == "alternate"
        self._is_open = overlap == "auto" and is_possible
        self._rests = False
        self._sizes: defaultdict[int, _Size] = defaultdict(_Size)

    def is_on(self, num_decoding: int) -> bool:
        """Return whether the next step verifies only half of so many requests."""
        if num_decoding < 2 or self._rests:
            return False
        return self._is_forced or (self._is_open and self._size(num_decoding).is_on)

    def rest(self) -> None:
        """Verify whole batches until the next step with trees: drafting is off."""
        self._rests = True

    def observe(self, num_decoding: int, measure: Callable[[], Round]) -> None:
        """Learn from a step. num_decoding: of all requests, those that rested included.

        measure: called where turns can be taken.
        """
        self._rests = False
        if self._is_open and num_decoding > 1:
            self._size(num_decoding).observe(measure())

    def _size(self, num_decoding: int) -> _Size:
        """Return what is known of batches that are larger or smaller by a tenth at most."""
        return self._sizes[round(4 * math.log2(num_decoding))]


class _Size:
    """Batches of about one size: the milliseconds of their rounds, and whether they take turns."""

    def __init__(self) -> None:
        self.is_on = False
        self._pause, self._num_whole = 0, 0
        self._measure()

    def _measure(self) -> None:
        self.is_on, self._num_whole = False, 0
        self._whole, self._forecast, self._turns = _Mean(), _Mean(), _Mean()

    def observe(self, own: Round) -> None:
        if self.is_on:
            self._turns.add(2 * (own.verify_ms + own.wait_ms))
            if self._turns.count >= _MOST_ROUNDS:
                self._measure()
            elif self._turns.count >= _LEAST_ROUNDS and self._turns.value > self._whole.value:
                self._measure()
                self._pause = min(max(2 * self._pause, _FIRST_PAUSE), _MOST_PAUSE)
            return
        self._num_whole += 1
        self._whole.add(own.verify_ms + own.wait_ms)
        self._forecast.add(2 * max(own.half_verify_ms, own.half_draft_ms))
        if self._num_whole >= max(_LEAST_ROUNDS, self._pause):
            self.is_on = _MARGIN * self._forecast.value < self._whole.value
            self._turns = _Mean(count=-1)  # the first one waits for its own drafts


class _Mean:
    """The mean of the first values, then of recent ones. A negative count leaves out so many values."""

    def __init__(self, count: int = 0) -> None:
        self.value, self.count = 0.0, count

    def add(self, value: float) -> None:
        self.count += 1
        if self.count > 0:
            self.value += max(_RATE, 1 / self.count) * (value - self.value)
