"""Every kind of head and target that loads passes the door, and what lacks a tensor does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.convert import read_engine
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from tests.support import checkpoints, quantized

torch.set_num_threads(1)

MASKED = {"speculators_model_type": "peagle", "mask_token_id": 3}

HEADS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "eagle3": ("midlayer.mlp.up_proj.weight", lambda path: checkpoints.write_eagle3(path)),
    "peagle": ("mask_hidden", lambda path: checkpoints.write_eagle3(path, style="speculators", parallel=MASKED)),
    "eagle": ("fc.bias", lambda path: checkpoints.write_eagle(path)),
    "dspark": ("markov_head.markov_w1.weight", lambda path: checkpoints.write_block(path)),
    "dspark of a reduced vocabulary": ("d2t", lambda path: checkpoints.write_block(path, draft_vocab_size=40)),
}
"""A tensor that each needs, and what writes it."""


def read(target: Path, head: Path | None = None, **fields: object) -> None:
    spec = {"speculative_config": {"model": str(head)}} if head else {}
    read_engine(EngineArgs.load({"model": str(target), "device": "cpu", **spec, **fields}))


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_passes_unless_a_tensor_is_missing(tmp_path: Path, kind: str) -> None:
    needed, write = HEADS[kind]
    target = checkpoints.write_model(tmp_path / "target", "llama", num_hidden_layers=8)
    head = write(tmp_path / "head")
    read(target, head)
    read(target, head, tensor_parallel_size=2)
    checkpoints.edit_weights(head, remove=(needed,))
    with pytest.raises(ConfigError, match=f"{head}.*{needed}.* is missing"):
        read(target, head)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: checkpoints.write_hybrid(path),
        lambda path: checkpoints.write_hybrid(path, "qwen3_next", **checkpoints.HYBRID_MOE),
        lambda path: checkpoints.add_mtp(
            checkpoints.write_model(path, "deepseek_v3", **checkpoints.LATENT["deepseek_v3"]), "deepseek_v3"
        ),
        lambda path: checkpoints.write_model(path, "gpt_oss", **checkpoints.ARCHITECTURES["gpt-oss"][1]),
        lambda path: checkpoints.write_multimodal(path, "language_model.model.", sliding_window=7),
    ],
    ids=["qwen3.5", "qwen3-next", "deepseek-v3", "gpt-oss", "gemma-3 with vision"],
)
def test_a_target_passes_unless_a_tensor_is_unknown(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    path = write(tmp_path)
    read(path)
    checkpoints.edit_weights(path, add={"language_model.model.layers.0.lora": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"unknown tensors: .*layers\.0\.lora"):
        read(path)


def test_a_quantized_target_passes_unless_a_part_is_missing(tmp_path: Path) -> None:
    path = checkpoints.write_model(tmp_path, "llama", intermediate_size=128)
    quantized.quantize(path, "AWQ")
    read(path, tensor_parallel_size=2)
    checkpoints.edit_weights(path, remove=("model.layers.0.mlp.up_proj.scales",))
    with pytest.raises(ConfigError, match=r"qweight has no .*\.scales: fetch or copy"):
        read(path)
