"""Timelines: which part of its work a rank did when, for `bench.overlap`.

Times are `time.perf_counter()` seconds. All processes of a machine read the same clock, so the timelines of an engine's
ranks on one machine can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_spans: list[tuple[str, float, float]] | None = None  # None = nothing is recorded


@contextmanager
def recorded(file: Path) -> Iterator[None]:
    """Record within this context, and write a list of [part, began, ended] at its end."""
    global _spans
    _spans = []
    try:
        yield
    finally:
        file.write_text(json.dumps(_spans))
        _spans = None


def record(part: str, began: float, ended: float) -> None:
    """Record a part of the work. Does nothing outside of `recorded`."""
    if _spans is not None:
        _spans.append((part, began, ended))
