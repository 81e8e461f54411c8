"""What a tree node is worth: expected tokens per millisecond on measured cost tables.

A step that verifies n draft nodes yields `sure` tokens without any draft and, in expectation, the nodes' survival
weights on top. The best budget maximises

    (sure + sum of the n best weights) / (draft_ms + verify_ms(n))

Weights never grow down a tree, so the n best are rooted subtrees. Everything is float32 and a function of the message,
so that every drafter rank decides alike.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from drafter.tree.policy import TYPICAL_CHILDREN
from workers.types import DraftCosts


def calibrated(weight: Tensor, fit_2: Tensor) -> Tensor:
    """sigmoid(a logit(w) + b), with a and b fitted to this engine's own verdicts; 0 stays 0. Any shape, float32."""
    a, b = fit_2.unbind()
    return torch.sigmoid(torch.addcmul(b, a, torch.logit(weight, 1e-6))) * (weight > 0)


class TreeCostModel:
    """The cost tables of one step."""

    def __init__(self, costs: DraftCosts) -> None:
        self._nodes_T = costs.nodes_T.numpy().astype(np.float32)
        self._verify_ms_T = costs.verify_ms_T.numpy()
        self._most = int(self._nodes_T[-1])
        self._verify_ms_N = np.interp(np.arange(1 + self._most), self._nodes_T, self._verify_ms_T).astype(np.float32)
        self._first_ms, self._level_ms, self._node_ms = costs.draft_ms_3.numpy()
        self._sure = np.float32(costs.base_tokens_1[0])
        self._calibration_D2 = costs.calibration_D2

    def calibrated(self, weight_FK: np.ndarray, depth: int) -> np.ndarray:
        """Chance that a child of this depth (1 = below the root) survives if its parent does, float32."""
        fit_2 = self._calibration_D2[min(depth, len(self._calibration_D2)) - 1]
        return calibrated(torch.from_numpy(weight_FK), fit_2).numpy()

    def draft_ms(self, num_levels: int, num_run: int) -> float:
        """Of so many levels, on which so many nodes were run."""
        return float(self._first_ms + max(num_levels - 1, 0) * self._level_ms + num_run * self._node_ms)

    def row_ms(self, num_nodes: int) -> np.float32:
        """Of one node more. Where it buys a whole flight of rows (a bucket of CUDA graphs), its share of the price."""
        before, after = self._verify_ms_N[min(num_nodes, self._most)], self._verify_ms_N[min(num_nodes + 1, self._most)]
        last = self._nodes_T[np.searchsorted(self._verify_ms_T, after, side="right") - 1]  # of the same price
        return (after - before) / max(np.float32(1), last - num_nodes)

    def rates(self, ranked_N: np.ndarray, draft_ms: float, fixed: np.ndarray) -> np.ndarray:
        """Tokens per millisecond with the n best of `ranked` (descending weights), n = 0 .. N. fixed: weights of nodes
        that are verified in any case."""
        gain = np.zeros(1 + len(ranked_N), dtype=np.float32)
        ranked_N.cumsum(out=gain[1:])
        nodes = len(fixed) + np.arange(len(gain))
        verify_ms = self._verify_ms_N[np.minimum(nodes, self._most)]
        return (self._sure + fixed.sum(dtype=np.float32) + gain) / (np.float32(draft_ms) + verify_ms)

    def best_count(self, ranked_N: np.ndarray, draft_ms: float, fixed: np.ndarray) -> int:
        """How many of `ranked` to verify; the smallest of equals."""
        return int(self.rates(ranked_N, draft_ms, fixed).argmax())

    def worth_running(
        self, weight_F: np.ndarray, least_F: np.ndarray, weights: np.ndarray, draft_ms: float
    ) -> np.ndarray:
        """Bool [F]: nodes worth one more level, none if all together are not.

        A node's children are expected at typical survival. What one brings is its weight less what a node must weigh
        to be verified: as much as the time of its row is worth and, where its request has no place left, `least_F`, the
        weight that gives way. weights: every node of the batch so far.
        """
        rates = self.rates(np.sort(weights)[::-1], draft_ms, np.zeros(0, dtype=np.float32))
        count, rate = int(rates.argmax()), rates.max()
        must_F = np.maximum(least_F, rate * self.row_ms(count))
        gain_F = np.maximum(weight_F[:, None] * _CHILDREN - must_F[:, None], 0).sum(1)
        # Where drafting is free a node still has to be able to have a child that is verified: rows are few.
        runs_F = (weight_F > must_F) & (gain_F >= rate * self._node_ms)
        pays = (gain_F - rate * self._node_ms)[runs_F].sum() >= rate * self._level_ms
        return runs_F & pays

    def slots_before_drawing(self, expected_J: np.ndarray, num_requests: int, max_depth: int) -> int:
        """Slots per request for trees that may not be cut once they are drawn; at least 1.

        expected_J: survival of a typical tree's nodes, best first; looked at instead of any draw.
        """
        count = np.arange(1, len(expected_J) + 1)
        gain = num_requests * np.cumsum(expected_J, dtype=np.float32)
        draft_ms = [self.draft_ms(min(n, max_depth), num_requests * (n - 1)) for n in count.tolist()]
        nodes = np.minimum(num_requests * count, self._most)
        cost = np.array(draft_ms, dtype=np.float32) + self._verify_ms_N[nodes]
        return 1 + int(((self._sure + gain) / cost).argmax())


_CHILDREN = np.array(TYPICAL_CHILDREN, dtype=np.float32)
