"""A speculator stands for itself and its target, and a drafter's checkpoint tells its method."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.convert import check_local_models, engine_config
from cluster.pairs import settled, settled_as_placed, settled_if_here
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from secateur.speculative import SpeculativeConfig
from tests.support import checkpoints


def arguments(model: Path, **fields: object) -> EngineArgs:
    return EngineArgs.load({"model": str(model), "device": "cpu", **fields})


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """Return a head in the format of speculators that names its target, in a folder whose name says nothing."""
    target = checkpoints.write_model(tmp_path / "target", "llama", hidden_size=64)
    path = checkpoints.write_eagle3(tmp_path / "head", style="speculators")
    verifier = {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}
    checkpoints.edit_config(path, speculators_config={"algorithm": "eagle3", "verifier": verifier})
    return path


def test_a_speculator_is_served_with_its_target(head: Path) -> None:
    check_local_models(arguments(head))
    args = settled(arguments(head))
    assert args.model == str(head.parent / "target")
    assert args.model_id == str(head), "clients ask for what was served"
    assert args.speculative_config is not None and args.speculative_config.method == "eagle3"
    config = engine_config(args)
    assert config.draft is not None and config.draft.model_path == str(head)
    assert settled(args) == args


def test_a_speculator_without_speculation_is_its_target_alone(head: Path) -> None:
    args = settled(arguments(head, no_speculation=True))
    assert (args.model, args.speculative_config) == (str(head.parent / "target"), None)


def test_a_speculator_that_names_no_target_is_refused_with_what_to_write(head: Path) -> None:
    checkpoints.edit_config(head, speculators_config={"verifier": {"name_or_path": None}})
    with pytest.raises(ConfigError, match=r"does not name its target; name the target, and add --speculative-config"):
        settled(arguments(head))


def test_a_node_that_does_not_see_the_models_leaves_them_to_those_that_do(head: Path) -> None:
    far = arguments(Path("/nowhere"), speculative_config={"model": "/nowhere/draft"})
    assert settled_if_here(far) == far
    assert settled_if_here(arguments(head)) == settled(arguments(head))
    checkpoints.edit_config(head, speculators_config={"verifier": {"name_or_path": None}})
    with pytest.raises(ConfigError, match="does not name its target"):
        settled_if_here(arguments(head))


def test_a_drafter_without_a_place_is_refused_with_what_to_write(head: Path) -> None:
    with pytest.raises(ConfigError, match=rf'write the model {head.parent}/target, and .*{{"model": "{head}"}}'):
        settled_as_placed(arguments(head))
    assert settled_as_placed(settled(arguments(head))) == settled(arguments(head))
    assert settled_as_placed(arguments(head, no_speculation=True)).model == str(head.parent / "target")


def test_a_drafter_s_config_json_tells_its_method(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for an id of the hub, of which nothing is known before its files are here."""
    monkeypatch.setattr("cluster.pairs.model_folder", lambda name, revision=None: head)
    spec = {"model": "org/draft-of-llama", "num_speculative_tokens": 5, "draft_placement": "colocated"}
    args = arguments(head.parent / "target", speculative_config=spec)
    assert args.speculative_config is not None and args.speculative_config.method == "draft_model"
    found = settled(args).speculative_config
    assert found == SpeculativeConfig.load(spec | {"method": "eagle3"})


def test_a_written_method_stays(head: Path) -> None:
    spec = {"model": str(head), "method": "eagle"}
    args = settled(arguments(head.parent / "target", speculative_config=spec))
    assert args.speculative_config is not None and args.speculative_config.method == "eagle"
    with pytest.raises(ConfigError, match="is an EAGLE-3 head: write method 'eagle3'"):
        engine_config(args)


def test_a_known_head_is_named(head: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.pairs.model_folder", lambda name, revision=None: head.parent / "target")
    with caplog.at_level("INFO"):
        settled(EngineArgs.load({"model": "Qwen/Qwen3-8B"}))
    line = json.dumps({"model": "RedHatAI/Qwen3-8B-speculator.eagle3"})
    assert f"add --speculative-config '{line}'" in caplog.text
