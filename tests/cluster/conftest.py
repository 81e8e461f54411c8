"""A service with a fake engine per test module, and a factory for services with other settings."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

import secateur
from cluster.text.tokenizer import Tokenizer
from tests.support.fake_service import ANSWER, FakeService, fake_service
from workers.comm.ipc import Submit

MODEL = Path(secateur.__file__).parent / "bundled" / "target"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(MODEL))


@pytest.fixture(scope="module")
def script(tokenizer: Tokenizer) -> Callable[[Submit], list[list[int]]]:
    """ANSWER in steps of three tokens, then the end of text."""
    ids = [*tokenizer.encode(ANSWER), 0]
    return lambda submit: [ids[i : i + 3] for i in range(0, len(ids), 3)]


@pytest.fixture(scope="module")
def service(tokenizer: Tokenizer, script: Any) -> Iterator[FakeService]:
    with tempfile.TemporaryDirectory() as folder, fake_service(tokenizer, Path(folder), script) as running:
        yield running


@pytest.fixture
def http(service: FakeService) -> Iterator[httpx2.Client]:
    with service.http() as client:
        yield client


@pytest.fixture
def own(tokenizer: Tokenizer, script: Any) -> Iterator[Callable[..., FakeService]]:
    """Start a service with these settings."""
    with ExitStack() as stack:

        def start(**settings: Any) -> FakeService:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            used, steps = settings.pop("tokenizer", tokenizer), settings.pop("script", script)
            return stack.enter_context(fake_service(used, folder, steps, **settings))

        yield start
