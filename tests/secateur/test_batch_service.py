"""A batch job against the real service, killed half-way: every line is answered exactly once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.local_service import local_service
from secateur.config import EngineArgs

NUM_LINES = 300


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    with local_service(EngineArgs.load({"port": 0, "device": "cpu", "max_model_len": 256})) as url:
        yield url


def batch_run(source: Path, output: Path, base_url: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "secateur", "batch", "run", str(source), "-o", str(output)]
    return subprocess.Popen([*command, "--base-url", base_url], stderr=subprocess.PIPE, text=True)


def write_requests(path: Path) -> set[str]:
    """Return alternating completions and chats, greedy and sampled, some without speculation."""
    ids = [f"line-{n}" for n in range(NUM_LINES)]
    with path.open("w") as file:
        for n, custom_id in enumerate(ids):
            body: dict[str, object] = {"max_tokens": 8, "temperature": n % 3 / 2, "seed": n}
            if n % 5 == 0:
                body["speculative"] = {"enabled": False}
            if n % 2:
                body["prompt"], url = f"def function_{n}(", "/v1/completions"
            else:
                body["messages"], url = [{"role": "user", "content": f"Write number {n}."}], "/v1/chat/completions"
            file.write(json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n")
    return set(ids)


@pytest.mark.slow
def test_a_batch_killed_half_way_and_run_again_answers_every_line_exactly_once(tmp_path: Path, base_url: str) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    ids = write_requests(source)
    first = batch_run(source, output, base_url)
    deadline = time.monotonic() + 120
    while not output.exists() or output.read_bytes().count(b"\n") < NUM_LINES // 2:
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()
        time.sleep(0.02)
    first.kill()
    first.communicate()
    assert output.read_bytes().count(b"\n") < NUM_LINES, "it finished before it could be killed"

    again = batch_run(source, output, base_url)
    _, errors = again.communicate(timeout=200)
    assert again.returncode == 0, errors
    answers = [json.loads(line) for line in output.read_bytes().removesuffix(b"\n").split(b"\n")]
    assert len(answers) == NUM_LINES and {answer["custom_id"] for answer in answers} == ids
    for answer in answers:
        assert answer["error"] is None and answer["response"]["status_code"] == 200
        assert answer["response"]["body"]["usage"]["completion_tokens"] >= 1
