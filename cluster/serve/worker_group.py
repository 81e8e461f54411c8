"""The worker actors of one engine: placed together, watched together, killed together.

Ray places, starts and kills them. It takes no part in an engine step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.drafter_restart import DrafterRestart
from cluster.engine_client import EngineClient
from cluster.hang_monitor import HangMonitor
from cluster.rank_exits import ExitKind, RankExit, root_cause
from cluster.rank_placement import RankPlacement, rank_placements, worker_env
from cluster.serve.actors import Worker, packages_folder
from cluster.serve.progress import report_stage
from cluster.system.temp_dirs import OwnedTempDir
from workers.config import PULSE_VARIABLE, START_TIMEOUT_S, EngineConfig
from workers.models.readers import read_specs

logger = logging.getLogger(__name__)

_WATCH_PERIOD_S = 1.0


class WorkerGroup:
    """All ranks of one engine, placed in the bundles of the replica's placement group.

    The replica owns the actors: Ray kills them when the replica dies (within 0.1 s of a SIGKILL). When a rank dies, the
    group kills the others and then calls `on_death` once with the reason, in the event loop of `start`. A drafter that
    the engine may lose is replaced instead.
    """

    def __init__(self, config: EngineConfig, client: EngineClient, *, on_death: Callable[[str], None]) -> None:
        self._config = config
        self._client = client
        self._on_death = on_death
        self._workers: list[Any] = []  # by rank; Ray kills an actor when its last handle is dropped
        self._runs: list[Any] = []  # their calls of `run`
        self._num_essential = config.world_size  # the engine ends with any of these first ranks
        self._restart: DrafterRestart | None = None
        self._monitor: HangMonitor | None = None
        self._pulse = ""  # the address to which ranks send signs of life, if they do
        self._hangs: dict[int, str] = {}  # why ranks were killed
        self._folder: OwnedTempDir | None = None
        self._closing = threading.Event()

    async def start(self, group: PlacementGroup) -> None:
        """Start all ranks and return when the engine is ready. Raises if a rank dies first; then call `close`."""
        config = self._config
        specs = (await asyncio.to_thread(read_specs, config)).to_json()
        report_stage(f"starting the engine's {config.world_size} processes")
        if config.hang_timeout_s:
            self._monitor = HangMonitor(config, self._kill_rank)
            self._pulse = await self._monitor.listen(ray.util.get_node_ip_address())
        self._workers = [_worker(group, config, specs, placement, self._pulse) for placement in rank_placements(config)]
        nodes: list[str] = await asyncio.gather(*(worker.node_id.remote() for worker in self._workers))
        front = await self._listen(nodes[0])
        store = await self._workers[0].open_store.remote()
        self._runs = [
            worker.run.remote(store, front if rank == 0 else None) for rank, worker in enumerate(self._workers)
        ]
        report_stage("loading the model")
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop,), name="worker-group-watch", daemon=True).start()
        ready = await self._client.wait_ready(START_TIMEOUT_S)
        if config.draft is not None and config.draft.fallback:
            self._num_essential = config.tensor_parallel_size
            self._restart = DrafterRestart(
                self._client,
                kill=self._kill_drafter,
                start=partial(self._start_drafter, group, replace(config, num_pages=ready.num_pages), specs),
                has_exited=lambda: bool(ray.wait(self._runs[config.tensor_parallel_size :], timeout=0)[0]),
            )

    def _kill_rank(self, rank: int, why: str) -> None:
        self._hangs[rank] = f"{why} and was killed"
        ray.kill(self._workers[rank])

    async def _kill_drafter(self) -> None:
        for worker in self._workers[self._config.tensor_parallel_size :]:
            ray.kill(worker)

    async def _start_drafter(self, group: PlacementGroup, config: EngineConfig, specs: str, link: str) -> None:
        """Start the drafter's ranks in their old bundles. config: with the pages that the engine has agreed on."""
        first = config.tensor_parallel_size
        workers = [
            _worker(group, config, specs, placement, self._pulse) for placement in rank_placements(config)[first:]
        ]
        self._workers[first:] = workers
        self._hangs = {rank: why for rank, why in self._hangs.items() if rank < first}  # those of the lost drafter
        store = await workers[0].open_store.remote()
        self._runs[first:] = [worker.run.remote(store, None, link) for worker in workers]

    def close(self) -> None:
        """Kill every rank with SIGKILL: a rank blocked in a collective with a dead peer reacts to nothing else."""
        self._closing.set()
        if self._restart is not None:
            self._restart.cancel()
        if self._monitor is not None:
            self._monitor.close()
        self._kill()

    async def _listen(self, node_of_rank_0: str) -> str:
        if node_of_rank_0 == ray.get_runtime_context().get_node_id():
            self._folder = OwnedTempDir()
            return await self._client.listen(f"unix:{self._folder.path}/engine.sock")
        return await self._client.listen(f"tcp:{ray.util.get_node_ip_address()}:0")

    def _kill(self) -> None:
        for worker in self._workers:
            ray.kill(worker)
        if self._folder is not None:
            self._folder.remove()

    def _exits(self, runs: list[Any]) -> list[RankExit]:
        done, _ = ray.wait(runs, num_returns=len(runs), timeout=0.05)
        return [
            RankExit(ExitKind.KILLED, self._hangs[rank])
            if rank in self._hangs
            else exit_of(self._config.role_of(rank), run)
            for rank, run in enumerate(runs)
            if run in done
        ]

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        # A ray.wait without a timeout can crash the process when Ray stops meanwhile.
        while not self._closing.is_set():
            runs = self._runs[: self._num_essential]
            done, _ = ray.wait(runs, num_returns=1, timeout=_WATCH_PERIOD_S)
            if not done or self._closing.is_set():
                continue
            reason = root_cause(partial(self._exits, runs)).message
            if self._closing.is_set():
                return
            logger.error("%s", reason)  # the replica may see the socket close before it learns the reason
            self._kill()
            with contextlib.suppress(RuntimeError):  # the loop has already closed
                loop.call_soon_threadsafe(self._on_death, reason)
            return


def _worker(group: PlacementGroup, config: EngineConfig, specs: str, placement: RankPlacement, pulse: str) -> Any:
    """Start the actor of one rank in its bundle. pulse: see `WorkerGroup`."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=placement.bundle)
    # num_cpus=0, because the bundle is the reservation. Without the index Ray might swap devices.
    options = ray.remote(Worker).options(
        num_cpus=0, num_gpus=placement.num_gpus, scheduling_strategy=strategy, max_restarts=0
    )
    env = worker_env(config) | {PULSE_VARIABLE: pulse}
    return options.remote(config.to_json(), specs, placement.rank, packages_folder(), env)


def exit_of(role: str, run: Any) -> RankExit:
    """Return how the rank behind the actor call `run` has ended."""
    try:
        ray.get(run)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ConnectionError):  # PeerLost: "verifier 0 lost drafter 0 at step 7: <the library>"
            return RankExit(ExitKind.LOST_A_PEER, str(error.cause).partition(": ")[0])
        return RankExit(ExitKind.FAILED, f"{role} failed: {error.cause!r}")
    except ray.exceptions.RayError as error:
        return RankExit(ExitKind.KILLED, f"{role} died: {str(error).strip().splitlines()[0]}")
    return RankExit(ExitKind.STOPPED, f"{role} stopped by itself")
