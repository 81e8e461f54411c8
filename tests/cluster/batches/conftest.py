"""A database of batches in a folder of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.batches.database import BatchDatabase


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[BatchDatabase]:
    opened = BatchDatabase(tmp_path / "batches.sqlite3")
    await opened.open()
    yield opened
    await opened.close()
