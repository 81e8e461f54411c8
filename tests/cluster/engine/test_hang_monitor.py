"""Ranks that hang are noticed, and ranks that are slow are not taken for them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cluster.engine.hang_monitor import HangMonitor, ProcessState
from workers.config import DraftConfig, EngineConfig
from workers.pulse import Beat, Doing, Pulse, node_name, send_beats

TIMEOUT_S, TICKS = 5.0, 10
DRAFT = DraftConfig(method="eagle3", model_path="", tensor_parallel_size=1)
CONFIG = EngineConfig(model_path="", tensor_parallel_size=2, draft=DRAFT, hang_timeout_s=TIMEOUT_S)
WORKING, WAITING, ON_DEVICE, STARTING = Doing.WORKING, Doing.WAITING, Doing.ON_DEVICE, Doing.STARTING


class Watched:
    """A monitor of two verifiers and a drafter, and the beats that it gets before each tick."""

    def __init__(self, config: EngineConfig = CONFIG) -> None:
        self.hung: dict[int, str] = {}
        self.monitor = HangMonitor(config, self.hung.__setitem__)
        self.counts = {0: 0, 1: 0, 2: 0}
        self.cpu_s = {0: 0.0, 1: 0.0, 2: 0.0}

    def run(self, ticks: int, *, count: set[int] = frozenset(), cpu: set[int] = frozenset(), **doing: Doing) -> None:
        """Tick. v0, v1, d0: what the ranks do, if they give beats. count, cpu: ranks whose counts and clocks go on."""
        for _ in range(ticks):
            for rank, name in enumerate(("v0", "v1", "d0")):
                self.counts[rank] += rank in count
                self.cpu_s[rank] += 0.25 * (rank in cpu)
                if name in doing and rank not in self.hung:
                    self.monitor.take(
                        Beat(rank=rank, doing=doing[name], count=self.counts[rank], cpu_s=self.cpu_s[rank])
                    )
            self.monitor.tick()


@pytest.fixture
def watched() -> Watched:
    own = Watched()
    own.run(1, v0=WORKING, v1=WAITING, d0=WAITING)
    return own


def test_a_rank_that_gives_no_beat_is_reported_once(watched: Watched) -> None:
    for rank, rest in ((2, {"v0": WORKING, "v1": WORKING}), (1, {"v0": WORKING})):
        watched.run(TICKS - 2, count={0}, **rest)
        assert rank not in watched.hung
        watched.run(3, count={0}, **rest)
        assert rank in watched.hung
    assert watched.hung == {
        2: "drafter 0 gave no sign of life for 5 s",
        1: "verifier 1 gave no sign of life for 5 s",
    }


def test_a_rank_that_is_stuck_is_reported_and_those_that_wait_for_it_are_not(watched: Watched) -> None:
    watched.run(TICKS + 2, v0=WAITING, v1=WAITING, d0=WORKING)
    assert watched.hung == {2: "drafter 0 made no progress for 5 s"}


@pytest.mark.parametrize("doing", [WORKING, ON_DEVICE])
def test_a_side_that_is_stuck_is_reported(watched: Watched, doing: Doing) -> None:
    watched.run(TICKS + 2, v0=doing, v1=doing, d0=WAITING)
    assert watched.hung.keys() == {0, 1}


@pytest.mark.parametrize("cpu", [{0}, {1}, {0, 1}])
def test_a_long_step_is_not_stuck_while_a_rank_of_its_side_computes(watched: Watched, cpu: set[int]) -> None:
    watched.run(20 * TICKS, cpu=cpu, v0=WORKING, v1=WORKING, d0=WAITING)
    assert watched.hung == {}


def test_a_step_without_an_end_is_reported_after_the_timeout_between_ranks() -> None:
    """No other rank waits longer for it. A rank that starts may compute for any time."""
    watched = Watched(replace(CONFIG, step_timeout_s=30.0))
    num_ticks = 2 * 300
    watched.run(2 * num_ticks, cpu={0, 1}, v0=STARTING, v1=STARTING, d0=WAITING)
    watched.run(num_ticks, cpu={0, 1}, v0=WORKING, v1=WORKING, d0=WAITING)
    watched.run(1, cpu={0, 1}, count={1}, v0=WORKING, v1=WORKING, d0=WAITING)
    watched.run(num_ticks, cpu={0, 1}, v0=WORKING, v1=WORKING, d0=WAITING)
    assert watched.hung == {}
    watched.run(2, cpu={0, 1}, v0=WORKING, v1=WORKING, d0=WAITING)
    assert watched.hung == {rank: f"verifier {rank} computed for 300 s without an end of its step" for rank in (0, 1)}


def test_messages_count_as_progress_even_without_cpu_time(watched: Watched) -> None:
    for _ in range(20):
        watched.run(TICKS - 2, v0=WORKING, v1=WORKING, d0=WAITING)
        watched.run(1, count={1}, v0=WORKING, v1=WORKING, d0=WAITING)
    assert watched.hung == {}


def test_another_side_s_progress_does_not_count(watched: Watched) -> None:
    watched.run(TICKS + 2, cpu={0, 1}, v0=WORKING, v1=WORKING, d0=WORKING)
    assert watched.hung.keys() == {2}


@pytest.mark.parametrize(
    ("batched", "length", "times"), [(2048, 131_072, 1), (8192, 131_072, 4), (8192, 8192, 1), (2048, 262_144, 2)]
)
def test_a_device_has_more_time_where_larger_passes_are_configured(batched: int, length: int, times: int) -> None:
    """8,192 tokens behind 128k are 18 s of an L4. A rank that hangs on the host is noticed as soon as ever."""
    config = replace(CONFIG, max_num_batched_tokens=batched, max_model_len=length)
    slow = Watched(config)
    slow.run(times * TICKS, v0=ON_DEVICE, v1=ON_DEVICE, d0=WAITING)
    assert slow.hung == {}
    slow.run(2, v0=ON_DEVICE, v1=ON_DEVICE, d0=WAITING)
    assert slow.hung == {rank: f"verifier {rank} made no progress for {5 * times} s" for rank in (0, 1)}
    stuck = Watched(config)
    stuck.run(TICKS + 2, v0=WAITING, v1=WAITING, d0=WORKING)
    assert stuck.hung == {2: "drafter 0 made no progress for 5 s"}


def test_ranks_that_start_are_not_judged() -> None:
    own = Watched()
    own.run(1, v0=STARTING, v1=STARTING, d0=STARTING)
    own.run(20 * TICKS, d0=STARTING)
    assert own.hung == {}
    own.run(1, v0=WORKING, v1=WAITING, d0=STARTING)
    own.run(TICKS + 2, v0=WAITING, d0=STARTING)
    assert own.hung.keys() == {1}


def test_a_drafter_that_loads_keeps_no_verifier_from_being_noticed(watched: Watched) -> None:
    watched.run(TICKS + 2, cpu={2}, v0=WORKING, v1=WORKING, d0=STARTING)
    assert watched.hung.keys() == {0, 1}


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_silent_process_that_computes_is_starved_and_a_stopped_one_is_not(watched: Watched, is_stopped: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        beat = Beat(rank=2, doing=WORKING, count=1, cpu_s=0.0, pid=process.pid, node=node_name())
        watched.monitor.take(beat)
        if is_stopped:
            process.send_signal(signal.SIGSTOP)
            while ProcessState.of(process.pid).letter != "T":
                time.sleep(0.01)
        try:
            watched.run(TICKS + 2, count={0, 1}, v0=WORKING, v1=WORKING)
            assert (2 in watched.hung) == is_stopped
            watched.run(6 * TICKS, count={0, 1}, v0=WORKING, v1=WORKING)
            assert watched.hung == {2: "drafter 0 gave no sign of life for 5 s"}, "it has more time, but not forever"
        finally:
            process.kill()


def test_a_silent_process_of_another_node_is_not_looked_for(watched: Watched) -> None:
    watched.monitor.take(Beat(rank=2, doing=WORKING, count=1, cpu_s=0.0, pid=os.getpid(), node="another"))
    watched.run(TICKS + 2, count={0, 1}, v0=WORKING, v1=WORKING)
    assert watched.hung.keys() == {2}


# ---- real threads and sockets


def with_monitor(body: Callable[[str, dict[int, str]], Any], timeout_s: float = 2.0) -> dict[int, str]:
    """Run `body` in a thread, with the monitor's address, and return the ranks that hung."""

    async def main() -> dict[int, str]:
        hung: dict[int, str] = {}
        config = EngineConfig(model_path="", draft=DRAFT, hang_timeout_s=timeout_s)
        monitor = HangMonitor(config, hung.__setitem__)
        address = await monitor.listen("127.0.0.1")
        try:
            await asyncio.to_thread(body, address, hung)
        finally:
            monitor.close()
        return hung

    return asyncio.run(main())


def wait_for_one(hung: dict[int, str]) -> None:
    deadline = time.monotonic() + 60
    while not hung:
        assert time.monotonic() < deadline, "no rank is found to hang"
        time.sleep(0.05)


def in_thread(pulse: Pulse, work: Callable[[], None]) -> threading.Thread:
    def run() -> None:
        pulse.serve()
        work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_thread_that_computes_is_told_from_one_that_is_blocked() -> None:
    found = threading.Event()

    def compute() -> None:
        while not found.is_set():
            sum(range(10_000))

    def body(address: str, hung: dict[int, str]) -> None:
        pulses = [Pulse(), Pulse()]
        threads = [in_thread(pulses[0], compute), in_thread(pulses[1], found.wait)]
        for rank, pulse in enumerate(pulses):
            send_beats(address, rank, pulse)
        wait_for_one(hung)
        found.set()
        for thread in threads:
            thread.join()

    assert with_monitor(body) == {1: "drafter 0 made no progress for 2 s"}


def test_a_thread_that_waits_for_its_device_is_judged_by_its_results_alone() -> None:
    """The driver may spin while it waits."""
    found = threading.Event()

    def spin(pulse: Pulse, slice_s: float) -> None:
        while not found.is_set():
            with pulse.on_device():
                until = time.monotonic() + slice_s
                while time.monotonic() < until and not found.is_set():
                    pass

    def body(address: str, hung: dict[int, str]) -> None:
        pulses = [Pulse(), Pulse()]
        threads = [
            in_thread(pulse, lambda pulse=pulse, s=s: spin(pulse, s))
            for pulse, s in zip(pulses, (0.1, 99), strict=True)
        ]
        for rank, pulse in enumerate(pulses):
            send_beats(address, rank, pulse)
        wait_for_one(hung)
        found.set()
        for thread in threads:
            thread.join()

    assert with_monitor(body) == {1: "drafter 0 made no progress for 2 s"}


def test_a_rank_that_has_ended_is_not_reported_and_its_successor_is_watched() -> None:
    import socket

    def beats(address: str, *lines: bytes) -> socket.socket:
        place = json.loads(address)
        connection = socket.create_connection((place["host"], place["port"]))
        connection.sendall(place["token"].encode() + b"\n" + b"".join(lines))
        return connection

    beat = Beat(rank=1, doing=WORKING, count=1, cpu_s=0.0).to_json().encode() + b"\n"

    def body(address: str, hung: dict[int, str]) -> None:
        beats(address, beat).close()
        beats(address, b"not a beat\n").close()
        place = json.loads(address)
        with socket.create_connection((place["host"], place["port"])) as stranger:
            stranger.sendall(b"no token\n" + beat)
            assert stranger.recv(1) == b""
        time.sleep(3.5)
        assert hung == {}
        with beats(address, beat):
            wait_for_one(hung)

    assert with_monitor(body) == {1: "drafter 0 gave no sign of life for 2 s"}


def test_a_pulse_returns_to_what_it_was() -> None:
    pulse = Pulse()
    with pulse.waiting(), pulse.on_device():
        assert pulse.beat(0).doing == STARTING
    pulse.serve()
    with pulse.waiting():
        assert pulse.beat(0).doing == WAITING
        with pulse.on_device():
            assert pulse.beat(0).doing == ON_DEVICE
        assert pulse.beat(0).doing == WAITING
    beat = pulse.beat(3)
    assert (beat.doing, beat.count) == (WORKING, 4)
    assert Beat.from_json(beat.to_json()) == beat
