"""The start-up profile: milliseconds of the target's forward by rows, and of drafting. Legend: T table entries."""

from __future__ import annotations

import time
from array import array
from functools import partial

import numpy as np

from verifier.adaptive.cost_model import DraftWork, RowCosts, TimedExchange
from verifier.draft_inputs import DraftInput
from verifier.request import Request
from verifier.step_inputs import StepInputs
from verifier.target import Target
from verifier.warm_up import timed_forward
from workers.comm.channel import Channel
from workers.comm.ipc import Submit
from workers.config import EngineConfig
from workers.cuda_graphs import MOST_ROWS, bucket
from workers.settings import Rule, SamplingSettings, TreeLimits
from workers.types import DraftReply

_FIRST_ROUND_S, _PROFILE_S = 0.4, 1.2
"""Approximate start-up time for finding the sizes, and for the whole profile; two rounds are always run."""
_MIN_ROUNDS, _MAX_ROUNDS = 2, 8
_DRAFTING_S = 0.5
"""No further exchange is timed after so long."""
_FED_ROWS = 64


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


def profile_drafting(target: Target, link: Channel | None, config: EngineConfig) -> list[TimedExchange]:
    """Time exchanges with the drafter over trees on the null page: shallow, full, behind many rows, then many trees.

    The second of two equal exchanges counts, because the first may load and compile code.
    """
    assert config.draft is not None and link is not None
    tree, began, timed = config.draft.tree, time.perf_counter(), []
    inputs = StepInputs(config.page_size, (), learns=bool(config.draft.learning_path))
    doublings = [1 << power for power in range(config.max_num_seqs.bit_length())]
    fed = min(_FED_ROWS, config.max_model_len - tree.longest_path - 2)
    for count, rows, depth in ((1, 1, 1), (1, fed, tree.longest_path), *((n, 1, tree.longest_path) for n in doublings)):
        if time.perf_counter() - began > _DRAFTING_S:
            break
        for _ in range(2):
            exchange = _exchange(
                target, link, config, inputs, count, DraftInput([0] * rows, tree.num_speculative_tokens, depth)
            )
        timed.append(exchange)
    return timed


def _exchange(
    target: Target, link: Channel, config: EngineConfig, inputs: StepInputs, count: int, own: DraftInput
) -> TimedExchange:
    limits = TreeLimits(num_speculative_tokens=own.num_nodes)
    submit = Submit(id=0, prompt=[0], max_tokens=1, sampling=SamplingSettings(temperature=0.0), may_learn=False)
    pages = array("i", [0] * config.pages_for(1 + len(own.tokens)))
    wanted = {Request(submit, Rule.COUPLED, limits, 1, pages=pages): own for _ in range(count)}
    began = time.perf_counter()
    features_MH = None
    if target.state_pool is not None:
        states = target.state_pool.store(target.state_pool.zeros(count * len(own.tokens)))
        features_MH = target.features(target.state_pool.take(states))
    link.send(inputs.draft_request(wanted, features_MH, None), 0)
    reply = link.receive().message
    ms = 1e3 * (time.perf_counter() - began)
    assert isinstance(reply, DraftReply)
    work = DraftWork(messages=1, rows_fed=count * len(own.tokens), levels=reply.num_levels - 1, nodes_run=reply.num_run)
    return TimedExchange(work, ms)
