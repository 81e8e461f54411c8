"""Progress lines on the terminal while a service starts."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

REPEAT_S = 10.0
"""Repeat the line at this interval."""
_LOOK_S = 0.5


class Progress:
    """Prints lines such as `secateur: 12 s, starting Ray Serve` to stderr, or nothing at all."""

    def __init__(self, *, is_shown: bool = True) -> None:
        self._is_shown = is_shown
        self._began = time.monotonic()

    def say(self, what: str) -> None:
        """Print one line with the seconds since the start."""
        if self._is_shown:
            print(f"secateur: {time.monotonic() - self._began:.0f} s, {what}", file=sys.stderr, flush=True)

    @contextmanager
    def during(self, what: str, stage: Callable[[], str | None] = lambda: None) -> Iterator[None]:
        """Print `what` or the current stage now, at each change, and every REPEAT_S seconds during the context."""
        if not self._is_shown:
            yield
            return
        ended = threading.Event()
        self.say(what)
        thread = threading.Thread(target=self._repeat, args=(what, stage, ended), name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(REPEAT_S)  # `stage` must not call a Ray that has shut down

    def _repeat(self, what: str, stage: Callable[[], str | None], ended: threading.Event) -> None:
        last, said = what, time.monotonic()
        while not ended.wait(_LOOK_S):
            now = stage() or what
            if now != last or time.monotonic() - said >= REPEAT_S:
                self.say(now if now != last else f"still {now}")
                last, said = now, time.monotonic()
