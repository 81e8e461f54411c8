"""Trees of `auto`: a best-first search over calibrated survival, level by level.

A request keeps the `num_nodes` candidates of largest weight seen so far. Weights never grow down a tree, so what has
fallen out can never come back, nor can anything below it; a node is run through the draft model only while it is among
them. What a threshold forbids frees its place for the best of the rest. Only for children that may be reconsidered
after they are known: coupled and deterministic ones.
"""

from __future__ import annotations

import numpy as np

from drafter.budget import Budget
from drafter.level import GrowLimits, Level, Nodes
from drafter.prune import passes_min, passes_path
from drafter.score import Scores
from workers.config import MAX_TREE_NODES
from workers.types import NodeKind


class Search:
    """The candidates of the requests `own`, all in flat arrays [C]; a request's root is its first."""

    def __init__(self, own: np.ndarray, root_token_B: np.ndarray, limits: GrowLimits, budget: Budget) -> None:
        self._limits, self._budget = limits, budget
        count = len(own)
        self._request = own.astype(np.int64)
        self._parent = np.full(count, -1, dtype=np.int64)  # index of a candidate
        self._depth = np.zeros(count, dtype=np.int64)
        self._token = root_token_B[own].astype(np.int64)
        self._weight = np.ones(count, dtype=np.float32)
        self._path_prob = np.ones(count, dtype=np.float64)
        self._kind = np.full(count, NodeKind.ROOT, dtype=np.uint8)
        # Only nodes that are run through the draft model have a row there, to be attended to by what is below them.
        self._row = np.zeros(count, dtype=np.int64)
        self._ancestors = np.ones(count, dtype=np.uint64)
        self._num_rows_B = np.ones(len(root_token_B), dtype=np.int64)
        self._num_levels = 0
        self._open = np.arange(count)  # the candidates that are the frontier

    def frontier(self) -> Level:
        at, parent = self._open, np.maximum(self._parent[self._open], 0)
        return Level(
            depth=self._num_levels,
            request_F=self._request[at],
            row_F=self._row[at],
            parent_row_F=np.where(self._parent[at] < 0, -1, self._row[parent]),
            token_F=self._token[at],
            ancestors_F=self._ancestors[at].view(np.int64),
        )

    def take(self, level: Level, scores: Scores) -> None:
        passes_F = passes_min(scores.top_prob_F, self._limits.min_prob_B[level.request_F])
        weight_FK = self._budget.calibrated(scores.weight_FK, level.depth + 1)
        f, k = np.nonzero((weight_FK > 0) & passes_F[:, None])
        parent = self._open[f]
        self._num_levels += 1
        first_new = len(self._request)
        self._append("_request", self._request[parent])
        self._append("_parent", parent)
        self._append("_depth", np.full(len(f), level.depth + 1))
        self._append("_token", scores.token_FK[f, k])
        self._append("_weight", self._weight[parent] * weight_FK[f, k])
        self._append("_path_prob", self._path_prob[parent] * scores.prob_FK[f, k])
        self._append("_kind", scores.kind_F[f])
        self._append("_row", np.zeros(len(f), dtype=np.int64))
        self._append("_ancestors", np.zeros(len(f), dtype=np.uint64))
        self._advance(first_new)

    def _append(self, name: str, values: np.ndarray) -> None:
        old = getattr(self, name)
        setattr(self, name, np.concatenate([old, values.astype(old.dtype)]))

    def _advance(self, first_new: int) -> None:
        """Forgets what has fallen out and opens the new candidates that are worth a level, best first."""
        kept = self._best()
        place = np.full(len(self._request), -1, dtype=np.int64)
        place[kept] = np.arange(len(kept))
        is_new = kept >= first_new
        for name in ("_request", "_depth", "_token", "_weight", "_path_prob", "_kind", "_row", "_ancestors"):
            setattr(self, name, getattr(self, name)[kept])
        self._parent = np.where(self._parent[kept] < 0, -1, place[self._parent[kept]])
        may_open = is_new & (self._depth < self._limits.max_depth_B[self._request])
        may_open &= passes_path(self._path_prob, self._limits.path_prob_B[self._request])
        at = np.flatnonzero(may_open)
        if len(at):
            draft_ms = self._budget.draft_ms(self._num_levels, int(self._num_rows_B.sum()) - len(self._num_rows_B))
            weights = self._weight[self._depth > 0]
            at = at[self._budget.worth_running(self._weight[at], self._least(at), weights, draft_ms)]
        if not len(at):
            self._open = at
            return
        self._open = self._give_rows(at)

    def _least(self, at: np.ndarray) -> np.ndarray:
        """What gives way to a further candidate of these ones' requests: nothing (0) while there is a place left."""
        count_B = np.bincount(self._request, minlength=len(self._num_rows_B)) - 1
        least_B = np.ones(len(count_B), dtype=np.float32)
        np.minimum.at(least_B, self._request, self._weight)
        return np.where(count_B < self._limits.num_nodes_B, 0, least_B)[self._request[at]]

    def _best(self) -> np.ndarray:
        """Indices, ascending, of each request's root and its num_nodes best candidates; the earlier of equals."""
        order = np.lexsort((np.arange(len(self._weight)), -self._weight, self._request))
        request = self._request[order]
        return np.sort(order[_rank(request) <= self._limits.num_nodes_B[request]])

    def _give_rows(self, at: np.ndarray) -> np.ndarray:
        """The candidates that get a row in the draft model, the best of each request while there are any; by request,
        then row. Rows follow the order of the candidates, so that children come in the order of their parents."""
        most_B = np.minimum(1 + self._limits.num_nodes_B, MAX_TREE_NODES) - self._num_rows_B
        at = at[np.lexsort((at, -self._weight[at], self._request[at]))]
        at = at[_rank(self._request[at]) < most_B[self._request[at]]]
        at = at[np.lexsort((at, self._request[at]))]
        request = self._request[at]
        row = self._num_rows_B[request] + _rank(request)
        self._num_rows_B += np.bincount(request, minlength=len(self._num_rows_B))
        self._row[at] = row
        self._ancestors[at] = self._ancestors[self._parent[at]] | np.left_shift(np.uint64(1), row.astype(np.uint64))
        return at

    def nodes(self) -> Nodes:
        """Rows by depth, then by parent, then best first: the order in which candidates were appended."""
        order = np.argsort(self._request, kind="stable")
        request = self._request[order]
        row = _rank(request)
        row_of = np.empty(len(order), dtype=np.int64)
        row_of[order] = row
        parent = self._parent[order]
        return Nodes(
            request_N=request,
            row_N=row,
            parent_row_N=np.where(parent < 0, -1, row_of[parent]),
            depth_N=self._depth[order],
            token_N=self._token[order],
            weight_N=self._weight[order],
            kind_N=self._kind[order],
        )


def _rank(request: np.ndarray) -> np.ndarray:
    """Each entry's place among those of its request; entries are sorted by request."""
    is_first = np.concatenate([[True], request[1:] != request[:-1]])[: len(request)]
    return np.arange(len(request)) - np.maximum.accumulate(np.where(is_first, np.arange(len(request)), 0))
