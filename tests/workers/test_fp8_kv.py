"""A pool in 8 bits holds the rounded keys and values of a pool in the model's dtype, for every kind of model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drafter.proposers.eagle3 import Eagle3Head
from tests.support import checkpoints
from tests.support.attention_cases import CHAIN, RAGGED, Batch
from workers.config import EngineConfig
from workers.kernels import reference
from workers.kv_cache import FP8, FP8_MAX, KVPool, kv_dtype
from workers.models.eagle3_format import read_eagle3_spec
from workers.models.load import load_decoder
from workers.models.readers import read_spec

CPU = torch.device("cpu")
PAGE = 16


class RoundedPool(KVPool):
    """Rounds what it is given to 8 bits, and stores that in the model's dtype."""

    def write(self, index: int, kv_N2Hd: Tensor, slots_N: Tensor) -> None:
        super().write(index, kv_N2Hd.clamp(-FP8_MAX, FP8_MAX).to(FP8).to(kv_N2Hd.dtype), slots_N)


@torch.inference_mode()
def test_writing_rounds_to_the_nearest_and_clamps() -> None:
    pool = KVPool(2, 8, 1, 4, FP8, "cpu")
    given = torch.tensor([[1.0, 1.06, -447.0, 449.0], [1e9, -torch.inf, torch.inf, 2.0**-9]])
    pool.write(1, given.view(1, 2, 1, 4), torch.tensor([5]))
    expected = torch.tensor([[1.0, 1.0, -448.0, 448.0], [448.0, -448.0, 448.0, 2.0**-9]])
    assert torch.equal(pool.layer(1)[5].float().view(2, 4), expected)
    assert pool.data.dtype == FP8 and pool.data.float().count_nonzero() == 8, "nothing else is written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_queries_keys_and_values_of_one_product_are_written_in_place(dtype: torch.dtype) -> None:
    """Keys and values are a part of wider rows, or have the order of transformers' classes."""
    qkv_NHd = (30 * torch.randn(5, 6, 8)).to(dtype)
    slots, plain, pool = torch.tensor([7, 0, 3, 4, 1]), KVPool(1, 8, 2, 8, dtype, "cpu"), KVPool(1, 8, 2, 8, FP8, "cpu")
    for kv in (qkv_NHd[:, 2:].view(5, 2, 2, 8), torch.randn(2, 2, 5, 8).to(dtype).permute(2, 0, 1, 3)):
        for each in (plain, pool):
            each.write(0, kv, slots)
        assert torch.equal(pool.data.float(), plain.data.to(FP8).float())


@torch.inference_mode()
def test_compaction_moves_entries_bit_by_bit() -> None:
    pool = KVPool(2, 16, 1, 6, FP8, "cpu")
    stored = torch.randint(0, 256, (2, 16, 2, 1, 6), dtype=torch.uint8)
    pool.data.view(torch.uint8).copy_(stored)
    reference.copy_slots(pool.data, torch.tensor([4, 6, 9]), torch.tensor([3, 4, 5]))
    stored[:, [3, 4, 5]] = stored[:, [4, 6, 9]]
    assert torch.equal(pool.data.view(torch.uint8), stored)


def passes(model: Any, kv: KVPool, run: Callable[[np.ndarray, Any, KVPool], Tensor]) -> list[Tensor]:
    """Return what a prompt and then trees give; the trees read the prompt's entries."""
    outs = []
    for batch in (Batch([(0, 17), (0, 40)], PAGE), Batch([(17, CHAIN), (40, RAGGED)], PAGE)):
        table = np.arange(1, 9, dtype=np.int32).reshape(2, 4)
        metadata = batch.metadata
        metadata.page_table_BP[:] = table[:, : metadata.page_table_BP.shape[1]]
        outs.append(run(metadata.slot_N, model.plan(metadata, PAGE), kv))
    return outs


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "granite", "eagle3"])
def test_a_model_computes_with_the_rounded_values(tmp_path: Path, family: str) -> None:
    """Our decoder, classes of transformers with soft caps and windows, and a head."""
    if family == "eagle3":
        target = checkpoints.write_model(tmp_path / "target", "llama")
        path = checkpoints.write_eagle3(tmp_path / "head")
        model: Any = Eagle3Head.load(read_eagle3_spec(path, read_spec(target)), path, target)
    else:
        path = checkpoints.write_model(tmp_path, family)
        model = load_decoder(path, read_spec(path))

    def run(slot_N: np.ndarray, plan: Any, kv: KVPool) -> Tensor:
        generator = torch.Generator().manual_seed(len(slot_N))
        tokens, positions = torch.randint(2, 90, (len(slot_N),), generator=generator), torch.from_numpy(slot_N).long()
        if family == "eagle3":
            return model.forward(
                tokens, torch.randn(len(tokens), model.width, generator=generator), positions, plan, kv
            )
        return model.full_logits(model.forward(tokens, positions, plan, kv).final_ND)

    with torch.inference_mode():
        exact, small = model.new_kv_pool(9 * PAGE), model.new_kv_pool(9 * PAGE, FP8)
        rounded = RoundedPool(*exact.data.shape[:2], *exact.data.shape[3:], torch.float32, "cpu")
        outs, expected, unrounded = (passes(model, kv, run) for kv in (small, rounded, exact))
    assert small.data.nbytes * 4 == exact.data.nbytes
    assert torch.equal(small.data.float(), rounded.data)
    for out, other, fine in zip(outs, expected, unrounded, strict=True):
        assert torch.equal(out, other) and not torch.equal(out, fine)
        assert (out - fine).norm() < 0.4 * fine.norm()


@pytest.mark.parametrize(("capability", "is_read"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_gpus_without_the_conversion_are_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_read: bool
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    config, cuda = EngineConfig(model_path="", dtype="bfloat16", kv_cache_dtype="fp8"), torch.device("cuda", 0)
    triton: Any = type("Triton", (), {"NAME": "triton"})
    assert kv_dtype(EngineConfig(model_path="", dtype="bfloat16"), triton, cuda) == torch.bfloat16
    assert kv_dtype(config, reference, cuda) == kv_dtype(config, triton, CPU) == FP8
    if is_read:
        assert kv_dtype(config, triton, cuda) == FP8
        return
    with pytest.raises(
        ValueError, match=r"kv_cache_dtype: .* 8\.9 or higher .* has 8\.\d; write auto, or kernels: torch"
    ):
        kv_dtype(config, triton, cuda)
