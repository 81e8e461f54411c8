"""An engine as plain processes of this machine, without Ray:

    async with LocalEngine(config) as client:
        async for chunk in client.submit(Submit(id=client.new_id(), prompt=[1, 2, 3], max_tokens=8)):
            ...

It serves tests, benchmarks and machines without Ray.
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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

import workers
from cluster.drafter_restart import DrafterRestart
from cluster.engine_client import EngineClient, EngineDead
from cluster.hang_monitor import HangMonitor
from cluster.rank_exits import ExitKind, RankExit, root_cause
from cluster.rank_placement import interface_env, num_bundles, rank_placements, worker_env
from cluster.system.temp_dirs import OwnedTempDir
from secateur.errors import ConfigError
from workers.config import DRAFT_LINK_VARIABLE, PULSE_VARIABLE, START_TIMEOUT_S, EngineConfig
from workers.models.readers import read_specs
from workers.models.specs import Specs

logger = logging.getLogger(__name__)

STORE_TIMEOUT_S = 120.0
"""Time for rank 0 to import torch, from a cold disk at worst, and to print its store's address."""
STOP_TIMEOUT_S = 5.0
_WATCH_PERIOD_S = 0.2


class EngineProcesses:
    """The processes of one engine. Thread-safe. If one process dies, all are killed, but see `tolerate_drafter_loss`.

    Call `start_first`, `read_store` and `start_others` in a thread that lives as long as the engine (see
    cluster.system.child), and `close` in any case. The watcher thread calls `on_death` once, with the dead rank and the
    end of its stderr, but not after `close`. A thread calls `on_joined` when all ranks have loaded their models.
    """

    def __init__(
        self,
        config: EngineConfig,
        specs: Specs,
        front: str,
        *,
        on_death: Callable[[str], None],
        on_joined: Callable[[], None] = lambda: None,
        pulse: str = "",
    ) -> None:
        """pulse: the address to which ranks send signs of life, if they do."""
        self._config = config
        self._specs = specs
        self._front = front
        self._env = {PULSE_VARIABLE: pulse}
        self._on_death = on_death
        self._on_joined = on_joined
        self._children: dict[int, _Child] = {}  # by rank
        self._num_essential = config.world_size  # the engine ends with any of these first ranks
        self._closing = threading.Event()
        self._lock = threading.Lock()

    @property
    def pids(self) -> list[int]:
        """Return the process ids of all ranks."""
        return [child.process.pid for _, child in sorted(self._children.items())]

    def start_first(self) -> None:
        """Start rank 0. Raises ConfigError if there are too few devices."""
        self._spawn(0, "--front", self._front)

    def read_store(self, rank: int = 0) -> str:
        """Return the address of the rank's rendezvous store, after seconds of imports. Raises EngineDead."""
        return self._children[rank].read_store(STORE_TIMEOUT_S)

    def start_others(self, store: str) -> None:
        """Start the other ranks and the thread that watches all ranks."""
        for rank in range(1, self._config.world_size):
            self._spawn(rank, "--store", store)
        threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()

    def tolerate_drafter_loss(self) -> None:
        """Stop treating the exit of a drafter rank as the end of the engine."""
        self._num_essential = self._config.tensor_parallel_size

    def kill_drafter(self) -> None:
        """Kill the drafter's ranks, and wait for them."""
        for child in self._drafter():
            child.signal(signal.SIGKILL)
            child.process.wait()
            child.join()

    def start_drafter(self, num_pages: int, link: str) -> None:
        """Start drafter 0 in place of a killed one.

        num_pages: as the engine's ranks have agreed. link: the address that the engine offers.
        """
        self._start_successor(self._config.tensor_parallel_size, num_pages, link)

    def start_other_drafters(self, store: str, num_pages: int, link: str) -> None:
        """Start the ranks that join drafter 0 at its store."""
        for rank in range(self._config.tensor_parallel_size + 1, self._config.world_size):
            self._start_successor(rank, num_pages, link, "--store", store)

    def has_lost_drafter(self) -> bool:
        """Return whether a rank of the drafter has ended."""
        return any(child.process.poll() is not None for child in self._drafter())

    def _drafter(self) -> list[_Child]:
        with self._lock:
            return [child for rank, child in self._children.items() if rank >= self._config.tensor_parallel_size]

    def kill_rank(self, rank: int, why: str) -> None:
        """Kill a rank that hangs. Its exit is treated like any other."""
        with self._lock:
            child = self._children[rank]
        child.why_killed = why
        child.signal(signal.SIGKILL)

    def expect_end(self) -> None:
        """Stop treating the exit of a process as a failure."""
        self._closing.set()

    def close(self) -> None:
        """Terminate all processes, kill those that do not stop in time, and wait for them. May be called twice."""
        self.expect_end()
        with self._lock:
            children = list(self._children.values())
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
        """Kill all processes. A rank that waits for a dead peer in a collective does not react to SIGTERM."""
        with self._lock:
            children = list(self._children.values())
        for child in children:
            child.signal(signal.SIGKILL)

    def _start_successor(self, rank: int, num_pages: int, link: str, *address: str) -> None:
        config = replace(self._config, num_pages=num_pages)
        self._spawn(rank, *address, config=config, env={DRAFT_LINK_VARIABLE: link})

    def _spawn(
        self, rank: int, *address: str, config: EngineConfig | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        placement, devices = rank_placements(self._config)[rank], self._devices()
        module = "verifier" if rank < self._config.tensor_parallel_size else "drafter"
        command = [sys.executable, "-P", "-m", "cluster.system.child", str(os.getpid()), module]
        command += ["--rank", str(rank), "--config", (config or self._config).to_json()]
        command += ["--specs", self._specs.to_json(), *address]
        given = interface_env("127.0.0.1") | os.environ | worker_env(self._config) | {"PYTHONPATH": _python_path()}
        given["CUDA_VISIBLE_DEVICES"] = devices[placement.bundle] if devices else ""
        with self._lock:
            if self._closing.is_set():
                raise EngineDead("the engine is shutting down")
            self._children[rank] = _Child(
                placement.role, command, {**given, **self._env, **(env or {})}, self._on_joined
            )

    def _devices(self) -> list[str]:
        """Return the devices of the bundles; [] on CPU. Raises ConfigError if too few are visible."""
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
            essential = self._num_essential
            if not self._exits(essential):
                continue
            reason = root_cause(partial(self._exits, essential)).message
            if self._closing.is_set():
                return
            self.kill()
            logger.error("%s", reason)
            self._on_death(reason)
            return

    def _exits(self, num_ranks: int) -> list[RankExit]:
        with self._lock:
            children = [child for rank, child in sorted(self._children.items()) if rank < num_ranks]
        return [exit for child in children if (exit := child.exit()) is not None]


class _Child:
    """One worker process and the threads that read its output, since it would block on a full pipe."""

    def __init__(self, role: str, command: list[str], env: Mapping[str, str], on_joined: Callable[[], None]) -> None:
        self.role = role
        self._on_joined = on_joined
        self.why_killed: str | None = None
        self._stderr: deque[str] = deque(maxlen=20)
        self._store: str | None = None
        self._store_known = threading.Event()
        # In its own process group it does not get the terminal's Ctrl-C: the parent stops its children in order.
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
        """Return the address that rank 0 prints first, as `store HOST:PORT`. Raises EngineDead."""
        if not self._store_known.wait(timeout_s):
            raise EngineDead(f"{self.role} named no rendezvous store within {timeout_s:.0f} s")
        if self._store is None:
            code = self.process.wait()
            self.join()
            raise EngineDead(f"{self.role} {_describe(code)} before it named a rendezvous store{self.stderr_tail()}")
        return self._store

    def exit(self) -> RankExit | None:
        """Return how the process ended; None while it runs."""
        if (code := self.process.poll()) is None:
            return None
        self.join()
        stderr = self.stderr_tail()
        if code <= 0:
            kind = ExitKind.KILLED if code else ExitKind.STOPPED
        else:
            kind = ExitKind.LOST_A_PEER if "PeerLost" in stderr else ExitKind.FAILED
        if self.why_killed is not None:
            return RankExit(ExitKind.KILLED, f"{self.why_killed} and was killed (pid {self.process.pid}){stderr}")
        return RankExit(kind, f"{self.role} (pid {self.process.pid}) {_describe(code)}{stderr}")

    def stderr_tail(self) -> str:
        """Return the end of its stderr, for an error message."""
        return ":\n" + "".join(self._stderr).rstrip() if self._stderr else ""

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def join(self) -> None:
        """Wait until its output has been read, for at most 1 s per pipe: a grandchild may keep the pipe open."""
        for thread in self._threads:
            thread.join(1.0)

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


class LocalEngine:
    """Socket, processes and supervision of one engine. An async context manager that yields its EngineClient."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.client = EngineClient()
        self.stage = f"starting the engine's {config.world_size} processes"
        """What the start is doing, for progress lines."""
        self._processes: EngineProcesses | None = None
        self._restart: DrafterRestart | None = None
        self._monitor: HangMonitor | None = None
        self._folder: OwnedTempDir | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return self._processes.pids if self._processes else []

    async def start(self) -> None:
        """Start the engine and wait until it is ready.

        Raises EngineDead, TimeoutError, or what `read_specs` raises; no process is left running then.
        """
        loop = asyncio.get_running_loop()
        self._folder = OwnedTempDir()
        try:
            front = await self.client.listen(f"unix:{self._folder.path}/engine.sock")
            specs = await asyncio.to_thread(read_specs, self.config)
            pulse = ""
            if self.config.hang_timeout_s:
                self._monitor = HangMonitor(self.config, self._kill_rank)
                pulse = await self._monitor.listen("127.0.0.1")
            self._processes = EngineProcesses(
                self.config,
                specs,
                front,
                on_death=lambda reason: _call(loop, self.client.fail, reason),
                on_joined=lambda: setattr(self, "stage", "warming up"),
                pulse=pulse,
            )
            # Start it in this thread, not in an executor: the kernel kills a child when its parent thread ends.
            self._processes.start_first()
            self._processes.start_others(await asyncio.to_thread(self._processes.read_store))
            self.stage = "loading the model"
            await self.client.wait_ready(START_TIMEOUT_S)
            if self.config.draft is not None and self.config.draft.fallback:
                self._tolerate_drafter_loss(self._processes)
        except BaseException:
            await self.close()
            raise

    def _kill_rank(self, rank: int, why: str) -> None:
        if self._processes is not None:
            self._processes.kill_rank(rank, why)

    def _tolerate_drafter_loss(self, processes: EngineProcesses) -> None:
        ready = self.client.ready
        assert ready is not None

        async def start(link: str) -> None:
            processes.start_drafter(ready.num_pages, link)  # in this thread, as in `start`
            if self.config.draft_ranks > 1:
                store = await asyncio.to_thread(processes.read_store, self.config.tensor_parallel_size)
                processes.start_other_drafters(store, ready.num_pages, link)

        self._restart = DrafterRestart(
            self.client,
            kill=lambda: asyncio.to_thread(processes.kill_drafter),
            start=start,
            has_exited=processes.has_lost_drafter,
        )
        processes.tolerate_drafter_loss()

    async def close(self) -> None:
        """Stop the engine and wait until all its processes have ended. May be called twice."""
        if self._restart is not None:
            self._restart.cancel()
        if self._monitor is not None:
            self._monitor.close()
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
    with contextlib.suppress(RuntimeError):  # the loop is already closed
        loop.call_soon_threadsafe(function, argument)


def _describe(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _python_path() -> str:
    """Return a PYTHONPATH with which children import the same packages as this process, from any folder."""
    root = str(Path(workers.__file__).parents[1])
    return os.pathsep.join(dict.fromkeys([root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
