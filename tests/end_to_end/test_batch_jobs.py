"""/v1/batches on a real engine: a service killed in the middle of a batch, and its successor on the same folder."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.fake_service import wait_for

pytestmark = pytest.mark.slow

NUM_LINES = 300
ENDPOINT = "/v1/completions"
START_S = 120.0
SERVICE = """
import sys, time
from cluster.local_service import local_service
from secateur.config import EngineArgs
args = {"port": 0, "device": "cpu", "max_model_len": 256, "max_num_seqs": 8, "batch_dir": sys.argv[1]}
with local_service(EngineArgs.load(args)) as url:
    print(url, flush=True)
    time.sleep(3600)
"""


@contextmanager
def service(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], httpx2.Client]]:
    """Run a service in a process of its own, which may be killed."""
    stdout = folder.with_suffix(".stdout")
    with stdout.open("w") as out:
        process = subprocess.Popen([sys.executable, "-c", SERVICE, str(folder)], stdout=out)
    try:
        wait_for(lambda: process.poll() is not None or "\n" in stdout.read_text(), START_S)
        assert process.poll() is None, "the service did not start"
        with httpx2.Client(base_url=stdout.read_text().strip(), timeout=30) as http:
            yield process, http
    finally:
        process.kill()
        process.wait()


def requests() -> bytes:
    """Return seeded requests, greedy and sampled, with and without speculation, and one that is wrong."""
    found = []
    for n in range(NUM_LINES):
        body: dict[str, Any] = {"prompt": f"def function_{n}(", "max_tokens": 8, "temperature": n % 3 / 2, "seed": n}
        if n % 5 == 0:
            body["speculative"] = {"enabled": False}
        if n == NUM_LINES // 2:
            body["max_tokens"] = -5
        found.append({"custom_id": f"line-{n}", "method": "POST", "url": ENDPOINT, "body": body})
    return b"".join(json.dumps(line).encode() + b"\n" for line in found)


def begin(http: httpx2.Client, input_id: str) -> str:
    body = {"input_file_id": input_id, "endpoint": ENDPOINT, "completion_window": "24h"}
    return http.post("/v1/batches", json=body).raise_for_status().json()["id"]


def num_answered(http: httpx2.Client, id: str) -> int:
    counts = http.get(f"/v1/batches/{id}").raise_for_status().json()["request_counts"]
    return counts["completed"] + counts["failed"]


def outcome(http: httpx2.Client, id: str) -> dict[str, list[Any]]:
    """Wait for the batch; return every custom_id's answers: its text, or its error."""

    def batch() -> dict[str, Any]:
        return http.get(f"/v1/batches/{id}").raise_for_status().json()

    wait_for(lambda: batch()["status"] == "completed", 120)
    assert batch()["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES - 1, "failed": 1}
    answers: dict[str, list[Any]] = {}
    for file in ("output_file_id", "error_file_id"):
        for line in http.get(f"/v1/files/{batch()[file]}/content").raise_for_status().text.splitlines():
            answer = json.loads(line)
            body = answer["response"]["body"]
            text = body["choices"][0]["text"] if file == "output_file_id" else body["error"]["message"]
            answers.setdefault(answer["custom_id"], []).append(text)
    return answers


def test_a_service_killed_in_a_batch_is_replaced_and_every_line_is_answered_once(tmp_path: Path) -> None:
    with service(tmp_path / "batches") as (process, http):
        form = {"purpose": "batch"}
        input_id = http.post("/v1/files", data=form, files={"file": ("in.jsonl", requests())}).json()["id"]
        killed = begin(http, input_id)
        wait_for(lambda: num_answered(http, killed) > NUM_LINES // 4, 60)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with service(tmp_path / "batches") as (_, http):
        before = num_answered(http, killed)
        assert NUM_LINES // 4 < before < NUM_LINES, "it ended before it could be killed"
        resumed = outcome(http, killed)
        undisturbed = outcome(http, begin(http, input_id))
    assert sorted(resumed) == sorted(f"line-{n}" for n in range(NUM_LINES))
    assert all(len(answers) == 1 for answers in resumed.values())
    assert resumed == undisturbed and len({text for [text] in resumed.values()}) > NUM_LINES // 2
    assert "max_tokens" in resumed[f"line-{NUM_LINES // 2}"][0]
