"""Trees that grow level by level on the host: the table of their nodes, for both kinds of growth.

Legend: B requests, N nodes of all trees, F frontier nodes, K children, D levels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from drafter.tree.cost_model import TreeCostModel
from drafter.tree.frontier import Frontier, PrunedNodes, SampledNodes, TreeNodes, TreeRequests
from drafter.tree.score import ChildScores
from drafter.tree.thresholds import passes_min, passes_path
from workers.settings import PruneReason
from workers.types import NodeKind

_NODE = np.dtype(
    [
        ("request", np.int64),
        ("parent", np.int64),  # index of a node, -1 at the root
        ("depth", np.int64),
        ("token", np.int64),
        ("weight", np.float32),
        ("path_prob", np.float64),
        ("kind", np.uint8),
        ("may_have_children", np.bool_),
        # Of the nodes that are run through the draft model: their descendants attend to them by these rows.
        ("row", np.int64),
        ("ancestors", np.uint64),
        # Of budgeted growth, see `drafter.tree.policy`.
        ("budget", np.int64),
        ("label", np.int64),
    ],
    align=True,
)


class Growth(ABC):
    """The growing trees of the requests `own`, which are ascending.

    Nodes come in the order in which they were added: a request's root first, then by depth, by parent, best first.
    """

    def __init__(self, own: np.ndarray, trees: TreeRequests, cost_model: TreeCostModel | None) -> None:
        self.sampled: list[SampledNodes] = []
        self._limits, self._cost_model, self._traced_B = trees.limits, cost_model, trees.traced_B
        self._pruned: list[PrunedNodes] = []  # their parents are indices of nodes
        self._num_requests = len(trees.root_token_B)
        max_depth = int(trees.limits.max_depth_B.max(initial=0))
        # Nodes of depth 1 .. D that were kept out.
        self.pruned_BD = np.zeros((self._num_requests, max_depth), dtype=np.int32)
        self._nodes = np.zeros(len(own), dtype=_NODE)
        self._nodes["request"], self._nodes["parent"], self._nodes["token"] = own, -1, trees.root_token_B[own]
        self._nodes["weight"], self._nodes["path_prob"], self._nodes["ancestors"] = 1, 1, 1
        self._nodes["kind"] = NodeKind.ROOT
        self._open: np.ndarray  # indices of the nodes that form the frontier
        self._num_levels = self._num_run = 0

    def frontier(self) -> Frontier:
        """Return the nodes to read next; if there are none, the trees are complete."""
        nodes = self._nodes[self._open]
        parent = nodes["parent"]
        return Frontier(
            depth=self._num_levels,
            request_F=nodes["request"],
            row_F=nodes["row"],
            parent_row_F=np.where(parent < 0, -1, self._nodes["row"][parent]),
            token_F=nodes["token"],
            ancestors_F=nodes["ancestors"].view(np.int64),
        )

    def add_children(self, frontier: Frontier, scores: ChildScores) -> None:
        """Add the frontier's children, given the scores of its candidates, and open the next frontier."""
        self._num_run += len(frontier.request_F) if self._num_levels else 0
        self._num_levels += 1
        b, rules = frontier.request_F, self._limits.rules
        passes_F = passes_min(scores.top_prob_F, rules.min_prob[b])
        passes_F &= passes_path(self._nodes["path_prob"][self._open], rules.path_prob[b])
        weight_FK = scores.weight_FK
        if self._cost_model is not None:
            calibrated_FK = self._cost_model.calibrated(weight_FK, frontier.depth + 1)
            is_calibrated_F = self._limits.is_auto_B[b] & (scores.kind_F != NodeKind.SAMPLED.value)
            weight_FK = np.where(is_calibrated_F[:, None], calibrated_FK, weight_FK)
        self._open = self._added(frontier, scores._replace(weight_FK=weight_FK), passes_F)

    @abstractmethod
    def _added(self, frontier: Frontier, scores: ChildScores, passes_F: np.ndarray) -> np.ndarray:
        """Add children and return the next frontier's indices. passes_F: the nodes that pass both thresholds."""

    def _children(self, scores: ChildScores, f: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Return new nodes, the children k of the frontier's nodes f. Their kinds and rows are to be filled in."""
        parent = self._open[f]
        parents, new = self._nodes[parent], np.zeros(len(f), dtype=_NODE)
        new["request"], new["parent"], new["depth"] = parents["request"], parent, self._num_levels
        new["token"], new["weight"] = scores.token_FK[f, k], parents["weight"] * scores.weight_FK[f, k]
        new["path_prob"] = parents["path_prob"] * scores.prob_FK[f, k]
        return new

    def _trace_children(self, scores: ChildScores, f: np.ndarray, k: np.ndarray) -> None:
        """Record the children k of the nodes f, which fail the min threshold."""
        children = self._children(scores, f, k)
        self._pruned.append(
            PrunedNodes(
                request_P=children["request"],
                parent_row_P=children["parent"],
                token_P=children["token"],
                weight_P=children["weight"],
                prob_P=scores.prob_FK[f, k],
                reason_P=np.full(len(f), PruneReason.MIN_PROB.value, dtype=np.uint8),
            )
        )

    def _trace_undrafted(self, at: np.ndarray, reason: np.ndarray) -> None:
        """Record that nodes are not run through the draft model."""
        self._pruned.append(PrunedNodes.undrafted(self._nodes["request"][at], at, reason))

    def pruned(self) -> list[PrunedNodes]:
        """Return the nodes that were kept out of traced requests' trees, once these are complete."""
        _, row_N = self._by_request()
        return [own.below(row_N) for own in self._pruned]

    def nodes(self) -> TreeNodes:
        """Return every node of every tree, the roots included, by request."""
        order, row_N = self._by_request()
        nodes = self._nodes[order]
        return TreeNodes(
            request_N=nodes["request"],
            row_N=row_N[order],
            parent_row_N=np.where(nodes["parent"] < 0, -1, row_N[nodes["parent"]]),
            depth_N=nodes["depth"],
            token_N=nodes["token"],
            weight_N=nodes["weight"],
            kind_N=nodes["kind"],
            path_prob_N=nodes["path_prob"],
        )

    def _by_request(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the nodes' order by request, and each one's row, which is its rank among those of its request."""
        order = self._nodes["request"].argsort(kind="stable")
        row_N = np.empty(len(order), dtype=np.int64)
        row_N[order] = rank(self._nodes["request"][order])
        return order, row_N

    def _count_by_request(self, request: np.ndarray) -> np.ndarray:
        """Return the number of entries of each request, int64 [B]."""
        return np.bincount(request, minlength=self._num_requests)


def rank(request: np.ndarray) -> np.ndarray:
    """Return each entry's index among those of its request; entries are sorted by request."""
    return np.arange(len(request)) - request.searchsorted(request)


def path_masks(inherited: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Return the ancestor masks uint64 of nodes in these rows, given their parents' masks."""
    return inherited | np.left_shift(np.uint64(1), row.astype(np.uint64))
