"""What the target's forward takes on this machine: a table of milliseconds by rows, timed at start-up.

Legend: T table entries.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import replace

import numpy as np
import torch

from verifier.adaptive.cost_model import RowCosts
from verifier.request import Request
from verifier.step_inputs import Move, pack_target
from verifier.target import Target
from verifier.tree import chains
from workers.comm.ipc import Submit
from workers.config import EngineConfig
from workers.cuda_graphs import bucket
from workers.cuda_graphs import sizes as graph_sizes
from workers.types import Rule, SamplingParams

_FIRST_ROUND_S, _PROFILE_S = 0.4, 1.2
"""Start-up time spent on the table's sizes and on all of it, more or less; a slow target takes what two rounds take."""
_MIN_ROUNDS, _MAX_ROUNDS = 2, 8
_PROFILE_SLOTS = 128
_TREE_ROWS = 8
_PLAIN = SamplingParams()


def profile(target: Target, config: EngineConfig, num_pages: int) -> RowCosts:
    """Times forwards of a growing number of rows, on pages that nobody owns yet. Rank 0; its peers follow.

    Round after round, so that a busy moment of the machine does not tilt the table; the least time counts, and no size
    costs more than a larger one. As many sizes as the first round's share of the time allows, but always some beyond a
    single tree: what is not timed is extrapolated. Where graphs are replayed the sizes are their buckets, and the table
    is a staircase up to the largest of them.
    """
    began = time.perf_counter()
    has_graphs = target.graphs is not None
    least_ms: dict[int, float] = {}
    count, most = 1, config.max_num_batched_tokens
    while count <= most and (time.perf_counter() - began < _FIRST_ROUND_S or count <= 2 * config.tree_rows):
        _timed(target, config, num_pages, count)  # the first of its size prepares what later ones find
        least_ms[count] = _timed(target, config, num_pages, count)
        count = bucket(count + 1) if has_graphs else count + max(1, count // 2)
    for number in range(_MAX_ROUNDS):
        if number >= _MIN_ROUNDS and time.perf_counter() - began > _PROFILE_S:
            break
        for size in least_ms:
            least_ms[size] = min(least_ms[size], _timed(target, config, num_pages, size))
    ms_T = np.minimum.accumulate(list(least_ms.values())[::-1])[::-1]
    timed = RowCosts(np.array(list(least_ms), dtype=np.float64), ms_T)
    if not has_graphs:
        return timed
    return timed.in_buckets(max(size.rows for size in graph_sizes(config.max_num_seqs, config.tree_rows)))


def warm_up(target: Target, config: EngineConfig, num_pages: int) -> None:
    """Forwards on pages that nobody owns yet: on CUDA the first of all compiles, as does the first draw with top-k or
    top-p. Rank 0; its peers follow."""
    for sampling in (_PLAIN, SamplingParams(top_p=0.5)):
        _timed(target, config, num_pages, 1, sampling)


def _timed(
    target: Target, config: EngineConfig, num_pages: int, num_rows: int, sampling: SamplingParams = _PLAIN
) -> float:
    """One forward of so many rows, in trees behind a context of modest length. All share the same pages: what they
    write there is never read."""
    num_slots = min(_PROFILE_SLOTS, config.max_model_len, (num_pages - 1) * config.page_size)
    # A graph is captured for rows and requests: there is one for as few requests as can have so many rows.
    size = min(_TREE_ROWS if target.graphs is None else bucket(config.tree_rows), num_slots)
    sizes = [size] * (num_rows // size) + [num_rows % size] * (num_rows % size > 0)
    request = Request(
        Submit(id=0, prompt=[0] * (num_slots - size + 1), max_tokens=1, sampling=sampling), Rule.COUPLED, None, 0
    )
    request.pages = array("i", range(1, 1 + -(-num_slots // config.page_size)))
    moves = [Move(request, 0, 0)]  # so that what moves accepted paths is compiled too
    step = pack_target(chains([[0] * size for size in sizes]), [request] * len(sizes), [], moves, config.page_size, ())
    if num_rows > (most := config.max_num_seqs * config.tree_rows):  # so many rows are a prompt's, where few are drawn
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
