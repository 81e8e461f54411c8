"""The host's time is counted beside graphs that are imitated, so its run must follow the real ones."""

from __future__ import annotations

import pytest

from bench import gpu_counts


@pytest.mark.slow
def test_every_part_of_the_hosts_time_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    for name, value in (("BATCHES", (1, 2)), ("NUM_STEPS", 3), ("NUM_ROUNDS", 1), ("WARM_UP", 4)):
        monkeypatch.setattr(gpu_counts, name, value)
    head, *rows = gpu_counts.host()
    assert head[1:] == ["1 requests", "2 requests"] and len(rows) > 6
    assert all(milliseconds > 0 for _, *own in rows for milliseconds in own)
