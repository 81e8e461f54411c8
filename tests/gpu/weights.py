"""Writes a target and a head of 8B size for the benchmarks of `make gpu`: python -m tests.gpu.weights CACHE [SIZE]."""

import sys
from pathlib import Path

from bench.harness import scaled
from secateur.config import EngineArgs

if __name__ == "__main__":
    with scaled(EngineArgs(device="cuda"), (*sys.argv[2:], "8b+v128256")[0], Path(sys.argv[1]), print):
        pass
