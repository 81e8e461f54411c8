"""The start-up profile: milliseconds of the target's forward by rows. Legend: T table entries."""

from __future__ import annotations

import time
from array import array
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from verifier.adaptive.cost_model import RowCosts
from verifier.request import Request
from verifier.step_inputs import Move, StepInputs
from verifier.target import Target
from verifier.tree import chains
from workers.comm.ipc import Submit
from workers.config import EngineConfig
from workers.cuda_graphs import MOST_ROWS, bucket
from workers.settings import Rule, SamplingSettings

_FIRST_ROUND_S, _PROFILE_S = 0.4, 1.2
"""Approximate start-up time for finding the sizes, and for the whole profile; two rounds are always run."""
_MIN_ROUNDS, _MAX_ROUNDS = 2, 8
_PROFILE_SLOTS = 128
_TREE_ROWS = 8
_PLAIN = SamplingSettings()


def profile(target: Target, config: EngineConfig, num_pages: int) -> RowCosts:
    """Time forwards of a growing number of rows on unallocated pages. Called on rank 0; its peers follow.

    Sizes are timed in rounds, so that a busy moment of the machine does not tilt the table. The minimum over rounds
    counts, and no size costs more than a larger one. The first round's time limits the number of sizes, but some exceed
    a single tree; larger sizes are extrapolated. With CUDA graphs the sizes are the buckets, and the table is a
    staircase up to the largest bucket.
    """
    began = time.perf_counter()
    has_graphs = target.graphs is not None
    timed = partial(_timed, target, config, num_pages)
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


def warm_up(target: Target, config: EngineConfig, num_pages: int) -> None:
    """Run forwards on unallocated pages, because on CUDA the first forward and the first top-k/top-p draw compile.

    Called on rank 0; its peers follow.
    """
    for sampling in (_PLAIN, SamplingSettings(top_p=0.5)):
        _timed(target, config, num_pages, 1, sampling)


def _timed(
    target: Target, config: EngineConfig, num_pages: int, num_rows: int, sampling: SamplingSettings = _PLAIN
) -> float:
    """Time one forward of `num_rows` rows, in trees behind a short context.

    All trees share the same pages, because the KV that they write is never read.
    """
    num_slots = min(_PROFILE_SLOTS, config.max_model_len, (num_pages - 1) * config.page_size)
    # Graphs are captured for the fewest requests that can have a bucket's rows.
    size = min(_TREE_ROWS if target.graphs is None else bucket(config.tree_rows), num_slots)
    sizes = [size] * (num_rows // size) + [num_rows % size] * (num_rows % size > 0)
    submit = Submit(id=0, prompt=[0] * (num_slots - size + 1), max_tokens=1, sampling=sampling)
    pages = array("i", range(1, 1 + -(-num_slots // config.page_size)))
    request = Request(submit, Rule.COUPLED, None, 0, pages=pages)
    moves = [Move(request, 0, 0)]  # so that the move of accepted paths is compiled too
    trees = chains([[0] * size for size in sizes])
    step = StepInputs(config.page_size, ()).target_step(trees, [request] * len(sizes), moves=moves)
    if num_rows > (most := config.max_num_seqs * config.tree_rows):  # only a prompt has so many rows, and few draw
        step = replace(
            step,
            sample_row_R=step.sample_row_R[:most],
            request_R=step.request_R[:most],
            draw_index_R=step.draw_index_R[:most],
            sampling=step.sampling.rows(torch.arange(most)),
        )
    began = time.perf_counter()
    target.run(step, 0)
    return 1e3 * (time.perf_counter() - began)
