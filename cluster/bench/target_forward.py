"""Times the target's forward alone, in this process, by rows, requests and context length.

KV pages are not initialised, since time does not depend on their contents. Legend: B requests, N rows of each request.
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
from workers.settings import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardShape:
    """One step: `batch` requests, each with a tree of `rows` rows (the root is one) after `context` tokens."""

    rows: int
    batch: int = 1
    context: int = 128


class TargetForward:
    """A loaded target."""

    def __init__(self, config: EngineConfig, run: Callable[..., object]) -> None:
        self._config, self._run = config, run

    def milliseconds(self, shape: ForwardShape) -> float:
        """Run one step of this shape and return its time in milliseconds."""
        page_size = self._config.page_size
        num_pages = -(-(shape.context + shape.rows) // page_size)
        requests = []
        for b in range(shape.batch):
            submit = Submit(id=b, prompt=[0] * shape.context, max_tokens=1)
            pages = array("i", range(1 + b * num_pages, 1 + (b + 1) * num_pages))
            requests.append(Request(submit, Rule.COUPLED, None, 0, pages=pages))
        step = StepInputs(page_size, ()).target_step(chains([[0] * shape.rows] * shape.batch), requests)
        began = time.perf_counter()
        self._run(step, 0)  # returns with the sampled tokens on the host, so the GPU has finished
        return 1e3 * (time.perf_counter() - began)


@contextmanager
def loaded(config: EngineConfig, shapes: list[ForwardShape]) -> Iterator[TargetForward]:
    """Load the target of `config` as one rank in this process, with enough pages for the largest of `shapes`."""
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
