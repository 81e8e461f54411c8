"""An engine as plain processes of this machine, without Ray:

    async with LocalEngine(config) as client:
        async for chunk in client.submit(Submit(id=client.new_id(), prompt=[1, 2, 3], max_tokens=8)):
            ...

For tests, benchmarks and machines that have none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import workers
from cluster.engine_client import EngineClient, EngineDead
from cluster.rank_exits import ExitKind, RankExit, root_cause
from cluster.rank_placement import interface_env, num_bundles, rank_placements, worker_env
from cluster.system.temp_dirs import OwnedTempDir
from secateur.errors import ConfigError
from workers.config import START_TIMEOUT_S, EngineConfig
from workers.models.readers import read_specs
from workers.models.specs import Specs

logger = logging.getLogger(__name__)

STORE_TIMEOUT_S = 120.0
"""From starting rank 0 to its store line: importing torch, at worst on a cold disk."""
STOP_TIMEOUT_S = 5.0
_WATCH_PERIOD_S = 0.2


class EngineProcesses:
    """The processes of one engine. Thread-safe; one dead process is the death of all.

    Start them from a thread that lives as long as the engine (see cluster.system.child): `start_first`, `read_store`,
    `start_others`; `close` in any case. `on_death` is called once, from the watching thread, with what died and the end
    of its stderr; not after `close`.
    """

    def __init__(self, config: EngineConfig, specs: Specs, front: str, *, on_death: Callable[[str], None]) -> None:
        self._config = config
        self._specs = specs
        self._front = front
        self._on_death = on_death
        self._children: list[_Child] = []
        self._closing = threading.Event()
        self._lock = threading.Lock()

    @property
    def pids(self) -> list[int]:
        """Return the process ids of all ranks."""
        return [child.process.pid for child in self._children]

    def start_first(self) -> None:
        """Starts rank 0. Raises ConfigError if there are too few devices."""
        self._spawn(0, "--front", self._front)

    def read_store(self) -> str:
        """Waits for rank 0 to name its rendezvous store. Raises EngineDead. The only slow part: seconds of imports."""
        return self._children[0].read_store(STORE_TIMEOUT_S)

    def start_others(self, store: str) -> None:
        """Starts the other ranks and the watch over all."""
        for rank in range(1, self._config.world_size):
            self._spawn(rank, "--store", store)
        threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()

    def expect_end(self) -> None:
        """From now on a process that ends is no death."""
        self._closing.set()

    def close(self) -> None:
        """SIGTERM, a few seconds, SIGKILL; returns when every process is gone. May be called twice."""
        self.expect_end()
        with self._lock:
            children = list(self._children)
        for child in children:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for child in children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("%s did not stop in %.0f s and is killed", child.role, STOP_TIMEOUT_S)
                child.signal(signal.SIGKILL)
                child.process.wait()
        for child in children:
            child.join()

    def kill(self) -> None:
        """SIGKILL to all: a rank that waits inside a collective for a dead peer does not hear SIGTERM."""
        for child in self._children:
            child.signal(signal.SIGKILL)

    def _spawn(self, rank: int, *where: str) -> None:
        placement, devices = rank_placements(self._config)[rank], self._devices()
        module = "verifier" if rank < self._config.tensor_parallel_size else "drafter"
        command = [sys.executable, "-P", "-m", "cluster.system.child", str(os.getpid()), module]
        command += ["--rank", str(rank), "--config", self._config.to_json()]
        command += ["--specs", self._specs.to_json(), *where]
        env = interface_env("127.0.0.1") | os.environ | worker_env(self._config) | {"PYTHONPATH": _python_path()}
        env["CUDA_VISIBLE_DEVICES"] = devices[placement.bundle] if devices else ""
        with self._lock:
            self._children.append(_Child(placement.role, command, env))

    def _devices(self) -> list[str]:
        """Physical devices for the bundles; [] on CPU. Raises ConfigError if fewer are visible."""
        if self._config.device == "cpu":
            return []
        need, visible = num_bundles(self._config), os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return [str(index) for index in range(need)]
        have = [name.strip() for name in visible.split(",") if name.strip()]
        if len(have) < need:
            raise ConfigError(f"the engine needs {need} devices, CUDA_VISIBLE_DEVICES={visible!r} has {len(have)}")
        return have[:need]

    def _watch(self) -> None:
        while not self._closing.wait(_WATCH_PERIOD_S):
            if not self._exits():
                continue
            reason = root_cause(self._exits).message
            if self._closing.is_set():
                return
            self.kill()
            logger.error("%s", reason)
            self._on_death(reason)
            return

    def _exits(self) -> list[RankExit]:
        return [ending for child in self._children if (ending := child.ending()) is not None]


class _Child:
    """One worker process and the threads that read its output (a full pipe would stop it)."""

    def __init__(self, role: str, command: list[str], env: Mapping[str, str]) -> None:
        self.role = role
        self._stderr: deque[str] = deque(maxlen=20)
        self._store: str | None = None
        self._store_known = threading.Event()
        # A process group of its own: Ctrl-C in a terminal is for the parent, which stops its children in order.
        self.process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self._threads = [
            threading.Thread(target=self._read_stdout, args=(self.process.stdout,), daemon=True),
            threading.Thread(target=self._read_stderr, args=(self.process.stderr,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def read_store(self, timeout_s: float) -> str:
        """The address rank 0 prints first, as `store HOST:PORT`. Raises EngineDead."""
        if not self._store_known.wait(timeout_s):
            raise EngineDead(f"{self.role} named no rendezvous store within {timeout_s:.0f} s")
        if self._store is None:
            code = self.process.wait()
            self.join()
            raise EngineDead(f"{self.role} {_ending(code)} before it named a rendezvous store{self.last_words()}")
        return self._store

    def ending(self) -> RankExit | None:
        """How it has ended; None while it runs."""
        if (code := self.process.poll()) is None:
            return None
        self.join()
        words = self.last_words()
        if code <= 0:
            kind = ExitKind.KILLED if code else ExitKind.STOPPED
        else:
            kind = ExitKind.LOST_A_PEER if "PeerLost" in words else ExitKind.FAILED
        return RankExit(kind, f"{self.role} (pid {self.process.pid}) {_ending(code)}{words}")

    def last_words(self) -> str:
        """The end of its stderr, for an error message."""
        return ":\n" + "".join(self._stderr).rstrip() if self._stderr else ""

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def join(self) -> None:
        """Waits until its output has been read (briefly: a grandchild may hold the pipe open)."""
        for thread in self._threads:
            thread.join(1.0)

    def _read_stdout(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                if not self._store_known.is_set() and line.startswith("store "):
                    self._store = line.split()[1]
                    self._store_known.set()
                else:
                    logger.info("%s: %s", self.role, line.rstrip())
        self._store_known.set()

    def _read_stderr(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._stderr.append(line)
                sys.stderr.write(f"[{self.role}] {line}")


class LocalEngine:
    """Socket, processes and supervision of one engine; an async context manager that gives its EngineClient."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.client = EngineClient()
        self._processes: EngineProcesses | None = None
        self._folder: OwnedTempDir | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return self._processes.pids if self._processes else []

    async def start(self) -> None:
        """Returns when the engine serves. Raises EngineDead, TimeoutError, or what `read_specs` does, with nothing left
        running."""
        loop = asyncio.get_running_loop()
        self._folder = OwnedTempDir()
        try:
            front = await self.client.listen(f"unix:{self._folder.path}/engine.sock")
            specs = await asyncio.to_thread(read_specs, self.config)
            self._processes = EngineProcesses(
                self.config, specs, front, on_death=lambda reason: _call(loop, self.client.fail, reason)
            )
            # Started in this thread, not in an executor's: children live as long as the thread that starts them.
            self._processes.start_first()
            self._processes.start_others(await asyncio.to_thread(self._processes.read_store))
            await self.client.wait_ready(START_TIMEOUT_S)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stops the engine and returns when nothing of it is left. May be called twice."""
        if self._processes is not None:
            self._processes.expect_end()
        await self.client.close()
        if self._processes is not None:
            await asyncio.to_thread(self._processes.close)
        if self._folder is not None:
            self._folder.remove()

    async def __aenter__(self) -> EngineClient:
        await self.start()
        return self.client

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[str], None], argument: str) -> None:
    with contextlib.suppress(RuntimeError):  # the loop closed first: nobody is left to tell
        loop.call_soon_threadsafe(function, argument)


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _python_path() -> str:
    """PYTHONPATH that lets children import the same packages we did, from whatever folder they are started."""
    root = str(Path(workers.__file__).parents[1])
    return os.pathsep.join(dict.fromkeys([root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
