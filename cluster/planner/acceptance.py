"""The expected number of accepted draft tokens as a function of tree size.

Given the chance p[d][k] that each child is accepted, the best tree is Sequoia's (Chen et al. 2024). This module
computes only how much it accepts, for all sizes at once. Let F(d, k)[n] be the most that up to n nodes can add as
children of rank >= k of a node at depth d, and as their descendants. Then

    F(d, k)[n] = max(0, max over 1 <= y <= n of  p[d][k] * (1 + F(d + 1, 0)[y - 1]) + F(d, k + 1)[n - y])

Legend: D depths, K ranks, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drafter.tree.policy import TYPICAL_CHILDREN
from secateur.token_tree import MAX_NODES
from workers.config import DraftConfig

AcceptanceCurve = np.ndarray
"""[64] accepted draft tokens per step by number of nodes (0 to 63), non-decreasing."""


def acceptance_curve(draft: DraftConfig, chances_K: Sequence[float] = ()) -> AcceptanceCurve:
    """Return the curve for the drafter's kind of tree.

    chances_K: that the child of each rank is accepted, at every depth; () = the drafter's own prior.
    """
    chances = tuple(chances_K) or TYPICAL_CHILDREN
    tree = draft.tree
    if tree.kind == "static":
        return _static(tree.static_paths, chances)
    width = 1 if tree.kind == "chain" else tree.max_children
    return best_lengths([chances[:width]] * (tree.num_speculative_tokens if tree.kind == "chain" else tree.max_depth))


def best_lengths(accept_DK: Sequence[Sequence[float]]) -> AcceptanceCurve:
    """Return the curve of the best trees of at most 0 to 63 nodes."""
    below = np.zeros(MAX_NODES + 1)  # F(d + 1, 0)
    for chances in reversed(accept_DK):
        beside = np.zeros(MAX_NODES + 1)  # F(d, k + 1)
        for chance in reversed(chances):
            best = np.zeros(MAX_NODES + 1)
            for n in range(1, MAX_NODES + 1):
                best[n] = max(0.0, (chance * (1 + below[:n]) + beside[n - 1 :: -1]).max())
            beside = best
        below = beside
    return below


def _static(paths: Sequence[Sequence[int]], chances_K: Sequence[float]) -> AcceptanceCurve:
    """Return the curve of a static tree, which a smaller budget truncates in its own order."""
    chance = [
        float(np.prod([chances_K[rank] if rank < len(chances_K) else 0.0 for rank in path]))
        for path in paths[:MAX_NODES]
    ]
    return np.cumsum([0.0, *chance, *[0.0] * (MAX_NODES - len(chance))])
