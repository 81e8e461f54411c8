"""Collects for `secateur env` and bug reports: versions, processor, memory, GPUs and the environment's settings.

Nothing is imported that is reported on, and no device is touched: `nvidia-smi` tells about GPUs.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from secateur.install import installed_version

PACKAGES = tuple(
    "torch triton ray transformers huggingface-hub safetensors llguidance fastapi uvicorn pydantic httpx2 typer".split()
)
CPU_FLAGS = ("avx2", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
"""Instructions that decide how fast a model runs on a CPU."""
SETTINGS = ("SECATEUR_", "RAY_", "CUDA_", "NVIDIA_", "NCCL_", "HF_", "TRITON_", "OMP_", "OTEL_", "TORCH_")
"""Beginnings of the names of variables that matter."""
MORE_SETTINGS = ("TMPDIR", "XDG_CACHE_HOME", "LD_LIBRARY_PATH", "http_proxy", "https_proxy", "no_proxy", "NO_COLOR")
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "HEADERS", "PROXY")
_CGROUP = Path("/sys/fs/cgroup")
_TIMEOUT_S = 30

Report = dict[str, dict[str, str]]
"""Sections of names and values."""


def report() -> Report:
    """Return all sections."""
    return {
        "versions": _versions(),
        "system": _system(),
        "gpus": _gpus(),
        "ray": {"RAY_ADDRESS": os.environ.get("RAY_ADDRESS", "not set: a command starts a Ray of its own")},
        "settings": _settings(),
    }


def as_text(sections: Report) -> str:
    """Return a block of lines per section."""
    parts = []
    for title, rows in sections.items():
        width = max(map(len, rows), default=0)
        lines = [f"  {name.ljust(width)}  {value}" for name, value in rows.items()] or ["  none"]
        parts.append("\n".join([f"{title}:", *lines]))
    return "\n\n".join(parts)


def _versions() -> dict[str, str]:
    found = {"secateur": installed_version(), "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _system() -> dict[str, str]:
    fields = _cpu_fields()
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache")
    return {
        "os": platform.platform(),
        "cpu": fields.get("model name", platform.processor() or platform.machine()),
        "cores": f"{cores} of {os.cpu_count()} may be used; quota {_cgroup('cpu.max')}",
        "cpu features": " ".join(flag for flag in CPU_FLAGS if flag in flags) or "none of those looked for",
        "memory": f"{_memory('MemAvailable')} of {_memory('MemTotal')} available; limit {_cgroup('memory.max')}",
        "/dev/shm": _room(Path("/dev/shm")),
        "model cache": f"{cache}: {_room(cache)}",
        "executable": sys.executable,
    }


def _cpu_fields() -> dict[str, str]:
    """Return what Linux says of the first core."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def _memory(name: str) -> str:
    """Return an entry of /proc/meminfo, which counts in KiB, in GB."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return "unknown"
    kibibytes = next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)
    return f"{1024 * kibibytes / 1e9:.1f} GB"


def _cgroup(file: str) -> str:
    """Return a limit of this container, as Linux writes it."""
    try:
        return (_CGROUP / file).read_text().strip()
    except OSError:
        return "none"


def _room(folder: Path) -> str:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return f"{usage.free / 1e9:.1f} GB of {usage.total / 1e9:.1f} GB free"


def _gpus() -> dict[str, str]:
    """Return a row for each GPU that nvidia-smi lists; {} without one."""
    tool = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")
    if tool is None:
        return {}
    fields = "index,name,memory.total,memory.used,compute_cap,driver_version"
    command = [tool, f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"nvidia-smi": f"failed: {error}"}
    if done.returncode:
        return {"nvidia-smi": f"failed: {(done.stderr or done.stdout).strip()}"}
    found = {}
    for line in done.stdout.strip().splitlines():
        index, name, total, used, capability, driver = [cell.strip() for cell in line.split(",")]
        found[index] = f"{name}, {total}, {used} used, compute capability {capability}, driver {driver}"
    return found


def _settings() -> dict[str, str]:
    """Return the variables that matter. Of secrets only the presence is told."""
    names = sorted(name for name in os.environ if name.startswith(SETTINGS) or name in MORE_SETTINGS)
    secret = {name for name in names if any(word in name.upper() for word in _SECRETS)}
    return {name: "(set)" if name in secret else os.environ[name] for name in names}
