"""The expected number of accepted draft tokens as a function of tree size.

Given the acceptance probability p[d][k] of each child, the best tree is Sequoia's (see `cluster.bench.sequoia`). This
module computes only how much it accepts, for all sizes at once. Let F(d, k)[n] be the most that up to n nodes can add
as children of rank >= k of a node at depth d, and as their descendants. Then

    F(d, k)[n] = max(0, max over 1 <= y <= n of  p[d][k] * (1 + F(d + 1, 0)[y - 1]) + F(d, k + 1)[n - y])

Legend: D depths, K ranks, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from drafter.tree.policy import TYPICAL_CHILDREN
from secateur.errors import ConfigError, Problem
from secateur.plan import AcceptancePoint, AcceptanceTable
from secateur.token_tree import MAX_NODES
from workers.config import DraftConfig

TYPICAL = AcceptanceTable(probabilities=(TYPICAL_CHILDREN,) * 8)
"""Assumed where nothing was measured: the drafter's own prior."""

AcceptanceCurve = np.ndarray
"""[64] accepted draft tokens per step by number of nodes (0 to 63), non-decreasing."""


def acceptance_curve(table: AcceptanceTable, draft: DraftConfig, temperature: float, context: float) -> AcceptanceCurve:
    """Return the curve for the drafter's kind of tree. Raises ConfigError if the table has no matching entry."""
    if not table.probabilities:
        return _measured(table, draft, temperature, context)
    accept_DK = [ranks[: draft.tree.max_children] for ranks in table.probabilities[: draft.tree.max_depth]]
    if draft.tree.kind == "chain":
        return best_lengths([ranks[:1] for ranks in table.probabilities])
    if draft.tree.kind == "static":
        return _static(draft.tree.static_paths, table.probabilities)
    return best_lengths(accept_DK)


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


def _static(paths: Sequence[Sequence[int]], accept_DK: Sequence[Sequence[float]]) -> AcceptanceCurve:
    """Return the curve of a static tree, which a smaller budget truncates in its own order."""
    chances = [_chance(path, accept_DK) for path in paths][:MAX_NODES]
    return np.cumsum([0.0, *chances, *[0.0] * (MAX_NODES - len(chances))])


def _chance(path: Sequence[int], accept_DK: Sequence[Sequence[float]]) -> float:
    if len(path) > len(accept_DK) or any(rank >= len(accept_DK[d]) for d, rank in enumerate(path)):
        return 0.0
    return float(np.prod([accept_DK[depth][rank] for depth, rank in enumerate(path)]))


def _measured(table: AcceptanceTable, draft: DraftConfig, temperature: float, context: float) -> AcceptanceCurve:
    """Interpolate measured points.

    Interpolation is linear in log(1 + nodes), in which trees gain about evenly, and in temperature and context.
    Outside the measured range the nearest point counts.
    """
    rule = rule_name(draft)
    points = [p for p in table.points if p.tree in (None, draft.tree.kind) and p.acceptance in (None, rule)]
    if not points:
        known = sorted({f"{p.tree or 'any'} trees under {p.acceptance or 'any rule'}" for p in table.points})
        asked = f"{draft.tree.kind} trees under {rule}"
        raise ConfigError(Problem("--acceptance", f"has no entry for {asked}, only for {', '.join(known)}"))

    def at_temperature(some: Sequence[AcceptancePoint]) -> AcceptanceCurve:
        return _between(some, lambda point: point.context or 0.0, context, _through)

    return _between(points, lambda point: point.temperature, temperature, at_temperature)


def _between(
    points: Sequence[AcceptancePoint],
    key: Callable[[AcceptancePoint], float],
    at: float,
    read: Callable[[Sequence[AcceptancePoint]], AcceptanceCurve],
) -> AcceptanceCurve:
    """Interpolate linearly between the curves of the points that share a key."""
    keys = sorted(set(map(key, points)))
    curves = np.array([read([point for point in points if key(point) == one]) for one in keys])
    return np.array([np.interp(at, keys, curves[:, n]) for n in range(MAX_NODES + 1)])


def _through(points: Sequence[AcceptancePoint]) -> AcceptanceCurve:
    by_nodes: dict[int, list[float]] = {0: [0.0]}
    for point in points:
        by_nodes.setdefault(point.nodes, []).append(point.accepted)
    nodes = sorted(by_nodes)
    accepted = np.maximum.accumulate([float(np.mean(by_nodes[n])) for n in nodes])
    return np.interp(np.log1p(np.arange(MAX_NODES + 1)), np.log1p(nodes), accepted)


def rule_name(draft: DraftConfig) -> str:
    """Return the acceptance rule's name in `secateur bench acceptance`."""
    if draft.acceptance.kind == "rejection" and not draft.acceptance.draft_probs:
        return "none"
    return draft.acceptance.kind
