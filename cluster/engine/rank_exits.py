"""Finds the rank whose exit stopped an engine. The other ranks exit soon after it and may be noticed first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from secateur.errors import SecateurError

ROOT_CAUSE_WAIT_S = 1.0
_PERIOD_S = 0.05


class EngineDead(SecateurError, RuntimeError):
    """The engine has died, and its requests are lost."""


class ExitKind(IntEnum):
    """Kinds of exits, from the likeliest root cause to the least likely."""

    KILLED = 0  # by a signal or a crash, without a message
    FAILED = 1  # with an error of its own
    LOST_A_PEER = 2
    STOPPED = 3


class RankExit(NamedTuple):
    """One rank's exit. Example: RankExit(ExitKind.KILLED, "verifier 1 (pid 4711) was ended by SIGKILL")."""

    kind: ExitKind
    message: str


async def root_cause(exits: Callable[[], Sequence[RankExit]], *, wait_s: float = ROOT_CAUSE_WAIT_S) -> RankExit:
    """Return the exit that caused the others. `exits` returns the exits so far, at least one, in rank order.

    Waits up to `wait_s` seconds for a rank that was killed, since its peers are often noticed before it.
    """
    deadline = time.monotonic() + wait_s
    while True:
        found = min(exits(), key=lambda exit: exit.kind)
        if found.kind is ExitKind.KILLED or time.monotonic() >= deadline:
            return found
        await asyncio.sleep(_PERIOD_S)
