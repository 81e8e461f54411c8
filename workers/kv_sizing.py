"""How many KV pages fit: sized on every rank at start-up, and the smallest answer counts for all.

Target and drafter share one page table, so a page costs its bytes in every pool. Ranks that share a device, a
colocated drafter and its verifier or all ranks on CPU, divide that device's free memory by the sum of what a page
costs each of them; a drafter on its own device must have room for as many pages as the target has.
"""

from __future__ import annotations

import os

import torch

from workers.comm.groups import World
from workers.config import EngineConfig

_LOGITS_COPIES = 3
"""Of a step's logits that lie beside each other in float32: the model's, with constraints, processed."""
_CPU_SHARE = 0.25
"""Part of the machine's free memory that all pools together may take on CPU; pages cost nothing until used."""


def logits_bytes(config: EngineConfig, vocab_size: int) -> int:
    """What a full step needs on a verifier rank to draw at all its trees' rows: with large trees the largest thing that
    comes and goes beside the pages."""
    return _LOGITS_COPIES * 4 * vocab_size * config.max_num_seqs * config.tree_rows


def agree_on_pages(world: World, bytes_per_slot: int, *, bytes_beside: int = 0) -> int:
    """Pages of every pool, null page included: as configured, else what fits and can be used. Collective, to be called
    when this rank's weights are loaded.

    bytes_per_slot: of this rank's own pool. bytes_beside: what else this rank will need of a GPU. Raises ValueError if
    not even one request of max_model_len fits.
    """
    config = world.config
    pages_per_request = config.pages_for(config.max_model_len)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has let go of would count as taken, for ranks on this device too
    every = world.gather_number(bytes_per_slot)  # after it all weights are loaded, those of ranks on this device too
    beside = world.gather_number(bytes_beside)
    if config.num_pages is not None:
        fits = config.num_pages
    else:
        here = ranks_on_device_of(config, world.rank)
        free = _free_bytes(world, sum(beside[rank] for rank in here))
        fits = int(free // (sum(every[rank] for rank in here) * config.page_size))
    pages = world.agree_on_minimum(min(fits, 1 + config.max_num_seqs * pages_per_request))
    if pages < 1 + pages_per_request:
        instead = (
            "lower max_model_len, lower max_num_seqs or num_speculative_tokens, whose product is what a step's logits "
            "take, or give more memory"
            if config.num_pages is None
            else f"write num_pages={1 + pages_per_request} or more, or lower max_model_len"
        )
        raise ValueError(
            f"the KV cache has room for {max(0, pages - 1)} pages of {config.page_size} tokens, but one request of "
            f"max_model_len {config.max_model_len} needs {pages_per_request}: {instead}"
        )
    return pages


def ranks_on_device_of(config: EngineConfig, rank: int) -> list[int]:
    """The ranks whose pools lie in the same memory as this one's, itself included."""
    ranks = list(range(config.world_size))
    if config.device == "cpu":
        return ranks
    if config.draft is None or config.draft.placement != "colocated":
        return [rank]
    tp = config.tensor_parallel_size
    return [other for other in ranks if other % tp == rank % tp]


def _free_bytes(world: World, beside: int) -> float:
    """Of this rank's device, for all pools on it. beside: what else its ranks will need; on CPU the share that pools
    leave has room for that."""
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(world.device)
        return max(0.0, free - beside - (1 - world.config.memory_utilization) * total)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _CPU_SHARE
