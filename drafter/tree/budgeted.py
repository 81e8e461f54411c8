"""Budgeted growth: thresholds, static trees, chains and sampled trees.

A node's budget follows from its own path and from q (`tree.policy`), before anything is drawn. So a threshold cuts the
descendants of the nodes that fail and changes nothing else. For sampled children no decision looks at the token it is
about: their number is set by what q says of the i-th draw, then they are drawn.
"""

from __future__ import annotations

import numpy as np

from drafter.tree.cost_model import TreeCostModel
from drafter.tree.frontier import Frontier, PrunedNodes, SampledNodes, TreeNodes, TreeRequests
from drafter.tree.policy import TreePolicy
from drafter.tree.sample import DrawBits, draw_children, mask_fixed
from drafter.tree.score import ChildScores
from drafter.tree.thresholds import passes_min, passes_path
from workers.settings import PruneReason
from workers.types import NodeKind


class BudgetedGrowth:
    """The trees of the requests `own` as host arrays [B, R]; row 0 is the root, rows are assigned breadth-first."""

    def __init__(
        self, own: np.ndarray, trees: TreeRequests, policy: TreePolicy, cost_model: TreeCostModel | None
    ) -> None:
        self.sampled: list[SampledNodes] = []
        self._traced_B, self._pruned = trees.traced_B, list[PrunedNodes]()
        self._limits, self._policy, self._cost_model = trees.limits, policy, cost_model
        budget_B = self._root_budget()
        size = (len(trees.root_token_B), 1 + int(budget_B.max(initial=0)))
        self.pruned_BD = np.zeros((size[0], int(trees.limits.max_depth_B.max(initial=0))), dtype=np.int32)
        self._token = np.zeros(size, dtype=np.int32)
        self._parent = np.full(size, -1, dtype=np.int32)
        self._depth = np.zeros(size, dtype=np.int32)
        self._ancestors = np.ones(size, dtype=np.uint64)
        self._weight = np.ones(size, dtype=np.float32)
        self._kind = np.zeros(size, dtype=np.uint8)
        self._path_prob = np.ones(size, dtype=np.float64)
        self._budget = np.zeros(size, dtype=np.int64)
        self._label = np.zeros(size, dtype=np.int64)
        self._count = np.zeros(size[0], dtype=np.int64)
        self._count[own] = 1
        self._token[:, 0] = trees.root_token_B
        self._budget[:, 0] = budget_B
        self._bits_BRK: DrawBits | None = None
        if trees.limits.is_sampled_B[own].any():
            # One call for all rows: Philox takes many small operations, however few numbers it returns.
            seed_B, root_position_B = trees.sampling.seed_B.cpu().numpy(), trees.root_index_B.astype(np.int64) - 1
            self._bits_BRK = DrawBits.of(
                seed_B[:, None], root_position_B[:, None], np.arange(size[1]), policy.max_children
            )
        self._num_levels = self._num_run = 0
        self._frontier = self._open(0, own, np.zeros_like(own))

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

    def frontier(self) -> Frontier:
        """See `drafter.tree.grow.Growth`."""
        return self._frontier

    def add_children(self, frontier: Frontier, scores: ChildScores) -> None:
        """Split every node's budget among its children and open the next frontier."""
        self._num_run += len(frontier.request_F) if self._num_levels else 0
        self._num_levels += 1
        b, row, depth = frontier.request_F, frontier.row_F, frontier.depth
        budget_F = self._budget[b, row]
        passes_F = passes_min(scores.top_prob_F, self._limits.rules.min_prob[b])
        self._count_pruned(depth, b[~passes_F], row[~passes_F])
        weight_FK = scores.weight_FK
        if self._cost_model is not None:
            calibrated_FK = self._cost_model.calibrated(weight_FK, depth + 1)
            is_calibrated_F = self._limits.is_auto_B[b] & (scores.kind_F != NodeKind.SAMPLED.value)
            weight_FK = np.where(is_calibrated_F[:, None], calibrated_FK, weight_FK)
        if self._traced_B is not None:
            self._trace_children(frontier, scores, weight_FK, self._traced_B[b] & ~passes_F)
        budgets = self._policy.split(
            budget_F * passes_F, self._label[b, row], self._limits.max_depth_B[b] - depth, weight_FK
        )
        token_FK, prob_FK, kind_FK = self._children(frontier, scores, (budgets.size_FK > 0).sum(1))
        # Children are appended in the order of their parents' rows, then by rank.
        f, k = budgets.size_FK.nonzero()
        b, parent = frontier.request_F[f], frontier.row_F[f]
        added_B = np.bincount(b, minlength=len(self._count))
        first_of_b = added_B.cumsum() - added_B
        row = self._count[b] + np.arange(len(b)) - first_of_b[b]
        self._count += added_B
        self._token[b, row] = token_FK[f, k]
        self._parent[b, row] = parent
        self._depth[b, row] = depth + 1
        self._ancestors[b, row] = self._ancestors[b, parent] | np.left_shift(np.uint64(1), row.astype(np.uint64))
        self._weight[b, row] = self._weight[b, parent] * weight_FK[f, k]
        self._path_prob[b, row] = self._path_prob[b, parent] * prob_FK[f, k]
        self._kind[b, row] = kind_FK[f, k]
        self._budget[b, row] = budgets.size_FK[f, k] - 1
        self._label[b, row] = budgets.label_FK[f, k]
        self._frontier = self._open(depth + 1, b, row)

    def _children(
        self, frontier: Frontier, scores: ChildScores, count_F: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens, draft probabilities and kinds [F, K]; sampled rows draw their `count` children now."""
        kind_FK = scores.kind_F[:, None].repeat(scores.token_FK.shape[1], axis=1)
        support = scores.support
        if support is None:
            return scores.token_FK, scores.prob_FK, kind_FK
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
        return token_FK, prob_FK, kind_FK

    def _open(self, depth: int, b: np.ndarray, row: np.ndarray) -> Frontier:
        """Return the next frontier: nodes with budget and levels left that pass the path threshold and pay."""
        has_budget = (self._budget[b, row] > 0) & (depth < self._limits.max_depth_B[b])
        passes = passes_path_F = passes_path(self._path_prob[b, row], self._limits.rules.path_prob[b])
        if self._cost_model is not None and self._num_levels:
            passes = passes & self._level_pays(b, row, has_budget & passes)
        fails = has_budget & ~passes
        self._count_pruned(depth, b[fails], row[fails])
        if self._traced_B is not None:
            at = fails & self._traced_B[b]
            reason = np.where(passes_path_F[at], PruneReason.COST, PruneReason.PATH_PROB)
            self._pruned.append(PrunedNodes.undrafted(b[at], row[at], reason))
        b, row = b[has_budget & passes], row[has_budget & passes]
        return Frontier(
            depth=depth,
            request_F=b,
            row_F=row,
            parent_row_F=self._parent[b, row],
            token_F=self._token[b, row],
            ancestors_F=self._ancestors[b, row].view(np.int64),
        )

    def _count_pruned(self, depth: int, b: np.ndarray, row: np.ndarray) -> None:
        """Count the budgets of nodes of this depth that are not expanded, at the depth of their children."""
        if len(b):
            np.add.at(self.pruned_BD[:, depth], b, self._budget[b, row])

    def _trace_children(
        self, frontier: Frontier, scores: ChildScores, weight_FK: np.ndarray, is_failing_F: np.ndarray
    ) -> None:
        """Record the children that nodes would have had without the min threshold. Sampled ones are not drawn."""
        (at,) = is_failing_F.nonzero()
        if not len(at):
            return
        b, row = frontier.request_F[at], frontier.row_F[at]
        budget_F, num_levels_F = self._budget[b, row], self._limits.max_depth_B[b] - frontier.depth
        size_FK = self._policy.split(budget_F, self._label[b, row], num_levels_F, weight_FK[at]).size_FK
        size_FK[scores.kind_F[at] == NodeKind.SAMPLED.value] = 0
        f, k = size_FK.nonzero()
        self._pruned.append(
            PrunedNodes(
                request_P=b[f],
                parent_row_P=row[f],
                token_P=scores.token_FK[at[f], k],
                weight_P=self._weight[b[f], row[f]] * weight_FK[at[f], k],
                prob_P=scores.prob_FK[at[f], k],
                reason_P=np.full(len(f), PruneReason.MIN_PROB.value, dtype=np.uint8),
            )
        )
        bare = (budget_F > 0) & (size_FK == 0).all(1)
        reason_F = np.full(int(bare.sum()), PruneReason.MIN_PROB.value)
        self._pruned.append(PrunedNodes.undrafted(b[bare], row[bare], reason_F))

    def _level_pays(self, b: np.ndarray, row: np.ndarray, is_open: np.ndarray) -> bool:
        """Return True if another level is worth its time, or an open request without `auto` needs it in any case."""
        is_auto = self._limits.is_auto_B[b]
        if not is_auto.any() or (is_open & ~is_auto).any():
            return True
        assert self._cost_model is not None
        rows = np.arange(self._weight.shape[1])
        weights = self._weight[(rows < self._count[:, None]) & (rows > 0)]
        draft_ms = self._cost_model.draft_ms(self._num_levels, self._num_run)
        frontier = self._weight[b[is_open], row[is_open]]
        return bool(self._cost_model.worth_running(frontier, np.zeros_like(frontier), weights, draft_ms).any())

    def pruned(self) -> list[PrunedNodes]:
        """See `drafter.tree.grow.Growth`."""
        return self._pruned

    def nodes(self) -> TreeNodes:
        """See `drafter.tree.grow.Growth`."""
        b, row = (np.arange(self._token.shape[1]) < self._count[:, None]).nonzero()
        return TreeNodes(
            request_N=b,
            row_N=row,
            parent_row_N=self._parent[b, row],
            depth_N=self._depth[b, row],
            token_N=self._token[b, row],
            weight_N=self._weight[b, row],
            kind_N=self._kind[b, row],
            path_prob_N=self._path_prob[b, row],
        )
