"""Which GPUs are found: with device files, with MIG, on WSL2, and under CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from pathlib import Path

import pytest

import cluster.system.gpus
from cluster.system.gpus import gpu_names

PLAIN = "GPU 0: NVIDIA H100 (UUID: GPU-a)\nGPU 1: NVIDIA H100 (UUID: GPU-b)\n"
MIG = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-a)
  MIG 3g.20gb     Device  0: (UUID: MIG-1)
  MIG 2g.10gb     Device  1: (UUID: MIG-2)
  MIG 2g.10gb     Device  2: (UUID: MIG-3)
"""
BOTH = MIG + "GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-b)\n"


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Find the GPUs of a machine with these device files, whose nvidia-smi prints this, or does not exist."""

    def names(files: list[str], listed: str | None, visible: str | None, code: int = 0) -> list[str]:
        folder = tmp_path / "machine"
        folder.mkdir()
        for name in files:
            (folder / name).touch()
        tool = tmp_path / "nvidia-smi"
        if listed is not None:
            tool.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] && cat <<'END'\n{listed}END\nexit {code}\n")
            tool.chmod(0o755)
        monkeypatch.setattr(cluster.system.gpus, "_WSL_TOOLS", str(tmp_path))
        monkeypatch.setenv("PATH", "/usr/bin:/bin" if "dxg" in files else f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return gpu_names(folder)

    return names


TWO = ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"]


@pytest.mark.parametrize(
    ("files", "listed", "visible", "names"),
    [
        ([], None, None, []),
        ([], None, "0,1", []),
        (TWO, None, None, ["0", "1"]),
        ([*TWO, *(f"nvidia{index}" for index in range(2, 11))], None, None, [str(index) for index in range(11)]),
        (TWO, PLAIN, None, ["0", "1"]),
        (TWO, PLAIN, "1", ["1"]),
        (TWO, PLAIN, "1,1", ["1"]),
        (TWO, PLAIN, "GPU-b, GPU-a", ["GPU-b", "GPU-a"]),
        (TWO, PLAIN, "", []),
        (TWO, PLAIN, "-1", []),
        (TWO, PLAIN, "1,-1,0", ["1"]),
        (TWO, PLAIN, "0,7,1", ["0"]),
        (["nvidia0"], MIG, None, ["MIG-1", "MIG-2", "MIG-3"]),
        (["nvidia0"], MIG, "MIG-3,MIG-1", ["MIG-3", "MIG-1"]),
        (TWO, BOTH, None, ["MIG-1", "MIG-2", "MIG-3", "1"]),
        (["dxg"], PLAIN, None, ["0", "1"]),
        (["dxg"], PLAIN, "0", ["0"]),
    ],
)
def test_each_gpu_and_each_slice_has_a_name(
    found, files: list[str], listed: str | None, visible: str | None, names: list[str]
) -> None:
    assert found(files, listed, visible) == names


def test_device_files_are_counted_where_the_driver_s_tool_fails(found) -> None:
    assert found(TWO, "NVIDIA-SMI has failed\n", None, code=9) == ["0", "1"]
