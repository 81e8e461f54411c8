"""Whether drafting is on, and when the choice not taken is put to the test.

The other choice is tried for a step now and then, as often as a small share of the time pays for what is lost by it,
or less where there is little hope.
"""

from __future__ import annotations

_TRY_EVERY = 8  # steps between two tries, at least
_WEIGH_EVERY = 64  # steps between two that ask whether drafting would pay, while it is off
_PRICE_EVERY = 31  # steps between two that teach what plain ones take, while off; not 32: some work recurs every 16
_TRY_SHARE = 0.004  # of all time may be lost to tries of what is expected to be nearly as good as what is chosen
_HYSTERESIS = 1.05


class Switch:
    """Asked before every step: `rests`, and `weigh` if it does not; told after it: `pay`."""

    def __init__(self) -> None:
        self.is_on = True
        self.is_trial = False  # in this step
        self.advantage = 1.0  # of drafting, as expected of the last step that was weighed
        self._waited = _TRY_EVERY - 2  # steps since a try; the first is soon: all is guessed yet
        self._unweighed = 0  # steps since one was weighed
        self._owed_ms = 0.0  # lost to tries, beyond their share so far
        self._num_weighed = 0  # requests of the last step that was weighed

    @property
    def drafts(self) -> bool:
        """Whether somebody is drafted for in this step, as it was weighed."""
        return self.is_on != self.is_trial

    @property
    def is_priced(self) -> bool:
        """Whether this plain step teaches what plain steps take."""
        return self._waited % _PRICE_EVERY == 0

    def rests(self, num_decoding: int) -> bool:
        """A new step: whether it is plain without anybody asking why. Weighing takes time: while drafting is off it
        is done rarely, and when a try has taught what drafting takes or the batch has become another one."""
        tried, self.is_trial = self.is_trial, False
        is_other_batch = num_decoding > 0 and 4 * abs(num_decoding - self._num_weighed) > self._num_weighed
        is_due = tried or is_other_batch or self._unweighed + 1 >= _WEIGH_EVERY
        rests = not (self.is_on or self._may_try or is_due)
        self._waited += rests
        self._unweighed += rests
        return rests

    def weigh(self, advantage: float, num_decoding: int) -> None:
        """Settles whether drafting is on and whether this step tries the opposite. `advantage`: the expected pace with
        drafts over the one without."""
        self.advantage, self._num_weighed, self._unweighed = advantage, num_decoding, 0
        prefers = advantage * _HYSTERESIS > 1 if self.is_on else advantage > _HYSTERESIS
        if prefers != self.is_on:
            self.is_on, self._waited = prefers, 0
        self._waited += 1
        self.is_trial = self._may_try
        if self.is_trial:
            self._waited = 0

    def pay(self, step_ms: float, otherwise_ms: float) -> None:
        """What the step took, and what its tokens would have taken without a try."""
        if self._owed_ms:
            hope = min(self.advantage, 1 / self.advantage)
            self._owed_ms = max(0.0, self._owed_ms - _TRY_SHARE * hope * step_ms)
        if self.is_trial:
            self._owed_ms += max(0.0, step_ms - otherwise_ms)

    @property
    def _may_try(self) -> bool:
        return self._waited > _TRY_EVERY and not self._owed_ms
