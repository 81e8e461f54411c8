"""Starts the ranks of one engine, watches them, and starts all of them again when one is lost.

Where ranks run is the matter of a `RankHost`: `ProcessHost` has processes of this machine, `serve.ray_host.RayHost`
has actors of Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from cluster.engine.drafter_restart import DrafterRestart
from cluster.engine.engine_client import EngineClient
from cluster.engine.hang_monitor import HangMonitor
from cluster.engine.rank_exits import RankExit, root_cause
from cluster.system.temp_dirs import OwnedTempDir
from workers.config import DRAFT_LINK_VARIABLE, PULSE_VARIABLE, EngineConfig
from workers.models.specs import Specs

logger = logging.getLogger(__name__)

MAX_STARTS = 3
"""How often a new engine is started in place of a lost one, until one is ready."""


class RankHost(Protocol):
    """Runs the ranks of an engine. Its methods are called in one event loop, but `close` in any thread."""

    address: str
    """Address of this machine at which ranks reach this process."""

    async def is_here(self, rank: int) -> bool:
        """Return whether a rank runs on this machine."""

    async def start(
        self, rank: int, config: EngineConfig, specs: Specs, *, env: Mapping[str, str], flags: Mapping[str, str]
    ) -> str:
        """Start a rank and return the address of the rendezvous store, which a rank without the flag `store` opens.

        env: the rank's own additions to the environment. flags: `front` for rank 0, the address on which its service
        front listens, and `store` for all but a first rank.
        Raises EngineDead if a first rank opens no store, ConfigError if there are too few devices, ForkServerDown.
        """

    async def wait(self, rank: int) -> RankExit:
        """Return how a started rank ends, when it has."""

    def kill(self, rank: int, why: str | None = None) -> None:
        """Kill a rank, if it runs. why: what its exit then tells, such as "verifier 0 gave no sign of life"."""

    async def free(self, rank: int) -> None:
        """Kill a rank, if it runs, and return when another one can start in its place."""

    def close(self) -> None:
        """End all ranks and what starts them. May be called twice."""


class Supervisor:
    """The ranks of one engine on a host. Use it in the client's event loop.

    When a rank dies, all others are killed. restarts: whether another engine is then started, which goes on with the
    requests of the lost one; a drafter that the engine may lose is replaced alone in any case. report: called with each
    stage of a start. on_failure: called when no engine starts in place of a lost one; the requests have failed then.
    """

    def __init__(
        self,
        host: RankHost,
        client: EngineClient,
        *,
        restarts: bool,
        report: Callable[[str], None],
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._host, self._client, self._report = host, client, report
        self._restarts, self._on_failure = restarts, on_failure
        self._replacing: asyncio.Task[None] | None = None
        self._runs: dict[int, asyncio.Task[RankExit]] = {}  # by rank
        self._watching: asyncio.Task[None] | None = None
        self._num_essential = 0  # the engine ends with any of these first ranks
        self._drafter: DrafterRestart | None = None
        self._monitor: HangMonitor | None = None
        self._pulse = ""  # the address to which ranks send signs of life, if they do
        self._folder: OwnedTempDir | None = None

    async def start(self, config: EngineConfig, specs: Specs) -> None:
        """Start all ranks and return when the engine is ready.

        Raises what `RankHost.start` does, EngineDead if a rank dies first, TimeoutError; then call `close`.
        """
        await self._start(config, specs)
        if self._restarts:
            self._client.on_loss = partial(self._lost, config, specs)

    def _lost(self, config: EngineConfig, specs: Specs, reason: str) -> None:
        """Replace the engine. While that is going on, another loss makes the present attempt fail."""
        self._client.interrupt(reason)
        if self._replacing is None or self._replacing.done():
            self._replacing = asyncio.create_task(self._replace(config, specs, reason))

    async def _replace(self, config: EngineConfig, specs: Specs, reason: str) -> None:
        began = time.monotonic()
        for _ in range(MAX_STARTS):
            try:
                await self._start(config, specs)
            except Exception:
                logger.exception("a new engine did not start")
            else:
                seconds, num_pending = time.monotonic() - began, self._client.num_pending
                logger.warning("a new engine goes on with %d requests after %.1f s", num_pending, seconds)
                return
        self._client.fail(reason)
        self._on_failure()

    async def _start(self, config: EngineConfig, specs: Specs) -> None:
        """Start all ranks, in place of earlier ones."""
        self._stop_watching()
        self._num_essential = config.world_size
        await asyncio.gather(*map(self._host.free, range(config.world_size)))
        self._report(f"starting the engine's {config.world_size} processes")
        if config.hang_timeout_s and self._monitor is None:
            self._monitor = HangMonitor(config, self._host.kill)
            self._pulse = await self._monitor.listen(self._host.address)
        front = await self._client.listen(await self._front_address())
        await self._start_ranks(range(config.world_size), config, specs, flags={"front": front})
        self._watching = asyncio.create_task(self._watch(config.world_size))
        self._report("loading the model")
        ready = await self._client.wait_ready(config.startup_timeout_s)
        if config.draft is not None and config.draft.fallback:
            self._tolerate_drafter_loss(replace(config, num_pages=ready.num_pages), specs)

    def expect_end(self) -> None:
        """Stop treating the exit of a rank as a failure, and start no more."""
        if self._replacing is not None:
            self._replacing.cancel()
            self._replacing = None
        self._stop_watching()
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def close(self) -> None:
        """End all ranks, and their host. May be called twice, and in another thread after `expect_end`."""
        self.expect_end()
        self._host.close()
        if self._folder is not None:
            self._folder.remove()

    async def _front_address(self) -> str:
        if not await self._host.is_here(0):
            return f"tcp:{self._host.address}:0"
        if self._folder is None:
            self._folder = OwnedTempDir()
        return f"unix:{self._folder.path}/engine.sock"

    async def _start_ranks(
        self, ranks: Iterable[int], config: EngineConfig, specs: Specs, *, link: str = "", flags: Mapping[str, str]
    ) -> None:
        """Start ranks that are a world of their own. The first one opens the store of the others.

        link: the address that an engine offers to a new drafter. flags: of the first rank, see `RankHost.start`.
        """
        config = self._with_head(config)
        env = {PULSE_VARIABLE: self._pulse} | ({DRAFT_LINK_VARIABLE: link} if link else {})
        start = partial(self._host.start, config=config, specs=specs, env=env)
        first, *others = ranks
        store = await start(first, flags=flags)
        await asyncio.gather(*(start(rank, flags={"store": store}) for rank in others))
        for rank in ranks:
            self._runs[rank] = asyncio.create_task(self._host.wait(rank))

    def _with_head(self, config: EngineConfig) -> EngineConfig:
        """Return the configuration with the draft head that was swapped in last, unless its folder is gone."""
        path = self._client.head_path
        if config.draft is None or not path:
            return config
        if not Path(path).is_dir():
            logger.error("the draft head %s is gone; the configured one takes its place", path)
            return config
        return replace(config, draft=replace(config.draft, model_path=path))

    def _tolerate_drafter_loss(self, config: EngineConfig, specs: Specs) -> None:
        """Replace a drafter that is lost from now on. config: with the pages that the engine's ranks have agreed on."""
        ranks = range(config.tensor_parallel_size, config.world_size)
        self._num_essential = config.tensor_parallel_size

        async def kill() -> None:
            await asyncio.gather(*map(self._host.free, ranks))

        async def start(link: str) -> None:
            await self._start_ranks(ranks, config, specs, link=link, flags={})

        def has_exited() -> bool:
            return any(self._runs[rank].done() for rank in ranks)

        self._drafter = DrafterRestart(self._client, kill=kill, start=start, has_exited=has_exited)

    async def _watch(self, num_ranks: int) -> None:
        """Wait for the exit of a rank without which the engine ends."""
        while not self._exits(self._num_essential):
            running = [run for rank, run in self._runs.items() if rank < self._num_essential]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        reason = (await root_cause(partial(self._exits, self._num_essential))).message
        logger.error("%s", reason)  # the client may see the socket close before it learns the reason
        for rank in range(num_ranks):
            self._host.kill(rank)
        self._client.on_loss(reason)

    def _exits(self, num_ranks: int) -> list[RankExit]:
        return [run.result() for rank, run in sorted(self._runs.items()) if rank < num_ranks and run.done()]

    def _stop_watching(self) -> None:
        if self._drafter is not None:
            self._drafter.cancel()
            self._drafter = None
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        for run in self._runs.values():
            run.cancel()
        self._runs.clear()
