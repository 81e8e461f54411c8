"""Runs a worker module so that it cannot outlive its parent: `python -m cluster.child PARENT_PID MODULE ARGS...`.

The kernel kills this process when the *thread* that started it ends, so start it from a thread that lives as long as
the engine. The module sees the arguments as its own, as after `python -m MODULE ARGS...`.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process as soon as its parent is gone, however that went. Linux only; elsewhere a no-op."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        sys.exit("the parent process is gone")


if __name__ == "__main__":
    _, parent_pid, module, *arguments = sys.argv
    die_with_parent(int(parent_pid))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
