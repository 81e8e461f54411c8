"""Budgeted growth: thresholds, static trees, chains and sampled trees.

A node's budget follows from its own path and from q (`tree.policy`), before anything is drawn. So a threshold cuts the
descendants of the nodes that fail and changes nothing else. For sampled children no decision looks at the token it is
about: their number is set by what q says of the i-th draw, then they are drawn.
"""

from __future__ import annotations

import numpy as np

from drafter.tree.cost_model import TreeCostModel
from drafter.tree.frontier import Frontier, SampledNodes, TreeRequests
from drafter.tree.growth import Growth, path_masks, rank
from drafter.tree.policy import TreePolicy
from drafter.tree.sample import DrawBits, draw_children, mask_fixed
from drafter.tree.score import ChildScores
from drafter.tree.thresholds import passes_path
from workers.settings import PruneReason
from workers.types import NodeKind


class BudgetedGrowth(Growth):
    """The trees of the requests `own`, whose nodes keep their places: a node's row is its rank in its tree."""

    def __init__(
        self, own: np.ndarray, trees: TreeRequests, policy: TreePolicy, cost_model: TreeCostModel | None
    ) -> None:
        super().__init__(own, trees, cost_model)
        self._policy = policy
        budget_B = self._root_budget()
        self._nodes["budget"] = budget_B[own]
        self._bits_BRK: DrawBits | None = None
        if trees.limits.is_sampled_B[own].any():
            # One call for all rows: Philox takes many small operations, however few numbers it returns.
            seed_B, root_position_B = trees.sampling.seed_B.cpu().numpy(), trees.root_index_B.astype(np.int64) - 1
            row_R = np.arange(1 + int(budget_B.max(initial=0)))
            self._bits_BRK = DrawBits.of(seed_B[:, None], root_position_B[:, None], row_R, policy.max_children)
        self._open = self._worth_opening(np.arange(len(own)))

    def _root_budget(self) -> np.ndarray:
        """Return the roots' budgets [B]. Under `auto` those of sampled trees are set here: they cannot be cut later."""
        budget_B = self._policy.root_budget(self._limits.num_nodes_B)
        is_limited_B = self._limits.is_auto_B & self._limits.is_sampled_B
        if self._cost_model is not None and is_limited_B.any():
            max_budget = self._cost_model.budget_before_drawing(
                self._policy.expected_J, int(is_limited_B.sum()), int(self._limits.max_depth_B.max())
            )
            budget_B = np.where(is_limited_B, np.minimum(budget_B, max_budget), budget_B)
        return budget_B

    def _added(self, frontier: Frontier, scores: ChildScores, passes_F: np.ndarray) -> np.ndarray:
        """Split every node's budget among its children and return the next frontier."""
        self._count_pruned(self._open[~passes_F])
        if self._traced_B is not None:
            self._trace_failing(frontier, scores, self._traced_B[frontier.request_F] & ~passes_F)
        nodes = self._nodes[self._open]
        num_levels_F = self._limits.max_depth_B[frontier.request_F] - frontier.depth
        budgets = self._policy.split(nodes["budget"] * passes_F, nodes["label"], num_levels_F, scores.weight_FK)
        scores, kind_FK = self._drawn(frontier, scores, (budgets.size_FK > 0).sum(1))
        f, k = budgets.size_FK.nonzero()
        new, first_new = self._children(scores, f, k), len(self._nodes)
        new["kind"] = kind_FK[f, k]
        new["row"] = self._count_by_request(self._nodes["request"])[new["request"]] + rank(new["request"])
        new["ancestors"] = path_masks(nodes["ancestors"][f], new["row"])
        new["budget"], new["label"] = budgets.size_FK[f, k] - 1, budgets.label_FK[f, k]
        self._nodes = np.concatenate([self._nodes, new])
        return self._worth_opening(np.arange(first_new, len(self._nodes)))

    def _drawn(self, frontier: Frontier, scores: ChildScores, count_F: np.ndarray) -> tuple[ChildScores, np.ndarray]:
        """Return the scores with tokens and probabilities of sampled children, `count` a node, and all kinds [F, K]."""
        kind_FK = scores.kind_F[:, None].repeat(scores.token_FK.shape[1], axis=1)
        support = scores.support
        if support is None:
            return scores, kind_FK
        token_FK, prob_FK = scores.token_FK.copy(), scores.prob_FK.copy()
        (at,) = (scores.kind_F == NodeKind.SAMPLED.value).nonzero()
        b, row = frontier.request_F[at], frontier.row_F[at]
        num_fixed_F = np.maximum(count_F[at] - 1, 0) if self._limits.is_hybrid else np.zeros(len(at), dtype=np.int64)
        assert self._bits_BRK is not None
        bits = DrawBits(*(words_BRK[b, row, : token_FK.shape[1]] for words_BRK in self._bits_BRK))
        drawn = draw_children(support, count_F[at], num_fixed_F, bits)
        f, column = np.arange(len(at))[:, None], np.maximum(drawn.column_FK, 0)
        token_FK[at] = support.id_FS[f, column]
        prob_FK[at] = support.weight_FS[f, column] / np.maximum(support.weight_FS.sum(1, keepdims=True), 1)
        kind_FK[at] = drawn.kind_FK
        has_draws_F = count_F[at] > num_fixed_F
        nodes = SampledNodes(b, row, support.id_FS, mask_fixed(support, num_fixed_F))
        self.sampled.append(nodes if has_draws_F.all() else SampledNodes(*(array[has_draws_F] for array in nodes)))
        return scores._replace(token_FK=token_FK, prob_FK=prob_FK), kind_FK

    def _worth_opening(self, at: np.ndarray) -> np.ndarray:
        """Return those of these nodes, all of one level, with budget and levels left that pass and pay."""
        nodes = self._nodes[at]
        b = nodes["request"]
        has_budget_F = (nodes["budget"] > 0) & (nodes["depth"] < self._limits.max_depth_B[b])
        passes_F = passes_path_F = passes_path(nodes["path_prob"], self._limits.rules.path_prob[b])
        if self._cost_model is not None and self._num_levels:
            passes_F = passes_F & self._level_pays(nodes, has_budget_F & passes_F)
        fails_F = has_budget_F & ~passes_F
        self._count_pruned(at[fails_F])
        if self._traced_B is not None:
            fails_F &= self._traced_B[b]
            reason_F = np.where(passes_path_F, PruneReason.COST, PruneReason.PATH_PROB)
            self._trace_undrafted(at[fails_F], reason_F[fails_F])
        return at[has_budget_F & passes_F]

    def _count_pruned(self, at: np.ndarray) -> None:
        """Count the budgets of nodes that are not expanded, at the depth of their children."""
        nodes = self._nodes[at]
        np.add.at(self.pruned_BD, (nodes["request"], nodes["depth"]), nodes["budget"])

    def _trace_failing(self, frontier: Frontier, scores: ChildScores, is_failing_F: np.ndarray) -> None:
        """Record the children that nodes would have had without the min threshold. Sampled ones are not drawn."""
        (at,) = is_failing_F.nonzero()
        if not len(at):
            return
        nodes = self._nodes[self._open[at]]
        num_levels_F = self._limits.max_depth_B[nodes["request"]] - frontier.depth
        size_FK = self._policy.split(nodes["budget"], nodes["label"], num_levels_F, scores.weight_FK[at]).size_FK
        size_FK[scores.kind_F[at] == NodeKind.SAMPLED.value] = 0
        f, k = size_FK.nonzero()
        self._trace_children(scores, at[f], k)
        bare = self._open[at[(nodes["budget"] > 0) & (size_FK == 0).all(1)]]
        self._trace_undrafted(bare, np.full(len(bare), PruneReason.MIN_PROB.value))

    def _level_pays(self, nodes: np.ndarray, is_open_F: np.ndarray) -> bool:
        """Return True if another level is worth its time, or an open request without `auto` needs it in any case."""
        is_auto_F = self._limits.is_auto_B[nodes["request"]]
        if not is_auto_F.any() or (is_open_F & ~is_auto_F).any():
            return True
        assert self._cost_model is not None
        weights = self._nodes["weight"][self._nodes["depth"] > 0]
        draft_ms = self._cost_model.draft_ms(self._num_levels, self._num_run)
        frontier = nodes["weight"][is_open_F]
        return bool(self._cost_model.worth_running(frontier, np.zeros_like(frontier), weights, draft_ms).any())
