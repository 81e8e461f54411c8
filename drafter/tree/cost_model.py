"""The cost model of a draft tree: expected tokens per millisecond, from measured cost tables.

A step that verifies n draft nodes yields `base_tokens` without any draft and, in expectation, the nodes' survival
weights on top. The best tree size maximises

    (base_tokens + sum of the n largest weights) / (draft_ms + verify_ms(n))

Weights never grow down a tree, so the n best nodes form rooted subtrees. Everything is float32 and a function of the
message, so every drafter rank decides alike.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from drafter.tree.policy import TYPICAL_CHILDREN
from workers.types import DraftCosts


def calibrate(weight: Tensor, log_odds: Tensor) -> Tensor:
    """Return sigmoid(logit(w) + log_odds), float32; 0 stays 0. The engine fits the odds to its verdicts.

    A certain draft counts as a little less, so that the odds can lower it; odds of 0 leave unlikely ones as they are.
    """
    return torch.sigmoid(torch.logit(weight.clamp(1e-12, 1 - 1e-6)) + log_odds) * (weight > 0)


class TreeCostModel:
    """The cost tables of one step, and the decisions that follow from them."""

    def __init__(self, costs: DraftCosts) -> None:
        self._nodes_T = costs.nodes_T.numpy().astype(np.float32)
        self._verify_ms_T = costs.verify_ms_T.numpy()
        self._max_nodes = int(self._nodes_T[-1])
        self._verify_ms_N = np.interp(np.arange(1 + self._max_nodes), self._nodes_T, self._verify_ms_T).astype(
            np.float32
        )
        self._first_level_ms, self._level_ms, self._node_ms = costs.draft_ms_3.numpy()
        (self._base_tokens,) = costs.base_tokens_1.numpy()
        self._odds_D = costs.log_odds_D

    def calibrated(self, weight_FK: np.ndarray, depth: int) -> np.ndarray:
        """Return the chance that a child of this depth (1 = below the root) survives if its parent does, float32."""
        log_odds = self._odds_D[min(depth, len(self._odds_D)) - 1]
        return calibrate(torch.from_numpy(weight_FK), log_odds).numpy()

    def draft_ms(self, num_levels: int, num_run: int) -> float:
        """Return the time to draft `num_levels` levels on which `num_run` nodes were run."""
        return float(self._first_level_ms + max(num_levels - 1, 0) * self._level_ms + num_run * self._node_ms)

    def node_verify_ms(self, num_nodes: int) -> np.float32:
        """Return the cost of verifying one more node; in a CUDA graph bucket, its share of the next bucket's cost."""
        before, after = self._verify_ms_N[np.minimum([num_nodes, num_nodes + 1], self._max_nodes)]
        last_of_bucket = self._nodes_T[np.searchsorted(self._verify_ms_T, after, side="right") - 1]
        return (after - before) / max(np.float32(1), last_of_bucket - num_nodes)

    def throughput(self, ranked_N: np.ndarray, draft_ms: float, fixed: np.ndarray) -> np.ndarray:
        """Return tokens per millisecond [1 + N] with the n best of `ranked` (descending weights), n = 0 .. N.

        fixed: weights of nodes that are verified in any case.
        """
        gain = np.zeros(1 + len(ranked_N), dtype=np.float32)
        ranked_N.cumsum(out=gain[1:])
        nodes = len(fixed) + np.arange(len(gain))
        verify_ms = self._verify_ms_N[np.minimum(nodes, self._max_nodes)]
        return (self._base_tokens + fixed.sum(dtype=np.float32) + gain) / (np.float32(draft_ms) + verify_ms)

    def best_count(self, ranked_N: np.ndarray, draft_ms: float, fixed: np.ndarray) -> int:
        """Return how many of `ranked` to verify; among equals, the smallest number."""
        return int(self.throughput(ranked_N, draft_ms, fixed).argmax())

    def best_depth(self, depth_N: np.ndarray, weight_N: np.ndarray, rows_per_level: int) -> int:
        """Return with how many levels these nodes, roots included, would have given the most tokens per millisecond.

        rows_per_level: rows run on each level below the first.
        """
        gain_D = np.bincount(depth_N, weight_N, minlength=2)[1:].cumsum()
        count_D = np.bincount(depth_N, minlength=2)[1:].cumsum()
        draft_ms_D = [self.draft_ms(1 + i, i * rows_per_level) for i in range(len(gain_D))]
        verify_ms_D = self._verify_ms_N[np.minimum(count_D, self._max_nodes)]
        return 1 + int(((self._base_tokens + gain_D) / (np.array(draft_ms_D) + verify_ms_D)).argmax())

    def worth_running(
        self, weight_F: np.ndarray, displaced_F: np.ndarray, weights: np.ndarray, draft_ms: float
    ) -> np.ndarray:
        """Return bool [F]: the nodes worth one more level; none if all together are not.

        A node's children are expected to survive as typical ones do. A child gains its weight less what a node must
        weigh to be verified: the value of its row's time and, in a full tree, `displaced_F`, the weight it replaces.
        weights: every node of the batch so far.
        """
        rates = self.throughput(np.sort(weights)[::-1], draft_ms, np.zeros(0, dtype=np.float32))
        count, rate = int(rates.argmax()), rates.max()
        min_weight_F = np.maximum(displaced_F, rate * self.node_verify_ms(count))
        gain_F = np.maximum(weight_F[:, None] * _TYPICAL_CHILDREN - min_weight_F[:, None], 0).sum(1)
        # Even where drafting is free, a node needs a child that could be verified: rows are scarce.
        runs_F = (weight_F > min_weight_F) & (gain_F >= rate * self._node_ms)
        pays = (gain_F - rate * self._node_ms)[runs_F].sum() >= rate * self._level_ms
        return runs_F & pays

    def budget_before_drawing(self, expected_J: np.ndarray, num_requests: int, max_depth: int) -> int:
        """Return the node budget per request, at least 1, for trees that cannot be cut once they are drawn.

        expected_J: survival of a typical tree's nodes, best first; it stands in for draws that have not happened.
        """
        count = np.arange(1, len(expected_J) + 1)
        gain = num_requests * np.cumsum(expected_J, dtype=np.float32)
        draft_ms = [self.draft_ms(min(n, max_depth), num_requests * (n - 1)) for n in count.tolist()]
        nodes = np.minimum(num_requests * count, self._max_nodes)
        cost = np.array(draft_ms, dtype=np.float32) + self._verify_ms_N[nodes]
        return 1 + int(((self._base_tokens + gain) / cost).argmax())


_TYPICAL_CHILDREN = np.array(TYPICAL_CHILDREN, dtype=np.float32)
