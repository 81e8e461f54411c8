"""An engine as plain processes of this machine, without Ray:

    async with LocalEngine(config) as client:
        async for chunk in client.submit(Submit(id=client.new_id(), prompt=[1, 2, 3], max_tokens=8)):
            ...

It serves tests, benchmarks and machines without Ray.
"""

from __future__ import annotations

import asyncio
import os

from cluster.engine.engine_client import EngineClient
from cluster.engine.process_host import ProcessHost
from cluster.engine.rank_placement import num_bundles, rank_placements
from cluster.engine.supervisor import Supervisor
from cluster.system.gpus import VARIABLE, gpu_names
from secateur.errors import ConfigError
from workers.config import EngineConfig
from workers.models.draft_methods import read_specs
from workers.models.specs import Specs


class LocalEngine:
    """Processes and supervision of one engine. An async context manager that yields its EngineClient.

    specs: of the configuration's models, if they have been read. restarts: whether an engine that dies is replaced,
    after which its requests go on.
    """

    def __init__(self, config: EngineConfig, specs: Specs | None = None, *, restarts: bool = False) -> None:
        self.config, self._specs = config, specs
        self.client = EngineClient()
        self.stage = f"starting the engine's {config.world_size} processes"
        """What the start is doing, for progress lines."""
        self._restarts = restarts
        self._host: ProcessHost | None = None
        self._supervisor: Supervisor | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return self._host.pids if self._host else []

    @property
    def standby_pid(self) -> int | None:
        """Process id of the standby process; None without one."""
        return self._host.standby_pid if self._host else None

    async def start(self) -> None:
        """Start the engine and wait until it is ready.

        Raises EngineDead, TimeoutError, or what `read_specs` raises; no process is left running then.
        """
        self._host = ProcessHost(self.config, device_env=_device_env, on_joined=lambda: self._report("warming up"))
        self._supervisor = Supervisor(self._host, self.client, restarts=self._restarts, report=self._report)
        try:
            if self._specs is None:
                self._specs = await asyncio.to_thread(read_specs, self.config)
            await self._supervisor.start(self.config, self._specs)
        except BaseException:
            await self.close()
            raise

    def _report(self, stage: str) -> None:
        self.stage = stage

    async def close(self) -> None:
        """Stop the engine and wait until all its processes have ended. May be called twice."""
        if self._supervisor is not None:
            self._supervisor.expect_end()
        await self.client.close()
        if self._supervisor is not None:
            await asyncio.to_thread(self._supervisor.close)

    async def __aenter__(self) -> EngineClient:
        await self.start()
        return self.client

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _device_env(config: EngineConfig, rank: int) -> dict[str, str]:
    """Return the variable that shows a rank its device alone, none on CPU. Raises ConfigError if there are too few."""
    if config.device == "cpu":
        return {VARIABLE: ""}
    need, visible = num_bundles(config), os.environ.get(VARIABLE)
    if visible is None:
        have, where = gpu_names() or [str(index) for index in range(need)], "this machine"
    else:
        have, where = [name.strip() for name in visible.split(",") if name.strip()], f"{VARIABLE}={visible!r}"
    if len(have) < need:
        raise ConfigError(f"the engine needs {need} devices, {where} has {len(have)}")
    return {VARIABLE: have[rank_placements(config)[rank].bundle]}
