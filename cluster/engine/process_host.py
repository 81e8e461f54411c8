"""Ranks as processes of this machine, for `Supervisor` and for the actors of Ray.

Each is a fork of a process that has imported what ranks need (`cluster.system.fork_server`), or a new interpreter.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import workers
from cluster.engine.rank_exits import RankExit
from cluster.engine.rank_placement import interface_env, worker_env
from cluster.engine.rank_process import RankProcess
from cluster.system.child import start_child
from cluster.system.fork_server import ForkedProcess, ForkServer
from workers.config import EngineConfig
from workers.models.specs import Specs

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
PRELOADED = ("workers.main", "verifier.worker", "drafter.worker", "pydantic.dataclasses", "safetensors")
"""Modules that all ranks import. Triton is not among them, because its import might touch a device."""

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy starts threads when it is imported, but for this. Ranks compute with torch."""
_POLL_S = 0.1


class ProcessHost:
    """A `RankHost` of processes. It keeps the process from which they are forked, if `config.standby`.

    address: of this machine, on which first ranks listen. device_env: returns the variables that give a rank its
    device. on_joined: a thread calls it when all ranks have loaded their models. Call `close` in any case.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        address: str = "127.0.0.1",
        device_env: Callable[[EngineConfig, int], Mapping[str, str]],
        on_joined: Callable[[], None],
    ) -> None:
        self.address, self._device_env, self._on_joined = address, device_env, on_joined
        self._ranks: dict[int, RankProcess] = {}
        self._env = {**interface_env(address), **os.environ, **worker_env(config), "PYTHONPATH": python_path()}
        self._server: ForkServer | None = None
        if config.standby and sys.platform == "linux":
            self._env |= ONE_THREAD
            self._server = ForkServer(PRELOADED, self._env)

    @property
    def pids(self) -> list[int]:
        """Return the process ids of all ranks, in rank order."""
        return [rank.process.pid for _, rank in sorted(self._ranks.items())]

    @property
    def standby_pid(self) -> int | None:
        """Return the id of the process from which ranks are forked; None without one."""
        return None if self._server is None else self._server.pid

    async def is_here(self, rank: int) -> bool:
        """Return True."""
        return True

    async def start(
        self, rank: int, config: EngineConfig, specs: Specs, *, env: Mapping[str, str], flags: Mapping[str, str]
    ) -> str:
        """Start a rank; see `RankHost.start`."""
        module = "verifier" if rank < config.tensor_parallel_size else "drafter"
        arguments = ["--rank", str(rank), "--config", config.to_json(), "--specs", specs.to_json()]
        for name, value in ({} if "store" in flags else {"host": self.address}).items() | flags.items():
            arguments += [f"--{name}", value]
        env = {**self._device_env(config, rank), **env}
        await self.ready()
        # Not in a thread: a start that is cancelled must not leave a process behind.
        process: subprocess.Popen[str] | ForkedProcess
        if self._server is not None:
            process = self._server.start(module, arguments, env)
        else:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = start_child(module, arguments, env={**self._env, **env}, **pipes)
        own = self._ranks[rank] = RankProcess(config.role_of(rank), process, self._on_joined)
        return flags["store"] if "store" in flags else await asyncio.to_thread(own.read_store)

    async def ready(self) -> None:
        """Wait until ranks can be started at once, after seconds of imports. Replaces a standby process that ended."""
        if self._server is not None and self._server.is_down:
            logger.warning("the standby process (pid %d) has ended; another one is started", self._server.pid)
            self._server = ForkServer(PRELOADED, self._env)
        if self._server is not None:
            await asyncio.to_thread(self._server.wait_imported)

    async def wait(self, rank: int) -> RankExit:
        """Return how a started rank ends, when it has."""
        own = self._ranks[rank]
        while own.process.poll() is None:
            await asyncio.sleep(_POLL_S)
        return await asyncio.to_thread(own.exit)

    def kill(self, rank: int, why: str | None = None) -> None:
        """Kill a rank, if it runs; see `RankHost.kill`."""
        if (own := self._ranks.get(rank)) is not None:
            own.kill(why)

    async def free(self, rank: int) -> None:
        """Kill a rank, if it runs, and wait for its end."""
        if (own := self._ranks.get(rank)) is not None:
            own.kill()
            await asyncio.to_thread(own.exit)

    def close(self) -> None:
        """Terminate all ranks, kill those that do not stop in time, and wait for them."""
        for rank in self._ranks.values():
            rank.signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for rank in self._ranks.values():
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("%s did not stop in %.0f s and is killed", rank.role, STOP_TIMEOUT_S)
                rank.kill()
                rank.process.wait()
        for rank in self._ranks.values():
            rank.join()
        if self._server is not None:
            self._server.close()


def python_path() -> str:
    """Return a PYTHONPATH with which children import the same packages as this process, from any folder."""
    root = str(Path(workers.__file__).parents[1])
    return os.pathsep.join(dict.fromkeys([root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
