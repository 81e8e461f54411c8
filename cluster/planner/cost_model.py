"""Predicted step times in milliseconds from a cost table (see `secateur.plan.CostTable` for the terms)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from secateur.errors import ConfigError
from secateur.plan import CostTable, DraftCostTable


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The parts of a step's time; they follow one another, as in the engine."""

    verify_ms: float
    draft_ms: float
    transfer_ms: float
    host_ms: float

    @property
    def ms(self) -> float:
        """The whole step."""
        return self.verify_ms + self.draft_ms + self.transfer_ms + self.host_ms


class PrefillChunk(NamedTuple):
    """Part of a prompt that one step computes."""

    rows: int
    cached: int
    """Tokens of the prompt in the cache after the step."""

    @property
    def pairs(self) -> float:
        """Row-token pairs of attention: on average a row sees all cached tokens but half of the chunk."""
        return self.rows * (self.cached - self.rows / 2)


class PlannerCostModel:
    """Interpolates a cost table."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._middle = (len(table.verify.rows) - 1) // 2
        self._sizes = np.log1p(table.draft.nodes).tolist() if table.draft else []

    def step(
        self, requests: int, nodes: int, kv: float, chunks: Sequence[PrefillChunk] = (), *, feeds_drafter: bool = True
    ) -> StepTime:
        """Predict a step that verifies a tree of `nodes` for each of `requests` and computes `chunks` of prompts.

        kv: cached tokens of all these requests together. feeds_drafter: whether the drafter reads the chunks too.
        """
        drafted = requests if nodes else 0
        prompt_rows = sum(chunk.rows for chunk in chunks)
        return StepTime(
            verify_ms=self.verify_ms(
                rows=requests * (1 + nodes) + prompt_rows,
                requests=requests + len(chunks),
                kv=kv + sum(chunk.cached for chunk in chunks),
                pairs=kv * (1 + nodes) + sum(chunk.pairs for chunk in chunks),
                trees=drafted,
            ),
            draft_ms=self._draft_ms(drafted, nodes, kv) + (self._feed_token_ms * prompt_rows if feeds_drafter else 0.0),
            transfer_ms=self._transfer_ms(drafted, nodes),
            host_ms=self._host_ms(requests + len(chunks), drafted),
        )

    def verify_ms(self, *, rows: float, requests: int, kv: float, pairs: float, trees: int = 0) -> float:
        """Predict the verify part of a step. pairs: row-token pairs of attention; trees: requests that have one."""
        verify = self.table.verify
        return (
            along(verify.rows, verify.ms, rows, steep_from=self._middle)
            + verify.request_ms * requests
            + verify.kv_token_ms * kv
            + verify.row_kv_token_ms * pairs
            + (verify.tree_ms + verify.tree_request_ms * trees if trees else 0.0)
        )

    def decode(self, batch: int, nodes: int, context: float) -> StepTime:
        """Predict a step of `batch` trees and no prompts, each request with `context` cached tokens."""
        return self.step(batch, nodes, batch * context)

    def kv_slope(self, nodes: int) -> float:
        """Return the cost of each cached token per step; step time is linear in cached tokens."""
        return self.step(1, nodes, 1.0).ms - self.step(1, nodes, 0.0).ms

    @property
    def _feed_token_ms(self) -> float:
        return self.table.draft.prompt_token_ms if self.table.draft else 0.0

    def _draft_ms(self, requests: int, nodes: int, kv: float) -> float:
        if not requests:
            return 0.0
        draft = self._drafter()
        slope_ms = 0.0
        if draft.kv_token_ms is not None:
            slope_ms = float(np.interp(math.log1p(nodes), self._sizes, draft.kv_token_ms))
        return self._on_grid(draft.ms, requests, nodes) + slope_ms * kv

    def _transfer_ms(self, requests: int, nodes: int) -> float:
        if not requests:
            return 0.0
        return self._on_grid(self._drafter().transfer_ms, requests, nodes)

    def _on_grid(self, grid: Sequence[Sequence[float]], requests: int, nodes: int) -> float:
        """Interpolate linearly in requests and in log(1 + nodes).

        Drafting costs one forward per level, and the larger a tree is, the fewer levels further nodes add.
        """
        size = math.log1p(nodes)
        return along(self._drafter().requests, [along(self._sizes, line, size) for line in grid], requests)

    def _host_ms(self, requests: int, drafted: int) -> float:
        more_ms = self._drafter().host_ms if drafted else 0.0
        return self.table.host_ms + self.table.host_request_ms * (requests - 1) + more_ms

    def _drafter(self) -> DraftCostTable:
        if self.table.draft is None:
            raise ConfigError("the cost table has no `draft`: it can only predict --nodes 0")
        return self.table.draft


def along(xs: Sequence[float], values: Sequence[float], x: float, steep_from: int = -2) -> float:
    """Interpolate linearly; constant below the first entry.

    Beyond the last entry the slope is that since entry `steep_from` (by default the one before the last), at least 0.
    """
    if x <= xs[0] or len(xs) == 1:
        return values[0]
    right = bisect_left(xs, x)
    low, high = (right - 1, right) if right < len(xs) else (steep_from, -1)
    slope = (values[high] - values[low]) / (xs[high] - xs[low])
    return values[high] + (x - xs[high]) * (slope if right < len(xs) else max(0.0, slope))
