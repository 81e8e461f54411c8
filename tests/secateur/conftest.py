"""Fixtures of runs of batch files."""

from pathlib import Path

import pytest

from tests.support.batch_runs import line, write


@pytest.fixture
def source(tmp_path) -> Path:
    return write(tmp_path / "in.jsonl", *[line(f"q-{n}") for n in range(30)])


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "out.jsonl"
