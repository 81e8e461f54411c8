"""Quantized checkpoints have the values that dequantizing gives, whole and in slices, in both kinds of decoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import checkpoints, quantized
from tests.workers.models.test_model_parity import Chunk, PagedRun, oracle, oracle_logits, random_tokens
from workers.kernels.block_scaled import KEPT_TYPES, BlockScaled
from workers.models import quantized_weight
from workers.models.checkpoint import Weights
from workers.models.layers import Runtime, TensorParallel
from workers.models.load import load_decoder
from workers.models.readers import read_spec

torch.set_num_threads(1)

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
BLOCKS_OF_32 = {"intermediate_size": 128}


@pytest.fixture(scope="module", params=quantized.FORMS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a quantized Llama, and the same in float32."""
    path = tmp_path_factory.mktemp("quantized")
    checkpoints.write_model(path / "quantized", "llama", **BLOCKS_OF_32)
    checkpoints.write_model(path / "plain", "llama", **BLOCKS_OF_32)
    plain = quantized.quantize(path / "quantized", request.param)
    save_file({name: w.contiguous() for name, w in plain.items()}, path / "plain/model.safetensors", {"format": "pt"})
    return path / "quantized", path / "plain"


def test_values_and_slices_are_those_of_the_dequantized_weights(written: tuple[Path, Path]) -> None:
    stored, plain = Weights(written[0]), load_file(written[1] / "model.safetensors")
    assert set(stored.names()) == set(plain)
    for name, expected in plain.items():
        assert torch.equal(stored.get(name), expected), name
    for name in filter(lambda name: "_proj.weight" in name, plain):
        for dim in (0, 1):
            for size in (2, 3):
                parts = [stored.get(name, dim, rank, size) for rank in range(size)]
                assert torch.equal(torch.cat(parts, dim), plain[name]), name
    stored.finish()


def test_logits_are_those_of_the_dequantized_model(written: tuple[Path, Path]) -> None:
    tokens = random_tokens(20)
    (logits,), _ = PagedRun(load_decoder(written[0], read_spec(written[0]))).forward([Chunk(tokens, 0)])
    assert (logits - oracle_logits(oracle(written[1]), tokens)).abs().max() < 1e-3
    for rank in range(2):
        load_decoder(written[0], read_spec(written[0]), Runtime(tp=TensorParallel(rank, 2)))


@pytest.mark.parametrize("form", ["compressed-tensors W4A16", "compressed-tensors FP8, a scale per row", "AWQ", "GPTQ"])
def test_experts_are_dequantized_one_by_one(tmp_path: Path, form: str) -> None:
    path = checkpoints.write_model(tmp_path / "quantized", "qwen3_moe", **EXPERTS)
    plain = checkpoints.write_model(tmp_path / "plain", "qwen3_moe", **EXPERTS)
    weights = quantized.quantize(path, form)
    save_file({name: w.contiguous() for name, w in weights.items()}, plain / "model.safetensors", {"format": "pt"})
    tokens = random_tokens(20)
    (logits,), _ = PagedRun(load_decoder(path, read_spec(path))).forward([Chunk(tokens, 0)])
    assert (logits - oracle_logits(oracle(plain), tokens)).abs().max() < 1e-3


def test_gpt_oss_s_experts_are_those_that_transformers_unpacks(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    _, config = checkpoints.ARCHITECTURES["gpt-oss"]
    path = checkpoints.write_model(tmp_path / "quantized", "gpt_oss", **config)
    plain = checkpoints.write_model(tmp_path / "plain", "gpt_oss", **config)
    weights = quantized.quantize_experts(path)
    save_file({name: w.contiguous() for name, w in weights.items()}, plain / "model.safetensors", {"format": "pt"})
    raw, stored = load_file(path / "model.safetensors"), Weights(path)
    for part in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{part}"
        theirs = convert_moe_packed_tensors(raw[f"{name}_blocks"], raw[f"{name}_scales"], dtype=torch.float32)
        assert torch.equal(stored.get(name), theirs) and torch.equal(theirs, weights[name])
        for dim in (0, 1, 2):
            assert torch.equal(torch.cat([stored.get(name, dim, rank, 3) for rank in range(3)], dim), theirs)
    tokens = random_tokens(20)
    (logits,), _ = PagedRun(load_decoder(path, read_spec(path))).forward([Chunk(tokens, 0)])
    assert (logits - oracle_logits(oracle(plain), tokens)).abs().max() < 1e-3
    for rank in range(2):
        load_decoder(path, read_spec(path), Runtime(tp=TensorParallel(rank, 2)))


KEPT = [form for form in quantized.FORMS if "FP4" not in form and "order" not in form]


@pytest.mark.parametrize("form", KEPT)
def test_weights_stay_in_their_bits_where_a_kernel_multiplies_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(quantized_weight, "_ROWS", 7)
    path = checkpoints.write_model(tmp_path, "llama", **BLOCKS_OF_32)
    plain = quantized.quantize(path, form)
    weights = Weights(path, torch.bfloat16, kept=KEPT_TYPES)
    bits = 4 if "W4" in form or form in ("AWQ", "GPTQ", "GPTQ, format 2") else 8
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.k_proj.weight"):
        for rank in range(2):
            for dim in (0, 1):
                part = weights.matrix(name, dim, rank, 2)
                assert isinstance(part, BlockScaled) and part.is_packed == (bits == 4)
                assert torch.equal(part.dequantized(), plain[name].chunk(2, dim)[rank].bfloat16())
                held = [part.values_OI, part.scale_BO, *([] if part.zero_BO is None else [part.zero_BO])]
                stored = weights.kept(name)
                assert stored is not None
                if stored.columns[0] != stored.columns[1]:
                    assert sum(x.nbytes for x in held) == stored.bytes_in_bits * part.shape.numel()


def test_groups_of_mixed_columns_are_dequantized(tmp_path: Path) -> None:
    path = checkpoints.write_model(tmp_path, "llama", **BLOCKS_OF_32)
    plain = quantized.quantize(path, "compressed-tensors W4A16, activation order")
    name = "model.layers.0.mlp.down_proj.weight"
    found = Weights(path, torch.bfloat16, kept=KEPT_TYPES).matrix(name)
    assert isinstance(found, torch.Tensor) and torch.equal(found, plain[name].bfloat16())


def test_modelopt_s_own_file_is_read_and_scales_of_its_cache_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoints.write_model(tmp_path, "llama")
    plain = quantized.quantize(path, "ModelOpt FP8")
    raw = json.loads((path / "config.json").read_text())
    del raw["quantization_config"]
    (path / "config.json").write_text(json.dumps(raw))
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (path / "hf_quant_config.json").write_text(json.dumps(own))
    prefix = "model.layers.0.self_attn."
    scales = {f"{prefix}k_proj.k_scale": torch.tensor(2.0), f"{prefix}v_scale": torch.tensor(2.0)}
    checkpoints.edit_weights(path, add=scales)
    with caplog.at_level("INFO"):
        load_decoder(path, read_spec(path))
    assert "scales for a KV cache in 8 bits are not used" in caplog.text
    assert "ModelOpt FP8 weights are dequantized" in caplog.text
    name = f"{prefix}k_proj.weight"
    assert torch.equal(Weights(path).get(name), plain[name])


@pytest.mark.parametrize(
    ("form", "part"),
    [("ModelOpt NVFP4", "weight_scale_2"), ("compressed-tensors NVFP4", "weight_global_scale"), ("AWQ", "scales")],
)
def test_a_missing_part_is_an_error(tmp_path: Path, form: str, part: str) -> None:
    path = checkpoints.write_model(tmp_path, "llama", **BLOCKS_OF_32)
    quantized.quantize(path, form)
    checkpoints.edit_weights(path, remove=(f"model.layers.0.mlp.up_proj.{part}",))
    with pytest.raises(ValueError, match=rf"has no model\.layers\.0\.mlp\.up_proj\.{part}: fetch or copy"):
        Weights(path)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantized by bitsandbytes"),
        ({"quant_method": "gptq", "bits": 3}, r"gptq \{'bits': 3\}"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'checkpoint_format': 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "ModelOpt's W4A8_AWQ"),
        (quantized.compressed("marlin-24", num_bits=4, type="int"), "in the format marlin-24"),
        (quantized.compressed("pack-quantized") | {"transform_config": {"R1": {}}}, "with transform_config"),
        ({"quant_method": "quark"}, "quantized by quark"),
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_any_other_quantization_is_refused_by_name(
    tmp_path: Path, model_type: str, quantization: dict[str, Any], message: str
) -> None:
    path = checkpoints.write_model(tmp_path, model_type)
    checkpoints.edit_config(path, quantization_config=quantization)
    with pytest.raises(ValueError, match=f"{message}.*are not supported; write the original weights"):
        read_spec(path)
