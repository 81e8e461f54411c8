"""Runs other projects' clients, each by its documented calls, against a service on this machine: `make clients`.

Each script names the packages that it needs, as Python's inline script metadata (PEP 723), and runs in a virtual
environment of its own, which the first run makes.

Exit status: 0 if all clients are served, else 1.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from hashlib import sha256
from pathlib import Path

from cluster.local_service import local_service
from secateur.config import EngineArgs

SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 300.0
_METADATA = re.compile(r"^# /// script$(.*?)^# ///$", re.MULTILINE | re.DOTALL)


def interpreter(script: Path, folder: Path) -> Path:
    """Return the interpreter of a script's environment; make the environment if its packages are new."""
    found = _METADATA.search(script.read_text())
    assert found is not None, f"{script} does not name its packages"
    metadata = tomllib.loads(re.sub("^# ?", "", found[1], flags=re.MULTILINE))
    packages: list[str] = metadata["dependencies"]
    environment = folder / f"{script.stem}-{sha256(repr(packages).encode()).hexdigest()[:8]}"
    if not (environment / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *packages], check=True)
        (environment / "complete").touch()
    return environment / "bin" / "python"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="scripts by their names, such as openai; all if there are none")
    parser.add_argument("--environments", type=Path, default=Path(".clients"), help="a folder [%(default)s]")
    parser.add_argument("--model", default="bundled:target", help="the model to serve [%(default)s]")
    asked = parser.parse_args()
    scripts = {script.stem.removeprefix("with_"): script for script in sorted(SCRIPTS.glob("with_*.py"))}
    chosen = asked.only or list(scripts)
    pythons = {name: interpreter(scripts[name], asked.environments.resolve()) for name in chosen}
    settings = {"model": asked.model, "port": 0, "served_model_name": "secateur"}
    num_failed = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        local_service(EngineArgs.load({**settings, "batch_dir": folder})) as url,
    ):
        # Without proxies and telemetry, which need a network.
        env = os.environ | {"SECATEUR_URL": url, "NO_PROXY": "*", "DO_NOT_TRACK": "1", "OPENAI_API_KEY": "none"}
        env.pop("PYTHONPATH", None)
        for name in chosen:
            began = time.monotonic()
            try:
                done = subprocess.run([str(pythons[name]), str(scripts[name])], env=env, timeout=TIMEOUT_S)
                outcome = "ok" if done.returncode == 0 else f"failed with status {done.returncode}"
            except subprocess.TimeoutExpired:
                outcome = f"did not end within {TIMEOUT_S:.0f} s"
            num_failed += outcome != "ok"
            print(f"{name:12} {outcome} ({time.monotonic() - began:.1f} s)", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
