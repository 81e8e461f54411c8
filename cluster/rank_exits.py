"""Which rank's end was the death of its engine: the others follow within a moment, and may be noticed first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

ROOT_CAUSE_WAIT_S = 1.0
_PERIOD_S = 0.05


class ExitKind(IntEnum):
    """How likely an exit is the root_cause of the others, the likeliest first."""

    KILLED = 0  # from outside, or by a crash: it could not say anything
    FAILED = 1  # with an error of its own
    LOST_A_PEER = 2
    STOPPED = 3


class RankExit(NamedTuple):
    """Example: RankExit(ExitKind.KILLED, "verifier 1 (pid 4711) was ended by SIGKILL")"""

    kind: ExitKind
    message: str


def root_cause(exits: Callable[[], Sequence[RankExit]], *, wait_s: float = ROOT_CAUSE_WAIT_S) -> RankExit:
    """The exit that brought about the others. `exits` looks who has ended; at least one has, in rank order.

    Blocks until a rank is found that was killed, at most wait_s seconds: a killed process tells nobody, so the peers
    that lost it are often heard first.
    """
    deadline = time.monotonic() + wait_s
    while True:
        found = min(exits(), key=lambda exit: exit.kind)
        if found.kind is ExitKind.KILLED or time.monotonic() >= deadline:
            return found
        time.sleep(_PERIOD_S)
