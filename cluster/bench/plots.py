"""The figures of all benchmarks. Only this module needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cluster.bench.acceptance_report import AcceptanceResults, RowKey
from cluster.bench.acceptance_rows import ACCEPTANCES, AcceptanceRow

if TYPE_CHECKING:
    from cluster.bench.serve import LoadRow
    from cluster.bench.speed import SpeedRow
    from cluster.bench.step import StepRow, VerifyRow
    from cluster.bench.trace import Timeline

COLOURS = {"coupled": "tab:blue", "rejection": "tab:orange", "none": "tab:gray"}
LINES = {"dynamic": "-", "static": "--", "chain": ":"}
MARKERS = {"static": "x", "off": "o", "thresholds": ".", "auto": "*"}


def acceptance(rows: Sequence[AcceptanceRow], stem: Path) -> None:
    """Write STEM-length.png and, if any row was pruned, STEM-pruning.png."""
    table = AcceptanceResults(rows)
    _lengths(table).savefig(stem.with_name(f"{stem.name}-length.png"), dpi=120)
    if any(row.prune != "off" for row in rows):
        _pruning(table).savefig(stem.with_name(f"{stem.name}-pruning.png"), dpi=120)


def _lengths(table: AcceptanceResults) -> Figure:
    """Plot acceptance length over temperature, one panel per budget."""
    figure = Figure(figsize=(4 * len(table.nodes), 4.2), layout="constrained")
    panels = figure.subplots(1, len(table.nodes), sharey=True, squeeze=False)[0]
    for num_nodes, axes in zip(table.nodes, panels, strict=True):
        for tree, line in LINES.items():
            for acceptance in ACCEPTANCES:
                keys = [RowKey(tree, acceptance, num_nodes, t) for t in table.temperatures]  # type: ignore[arg-type]  # LINES' keys are the trees
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


def _pruning(table: AcceptanceResults) -> Figure:
    """Plot acceptance length over verified nodes per token, one panel per temperature, with static trees."""
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


def speed(rows: Sequence[SpeedRow], stem: Path) -> None:
    """Write STEM.png: speedup per token and throughput over the batch size, one column per temperature."""
    temperatures = sorted({row.temperature for row in rows})
    figure = Figure(figsize=(5 * len(temperatures), 8), layout="constrained")
    panels = figure.subplots(2, len(temperatures), squeeze=False)
    for column, temperature in enumerate(temperatures):
        above, below = panels[0][column], panels[1][column]
        chosen = [row for row in rows if row.temperature == temperature]
        for contestant in dict.fromkeys(row.contestant for row in chosen):
            line = [row for row in chosen if row.contestant == contestant]
            batches = [row.batch for row in line]
            style = {"marker": "o" if line[0].forward_ms else "x", "linestyle": "-" if line[0].forward_ms else ":"}
            above.plot(batches, [row.tpot_ratio for row in line], label=contestant, **style)
            below.plot(batches, [row.tokens_per_second for row in line], label=contestant, **style)
        batches = sorted({row.batch for row in chosen})
        for axes in (above, below):
            axes.set_xscale("log", base=2)
            axes.set_xticks(batches, [str(batch) for batch in batches])
            axes.set_ylim(bottom=0)
        _label(above, f"temperature {temperature:g}", "requests at a time", "time per token: times no speculation")
        _label(below, f"temperature {temperature:g}", "requests at a time", "tokens per second, all together")
    panels[0][-1].legend(fontsize="x-small")
    figure.savefig(stem.with_suffix(".png"), dpi=120)


STEP_PARTS = ("draft", "transfer", "pack", "forward", "accept", "commit", "between")


def step(forwards: Sequence[VerifyRow], steps: Sequence[StepRow], stem: Path) -> None:
    """Write STEM.png: the parts of a step, and the target's forward over rows and over context."""
    figure = Figure(figsize=(16, 4.5), layout="constrained")
    bars, by_rows, by_context = figure.subplots(1, 3)
    labels = [f"{row.batch} x {row.nodes}" for row in steps]
    bottom = [0.0] * len(steps)
    for part in STEP_PARTS:
        heights = [max(0.0, getattr(row, f"{part}_ms")) for row in steps]
        bars.bar(labels, heights, bottom=bottom, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    bars.legend(fontsize="x-small")
    _label(bars, "a decoding step", "requests x nodes", "milliseconds")
    short, long = min(row.context for row in forwards), max(row.rows for row in forwards)
    for batch in sorted({row.batch for row in forwards}):
        line = [row for row in forwards if row.batch == batch and row.context == short]
        by_rows.plot([row.rows for row in line], [row.ms for row in line], marker="o", label=f"{batch} requests")
        line = [row for row in forwards if row.batch == batch and row.rows == long]
        by_context.plot([row.context for row in line], [row.ms for row in line], marker="o", label=f"{batch} requests")
    by_rows.legend(fontsize="x-small")
    _label(by_rows, f"the target's forward behind {short} tokens", "rows of each request", "milliseconds")
    _label(by_context, f"the target's forward, {long} rows each", "tokens of context", "milliseconds")
    figure.savefig(stem.with_suffix(".png"), dpi=120)


def timelines(timelines: Mapping[str, Timeline], shown: Mapping[str, tuple[float, float]], stem: Path) -> None:
    """Write STEM.png: what each rank does in some steps of each mode. shown: the seconds to show of each."""
    figure = Figure(figsize=(12, 1.2 + 1.6 * len(timelines)), layout="constrained")
    panels = figure.subplots(len(timelines), 1, squeeze=False)[:, 0]
    parts = ("wait for drafts", "forward", "accept", "draft", "draft ahead")
    colours = dict(zip(parts, ("lightgray", "tab:blue", "tab:cyan", "tab:orange", "tab:green"), strict=True))
    for axes, (mode, timeline) in zip(panels, timelines.items(), strict=True):
        begin, end = shown[mode]
        for line, spans in enumerate(timeline.values()):
            for part, colour in colours.items():
                bars = [
                    (1e3 * (span.began - begin), 1e3 * (span.ended - span.began))
                    for span in spans
                    if span.part == part and span.ended > begin and span.began < end
                ]
                axes.broken_barh(bars, (line - 0.4, 0.8), color=colour, label=part)
        axes.set_xlim(0, 1e3 * (end - begin))
        axes.set_yticks(range(len(timeline)), list(timeline))
        axes.invert_yaxis()
        _label(axes, f"overlap {mode}", "milliseconds", "")
    handles, labels = panels[0].get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    figure.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=len(parts), fontsize="small")
    figure.savefig(stem.with_suffix(".png"), dpi=120)


def load(rows: Sequence[LoadRow], stem: Path) -> None:
    """Write STEM.png: TTFT, TPOT and E2E by load."""
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    panels: Mapping[str, Axes] = dict(zip(("ttft", "tpot", "e2e"), figure.subplots(1, 3), strict=True))
    for name, axes in panels.items():
        for mode in dict.fromkeys(row.mode for row in rows):
            line = [row for row in rows if row.mode == mode]
            labels = [row.load for row in line]
            for percentile, style in (("p50", "-"), ("p99", ":")):
                values = [getattr(row, f"{name}_ms")[percentile] for row in line]
                axes.plot(labels, values, style, marker="o", label=f"{mode}, {percentile}")
        _label(axes, name.upper(), "load", "milliseconds")
    panels["e2e"].legend(fontsize="x-small")
    figure.savefig(stem.with_suffix(".png"), dpi=120)


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
