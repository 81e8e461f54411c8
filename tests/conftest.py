"""Shared by all tests: helpers beside the tests are imported by their plain name (`import checkpoints`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
