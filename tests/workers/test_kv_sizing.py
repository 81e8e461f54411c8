"""KV sizing: the number of pages follows from a page's size in the pools of target and drafter together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engines import bundled
from workers import kv_sizing
from workers.config import DraftConfig, EngineConfig
from workers.kv_cache import FP8, KVPool
from workers.kv_sizing import agree_on_pages, logits_bytes
from workers.models.readers import read_spec

GIB = 1 << 30


def engine(tp: int = 1, draft_tp: int = 0, placement: Any = "dedicated", **more: Any) -> EngineConfig:
    draft = DraftConfig(method="eagle3", model_path="", tensor_parallel_size=draft_tp, placement=placement)
    return EngineConfig(
        model_path="", tensor_parallel_size=tp, draft=draft if draft_tp else None, page_size=16, max_num_seqs=10**6,
        **{"device": "cuda"} | more,
    )  # fmt: skip


def pages(
    monkeypatch: pytest.MonkeyPatch,
    config: EngineConfig,
    slot_bytes: list[int],
    free: list[float],
    beside: list[int] | None = None,
) -> int:
    """Return the number of pages that ranks with these slot sizes and free memory agree on."""
    beside = beside or [0] * config.world_size

    def of(rank: int, agreed: int) -> int:
        world: Any = SimpleNamespace(
            config=config,
            rank=rank,
            device=torch.device("cpu"),
            gather_number=partial(next, iter([slot_bytes, beside])),
            agree_on_minimum=lambda value: min(value, agreed),
        )
        monkeypatch.setattr(kv_sizing, "_free_bytes", lambda world, beside: free[rank] - beside)
        return agree_on_pages(world, slot_bytes[rank], bytes_beside=beside[rank])

    agreed = 1 << 40
    for rank in range(config.world_size):
        agreed = of(rank, agreed)
    return agreed


@pytest.mark.parametrize(
    ("config", "sharing"),
    [
        (engine(tp=2), [[0], [1]]),
        (engine(tp=2, draft_tp=1), [[0], [1], [2]]),
        (engine(tp=2, draft_tp=1, placement="colocated"), [[0, 2], [1], [0, 2]]),
        (engine(tp=2, draft_tp=2, placement="colocated"), [[0, 2], [1, 3], [0, 2], [1, 3]]),
        (engine(tp=2, draft_tp=1, device="cpu"), [[0, 1, 2]] * 3),
    ],
)
def test_ranks_on_one_device_share_its_memory(config, sharing):
    assert [config.ranks_on_device_of(rank) for rank in range(config.world_size)] == sharing


def test_a_colocated_drafter_takes_the_same_memory(monkeypatch):
    config = engine(tp=1, draft_tp=1, placement="colocated")
    assert pages(monkeypatch, config, [120_000, 8_000], [8 * GIB, 8 * GIB]) == 8 * GIB // (128_000 * 16)


def test_a_dedicated_drafter_limits_pages_only_if_it_has_less_memory(monkeypatch):
    config = engine(tp=2, draft_tp=1)
    slots = [64_000, 60_000, 16_000]
    assert pages(monkeypatch, config, slots, [8 * GIB, 8 * GIB, 8 * GIB]) == 8 * GIB // (64_000 * 16)
    assert pages(monkeypatch, config, slots, [8 * GIB, 8 * GIB, 1 * GIB]) == GIB // (16_000 * 16)


def test_temporary_allocations_have_reserved_memory(monkeypatch):
    free = [8 * GIB, 8 * GIB]
    apart, together = engine(tp=1, draft_tp=1), engine(tp=1, draft_tp=1, placement="colocated")
    assert pages(monkeypatch, apart, [64_000, 8_000], free, [GIB, 0]) == 7 * GIB // (64_000 * 16)
    assert pages(monkeypatch, together, [64_000, 8_000], free, [GIB, 0]) == 7 * GIB // (72_000 * 16)
    # 64 trees of 17 rows over 128,256 tokens as the head computes them, and of 256 rows again what drawing takes: once
    # in float32, once as the head computes them, once compared
    spec = replace(read_spec(bundled().model_path), vocab_size=128_256)
    seats = replace(apart, max_num_seqs=64, dtype="bfloat16")
    assert logits_bytes(seats, spec) == (64 * 17 * 2 + 256 * (4 + 2 + 1)) * 128_256
    assert logits_bytes(replace(seats, dtype="float32"), spec) == (64 * 17 * 4 + 256 * (4 + 4 + 1)) * 128_256
    assert logits_bytes(replace(seats, max_num_seqs=1), spec) == (17 * 2 + 64 * 4 * 4) * 128_256, "scored prompt rows"


def test_memory_freed_after_loading_is_returned_before_measuring(monkeypatch):
    done: list[str] = []

    def note(event: str, value: Any = None) -> Any:
        done.append(event)
        return value

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: note("empty"))
    monkeypatch.setattr(kv_sizing, "_free_bytes", lambda world, beside: note("measure", float(GIB)))
    for device in ("cuda", "cpu"):
        world: Any = SimpleNamespace(
            config=engine(),
            rank=0,
            device=torch.device(device),
            gather_number=lambda value: note("gather", [value]),
            agree_on_minimum=lambda value: value,
        )
        agree_on_pages(world, 1024)
    assert done == ["empty", "gather", "gather", "measure", "gather", "gather", "measure"]


def test_configured_pages_are_used_up_to_the_useful_number(monkeypatch):
    assert pages(monkeypatch, engine(num_pages=200, max_model_len=1024), [1], [0.0]) == 200
    few = EngineConfig(model_path="", max_num_seqs=3, max_model_len=100, page_size=16)
    assert pages(monkeypatch, few, [1], [float(GIB)]) == 1 + 3 * 7  # 100 tokens and a root


def test_too_little_for_one_request_is_an_error_with_numbers(monkeypatch):
    with pytest.raises(
        ValueError, match=r"room for 15 pages of 16 tokens.*max_model_len 1024 needs 65.*num_speculative_tokens"
    ):
        pages(monkeypatch, engine(max_model_len=1024), [1 << 20], [0.25 * GIB])


def test_too_few_configured_pages_are_an_error_that_names_num_pages(monkeypatch):
    with pytest.raises(ValueError, match=r"room for 19 pages.*needs 65: write num_pages=66 or more, or lower"):
        pages(monkeypatch, engine(max_model_len=1024, num_pages=20), [1], [0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_a_slot_takes_the_reported_bytes(dtype):
    pool = KVPool(3, 32, 2, 24, dtype, "cpu")
    assert pool.data.nbytes == 32 * KVPool.bytes_per_slot(3, 2, 24, dtype)
