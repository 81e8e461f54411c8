"""Several HTTP fronts before one engine of this machine, as processes: starts them, and those that die again.

Each has a socket of its own to the engine, tokenizer processes, and a listening socket. Those have the same port, so
the kernel divides connections evenly (SO_REUSEPORT); with one for all, the first front to wake takes a whole burst.
They are this process's, so a connection waits while a front is started again. What the fronts count together is in
files of a folder (`system/shared.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from prometheus_client.multiprocess import mark_process_dead

from cluster.engine.engine_client import EngineClient
from cluster.engine.hang_monitor import ProcessState
from cluster.engine.rank_exits import EngineDead
from cluster.observe.metrics import metrics_folder
from cluster.system.child import start_child
from cluster.system.temp_dirs import OwnedTempDir
from secateur.config import EngineArgs
from secateur.errors import SecateurError
from workers.config import EngineConfig

logger = logging.getLogger(__name__)

POLL_S = 0.1
RESTART_S = 1.0
"""Pause after a front that ended while it started."""
KILL_S = 5.0
"""How much later than its answers a front must have ended."""


class Fronts:
    """The fronts of an engine. Set `should_exit` to let running answers end, as with `uvicorn.Server`.

    socks: bound to the service's port, one for each front.
    """

    def __init__(
        self, args: EngineArgs, config: EngineConfig, client: EngineClient, socks: list[socket.socket]
    ) -> None:
        self.should_exit = False
        self._args, self._config, self._client, self._socks = args, config, client, socks
        self._folder = OwnedTempDir()
        self._metrics = metrics_folder(self._folder.path)
        assert self._metrics is not None
        self._metrics.mkdir()
        self._running: dict[int, subprocess.Popen[str]] = {}  # by number
        self._num_stopped: Counter[int] = Counter()  # looks in a row that found a front stopped
        self._starting: dict[int, asyncio.Task[None]] = {}

    async def serve(self, on_started: Callable[[], object]) -> None:
        """Start all fronts and keep them running until `should_exit`. Raises EngineDead, and SecateurError at first."""
        try:
            self._starting = {number: asyncio.create_task(self._start(number)) for number in range(len(self._socks))}
            while not all(task.done() for task in self._starting.values()):
                if self.should_exit:
                    return
                await self._name_all()
            for task in self._starting.values():
                task.result()
            on_started()
            while not self.should_exit:
                if self._client.dead is not None:
                    self._tell_of_death(self._client.dead)
                    raise EngineDead(self._client.dead)
                for number, process in self._running.items():
                    if process.poll() is not None and self._starting[number].done():
                        logger.error("front %d ended with code %d and is started again", number, process.returncode)
                        self._starting[number] = asyncio.create_task(self._start_again(number))
                    self._kill_if_stopped(number)
                await self._name_all()
        finally:
            for task in self._starting.values():
                task.cancel()
            await self._stop()

    async def _name_all(self) -> None:
        """Let the engine, which may be a new one, find fronts, which may be new."""
        for number in self._running:
            self._client.name_front(1 + number, f"unix:{self._folder.path}/{number}.sock")
        await asyncio.sleep(POLL_S)

    async def _start(self, number: int) -> None:
        """Start a front, and return when it answers. Raises SecateurError if it ends."""
        told = {  # on stdin, because a command line would show the key
            "args": self._args.model_dump(mode="json", exclude_unset=True),
            "config": self._config.to_json(),
            "folder": str(self._folder.path),
            "number": number,
            "num_fronts": len(self._socks),
            "socket": self._socks[number].fileno(),
        }
        env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(self._metrics)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "pass_fds": [told["socket"]]}
        process = self._running[number] = start_child("cluster.front", [], env=env, **pipes)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(told) + "\n")
        process.stdin.flush()
        if not await asyncio.to_thread(process.stdout.readline):
            raise SecateurError(f"an HTTP front ended with code {process.wait()} while it started; see its log")

    def _tell_of_death(self, reason: str) -> None:
        for process in self._running.values():
            assert process.stdin is not None
            with suppress(OSError):  # it has just ended
                process.stdin.write(reason.splitlines()[0] + "\n")
                process.stdin.flush()

    def _kill_if_stopped(self, number: int) -> None:
        """Kill a front that is stopped, as by SIGSTOP, for too long: the kernel still gives it connections.

        Looks are counted, not seconds, so that nothing is killed when this process was stopped, too.
        """
        state = ProcessState.of(self._running[number].pid)
        self._num_stopped[number] += 1
        if state is None or state.letter not in "Tt":
            del self._num_stopped[number]
        elif 0 < self._config.hang_timeout_s < self._num_stopped[number] * POLL_S:
            logger.error("front %d is stopped for %g s and is killed", number, self._config.hang_timeout_s)
            self._running[number].kill()

    async def _start_again(self, number: int) -> None:
        mark_process_dead(self._running[number].pid, str(self._metrics))
        _reap(self._running[number])
        try:
            await self._start(number)
        except SecateurError as error:
            logger.error("%s", error)
            await asyncio.sleep(RESTART_S)

    async def _stop(self) -> None:
        for sock in self._socks:  # or new connections would wait for an answer
            sock.close()
        for number, process in self._running.items():
            is_ready = self._starting[number].done() and not self._starting[number].cancelled()
            if is_ready:
                process.terminate()
            else:
                process.kill()
        deadline = time.monotonic() + self._args.shutdown_timeout + KILL_S
        for process in self._running.values():
            while process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(POLL_S)
            process.kill()
            _reap(process)
        self._folder.remove()


def _reap(process: subprocess.Popen[str]) -> None:
    """Wait for a process that has ended, and close its pipes."""
    with suppress(BrokenPipeError), process:
        pass
