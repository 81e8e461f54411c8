"""Context lengths that rope scaling allows, by default and with an explicit max_model_len."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.convert import engine_config
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from tests.support import checkpoints
from tests.workers.models.test_model_parity import Chunk, PagedRun, assert_close, oracle, oracle_logits, random_tokens
from workers.models.load import load_decoder
from workers.models.readers import read_spec

torch.set_num_threads(1)


def rope(kind: str, factor: float, original: int | None = None) -> dict[str, Any]:
    beside = {"original_max_position_embeddings": original} if original else {}
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": factor} | beside}


def length(path: Path, asked: int | None = None) -> int:
    return engine_config(EngineArgs(model=str(path), device="cpu", max_model_len=asked)).max_model_len


@pytest.mark.parametrize(
    ("model_type", "config", "default", "most"),
    [
        # Qwen's model cards: YaRN is written into config.json, max_position_embeddings stays
        ("qwen3", {"max_position_embeddings": 40960, **rope("yarn", 4.0, 32768)}, 131072, 131072),
        ("seed_oss", {"max_position_embeddings": 40960, **rope("yarn", 4.0, 32768)}, 131072, 131072),
        # gpt-oss, DeepSeek: max_position_embeddings is scaled already
        ("llama", {"max_position_embeddings": 131072, **rope("yarn", 32.0, 4096)}, 131072, 131072),
        # Vicuna 16k needs the factor, DeepSeek Coder has it in max_position_embeddings
        ("llama", {"max_position_embeddings": 4096, **rope("linear", 4.0)}, 4096, 16384),
        ("llama", {"max_position_embeddings": 4096, **rope("dynamic", 4.0)}, 4096, 4096),
        ("llama", {"max_position_embeddings": 512, "rope_parameters": checkpoints.LLAMA3_ROPE}, 512, 512),
        ("llama", {"max_position_embeddings": 512}, 512, 512),
    ],
)
def test_rope_scaling_determines_the_context_length(
    tmp_path: Path, model_type: str, config: dict[str, Any], default: int, most: int
) -> None:
    path = checkpoints.write_model(tmp_path, model_type, **config)
    assert length(path) == default
    assert length(path, most) == most
    with pytest.raises(ConfigError, match=f"{most + 1} is more than the model's {most} positions; lower it"):
        length(path, most + 1)


def test_linear_scaling_by_layer_type_is_counted_in_already(tmp_path: Path) -> None:
    """Gemma 3's own configuration: a factor of 8 in its global layers, and 131,072 positions."""
    by_layer = {"full_attention": rope("linear", 8.0)["rope_parameters"]}
    by_layer["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
    path = checkpoints.write_model(tmp_path, "gemma3_text", max_position_embeddings=131072, rope_parameters=by_layer)
    spec = read_spec(path)
    assert (spec.max_position_embeddings, spec.max_scaled_positions) == (131072, 131072)


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_logits_beyond_max_position_embeddings_equal_transformers(tmp_path: Path, kind: str) -> None:
    path = checkpoints.write_model(tmp_path, "qwen3", max_position_embeddings=40, **rope(kind, 4.0, 32))
    tokens = random_tokens(110)
    run = PagedRun(load_decoder(path, read_spec(path)), pages_each=30)
    run.forward([Chunk(tokens[:70], 0)])
    assert_close(run.forward([Chunk(tokens[70:], 70)])[0][0], oracle_logits(oracle(path), tokens)[70:])


def write_longrope(path: Path) -> Path:
    """A model first trained for 32 positions, extended to 128."""
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    scaling |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [4.0, 5.0, 6.0, 7.0]}
    scaling |= {"original_max_position_embeddings": 32}
    return checkpoints.write_model(
        path,
        "phi3",
        pad_token_id=0,
        max_position_embeddings=128,
        rope_parameters=scaling,
        original_max_position_embeddings=32,
    )


def test_a_longrope_model_serves_its_original_length_by_default(tmp_path: Path) -> None:
    path = write_longrope(tmp_path)
    assert (length(path), length(path, 128)) == (32, 128)
    with pytest.raises(ConfigError, match="129 is more than the model's 128 positions"):
        length(path, 129)


@pytest.mark.parametrize(("max_model_len", "num_tokens"), [(None, 30), (32, 30), (33, 33), (128, 70)])
def test_a_longrope_model_has_one_set_of_frequencies_whatever_the_positions_of_a_batch(
    tmp_path: Path, max_model_len: int | None, num_tokens: int
) -> None:
    """transformers chooses by the longest sequence of a batch; within its choice the logits are ours."""
    path = write_longrope(tmp_path)
    tokens = random_tokens(num_tokens)
    run = PagedRun(load_decoder(path, read_spec(path), max_model_len=max_model_len), num_requests=2)
    (first, _), _ = run.forward([Chunk(tokens[:20], 0), Chunk(tokens[:3], 40)])
    (second, _), _ = run.forward([Chunk(tokens[20:], 20), None])
    assert_close(torch.cat([first, second]), oracle_logits(oracle(path), tokens))
