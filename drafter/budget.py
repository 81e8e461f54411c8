"""What a tree node is worth: expected tokens per millisecond on measured cost tables.

A step that verifies n draft nodes after growing `levels` levels yields `sure` tokens without any draft and, in
expectation, the nodes' survival weights on top. The best budget maximises

    (sure + sum of the n best weights) / (draft_ms(levels) + verify_ms(n))

Weights never grow down a tree, so the n best are rooted subtrees. Everything is float32 and a function of the message,
so that every drafter rank decides alike.
"""

from __future__ import annotations

import numpy as np

from workers.types import DraftCosts


class Budget:
    """The cost tables of one step."""

    def __init__(self, costs: DraftCosts) -> None:
        self._nodes_T = costs.nodes_T.numpy().astype(np.float32)
        self._verify_ms_T = costs.verify_ms_T.numpy()
        self._first_ms, self._level_ms = costs.draft_ms_2.numpy()
        self._sure = np.float32(costs.sure_1[0])
        self._calibration_D2 = costs.calibration_D2.numpy()

    def calibrated(self, weight_FK: np.ndarray, depth: int) -> np.ndarray:
        """Chance that a child of this depth (1 = below the root) survives if its parent does, float32.

        sigmoid(a logit(w) + b), with a and b fitted to this engine's own verdicts; 0 stays 0.
        """
        a, b = self._calibration_D2[min(depth, len(self._calibration_D2)) - 1]
        clipped = np.clip(weight_FK, 1e-6, 1 - 1e-6).astype(np.float32)
        chance = 1 / (1 + np.exp(-(a * np.log(clipped / (1 - clipped)) + b)))
        return np.where(weight_FK > 0, chance, 0).astype(np.float32)

    def draft_ms(self, num_levels: int | np.ndarray) -> np.ndarray:
        return np.asarray(self._first_ms + (np.maximum(num_levels, 1) - 1) * self._level_ms, dtype=np.float32)

    def verify_ms(self, num_nodes: np.ndarray) -> np.ndarray:
        return np.interp(num_nodes, self._nodes_T, self._verify_ms_T).astype(np.float32)

    def rates(self, ranked_N: np.ndarray, num_levels: int, fixed: np.ndarray) -> np.ndarray:
        """Tokens per millisecond with the n best of `ranked` (descending weights), n = 0 .. N. fixed: weights of nodes
        that are verified in any case."""
        gain = np.concatenate([[0], np.cumsum(ranked_N, dtype=np.float32)]).astype(np.float32)
        nodes = len(fixed) + np.arange(len(gain))
        return (self._sure + fixed.sum(dtype=np.float32) + gain) / (self.draft_ms(num_levels) + self.verify_ms(nodes))

    def best_count(self, ranked_N: np.ndarray, num_levels: int, fixed: np.ndarray) -> int:
        """How many of `ranked` to verify; the smallest of equals."""
        return int(self.rates(ranked_N, num_levels, fixed).argmax())

    def pays(self, gain: float, weights: np.ndarray, num_levels: int) -> bool:
        """Whether a further level that is expected to add `gain` tokens is worth its time, given the trees so far."""
        ranked = np.sort(weights)[::-1]
        rate = self.rates(ranked, num_levels, np.zeros(0, dtype=np.float32)).max()
        return gain >= rate * self._level_ms

    def slots_before_drawing(self, expected_J: np.ndarray, num_requests: int, max_depth: int) -> int:
        """Slots per request for trees that may not be cut once they are drawn; at least 1.

        expected_J: survival of a typical tree's nodes, best first; looked at instead of any draw.
        """
        count = np.arange(1, len(expected_J) + 1)
        gain = num_requests * np.cumsum(expected_J, dtype=np.float32)
        cost = self.draft_ms(np.minimum(count, max_depth)) + self.verify_ms(num_requests * count)
        return 1 + int(((self._sure + gain) / cost).argmax())
