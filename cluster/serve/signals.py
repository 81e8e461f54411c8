"""What SIGINT and SIGTERM do to a service: the first one stops it in order, the third ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, Self

from cluster.system.processes import descendants, wait_gone

STOPS = (signal.SIGINT, signal.SIGTERM)
KILLS_AT = 3
"""So many signals end every process at once. Two are not meant so: some supervisors signal a process and its group."""


class StopSignals:
    """A context in which the first signal raises KeyboardInterrupt, so that the `finally` blocks clean up.

    No further one breaks that off: half a clean-up leaves processes behind. The third kills all processes below this
    one, and this one. Both signals are handled even if they were ignored, as SIGINT is where a script has started this
    with `&`. Outside the main thread, which alone gets signals, nothing changes.
    """

    def __init__(self) -> None:
        self._count = 0
        self._is_cleaning = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in STOPS}
        self.take()
        return self

    def take(self) -> None:
        """Handles the signals, whoever has come to handle them meanwhile: `ray.init` lets SIGTERM abort the process."""
        if threading.current_thread() is threading.main_thread():
            for number in STOPS:
                signal.signal(number, self._receive)

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def clean_up(self) -> None:
        """From now on a first signal interrupts nothing either: the end has come without one."""
        self._is_cleaning = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count >= KILLS_AT:
            _say("is killed, with all its processes")
            _kill_all()
        elif self._is_cleaning:
            _say(f"is stopping; {KILLS_AT - self._count} more of this signal will kill it at once")
        else:
            self._is_cleaning = True
            raise KeyboardInterrupt


def _kill_all() -> None:
    while below := descendants():
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # it has just ended, or is nobody's business of ours
                pass
        if not wait_gone(below, timeout_s=1.0):
            break
    os._exit(128 + signal.SIGKILL)


def _say(what: str) -> None:
    # Not print: the signal may have come in the midst of one.
    os.write(2, f"Secateur {what}\n".encode())
