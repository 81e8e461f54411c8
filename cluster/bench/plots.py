"""Two figures of the acceptance table. The only module that needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cluster.bench.report import Key, Table
from cluster.bench.rows import ACCEPTANCES, Row

COLOURS = {"coupled": "tab:blue", "rejection": "tab:orange", "none": "tab:gray"}
LINES = {"dynamic": "-", "static": "--", "chain": ":"}
MARKERS = {"static": "x", "off": "o", "thresholds": ".", "auto": "*"}


def draw(rows: Sequence[Row], stem: Path) -> None:
    """Writes STEM-length.png and, if anything was pruned, STEM-pruning.png."""
    table = Table(rows)
    _lengths(table).savefig(stem.with_name(f"{stem.name}-length.png"), dpi=120)
    if any(row.prune != "off" for row in rows):
        _pruning(table).savefig(stem.with_name(f"{stem.name}-pruning.png"), dpi=120)


def _lengths(table: Table) -> Figure:
    """Acceptance length over temperature, a panel per budget."""
    figure = Figure(figsize=(4 * len(table.nodes), 4.2), layout="constrained")
    panels = figure.subplots(1, len(table.nodes), sharey=True, squeeze=False)[0]
    for num_nodes, axes in zip(table.nodes, panels, strict=True):
        for tree, line in LINES.items():
            for acceptance in ACCEPTANCES:
                keys = [Key(tree, acceptance, num_nodes, t) for t in table.temperatures]  # type: ignore[arg-type]  # LINES' keys are the trees
                found = [row for key in keys if (row := table.by_key.get(key)) is not None]
                axes.errorbar(
                    [row.temperature for row in found],
                    [row.acceptance_length for row in found],
                    yerr=[row.acceptance_length_se or 0.0 for row in found],
                    color=COLOURS[acceptance],
                    linestyle=line,
                    elinewidth=0.6,
                    label=f"{tree}, {acceptance}",
                )
        _label(axes, f"{num_nodes} nodes", "temperature", "acceptance length")
    panels[-1].legend(fontsize="x-small")
    return figure


def _pruning(table: Table) -> Figure:
    """Nodes verified per token against acceptance length, a panel per temperature; static trees for comparison."""
    pruned = [row for row in table.rows if row.prune != "off"]
    temperatures = sorted({row.temperature for row in pruned})
    cases = {(row.acceptance, row.num_speculative_tokens) for row in pruned}
    figure = Figure(figsize=(5 * len(temperatures), 4.5), layout="constrained")
    panels = figure.subplots(1, len(temperatures), squeeze=False)[0]
    for temperature, axes in zip(temperatures, panels, strict=True):
        for acceptance, num_nodes in sorted(cases):
            shade = 1.0 if num_nodes == max(table.nodes) else 0.5
            for kind, marker in MARKERS.items():
                found = [
                    row
                    for row in table.rows
                    if (row.acceptance, row.num_speculative_tokens, row.temperature)
                    == (acceptance, num_nodes, temperature)
                    and (row.tree if row.tree != "dynamic" else row.prune) == kind
                ]
                axes.scatter(
                    [row.verified_per_token for row in found],
                    [row.acceptance_length for row in found],
                    color=COLOURS[acceptance],
                    alpha=shade,
                    marker=marker,
                    label=f"{acceptance}, {num_nodes} nodes, {kind}",
                )
        _label(axes, f"temperature {temperature:g}", "nodes verified per token", "acceptance length")
    panels[-1].legend(fontsize="xx-small")
    return figure


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
