"""Progress lines on the terminal while the service starts.

The engine starts in other processes. They write their stage to Ray's key-value store, and the waiting process reads it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

REPEAT_S = 10.0
"""Repeat the line at this interval."""
_LOOK_S = 0.5
_STAGE = b"secateur_stage"


def report_stage(stage: str) -> None:
    """Publish the stage that the engine's start has reached, for `current_stage` in another process."""
    _internal_kv_put(_STAGE, stage.encode(), overwrite=True)


def current_stage() -> str | None:
    """Return the published stage, or None before the first."""
    stage = _internal_kv_get(_STAGE)
    return stage.decode() if stage else None


def clear_stage() -> None:
    """Remove the stage of an earlier start on the same Ray."""
    _internal_kv_del(_STAGE)


class Progress:
    """Prints lines such as `secateur: 12 s, starting Ray Serve` to stderr."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def say(self, what: str) -> None:
        """Print one line with the seconds since the start."""
        print(f"secateur: {time.monotonic() - self._began:.0f} s, {what}", file=sys.stderr, flush=True)

    @contextmanager
    def during(self, what: str, stage: Callable[[], str | None] = lambda: None) -> Iterator[None]:
        """Print `what` or the current stage now, at each change, and every REPEAT_S seconds during the context."""
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
