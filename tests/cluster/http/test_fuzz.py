"""Requests made from the OpenAPI document, valid and broken ones, to a service that is ready and to one that is full.

`make fuzz` makes more of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.http.paths import ADMITTED
from tests.support.fake_service import FakeService, wait_for

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
BOUNDED_S, FULL_S = 6, 600


def fuzz(running: FakeService, folder: Path, seconds: int, *options: str) -> None:
    """Let Schemathesis make requests for so long; a finding is an assertion error with the request that shows it."""
    command = [str(Path(sys.executable).with_name("schemathesis")), "--no-color", "run"]
    command += [f"{running.url}/openapi.json", "--checks", ",".join(CHECKS), "--max-time", str(seconds), *options]
    command += [
        "--request-timeout",
        "30",
        "--suppress-health-check",
        "all",
        "--continue-on-failure",
        "--warnings",
        "off",
    ]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds + 240)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]


@pytest.fixture
def seconds(request: pytest.FixtureRequest) -> int:
    return FULL_S if request.config.getoption("--full") else BOUNDED_S


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_every_answer_of_a_ready_service_is_documented(
    own: Callable[..., FakeService], tmp_path: Path, seconds: int
) -> None:
    running = own(batch_dir=tmp_path, has_tokenizer_info=True, api_key="sesame")
    fuzz(running, tmp_path, seconds, "--header", "Authorization: Bearer sesame")
    with running.http(headers={"Authorization": "Bearer sesame"}) as http:
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    wait_for(lambda: running.client.num_pending == 0)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_every_answer_of_a_full_service_is_documented(
    own: Callable[..., FakeService], tmp_path: Path, seconds: int
) -> None:
    running = own(max_pending=1)
    paths = [option for path in ADMITTED for option in ("--include-path", path)]
    with running.client.places(1):
        fuzz(running, tmp_path, seconds // 2, *paths)
