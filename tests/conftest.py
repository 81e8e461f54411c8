"""Shared by all tests: helpers beside the tests are imported by their plain name (`import checkpoints`)."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="all 50 prompts for parity, not 6; also what is marked `full`")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        skip = pytest.mark.skip(reason="one more engine of its kind: --full")
        for item in items:
            if "full" in item.keywords:
                item.add_marker(skip)
