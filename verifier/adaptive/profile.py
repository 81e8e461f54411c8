"""The start-up profile: milliseconds of the target's forward by rows. Legend: T table entries."""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from verifier.adaptive.cost_model import RowCosts
from verifier.target import Target
from verifier.warm_up import timed_forward
from workers.config import EngineConfig
from workers.cuda_graphs import MOST_ROWS, bucket

_FIRST_ROUND_S, _PROFILE_S = 0.4, 1.2
"""Approximate start-up time for finding the sizes, and for the whole profile; two rounds are always run."""
_MIN_ROUNDS, _MAX_ROUNDS = 2, 8


def profile(target: Target, config: EngineConfig, num_pages: int) -> RowCosts:
    """Time forwards of a growing number of rows on unallocated pages. Called on rank 0; its peers follow.

    Sizes are timed in rounds, so that a busy moment of the machine does not tilt the table. The minimum over rounds
    counts, and no size costs more than a larger one. The first round's time limits the number of sizes, but some exceed
    a single tree; larger sizes are extrapolated. With CUDA graphs the sizes are the buckets, and the table is a
    staircase up to the largest bucket.
    """
    began = time.perf_counter()
    has_graphs = target.graphs is not None
    timed = partial(timed_forward, target, config, num_pages)
    least_ms: dict[int, float] = {}
    count, most = 1, config.max_num_batched_tokens
    while count <= most and (time.perf_counter() - began < _FIRST_ROUND_S or count <= 2 * config.tree_rows):
        timed(count)  # the first forward of a size warms up caches
        least_ms[count] = timed(count)
        count = bucket(count + 1) if has_graphs else count + max(1, count // 2)
    for number in range(_MAX_ROUNDS):
        if number >= _MIN_ROUNDS and time.perf_counter() - began > _PROFILE_S:
            break
        for size in least_ms:
            least_ms[size] = min(least_ms[size], timed(size))
    ms_T = np.minimum.accumulate(list(least_ms.values())[::-1])[::-1]
    costs = RowCosts(np.array(list(least_ms), dtype=np.float64), ms_T)
    if not has_graphs:
        return costs
    # Larger buckets hold prompts, which no trees are timed as.
    return costs.in_buckets(bucket(min(MOST_ROWS, config.max_num_seqs * config.tree_rows)))
