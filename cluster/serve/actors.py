"""The place of one rank in a Ray cluster: an actor that starts the rank as its child, and again after it was lost.

The actor holds the bundle, and its GPU, while ranks come and go. It imports no torch.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import ray

import workers
from cluster.engine.process_host import ProcessHost
from cluster.engine.rank_exits import RankExit
from cluster.serve.progress import report_stage
from cluster.system.gpus import VARIABLE
from workers.config import EngineConfig
from workers.models.specs import Specs

logger = logging.getLogger(__name__)


class Worker:
    """One rank's actor. Ray runs its methods in one event loop. The rank ends with it."""

    def __init__(self, config: str, rank: int, packages: str) -> None:
        check_packages(packages)
        warn_if_nice()
        self._rank = rank
        self.host = ProcessHost(
            EngineConfig.from_json(config),
            address=ray.util.get_node_ip_address(),
            device_env=_device_env,
            on_joined=lambda: report_stage("warming up"),
        )

    async def node_id(self) -> str:
        """Return the id of the Ray node that this actor runs on."""
        return ray.get_runtime_context().get_node_id()

    async def start(self, config: str, specs: str, *, env: Mapping[str, str], flags: Mapping[str, str]) -> str:
        """Start the rank; see `RankHost.start`."""
        parsed = EngineConfig.from_json(config), Specs.from_json(specs)
        return await self.host.start(self._rank, *parsed, env=env, flags=flags)

    async def wait(self) -> RankExit:
        """Return how the rank ends, when it has."""
        return await self.host.wait(self._rank)

    async def kill(self, why: str | None = None) -> None:
        """Kill the rank, if it runs, and wait for its end. why: see `RankHost.kill`."""
        self.host.kill(self._rank, why)
        await self.host.free(self._rank)


def _device_env(config: EngineConfig, rank: int) -> dict[str, str]:
    """Return the variable that shows a rank the device of its actor, on CUDA.

    Ray may have been told to leave the variable as it is on the node.
    """
    if config.device != "cuda":
        return {}
    return {VARIABLE: ",".join(ray.get_runtime_context().get_accelerator_ids()["GPU"])}


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
