"""The speculation gate: whether drafting is on, and when a step probes drafting while it is off.

Drafting is on while its forecast is better than that of plain decoding. While it is off, nothing measures its cost, so
up to eight steps in a row probe it: one tree tells little. From the first step of one probe to that of the next so many
steps pass, 16 to 512, that the time which the probe lost is 0.3 % of theirs. A probe that has lost three plain steps
ends (0.6 % of 512). Feeding the drafter what it has missed alone takes up to one and a half of the three.
The first probe of n requests waits for 32 sqrt(n) steps, because it slows all of them to learn from one.
Plain decoding needs no probes, because steps with trees measure the target as well.
"""

from __future__ import annotations

import math

_PROBE_SHARE = 0.003  # of the time, lost to probes
_FIRST_GAP, _LEAST_GAP, _MOST_GAP = 32, 16, 512  # steps before one request's first probe, and from one to the next
_PROBE_STEPS = 8
_MOST_LOST = 3.0  # in a probe, in plain steps


class SpeculationGate:
    """Call `begin_step` before each step, then `weigh` unless it returned True."""

    def __init__(self) -> None:
        self.is_on = True
        self.is_probe = False  # this step drafts although plain decoding is forecast to be faster
        self._gap: float = _FIRST_GAP
        self._probes_left = 0  # steps of this probe
        self._lost = 0.0  # in this probe
        self._waited = 0  # steps since drafting was switched off or a probe began
        self._batch = 0  # decoding requests at the last forecast

    def begin_step(self, num_decoding: int) -> bool:
        """Return True for an idle step: drafting is off and no forecast is due.

        A forecast is due in every step of a probe and after it, and when the batch has grown or shrunk by more than a
        quarter.
        """
        was_probe, self.is_probe = self.is_probe, False
        is_other_batch = num_decoding > 0 and 4 * abs(num_decoding - self._batch) > self._batch
        is_due = was_probe or self._probes_left > 0 or is_other_batch
        is_idle = not (self.is_on or self._waited >= self._gap or is_due)
        self._waited += is_idle
        return is_idle

    def weigh(self, advantage: float, num_decoding: int) -> bool:
        """Switch drafting on or off by this forecast, and make a plain step a probe if one is due.

        advantage: the pace with drafts over the pace without. Return whether this step drafts.
        """
        self._batch = num_decoding
        if (advantage > 1) != self.is_on:
            self.is_on, self._waited = not self.is_on, 0
            self._gap = min(max(self._gap, _FIRST_GAP * math.sqrt(num_decoding)), _MOST_GAP)
        self._waited += 1
        if self.is_on:
            self._probes_left = 0
        elif self._waited > self._gap:
            self._waited, self._probes_left, self._lost = 0, _PROBE_STEPS, 0.0
        self.is_probe = self._probes_left > 0
        return self.is_on or self.is_probe

    def observe_probe(self, loss: float) -> None:
        """Count a step of a probe, and set the gap to the next one. loss: the time that it lost, in plain steps."""
        self._lost += loss
        self._probes_left = max(0, self._probes_left - 1) if self._lost < _MOST_LOST else 0
        self._gap = min(max(self._lost / _PROBE_SHARE, _LEAST_GAP), _MOST_GAP)
