"""KV sizing: every rank computes at start-up how many pages fit, and all use the minimum.

Target and drafter share one page table, so a page takes memory in every pool. Ranks that share a device (a colocated
drafter and its verifier, or all ranks on CPU) divide the device's free memory by the sum of their page sizes. A drafter
on a separate device needs room for as many pages as the target.
"""

from __future__ import annotations

import os

import torch

from workers.comm.groups import World
from workers.config import EngineConfig
from workers.models.specs import ModelSpec, TransformersSpec

SCORED_ROWS = 64
"""Rows of which several copies of the logits exist at once: prompt rows whose log-probabilities a request asks for, and
the rows of trees that are verified by rejection."""
_SCORED_COPIES = 4
DRAWN_ROWS = 256
"""Sampled rows whose logits exist in float32 at once. Reading the LM head again for more rows takes no longer than
multiplying with it."""
_CPU_SHARE = 0.25
"""Share of the machine's free memory for all pools on CPU, where a page takes no memory until it is written."""


def logits_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Memory that a verifier rank needs for the logits of a full step's tree rows, or of a block of prompt rows.

    For log-probabilities and rejection all of them are kept in the type that the head computes in. Of DRAWN_ROWS rows a
    logit takes 4 bytes in float32, in which it is processed; those of the head; and one to compare it with a threshold.
    Several ranks gather float32 shards into whole rows, which exist twice meanwhile.
    """
    size, kept = config.tensor_parallel_size, 4 if isinstance(spec, TransformersSpec) else config.item_bytes
    of_logit = 4 + kept + 1 if size == 1 else 8 + kept + -(-8 // size)
    rows, of_scored = config.max_num_seqs * config.tree_rows, 4 * _SCORED_COPIES
    return spec.vocab_size * (kept * rows + max(of_logit * min(rows, DRAWN_ROWS), of_scored * SCORED_ROWS))


def agree_on_pages(world: World, bytes_per_slot: int, *, bytes_beside: int = 0) -> int:
    """Return the number of pages per pool, null page included: as configured, else as many as fit and can be used.

    Collective; every rank calls it once its weights are loaded. bytes_per_slot: of this rank's pool. bytes_beside:
    other GPU memory that this rank will need. Raises ValueError if not even one request of max_model_len fits.
    """
    config = world.config
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # memory cached by the allocator would count as used
    every = world.gather_number(bytes_per_slot)  # also a barrier: afterwards all ranks have loaded their weights
    beside = world.gather_number(bytes_beside)
    if config.num_pages is not None:
        fits = config.num_pages
    else:
        here = config.ranks_on_device_of(world.rank)
        free = _free_bytes(world, sum(beside[rank] for rank in here))
        fits = int(free // (sum(every[rank] for rank in here) * config.page_size))
    return usable_pages(config, world.agree_on_minimum(fits))


def usable_pages(config: EngineConfig, fits: int) -> int:
    """Return how many of the pages that fit can be used, null page included.

    Raises ValueError if not even one request of max_model_len fits.
    """
    pages_per_request = config.pages_for(config.max_model_len)
    pages = min(fits, 1 + config.max_num_seqs * pages_per_request)
    if pages < 1 + pages_per_request:
        instead = (
            "lower max_model_len, lower max_num_seqs or num_speculative_tokens, whose product determines the size of a "
            "step's logits and of what waits for verdicts in a hybrid's states, lower max_num_batched_tokens, or give "
            "more memory, a higher gpu_memory_utilization among it"
            if config.num_pages is None
            else f"write num_pages={1 + pages_per_request} or more, or lower max_model_len"
        )
        raise ValueError(
            f"the KV cache has room for {max(0, pages - 1)} pages of {config.page_size} tokens, but one request of "
            f"max_model_len {config.max_model_len} needs {pages_per_request}: {instead}"
        )
    return pages


def _free_bytes(world: World, beside: int) -> float:
    """Return the free memory of this rank's device for all pools on it.

    beside: other memory that its ranks will need. On CPU, the share that the pools leave free covers it.
    """
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(world.device)
        return max(0.0, free - beside - (1 - world.config.memory_utilization) * total)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _CPU_SHARE
