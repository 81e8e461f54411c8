"""Shared by all tests: helpers beside the tests are imported by their plain name (`import checkpoints`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="greedy parity on all 50 prompts, not 6")
