"""The ranks of one engine on Ray: placed together, watched together, killed together.

Ray places them, and kills them with the replica. It takes no part in an engine step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.engine.drafter_restart import DrafterRestart
from cluster.engine.engine_client import EngineClient
from cluster.engine.hang_monitor import HangMonitor
from cluster.engine.rank_exits import ExitKind, RankExit, root_cause
from cluster.engine.rank_placement import RankPlacement, rank_placements
from cluster.serve.actors import Worker, packages_folder
from cluster.serve.progress import report_stage
from cluster.system.temp_dirs import OwnedTempDir
from workers.config import DRAFT_LINK_VARIABLE, PULSE_VARIABLE, EngineConfig
from workers.models.specs import Specs

logger = logging.getLogger(__name__)

KILL_TIMEOUT_S = 5.0
"""An actor that has not killed its rank in this time is stopped itself, or its node is lost: another one is started."""
_WATCH_PERIOD_S = 1.0


class WorkerGroup:
    """All ranks of one engine, placed in the bundles of the replica's placement group.

    The replica owns their actors: Ray kills them when the replica dies (within 0.1 s of a SIGKILL). When a rank dies,
    the group kills the others and then calls `on_death` once with the reason, in the event loop of `start`; `start` may
    be called again then. A drafter that the engine may lose is replaced instead.

    config: as `placement_config` returns it. The actors start at once, and their standby processes import what ranks
    need while the caller still reads files.
    """

    def __init__(
        self, config: EngineConfig, group: PlacementGroup, client: EngineClient, *, on_death: Callable[[str], None]
    ) -> None:
        self._config = config
        self._group = group
        self._client = client
        self._on_death = on_death
        self._specs = ""
        # By rank; Ray kills an actor when its last handle is dropped.
        self._workers = [self._new_worker(placement) for placement in rank_placements(config)]
        self._has_started = False
        self._runs: list[Any] = []  # the actors' calls of `wait`
        self._num_essential = config.world_size  # the engine ends with any of these first ranks
        self._restart: DrafterRestart | None = None
        self._monitor: HangMonitor | None = None
        self._pulse = ""  # the address to which ranks send signs of life, if they do
        self._folder: OwnedTempDir | None = None
        self._ended = threading.Event()  # set when the present ranks are no longer watched

    async def start(self, config: EngineConfig, specs: Specs) -> None:
        """Start all ranks, in place of earlier ones, and return when the engine is ready.

        config: complete. Raises if a rank dies first; then call `start` again, or `close`.
        """
        self._config = config
        self._client.for_engine(config)
        self._end_watch()
        self._ended, self._num_essential = threading.Event(), config.world_size
        self._specs = specs.to_json()
        report_stage(f"starting the engine's {config.world_size} processes")
        if config.hang_timeout_s and self._monitor is None:
            self._monitor = HangMonitor(config, self._kill_rank)
            self._pulse = await self._monitor.listen(ray.util.get_node_ip_address())
        if self._has_started:
            self._workers = await asyncio.gather(*map(self._free_worker, rank_placements(config)))
        self._has_started = True
        nodes: list[str] = await asyncio.gather(*(worker.node_id.remote() for worker in self._workers))
        front = await self._listen(nodes[0])
        store = await self._start_rank(0, front=front)
        await asyncio.gather(*(self._start_rank(rank, store=store) for rank in range(1, config.world_size)))
        self._runs = [worker.wait.remote() for worker in self._workers]
        report_stage("loading the model")
        watch = partial(self._watch, asyncio.get_running_loop(), self._ended)
        threading.Thread(target=watch, name="worker-group-watch", daemon=True).start()
        ready = await self._client.wait_ready(config.startup_timeout_s)
        if config.draft is not None and config.draft.fallback:
            self._num_essential = config.tensor_parallel_size
            self._restart = DrafterRestart(
                self._client,
                kill=self._kill_drafter,
                start=partial(self._start_drafter, replace(config, num_pages=ready.num_pages)),
                has_exited=lambda: bool(ray.wait(self._runs[config.tensor_parallel_size :], timeout=0)[0]),
            )

    async def _free_worker(self, placement: RankPlacement) -> Any:
        """Return an actor without a running rank: the present one or, if it does not answer, another one."""
        worker = self._workers[placement.rank]
        try:
            await asyncio.wait_for(worker.kill.remote(), KILL_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError):
            logger.warning("the actor of %s does not answer; another one is started", placement.role)
            ray.kill(worker)
            return self._new_worker(placement)
        return worker

    def _new_worker(self, placement: RankPlacement) -> Any:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=placement.bundle)
        # num_cpus=0, because the bundle is the reservation. Without the index Ray might swap devices.
        options = ray.remote(Worker).options(
            num_cpus=0, num_gpus=placement.num_gpus, scheduling_strategy=strategy, max_restarts=0
        )
        return options.remote(self._config.to_json(), placement.rank, packages_folder())

    async def _start_rank(
        self, rank: int, *, config: EngineConfig | None = None, env: Mapping[str, str] | None = None, **address: str
    ) -> str:
        """Start a rank and return its store's address; see `Worker.start`."""
        text, own = (config or self._config).to_json(), {PULSE_VARIABLE: self._pulse, **(env or {})}
        store: str = await self._workers[rank].start.remote(text, self._specs, env=own, **address)
        return store

    def _kill_rank(self, rank: int, why: str) -> None:
        self._workers[rank].kill.remote(why)

    async def _kill_drafter(self) -> None:
        placements = rank_placements(self._config)[self._config.tensor_parallel_size :]
        self._workers[self._config.tensor_parallel_size :] = await asyncio.gather(*map(self._free_worker, placements))

    async def _start_drafter(self, config: EngineConfig, link: str) -> None:
        """Start the drafter's ranks in their old bundles. config: with the pages that the engine has agreed on."""
        first, env = config.tensor_parallel_size, {DRAFT_LINK_VARIABLE: link}
        store = await self._start_rank(first, config=config, env=env)
        others = range(first + 1, config.world_size)
        await asyncio.gather(*(self._start_rank(rank, config=config, env=env, store=store) for rank in others))
        self._runs[first:] = [worker.wait.remote() for worker in self._workers[first:]]

    def close(self) -> None:
        """Kill every rank with its actor: a rank blocked in a collective with a dead peer reacts to nothing else."""
        self._end_watch()
        if self._monitor is not None:
            self._monitor.close()
        for worker in self._workers:
            ray.kill(worker)
        if self._folder is not None:
            self._folder.remove()

    def _end_watch(self) -> None:
        self._ended.set()
        if self._restart is not None:
            self._restart.cancel()

    async def _listen(self, node_of_rank_0: str) -> str:
        if node_of_rank_0 != ray.get_runtime_context().get_node_id():
            return await self._client.listen(f"tcp:{ray.util.get_node_ip_address()}:0")
        if self._folder is None:
            self._folder = OwnedTempDir()
        return await self._client.listen(f"unix:{self._folder.path}/engine.sock")

    def _exits(self, runs: list[Any]) -> list[RankExit]:
        done, _ = ray.wait(runs, num_returns=len(runs), timeout=0.05)
        return [exit_of(self._config.role_of(rank), run) for rank, run in enumerate(runs) if run in done]

    def _watch(self, loop: asyncio.AbstractEventLoop, ended: threading.Event) -> None:
        # A ray.wait without a timeout can crash the process when Ray stops meanwhile.
        while not ended.is_set():
            runs = self._runs[: self._num_essential]
            done, _ = ray.wait(runs, num_returns=1, timeout=_WATCH_PERIOD_S)
            if not done or ended.is_set():
                continue
            reason = root_cause(partial(self._exits, runs)).message
            if ended.is_set():
                return
            logger.error("%s", reason)  # the replica may see the socket close before it learns the reason
            for worker in self._workers:
                worker.kill.remote()
            with contextlib.suppress(RuntimeError):  # the loop has already closed
                loop.call_soon_threadsafe(self._on_death, reason)
            return


def exit_of(role: str, run: Any) -> RankExit:
    """Return how a rank has ended, given its actor's call of `wait`."""
    try:
        exit: RankExit = ray.get(run)
        return exit
    except ray.exceptions.RayError as error:
        return RankExit(ExitKind.KILLED, f"{role} died: {str(error).strip().splitlines()[0]}")
