"""The counts of a batch run, and its progress: a bar on a terminal; elsewhere, as in a job of Kubernetes, lines."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_PERIOD_S = 10.0


@dataclass(slots=True)
class BatchSummary:
    """The result of a run. Token counts exclude lines that an earlier run answered."""

    total: int = 0
    resumed: int = 0
    """Lines that an earlier run answered."""
    changed: int = 0
    """Lines that changed after an earlier run answered them; this run answers them again."""
    succeeded: int = 0
    failed: int = 0
    first_failure: str = ""
    """The custom_id of the first line that failed, and its error."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """Return 0 if every line is answered, 130 after Ctrl-C, else 1."""
        if self.interrupted:
            return 130
        return 1 if self.failed else 0

    def __str__(self) -> str:
        lines = f"{self.total} lines: {self.resumed} already done, {self.succeeded} succeeded, {self.failed} failed"
        open_lines = self.total - self.resumed - self.succeeded - self.failed
        return (
            lines
            + (f", {open_lines} not sent (interrupted)" if self.interrupted else "")
            + f"; {self.prompt_tokens} prompt and {self.completion_tokens} completion tokens in {self.seconds:.1f} s"
            + (f"\nfirst failure: {self.first_failure}" if self.first_failure else "")
        )


def progress_bar(summary: BatchSummary, shown: bool | None) -> Progress:
    """Return a bar of the lines that are answered; shown: None = on a terminal."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not (console.is_terminal if shown is None else shown),
    )
    bar.add_task("batch", total=summary.total, completed=summary.resumed)
    return bar


@asynccontextmanager
async def progress_lines(counts: BatchSummary, period_s: float = LINE_PERIOD_S) -> AsyncIterator[None]:
    """Print a line to stderr every `period_s` seconds while the context lasts."""
    task = asyncio.create_task(_print_lines(counts, period_s))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _print_lines(counts: BatchSummary, period_s: float) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(period_s)
        print(progress_line(counts, time.monotonic() - began), file=sys.stderr, flush=True)


def progress_line(counts: BatchSummary, seconds: float) -> str:
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
