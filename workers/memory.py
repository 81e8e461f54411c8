"""How many KV pages fit: sized on every rank at start-up, and the smallest answer counts for all."""

from __future__ import annotations

import os

import torch

from workers.groups import World

_CPU_SHARE = 0.25
"""Part of the machine's free memory that all pools together may take on CPU; pages cost nothing until used."""


def agree_on_pages(world: World, bytes_per_slot: int) -> int:
    """Pages of every pool, null page included: as configured, else what fits and can be used. Collective.

    bytes_per_slot: of this rank's own pool. Raises ValueError if not even one request of max_model_len fits.
    """
    config = world.config
    slots_per_request = config.max_model_len + config.tree_rows
    pages_per_request = -(-slots_per_request // config.page_size)
    if config.num_pages is not None:
        fits = config.num_pages
    else:
        fits = int(_free_bytes(world) // (bytes_per_slot * config.page_size))
    pages = world.agree_on_minimum(min(fits, 1 + config.max_num_seqs * pages_per_request))
    if pages < 1 + pages_per_request:
        raise ValueError(
            f"the KV cache has room for {pages - 1} pages of {config.page_size} tokens, but one request of "
            f"max_model_len {config.max_model_len} needs {pages_per_request}: lower max_model_len, or give more memory"
        )
    return pages


def _free_bytes(world: World) -> float:
    config = world.config
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(world.device)
        draft = config.draft
        shares = 2 if draft is not None and draft.placement == "colocated" and draft.method != "ngram" else 1
        return max(0.0, free - (1 - config.memory_utilization) * total) / shares
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _CPU_SHARE / config.world_size
