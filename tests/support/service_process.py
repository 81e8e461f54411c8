"""A service in a process of its own, which may be killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.fake_service import wait_for

_START_S = 600.0
_PROGRAM = """
import json, sys, time
from cluster.local_service import local_service
from secateur.config import EngineArgs
with local_service(EngineArgs.load(json.loads(sys.argv[1]))) as url:
    print(url, flush=True)
    time.sleep(36000)
"""


@contextmanager
def service_process(stdout: Path, **settings: Any) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a service of the bundled model; return its process and its URL. `stdout` is a file for its output."""
    args = {"port": 0, "device": "cpu", "max_model_len": 256, **settings}
    with stdout.open("w") as out:
        process = subprocess.Popen([sys.executable, "-c", _PROGRAM, json.dumps(args)], stdout=out)
    try:
        wait_for(lambda: process.poll() is not None or "\n" in stdout.read_text(), _START_S)
        assert process.poll() is None, "the service did not start"
        yield process, stdout.read_text().strip()
    finally:
        process.kill()
        process.wait()
