"""`make gpu` records each part before the next begins, whatever becomes of it. Needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path

from tests.gpu.run import ALONE, TOGETHER, Part, run


def test_parts_that_fail_or_hang_are_recorded_and_do_not_stop_the_others(tmp_path: Path) -> None:
    parts = [
        Part("fails", "", 1, ("json.tool", str(tmp_path / "missing"))),
        Part("hangs", "", 0.02, ("timeit", "-n1", "-r1", "import time; time.sleep(60)")),
        Part("passes", "", 1, ("json.tool", "--help")),
    ]
    assert [run(part, tmp_path) for part in parts] == [False, False, True]
    rows = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [row["part"] for row in rows] == ["fails", "hangs", "passes"]
    assert rows[0]["result"].startswith("failed with status") and rows[1]["result"] == "took too long"
    assert rows[2]["result"] == "passed" and "usage" in (tmp_path / "gpu-passes.log").read_text()


def test_all_of_it_fits_into_13_minutes_of_a_gpu() -> None:
    assert max(part.minutes for part in TOGETHER) + sum(part.minutes for part in ALONE) <= 13
