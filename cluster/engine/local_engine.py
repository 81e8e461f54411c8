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
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from cluster.engine.drafter_restart import DrafterRestart
from cluster.engine.engine_client import EngineClient
from cluster.engine.engine_restart import EngineRestart
from cluster.engine.hang_monitor import HangMonitor
from cluster.engine.rank_exits import EngineDead, RankExit, root_cause
from cluster.engine.rank_placement import interface_env, num_bundles, rank_placements
from cluster.engine.rank_process import RankProcess, RankStarter
from cluster.system.gpus import VARIABLE, gpu_names
from cluster.system.temp_dirs import OwnedTempDir
from secateur.errors import ConfigError
from workers.config import DRAFT_LINK_VARIABLE, PULSE_VARIABLE, EngineConfig
from workers.models.readers import read_specs
from workers.models.specs import Specs

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
_WATCH_PERIOD_S = 0.2


class EngineProcesses:
    """The processes of one engine. Thread-safe. If one process dies, all are killed, but see `tolerate_drafter_loss`.

    Call `start` once and `close` in any case. The watcher thread calls `on_death` once, with the dead rank and the end
    of its stderr, but not after `close`. A thread calls `on_joined` when all ranks have loaded their models.
    """

    def __init__(
        self,
        config: EngineConfig,
        specs: Specs,
        starter: RankStarter,
        front: str,
        *,
        on_death: Callable[[str], None],
        on_joined: Callable[[], None] = lambda: None,
        pulse: str = "",
    ) -> None:
        """pulse: the address to which ranks send signs of life, if they do."""
        self._config = config
        self._specs = specs
        self._starter = starter
        self._front = front
        self._env = {PULSE_VARIABLE: pulse}
        self._on_death = on_death
        self._on_joined = on_joined
        self._children: dict[int, RankProcess] = {}  # by rank
        self._num_essential = config.world_size  # the engine ends with any of these first ranks
        self._closing = threading.Event()
        self._lock = threading.Lock()

    @property
    def pids(self) -> list[int]:
        """Return the process ids of all ranks."""
        return [child.process.pid for _, child in sorted(self._children.items())]

    def start(self) -> None:
        """Start all ranks, and the thread that watches them.

        Raises EngineDead if rank 0 does not start, ConfigError if there are too few devices.
        """
        self._spawn(0, "--front", self._front)
        store = self._children[0].read_store()
        for rank in range(1, self._config.world_size):
            self._spawn(rank, "--store", store)
        threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()

    def tolerate_drafter_loss(self) -> None:
        """Stop treating the exit of a drafter rank as the end of the engine."""
        self._num_essential = self._config.tensor_parallel_size

    def kill_drafter(self) -> None:
        """Kill the drafter's ranks, and wait for them."""
        for child in self._drafter():
            child.kill()
            child.process.wait()
            child.join()

    def start_drafter(self, num_pages: int, link: str) -> None:
        """Start a drafter in place of a killed one.

        num_pages: as the engine's ranks have agreed. link: the address that the engine offers.
        """
        first, config = self._config.tensor_parallel_size, replace(self._config, num_pages=num_pages)
        address: tuple[str, ...] = ()
        for rank in range(first, config.world_size):
            self._spawn(rank, *address, config=config, env={DRAFT_LINK_VARIABLE: link})
            if not address and config.draft_ranks > 1:
                address = "--store", self._children[first].read_store()

    def has_lost_drafter(self) -> bool:
        """Return whether a rank of the drafter has ended."""
        return any(child.process.poll() is not None for child in self._drafter())

    def _drafter(self) -> list[RankProcess]:
        with self._lock:
            return [child for rank, child in self._children.items() if rank >= self._config.tensor_parallel_size]

    def kill_rank(self, rank: int, why: str) -> None:
        """Kill a rank that hangs. Its exit is treated like any other."""
        with self._lock:
            child = self._children[rank]
        child.kill(why)

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
                child.kill()
                child.process.wait()
        for child in children:
            child.join()

    def kill(self) -> None:
        """Kill all processes. A rank that waits for a dead peer in a collective does not react to SIGTERM."""
        with self._lock:
            children = list(self._children.values())
        for child in children:
            child.kill()

    def _spawn(
        self, rank: int, *address: str, config: EngineConfig | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        devices = self._devices()
        device = devices[rank_placements(self._config)[rank].bundle] if devices else ""
        own = {VARIABLE: device, **self._env, **(env or {})}
        self._starter.wait_ready()  # not while it holds the lock, which `close` takes
        with self._lock:
            if self._closing.is_set():
                raise EngineDead("the engine is shutting down")
            self._children[rank] = self._starter.start(
                config or self._config, self._specs, rank, *address, env=own, on_joined=self._on_joined
            )

    def _devices(self) -> list[str]:
        """Return the devices of the bundles; [] on CPU. Raises ConfigError if too few are visible."""
        if self._config.device == "cpu":
            return []
        need, visible = num_bundles(self._config), os.environ.get(VARIABLE)
        if visible is None:
            have, where = gpu_names() or [str(index) for index in range(need)], "this machine"
        else:
            have, where = [name.strip() for name in visible.split(",") if name.strip()], f"{VARIABLE}={visible!r}"
        if len(have) < need:
            raise ConfigError(f"the engine needs {need} devices, {where} has {len(have)}")
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


class LocalEngine:
    """Socket, processes and supervision of one engine. An async context manager that yields its EngineClient.

    specs: of the configuration's models, if they have been read. restarts: whether an engine that dies is replaced,
    after which its requests go on.
    """

    def __init__(self, config: EngineConfig, specs: Specs | None = None, *, restarts: bool = False) -> None:
        self.config, self._specs = config, specs
        self.client = EngineClient()
        self.client.for_engine(config)
        self.stage = f"starting the engine's {config.world_size} processes"
        """What the start is doing, for progress lines."""
        self._restarts = restarts
        self._starter: RankStarter | None = None
        self._processes: EngineProcesses | None = None
        self._engine_restart = EngineRestart(self.client, self._replace)
        self._drafter_restart: DrafterRestart | None = None
        self._monitor: HangMonitor | None = None
        self._pulse = ""
        self._folder: OwnedTempDir | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return self._processes.pids if self._processes else []

    @property
    def standby_pid(self) -> int | None:
        """Process id of the standby process; None without one."""
        return self._starter.standby_pid if self._starter else None

    async def start(self) -> None:
        """Start the engine and wait until it is ready.

        Raises EngineDead, TimeoutError, or what `read_specs` raises; no process is left running then.
        """
        self._folder = OwnedTempDir()
        try:
            self._starter = RankStarter(self.config, interface_env("127.0.0.1"))
            if self.config.hang_timeout_s:
                self._monitor = HangMonitor(self.config, self._kill_rank)
                self._pulse = await self._monitor.listen("127.0.0.1")
            await self._start_processes()
        except BaseException:
            await self.close()
            raise
        if self._restarts:
            self.client.on_loss = self._engine_restart.lost

    async def _start_processes(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._folder is not None and self._starter is not None
        front = await self.client.listen(f"unix:{self._folder.path}/engine.sock")
        if self._specs is None:
            self._specs = await asyncio.to_thread(read_specs, self.config)
        self._processes = EngineProcesses(
            self.config,
            self._specs,
            self._starter,
            front,
            on_death=lambda reason: _call(loop, self.client.on_loss, reason),
            on_joined=lambda: setattr(self, "stage", "warming up"),
            pulse=self._pulse,
        )
        await asyncio.to_thread(self._processes.start)
        self.stage = "loading the model"
        await self.client.wait_ready(self.config.startup_timeout_s)
        if self.config.draft is not None and self.config.draft.fallback:
            self._tolerate_drafter_loss(self._processes)

    async def _replace(self) -> None:
        """Start the engine again."""
        assert self._processes is not None
        await self._end_processes(self._processes)
        await self._start_processes()

    def _kill_rank(self, rank: int, why: str) -> None:
        if self._processes is not None:
            self._processes.kill_rank(rank, why)

    def _tolerate_drafter_loss(self, processes: EngineProcesses) -> None:
        ready = self.client.ready
        assert ready is not None
        self._drafter_restart = DrafterRestart(
            self.client,
            kill=lambda: asyncio.to_thread(processes.kill_drafter),
            start=lambda link: asyncio.to_thread(processes.start_drafter, ready.num_pages, link),
            has_exited=processes.has_lost_drafter,
        )
        processes.tolerate_drafter_loss()

    async def _end_processes(self, processes: EngineProcesses) -> None:
        if self._drafter_restart is not None:
            self._drafter_restart.cancel()
        processes.expect_end()
        processes.kill()
        await asyncio.to_thread(processes.close)

    async def close(self) -> None:
        """Stop the engine and wait until all its processes have ended. May be called twice."""
        self._engine_restart.cancel()
        if self._drafter_restart is not None:
            self._drafter_restart.cancel()
        if self._monitor is not None:
            self._monitor.close()
        if self._processes is not None:
            self._processes.expect_end()
        await self.client.close()
        if self._processes is not None:
            await asyncio.to_thread(self._processes.close)
        if self._starter is not None:
            await asyncio.to_thread(self._starter.close)
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
