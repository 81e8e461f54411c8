"""The faults of a chaos run, and the processes that they strike."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from cluster.system.processes import descendants, is_running, name_of


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal to the process of this name."""

    name: str
    process: str
    number: signal.Signals
    is_seen: bool = False
    """True if clients without retries may see it: their connection is the process's own."""

    def strike(self, among: Collection[int]) -> int:
        """Send the signal to the process and return its id. among: processes that do not belong to the service."""
        [pid] = processes(self.process, among)
        os.kill(pid, self.number)
        return pid


def processes(name: str, among: Collection[int]) -> list[int]:
    """Return the service's processes of this name, sorted. among: as for `Fault.strike`."""
    return sorted(pid for pid in descendants() if pid not in among and name in (name_of(pid), _title(pid)))


def _title(pid: int) -> str:
    """Return what Ray writes over a process's command line: "ray::" and what it runs, up to a colon."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
    except OSError:
        return ""
    return title.partition("::")[2].partition(":")[0].partition(".")[0] if is_running(pid) else ""


REPLICA = "ServeReplica"
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
FAULTS = (
    Fault("drafter", "drafter 0", KILL),
    Fault("rank-1", "verifier 1", KILL),
    Fault("rank-0", "verifier 0", KILL),
    Fault("replica", REPLICA, KILL, is_seen=True),
    Fault("proxy", "ProxyActor", KILL, is_seen=True),
    Fault("controller", "ServeController", KILL),
    Fault("drafter-hangs", "drafter 0", STOP),
    Fault("rank-hangs", "verifier 1", STOP),
    Fault("replica-hangs", REPLICA, STOP, is_seen=True),
)
