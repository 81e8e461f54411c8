"""An FP8 checkpoint on the simulated device: its matrices stay in 8 bits, and its tokens are the same."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("runs on the simulated device", allow_module_level=True)

from safetensors.torch import load_file, save_file

from bench.speed import bytes_per_weight
from cluster.planner.memory import model_shards, sizes_in_bits
from cluster.planner.roofline import reading_ms
from tests.end_to_end.test_simulated_cuda import COUPLED, DYNAMIC, config_for, jobs, run
from tests.support import checkpoints, quantized
from tests.support.simulated_cuda import simulated_cuda
from workers.config import EngineConfig
from workers.kernels import block_scaled
from workers.kernels.block_scaled import SPLIT_ROWS
from workers.kernels.select import kernels_for
from workers.models.decoder import Decoder
from workers.models.layers import RankWeights, Runtime
from workers.models.readers import read_spec
from workers.workspace import PassShape, pass_bytes

torch.set_num_threads(1)
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a target and a draft model in blocks as published ones have them, and both dequantized, in `plain`."""
    root = tmp_path_factory.mktemp("models")
    for name, layers in (("target", 3), ("draft_model", 1)):
        checkpoints.write_model(root / name, "qwen3", num_hidden_layers=layers, seed=layers, **SIZES)
        checkpoints.quantize_fp8(root / name, (128, 128))
        checkpoints.dequantize_fp8(root / name, root / "plain" / name)
    return root


def test_an_engine_gives_the_tokens_of_the_dequantized_checkpoint(models: Path) -> None:
    """Its products run in graphs, like all of a forward pass."""
    work = jobs(COUPLED, "coupled")
    tree = replace(DYNAMIC, prune=replace(DYNAMIC.prune, prompt_lookup=False))
    kept, plain = (
        run(config_for(path, "draft_model", tree, dtype="bfloat16"), work) for path in (models, models / "plain")
    )
    assert kept.tokens == plain.tokens and kept.num_replays == plain.num_replays > kept.num_steps
    assert kept.num_steps == plain.num_steps and kept.num_calls == plain.num_calls


@pytest.mark.parametrize("most", [128, 1 << 30], ids=["split", "whole"])
def test_a_kept_decoder_takes_half_the_memory_and_launches_the_products(
    models: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(block_scaled, "_COLUMNS_PER_SPLIT", most)
    sizes: dict[Path, int] = {}
    logits = []
    for path in (models / "target", models / "plain" / "target"):
        gc.collect()
        with simulated_cuda() as cuda:
            before = cuda.memory.reset()
            made = Decoder(
                RankWeights(path, Runtime(device="cuda", dtype=torch.bfloat16, kernels=kernels_for("cuda"))),
                read_spec(path),
            )
            gc.collect()
            sizes[path] = cuda.memory.num_bytes - before
            x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).bfloat16().to("cuda")
            cuda.grids.clear()
            logits.append(made._layers[0].mlp(x).cpu())
            grids = Counter(name for name, _ in cuda.grids)
            is_kept = path == models / "target"
            assert grids["_multiply"] == 2 * is_kept
            assert grids["_add_splits"] == 2 * (is_kept and most == 128)
            del made, x
    stored = load_file(models / "target" / "model.safetensors")
    matrices = sum(tensor.numel() for tensor in stored.values() if tensor.dtype == torch.float8_e4m3fn)
    others = sum(tensor.numel() for name, tensor in stored.items() if name.endswith(("norm.weight", "head.weight")))
    others += stored["model.embed_tokens.weight"].numel()
    assert sizes[models / "plain" / "target"] - sizes[models / "target"] == matrices * (2 - 1 - 4 / 128)
    assert sizes[models / "target"] < 1.1 * (matrices * (1 + 4 / 128) + 2 * others)
    torch.testing.assert_close(*logits, atol=2**-8 * float(logits[1].abs().max()), rtol=0)


def test_plans_and_reports_count_what_is_kept(models: Path) -> None:
    config, whole = (config_for(path, "draft_model", DYNAMIC, dtype="bfloat16") for path in (models, models / "plain"))
    hardware: Any = type("Hardware", (), {"bandwidth_gbs": 1.0, "bandwidth_share": 1.0})
    folders = ("target", "draft_model")
    for one, other, folder in zip(model_shards(config), model_shards(whole), folders, strict=True):
        stored = load_file(models / folder / "model.safetensors").values()
        saved = sum(tensor.numel() for tensor in stored if tensor.dtype == torch.float8_e4m3fn) * (1 - 4 / 128)
        assert other.weight_bytes - one.weight_bytes == one.saved_bytes == saved and other.saved_bytes == 0
        assert reading_ms(other, 1, hardware) - reading_ms(one, 1, hardware) == pytest.approx(saved / 1e6)
    assert 1 + 4 / 128 < bytes_per_weight(config) < 1.2 and bytes_per_weight(whole) == 2
    for unkept in (replace(config, dtype="float32"), replace(config, kernels="torch")):
        assert [shard.saved_bytes for shard in model_shards(unkept)] == [0, 0]
        assert bytes_per_weight(unkept) == unkept.item_bytes
    kept, cut = (sizes_in_bits(config, config.model_path, read_spec(models / "target"), ranks) for ranks in (1, 8))
    assert any(name.endswith("o_proj.weight") for name in kept)  # 8 ranks begin inside its blocks of 128 columns
    assert set(kept) - set(cut) == {name for name in kept if name.endswith(("o_proj.weight", "down_proj.weight"))}


@pytest.mark.parametrize(("form", "num_bits"), [("AWQ", 4), ("compressed-tensors INT8, a scale per row", 8)])
def test_integers_take_the_bits_that_plans_count(tmp_path: Path, form: str, num_bits: int) -> None:
    for name in ("kept", "plain"):
        checkpoints.write_model(tmp_path / name, "qwen3", **SIZES)
    weights = quantized.quantize(tmp_path / "kept", form)
    save_file({name: w.contiguous() for name, w in weights.items()}, tmp_path / "plain/model.safetensors")
    sizes: list[int] = []
    logits: list[torch.Tensor] = []
    for name in ("kept", "plain"):
        gc.collect()
        with simulated_cuda() as cuda:
            before = cuda.memory.reset()
            runtime = Runtime(device="cuda", dtype=torch.bfloat16, kernels=kernels_for("cuda"))
            made = Decoder(RankWeights(tmp_path / name, runtime), read_spec(tmp_path / name))
            gc.collect()
            sizes.append(cuda.memory.num_bytes - before)
            x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).bfloat16().to("cuda")
            logits.append(made._layers[0].mlp(x).cpu())
            del made, x
    [shard] = model_shards(EngineConfig(model_path=str(tmp_path / "kept"), device="cuda", dtype="bfloat16"))
    items = sum(weight.numel() for name, weight in weights.items() if name.endswith("_proj.weight"))
    assert sizes[1] - sizes[0] == shard.saved_bytes and items * (16 - num_bits) / 8 > shard.saved_bytes
    assert shard.saved_bytes > items * (16 - 1.3 * num_bits) / 8
    assert torch.equal(*logits)


def test_the_sums_of_splits_are_counted_beside_the_weights(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an 8B model: queries, keys and values are split in three, o_proj and down_proj in four."""
    shape = PassShape.of(read_spec(models / "target"), 1)
    assert shape.most_split_sums == 0
    wide = replace(shape, hidden=4096, inner=12288, queries=4096, keys=1024, first_input=4096)
    assert wide.most_split_sums == 3 * 6144 > 4 * 4096
    config = config_for(models, "draft_model", DYNAMIC, dtype="bfloat16")
    counted = {rows: pass_bytes(wide, config, rows) for rows in (1, SPLIT_ROWS, SPLIT_ROWS + 1)}
    sums = {rows: 4 * min(rows, SPLIT_ROWS) * wide.most_split_sums for rows in counted}
    monkeypatch.setattr(PassShape, "most_split_sums", 0)
    assert counted == {rows: pass_bytes(wide, config, rows) + own for rows, own in sums.items()}
