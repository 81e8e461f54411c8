"""A soak run names what has grown."""

from __future__ import annotations

import subprocess
import sys

from cluster.system.processes import descendants
from tests.chaos.soak import Footprint


def test_growth_beyond_a_tenth_is_named() -> None:
    first = Footprint(num_processes=9, megabytes=1000, num_files=200)
    assert first.growth_since(first) == []
    assert Footprint(num_processes=9, megabytes=1100, num_files=100).growth_since(first) == []
    grown = Footprint(num_processes=10, megabytes=1101, num_files=200)
    assert grown.growth_since(first) == ["num_processes grew from 9 to 10", "megabytes grew from 1000 to 1101"]


def test_a_footprint_counts_the_descendants_that_are_not_others() -> None:
    before = descendants()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = Footprint.of_descendants(before)
        process.kill()
    assert (found.num_processes, found.num_files >= 3, found.megabytes < 100) == (1, True, True)
    assert Footprint.of_descendants(descendants()) == Footprint(0, 0, 0)
