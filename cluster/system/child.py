"""Runs a module in a process that dies with its parent: `python -m cluster.system.child PARENT_PID MODULE ARGS...`.

The module gets ARGS as after `python -m MODULE ARGS...`. `start_child` starts such a process.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_PR_SET_PDEATHSIG = 1
_STARTER = ThreadPoolExecutor(1, "children")
"""The kernel kills a child when the *thread* that started it ends. This one ends with the process."""


def start_child(module: str, arguments: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a module in a process that dies with this one. options: of `subprocess.Popen`, beside the defaults here.

    In its own process group it does not get the terminal's Ctrl-C: this process stops its children in order.
    """
    command = [sys.executable, "-P", "-m", __spec__.name, str(os.getpid()), module, *arguments]
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "text": True, "errors": "replace", "process_group": 0}
    return _STARTER.submit(lambda: subprocess.Popen(command, **{**given, **options})).result()


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
