"""Reports: what is written, under which name, and that nothing measured is lost."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.bench.report import Report, reporting, unused_stem
from secateur.errors import ConfigError

QUIET = [].append


@dataclass
class Row:
    name: str
    ms: float
    error: float | None = None


def test_rows_are_lines_of_the_json_and_of_a_table(tmp_path: Path) -> None:
    with reporting(tmp_path, "speed", {"model": "m", "seed": None, "notes": ["in turns"]}, QUIET) as report:
        assert report.add("rows", Row("a", 1.23456)) == {"name": "a", "ms": 1.235, "error": None}
        report.add("rows", {"name": "b", "ms": 20.0, "raw": [1.0, 2.0]})
        report.add("more", {"itl_ms": {"p50": 1.00004, "p99": 2}, "load": 1})
    written = json.loads(report.stem.with_suffix(".json").read_text())
    assert written["rows"] == [{"name": "a", "ms": 1.235, "error": None}, {"name": "b", "ms": 20.0, "raw": [1.0, 2.0]}]
    text = report.stem.with_suffix(".md").read_text()
    assert "| name | ms |\n| --- | --- |\n| a | 1.235 |\n| b | 20 |\n" in text, "lists and empty columns are left out"
    assert "## More\n\n| itl ms: p50, p99 | load |\n| --- | --- |\n| 1, 2 | 1 |\n" in text
    assert "- model: m\n- in turns\n" in text and "seed" not in text
    assert report.json == report.stem.with_suffix(".json").read_text() and report.markdown == text


def test_what_is_the_same_in_all_rows_stands_above_them(tmp_path: Path) -> None:
    report = Report(tmp_path / "x", "x", {})
    for number in range(3):
        report.add("rows", {"method": "eagle3", "number": number})
    assert "Everywhere: method eagle3.\n\n| number |\n| --- |\n| 0 |" in report.markdown


def test_rows_measured_before_an_error_are_written(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), reporting(tmp_path, "speed", {}, QUIET) as report:
        report.add("rows", Row("a", 1.0))
        raise KeyboardInterrupt
    assert len(json.loads(report.stem.with_suffix(".json").read_text())["rows"]) == 1


def test_a_run_without_rows_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing"), reporting(tmp_path, "speed", {}, QUIET):
        raise ValueError("nothing was measured")
    assert list(tmp_path.iterdir()) == []


def test_reports_of_the_same_day_get_different_names(tmp_path: Path) -> None:
    stems = [unused_stem(tmp_path, "speed", "300m", None) for _ in range(3)]
    assert [stem.name.partition("-speed-")[2] for stem in stems] == ["300m", "300m-2", "300m-3"]
    assert unused_stem(tmp_path, "speed").name.endswith("-speed")
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ConfigError, match="--output: cannot write"):
        unused_stem(blocked, "speed")
