"""The table of the target's forward, timed at start-up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.support.clockwork import ClockCosts, bench
from verifier.adaptive import profile as profiling
from verifier.adaptive.profile import profile

torch.set_num_threads(1)


SMALL: Any = SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=4, tree_rows=17)


def test_start_up_times_the_target_on_a_few_sizes():
    with bench(ClockCosts(fixed=1, row=1, message=1, fed=0, level=1, node=0)) as b:
        table = profile(b.engine._target, b.engine._config, b.engine._allocator.num_pages)
    assert len(table.rows_T) >= 2 and table.rows_T[0] == 1
    assert (np.diff(table.rows_T) > 0).all() and (np.diff(table.ms_T) >= 0).all() and table.ms_T[0] > 0


def test_a_slow_target_on_a_busy_machine_is_timed_well_beyond_a_tree(monkeypatch):
    """A second per forward, and for a while everything takes twice as long: the table shows neither."""
    clock = iter(range(10**6))
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: 100.0 * next(clock))
    calls: list[int] = []

    def took(target: object, config: object, num_pages: int, num_rows: int) -> float:
        calls.append(num_rows)
        return (1000 + 10 * num_rows) * (2 if 5 < len(calls) < 25 else 1)

    monkeypatch.setattr(profiling, "timed_forward", took)
    table = profile(SimpleNamespace(graphs=None), SMALL, 9)  # type: ignore[arg-type]
    assert table.rows_T.tolist() == [1, 2, 3, 4, 6, 9, 13, 19, 28]
    assert table.ms_T.tolist() == [1000 + 10 * rows for rows in table.rows_T]
