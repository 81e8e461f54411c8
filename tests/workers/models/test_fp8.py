"""Checkpoints quantized in FP8 blocks are read as dequantized weights or kept in 8 bits, whole and in slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import checkpoints
from tests.workers.models.test_model_parity import Chunk, PagedRun, oracle, oracle_logits, random_tokens
from workers.kernels.block_scaled import KEPT_TYPES, BlockScaled
from workers.kernels.linear import Linear
from workers.models import checkpoint
from workers.models.checkpoint import Weights, split
from workers.models.decoder import Decoder
from workers.models.layers import RankWeights, Runtime, TensorParallel
from workers.models.load import load_decoder
from workers.models.readers import read_spec

torch.set_num_threads(1)

BLOCK = (16, 24)
"""Divides neither the 98 inner rows nor a rank's half of them, nor the 64 columns."""

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 98},
    "qwen3": {"head_dim": 24, "tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 56, "head_dim": 16},
}


@pytest.fixture(scope="module", params=MODELS)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a quantized checkpoint and its dequantized copy."""
    path = tmp_path_factory.mktemp(request.param)
    checkpoints.write_model(path / "fp8", request.param, **MODELS[request.param])
    return checkpoints.quantize_fp8(path / "fp8", BLOCK), checkpoints.dequantize_fp8(path / "fp8", path / "plain")


def test_logits_are_those_of_the_dequantized_weights(folders: tuple[Path, Path]) -> None:
    quantised, plain = folders
    stored = load_file(quantised / "model.safetensors")
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values()) >= 21
    tokens = random_tokens(30)
    expected = oracle_logits(oracle(plain), tokens)
    (logits,), _ = PagedRun(load_decoder(quantised, read_spec(quantised))).forward([Chunk(tokens, 0)])
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("num_items", [pytest.param(1, marks=pytest.mark.slow), 700, 1 << 22])
@pytest.mark.parametrize(("dim", "size"), [(0, 2), (1, 2), (0, 3), (1, 5)])
def test_a_slice_is_the_slice_of_the_dequantized_whole(
    folders: tuple[Path, Path], dim: int, size: int, num_items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices begin and end inside blocks, and so do the pieces that are dequantized at a time."""
    monkeypatch.setattr(checkpoint, "_DEQUANTIZED_ITEMS", num_items)
    quantised, plain = Weights(folders[0]), load_file(folders[1] / "model.safetensors")
    for name in quantised.names():
        if "_proj.weight" in name:
            parts = [quantised.get(name, dim, rank, size) for rank in range(size)]
            assert torch.equal(torch.cat(parts, dim), plain[name])
            assert all(part.dtype == torch.float32 for part in parts)


def test_a_rank_loads_its_share_and_nothing_is_left_over(folders: tuple[Path, Path]) -> None:
    """`finish` counts scales as read with their tensors: loading raises if one is left."""
    spec = read_spec(folders[0])
    for rank in range(2):
        decoder = load_decoder(folders[0], spec, Runtime(tp=TensorParallel(rank, 2), dtype=torch.bfloat16))
        assert decoder.dtype == torch.bfloat16


def test_prediction_layers_that_the_class_skips_are_skipped_with_their_scales(tmp_path: Path) -> None:
    model_type, config = checkpoints.ARCHITECTURES["glm-4-moe"]
    path = checkpoints.quantize_fp8(checkpoints.write_model(tmp_path, model_type, **config), BLOCK)

    def first_logits() -> torch.Tensor:
        [logits], _ = PagedRun(load_decoder(path, read_spec(path))).forward([Chunk([1, 2, 3], 0)])
        return logits

    without = first_logits()
    name = "model.layers.46.mlp.down_proj.weight"
    extra = {name: torch.ones(16, 24).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    checkpoints.edit_weights(path, add=extra)
    assert torch.equal(first_logits(), without)


def test_a_float8_tensor_without_scales_is_named(tmp_path: Path) -> None:
    path = checkpoints.quantize_fp8(checkpoints.write_model(tmp_path, "llama"), BLOCK)
    name = "model.layers.0.mlp.up_proj.weight"
    checkpoints.edit_weights(path, remove=(f"{name}_scale_inv",))
    with pytest.raises(ValueError, match=f"float8 tensor '{name}' has no block scales"):
        load_decoder(path, read_spec(path))


def test_a_scale_without_its_tensor_is_named(tmp_path: Path) -> None:
    path = checkpoints.quantize_fp8(checkpoints.write_model(tmp_path, "llama"), BLOCK)
    checkpoints.edit_weights(path, add={"model.layers.9.weight_scale_inv": torch.ones(1, 1)})
    with pytest.raises(ValueError, match=r"unknown tensors: model\.layers\.9\.weight_scale_inv"):
        load_decoder(path, read_spec(path))


def test_a_quantised_head_beside_a_quantised_embedding_is_used_though_the_configuration_ties_them(
    tmp_path: Path,
) -> None:
    path = checkpoints.quantize_fp8(checkpoints.write_model(tmp_path, "llama", tie_word_embeddings=True), BLOCK)
    ones, scales = torch.ones(96, 64).to(torch.float8_e4m3fn), torch.ones(6, 3)
    extra = {"model.embed_tokens.weight": ones, "model.embed_tokens.weight_scale_inv": scales}
    checkpoints.edit_weights(path, add=extra | {"lm_head.weight": ones.clone(), "lm_head.weight_scale_inv": 2 * scales})
    decoder = load_decoder(path, read_spec(path))
    assert torch.equal(decoder.full_logits(torch.ones(1, 64)), torch.full((1, 96), 128.0))


# Kept in 8 bits

KEPT = (48, 32)
"""Blocks whose columns fill a tile, and whose rows are cut by the heads and by the inner rows of a rank."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with biases, whose inner width is 224 = 7 blocks of columns."""
    path = tmp_path_factory.mktemp("kept") / "fp8"
    checkpoints.write_model(path, "llama", intermediate_size=224, attention_bias=True, mlp_bias=True)
    return checkpoints.quantize_fp8(path, KEPT)


def weights_of(path: Path) -> Weights:
    return Weights(path, torch.bfloat16, kept=KEPT_TYPES)


@pytest.mark.parametrize(("dim", "size"), [(None, 1), (0, 2), (1, 2), (0, 3), (1, 3), (1, 7)])
def test_a_kept_slice_has_the_values_of_the_dequantized_one(kept: Path, dim: int | None, size: int) -> None:
    weights = weights_of(kept)
    for name in weights.names():
        if not name.endswith("_proj.weight"):
            continue
        for rank in range(size):
            part = weights.matrix(name, dim, rank, size)
            start = split(weights.shape(name)[1], rank, size)[0] if dim == 1 else 0
            assert isinstance(part, BlockScaled) == (start % KEPT[1] == 0)
            values = part.dequantized() if isinstance(part, BlockScaled) else part
            assert torch.equal(values, weights.get(name, dim, rank, size))
            assert part.shape == values.shape


def test_columns_cut_inside_a_block_are_dequantized_and_told_once(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        weights = weights_of(kept)
        for layer in (0, 1):
            for rank in range(2):
                weights.matrix(f"model.layers.{layer}.mlp.down_proj.weight", 1, rank, 2)
    [message] = [record.getMessage() for record in caplog.records if "dequantized" in record.getMessage()]
    assert "model.layers.0.mlp.down_proj.weight is dequantized: its blocks of columns are cut" in message


def test_narrow_blocks_and_other_tensors_are_not_kept(folders: tuple[Path, Path]) -> None:
    for path in folders:  # blocks of 24 columns, and a checkpoint without blocks
        weights = weights_of(path)
        assert all(isinstance(weights.matrix(name), torch.Tensor) for name in weights.names())


def linears(decoder: Any) -> list[Linear]:
    layers = decoder._layers
    return [
        one for layer in layers for one in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down)
    ]


@pytest.mark.slow
def test_a_decoder_in_8_bits_gives_the_tokens_of_the_dequantized_one(kept: Path) -> None:
    """With interpreted kernels; attention and norms are the same, so only sums in another order may differ."""
    fused = pytest.importorskip("workers.kernels.fused")
    spec, made = read_spec(kept), []
    runtime = Runtime(dtype=torch.bfloat16, kernels=fused)
    for keeps_bits in (True, False):
        made.append(Decoder(RankWeights(kept, runtime, keeps_bits=keeps_bits), spec))
    assert all(isinstance(linear.weight, BlockScaled) for linear in linears(made[0]))
    assert not any(isinstance(linear.weight, BlockScaled) for linear in linears(made[1]))
    tokens = [random_tokens(12), random_tokens(12)]
    runs = [PagedRun(decoder) for decoder in made]
    for step in range(6):
        parts = [Chunk(own[-1:] if step else own, len(own) - 1 if step else 0) for own in tokens]
        both = [run.forward([part])[0][0] for run, part in zip(runs, parts, strict=True)]
        assert (both[0] - both[1]).norm() < 1e-2 * both[1].norm()
        for own, logits in zip(tokens, both, strict=True):
            own.append(int(logits[-1].argmax()))
    assert tokens[0] == tokens[1]


def test_a_rank_keeps_its_share_in_8_bits(kept: Path) -> None:
    """Rank 1 of two begins down_proj inside its fourth block; nothing else is cut there."""
    fused = pytest.importorskip("workers.kernels.fused")
    for rank in range(2):
        decoder = load_decoder(
            kept, read_spec(kept), Runtime(tp=TensorParallel(rank, 2), dtype=torch.bfloat16, kernels=fused)
        )
        for index, linear in enumerate(linears(decoder)):
            assert isinstance(linear.weight, BlockScaled) == (rank == 0 or index % 4 != 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_it_is_told_whether_blocks_are_kept(
    kept: Path, kernels: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = pytest.importorskip(f"workers.kernels.{kernels}")
    with caplog.at_level("INFO"):
        decoder = load_decoder(kept, read_spec(kept), Runtime(dtype=dtype, kernels=chosen))
    is_kept = kernels == "fused" and dtype == torch.bfloat16
    assert isinstance(linears(decoder)[0].weight, BlockScaled) == is_kept
    assert ("FP8 weights are kept in 8 bits" in caplog.text) == is_kept
    assert (f"{chosen.NAME} kernels do not multiply them with {dtype}" in caplog.text) == (not is_kept)
