"""The host's time is counted beside graphs that are imitated, so its run must follow the real ones."""

from __future__ import annotations

import pytest

from tests.bench import gpu_counts


@pytest.mark.slow
def test_the_hosts_time_is_the_sum_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    for name, value in (("BATCHES", (1, 2)), ("NUM_STEPS", 3), ("NUM_ROUNDS", 1), ("WARM_UP", 4)):
        monkeypatch.setattr(gpu_counts, name, value)
    head, *rows, together, yardstick = gpu_counts.host()
    assert head[1:] == ["1 requests", "2 requests"] and min(yardstick[1:]) > 0
    for column in (1, 2):
        parts = [row[column] for row in rows]
        assert min(parts) > 0 and together[column] == pytest.approx(sum(parts), abs=0.01)
