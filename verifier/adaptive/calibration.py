"""Calibration of draft confidence, learnt from the verdicts.

A child of conditional confidence c at depth d survives, if its parent does, with probability
    sigmoid(a_d logit(c) + b_d)                                                                     (Platt scaling)
(a_d, b_d) are fitted by online Newton steps on the log-likelihood of recent verdicts (recursive logistic regression
with forgetting). The fit of a depth is regularised towards a fit shared by all depths, and that towards the identity.

Every child of an accepted node is an observation, accepted or not. The tree was chosen by the same confidences, so this
choice does not bias the fit. Legend: D depths, N packed rows, O observations.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from workers.types import TreeBatch, Verdict

_NUM_DEPTHS = 8
_STEPS_AT_ONCE = 4
"""Engine steps for each Newton step. The cost of a fit is per call, not per observation."""
_MEMORY = 0.995**_STEPS_AT_ONCE
_SHARED_WEIGHT = np.diag([20.0, 10.0])  # the curvature that ties a depth's fit to the shared one
_IDENTITY_WEIGHT = np.diag([4.0, 2.0])  # and the shared fit to the identity
_BOUNDS = np.array([[0.3, -4.0], [3.0, 4.0]])
_MAX_LOGIT = 7.0  # weights travel as float16

_Seen = tuple[TreeBatch, list[Verdict], np.ndarray, np.ndarray]
"""The arguments of `Calibration.learn`."""


class Calibration:
    """The current fit, which starts as the identity."""

    def __init__(self) -> None:
        self._shared_2 = np.array([1.0, 0.0])
        self._fit_D2 = np.tile(self._shared_2, (_NUM_DEPTHS, 1))
        self._curvature_D22 = np.zeros((_NUM_DEPTHS, 2, 2))
        self._pending: list[_Seen] = []

    @property
    def fit_D2(self) -> np.ndarray:
        """Return (a, b) for depths 1 to D; deeper nodes use the last."""
        return self._fit_D2.astype(np.float32)

    def learn(self, trees: TreeBatch, verdicts: list[Verdict], is_shown_B: np.ndarray, fit_D2: np.ndarray) -> None:
        """Learn from the trees of one step.

        is_shown_B: the requests to learn from. fit_D2: the fit that calibrated the trees' weights.
        """
        self._pending.append((trees, verdicts, is_shown_B, fit_D2))

    def update(self) -> None:
        """Move the fit if four steps were learnt from since. This takes longer than the rest of a step's learning."""
        if len(self._pending) >= _STEPS_AT_ONCE:
            seen, self._pending = self._pending, []
            self._step(*_observations(seen))

    def _step(self, logit_O: np.ndarray, survived_O: np.ndarray, depth_O: np.ndarray) -> None:
        if not len(depth_O):
            return
        x_O2 = np.stack([logit_O, np.ones(len(depth_O))], axis=1)
        p_O = 1 / (1 + np.exp(-(x_O2 * self._fit_D2[depth_O]).sum(1)))
        shared_p_O = 1 / (1 + np.exp(-(x_O2 @ self._shared_2)))
        is_depth_DO = depth_O == np.arange(_NUM_DEPTHS)[:, None]
        slope_D2 = is_depth_DO @ ((survived_O - p_O)[:, None] * x_O2)
        curved_O22 = (p_O * (1 - p_O))[:, None, None] * x_O2[:, :, None] * x_O2[:, None, :]
        self._curvature_D22 = _MEMORY * self._curvature_D22 + np.einsum("do,oij->dij", is_depth_DO, curved_O22)
        forgotten = 1 - _MEMORY
        pull_2 = (survived_O - shared_p_O) @ x_O2 + forgotten * _IDENTITY_WEIGHT @ ([1.0, 0.0] - self._shared_2)
        self._shared_2 = self._shared_2 + np.linalg.solve(self._curvature_D22.sum(0) + _IDENTITY_WEIGHT, pull_2)
        self._shared_2 = np.clip(self._shared_2, *_BOUNDS)
        pull_D2 = slope_D2 + forgotten * (self._shared_2 - self._fit_D2) @ _SHARED_WEIGHT
        step_D2 = np.linalg.solve(self._curvature_D22 + _SHARED_WEIGHT, pull_D2[:, :, None])[:, :, 0]
        self._fit_D2 = np.clip(self._fit_D2 + step_D2, *_BOUNDS)


def _observations(seen: list[_Seen]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (logit of the confidence, whether it survived, index of its depth) of each accepted node's children.

    The trees of all steps are read in one pass, because its cost is per call, too.
    """
    trees, verdicts, is_shown, fits = zip(*seen, strict=True)
    size_B = np.concatenate([own.offsets.numpy()[1:] - own.offsets.numpy()[:-1] for own in trees])
    depth_N, parent_N, weight_N = (
        np.concatenate([getattr(own, name).numpy() for own in trees]) for name in ("depth_N", "parent_N", "weight_N")
    )
    weight_N = weight_N.astype(np.float64)
    begin_B = size_B.cumsum() - size_B
    parent_N = begin_B.repeat(size_B) + np.maximum(parent_N, 0)
    accepted_N = np.zeros(len(depth_N), dtype=bool)
    paths = zip(begin_B.tolist(), chain.from_iterable(verdicts), strict=True)
    accepted_N[[begin + row for begin, verdict in paths for row in (0, *verdict.path)]] = True
    is_seen_N = (depth_N > 0) & accepted_N[parent_N] & (weight_N[parent_N] > 1e-3)
    (at,) = (is_seen_N & np.concatenate(is_shown).repeat(size_B)).nonzero()
    depth_O = np.minimum(depth_N[at] - 1, _NUM_DEPTHS - 1)
    step_N = np.repeat(np.arange(len(seen)), [len(own.depth_N) for own in trees])
    a_O, b_O = np.stack(fits)[step_N[at], depth_O].T
    calibrated_O = _logit(weight_N[at] / weight_N[parent_N[at]])
    return (calibrated_O - b_O) / a_O, accepted_N[at], depth_O


def _logit(p: np.ndarray) -> np.ndarray:
    clipped = np.clip(p, 1e-6, 1 - 1e-6)
    return np.clip(np.log(clipped / (1 - clipped)), -_MAX_LOGIT, _MAX_LOGIT)
