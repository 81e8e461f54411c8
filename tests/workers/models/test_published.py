"""What becomes of published checkpoints, by their configurations: they load, or are refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from secateur.speculative import infer_method
from tests.support import checkpoints
from tests.support.published import HEADS, TARGETS, Head, Target, config_of
from workers.config import DraftConfig
from workers.models.draft_methods import METHODS, read_draft_spec
from workers.models.readers import read_spec
from workers.models.specs import check_parallel

torch.set_num_threads(1)

LONGEST = 800


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_target_loads_or_is_refused(tmp_path: Path, target: Target) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(target), default=str))
    if target.told:
        with pytest.raises(ValueError, match=target.told) as refused:
            read_spec(tmp_path)
        assert len(str(refused.value)) < LONGEST
        return
    spec = read_spec(tmp_path)
    if target.ranks == "1":
        with pytest.raises(ValueError, match="it runs on one rank only"):
            check_parallel(spec, 2)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: f"{head.name} as {head.method}")
def test_a_head_loads_or_is_refused(tmp_path: Path, head: Head) -> None:
    layers = {name: checkpoints.BASE[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    layers |= {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 1, "model_type": "llama"}
    config = {"architectures": ["LlamaForCausalLM"], **layers, **head.config}
    if head.method == "mtp":
        config = layers | config_of(Target(head.name, head.config["model_type"], head.config))
    if "transformer_layer_config" in head.config:
        config["transformer_layer_config"] = layers | head.config["transformer_layer_config"]
    path = tmp_path / "head"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config, default=str))
    draft = DraftConfig(method=head.method, model_path=str(path))  # type: ignore[arg-type]

    def read() -> None:
        check = METHODS[draft.method].check
        assert check is not None
        check(config, path)
        own = checkpoints.write_model(tmp_path / "target", "llama", num_hidden_layers=8)
        read_draft_spec(draft, read_spec(path if head.method == "mtp" else own))

    if head.told:
        with pytest.raises(ValueError, match=head.told) as refused:
            read()
        assert len(str(refused.value)) < LONGEST
    else:
        read()
        assert head.method in ("mtp", infer_method(str(path)))
