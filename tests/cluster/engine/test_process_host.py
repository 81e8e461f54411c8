"""The process from which ranks are forked. What ranks do is in test_local_engine.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.engine.process_host import ProcessHost
from tests.support.engines import bundled
from workers.config import EngineConfig


def host(config: EngineConfig) -> ProcessHost:
    return ProcessHost(config, device_env=lambda config, rank: {}, on_joined=lambda: None)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
async def test_the_standby_process_has_one_thread_after_its_imports(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forking a process with threads copies their locks as they are."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    own = host(replace(bundled(), device=device))
    try:
        await own.ready()
        status = Path(f"/proc/{own.standby_pid}/status").read_text()
        assert "Threads:\t1\n" in status
        assert "torch/lib" in Path(f"/proc/{own.standby_pid}/maps").read_text()
    finally:
        own.close()


async def test_without_a_standby_nothing_runs_beside_the_ranks() -> None:
    own = host(replace(bundled(), standby=False))
    await own.ready()
    assert own.standby_pid is None
    own.close()
