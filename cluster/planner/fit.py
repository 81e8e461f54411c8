"""Fits a cost table to a profile.

The target's costs are fitted by non-negative least squares of relative errors. The terms are rows (piecewise linear),
requests, cached tokens and row-token pairs. Drafting costs are kept as measured, by requests and nodes, with one slope
over the cache. Legend: C cells, J terms.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from cluster.planner.acceptance import rule_name
from cluster.planner.cost_model import PlannerCostModel
from cluster.planner.profile import AcceptedCounts, PrefillSample, Profile, StepSample
from secateur.plan import AcceptancePoint, AcceptanceTable, CostTable, DraftCostTable, VerifyCostTable
from workers.config import EngineConfig

_KNOT_RATIO = 4


def fit(profile: Profile, config: EngineConfig, hardware: str, temperature: float) -> CostTable:
    """Return the cost table that predicts the profile best, with the median error of its steps."""
    samples_C, draft = profile.samples_C, config.draft
    drafted, plain = [s for s in samples_C if s.nodes], [s for s in samples_C if not s.nodes]
    host_ms, host_request_ms = _line([s.requests - 1 for s in plain], [s.host_ms for s in plain])
    draft_host_ms = [s.host_ms - host_ms - host_request_ms * (s.requests - 1) for s in drafted]
    table = CostTable(
        source="measured",
        hardware=hardware,
        model=config.model_path,
        drafter=draft.method if draft else "",
        temperature=temperature,
        verify=_verify(profile),
        draft=_draft(drafted, profile.prompts, max(0.0, statistics.median(draft_host_ms))) if drafted else None,
        host_ms=host_ms,
        host_request_ms=host_request_ms,
        acceptance=_acceptance(profile.accepted, config, temperature) if drafted else None,
    )
    costs = PlannerCostModel(table)
    errors = [abs(costs.step(s.requests, s.nodes, s.kv).ms / s.wall_ms - 1) for s in samples_C]
    return table.model_copy(update={"fit_error": statistics.median(errors)})


def _verify(profile: Profile) -> VerifyCostTable:
    """Fit the target's costs to the decoding steps and to prompts that were computed alone."""
    by_rows: dict[int, list[float]] = {}
    for prompt in profile.prompts:
        by_rows.setdefault(prompt.rows, []).append(prompt.verify_ms)
    terms = [(s.rows, s.requests, s.kv, s.pairs, s.requests * bool(s.nodes), s.verify_ms) for s in profile.samples_C]
    terms += [(rows, 1, rows, rows * rows / 2, 0, statistics.median(ms)) for rows, ms in by_rows.items()]
    columns = (np.array(column, dtype=float) for column in zip(*terms, strict=True))
    rows_C, requests_C, kv_C, pairs_C, trees_C, ms_C = columns
    has_trees_C = np.sign(trees_C)
    if requests_C.min() == requests_C.max():
        requests_C = trees_C = np.zeros_like(requests_C)  # else inseparable from the constant term
    if len({s.context for s in profile.samples_C}) == 1:
        kv_C = pairs_C = np.zeros_like(kv_C)  # for the same reason
    knots = _knots(rows_C)
    ends = [*knots[1:], np.inf]
    segments = [np.clip(rows_C - low, 0, high - low) for low, high in zip(knots, ends, strict=True)]
    terms_CJ = np.stack([np.ones_like(ms_C), requests_C, kv_C, pairs_C, has_trees_C, trees_C, *segments], axis=1)
    coefficient_J = nonnegative_least_squares(terms_CJ / ms_C[:, None], np.ones_like(ms_C))
    # Fit again with errors relative to the first fit: relative to the measurements, slow outliers count too little.
    guess_C = terms_CJ @ coefficient_J
    coefficient_J = nonnegative_least_squares(terms_CJ / guess_C[:, None], ms_C / guess_C)
    base, request_ms, kv_ms, pair_ms, tree_ms, tree_request_ms, *slopes = coefficient_J.tolist()
    steps = [0.0, *(slope * (high - low) for slope, low, high in zip(slopes, knots, knots[1:], strict=False))]
    return VerifyCostTable(
        rows=tuple(knots),
        ms=tuple((base + np.cumsum(steps)).tolist()),
        request_ms=request_ms,
        kv_token_ms=kv_ms,
        row_kv_token_ms=pair_ms,
        tree_ms=tree_ms,
        tree_request_ms=tree_request_ms,
    )


def _knots(rows_C: np.ndarray) -> list[float]:
    """Return the fewest and the most rows seen, and between them at most one knot per factor of four."""
    knots = [float(rows_C.min())]
    for rows in sorted(rows_C.tolist()):
        if rows >= _KNOT_RATIO * knots[-1]:
            knots.append(rows)
    if rows_C.max() > knots[-1]:
        knots[len(knots) - (len(knots) > 1 and rows_C.max() < 2 * knots[-1]) :] = [float(rows_C.max())]
    return knots


def _draft(drafted: Sequence[StepSample], prompts: Sequence[PrefillSample], host_ms: float) -> DraftCostTable:
    """Tabulate drafting costs by requests and nodes, with one slope per size over the cached tokens."""
    requests, nodes = (tuple(sorted({getattr(s, name) for s in drafted})) for name in ("requests", "nodes"))

    def of(r: int, n: int) -> list[StepSample]:
        return sorted((s for s in drafted if (s.requests, s.nodes) == (r, n)), key=_kv)

    cells = [[of(r, n) for n in nodes] for r in requests]
    slopes = tuple(_slope([line[i] for line in cells]) for i in range(len(nodes)))

    def mean(name: str) -> np.ndarray:
        return np.array([[statistics.mean(getattr(s, name) for s in cell) for cell in line] for line in cells])

    feeds = [p.feed_ms / p.rows for p in prompts if p.feed_ms is not None]
    return DraftCostTable(
        requests=requests,
        nodes=nodes,
        ms=_monotone(np.maximum(mean("draft_ms") - mean("kv") * np.array(slopes), 0.0)),
        transfer_ms=_monotone(mean("transfer_ms")),
        kv_token_ms=slopes,
        prompt_token_ms=statistics.median(feeds) if feeds else 0.0,
        host_ms=host_ms,
    )


def _monotone(values: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """Make a grid non-decreasing along both axes: the mean of its tightest upper and lower monotone bounds."""
    above, below = values, values[::-1, ::-1]
    for axis in (0, 1):
        above, below = np.maximum.accumulate(above, axis), np.minimum.accumulate(below, axis)
    return tuple(map(tuple, ((above + below[::-1, ::-1]) / 2).tolist()))


def _kv(sample: StepSample) -> float:
    return sample.kv


def _slope(pairs: Sequence[Sequence[StepSample]]) -> float:
    """Return the drafting time per cached token, from the shortest to the longest context; at least 0."""
    more_ms = sum(cells[-1].draft_ms - cells[0].draft_ms for cells in pairs)
    more_kv = sum(cells[-1].kv - cells[0].kv for cells in pairs)
    return max(0.0, more_ms / more_kv) if more_kv > 0 else 0.0


def _acceptance(found: Sequence[AcceptedCounts], config: EngineConfig, temperature: float) -> AcceptanceTable:
    """Return the acceptance of the profile's own trees, by nodes and context."""
    assert config.draft is not None
    counts: dict[tuple[int, int], tuple[int, int]] = {}
    for one in found:
        num_accepted, num_drafts = counts.get((one.nodes, one.context), (0, 0))
        counts[one.nodes, one.context] = (num_accepted + one.num_accepted, num_drafts + one.num_drafts)
    points = [
        AcceptancePoint(
            nodes=nodes,
            accepted=num_accepted / num_drafts,
            temperature=temperature,
            context=context,
            tree=config.draft.tree.kind,
            acceptance=rule_name(config.draft),
        )
        for (nodes, context), (num_accepted, num_drafts) in sorted(counts.items())
        if num_drafts
    ]
    return AcceptanceTable(points=tuple(points))


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Fit a line and return its value at 0 and its slope, both non-negative."""
    terms = np.stack([np.ones(len(x)), np.array(x, dtype=float)], axis=1)
    base, slope = nonnegative_least_squares(terms, np.array(y, dtype=float)).tolist()
    return base, slope


def nonnegative_least_squares(terms_CJ: np.ndarray, value_C: np.ndarray) -> np.ndarray:
    """Return the [J] coefficients >= 0 that minimise |terms @ coefficients - values|, by coordinate descent."""
    scale_J = np.linalg.norm(terms_CJ, axis=0)
    scale_J[scale_J == 0] = 1.0
    unit_CJ = terms_CJ / scale_J
    gram_JJ, goal_J = unit_CJ.T @ unit_CJ, unit_CJ.T @ value_C
    coefficient_J = np.zeros(len(scale_J))
    for _ in range(20_000):
        before_J = coefficient_J.copy()
        for j in np.flatnonzero(gram_JJ.diagonal()):
            coefficient_J[j] = max(0.0, coefficient_J[j] + (goal_J[j] - gram_JJ[j] @ coefficient_J) / gram_JJ[j, j])
        if np.abs(coefficient_J - before_J).max() <= 1e-10 * max(1e-300, coefficient_J.max()):
            break
    return coefficient_J / scale_J
