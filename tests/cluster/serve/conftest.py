"""One Ray and one service for all tests of this folder, because a start takes 20 to 60 s."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from secateur.config import EngineArgs


@pytest.fixture(scope="session")
def args() -> EngineArgs:
    """The arguments of the service."""
    front = {"port": 0, "allowed_origins": ["https://app.example"], "root_path": "/llm"}
    return EngineArgs.load({"tensor_parallel_size": 2, "device": "cpu", "max_num_seqs": 8, **front})


@pytest.fixture(scope="session")
def url(args: EngineArgs) -> Iterator[str]:
    """The service of `secateur serve -tp 2`. Afterwards no process may be left."""
    os.environ.pop("RAY_ADDRESS", None)
    from cluster.serve.launch import running
    from cluster.system.processes import descendants, wait_gone

    before = set(descendants())
    with running(args) as base_url:
        yield base_url
        ours = set(descendants()) - before
    assert ours, "the service ran in no process of its own"
    assert wait_gone(ours, timeout_s=15) == []
