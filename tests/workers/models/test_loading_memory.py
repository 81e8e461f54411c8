"""Reading a checkpoint takes little more memory than its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile

from tests.support import checkpoints
from workers.models import checkpoint
from workers.models.checkpoint import Weights
from workers.models.layers import RankWeights
from workers.models.readers import read_spec
from workers.models.specs import TransformersSpec
from workers.models.transformers_model import TransformersDecoder

torch.set_num_threads(1)


def peak_bytes(act: Callable[[], object]) -> int:
    """Return the peak of torch's CPU memory during `act`, minus the memory before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = act()
    assert kept is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_stacked_experts_are_never_held_twice(tmp_path: Path) -> None:
    path = checkpoints.write_model(
        tmp_path, "qwen3_moe", num_hidden_layers=1, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=512
    )
    experts = 4 * 16 * 3 * 512 * 64
    spec, weights = read_spec(path), RankWeights(path)  # opened before: its mapped file is no memory
    assert isinstance(spec, TransformersSpec)
    assert experts < peak_bytes(lambda: TransformersDecoder(weights, spec)) < 1.2 * experts


def test_float8_weights_are_dequantized_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_DEQUANTIZED_ITEMS", 1 << 16)
    stored = {"w": torch.ones(1024, 1024).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(8, 8)}
    save_file(stored, tmp_path / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    weights, size = Weights(tmp_path, torch.bfloat16), 2 * 1024 * 1024
    assert size <= peak_bytes(lambda: weights.get("w")) < 1.5 * size
