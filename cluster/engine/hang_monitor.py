"""Notices ranks that hang: stopped processes, and steps in which nothing gets on (see `workers.pulse`).

Time is counted in ticks of this process, of which a loaded machine makes fewer. So ranks are not taken for stopped
where nobody gets the processor, and a front that was stopped itself first reads what arrived meanwhile. Where a silent
rank's process can be seen, it must also be stopped or blocked: one that waits for the processor has more time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cluster.system.processes import stat_of
from workers.config import EngineConfig
from workers.pulse import BEAT_S, Beat, Doing, node_name

logger = logging.getLogger(__name__)

TICK_S = BEAT_S
_CPU_S = 1e-3
"""CPU time that counts as progress. The clocks of threads count nanoseconds, and waking up takes microseconds."""
_PATIENCE = 6
"""How many times longer a silent process has that is not stopped and computes, or would."""
_MAX_LINE = 4096


class ProcessState(NamedTuple):
    """Holds a process's entry in /proc: the letter of its first thread's state, and the CPU time of all in ticks."""

    letter: str
    cpu: int

    @classmethod
    def of(cls, pid: int) -> ProcessState | None:
        """Read /proc; None if there is no such process."""
        fields = stat_of(pid)
        return None if fields is None else cls(fields[0], int(fields[11]) + int(fields[12]))


@dataclass(slots=True)
class _Rank:
    beat: Beat
    silent: int = 0  # ticks since its last beat
    still: int = 0  # beats since one that showed progress: a process that gets no time gives few
    stepless: int = 0  # beats since one that showed a step or a message
    seen: ProcessState | None = None  # in the middle of its silence


class HangMonitor:
    """Watches the ranks that send beats to the address of `listen`. Use it in one event loop.

    on_hang: called once for each rank that hangs, with the rank and what is the matter. A rank that comes back, with a
    new process, is watched anew. Ranks that are still starting are not judged.
    """

    def __init__(self, config: EngineConfig, on_hang: Callable[[int, str], None]) -> None:
        self._config, self._on_hang = config, on_hang
        self._most = math.ceil(config.hang_timeout_s / TICK_S)
        self._most_on_device = math.ceil(config.device_timeout_s / TICK_S)
        self._most_stepless = math.ceil(config.idle_timeout_s / TICK_S)
        self._ranks: dict[int, _Rank] = {}
        self._token = secrets.token_hex(32)
        self._server: asyncio.Server | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    async def listen(self, host: str) -> str:
        """Start watching and return the address to which ranks send beats."""
        self._server = await asyncio.start_server(self._read, host, 0, limit=_MAX_LINE)
        self._ticking = asyncio.create_task(self._tick_on())
        port = self._server.sockets[0].getsockname()[1]
        return json.dumps({"host": host, "port": port, "token": self._token})

    def close(self) -> None:
        """Stop watching."""
        if self._ticking is not None:
            self._ticking.cancel()
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.close()

    def take(self, beat: Beat) -> None:
        """Take a rank's beat."""
        rank = self._ranks.setdefault(beat.rank, _Rank(beat))
        before = rank.beat
        has_moved = (beat.doing, beat.count) != (before.doing, before.count)
        rank.stepless = 0 if has_moved else rank.stepless + 1
        if has_moved or beat.cpu_s - before.cpu_s >= _CPU_S:
            rank.still, rank.beat = 0, beat
        else:
            rank.still += 1
        rank.silent = 0

    def tick(self) -> None:
        """Count a tick, and report the ranks that hang."""
        for rank in self._ranks.values():
            rank.silent += 1
            if rank.silent == self._most // 2:
                rank.seen = _state_of(rank.beat)
        for number, why in [(number, why) for number in self._ranks if (why := self._why_hung(number))]:
            del self._ranks[number]
            message = f"{self._config.role_of(number)} {why}"
            logger.error("%s; it is killed", message)
            self._on_hang(number, message)

    def _why_hung(self, number: int) -> str | None:
        rank = self._ranks[number]
        if rank.beat.doing == Doing.STARTING:
            return None
        if rank.silent > self._most:
            is_hung = rank.silent > _PATIENCE * self._most or not _is_starved(rank)
            return f"gave no sign of life for {self._config.hang_timeout_s:g} s" if is_hung else None
        # A rank in a collective waits for those of its own side; while one of them gets on, so will the others.
        own_side = self._is_drafter(number)
        side = [each for other, each in self._ranks.items() if self._is_drafter(other) == own_side]
        match rank.beat.doing:
            case Doing.WORKING if min(each.stepless for each in side) > self._most_stepless:
                return f"computed for {self._config.idle_timeout_s:g} s without an end of its step"
            case Doing.WORKING:
                most, seconds = self._most, self._config.hang_timeout_s
            case Doing.ON_DEVICE:
                most, seconds = self._most_on_device, self._config.device_timeout_s
            case _:
                return None
        return f"made no progress for {seconds:g} s" if min(each.still for each in side) > most else None

    def _is_drafter(self, rank: int) -> bool:
        return rank >= self._config.tensor_parallel_size

    async def _tick_on(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        rank: int | None = None
        try:
            if not hmac.compare_digest((await reader.readline()).strip(), self._token.encode()):
                return
            while line := await reader.readline():
                beat = Beat.from_json(line)
                if rank is None:
                    rank = beat.rank
                    self._ranks.pop(rank, None)  # that of an earlier process
                    current = self._ranks[rank] = _Rank(beat)
                elif self._ranks.get(rank) is not current:
                    return  # it was reported, or another process took its place
                self.take(beat)
            # Its process has ended, which others notice.
            if rank is not None and self._ranks.get(rank) is current:
                del self._ranks[rank]
        except (OSError, ValueError, KeyError, TypeError, asyncio.LimitOverrunError) as error:
            logger.warning("a rank's beats ended: %s", error)
        finally:
            self._connections.discard(writer)
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()


def _state_of(beat: Beat) -> ProcessState | None:
    """Return the state of a rank's process; None if it runs elsewhere."""
    return ProcessState.of(beat.pid) if beat.node and beat.node == node_name() else None


def _is_starved(rank: _Rank) -> bool:
    """Return whether a silent rank's process computes, or waits for the processor or for a disk."""
    now = _state_of(rank.beat)
    if now is None or now.letter in "Tt":
        return False
    return now.letter in "RD" or (rank.seen is not None and now.cpu > rank.seen.cpu)
