"""The cost-scaled target computes the bundled target's function, tensor by tensor and end to end."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from bench.scaled import TargetSize, scaled_pair, write_target
from tests.support.engines import BUNDLED, DYNAMIC, GenerationJob, Runner, bundled, prompts
from workers.config import DraftConfig, EngineConfig
from workers.settings import SamplingSettings

SIZES = ["256x9", "1024x8", "256x9+v9000"]  # heads as wide as the bundled target's, and twice as wide


def logits(folder: object, ids: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits


@pytest.mark.parametrize("size", SIZES)
def test_the_wide_target_has_the_logits_of_the_bundled_one(size: str, tmp_path) -> None:
    wide = TargetSize.parse(size)
    write_target(BUNDLED / "target", tmp_path, wide, torch.float32)
    ids = torch.randint(4, 2048, (1, 96), generator=torch.Generator().manual_seed(3))
    found = logits(tmp_path, ids)
    torch.testing.assert_close(found[..., :2048], logits(BUNDLED / "target", ids), atol=1e-4, rtol=0)
    assert found.shape[2] == (wide.vocab_size or 2048) and (found[..., 2048:] < -100).all()
    stored = [tensor for file in tmp_path.glob("*.safetensors") for tensor in load_file(file).items()]
    layers = sum(tensor.numel() for name, tensor in stored if "layers." in name and tensor.dim() == 2)
    assert layers == wide.layer_parameters


def test_only_weights_that_would_change_the_result_are_zero(tmp_path) -> None:
    """A kernel could skip products with zero weights, and the target would seem cheaper."""
    write_target(BUNDLED / "target", tmp_path, TargetSize.parse("256x9"), torch.float32)
    for file in tmp_path.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            zeros = float((tensor == 0).float().mean())
            assert zeros < 0.01 or any(part in name for part in ("o_proj", "down_proj", "embed_tokens")), (name, zeros)


def engine(target: object, head: object) -> EngineConfig:
    draft = DraftConfig(method="eagle3", model_path=str(head), tree=DYNAMIC)
    return EngineConfig(model_path=str(target), max_model_len=512, max_num_seqs=4, step_timeout_s=120.0, draft=draft)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", ["512x9", "256x9+v9000"])
def test_the_drafter_of_the_wide_target_proposes_the_same_trees(size: str, tmp_path) -> None:
    """With a wide vocabulary the head is as large as the target's layers are."""
    pair = scaled_pair(BUNDLED / "target", BUNDLED / "eagle3", TargetSize.parse(size), tmp_path, torch.float32)
    jobs = [
        GenerationJob(prompt=prompt, max_tokens=12, sampling=SamplingSettings(temperature=temperature, seed=5))
        for prompt in prompts(3)
        for temperature in (0.0, 1.0)
    ]
    with Runner(bundled(DYNAMIC)) as narrow, Runner(engine(*pair)) as wide:
        expected, found = narrow.run(jobs), wide.run(jobs)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    assert [answer.stats for answer in found] == [answer.stats for answer in expected]  # nodes accepted at each depth


def test_the_layers_that_the_head_reads_are_renumbered_and_a_second_call_reuses_the_files(tmp_path) -> None:
    size = TargetSize.parse("256x17")
    pair = scaled_pair(BUNDLED / "target", BUNDLED / "eagle3", size, tmp_path, torch.float32)
    config = json.loads((pair.head / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2 * 17 // 8, 4 * 17 // 8, 5 * 17 // 8]
    written = (pair.target / "config.json").stat().st_mtime_ns
    assert scaled_pair(BUNDLED / "target", BUNDLED / "eagle3", size, tmp_path, torch.float32) == pair
    assert (pair.target / "config.json").stat().st_mtime_ns == written


def test_a_cache_is_not_reused_for_another_pair(tmp_path) -> None:
    size, base = TargetSize.parse("256x8"), tmp_path / "base"
    shutil.copytree(BUNDLED / "eagle3", base)
    pair = scaled_pair(BUNDLED / "target", base, size, tmp_path, torch.float32)
    (base / "config.json").write_text((base / "config.json").read_text() + "\n")
    assert scaled_pair(BUNDLED / "target", base, size, tmp_path, torch.float32) != pair


@pytest.mark.parametrize(
    ("size", "says"),
    [
        ("256x7", "number of layers is 8, a target of 256x7 has only 7"),
        ("256x1", "ask for a larger one"),
        ("256x9+v4096", "its vocabulary is 8192"),
    ],
)
def test_a_size_smaller_than_the_base_is_an_error(size: str, says: str, tmp_path) -> None:
    with pytest.raises(ValueError, match=says):
        write_target(BUNDLED / "target", tmp_path, TargetSize.parse(size), torch.float32)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("300M", "must be 300m, 8b or"),
        ("300x", "must be 300m"),
        ("250x8", "a multiple of 256"),
        ("0x8", "a multiple"),
        ("8b+v", "the number of tokens"),
    ],
)
def test_an_invalid_size_is_reported_with_the_valid_forms(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TargetSize.parse(text)


def test_named_sizes_have_the_parameters_of_their_names() -> None:
    assert TargetSize.parse("300m").layer_parameters == pytest.approx(300e6, rel=0.05)
    assert TargetSize.parse("8b").layer_parameters == pytest.approx(6.98e9, rel=0.01)  # Llama-3-8B without vocabulary
