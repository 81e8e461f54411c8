"""Best-first growth: dynamic trees, level by level, ranked by survival, which is calibrated under `auto`.

A request keeps the `num_nodes` candidates of largest weight seen so far. Weights never grow down a tree, so a candidate
that has been displaced never comes back, nor does anything below it; a node is run through the draft model only while
it is among the kept ones. Under `auto` a node that fails a threshold frees its place for the best of the others; in
other trees its descendants keep their places until growth ends (`drafter.tree.thresholds`). All this suits only
children that may be dropped after they are known: coupled and deterministic ones.

A displaced candidate also frees its row of the draft model. So every kept candidate can be run, and without costs the
tree is the best there is.
"""

from __future__ import annotations

import numpy as np

from drafter.tree.cost_model import TreeCostModel
from drafter.tree.frontier import Frontier, PrunedNodes, SampledNodes, TreeNodes, TreeRequests
from drafter.tree.score import ChildScores
from drafter.tree.thresholds import below_failed, passes_min, passes_path
from workers.settings import PruneReason
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
        ("may_have_children", np.bool_),
        # Only nodes that are run through the draft model have a row, which their descendants attend to.
        ("row", np.int64),
        ("ancestors", np.uint64),
    ],
    align=True,
)


class BestFirstGrowth:
    """The candidates [C] of the requests `own`; a request's root is its first.

    has_leaf_siblings: see `drafter.tree.policy.DynamicTreePolicy`.
    """

    def __init__(
        self, own: np.ndarray, trees: TreeRequests, cost_model: TreeCostModel | None, *, has_leaf_siblings: bool = False
    ) -> None:
        self.sampled: list[SampledNodes] = []  # none ever
        self._traced_B, self._pruned = trees.traced_B, list[PrunedNodes]()  # their parents are candidates until the end
        self._limits, self._cost_model, self._has_leaf_siblings = trees.limits, cost_model, has_leaf_siblings
        max_depth = int(trees.limits.max_depth_B.max(initial=0))
        self.pruned_BD = np.zeros((len(trees.root_token_B), max_depth), dtype=np.int32)
        roots = np.zeros(len(own), dtype=_CANDIDATE)
        roots["request"], roots["parent"], roots["token"] = own, -1, trees.root_token_B[own]
        roots["weight"], roots["path_prob"], roots["kind"], roots["ancestors"] = 1, 1, NodeKind.ROOT, 1
        self._candidates = roots
        self._num_requests = len(trees.root_token_B)
        self._num_levels = self._num_run = 0
        can_grow = (trees.limits.num_nodes_B[own] > 0) & (trees.limits.max_depth_B[own] > 0)
        self._open = np.flatnonzero(can_grow)  # indices of the candidates that form the frontier

    def frontier(self) -> Frontier:
        """See `drafter.tree.grow.Growth`."""
        nodes = self._candidates[self._open]
        parent = nodes["parent"]
        return Frontier(
            depth=self._num_levels,
            request_F=nodes["request"],
            row_F=nodes["row"],
            parent_row_F=np.where(parent < 0, -1, self._candidates["row"][parent]),
            token_F=nodes["token"],
            ancestors_F=nodes["ancestors"].view(np.int64),
        )

    def add_children(self, frontier: Frontier, scores: ChildScores) -> None:
        """Append the frontier's children to the candidates, keep the best and open the next frontier."""
        b, limits = frontier.request_F, self._limits
        is_auto_F = limits.is_auto_B[b]
        path_prob_F = self._candidates["path_prob"][self._open]
        passes_F = passes_min(scores.top_prob_F, limits.rules.min_prob[b])
        passes_F &= passes_path(path_prob_F, limits.rules.path_prob[b])
        weight_FK = scores.weight_FK
        if self._cost_model is not None:
            calibrated_FK = self._cost_model.calibrated(weight_FK, frontier.depth + 1)
            weight_FK = np.where(is_auto_F[:, None], calibrated_FK, weight_FK)
        f, k = ((weight_FK > 0) & (passes_F | ~is_auto_F)[:, None]).nonzero()
        if self._traced_B is not None:
            self._trace_best_child(frontier, scores, weight_FK, self._traced_B[b] & is_auto_F & ~passes_F)
        parent = self._open[f]
        first_new = len(self._candidates)
        candidates = np.zeros(first_new + len(f), dtype=_CANDIDATE)
        candidates[:first_new] = self._candidates
        parents, new = self._candidates[parent], candidates[first_new:]
        new["request"], new["parent"], new["depth"] = parents["request"], parent, frontier.depth + 1
        new["token"], new["kind"] = scores.token_FK[f, k], scores.kind_F[f]
        new["may_have_children"] = (k == 0) | (not self._has_leaf_siblings)
        new["weight"] = parents["weight"] * weight_FK[f, k]
        path_prob = parents["path_prob"] * scores.prob_FK[f, k]
        new["path_prob"] = np.where(passes_F[f], path_prob, below_failed(path_prob))
        self._num_run += len(frontier.request_F) if self._num_levels else 0
        self._num_levels += 1

        kept = self._best(candidates)
        self._candidates = candidates[kept]
        index = np.full(len(candidates), -1, dtype=np.int64)  # of each old candidate among the kept ones
        index[kept] = np.arange(len(kept))
        parent = self._candidates["parent"]
        self._candidates["parent"] = np.where(parent < 0, -1, index[parent])
        if self._traced_B is not None:
            self._pruned = [own.below(index) for own in self._pruned]
        self._open = self._next_open(kept >= first_new)

    def _next_open(self, is_new: np.ndarray) -> np.ndarray:
        """Return the new candidates that are worth a level, with rows assigned to them."""
        request, depth = self._candidates["request"], self._candidates["depth"]
        may_open = is_new & (depth < self._limits.max_depth_B[request]) & self._candidates["may_have_children"]
        passes = ~self._limits.is_auto_B[request]
        passes |= passes_path(self._candidates["path_prob"], self._limits.rules.path_prob[request])
        if self._traced_B is not None:
            (fails,) = (may_open & ~passes & self._traced_B[request]).nonzero()
            reason = np.full(len(fails), PruneReason.PATH_PROB.value)
            self._pruned.append(PrunedNodes.undrafted(request[fails], fails, reason))
        may_open &= passes
        (at,) = may_open.nonzero()
        return self._assign_rows(at[self._is_worth_running(at)])

    def _is_worth_running(self, at: np.ndarray) -> np.ndarray:
        """Return which candidates may get a child into the tree and, under `auto`, one that pays for its time."""
        request, weight = self._candidates["request"], self._candidates["weight"]
        displaced = self._displaced(at)
        is_worth = weight[at] > displaced
        is_auto_C = self._limits.is_auto_B[request]
        is_auto = is_auto_C[at]
        if is_auto.any():
            assert self._cost_model is not None, "auto needs costs"
            is_worth[is_auto] = self._cost_model.worth_running(
                weight[at[is_auto]],
                displaced[is_auto],
                weight[is_auto_C & (self._candidates["depth"] > 0)],
                self._cost_model.draft_ms(self._num_levels, self._num_run),
            )
        return is_worth

    def _displaced(self, at: np.ndarray) -> np.ndarray:
        """Return the weight that a further candidate of these ones' requests displaces; 0 while there is room."""
        request = self._candidates["request"]
        count_B = self._count_by_request(request) - 1
        if (count_B < self._limits.num_nodes_B).all():
            return np.zeros(len(at), dtype=np.float32)
        least_B = np.ones(len(count_B), dtype=np.float32)
        np.minimum.at(least_B, request, self._candidates["weight"])
        return np.where(count_B < self._limits.num_nodes_B, 0, least_B)[request[at]]

    def _best(self, candidates: np.ndarray) -> np.ndarray:
        """Return the indices, ascending, of each root and its num_nodes best candidates; ties go to the earlier one."""
        if not (self._count_by_request(candidates["request"]) > 1 + self._limits.num_nodes_B).any():
            return np.arange(len(candidates))
        order = np.lexsort((-candidates["weight"], candidates["request"]))
        request = candidates["request"][order]
        kept = order[_rank(request) <= self._limits.num_nodes_B[request]]
        kept.sort()
        return kept

    def _assign_rows(self, at: np.ndarray) -> np.ndarray:
        """Assign to each of these candidates the lowest row of the draft model that no kept one of its request holds.

        Returns them by request, then row. Rows follow the order of the candidates, so that children come in the order
        of their parents.
        """
        at = at[self._candidates["request"][at].argsort(kind="stable")]
        own = self._candidates["request"][at]
        is_held_BR = np.zeros((self._num_requests, 1 + int(self._limits.num_nodes_B.max(initial=0))), dtype=bool)
        is_held_BR[self._candidates["request"], self._candidates["row"]] = True  # the root's row, if it was not run
        row = is_held_BR.argsort(axis=1, kind="stable")[own, _rank(own)]
        self._candidates["row"][at] = row
        inherited = self._candidates["ancestors"][self._candidates["parent"][at]]
        self._candidates["ancestors"][at] = inherited | np.left_shift(np.uint64(1), row.astype(np.uint64))
        return at

    def _count_by_request(self, request: np.ndarray) -> np.ndarray:
        """Return the number of entries of each request, int64 [B]."""
        return np.bincount(request, minlength=self._num_requests)

    def _trace_best_child(
        self, frontier: Frontier, scores: ChildScores, weight_FK: np.ndarray, is_failing_F: np.ndarray
    ) -> None:
        """Record the most likely child of nodes that fail the min threshold: the one that is below it."""
        (at,) = (is_failing_F & (weight_FK[:, 0] > 0)).nonzero()
        parent = self._open[at]
        self._pruned.append(
            PrunedNodes(
                request_P=frontier.request_F[at],
                parent_row_P=parent,
                token_P=scores.token_FK[at, 0],
                weight_P=self._candidates["weight"][parent] * weight_FK[at, 0],
                prob_P=scores.prob_FK[at, 0],
                reason_P=np.full(len(at), PruneReason.MIN_PROB.value, dtype=np.uint8),
            )
        )

    def pruned(self) -> list[PrunedNodes]:
        """See `drafter.tree.grow.Growth`."""
        _, row_C = self._by_request()
        return [own.below(row_C) for own in self._pruned]

    def _by_request(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the candidates' order by request, and each one's row, which is its rank among those of its request."""
        order = self._candidates["request"].argsort(kind="stable")
        row_C = np.empty(len(order), dtype=np.int64)
        row_C[order] = _rank(self._candidates["request"][order])
        return order, row_C

    def nodes(self) -> TreeNodes:
        """Return rows by depth, then by parent, then best first: the order in which candidates were appended."""
        order, row_of = self._by_request()
        nodes = self._candidates[order]
        return TreeNodes(
            request_N=nodes["request"],
            row_N=row_of[order],
            parent_row_N=np.where(nodes["parent"] < 0, -1, row_of[nodes["parent"]]),
            depth_N=nodes["depth"],
            token_N=nodes["token"],
            weight_N=nodes["weight"],
            kind_N=nodes["kind"],
            path_prob_N=nodes["path_prob"],
        )


def _rank(request: np.ndarray) -> np.ndarray:
    """Return each entry's index among those of its request; entries are sorted by request."""
    return np.arange(len(request)) - request.searchsorted(request)
