"""When a node may be expanded: the two thresholds of dynamic pruning.

Rule (probabilities are the draft's own, after temperature and masks, without coupling noise; at temperature 0 they are
read at temperature 1):
  path threshold   a node is not expanded if the product of draft probabilities root -> node is below it; root = 1
  min threshold    a node is not expanded if its most likely next token is below it; the root included
A value equal to its threshold is kept; 0.0 switches a threshold off. The slots of a node that fails stay empty, so a
higher threshold gives a subset of the tree; under `auto` they go to the best other nodes. The path test needs no
forward pass of the node, the min test does.

For coupled and deterministic trees any pruning is lossless: the tree only decides how many positions are verified. A
sampled node that fails is still verified itself; only what would hang below it is never drawn.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from torch import Tensor

Values = TypeVar("Values", np.ndarray, Tensor)
"""[F], or any shapes that go together."""


def passes_path(path_prob_F: Values, threshold_F: Values) -> Values:
    """bool [F]: the node may be expanded as far as its path is concerned."""
    return path_prob_F >= threshold_F


def passes_min(top_prob_F: Values, threshold_F: Values) -> Values:
    """bool [F]: the node may be expanded, given the probability of its most likely next token."""
    return top_prob_F >= threshold_F
