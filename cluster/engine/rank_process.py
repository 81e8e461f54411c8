"""One rank as a process of this machine, with what it prints and how it ends.

It is a fork of a process that has imported what ranks need (`cluster.system.fork_server`), or a new interpreter.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import workers
from cluster.engine.rank_exits import EngineDead, ExitKind, RankExit
from cluster.engine.rank_placement import worker_env
from cluster.system.child import start_child
from cluster.system.fork_server import ForkedProcess, ForkServer
from workers.config import EngineConfig
from workers.models.specs import Specs

logger = logging.getLogger(__name__)

STORE_TIMEOUT_S = 120.0
"""Time for a first rank to import torch, from a cold disk at worst, and to print its store's address."""
PRELOADED = ("workers.main", "verifier.worker", "drafter.worker", "pydantic.dataclasses", "safetensors")
"""Modules that all ranks import. Triton is not among them, because its import might touch a device."""

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy starts threads when it is imported, but for this. Ranks compute with torch."""


class RankStarter:
    """Starts ranks, and keeps the process from which they are forked, if `config.standby`. Thread-safe.

    env: of all ranks, in addition to this process's. Call `close` in any case; the ranks that were forked end with it.
    """

    def __init__(self, config: EngineConfig, env: Mapping[str, str]) -> None:
        self._has_standby = config.standby and sys.platform == "linux"
        self._env = {**env, **os.environ, **worker_env(config), "PYTHONPATH": _python_path()}
        if self._has_standby:
            self._env |= ONE_THREAD
        self._lock = threading.Lock()
        self._server = ForkServer(PRELOADED, self._env) if self._has_standby else None

    @property
    def standby_pid(self) -> int | None:
        """Return the id of the process from which ranks are forked; None without one."""
        return None if self._server is None else self._server.pid

    def wait_ready(self) -> None:
        """Wait until ranks can be started at once, after seconds of imports."""
        if self._has_standby:
            self._running_server().wait_imported()

    def start(
        self,
        config: EngineConfig,
        specs: Specs,
        rank: int,
        *address: str,
        env: Mapping[str, str],
        on_joined: Callable[[], None] = lambda: None,
    ) -> RankProcess:
        """Start a rank. address: its flags --front and --store. env: its own additions to the environment.

        on_joined: a thread calls it when all ranks have loaded their models, if the rank is the engine's first.
        """
        module = "verifier" if rank < config.tensor_parallel_size else "drafter"
        arguments = ["--rank", str(rank), "--config", config.to_json(), "--specs", specs.to_json(), *address]
        process: subprocess.Popen[str] | ForkedProcess
        if self._has_standby:
            process = self._running_server().start(module, arguments, env)
        else:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = start_child(module, arguments, env={**self._env, **env}, **pipes)
        return RankProcess(config.role_of(rank), process, on_joined)

    def close(self) -> None:
        """End the standby process. May be called twice."""
        with self._lock:
            self._has_standby = False
            if self._server is not None:
                self._server.close()

    def _running_server(self) -> ForkServer:
        with self._lock:
            assert self._server is not None
            if self._server.is_down and self._has_standby:
                logger.warning("the standby process (pid %d) has ended; another one is started", self._server.pid)
                self._server = ForkServer(PRELOADED, self._env)
            return self._server


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

    def exit(self) -> RankExit | None:
        """Return how the process ended; None while it runs."""
        if (code := self.process.poll()) is None:
            return None
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


def _python_path() -> str:
    """Return a PYTHONPATH with which children import the same packages as this process, from any folder."""
    root = str(Path(workers.__file__).parents[1])
    return os.pathsep.join(dict.fromkeys([root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
