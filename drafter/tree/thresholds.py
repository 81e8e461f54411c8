"""The two thresholds of dynamic pruning: when may a node be expanded?

Rule (probabilities are the draft's own, after temperature and masks, without coupling noise; at temperature 0 they are
read at temperature 1):
  path threshold   a node is not expanded if the product of draft probabilities root -> node is below it; root = 1
  min threshold    a node is not expanded if its most likely next token is below it; this includes the root
A value equal to its threshold passes; 0.0 disables a threshold. The path test needs no forward pass of the node, the
min test does.

A pruned tree is the unpruned one without the descendants of the nodes that failed, so a higher threshold gives a subset
of the tree. Trees that grow best-first are pruned when they are complete: until then the descendants of a node that
failed compete for places like all others, marked by `below_failed`. Under `auto` the best other nodes get their places.

Any pruning of coupled and deterministic trees is lossless: the tree only decides how many positions are verified. A
sampled node that fails is still verified itself; only its descendants are never drawn.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from torch import Tensor

Values = TypeVar("Values", np.ndarray, Tensor)
"""Arrays or tensors [F], or any shapes that broadcast."""


def passes_path(path_prob_F: Values, threshold_F: Values) -> Values:
    """Return bool [F]: whether the path threshold allows each node to be expanded."""
    return path_prob_F >= threshold_F


def passes_min(top_prob_F: Values, threshold_F: Values) -> Values:
    """Return bool [F]: whether the min threshold does, given the probability of the most likely next token."""
    return top_prob_F >= threshold_F


def below_failed(path_prob: Values) -> Values:
    """Mark the path probabilities of nodes below one that failed, which are negative. These nodes fail, too."""
    return -abs(path_prob)
