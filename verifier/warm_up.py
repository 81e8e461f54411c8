"""Forwards on unallocated pages at start-up: so that nothing compiles in the first step, and to time them."""

from __future__ import annotations

import time
from array import array
from dataclasses import replace

import torch

from verifier.request import Request
from verifier.step_inputs import Fold, Move, StepInputs
from verifier.target import Target
from verifier.tree import chains
from workers.comm.ipc import Submit
from workers.config import EngineConfig
from workers.cuda_graphs import bucket
from workers.settings import Rule, SamplingSettings

_SLOTS = 128
_TREE_ROWS = 8
_PLAIN = SamplingSettings()


def warm_up(target: Target, config: EngineConfig, num_pages: int) -> None:
    """Run forwards on unallocated pages, because on CUDA the first forward and the first top-k/top-p draw compile.

    Called on rank 0; its peers follow.
    """
    for sampling in (_PLAIN, SamplingSettings(top_p=0.5)):
        timed_forward(target, config, num_pages, 1, sampling)


def timed_forward(
    target: Target, config: EngineConfig, num_pages: int, num_rows: int, sampling: SamplingSettings = _PLAIN
) -> float:
    """Return the milliseconds of one forward of `num_rows` rows, in trees behind a short context.

    All trees share the same pages, because the KV that they write is never read.
    """
    num_slots = min(_SLOTS, config.max_model_len, (num_pages - 1) * config.page_size)
    # Graphs are captured for the fewest requests that can have a bucket's rows.
    size = min(_TREE_ROWS if target.graphs is None else bucket(config.tree_rows), num_slots)
    sizes = [size] * (num_rows // size) + [num_rows % size] * (num_rows % size > 0)
    submit = Submit(id=0, prompt=[0] * (num_slots - size + 1), max_tokens=1, sampling=sampling)
    pages = array("i", range(1, 1 + -(-num_slots // config.page_size)))
    request = Request(submit, Rule.COUPLED, None, 0, pages=pages, seat=1)
    moves = [Move(request, 0, 0)]  # so that the move of accepted paths is compiled too
    folds = [Fold(request, [0])] if target.has_states else []
    inputs = StepInputs(config.page_size, (), has_states=target.has_states)
    trees = chains([[0] * size for size in sizes])
    step = inputs.target_step(trees, [request] * len(sizes), moves=moves, folds=folds)
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
