"""Trees whose slots are dealt (`tree.shape`): what pruning empties stays empty, and sampled trees stay unbiased.

A node's slots are settled by its own lineage and by q, before anything is drawn. So a threshold cuts the descendants of
the nodes that fail and changes nothing else, and for sampled children no decision ever looks at the token it is about:
their number is dealt from what q says of the i-th draw, then they are drawn.
"""

from __future__ import annotations

import numpy as np

from drafter.tree.cost_model import TreeCostModel
from drafter.tree.frontier import Frontier, GrowLimits, Nodes, SampledNodes
from drafter.tree.policy import TreePolicy
from drafter.tree.sample import DrawBits, draw_children, drawn_from
from drafter.tree.score import Scores
from drafter.tree.thresholds import passes_min, passes_path
from workers.types import NodeKind, Rule, SamplingBatch


class Dealt:
    """The trees of the requests `own` as host arrays [B, R]; row 0 is the root, rows are handed out breadth-first."""

    def __init__(
        self,
        own: np.ndarray,
        root_token_B: np.ndarray,
        root_index_B: np.ndarray,
        limits: GrowLimits,
        sampling: SamplingBatch,
        policy: TreePolicy,
        budget: TreeCostModel | None,
        pruned_BD: np.ndarray,
    ) -> None:
        self.sampled: list[SampledNodes] = []
        self._limits, self._policy, self._budget, self._pruned_BD = limits, policy, budget, pruned_BD
        slots_B = self._root_slots()
        size = (len(root_token_B), 1 + int(slots_B.max(initial=0)))
        self._token = np.zeros(size, dtype=np.int32)
        self._parent = np.full(size, -1, dtype=np.int32)
        self._depth = np.zeros(size, dtype=np.int32)
        self._ancestors = np.ones(size, dtype=np.uint64)
        self._weight = np.ones(size, dtype=np.float32)
        self._kind = np.zeros(size, dtype=np.uint8)
        self._path_prob = np.ones(size, dtype=np.float64)
        self._slots = np.zeros(size, dtype=np.int64)  # descendants the node may have
        self._label = np.zeros(size, dtype=np.int64)
        self._count = np.zeros(len(root_token_B), dtype=np.int64)
        self._count[own] = 1
        self._token[:, 0] = root_token_B
        self._slots[:, 0] = slots_B
        self._bits_BRK: DrawBits | None = None
        if (limits.rule_B[own] >= Rule.TRAVERSAL.value).any():
            # For all rows at once: Philox costs many small operations, whatever it is asked for.
            seed_B, root_position_B = sampling.seed_B.cpu().numpy(), root_index_B.astype(np.int64) - 1
            self._bits_BRK = DrawBits.of(
                seed_B[:, None], root_position_B[:, None], np.arange(size[1]), policy.max_children
            )
        self._num_levels = self._num_run = 0
        self._frontier = self._open(0, own, np.zeros_like(own))

    def _root_slots(self) -> np.ndarray:
        """[B]; under `auto`, sampled trees get as many as pay in expectation: they cannot be cut afterwards."""
        slots_B = self._policy.root_slots(self._limits.num_nodes_B)
        is_budgeted_B = (self._limits.auto_B > 0) & (self._limits.rule_B >= Rule.TRAVERSAL.value)
        if self._budget is not None and is_budgeted_B.any():
            most = self._budget.slots_before_drawing(
                self._policy.expected_J, int(is_budgeted_B.sum()), int(self._limits.max_depth_B.max())
            )
            slots_B = np.where(is_budgeted_B, np.minimum(slots_B, most), slots_B)
        return slots_B

    def frontier(self) -> Frontier:
        return self._frontier

    def take(self, level: Frontier, scores: Scores) -> None:
        """Deals every node's slots to its children, adds them ordered by parent row then rank, opens the next level."""
        self._num_run += len(level.request_F) if self._num_levels else 0
        self._num_levels += 1
        b, row, depth = level.request_F, level.row_F, level.depth
        slots_F = self._slots[b, row]
        passes_F = passes_min(scores.top_prob_F, self._limits.min_prob_B[b])
        if not passes_F.all():
            np.add.at(self._pruned_BD, (b[~passes_F], depth), slots_F[~passes_F])
        room_F = self._limits.max_depth_B[b] - depth
        weight_FK = scores.weight_FK
        if self._budget is not None:
            calibrated_FK = self._budget.calibrated(weight_FK, depth + 1)
            is_fitted_F = (self._limits.auto_B[b] > 0) & (scores.kind_F != NodeKind.SAMPLED.value)
            weight_FK = np.where(is_fitted_F[:, None], calibrated_FK, weight_FK)
        dealt = self._policy.deal(slots_F * passes_F, self._label[b, row], room_F, weight_FK)
        token_FK, prob_FK, kind_FK = self._children(level, scores, (dealt.slots_FK > 0).sum(1))
        f, k = dealt.slots_FK.nonzero()
        taken = (array[f, k] for array in (token_FK, weight_FK, prob_FK, kind_FK, *dealt))
        self._add(level, f, *taken)

    def _add(
        self,
        level: Frontier,
        f: np.ndarray,
        token: np.ndarray,
        weight: np.ndarray,
        prob: np.ndarray,
        kind: np.ndarray,
        slots: np.ndarray,
        label: np.ndarray,
    ) -> None:
        b, parent = level.request_F[f], level.row_F[f]
        added_B = np.bincount(b, minlength=len(self._count))
        first_of_b = added_B.cumsum() - added_B
        row = self._count[b] + np.arange(len(b)) - first_of_b[b]
        self._count += added_B
        self._token[b, row] = token
        self._parent[b, row] = parent
        self._depth[b, row] = level.depth + 1
        self._ancestors[b, row] = self._ancestors[b, parent] | np.left_shift(np.uint64(1), row.astype(np.uint64))
        self._weight[b, row] = self._weight[b, parent] * weight
        self._path_prob[b, row] = self._path_prob[b, parent] * prob
        self._kind[b, row] = kind
        self._slots[b, row] = slots - 1
        self._label[b, row] = label
        self._frontier = self._open(level.depth + 1, b, row)

    def _children(
        self, level: Frontier, scores: Scores, count_F: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, draft probabilities and kinds [F, K]; sampled rows draw their `count` children now."""
        kind_FK = scores.kind_F[:, None].repeat(scores.token_FK.shape[1], axis=1)
        support = scores.support
        if support is None:
            return scores.token_FK, scores.prob_FK, kind_FK
        token_FK, prob_FK = scores.token_FK.copy(), scores.prob_FK.copy()
        (at,) = (scores.kind_F == NodeKind.SAMPLED.value).nonzero()
        b, row = level.request_F[at], level.row_F[at]
        fixed_F = np.maximum(count_F[at] - 1, 0) if self._limits.is_hybrid else np.zeros(len(at), dtype=np.int64)
        assert self._bits_BRK is not None
        bits = DrawBits(*(words_BRK[b, row, : token_FK.shape[1]] for words_BRK in self._bits_BRK))
        drawn = draw_children(support, count_F[at], fixed_F, bits)
        f, place = np.arange(len(at))[:, None], np.maximum(drawn.place_FK, 0)
        token_FK[at] = support.id_FS[f, place]
        prob_FK[at] = support.weight_FS[f, place] / np.maximum(support.weight_FS.sum(1, keepdims=True), 1)
        kind_FK[at] = drawn.kind_FK
        draws_F = count_F[at] > fixed_F
        nodes = SampledNodes(b, row, support.id_FS, drawn_from(support, fixed_F))
        self.sampled.append(nodes if draws_F.all() else SampledNodes(*(array[draws_F] for array in nodes)))
        return token_FK, prob_FK, kind_FK

    def _open(self, depth: int, b: np.ndarray, row: np.ndarray) -> Frontier:
        """The next frontier: nodes with slots and room below them that pass the path threshold and pay."""
        has_slots = (self._slots[b, row] > 0) & (depth < self._limits.max_depth_B[b])
        passes = passes_path(self._path_prob[b, row], self._limits.path_prob_B[b])
        if self._budget is not None and self._num_levels:
            passes &= self._pays(b, row, has_slots & passes)
        failing = has_slots & ~passes
        if failing.any():
            np.add.at(self._pruned_BD, (b[failing], depth), self._slots[b[failing], row[failing]])
        b, row = b[has_slots & passes], row[has_slots & passes]
        return Frontier(
            depth=depth,
            request_F=b,
            row_F=row,
            parent_row_F=self._parent[b, row],
            token_F=self._token[b, row],
            ancestors_F=self._ancestors[b, row].view(np.int64),
        )

    def _pays(self, b: np.ndarray, row: np.ndarray, is_open: np.ndarray) -> np.ndarray:
        """Bool per node: a further level is worth its time. Without `auto` always, and then the others ride along."""
        is_auto = self._limits.auto_B[b] > 0
        if not is_auto.any() or (is_open & ~is_auto).any():
            return np.ones(len(b), dtype=bool)
        assert self._budget is not None
        rows = np.arange(self._weight.shape[1])
        weights = self._weight[(rows < self._count[:, None]) & (rows > 0)]
        draft_ms = self._budget.draft_ms(self._num_levels, self._num_run)
        frontier = self._weight[b[is_open], row[is_open]]
        return np.full(len(b), self._budget.worth_running(frontier, np.zeros_like(frontier), weights, draft_ms).any())

    def nodes(self) -> Nodes:
        b, row = (np.arange(self._token.shape[1]) < self._count[:, None]).nonzero()
        return Nodes(
            request_N=b,
            row_N=row,
            parent_row_N=self._parent[b, row],
            depth_N=self._depth[b, row],
            token_N=self._token[b, row],
            weight_N=self._weight[b, row],
            kind_N=self._kind[b, row],
        )
