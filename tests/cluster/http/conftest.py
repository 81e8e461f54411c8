"""A service that runs batches, with a fake engine, per test module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.support.fake_service import FakeService, fake_service


@pytest.fixture(scope="module")
def batching(tokenizer: Any, script: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeService]:
    folder = tmp_path_factory.mktemp("b")
    with fake_service(tokenizer, folder, script, batch_dir=folder / "batches") as running:
        yield running


@pytest.fixture
def api(batching: FakeService) -> Iterator[httpx2.Client]:
    with batching.http() as client:
        yield client
