"""SIGINT and SIGTERM handling: the first signal stops the service in order, the third kills it."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, NoReturn, Self

from cluster.system.processes import descendants, wait_gone

STOPS = (signal.SIGINT, signal.SIGTERM)
KILLS_AT = 3
"""The number of signals that kill all processes. Two may be one request: some supervisors signal process and group."""


class StopSignals:
    """A context in which the first signal raises KeyboardInterrupt, so that `finally` blocks clean up.

    The second signal does not interrupt the clean-up, because half a clean-up leaves processes behind. The third kills
    this process and all its descendants. Both signals are handled even if they were ignored, as SIGINT is in a process
    that a script started with `&`. Outside the main thread nothing changes: only that thread receives signals.
    """

    def __init__(self) -> None:
        self._count = 0
        self._is_cleaning = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in STOPS}
        self.install()
        return self

    def install(self) -> None:
        """Install the handlers, again if another library has replaced them: `ray.init` lets SIGTERM abort."""
        if threading.current_thread() is threading.main_thread():
            for number in STOPS:
                signal.signal(number, self._receive)

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def clean_up(self) -> None:
        """Mark the start of the clean-up: from now on even a first signal does not interrupt."""
        self._is_cleaning = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count >= KILLS_AT:
            _say("is killed, with all its processes")
            _kill_all()
        _say(f"is stopping; {KILLS_AT - self._count} more of this signal will kill it at once")
        if not self._is_cleaning:
            self._is_cleaning = True
            raise KeyboardInterrupt


def _kill_all() -> NoReturn:
    while below := descendants():
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # it has just ended, or is not ours
                pass
        if not wait_gone(below, timeout_s=1.0):
            break
    os._exit(128 + signal.SIGKILL)


def _say(what: str) -> None:
    # Not print: the signal may have interrupted one.
    os.write(2, f"Secateur {what}\n".encode())
