"""Half an hour of load with a fault every two minutes: no token may be wrong, nothing may grow.

    python -m tests.chaos.soak

The load is that of `make chaos`: streams over plain HTTP and through our clients, and batch jobs. Exit status: 0 if all
of its rules hold and the service ends with about as much memory and as many open files as after its first fault,
else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Collection
from contextlib import suppress
from itertools import cycle
from typing import NamedTuple

import psutil

from cluster.serve.launch import running
from cluster.system.processes import descendants
from secateur.config import EngineArgs
from tests.chaos.faults import FAULTS
from tests.chaos.run import Chaos, Leftovers

MAY_GROW = 1.1
"""Memory and files at the end may be this many times those after the first fault."""


class Footprint(NamedTuple):
    """Counts what the idle service holds."""

    num_processes: int
    megabytes: int  # unique to its processes (USS)
    num_files: int

    @classmethod
    def of_descendants(cls, others: Collection[int]) -> Footprint:
        """Measure the descendants of this process, except `others`."""
        found = []
        for pid in set(descendants()) - set(others):
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                found.append((process.memory_full_info().uss, process.num_fds()))
        return cls(len(found), sum(uss for uss, _ in found) >> 20, sum(files for _, files in found))

    def growth_since(self, first: Footprint) -> list[str]:
        """Return what has grown by more than MAY_GROW allows."""
        return [
            f"{name} grew from {before} to {now}"
            for name, before, now in zip(self._fields, first, self, strict=True)
            if now > MAY_GROW * before
        ]


async def soak(chaos: Chaos, *, minutes: float, period_s: float, others: Collection[int]) -> list[str]:
    """Strike every `period_s` seconds, with load in between; return what was wrong."""
    await chaos.learn()
    end, footprints, problems = time.monotonic() + 60 * minutes, [], []
    for fault in cycle(FAULTS):
        began = time.monotonic()
        done = await chaos.strike(fault)
        problems += [f"{fault.name}: {problem}" for problem in done.problems]
        footprints.append(Footprint.of_descendants(others))
        print(f"{done}; then {footprints[-1]}", flush=True)
        while time.monotonic() < min(began + period_s, end):
            problems += [f"after {fault.name}: {problem}" for problem in await chaos.calm()]
        if time.monotonic() >= end:
            return problems + footprints[-1].growth_since(footprints[0])
    raise AssertionError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="[%(default)s]")
    parser.add_argument("--period", type=float, default=120.0, help="seconds from fault to fault [%(default)s]")
    parser.add_argument("--streams", type=int, default=16, help="at a time [%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=200, help="tokens of each [%(default)s]")
    asked = parser.parse_args()
    args = EngineArgs.load({"tensor_parallel_size": 2, "device": "cpu", "port": 0, "max_model_len": 1024})
    before = Leftovers()
    with running(args) as url:
        chaos = Chaos(url, num_streams=asked.streams, max_tokens=asked.max_tokens, others=before.processes)
        others = before.processes
        problems = asyncio.run(soak(chaos, minutes=asked.minutes, period_s=asked.period, others=others))
    problems += [f"left behind: {each}" for each in before.found()]
    print("\n".join(problems) or "every token came, once, nothing grew, and nothing is left")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
