"""Tells whether an engine fits on its devices: what each must hold, and the smallest engine that fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.planner.memory import ModelShard, device_loads, model_shards, pages_on_device
from workers.config import EngineConfig
from workers.kv_sizing import usable_pages
from workers.models.draft_methods import read_specs
from workers.models.specs import check_parallel

_SIZES = (1, 2, 4, 8, 16)
"""Tensor parallel sizes that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Holds what one device needs for one request of max_model_len, and what an engine may take of it, in bytes."""

    role: str
    """verifier, drafter, or "verifier and drafter" on a device that they share."""
    needed: int
    available: int


def memory_needs(config: EngineConfig, shards: list[ModelShard], memory_bytes: float) -> list[MemoryNeed]:
    """Return the need of each kind of device, of which the engine has one or several."""
    pages = config.num_pages or 1 + config.pages_for(config.max_model_len)
    available = int(memory_bytes * config.memory_utilization)
    return [
        MemoryNeed(role=load.role, needed=load.held + pages * load.page, available=available)
        for load in device_loads(config, shards)
    ]


def engine_pages(config: EngineConfig, shards: list[ModelShard], memory_bytes: float) -> int:
    """Return the KV pages that the engine would have, null page included.

    Raises ValueError in the engine's words if not even one request of max_model_len fits.
    """
    return usable_pages(config, config.num_pages or pages_on_device(config, shards, memory_bytes))


def smallest_size(config: EngineConfig, memory_bytes: float) -> int | None:
    """Return the smallest tensor parallel size with which the engine fits, or None if none of those tried does."""
    spec = read_specs(config).target
    for size in _SIZES:
        resized = _resized(config, size)
        try:
            check_parallel(spec, size)
            engine_pages(resized, model_shards(resized), memory_bytes)
        except ValueError:
            continue
        return size
    return None


def _resized(config: EngineConfig, size: int) -> EngineConfig:
    """Return the engine with another size; a drafter of as many ranks keeps as many as the target."""
    draft = config.draft
    if draft is not None and draft.tensor_parallel_size == config.tensor_parallel_size > 1:
        draft = replace(draft, tensor_parallel_size=size)
    return replace(config, tensor_parallel_size=size, draft=draft)
