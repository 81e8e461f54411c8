"""The acceptance report in Markdown: the gains of draft probabilities, dynamic trees and pruning."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from cluster.bench.acceptance_rows import ACCEPTANCES, Acceptance, AcceptanceRow, Tree, standard_error
from cluster.bench.output import heading, markdown

KEPT = 0.98
"""A pruning counts as free if it keeps this share of the unpruned tokens per step."""


class RowKey(NamedTuple):
    """Identifies an unpruned row. is_full: a chain deeper than the depth cap of the dynamic trees."""

    tree: Tree
    acceptance: Acceptance
    num_nodes: int
    temperature: float
    is_full: bool = False


class Difference(NamedTuple):
    """Difference of two rows' acceptance lengths, paired by prompt."""

    mean: float
    error: float

    @property
    def sign(self) -> int:
        """1 or -1 if the difference exceeds two standard errors, else 0."""
        return (self.mean > 2 * self.error) - (self.mean < -2 * self.error)

    def __str__(self) -> str:
        mark = {1: " ▲", -1: " ▼", 0: ""}[self.sign]
        return f"{self.mean:+.2f} ± {self.error:.2f}{mark}"


class AcceptanceResults:
    """Rows with an index over the unpruned ones."""

    def __init__(self, rows: Sequence[AcceptanceRow]) -> None:
        self.rows = rows
        unpruned = [row for row in rows if row.prune == "off"]
        cap = min((row.max_depth for row in unpruned), default=0)
        self.by_key = {
            RowKey(row.tree, row.acceptance, row.num_speculative_tokens, row.temperature, row.max_depth > cap): row
            for row in unpruned
        }
        self.temperatures = sorted({row.temperature for row in rows})
        self.nodes = sorted({row.num_speculative_tokens for row in rows})
        self.cells = [(t, n) for t in self.temperatures for n in self.nodes]

    def gain(self, tree: Tree, temperature: float, num_nodes: int) -> float | None:
        """Return the ratio of acceptance lengths with (by the better rule) and without draft probabilities."""
        coupled, rejection, none = (
            self.by_key.get(RowKey(tree, acceptance, num_nodes, temperature)) for acceptance in ACCEPTANCES
        )
        if not (coupled and rejection and none):
            return None
        return max(coupled.acceptance_length, rejection.acceptance_length) / none.acceptance_length

    def ahead(self, other: Tree, acceptance: Acceptance, temperature: float, num_nodes: int) -> Difference | None:
        """Return the dynamic tree's acceptance length minus another tree's at the same budget and depth cap."""
        dynamic = self.by_key.get(RowKey("dynamic", acceptance, num_nodes, temperature))
        compared = self.by_key.get(RowKey(other, acceptance, num_nodes, temperature))
        if not (dynamic and compared) or dynamic.num_prompts < 2:
            return None
        pairs = zip(dynamic.acceptance_lengths, compared.acceptance_lengths, strict=True)
        differences = [a - b for a, b in pairs]
        return Difference(statistics.mean(differences), standard_error(differences))


def render(header: Mapping[str, object], rows: Sequence[AcceptanceRow]) -> str:
    """Return the whole report."""
    table = AcceptanceResults(rows)
    parts = [
        heading("Acceptance", header, hidden=("nodes", "temperatures")),
        "## Claims",
        *_gains(table),
        *_comparison(table, "chain", "its own chain (same budget, cut at the same depth)"),
        *_comparison(table, "static", "the static tree of the same size that is best by measured acceptance (Sequoia)"),
        *_pruning(table),
        "## Acceptance length",
        _pivot(table, lambda row: f"{row.acceptance_length:.2f}"),
        "## Tokens per second",
        _pivot(table, lambda row: f"{row.tokens_per_second:.0f}"),
    ]
    return "\n\n".join(parts) + "\n"


def _gains(table: AcceptanceResults) -> Iterable[str]:
    yield "### Draft probabilities: acceptance length under `coupled` or `rejection`, the better, over that without"
    trees: tuple[Tree, ...] = ("chain", "static", "dynamic")
    for tree in trees:
        gains = {(t, n): gain for t, n in table.cells if (gain := table.gain(tree, t, n)) is not None}
        sampled = [gain for (t, _), gain in gains.items() if t > 0]
        if sampled:
            middle = statistics.median(sampled)
            yield (
                f"{tree.capitalize()}, T > 0: {min(sampled):.2f} to {max(sampled):.2f} times, median {middle:.2f}.\n\n"
                + _grid(table, {key: f"{gain:.2f}" for key, gain in gains.items()})
            )


def _comparison(table: AcceptanceResults, other: Tree, name: str) -> Iterable[str]:
    yield (
        f"### Dynamic tree minus {name}\n\nAcceptance length ± standard error over prompts, paired; "
        "▲ ahead and ▼ behind by more than two."
    )
    for acceptance in ACCEPTANCES:
        found = {(t, n): gap for t, n in table.cells if (gap := table.ahead(other, acceptance, t, n)) is not None}
        if found:
            signs = [gap.sign for gap in found.values()]
            (t, n), worst = min(found.items(), key=lambda item: item[1].mean)
            yield (
                f"`{acceptance}`: of {len(signs)} cells {signs.count(1)} ahead, {signs.count(-1)} behind; "
                f"worst {worst} (T = {t:g}, {n} nodes).\n\n"
                + _grid(table, {key: str(gap) for key, gap in found.items()})
            )


def _pruning(table: AcceptanceResults) -> Iterable[str]:
    pruned = [row for row in table.rows if row.prune != "off"]
    if not pruned:
        return
    yield (
        "### Pruned dynamic trees against the static tree of the same budget\n\nSaved: nodes verified per token, "
        "fewer than static. Kept: of its tokens per step. Steps without a draft count in tokens per step, not in "
        "acceptance length."
    )
    lines, best = [], []
    for acceptance, t, n in dict.fromkeys((r.acceptance, r.temperature, r.num_speculative_tokens) for r in pruned):
        key = RowKey("static", acceptance, n, t)
        if (static := table.by_key.get(key)) is None:
            continue
        own = [table.by_key.get(key._replace(tree="dynamic")), *(row for row in pruned if _is_of(row, key))]
        compared = [(row, _saved(row, static), row.tokens_per_step / static.tokens_per_step) for row in own if row]
        lines += [
            (acceptance, f"{t:g}", n, row.pruning, f"{row.verified_per_token:.2f}", f"{row.acceptance_length:.2f}")
            + (f"{row.tokens_per_step:.2f}", f"{saved:z.0%}", f"{kept:.0%}", f"{row.tokens_per_second:.0f}")
            for row, saved, kept in compared
        ]
        if free := [(saved, kept, row) for row, saved, kept in compared if kept >= KEPT and row.prune != "off"]:
            saved, kept, row = max(free, key=lambda item: item[0])
            best.append(f"- `{acceptance}`, T = {t:g}, {n} nodes: {row.pruning} saves {saved:.0%}, keeps {kept:.0%}")
        else:
            best.append(f"- `{acceptance}`, T = {t:g}, {n} nodes: no pruning keeps {KEPT:.0%}")
    yield f"The most saved by a pruning that keeps {KEPT:.0%}:\n\n" + "\n".join(best)
    yield markdown(
        ["acceptance", "T", "nodes", "pruning", "verified/token", "acceptance length", "tokens/step", "saved", "kept"]
        + ["tokens/s"],
        lines,
    )


def _is_of(row: AcceptanceRow, key: RowKey) -> bool:
    return (row.acceptance, row.num_speculative_tokens, row.temperature) == key[1:4]


def _saved(row: AcceptanceRow, static: AcceptanceRow) -> float:
    return 1 - row.verified_per_token / static.verified_per_token


def _grid(table: AcceptanceResults, cells: Mapping[tuple[float, int], str]) -> str:
    """Format a table with temperatures down and budgets across."""
    lines = [[f"{t:g}", *(cells.get((t, n), "") for n in table.nodes)] for t in table.temperatures]
    return markdown(["T", *(f"{n} nodes" for n in table.nodes)], lines)


def _pivot(table: AcceptanceResults, show: Callable[[AcceptanceRow], str]) -> str:
    """Format a table with temperatures across and a line for each tree, rule and budget."""
    lines = []
    for key in sorted({key._replace(temperature=0.0) for key in table.by_key}):
        found = [table.by_key.get(key._replace(temperature=t)) for t in table.temperatures]
        tree = "chain, full depth" if key.is_full else key.tree
        lines.append([tree, key.acceptance, key.num_nodes, *(show(row) if row else "" for row in found)])
    return markdown(["tree", "acceptance", "nodes", *(f"T={t:g}" for t in table.temperatures)], lines)
