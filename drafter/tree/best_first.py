"""Trees of `auto`: a best-first search over calibrated survival, level by level.

A request keeps the `num_nodes` candidates of largest weight seen so far. Weights never grow down a tree, so what has
fallen out can never come back, nor can anything below it; a node is run through the draft model only while it is among
them. What a threshold forbids frees its place for the best of the rest. Only for children that may be reconsidered
after they are known: coupled and deterministic ones.
"""

from __future__ import annotations

import numpy as np

from drafter.tree.cost_model import TreeCostModel
from drafter.tree.frontier import Frontier, GrowLimits, Nodes
from drafter.tree.score import Scores
from drafter.tree.thresholds import passes_min, passes_path
from workers.config import MAX_TREE_NODES
from workers.types import NodeKind

_CANDIDATE = np.dtype(
    [
        ("request", np.int64),
        ("parent", np.int64),  # index of a candidate, -1 at the root
        ("depth", np.int64),
        ("token", np.int64),
        ("weight", np.float32),
        ("path_prob", np.float64),
        ("kind", np.uint8),
        # Only nodes that are run through the draft model have a row there, to be attended to by what is below them.
        ("row", np.int64),
        ("ancestors", np.uint64),
    ],
    align=True,
)


class Search:
    """The candidates [C] of the requests `own`; a request's root is its first."""

    def __init__(self, own: np.ndarray, root_token_B: np.ndarray, limits: GrowLimits, budget: TreeCostModel) -> None:
        self._limits, self._budget = limits, budget
        roots = np.zeros(len(own), dtype=_CANDIDATE)
        roots["request"], roots["parent"], roots["token"] = own, -1, root_token_B[own]
        roots["weight"], roots["path_prob"], roots["kind"], roots["ancestors"] = 1, 1, NodeKind.ROOT, 1
        self._seen = roots
        self._num_rows_B = np.ones(len(root_token_B), dtype=np.int64)
        self._num_levels = 0
        self._open = np.arange(len(own))  # the candidates that are the frontier

    def frontier(self) -> Frontier:
        nodes = self._seen[self._open]
        parent = nodes["parent"]
        return Frontier(
            depth=self._num_levels,
            request_F=nodes["request"],
            row_F=nodes["row"],
            parent_row_F=np.where(parent < 0, -1, self._seen["row"][parent]),
            token_F=nodes["token"],
            ancestors_F=nodes["ancestors"].view(np.int64),
        )

    def take(self, level: Frontier, scores: Scores) -> None:
        passes_F = passes_min(scores.top_prob_F, self._limits.min_prob_B[level.request_F])
        weight_FK = self._budget.calibrated(scores.weight_FK, level.depth + 1)
        f, k = ((weight_FK > 0) & passes_F[:, None]).nonzero()
        at = self._open[f]
        first_new = len(self._seen)
        seen = np.zeros(first_new + len(f), dtype=_CANDIDATE)
        seen[:first_new] = self._seen
        parents, new = self._seen[at], seen[first_new:]
        new["request"], new["parent"], new["depth"] = parents["request"], at, level.depth + 1
        new["token"], new["kind"] = scores.token_FK[f, k], scores.kind_F[f]
        new["weight"] = parents["weight"] * weight_FK[f, k]
        new["path_prob"] = parents["path_prob"] * scores.prob_FK[f, k]
        self._num_levels += 1
        self._advance(seen, first_new)

    def _advance(self, seen: np.ndarray, first_new: int) -> None:
        """Forgets what has fallen out and opens the new candidates that are worth a level, best first."""
        kept = self._best(seen)
        place = np.full(len(seen), -1, dtype=np.int64)
        place[kept] = np.arange(len(kept))
        self._seen = seen[kept]
        parent = self._seen["parent"]
        self._seen["parent"] = np.where(parent < 0, -1, place[parent])
        request, depth = self._seen["request"], self._seen["depth"]
        may_open = (kept >= first_new) & (depth < self._limits.max_depth_B[request])
        may_open &= passes_path(self._seen["path_prob"], self._limits.path_prob_B[request])
        (at,) = may_open.nonzero()
        if len(at):
            draft_ms = self._budget.draft_ms(self._num_levels, int(self._num_rows_B.sum()) - len(self._num_rows_B))
            weight = self._seen["weight"]
            at = at[self._budget.worth_running(weight[at], self._least(at), weight[depth > 0], draft_ms)]
        self._open = self._give_rows(at) if len(at) else at

    def _least(self, at: np.ndarray) -> np.ndarray:
        """What gives way to a further candidate of these ones' requests: nothing (0) while there is a place left."""
        request = self._seen["request"]
        count_B = self._count_of(request) - 1
        if (count_B < self._limits.num_nodes_B).all():
            return np.zeros(len(at), dtype=np.float32)
        least_B = np.ones(len(count_B), dtype=np.float32)
        np.minimum.at(least_B, request, self._seen["weight"])
        return np.where(count_B < self._limits.num_nodes_B, 0, least_B)[request[at]]

    def _best(self, seen: np.ndarray) -> np.ndarray:
        """Indices, ascending, of each request's root and its num_nodes best candidates; the earlier of equals."""
        if not (self._count_of(seen["request"]) > 1 + self._limits.num_nodes_B).any():
            return np.arange(len(seen))
        order = np.lexsort((-seen["weight"], seen["request"]))
        request = seen["request"][order]
        kept = order[_rank(request) <= self._limits.num_nodes_B[request]]
        kept.sort()
        return kept

    def _give_rows(self, at: np.ndarray) -> np.ndarray:
        """The candidates that get a row in the draft model, the best of each request while there are any; by request,
        then row. Rows follow the order of the candidates, so that children come in the order of their parents."""
        most_B = np.minimum(1 + self._limits.num_nodes_B, MAX_TREE_NODES) - self._num_rows_B
        request, weight = self._seen["request"], self._seen["weight"]
        if (self._count_of(request[at]) > most_B).any():
            at = at[np.lexsort((-weight[at], request[at]))]
            at = at[_rank(request[at]) < most_B[request[at]]]
            at.sort()
        at = at[request[at].argsort(kind="stable")]
        own = request[at]
        row = self._num_rows_B[own] + _rank(own)
        self._num_rows_B += self._count_of(own)
        self._seen["row"][at] = row
        inherited = self._seen["ancestors"][self._seen["parent"][at]]
        self._seen["ancestors"][at] = inherited | np.left_shift(np.uint64(1), row.astype(np.uint64))
        return at

    def _count_of(self, request: np.ndarray) -> np.ndarray:
        """How many entries each request has, int64 [B]."""
        return np.bincount(request, minlength=len(self._num_rows_B))

    def nodes(self) -> Nodes:
        """Rows by depth, then by parent, then best first: the order in which candidates were appended."""
        order = self._seen["request"].argsort(kind="stable")
        nodes = self._seen[order]
        row = _rank(nodes["request"])
        row_of = np.empty(len(order), dtype=np.int64)
        row_of[order] = row
        return Nodes(
            request_N=nodes["request"],
            row_N=row,
            parent_row_N=np.where(nodes["parent"] < 0, -1, row_of[nodes["parent"]]),
            depth_N=nodes["depth"],
            token_N=nodes["token"],
            weight_N=nodes["weight"],
            kind_N=nodes["kind"],
        )


def _rank(request: np.ndarray) -> np.ndarray:
    """Each entry's place among those of its request; entries are sorted by request."""
    return np.arange(len(request)) - request.searchsorted(request)
