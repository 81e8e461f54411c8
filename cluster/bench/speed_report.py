"""The Markdown report of `secateur bench latency` and `throughput`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.bench.output import About, heading, markdown

HIDDEN = ("contestants", "batches", "temperatures", "target_cost")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRow:
    """One contestant at one temperature and number of requests."""

    contestant: str
    temperature: float
    batch: int
    ttft_ms: float
    tpot_ms: float
    tpot_ratio: float
    """TPOT without speculation over its own TPOT: above 1 is faster."""
    tokens_per_second: float
    throughput_ratio: float
    same_tokens: float
    bytes_per_weight: float | None = None
    """None in results from before it was measured."""
    acceptance_length: float | None = None
    """Tokens per verified draft; None where nothing is drafted, or the contestant does not tell."""
    # Our own engine's steps, see `StepBreakdown`; None for all others.
    tokens_per_step: float | None = None
    verified_per_step: float | None = None
    draft_ms: float | None = None
    transfer_ms: float | None = None
    pack_ms: float | None = None
    forward_ms: float | None = None
    accept_ms: float | None = None
    commit_ms: float | None = None
    between_ms: float | None = None
    step_ms: float | None = None
    outside_models: float | None = None
    step_gain: float | None = None
    """Decoding speed over these steps, relative to no speculation."""
    ceiling: float | None = None
    ceiling_share: float | None = None


def render(name: str, about: About, rows: Sequence[SpeedRow]) -> str:
    """Return the whole report; `name`, latency or throughput, decides which section comes first."""
    sections = [_latency(rows), _throughput(rows)]
    if name == "throughput":
        sections.reverse()
    ours = [row for row in rows if row.forward_ms is not None]
    return "\n\n".join([heading(name.capitalize(), about, HIDDEN), *sections, _gain(ours), _steps(ours)]) + "\n"


def _latency(rows: Sequence[SpeedRow]) -> str:
    columns = ("TTFT ms", "TPOT ms", "times no speculation", "acceptance length", "same", "bytes per weight")
    lines = [
        [
            *_key(row),
            f"{row.ttft_ms:.1f}",
            f"{row.tpot_ms:.2f}",
            f"{row.tpot_ratio:.2f}",
            _or_empty(row.acceptance_length),
            f"{row.same_tokens:.0%}",
            _or_empty(row.bytes_per_weight),
        ]
        for row in rows
    ]
    return "## Time per output token\n\n" + markdown(["T", "batch", "contestant", *columns], lines)


def _or_empty(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _throughput(rows: Sequence[SpeedRow]) -> str:
    """Tabulate the throughput of all requests together, by batch size."""
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
