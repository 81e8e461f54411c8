"""The processor cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""The quota of a container, in microseconds, and the period that it is for. Example: "400000 100000" for four cores."""


def num_cores() -> int:
    """Return the number of cores: those of the process's affinity, or its container's quota if that is less.

    A container with a limit sees all cores of its node, and threads beyond the limit would stop one another.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_MAX.read_text().split()
    except (OSError, ValueError):  # no container, or an older kernel's
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
