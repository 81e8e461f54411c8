"""Whether half-batches take turns, so that the drafter drafts for one while the target verifies the other.

A round of a whole batch takes its verification and the wait for its drafts. A round in turns takes twice the longer of
verifying and drafting half of the batch. So turns pay where drafting is dear and half a batch is verified in much less
time than a whole one. They are tried where that is forecast, and kept while they are measured to be faster. Every
decision depends on past steps only, so it may concern sampled trees as well.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

_LEAST_ROUNDS = 8  # measured before a decision
_MARGIN = 1.03  # by which turns must be forecast to be faster
_FIRST_PAUSE, _MOST_PAUSE = 256, 4096  # rounds before turns that did not pay are tried again
_RATE = 0.1  # of the averages, after 1 / _RATE rounds


class Round(NamedTuple):
    """One measured step with trees and without prompts, and a forecast for half of its requests. In milliseconds."""

    verify_ms: float
    wait_ms: float  # for the drafts, as the engine felt it
    half_verify_ms: float
    half_draft_ms: float  # on the drafter's own clock


class Alternation:
    """Decides whether half-batches take turns. `is_on` changes in `observe` and `rest` alone."""

    def __init__(self, overlap: Literal["auto", "none", "predraft", "alternate"], *, is_possible: bool) -> None:
        self._is_forced = overlap == "alternate"
        self._is_open = overlap == "auto" and is_possible
        self._is_on = False
        self._num_decoding = 0  # of the measured rounds
        self._whole, self._forecast, self._turns = _Mean(), _Mean(), _Mean()  # milliseconds of a round
        self._pause, self._num_paused = 0, 0

    def is_on(self, num_decoding: int) -> bool:
        """Return whether the next step verifies only half of so many requests."""
        return num_decoding > 1 and (self._is_forced or self._is_on)

    def rest(self) -> None:
        """Verify whole batches: drafting is off."""
        self._is_on, self._num_decoding = False, 0

    def observe(self, num_decoding: int, own: Round) -> None:
        """Learn from a step. num_decoding: of all requests, those that rested included."""
        if not self._is_open or num_decoding < 2:
            return
        if 4 * abs(num_decoding - self._num_decoding) > self._num_decoding:
            self._is_on, self._num_decoding = False, num_decoding
            self._whole, self._forecast = _Mean(), _Mean()
        self._num_paused += 1
        if self._is_on:
            self._turns.add(2 * (own.verify_ms + own.wait_ms))
            if self._turns.count >= _LEAST_ROUNDS and self._turns.value > self._whole.value:
                self._is_on, self._num_paused = False, 0
                self._pause = min(max(2 * self._pause, _FIRST_PAUSE), _MOST_PAUSE)
            return
        self._whole.add(own.verify_ms + own.wait_ms)
        self._forecast.add(2 * max(own.half_verify_ms, own.half_draft_ms))
        if self._whole.count >= _LEAST_ROUNDS and self._num_paused >= self._pause:
            self._is_on = _MARGIN * self._forecast.value < self._whole.value
            self._turns = _Mean(count=-1)  # the first one waits for its own drafts


class _Mean:
    """The mean of the first values, then of recent ones. A negative count leaves out so many values."""

    def __init__(self, count: int = 0) -> None:
        self.value, self.count = 0.0, count

    def add(self, value: float) -> None:
        self.count += 1
        if self.count > 0:
            self.value += max(_RATE, 1 / self.count) * (value - self.value)
