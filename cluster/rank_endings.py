"""Which rank's end was the death of its engine: the others follow within a moment, and may be noticed first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

SETTLE_S = 1.0
_PERIOD_S = 0.05


class Blame(IntEnum):
    """How likely an ending is the cause of the others, the likeliest first."""

    KILLED = 0  # from outside, or by a crash: it could not say anything
    FAILED = 1  # with an error of its own
    LOST_A_PEER = 2
    STOPPED = 3


class Ending(NamedTuple):
    """Example: Ending(Blame.KILLED, "verifier 1 (pid 4711) was ended by SIGKILL")"""

    blame: Blame
    told: str


def cause(endings: Callable[[], Sequence[Ending]], *, settle_s: float = SETTLE_S) -> Ending:
    """The ending that brought about the others. `endings` looks who has ended; at least one has, in rank order.

    Blocks until a rank is found that was killed, at most settle_s seconds: a killed process tells nobody, so the peers
    that lost it are often heard first.
    """
    deadline = time.monotonic() + settle_s
    while True:
        found = min(endings(), key=lambda ending: ending.blame)
        if found.blame is Blame.KILLED or time.monotonic() >= deadline:
            return found
        time.sleep(_PERIOD_S)
