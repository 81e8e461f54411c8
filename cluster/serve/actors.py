"""The place of one rank in a Ray cluster: an actor that starts the rank as its child, and again after it was lost.

The actor holds the bundle, and its GPU, while ranks come and go. It imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import ray

import workers
from cluster.engine.rank_exits import RankExit
from cluster.engine.rank_placement import interface_env
from cluster.engine.rank_process import RankProcess, RankStarter
from cluster.serve.progress import report_stage
from cluster.system.gpus import VARIABLE
from workers.config import EngineConfig
from workers.models.specs import Specs

logger = logging.getLogger(__name__)

_POLL_S = 0.05


class Worker:
    """One rank's actor. Ray runs its methods in one event loop. The rank ends with it."""

    def __init__(self, config: str, rank: int, packages: str) -> None:
        check_packages(packages)
        warn_if_nice()
        self._rank = rank
        self._host = ray.util.get_node_ip_address()
        self._starter = RankStarter(EngineConfig.from_json(config), interface_env(self._host))
        self._process: RankProcess | None = None

    async def node_id(self) -> str:
        """Return the id of the Ray node that this actor runs on."""
        return ray.get_runtime_context().get_node_id()

    async def start(
        self, config: str, specs: str, *, env: Mapping[str, str], front: str | None = None, store: str | None = None
    ) -> str:
        """Start the rank and return the address of the rendezvous store, which a first rank opens.

        env: the rank's own additions to the environment. front: for rank 0, the address on which its service front
        listens. store: for all but a first rank, the address of its store.
        Raises EngineDead if a first rank opens no store, ForkServerDown.
        """
        address = ["--front", front] if front else []
        address += ["--store", store] if store is not None else ["--host", self._host]
        await asyncio.to_thread(self._starter.wait_ready)
        await self.kill()
        if EngineConfig.from_json(config).device == "cuda":
            # Ray may have been told to leave this variable as it is on the node.
            env = {**env, VARIABLE: ",".join(ray.get_runtime_context().get_accelerator_ids()["GPU"])}
        self._process = self._starter.start(
            EngineConfig.from_json(config),
            Specs.from_json(specs),
            self._rank,
            *address,
            env=env,
            on_joined=lambda: report_stage("warming up"),
        )
        return await asyncio.to_thread(self._process.read_store) if store is None else store

    async def wait(self) -> RankExit:
        """Return how the rank ends, when it has."""
        assert self._process is not None
        while (exit := self._process.exit()) is None:
            await asyncio.sleep(_POLL_S)
        return exit

    async def kill(self, why: str | None = None) -> None:
        """Kill the rank, if it runs, and wait for its end. why: see `RankProcess.kill`."""
        if self._process is not None:
            self._process.kill(why)
            await asyncio.to_thread(self._process.process.wait)


def warn_if_nice() -> None:
    """Log a warning if this process, a worker of Ray, has a lower priority than the Ray that has started it."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice > os.getpriority(os.PRIO_PROCESS, os.getppid()):
        logger.warning(
            "Ray runs its workers at nice %d, so that beside other processes they get what is left of the processor: "
            "set RAY_worker_niceness=0 in the environment of `ray start`, on the head and on every other node",
            nice,
        )


def packages_folder() -> str:
    """Return the folder that holds the top-level packages."""
    return str(Path(workers.__file__).resolve().parents[1])


def check_packages(expected: str) -> None:
    """Raise ImportError if `workers` is not Secateur's package.

    Ray puts the current folder first on a worker's path, so a folder named `workers` there would shadow ours. Another
    location of our package (another node, another checkout) is only logged.
    """
    found = packages_folder()
    if not (Path(found) / "workers" / "comm" / "ipc.py").exists():
        raise ImportError(
            f"'workers' is imported from {found}, which is not Secateur's (expected {expected}); "
            f"start Ray from another folder. sys.path begins with {sys.path[:3]}"
        )
    if found != expected:
        logger.warning("the packages come from %s here and from %s on the replica", found, expected)
