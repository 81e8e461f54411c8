"""A rank's signs of life: a thread tells the service front twice a second what the rank does and whether it gets on.

A stopped process tells nothing. In a stuck one the thread goes on, but its beats show no progress: messages and steps
are counted, and so is the CPU time of the rank's own thread while it computes on the host. So a long prompt or a long
compilation is told from a deadlock however long it takes. While the thread waits for a device it may spin, and its CPU
time says nothing. While it waits for a peer, the peer is the one to look at.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

BEAT_S = 0.5


class Doing(StrEnum):
    """What a rank does."""

    STARTING = "starting"
    """It loads, compiles and warms up, which may take any time and may hold the interpreter's lock."""
    WORKING = "working"
    WAITING = "waiting"
    """For a message of a peer, or until a peer takes one."""
    ON_DEVICE = "on_device"
    """It waits for its device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a rank tells. Example: Beat(rank=1, doing=Doing.WORKING, count=4711, cpu_s=20.6, pid=99, node="8f3c-401")"""

    rank: int
    doing: Doing
    count: int
    """Of messages and steps so far."""
    cpu_s: float
    """CPU time of the rank's thread so far, without what it spent waiting for its device."""
    pid: int = 0
    node: str = ""
    """Where `pid` is valid, see `node_name`."""

    def to_json(self) -> str:
        """Return the beat as one line, without its end."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str | bytes) -> Beat:
        """Read a line. Raises ValueError, KeyError or TypeError."""
        fields = json.loads(line)
        return cls(**{**fields, "doing": Doing(fields["doing"])})


@cache
def node_name() -> str:
    """Return a name that processes have in common if they see each other in /proc; "" where there is none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


class Pulse:
    """What the process's rank does. Its thread calls the methods, which take less than a microsecond; see `PULSE`."""

    def __init__(self) -> None:
        self._doing = Doing.STARTING
        self._count = 0
        self._thread = threading.main_thread().ident
        self._on_device_s = 0.0  # CPU time
        self._frozen_s: float | None = None  # what `beat` tells while the thread waits for its device
        self._has_begun = threading.Event()

    def serve(self) -> None:
        """Call this in the rank's thread when it has started; the front is told at once."""
        self._thread = threading.get_ident()
        self._doing = Doing.WORKING
        self._has_begun.set()

    def advance(self) -> None:
        """Note that the rank gets on."""
        self._count += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that the rank waits for a peer meanwhile."""
        before = self._doing
        if before != Doing.STARTING:
            self._doing = Doing.WAITING
        try:
            yield
        finally:
            self._doing = before
            self._count += 1

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Note that the rank waits for its device meanwhile."""
        before = self._doing
        if before != Doing.STARTING:
            self._doing = Doing.ON_DEVICE
        began = time.thread_time()
        self._frozen_s = began - self._on_device_s
        try:
            yield
        finally:
            self._on_device_s += time.thread_time() - began
            self._frozen_s = None
            self._doing = before
            self._count += 1

    def wait_for_next_beat(self) -> None:
        """Wait until the next beat is due. The sender's thread calls it."""
        if self._has_begun.is_set():
            time.sleep(BEAT_S)
        else:
            self._has_begun.wait(BEAT_S)

    def beat(self, rank: int) -> Beat:
        """Return the present state. Any thread may call it."""
        doing, frozen_s = self._doing, self._frozen_s
        cpu_s = self._cpu_s() - self._on_device_s if frozen_s is None else frozen_s
        return Beat(rank=rank, doing=doing, count=self._count, cpu_s=cpu_s, pid=os.getpid(), node=node_name())

    def _cpu_s(self) -> float:
        if self._thread is None or not hasattr(time, "pthread_getcpuclockid"):
            return time.process_time()
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread))


PULSE = Pulse()
"""The process's own: as with a logger, what waits is too deep down to be handed it."""


def send_beats(address: str, rank: int, pulse: Pulse = PULSE) -> None:
    """Send beats from a thread until the front is gone. address: as the front's monitor names it; it holds a secret."""
    place = json.loads(address)
    connection = socket.create_connection((place["host"], place["port"]))
    connection.sendall(f"{place['token']}\n".encode())

    def send() -> None:
        with connection:
            try:
                while True:
                    connection.sendall(f"{pulse.beat(rank).to_json()}\n".encode())
                    pulse.wait_for_next_beat()
            except OSError:
                pass

    threading.Thread(target=send, name="pulse", daemon=True).start()


def send_beats_if_asked(variable: str, rank: int) -> None:
    """Send beats to the address in this environment variable, if it is set."""
    if address := os.environ.get(variable):
        send_beats(address, rank)
