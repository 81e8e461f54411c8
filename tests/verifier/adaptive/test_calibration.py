"""Calibration: the fit finds how draft confidence and survival relate."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support import oracles
from verifier.adaptive.calibration import Calibration
from workers.types import Verdict


def verdicts_of(a: float, b: float, num_steps: int, seed: int = 0) -> Calibration:
    """A calibration shown trees of a root with three children, of which each has three, that survive by (a, b)."""
    rng, calibration = np.random.default_rng(seed), Calibration()
    parents = [-1, 0, 0, 0, *[1] * 3, *[2] * 3, *[3] * 3]
    for _ in range(num_steps):
        raw = np.concatenate([-np.sort(-rng.dirichlet([1.0, 0.5, 0.3, 0.3]))[:3] for _ in range(4)])
        logit = np.log(raw / (1 - raw))
        depth = np.array([1] * 3 + [2] * 9)
        fit_D2 = calibration.fit_D2.astype(np.float64)
        used = fit_D2[depth - 1]
        shown = 1 / (1 + np.exp(-(used[:, 0] * logit + used[:, 1])))
        chance = 1 / (1 + np.exp(-(a * logit + b)))
        weight = np.concatenate([[1.0], shown])
        weight[4:] *= weight[[parents[row] for row in range(4, 13)]]
        path: list[int] = []
        for first in (1, None):
            start = first if first is not None else 1 + 3 * path[-1]
            ends = np.cumsum(chance[start - 1 : start + 2])
            survives = [start + int(np.searchsorted(ends, draw))] if (draw := rng.random()) < ends[-1] else []
            if not survives:
                break
            path.append(survives[0])
        tree = oracles.tree(parents, list(range(13)))
        object.__setattr__(tree, "weight_N", torch.tensor(weight, dtype=torch.float32))
        # As in an engine, the next tree is calibrated before the fit moves.
        calibration.update()
        calibration.learn(tree, [Verdict(tuple(path), (0,), 12, 12)], np.array([True]), fit_D2)
    calibration.update()
    return calibration


@pytest.mark.parametrize(("a", "b"), [(1.0, 0.0), (0.7, -0.3), (1.4, -0.5)])
def test_calibration_recovers_how_confidence_and_survival_relate(a, b):
    fit_2 = verdicts_of(a, b, 1500).fit_D2[0]
    for raw in (0.1, 0.3, 0.6, 0.8):
        logit = np.log(raw / (1 - raw))
        chances = [1 / (1 + np.exp(-(x * logit + y))) for x, y in ((a, b), fit_2)]
        assert abs(chances[0] - chances[1]) < 0.07


def test_the_fit_moves_every_fourth_step():
    fits = [verdicts_of(0.6, -0.5, count).fit_D2.tolist() for count in (3, 4, 7, 8)]
    assert fits[0] == Calibration().fit_D2.tolist() != fits[1] == fits[2] != fits[3]


def test_a_depth_never_seen_takes_the_shared_fit_and_the_first_fit_is_the_identity():
    assert Calibration().fit_D2.tolist() == [[1.0, 0.0]] * 8
    fit_D2 = verdicts_of(0.6, -0.5, 600).fit_D2
    assert np.abs(fit_D2[7] - fit_D2[:2].mean(0)).max() < 0.4 and not np.allclose(fit_D2[7], [1, 0], atol=0.1)
