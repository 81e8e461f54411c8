"""The process from which ranks are forked. What ranks do is in test_local_engine.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.engine.rank_process import RankStarter
from tests.support.engines import bundled


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_standby_process_has_one_thread_after_its_imports(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forking a process with threads copies their locks as they are."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    starter = RankStarter(replace(bundled(), device=device), {})
    try:
        starter.wait_ready()
        status = Path(f"/proc/{starter.standby_pid}/status").read_text()
        assert "Threads:\t1\n" in status
        assert "torch/lib" in Path(f"/proc/{starter.standby_pid}/maps").read_text()
    finally:
        starter.close()


def test_without_a_standby_nothing_runs_beside_the_ranks() -> None:
    starter = RankStarter(replace(bundled(), standby=False), {})
    starter.wait_ready()
    assert starter.standby_pid is None
    starter.close()
