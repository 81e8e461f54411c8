"""`python -m cluster.fetch`, as the Job and pods of the model cache run it. A local server stands in for the hub."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from cluster.fetch import download, main
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from tests.support import checkpoints
from tests.support.engines import BUNDLED
from tests.support.fake_hub import fake_hub

ROOT = Path(__file__).parents[2]
DOWNLOAD = """
import sys
from cluster.fetch import download
from secateur.cli import main, setup
setup.service_part = {"download": download}.get
sys.exit(main(["download", *sys.argv[1:]]))
"""
"""The command, also where the installed entry points are older than the checkout."""
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


def test_what_the_hub_does_not_have_is_an_error(tmp_path: Path) -> None:
    with fake_hub(tmp_path) as hub:
        environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": hub.url}
        environment.pop("HF_HUB_OFFLINE", None)
        ended = subprocess.run(
            [*MODULE, "example/nothing"], env=environment, capture_output=True, text=True, timeout=120
        )
    assert ended.returncode and "cannot find checkpoint 'example/nothing'" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["/nowhere"], "no checkpoint folder at '/nowhere'"),
        (["--wait", "example/target"], "--wait needs HF_HUB_OFFLINE=1"),
    ],
)
def test_what_cannot_be_fetched_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code and told in f"{ended.value.code} {capsys.readouterr().err}"


def test_download_fetches_a_model_and_its_drafter_into_the_cache_that_serve_uses(tmp_path: Path) -> None:
    shutil.copytree(BUNDLED / "target", tmp_path / "hub" / "example/target")
    shutil.copytree(BUNDLED / "eagle3", tmp_path / "hub" / "example/head")
    spec = '{"method": "eagle3", "model": "example/head"}'
    command = [sys.executable, "-c", DOWNLOAD, "example/target", "-sc", spec, "--token", "hf_secret"]
    with fake_hub(tmp_path / "hub") as hub:
        environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": hub.url}
        environment.pop("HF_HUB_OFFLINE", None)
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        fetched = list(hub.fetched)
        offline = {**environment, "HF_HUB_OFFLINE": "1"}
        again = subprocess.run(command, env=offline, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert again.stdout == done.stdout and hub.fetched == fetched
    assert sum(file.endswith(".safetensors") for file in fetched) == 2
    target, head = done.stdout.splitlines()
    assert target.startswith(f"example/target: {tmp_path / 'cache'}") and "GB)" in target
    assert head.startswith(f"example/head: {tmp_path / 'cache'}")


def test_a_local_model_needs_no_download() -> None:
    [line] = download(EngineArgs.load({"model": str(BUNDLED / "target")}))
    assert line == f"{BUNDLED / 'target'}: on this machine; nothing to download, it is {BUNDLED / 'target'}"


def test_a_model_that_is_not_there_is_one_line_that_says_what_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigError, match=r"cannot find checkpoint 'example/nothing'.*a gated model needs HF_TOKEN"
    ) as told:
        download(EngineArgs.load({"model": "example/nothing"}))
    assert "\n" not in str(told.value)
