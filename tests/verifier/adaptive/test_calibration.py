"""Calibration: the fit finds how draft confidence and survival relate."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support import oracles
from verifier.adaptive.calibration import Calibration
from workers.types import Verdict


def odds(p: np.ndarray, by: float) -> np.ndarray:
    """Return the probability whose logit is larger by `by`."""
    return 1 / (1 + np.exp(-np.log(p / (1 - p)) - by))


def calibrated(true: float, num_steps: int, seed: int = 0) -> Calibration:
    """A calibration shown trees of a root with three children, of which each has three; `true` moves their odds."""
    rng, calibration = np.random.default_rng(seed), Calibration()
    parents = [-1, 0, 0, 0, *[1] * 3, *[2] * 3, *[3] * 3]
    for _ in range(num_steps):
        raw = np.concatenate([-np.sort(-rng.dirichlet([1.0, 0.5, 0.3, 0.3]))[:3] for _ in range(4)])
        learnt = calibration.log_odds_D[[0] * 3 + [1] * 9]
        weight = np.concatenate([[1.0], odds(raw, learnt)])
        weight[4:] *= weight[[parents[row] for row in range(4, 13)]]
        chance, path = odds(raw, true), []
        for _ in range(2):
            start = 1 + 3 * path[-1] if path else 1
            ends = np.cumsum(chance[start - 1 : start + 2])
            if (draw := rng.random()) >= ends[-1]:
                break
            path.append(start + int(np.searchsorted(ends, draw)))
        tree = oracles.tree(parents, list(range(13)))
        object.__setattr__(tree, "weight_N", torch.tensor(weight, dtype=torch.float32))
        calibration.learn(tree, [Verdict(tuple(path), (0,), 12, 12)], np.array([True]))
    return calibration


@pytest.mark.parametrize("true", [0.0, -0.5, 0.2])
def test_calibration_recovers_how_confidence_and_survival_relate(true):
    assert calibrated(true, 1500).log_odds_D[:2] == pytest.approx([true, true], abs=0.25)


def test_a_depth_never_seen_and_the_first_fit_are_the_identity():
    assert Calibration().log_odds_D.tolist() == [0.0] * 8
    assert calibrated(-0.5, 100).log_odds_D[2:].tolist() == [0.0] * 6
