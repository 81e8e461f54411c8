"""`python -m cluster.fetch`, as the Job and pods of the model cache run it. A local server stands in for the hub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import checkpoints
from tests.support.fake_hub import fake_hub

MODULE = [sys.executable, "-m", "cluster.fetch"]


def test_a_pod_without_network_waits_until_the_job_has_fetched_every_model(tmp_path: Path) -> None:
    names = ["example/target", "example/draft"]
    for number, name in enumerate(names):
        checkpoints.write_model(tmp_path / "hub" / name, "llama", shards=1 + number)
    with fake_hub(tmp_path / "hub") as hub:
        environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": hub.url}
        environment.pop("HF_HUB_OFFLINE", None)
        offline = {**environment, "HF_HUB_OFFLINE": "1"}
        with subprocess.Popen([*MODULE, "--wait", *names], env=offline, stderr=subprocess.PIPE, text=True) as waiting:
            try:
                assert names[0] in waiting.stderr.readline()
                subprocess.run([*MODULE, names[0]], env=environment, check=True, timeout=120)
                assert names[1] in waiting.stderr.readline(), "the second model is missing still"
                assert waiting.poll() is None
                subprocess.run([*MODULE, *names], env=environment, check=True, timeout=120)
                fetched = list(hub.fetched)
                assert waiting.wait(60) == 0
            finally:
                waiting.kill()
    assert hub.fetched == fetched
    published = [path for name in names for path in (tmp_path / "hub" / name).glob("*.safetensors")]
    assert sum(file.endswith(".safetensors") for file in fetched) == len(published) > 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["example/nothing"], "cannot find checkpoint 'example/nothing'"),
        (["/nowhere"], "no checkpoint folder at '/nowhere'"),
        (["--wait", "example/target"], "--wait needs HF_HUB_OFFLINE=1"),
    ],
)
def test_what_cannot_be_fetched_is_an_error(tmp_path: Path, arguments: list[str], told: str) -> None:
    with fake_hub(tmp_path) as hub:
        environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": hub.url}
        environment.pop("HF_HUB_OFFLINE", None)
        ended = subprocess.run([*MODULE, *arguments], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode and told in ended.stderr and "Traceback" not in ended.stderr
