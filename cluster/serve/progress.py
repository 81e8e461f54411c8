"""What is being done between start and readiness, with seconds: for whoever waits in front of a terminal.

The engine starts in other processes. These write their stage into Ray's key-value store, where the one that waits
reads it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

REPEAT_S = 10.0
"""A line at least so often."""
_LOOK_S = 0.5
_STAGE = b"secateur_stage"


def tell(stage: str) -> None:
    """What the engine's start has come to, for `told` in another process of the same Ray."""
    _internal_kv_put(_STAGE, stage.encode(), overwrite=True)


def told() -> str | None:
    """The stage, None before the first."""
    stage = _internal_kv_get(_STAGE)
    return stage.decode() if stage else None


def forget() -> None:
    """Removes the stage of an earlier start on the same Ray."""
    _internal_kv_del(_STAGE)


class Progress:
    """Lines such as `secateur: 12 s, starting Ray Serve`, on stderr."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def say(self, what: str) -> None:
        print(f"secateur: {time.monotonic() - self._began:.0f} s, {what}", file=sys.stderr, flush=True)

    @contextmanager
    def during(self, what: str, stage: Callable[[], str | None] = lambda: None) -> Iterator[None]:
        """Says `what`, or the stage it is in, at once, when that changes, and again while it lasts."""
        ended = threading.Event()
        self.say(what)
        thread = threading.Thread(target=self._repeat, args=(what, stage, ended), name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(REPEAT_S)  # `stage` must not ask a Ray that is shut down

    def _repeat(self, what: str, stage: Callable[[], str | None], ended: threading.Event) -> None:
        last, said = what, time.monotonic()
        while not ended.wait(_LOOK_S):
            now = stage() or what
            if now != last or time.monotonic() - said >= REPEAT_S:
                self.say(now if now != last else f"still {now}")
                last, said = now, time.monotonic()
