"""Writes the padded 8B target and its head for the benchmarks of `make gpu`: python -m tests.gpu.weights CACHE."""

import sys
from pathlib import Path

from bench.harness import scaled
from secateur.config import EngineArgs

if __name__ == "__main__":
    with scaled(EngineArgs(device="cuda"), "8b", Path(sys.argv[1]), print):
        pass
