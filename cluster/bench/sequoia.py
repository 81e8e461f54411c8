"""Static trees of a given size that accept the most, by Sequoia's dynamic program (Chen et al. 2024, section 4.1).

`accept_DK[d][k]` is the chance that the child of rank k of a node at depth d is accepted if that node was. With
F(d, n, k) the most that n nodes below a node of depth d can be expected to add as its children of rank k and beyond,
and as their descendants,

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
    """The tree of exactly `num_nodes` nodes of largest expected acceptance, as breadth-first paths of child ranks.

    Raises ValueError if the table has no room for so many nodes.
    """

    @cache
    def best(depth: int, num: int, rank: int) -> tuple[float, int]:
        """F, and the y that attains it."""
        if num == 0:
            return 0.0, 0
        if depth == len(accept_DK) or rank == len(accept_DK[depth]):
            return -math.inf, 0
        most = (-math.inf, 0)
        for y in range(1, num + 1):
            below, beside = best(depth + 1, y - 1, 0)[0], best(depth, num - y, rank + 1)[0]
            if below >= 0:  # otherwise there is no room below, whatever the chance of getting there
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
    """Draft tokens a tree is expected to have accepted: the sum over its nodes of the chance of their path."""
    return sum(math.prod(accept_DK[depth][rank] for depth, rank in enumerate(path)) for path in paths)


def acceptance_table(chain_D: Sequence[float], star: dict[int, float], max_children: int) -> list[list[float]]:
    """accept_DK from two measurements.

    chain_D: chance of the first child at a reached node of each depth. star[k]: chance that one of the first k children
    of a root is accepted, for some numbers k from 1 to `max_children`. A later rank is taken to catch the same share of
    what the first missed at every depth; between two measured numbers ranks share alike.
    """
    share_K = [0.0] * max_children
    for low, high in pairwise(sorted(star)):
        # Never quite 0: what was not seen in a short run is still the better use of a node than nothing.
        share = max(star[high] - star[low], 1e-4) / max(1 - star[1], 1e-4)
        share_K[low:high] = [share / (high - low)] * (high - low)
    return [[first] + [(1 - first) * share for share in share_K[1:]] for first in chain_D]
