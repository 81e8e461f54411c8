"""One rank as a process of this machine, with what it prints and how it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import IO

from cluster.engine.rank_exits import EngineDead, ExitKind, RankExit
from cluster.system.fork_server import ForkedProcess

logger = logging.getLogger(__name__)

STORE_TIMEOUT_S = 120.0
"""Time for a first rank to import torch, from a cold disk at worst, and to print its store's address."""


class RankProcess:
    """One rank's process and the threads that read its output, since it would block on a full pipe."""

    def __init__(
        self, role: str, process: subprocess.Popen[str] | ForkedProcess, on_joined: Callable[[], None]
    ) -> None:
        self.role, self.process = role, process
        self.why_killed: str | None = None
        self._on_joined = on_joined
        self._stderr: deque[str] = deque(maxlen=20)
        self._store: str | None = None
        self._store_known = threading.Event()
        assert process.stdout is not None and process.stderr is not None
        self._threads = [
            threading.Thread(target=self._read_stdout, args=(process.stdout,), daemon=True),
            threading.Thread(target=self._read_stderr, args=(process.stderr,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def read_store(self, timeout_s: float = STORE_TIMEOUT_S) -> str:
        """Return the address that a first rank prints, as `store HOST:PORT`. Raises EngineDead."""
        if not self._store_known.wait(timeout_s):
            raise EngineDead(f"{self.role} named no rendezvous store within {timeout_s:.0f} s")
        if self._store is None:
            code = self.process.wait()
            self.join()
            raise EngineDead(f"{self.role} {_describe(code)} before it named a rendezvous store{self._stderr_tail()}")
        return self._store

    def exit(self) -> RankExit:
        """Wait for the process's end and return it."""
        code = self.process.wait()
        self.join()
        stderr = self._stderr_tail()
        if code <= 0:
            kind = ExitKind.KILLED if code else ExitKind.STOPPED
        else:
            kind = ExitKind.LOST_A_PEER if "PeerLost" in stderr else ExitKind.FAILED
        if self.why_killed is not None:
            return RankExit(ExitKind.KILLED, f"{self.why_killed} and was killed (pid {self.process.pid}){stderr}")
        return RankExit(kind, f"{self.role} (pid {self.process.pid}) {_describe(code)}{stderr}")

    def signal(self, number: int) -> None:
        """Send a signal to the process and its own children."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def kill(self, why: str | None = None) -> None:
        """Kill the process. why: what its `exit` then tells, such as "verifier 0 gave no sign of life"."""
        self.why_killed = why or self.why_killed
        self.signal(signal.SIGKILL)

    def join(self) -> None:
        """Wait until its output has been read, for at most 1 s per pipe: a grandchild may keep the pipe open."""
        for thread in self._threads:
            thread.join(1.0)

    def _stderr_tail(self) -> str:
        """Return the end of its stderr, for an error message."""
        return ":\n" + "".join(self._stderr).rstrip() if self._stderr else ""

    def _read_stdout(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                if not self._store_known.is_set() and line.startswith("store "):
                    self._store = line.split()[1]
                    self._store_known.set()
                elif line == "joined\n":
                    self._on_joined()
                else:
                    logger.info("%s: %s", self.role, line.rstrip())
        self._store_known.set()

    def _read_stderr(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._stderr.append(line)
                sys.stderr.write(f"[{self.role}] {line}")


def _describe(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
