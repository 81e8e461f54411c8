"""The benchmarks of a GPU run to their end on a simulated one, so that a real one meets no surprise of Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engines import ROOT

pytest.importorskip("triton")
SIMULATED = os.pathsep.join([str(ROOT / "tests" / "support" / "simulated"), str(ROOT)])
PROFILE = ("--target-cost", "256x9", "--requests", "1", "2", "--rows", "2", "--repeat", "1")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("command", "ends"),
    [
        (("bench.kernels", "--tiny", "--output", "."), ("## Delta nets", "top 8 and sum, 272 rows")),
        (("bench.gpu_profile", *PROFILE), ("## 2 requests of 17 rows", "## tree: 2 trees", "## block: 2 trees")),
    ],
    ids=["kernels", "profile"],
)
def test_a_benchmark_of_a_gpu_runs_on_a_simulated_one(
    tmp_path: Path, command: tuple[str, ...], ends: tuple[str, ...]
) -> None:
    environment = os.environ | {"PYTHONPATH": SIMULATED, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(end in done.stdout for end in ends)
