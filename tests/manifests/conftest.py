"""Every overlay, and the service in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import (
    OVERLAYS,
    service_of,
)


@pytest.fixture(params=OVERLAYS, ids=lambda path: path.name)
def overlay(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def service(overlay: Path) -> dict[str, Any]:
    return service_of(overlay)
