"""Speed rows as Markdown. Only reports; nothing here fails on a number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cluster.bench.output import About, heading, markdown

if TYPE_CHECKING:
    from cluster.bench.speed import SpeedRow

HIDDEN = ("contestants", "batches", "temperatures", "target_cost")


def render(name: str, about: About, rows: Sequence[SpeedRow]) -> str:
    """The whole report; `name` is latency or throughput, which only decides what comes first."""
    sections = [_latency(rows), _throughput(rows)]
    if name == "throughput":
        sections.reverse()
    ours = [row for row in rows if row.forward_ms is not None]
    return "\n\n".join([heading(name.capitalize(), about, HIDDEN), *sections, _gain(ours), _steps(ours)]) + "\n"


def _latency(rows: Sequence[SpeedRow]) -> str:
    lines = [
        [*_key(row), f"{row.ttft_ms:.1f}", f"{row.tpot_ms:.2f}", f"{row.tpot_ratio:.2f}", f"{row.same_tokens:.0%}"]
        for row in rows
    ]
    return "## Time per output token\n\n" + markdown(
        ["T", "batch", "contestant", "TTFT ms", "TPOT ms", "times no speculation", "same"], lines
    )


def _throughput(rows: Sequence[SpeedRow]) -> str:
    """Tokens per second of all requests together, by number of requests."""
    batches = sorted({row.batch for row in rows})
    lines: list[list[str]] = []
    for temperature, contestant in dict.fromkeys((row.temperature, row.contestant) for row in rows):
        found = {r.batch: r for r in rows if (r.temperature, r.contestant) == (temperature, contestant)}
        cells = [
            f"{r.tokens_per_second:.0f} ({r.throughput_ratio:.2f})" if (r := found.get(b)) else "" for b in batches
        ]
        lines.append([f"{temperature:g}", contestant, *cells])
    return "## Tokens per second, and times no speculation\n\n" + markdown(
        ["T", "contestant", *(f"batch {batch}" for batch in batches)], lines
    )


def _gain(rows: Sequence[SpeedRow]) -> str:
    lines = [
        [
            *_key(row),
            f"{row.tokens_per_step:.2f}",
            f"{row.acceptance_length:.2f}",
            f"{row.verified_per_step:.1f}",
            f"{row.step_gain:.2f}",
            f"{row.ceiling:.2f}",
            f"{row.ceiling_share:.0%}",
        ]
        for row in rows
        if row.ceiling is not None
    ]
    return "## What is gained of what could be\n\n" + markdown(
        [
            "T",
            "batch",
            "contestant",
            "tokens/step",
            "acceptance length",
            "nodes/step",
            "gain in decoding",
            "ceiling",
            "share",
        ],
        lines,
    )


def _steps(rows: Sequence[SpeedRow]) -> str:
    parts = ("draft", "transfer", "pack", "forward", "accept", "commit", "between", "step")
    lines = [
        [*_key(row), *(f"{getattr(row, f'{part}_ms'):.2f}" for part in parts), f"{row.outside_models:.0%}"]
        for row in rows
    ]
    return "## A decoding step, milliseconds\n\n" + markdown(
        ["T", "batch", "contestant", *parts, "outside both models"], lines
    )


def _key(row: SpeedRow) -> Iterable[str]:
    return f"{row.temperature:g}", str(row.batch), row.contestant
