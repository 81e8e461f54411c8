"""The next start removes the folders of killed processes, and no others."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.system.temp_dirs import OwnedTempDir

OWNER = """
import sys, time
from cluster.system.temp_dirs import OwnedTempDir
folder = OwnedTempDir()
(folder.path / "engine.sock").touch()
print(folder.path, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the temporary directory of this process and its children."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.fixture
def owner() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process and its folder."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_a_new_folder_removes_that_of_a_killed_process(owner: tuple[subprocess.Popen[str], Path]) -> None:
    process, folder = owner
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (folder / "engine.sock").exists()
    OwnedTempDir().remove()
    assert not folder.exists()


def test_the_folder_of_a_running_process_is_kept(owner: tuple[subprocess.Popen[str], Path]) -> None:
    _, folder = owner
    mine = OwnedTempDir()
    OwnedTempDir().remove()
    assert (folder / "engine.sock").exists()
    assert mine.path.is_dir()
    mine.remove()
    mine.remove()
    assert not mine.path.exists()


def test_a_folder_without_the_lock_file_is_kept(temporary: Path) -> None:
    others = temporary / "secateur-results"
    others.mkdir()
    (others / "rows.json").touch()
    link = temporary / "secateur-link"
    link.symlink_to(others)
    OwnedTempDir().remove()
    assert (others / "rows.json").exists()
    assert link.is_symlink()
