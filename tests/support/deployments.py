"""Serve configurations on a Ray of their own, applied one over the other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import yaml

from tests.support.manifests import ROOT

START_S = 240
OFFERED_CPUS = 8
"""Two pods of the manifests have as many; the machine may have fewer, since bundles only count."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextmanager
def deploying(folder: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Start a Ray; yield a function that applies a configuration to it."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder),
        "RAY_OVERRIDE_RESOURCES": f'{{"CPU": {OFFERED_CPUS}}}',
    }
    command = [sys.executable, "-m", "tests.support.deploy_configs"]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):

        def apply(config: dict[str, Any]) -> None:
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
            process.stdin.write(f"{folder / 'config.yaml'}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "applied\n", (folder / "log").read_text()

        try:
            yield apply
        finally:
            process.stdin.close()
            process.wait(60)


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.5)


def answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=10).status_code == 200
    except httpx2.HTTPError:
        return False
