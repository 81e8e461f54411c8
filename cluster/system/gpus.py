"""The GPUs that this process may use, found without initialising CUDA, which would take memory on each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"
_WSL_TOOLS = "/usr/lib/wsl/lib"
_TIMEOUT_S = 30


def gpu_names(dev: Path = Path("/dev")) -> list[str]:
    """Return the names by which CUDA_VISIBLE_DEVICES gives each of them to a process: indices, or UUIDs of MIG slices.

    CUDA itself shows a process one slice at the most, and on WSL2 there are no device files to count.
    """
    listed = _listed()
    if listed is None:
        files = [path.name.removeprefix("nvidia") for path in dev.glob("nvidia*")]
        listed = {index: [] for index in sorted(filter(str.isdigit, files), key=int)}
    visible = os.environ.get(VARIABLE)
    if visible is None:
        return [name for index, slices in listed.items() for name in slices or [index]]
    names: dict[str, None] = {}
    for name in map(str.strip, visible.split(",")):
        if not listed or not name or (re.fullmatch(r"-?\d+", name) and name not in listed):
            break  # like CUDA, which ignores everything from the first name on that it does not know
        names[name] = None
    return list(names)


def _listed() -> dict[str, list[str]] | None:
    """Return the index of each GPU and the UUIDs of its MIG slices, as nvidia-smi tells; None if it does not."""
    tool = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=_WSL_TOOLS)
    if tool is None:
        return None
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if gpu := re.match(r"GPU (\d+):", line):
            found[gpu[1]] = []
        elif found and (mig := re.search(r"\(UUID: (MIG-[^)]+)\)", line)):
            next(reversed(found.values())).append(mig[1])
    return found
