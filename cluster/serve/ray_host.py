"""The ranks of one engine on Ray, each the child of an actor.

Ray places the actors together, and kills them with the replica. It takes no part in an engine step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.engine.rank_exits import ExitKind, RankExit
from cluster.engine.rank_placement import RankPlacement, rank_placements
from cluster.serve.actors import Worker, packages_folder
from workers.config import EngineConfig
from workers.models.specs import Specs

logger = logging.getLogger(__name__)

KILL_TIMEOUT_S = 5.0
"""An actor that has not killed its rank in this time is stopped itself, or its node is lost: another one is started."""


class RayHost:
    """A `RankHost` of actors in the bundles of the replica's placement group.

    The replica owns the actors: Ray kills them when the replica dies (within 0.1 s of a SIGKILL).

    config: as `placement_config` returns it. The actors start at once, and their standby processes import what ranks
    need while the caller still reads files.
    """

    def __init__(self, config: EngineConfig, group: PlacementGroup) -> None:
        self.address = ray.util.get_node_ip_address()
        self._config, self._group = config, group
        self._placements = rank_placements(config)
        # By rank; Ray kills an actor when its last handle is dropped.
        self._workers = [self._new_worker(placement) for placement in self._placements]
        self._has_started: set[int] = set()

    async def is_here(self, rank: int) -> bool:
        """Return whether a rank's actor is on the replica's node."""
        node: str = await self._workers[rank].node_id.remote()
        return node == ray.get_runtime_context().get_node_id()

    async def start(
        self, rank: int, config: EngineConfig, specs: Specs, *, env: Mapping[str, str], flags: Mapping[str, str]
    ) -> str:
        """Start a rank; see `RankHost.start`."""
        self._has_started.add(rank)
        store: str = await self._workers[rank].start.remote(config.to_json(), specs.to_json(), env=env, flags=flags)
        return store

    async def wait(self, rank: int) -> RankExit:
        """Return how a started rank, or its actor, ends, when it has."""
        try:
            exit: RankExit = await self._workers[rank].wait.remote()
            return exit
        except ray.exceptions.RayError as error:
            role = self._placements[rank].role
            return RankExit(ExitKind.KILLED, f"{role} died: {str(error).strip().splitlines()[0]}")

    def kill(self, rank: int, why: str | None = None) -> None:
        """Kill a rank, if it runs; see `RankHost.kill`."""
        self._workers[rank].kill.remote(why)

    async def free(self, rank: int) -> None:
        """Kill a rank, if it has started. An actor that does not answer is replaced."""
        if rank not in self._has_started:
            return
        worker, placement = self._workers[rank], self._placements[rank]
        try:
            await asyncio.wait_for(worker.kill.remote(), KILL_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError):
            logger.warning("the actor of %s does not answer; another one is started", placement.role)
            ray.kill(worker)
            self._workers[rank] = self._new_worker(placement)

    def close(self) -> None:
        """Kill every rank with its actor: a rank blocked in a collective with a dead peer reacts to nothing else."""
        for worker in self._workers:
            ray.kill(worker)

    def _new_worker(self, placement: RankPlacement) -> Any:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=placement.bundle)
        # num_cpus=0, because the bundle is the reservation. Without the index Ray might swap devices.
        options = ray.remote(Worker).options(
            num_cpus=0, num_gpus=placement.num_gpus, scheduling_strategy=strategy, max_restarts=0
        )
        return options.remote(self._config.to_json(), placement.rank, packages_folder())
