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
from drafter.tree.frontier import Frontier, TreeRequests
from drafter.tree.growth import Growth, path_masks, rank
from drafter.tree.score import ChildScores
from drafter.tree.thresholds import below_failed, passes_path
from workers.settings import PruneReason


class BestFirstGrowth(Growth):
    """The best candidates of the requests `own`, a request's root among them.

    has_leaf_siblings: see `drafter.tree.policy.DynamicTreePolicy`.
    """

    def __init__(
        self, own: np.ndarray, trees: TreeRequests, cost_model: TreeCostModel | None, *, has_leaf_siblings: bool = False
    ) -> None:
        super().__init__(own, trees, cost_model)
        self._has_leaf_siblings = has_leaf_siblings
        self._open = np.flatnonzero((trees.limits.num_nodes_B[own] > 0) & (trees.limits.max_depth_B[own] > 0))

    def _added(self, frontier: Frontier, scores: ChildScores, passes_F: np.ndarray) -> np.ndarray:
        """Append the frontier's children to the candidates, keep the best and return the next frontier."""
        is_auto_F, weight_FK = self._limits.is_auto_B[frontier.request_F], scores.weight_FK
        if self._traced_B is not None:
            is_failing_F = self._traced_B[frontier.request_F] & is_auto_F & ~passes_F
            (at,) = (is_failing_F & (weight_FK[:, 0] > 0)).nonzero()
            self._trace_children(scores, at, np.zeros_like(at))  # the most likely one, which is below the threshold
        f, k = ((weight_FK > 0) & (passes_F | ~is_auto_F)[:, None]).nonzero()
        new, first_new = self._children(scores, f, k), len(self._nodes)
        new["kind"] = scores.kind_F[f]
        new["may_have_children"] = (k == 0) | (not self._has_leaf_siblings)
        new["path_prob"] = np.where(passes_F[f], new["path_prob"], below_failed(new["path_prob"]))
        candidates = np.concatenate([self._nodes, new])
        kept = self._best(candidates)
        self._nodes = candidates[kept]
        index = np.full(len(candidates), -1, dtype=np.int64)  # of each old candidate among the kept ones
        index[kept] = np.arange(len(kept))
        parent = self._nodes["parent"]
        self._nodes["parent"] = np.where(parent < 0, -1, index[parent])
        if self._traced_B is not None:
            self._pruned = [own.below(index) for own in self._pruned]
        return self._next_open(kept >= first_new)

    def _next_open(self, is_new: np.ndarray) -> np.ndarray:
        """Return the new candidates that are worth a level, with rows assigned to them."""
        request, depth = self._nodes["request"], self._nodes["depth"]
        may_open = is_new & (depth < self._limits.max_depth_B[request]) & self._nodes["may_have_children"]
        passes = ~self._limits.is_auto_B[request]
        passes |= passes_path(self._nodes["path_prob"], self._limits.rules.path_prob[request])
        if self._traced_B is not None:
            (fails,) = (may_open & ~passes & self._traced_B[request]).nonzero()
            self._trace_undrafted(fails, np.full(len(fails), PruneReason.PATH_PROB.value))
        may_open &= passes
        (at,) = may_open.nonzero()
        return self._assign_rows(at[self._is_worth_running(at)])

    def _is_worth_running(self, at: np.ndarray) -> np.ndarray:
        """Return which candidates may get a child into the tree and, under `auto`, one that pays for its time."""
        request, weight = self._nodes["request"], self._nodes["weight"]
        displaced = self._displaced(at)
        is_worth = weight[at] > displaced
        is_auto_C = self._limits.is_auto_B[request]
        is_auto = is_auto_C[at]
        if is_auto.any():
            assert self._cost_model is not None, "auto needs costs"
            is_worth[is_auto] = self._cost_model.worth_running(
                weight[at[is_auto]],
                displaced[is_auto],
                weight[is_auto_C & (self._nodes["depth"] > 0)],
                self._cost_model.draft_ms(self._num_levels, self._num_run),
            )
        return is_worth

    def _displaced(self, at: np.ndarray) -> np.ndarray:
        """Return the weight that a further candidate of these ones' requests displaces; 0 while there is room."""
        request = self._nodes["request"]
        count_B = self._count_by_request(request) - 1
        if (count_B < self._limits.num_nodes_B).all():
            return np.zeros(len(at), dtype=np.float32)
        least_B = np.ones(len(count_B), dtype=np.float32)
        np.minimum.at(least_B, request, self._nodes["weight"])
        return np.where(count_B < self._limits.num_nodes_B, 0, least_B)[request[at]]

    def _best(self, candidates: np.ndarray) -> np.ndarray:
        """Return the indices, ascending, of each root and its num_nodes best candidates; ties go to the earlier one."""
        if not (self._count_by_request(candidates["request"]) > 1 + self._limits.num_nodes_B).any():
            return np.arange(len(candidates))
        order = np.lexsort((-candidates["weight"], candidates["request"]))
        request = candidates["request"][order]
        kept = order[rank(request) <= self._limits.num_nodes_B[request]]
        kept.sort()
        return kept

    def _assign_rows(self, at: np.ndarray) -> np.ndarray:
        """Assign to each of these candidates the lowest row of the draft model that no kept one of its request holds.

        Returns them by request, then row. Rows follow the order of the candidates, so that children come in the order
        of their parents.
        """
        at = at[self._nodes["request"][at].argsort(kind="stable")]
        own = self._nodes["request"][at]
        is_held_BR = np.zeros((self._num_requests, 1 + int(self._limits.num_nodes_B.max(initial=0))), dtype=bool)
        is_held_BR[self._nodes["request"], self._nodes["row"]] = True  # the root's row, if it was not run
        row = is_held_BR.argsort(axis=1, kind="stable")[own, rank(own)]
        self._nodes["row"][at] = row
        self._nodes["ancestors"][at] = path_masks(self._nodes["ancestors"][self._nodes["parent"][at]], row)
        return at
