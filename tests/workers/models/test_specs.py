"""Model descriptions survive JSON, and parsing them does not import transformers."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import checkpoints
from tests.support.engines import DYNAMIC, bundled
from workers.config import DraftConfig, EngineConfig
from workers.models.draft_methods import read_specs
from workers.models.readers import read_spec
from workers.models.specs import Specs


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2", "qwen3_moe"])
def test_a_target_arrives_as_it_was_read(tmp_path: Path, family: str) -> None:
    spec = read_spec(checkpoints.write_model(tmp_path, family))
    arrived = Specs.from_json(Specs(target=spec).to_json()).target
    assert arrived == spec and type(arrived) is type(spec)


@pytest.mark.parametrize("method", ["eagle3", "eagle", "mtp", "draft_model", "ngram"])
def test_a_drafter_arrives_as_it_was_read(tmp_path: Path, method: str) -> None:
    target = checkpoints.write_model(tmp_path / "target", "qwen3")
    path = {
        "eagle3": lambda: checkpoints.write_eagle3(tmp_path / "head"),
        "eagle": lambda: checkpoints.write_eagle(tmp_path / "head"),
        "mtp": lambda: checkpoints.add_mtp(target, "qwen3"),
        "draft_model": lambda: checkpoints.write_model(tmp_path / "draft", "gemma2"),
        "ngram": lambda: "",
    }[method]()
    draft = DraftConfig(method=method, model_path=str(path))  # type: ignore[arg-type]
    specs = read_specs(EngineConfig(model_path=str(target), draft=draft))
    arrived = Specs.from_json(specs.to_json())
    assert arrived == specs and type(arrived.draft) is type(specs.draft)
    assert (specs.draft is None) == (method == "ngram")


RANKS = """
import sys
from drafter.proposers.eagle3 import Eagle3Head
from verifier.worker import load
from workers.comm import groups
from workers.config import EngineConfig
from workers.models.specs import Specs

config, specs = EngineConfig.from_json(sys.argv[1]), Specs.from_json(sys.argv[2])
store, address = groups.open_store()
load(groups.join(config, 0, address), specs)
groups.leave()
Eagle3Head.load(specs.draft, sys.argv[3], config.model_path)
assert "transformers" not in sys.modules
"""


def test_ranks_with_specs_load_their_models_without_transformers() -> None:
    config = bundled(DYNAMIC, num_pages=64)
    assert config.draft is not None
    told = replace(config, draft=None).to_json(), read_specs(config).to_json(), config.draft.model_path
    subprocess.run([sys.executable, "-c", RANKS, *told], check=True, timeout=120)
