"""Which processes come from us, and whether they have gone: proof for the demo and the tests that nothing is left."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path


def descendants() -> list[int]:
    """Process ids below this process, from /proc; [] where there is none."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if (fields := _stat(int(entry.name))) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, frontier = [], [os.getpid()]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def name_of(pid: int) -> str:
    """The name of a process, "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    """A zombie has ended: it only waits to be noticed."""
    fields = _stat(pid)
    return fields is not None and fields[0] != "Z"


def wait_gone(pids: Iterable[int], *, timeout_s: float) -> list[int]:
    """Those of `pids` that still run after `timeout_s`."""
    left, deadline = list(pids), time.monotonic() + timeout_s
    while (left := [pid for pid in left if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
