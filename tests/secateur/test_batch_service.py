"""A batch job against the real service, both killed on the way: every line is answered once, as without it.

`--full` sends 5,000 lines instead of 90, and kills the client three times.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.fake_service import wait_for
from tests.support.service_process import service_process

NUM_LINES, NUM_LINES_FULL = 90, 5000
PROGRESS_S = 1800.0


@contextmanager
def batch_run(source: Path, output: Path, base_url: str) -> Iterator[subprocess.Popen[str]]:
    """Run a batch job; what is still running at the end is killed."""
    command = [sys.executable, "-m", "secateur", "batch", "run", str(source), "-o", str(output), "--base-url", base_url]
    run = subprocess.Popen([*command, "--concurrency", "24"], stderr=subprocess.PIPE, text=True)
    try:
        yield run
    finally:
        run.kill()
        run.communicate()


def write_requests(path: Path, num_lines: int) -> None:
    """Write alternating completions and chats, greedy and sampled, some without speculation."""
    with path.open("w") as file:
        for n in range(num_lines):
            body: dict[str, object] = {"max_tokens": 4, "temperature": n % 3 / 2, "seed": n}
            if n % 5 == 0:
                body["speculative"] = {"enabled": False}
            if n % 2:
                body["prompt"], url = f"def function_{n}(", "/v1/completions"
            else:
                body["messages"], url = [{"role": "user", "content": f"Write number {n}."}], "/v1/chat/completions"
            file.write(json.dumps({"custom_id": f"line-{n}", "method": "POST", "url": url, "body": body}) + "\n")


def wait_for_answers(run: subprocess.Popen[str], output: Path, number: int) -> None:
    """Wait until the output has so many lines; fail if the run ends before."""
    wait_for(
        lambda: run.poll() is not None or (output.exists() and output.read_bytes().count(b"\n") >= number), PROGRESS_S
    )
    assert run.poll() is None, "it finished before it could be killed"


def answers(output: Path) -> dict[str, Any]:
    """Return what was answered to each custom_id; every line has one answer, and no error."""
    lines = [json.loads(line) for line in output.read_bytes().removesuffix(b"\n").split(b"\n")]
    assert all(line["error"] is None and line["response"]["status_code"] == 200 for line in lines)
    found = {line["custom_id"]: line["response"]["body"]["choices"] for line in lines}
    assert len(found) == len(lines), "a line is answered twice"
    return found


@pytest.mark.slow
@pytest.mark.timeout(3 * PROGRESS_S)
def test_a_batch_whose_client_and_service_are_killed_has_the_answers_of_an_undisturbed_one(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    is_full = request.config.getoption("--full")
    num_lines = NUM_LINES_FULL if is_full else NUM_LINES
    source, output, undisturbed = (tmp_path / f"{name}.jsonl" for name in ("in", "out", "undisturbed"))
    write_requests(source, num_lines)
    with service_process(tmp_path / "killed") as (service, url):
        for fifths in (1, 2, 3) if is_full else (1,):
            with batch_run(source, output, url) as run:
                wait_for_answers(run, output, num_lines * fifths // 5)
        with batch_run(source, output, url) as run:
            wait_for_answers(run, output, num_lines * 3 // 5)
            service.kill()
            service.wait()
            with service_process(tmp_path / "second", port=urlsplit(url).port) as (_, url):
                _, errors = run.communicate(timeout=PROGRESS_S)
                assert run.returncode == 0, errors
                with batch_run(source, undisturbed, url) as again:
                    _, errors = again.communicate(timeout=PROGRESS_S)
                    assert again.returncode == 0, errors
    assert answers(output) == answers(undisturbed)
    assert answers(output).keys() == {f"line-{n}" for n in range(num_lines)}
