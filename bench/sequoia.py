"""Sequoia's dynamic program for the best static tree of a given size (Chen et al. 2024, section 4.1).

`accept_DK[d][k]` is the probability that the child of rank k of a node at depth d is accepted if that node was. Let
F(d, n, k) be the most accepted tokens that n nodes can be expected to add as children of rank >= k of a node at depth
d, and as their descendants. Then

    F(d, n, k) = max over 1 <= y <= n of  accept[d][k] * (1 + F(d + 1, y - 1, 0)) + F(d, n - y, k + 1)

where y is the size of child k's subtree; F(d, 0, k) = 0, and no node lies deeper or wider than the table.

Legend: D depths, K ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

NodePath = tuple[int, ...]
AcceptanceRates = Sequence[Sequence[float]]


def best_tree(num_nodes: int, accept_DK: AcceptanceRates) -> tuple[NodePath, ...]:
    """Return the tree of `num_nodes` nodes with the most expected acceptances, as breadth-first paths of child ranks.

    Raises ValueError if the table has too few depths and ranks for it.
    """

    @cache
    def best(depth: int, num: int, rank: int) -> tuple[float, int]:
        """Return F and the y that attains it."""
        if num == 0:
            return 0.0, 0
        if depth == len(accept_DK) or rank == len(accept_DK[depth]):
            return -math.inf, 0
        most = (-math.inf, 0)
        for y in range(1, num + 1):
            below, beside = best(depth + 1, y - 1, 0)[0], best(depth, num - y, rank + 1)[0]
            if below >= 0:  # -inf: no tree of this size fits below
                most = max(most, (accept_DK[depth][rank] * (1 + below) + beside, y))
        return most

    def paths(parent: NodePath, num: int, rank: int) -> list[NodePath]:
        if num == 0:
            return []
        size = best(len(parent), num, rank)[1]
        child = (*parent, rank)
        return [child, *paths(child, size - 1, 0), *paths(parent, num - size, rank + 1)]

    if best(0, num_nodes, 0)[0] < 0:
        raise ValueError(f"no tree of {num_nodes} nodes has depth and width within the acceptance table")
    return tuple(sorted(paths((), num_nodes, 0), key=lambda path: (len(path), path)))


def expected_accepted(paths: Sequence[NodePath], accept_DK: AcceptanceRates) -> float:
    """Return the expected accepted draft tokens of a tree: the sum of its nodes' path probabilities."""
    return sum(math.prod(accept_DK[depth][rank] for depth, rank in enumerate(path)) for path in paths)


def acceptance_table(chain_D: Sequence[float], star: dict[int, float], max_children: int) -> list[list[float]]:
    """Return accept_DK from two measurements.

    chain_D: acceptance of the first child by depth. star[k]: the rate at which one of a root's first k children is
    accepted, for some k from 1 to `max_children`. Every later rank is assumed to catch the same share of what the first
    child misses at every depth. Ranks between two measured k share equally.
    """
    share_K = [0.0] * max_children
    for low, high in pairwise(sorted(star)):
        # Never 0: a child that a short run never accepted is still better than an unused node.
        share = max(star[high] - star[low], 1e-4) / max(1 - star[1], 1e-4)
        share_K[low:high] = [share / (high - low)] * (high - low)
    return [[first] + [(1 - first) * share for share in share_K[1:]] for first in chain_D]
