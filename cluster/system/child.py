"""Runs a module in a process that dies with its parent: `python -m cluster.system.child PARENT_PID MODULE ARGS...`.

The kernel kills this process when the *thread* that started it ends, so start it from a thread that lives as long as
the engine. The module gets ARGS as after `python -m MODULE ARGS...`.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import traceback

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends. Does nothing outside Linux."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        sys.exit("the parent process is gone")


def run(module: str, arguments: list[str]) -> int:
    """Run the module as `python -m` does and return its exit code."""
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
            return 1
        return exit.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    code = run(sys.argv[2], sys.argv[3:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the orderly shutdown of torch and transformers takes up to 4 s of CPU time and gains nothing.
    os._exit(code)
