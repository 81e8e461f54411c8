"""/v1/batches on a real engine: a service killed in the middle of a batch, and its successor on the same folder.

`--full` sends 5,000 lines instead of 80.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.fake_service import wait_for
from tests.support.service_process import service_process

NUM_LINES, NUM_LINES_FULL = 80, 5000
ENDPOINT = "/v1/completions"
PROGRESS_S = 1800.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * PROGRESS_S)]


@contextmanager
def service(folder: Path, name: str) -> Iterator[tuple[subprocess.Popen[bytes], httpx2.Client]]:
    """Run a service that keeps its batches in a folder."""
    stdout = folder.with_name(name)
    with (
        service_process(stdout, max_num_seqs=8, batch_dir=str(folder)) as (process, url),
        httpx2.Client(base_url=url, timeout=60) as http,
    ):
        yield process, http


@pytest.fixture
def num_lines(request: pytest.FixtureRequest) -> int:
    return NUM_LINES_FULL if request.config.getoption("--full") else NUM_LINES


def requests(num_lines: int) -> bytes:
    """Return seeded requests, greedy and sampled, with and without speculation, and one that is wrong."""
    found = []
    for n in range(num_lines):
        body: dict[str, Any] = {"prompt": f"def function_{n}(", "max_tokens": 8, "temperature": n % 3 / 2, "seed": n}
        if n % 5 == 0:
            body["speculative"] = {"enabled": False}
        if n == num_lines // 2:
            body["max_tokens"] = -5
        found.append({"custom_id": f"line-{n}", "method": "POST", "url": ENDPOINT, "body": body})
    return b"".join(json.dumps(line).encode() + b"\n" for line in found)


def begin(http: httpx2.Client, input_id: str) -> str:
    body = {"input_file_id": input_id, "endpoint": ENDPOINT, "completion_window": "24h"}
    return http.post("/v1/batches", json=body).raise_for_status().json()["id"]


def num_answered(http: httpx2.Client, id: str) -> int:
    counts = http.get(f"/v1/batches/{id}").raise_for_status().json()["request_counts"]
    return counts["completed"] + counts["failed"]


def outcome(http: httpx2.Client, id: str, num_lines: int) -> dict[str, list[Any]]:
    """Wait for the batch; return every custom_id's answers: its text, or its error."""

    def batch() -> dict[str, Any]:
        return http.get(f"/v1/batches/{id}").raise_for_status().json()

    wait_for(lambda: batch()["status"] == "completed", PROGRESS_S)
    assert batch()["request_counts"] == {"total": num_lines, "completed": num_lines - 1, "failed": 1}
    answers: dict[str, list[Any]] = {}
    for file in ("output_file_id", "error_file_id"):
        for line in http.get(f"/v1/files/{batch()[file]}/content").raise_for_status().text.splitlines():
            answer = json.loads(line)
            body = answer["response"]["body"]
            text = body["choices"][0]["text"] if file == "output_file_id" else body["error"]["message"]
            answers.setdefault(answer["custom_id"], []).append(text)
    return answers


def test_a_service_killed_in_a_batch_is_replaced_and_every_line_is_answered_once(
    tmp_path: Path, num_lines: int
) -> None:
    with service(tmp_path / "batches", "killed") as (process, http):
        form = {"purpose": "batch"}
        input_id = http.post("/v1/files", data=form, files={"file": ("in.jsonl", requests(num_lines))}).json()["id"]
        killed = begin(http, input_id)
        wait_for(lambda: num_answered(http, killed) > num_lines // 4, PROGRESS_S)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with service(tmp_path / "batches", "second") as (_, http):
        before = num_answered(http, killed)
        assert num_lines // 4 < before < num_lines, "it ended before it could be killed"
        resumed = outcome(http, killed, num_lines)
        undisturbed = outcome(http, begin(http, input_id), num_lines)
    assert sorted(resumed) == sorted(f"line-{n}" for n in range(num_lines))
    assert all(len(answers) == 1 for answers in resumed.values())
    assert resumed == undisturbed and len({text for [text] in resumed.values()}) > NUM_LINES // 3
    assert "max_tokens" in resumed[f"line-{num_lines // 2}"][0]
