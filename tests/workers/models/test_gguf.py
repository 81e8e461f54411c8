"""GGUF files become the checkpoints that they were made from."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.support import checkpoints
from tests.support.gguf_files import interleaved, write_gguf
from workers.models import gguf
from workers.models.checkpoint import Weights
from workers.models.readers import read_spec

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "llama-tied": ("llama", "llama", {"tie_word_embeddings": True}),
    "llama-mqa": ("llama", "llama", {"num_key_value_heads": 1}),
    "mistral": ("mistral", "llama", {"sliding_window": None}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 16}),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_model(tmp_path_factory.mktemp("llama"), "llama")


def converted(file: Path) -> Path:
    folder = gguf.describe(file, file.parent / "cache")
    gguf.convert_weights(file, folder)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_a_file_becomes_the_checkpoint_it_was_made_from(name: str, tmp_path: Path) -> None:
    family, architecture, config = MODELS[name]
    model = checkpoints.write_model(tmp_path / "model", family, **config)
    head_dim = {"attention.key_length": config["head_dim"]} if "head_dim" in config else {}
    folder = converted(write_gguf(tmp_path / "model.gguf", model, architecture, **head_dim))
    expected = read_spec(model)
    expected_family = "llama" if family == "mistral" else expected.family
    assert read_spec(folder) == replace(expected, family=expected_family)
    stored, original = Weights(folder), load_file(model / "model.safetensors")
    assert sorted(stored.names()) == sorted(original)
    for tensor_name, values in original.items():
        assert torch.equal(stored.get(tensor_name), values), tensor_name


@pytest.mark.parametrize(("kind", "size"), [("Q4_1", 20 / 32), ("Q8_0", 34 / 32), ("F16", 2), ("F32", 4)])
def test_the_size_of_a_weight_includes_the_scales_of_its_block(kind: str, size: float, tmp_path: Path, llama) -> None:
    file = write_gguf(tmp_path / "model.gguf", llama, "llama", kind=kind)
    assert gguf.bytes_per_weight(file) == pytest.approx(size, rel=0.03), "vectors are in float32"


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "F16"])
def test_matrices_are_dequantised_and_vectors_stay_as_they_are(kind: str, llama: Path, tmp_path: Path) -> None:
    folder = converted(write_gguf(tmp_path / "model.gguf", llama, "llama", kind=kind))
    stored, original = Weights(folder), load_file(llama / "model.safetensors")
    dtype = torch.float16 if kind == "F16" else torch.bfloat16
    for name, values in original.items():
        if values.dim() == 1:
            assert torch.equal(stored.get(name), values), name
            continue
        if kind == "F16":
            expected = values.to(dtype)
        else:
            heads = {"q_proj": 8, "k_proj": 4}.get(name.split(".")[-2], 0)
            rows = interleaved(values, heads) if heads else values
            rows = torch.from_numpy(dequantize(quantize(rows.numpy(), own := GGMLQuantizationType[kind]), own))
            if heads:  # undone here by another formula than the product's
                pairs = rows.reshape(heads, values.shape[0] // heads // 2, 2, values.shape[1])
                rows = torch.cat([pairs[:, :, 0], pairs[:, :, 1]], dim=1).reshape(values.shape)
            expected = rows.to(dtype)
        assert torch.equal(stored.get(name), expected), name


def test_rope_scaling_is_read_as_it_was_written(llama: Path, tmp_path: Path) -> None:
    scaling = {"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    for kind in ("linear", "yarn"):
        file = write_gguf(tmp_path / f"{kind}.gguf", llama, "llama", **{"rope.scaling.type": kind}, **scaling)
        rope = json.loads((gguf.describe(file, tmp_path) / "config.json").read_text())["rope_parameters"]
        expected = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
        assert rope == expected | ({"original_max_position_embeddings": 128} if kind == "yarn" else {})
    file = write_gguf(tmp_path / "longrope.gguf", llama, "llama", **{"rope.scaling.type": "longrope"})
    with pytest.raises(ValueError, match="rope scaling 'longrope' is not supported in GGUF files; use linear or yarn"):
        gguf.describe(file, tmp_path)


def test_the_scaling_of_llama_3_is_found_from_its_factors(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = checkpoints.LLAMA3_ROPE | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192, "factor": 32.0}
    config = LlamaConfig(head_dim=64, hidden_size=512, num_attention_heads=8, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    factors = (plain / scaled).tolist()
    assert gguf._llama3_rope(factors, 500000.0, 64, tmp_path) == rope
    with pytest.raises(ValueError, match="are not Llama 3's"):
        gguf._llama3_rope([*factors[:-1], 5.0], 500000.0, 64, tmp_path)


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("gemma", {}, "GGUF models of architecture 'gemma' are not supported; use llama, qwen2, qwen3"),
        ("llama", {"block_count": None}, "lacks llama.block_count"),
        ("llama", {"attention.head_count_kv": [4, 2, 4]}, "layers that differ in llama.attention.head_count_kv"),
        ("llama", {"rope.dimension_count": 4}, "rotating a part of each head is not supported"),
    ],
)
def test_models_that_cannot_run_are_refused(
    architecture: str, metadata: dict[str, Any], message: str, llama: Path, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "model.gguf", llama, architecture, **metadata)
    with pytest.raises(ValueError, match=message):
        gguf.describe(file, tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*")), "a refused model leaves nothing behind"


def test_tensors_without_a_place_are_refused_by_name(llama: Path, tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "model.gguf", llama, "llama").read_bytes()
    (odd := tmp_path / "odd.gguf").write_bytes(data.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight"))
    with pytest.raises(ValueError, match=r"1 tensors are not supported: blk\.0\.ffn_xx\.weight"):
        gguf.describe(odd, tmp_path / "cache")


def test_an_invalid_gguf_file_is_an_error(tmp_path: Path) -> None:
    (file := tmp_path / "model.gguf").write_bytes(b"GGML" + bytes(400))
    with pytest.raises(ValueError, match="is not a GGUF file that can be read"):
        gguf.describe(file, tmp_path)


def test_text_is_split_as_the_model_s_tokenizer_splits_it(llama: Path, tmp_path: Path) -> None:
    text, tokens = "ab12</s>", {}
    for pre in ("default", "smollm"):
        file = write_gguf(tmp_path / f"{pre}.gguf", llama, "llama", pre=pre)
        tokens[pre] = AutoTokenizer.from_pretrained(gguf.describe(file, tmp_path)).tokenize(text)
    assert tokens == {"default": ["ab", "12", "</s>"], "smollm": ["ab", "1", "2", "</s>"]}
    file = write_gguf(tmp_path / "odd.gguf", llama, "llama", pre="odd-rule")
    with pytest.raises(ValueError, match="splitting rule 'odd-rule' is not supported; supported: default"):
        gguf.describe(file, tmp_path)


def test_the_end_of_a_turn_and_the_chat_template_come_along(llama: Path, tmp_path: Path) -> None:
    folder = gguf.describe(write_gguf(tmp_path / "model.gguf", llama, "llama"), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "ab"
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [1]}
    assert read_spec(folder).eos_token_ids == (1,)


def test_a_file_is_converted_once_and_again_when_it_or_its_copy_has_changed(llama: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", llama, "llama")
    folder = converted(file)
    written = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    assert converted(file) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")} == written
    (weights,) = written
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # a damaged copy
    assert converted(file) == folder
    assert weights.read_bytes() == whole
    other = write_gguf(file, llama, "llama", context_length=256)
    assert converted(other) != folder


def test_processes_that_convert_at_once_leave_one_whole_checkpoint(llama: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", llama, "llama")
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(converted, [file] * 4))
    assert len(folders) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [next(iter(folders)).name]
    assert len(Weights(folders.pop()).names()) == len(load_file(llama / "model.safetensors"))


def test_large_models_are_written_in_shards(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "_SHARD_BYTES", 40_000)
    folder = converted(write_gguf(tmp_path / "model.gguf", llama, "llama"))
    assert len(list(folder.glob("*.safetensors"))) > 2
    stored = Weights(folder)
    for name, values in load_file(llama / "model.safetensors").items():
        assert torch.equal(stored.get(name), values), name
