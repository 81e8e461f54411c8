"""How long a request may be: what rope scaling in config.json allows, by default and for who asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from test_model_parity import Chunk, PagedRun, assert_close, oracle, oracle_logits, random_tokens

from cluster.convert import engine_config
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from workers.checkpoint import read_spec
from workers.decoders import load_decoder

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
def test_rope_scaling_says_how_long_a_request_may_be(
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
