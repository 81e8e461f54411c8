"""Calibration of draft confidence, learnt from the verdicts.

A child of conditional confidence c at depth d survives, if its parent does, with probability
    sigmoid(logit(c) + b_d)
b_d is one factor on the odds of each depth, in logarithms. Newton steps on the log-likelihood of recent verdicts find
it.

Every child of an accepted node is an observation, accepted or not. The tree was chosen by the same confidences, so this
choice does not bias the fit. Legend: D depths, N packed rows, O observations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workers.types import TreeBatch, Verdict

_NUM_DEPTHS = 8
_MEMORY = 0.995  # of a step's observations, in each later step
_PRIOR_WEIGHT = 10.0  # the curvature that keeps a depth with few observations in place
_MOST = 4.0  # either way


class Calibration:
    """The current factors. At first they change nothing."""

    def __init__(self) -> None:
        self._odds_D = np.zeros(_NUM_DEPTHS)
        self._curvature_D = np.zeros(_NUM_DEPTHS)

    @property
    def log_odds_D(self) -> np.ndarray:
        """Return the factors for depths 1 to D, float32; deeper nodes use the last."""
        return self._odds_D.astype(np.float32)

    def learn(self, trees: TreeBatch, verdicts: list[Verdict], is_shown_B: np.ndarray) -> None:
        """Learn from a step's trees, whose weights are calibrated already. is_shown_B: the requests to learn from."""
        p_O, survived_O, depth_O = _observations(trees, verdicts, is_shown_B)
        self._curvature_D = _MEMORY * self._curvature_D + np.bincount(depth_O, p_O * (1 - p_O), _NUM_DEPTHS)
        step_D = np.bincount(depth_O, survived_O - p_O, _NUM_DEPTHS) / (self._curvature_D + _PRIOR_WEIGHT)
        self._odds_D = np.clip(self._odds_D + step_D, -_MOST, _MOST)


def _observations(
    trees: TreeBatch, verdicts: list[Verdict], is_shown_B: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (calibrated confidence, whether it survived, index of its depth) of each accepted node's children."""
    depth_N, weight_N = trees.depth_N.numpy(), trees.weight_N.numpy()
    parent_N, accepted_N = accepted_rows(trees, verdicts)
    is_seen_N = (depth_N > 0) & accepted_N[parent_N] & (weight_N[parent_N] > 1e-3)  # weights travel as float16
    (at,) = (is_seen_N & is_shown_B.repeat(np.diff(trees.offsets.numpy()))).nonzero()
    p_O = weight_N[at].astype(np.float64) / weight_N[parent_N[at]]
    return np.minimum(p_O, 1.0), accepted_N[at], np.minimum(depth_N[at] - 1, _NUM_DEPTHS - 1)


def accepted_rows(trees: TreeBatch, verdicts: Sequence[Verdict]) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's parent among all rows [N], a root's being itself, and whether it was accepted, as roots are."""
    offsets = trees.offsets.numpy()
    parent_N = offsets[:-1].repeat(np.diff(offsets)) + np.maximum(trees.parent_N.numpy(), 0)
    accepted_N = np.zeros(len(parent_N), dtype=bool)
    paths = zip(offsets[:-1].tolist(), verdicts, strict=True)
    accepted_N[[begin + row for begin, verdict in paths for row in (0, *verdict.path)]] = True
    return parent_N, accepted_N
