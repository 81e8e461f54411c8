"""This process's descendants, so that the demo and the tests can check that none is left."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path


def descendants() -> list[int]:
    """Return the ids of this process's descendants, from /proc; [] where /proc does not exist."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if (fields := stat_of(int(entry.name))) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, frontier = [], [os.getpid()]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def name_of(pid: int) -> str:
    """Return the name of a process, or "" if it does not exist."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    fields = stat_of(pid)
    return fields is not None and fields[0] != "Z"


def wait_gone(pids: Iterable[int], *, timeout_s: float) -> list[int]:
    """Wait up to `timeout_s` for processes to end and return those that still run."""
    left, deadline = list(pids), time.monotonic() + timeout_s
    while (left := [pid for pid in left if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def stat_of(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
