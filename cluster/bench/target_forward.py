"""The target's forward alone, timed in this process: milliseconds by rows, requests and context length.

Pages hold whatever memory held: time does not depend on it. Legend: B requests, N rows of each request.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from verifier.request import Request
from verifier.step_inputs import StepInputs
from verifier.tree import chains
from verifier.worker import load
from workers.comm import groups
from workers.comm.ipc import Submit
from workers.config import DraftConfig, EngineConfig, TreeConfig
from workers.models.readers import read_specs
from workers.types import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardShape:
    """One step: `batch` requests, each with a tree of `rows` rows (the root is one) behind `context` tokens."""

    rows: int
    batch: int = 1
    context: int = 128


class TargetForward:
    """A loaded target. `milliseconds(shape)` runs one step of it and tells what that took."""

    def __init__(self, config: EngineConfig, run: Callable[..., object]) -> None:
        self._config, self._run = config, run

    def milliseconds(self, shape: ForwardShape) -> float:
        page_size = self._config.page_size
        num_pages = -(-(shape.context + shape.rows) // page_size)
        requests = []
        for b in range(shape.batch):
            submit = Submit(id=b, prompt=[0] * shape.context, max_tokens=1)
            pages = array("i", range(1 + b * num_pages, 1 + (b + 1) * num_pages))
            requests.append(Request(submit, Rule.COUPLED, None, 0, pages=pages))
        step = StepInputs(page_size, ()).target_step(chains([[0] * shape.rows] * shape.batch), requests)
        began = time.perf_counter()
        self._run(step, 0)  # ends with the drawn tokens on the host, so nothing is still under way on a GPU
        return 1e3 * (time.perf_counter() - began)


@contextmanager
def loaded(config: EngineConfig, shapes: list[ForwardShape]) -> Iterator[TargetForward]:
    """The target of `config` on one rank of this process, with pages for all of `shapes`, one at a time."""
    tokens = [(shape.context + shape.rows + config.page_size, shape.batch) for shape in shapes]
    pages = max(batch * -(-length // config.page_size) for length, batch in tokens)
    alone = replace(
        config,
        draft=None,
        tensor_parallel_size=1,
        max_num_seqs=max(shape.batch for shape in shapes),
        max_model_len=max(length for length, _ in tokens),
        num_pages=1 + pages,
    )
    store, address = groups.open_store()
    try:
        most = max(shape.rows for shape in shapes)
        trees = DraftConfig(method="ngram", model_path="", tree=TreeConfig(num_speculative_tokens=max(1, most - 1)))
        target, _ = load(groups.join(alone, 0, address), read_specs(alone), graphs_of=replace(alone, draft=trees))
        yield TargetForward(alone, target.run)
    finally:
        groups.leave()
        del store
