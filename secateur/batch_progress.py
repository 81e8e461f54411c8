"""Progress of a batch where no terminal shows a bar, as in a job of Kubernetes: a line every ten seconds."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Protocol

LINE_PERIOD_S = 10.0


class BatchCounts(Protocol):
    """The counts of a run, see `secateur.batch.BatchSummary`."""

    total: int
    resumed: int
    succeeded: int
    failed: int


@asynccontextmanager
async def progress_lines(counts: BatchCounts, period_s: float = LINE_PERIOD_S) -> AsyncIterator[None]:
    """Print a line to stderr every `period_s` seconds while the context lasts."""
    task = asyncio.create_task(_print_lines(counts, period_s))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _print_lines(counts: BatchCounts, period_s: float) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(period_s)
        print(progress_line(counts, time.monotonic() - began), file=sys.stderr, flush=True)


def progress_line(counts: BatchCounts, seconds: float) -> str:
    """Return what a run of so many seconds has answered, at which rate, and the time that the rest would take."""
    answered = counts.succeeded + counts.failed
    done, rate = counts.resumed + answered, answered / seconds
    failed = f", {counts.failed} failed" if counts.failed else ""
    rest = f", {_duration((counts.total - done) / rate)} left" if answered else ""
    return f"secateur: batch: {done} of {counts.total} lines{failed}, {rate:.1f} lines/s{rest}"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
