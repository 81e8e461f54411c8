"""Runs other projects' clients, each by its documented calls, against a service on this machine: `make clients`.

Each script names the packages that it needs, with their versions, as Python's inline script metadata (PEP 723), a
script for Node in the same form behind `//`. It runs in an environment of its own, which the first run makes. Scripts
for Node are left out, and said to be, where there is no Node.

Exit status: 0 if all clients that ran are served, else 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from hashlib import sha256
from pathlib import Path

from cluster.convert import engine_config, with_tokenizer
from cluster.local_service import local_service
from secateur.config import EngineArgs

SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 600.0
NODE = shutil.which("node") if shutil.which("npm") else None
_METADATA = re.compile(r"^(#|//) /// script$(.*?)^\1 ///$", re.MULTILINE | re.DOTALL)


def packages_of(script: Path) -> list[str]:
    """Return the packages that a script names."""
    found = _METADATA.search(script.read_text())
    assert found is not None, f"{script} does not name its packages"
    packages: list[str] = tomllib.loads(re.sub(f"^{found[1]} ?", "", found[2], flags=re.MULTILINE))["dependencies"]
    return packages


def command(script: Path, folder: Path) -> list[str]:
    """Return the command that runs a script in its environment; make the environment if its packages are new."""
    packages = packages_of(script)
    environment = folder / f"{script.stem}-{sha256(repr(packages).encode()).hexdigest()[:8]}"
    install = _install_for_node if script.suffix == ".mjs" else _install_for_python
    if not (environment / "complete").exists():
        shutil.rmtree(environment, ignore_errors=True)
        environment.mkdir(parents=True)
        install(environment, packages)
        (environment / "complete").touch()
    if script.suffix == ".mjs":
        assert NODE is not None
        # Node looks for packages beside the script, wherever it is started.
        return [NODE, shutil.copy(script, environment)]
    return [str(environment / "bin" / "python"), str(script)]


def _install_for_python(environment: Path, packages: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *packages], check=True)


def _install_for_node(environment: Path, packages: list[str]) -> None:
    npm = ["npm", "install", "--prefix", str(environment), "--no-audit", "--no-fund", "--ignore-scripts"]
    subprocess.run([*npm, "--loglevel=error", *packages], check=True)


def outcome_of(argv: list[str], env: dict[str, str]) -> str:
    """Run a script; return `ok`, or how it failed."""
    try:
        done = subprocess.run(argv, env=env, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"did not end within {TIMEOUT_S:.0f} s"
    return "ok" if done.returncode == 0 else f"failed with status {done.returncode}"


def run_all(commands: dict[str, list[str]], model: str) -> dict[str, str]:
    """Run these commands one after the other against a service of a model; return their outcomes."""
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = {"model": model, "port": 0, "served_model_name": "secateur", "batch_dir": folder}
        args = EngineArgs.load({**settings, "enable_tokenizer_info_endpoint": True})
        config, _ = with_tokenizer(args, engine_config(args))
        with local_service(args) as url:
            # Without proxies, telemetry and hubs, which need a network.
            env = os.environ | {"NO_PROXY": "*", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
            env |= {"SECATEUR_URL": url, "SECATEUR_MODEL": config.model_path, "SECATEUR_PYTHON": sys.executable}
            env.pop("PYTHONPATH", None)
            for name, argv in commands.items():
                began = time.monotonic()
                outcomes[name] = f"{outcome_of(argv, env)} ({time.monotonic() - began:.1f} s)"
                print(f"{name}: {outcomes[name]}", flush=True)
    return outcomes


def main() -> int:
    scripts = {script.name.removeprefix("with_"): script for script in sorted(SCRIPTS.glob("with_*"))}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help=f"all if there are none; valid: {', '.join(scripts)}")
    parser.add_argument("--environments", type=Path, default=Path(".clients"), help="a folder [%(default)s]")
    parser.add_argument("--model", default="bundled:target", help="the model to serve [%(default)s]")
    asked = parser.parse_args()
    if unknown := set(asked.only) - set(scripts):
        parser.error(f"there is no script {', '.join(sorted(unknown))}; valid: {', '.join(scripts)}")
    chosen = asked.only or list(scripts)
    without_node = [name for name in chosen if scripts[name].suffix == ".mjs" and NODE is None]
    environments = asked.environments.resolve()
    commands = {name: command(scripts[name], environments) for name in chosen if name not in without_node}
    outcomes = run_all(commands, asked.model) if commands else {}
    num_served = sum(outcome.startswith("ok") for outcome in outcomes.values())
    print()
    for name in chosen:
        print(f"{name:16} {outcomes.get(name, 'not run: needs node and npm, which are not installed')}")
    print(f"{num_served} served, {len(outcomes) - num_served} failed, {len(without_node)} not run")
    return 1 if num_served < len(outcomes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
