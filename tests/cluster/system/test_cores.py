"""How many cores a process may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.system import cores


@pytest.mark.parametrize(
    ("quota", "expected"),
    [(None, 8), ("", 8), ("max 100000\n", 8), ("400000 100000\n", 4), ("50000 100000\n", 1), ("1600000 100000\n", 8)],
)
def test_a_containers_limit_counts(
    quota: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(cores, "CPU_MAX", tmp_path / "cpu.max")
    if quota is not None:
        cores.CPU_MAX.write_text(quota)
    assert cores.num_cores() == expected
