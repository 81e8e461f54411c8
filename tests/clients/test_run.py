"""The scripts name their packages with versions, the README names the scripts, and what cannot run is not called ok."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.clients import run

SCRIPTS = sorted(run.SCRIPTS.iterdir())
PINNED = {".py": r"[\w.-]+(\[\w+\])?==\d[\w.]*", ".mjs": r"(@[\w-]+/)?[\w.-]+@\d[\w.]*"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_every_script_names_its_packages_with_versions_and_is_in_the_readme(script: Path) -> None:
    packages = run.packages_of(script)
    assert packages and all(re.fullmatch(PINNED[script.suffix], package) for package in packages)
    assert f"| `{script.name.removeprefix('with_')}` |" in (run.SCRIPTS.parent / "README.md").read_text()


def test_scripts_for_node_are_not_run_without_it_and_not_ok(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "NODE", None)
    monkeypatch.setattr(sys, "argv", ["run", "openai.mjs", "--environments", str(tmp_path)])
    assert run.main() == 0
    told = capsys.readouterr().out
    assert "openai.mjs       not run: needs node and npm" in told and "0 served, 0 failed, 1 not run" in told


def test_a_script_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run", "curl.py"])
    with pytest.raises(SystemExit):
        run.main()
