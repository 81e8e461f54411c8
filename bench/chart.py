"""Draws README's chart of what speculation gains, from the tables in bench/results.

python -m bench.chart          # writes docs/images/gain.svg
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
CHART = ROOT / "docs" / "images" / "gain.svg"
SMOLLM2, H200 = RESULTS / "2026-11-27-latency-smollm2-peers.md", RESULTS / "2026-11-28-gpu-h200.md"

WIDTH, BAR, GAP, LABELS, NUMBERS = 760, 18, 7, 270, 110
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600 } .note { fill: #59636e }
.ours { fill: #1a7f37 } .plain { fill: #8c959f } .peer { fill: #0969da }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .note { fill: #9198a1 }
  .ours { fill: #3fb950 } .plain { fill: #6e7681 } .peer { fill: #4493f8 }
}"""


class Bar(NamedTuple):
    """One contestant: its name, tokens per second, times no speculation as recorded, and the class of its colour."""

    name: str
    rate: float
    ratio: float
    kind: str


class Panel(NamedTuple):
    """Bars that may be compared with each other: they were measured in one run."""

    title: str
    note: str
    bars: list[Bar]


def rows(path: Path, first: str) -> list[list[str]]:
    """Return the cells of the table whose header begins with `first`, header included."""
    text = path.read_text(encoding="utf-8")
    begin = text.index(f"\n| {first}") + 1
    lines = text[begin:].split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


def numbers(cell: str) -> list[float]:
    """Return the numbers of a cell such as `76 (1.17)` or `**1.8 (2.7)**`."""
    return [float(number) for number in re.findall(r"[\d.]+", cell)]


def smollm2() -> Panel:
    """Return the panel of one request to SmolLM2, beside other projects."""
    cells = {row[1]: numbers(row[2]) for row in rows(SMOLLM2, "T | contestant | batch 1")[1:]}
    names = {
        "off": ("without speculation", "plain"),
        "chain": ("chain of 5", "ours"),
        "auto": ("auto (default)", "ours"),
        "vllm": ("vLLM", "peer"),
        "vllm_eagle3": ("vLLM with our head", "peer"),
        "llamacpp": ("llama.cpp, 4-bit weights", "peer"),
        "openvino": ("OpenVINO, 4-bit weights", "peer"),
    }
    bars = [Bar(name, cells[key][0], cells[key][1], kind) for key, (name, kind) in names.items()]
    note = "two cores of an AMD EPYC, bfloat16, greedy, MT-Bench"
    return Panel("SmolLM2-135M on a CPU, one request", note, bars)


def h200() -> Panel:
    """Return the panel of a pair of an 8B model's size."""
    bars = []
    for temperature, requests, plain, auto, ratio, _ in rows(H200, "T | requests | without drafts: ms a token")[1:]:
        if int(requests) <= 8:
            cell = f"{requests} request{'s' * (requests != '1')}, T={temperature}"
            bars.append(Bar(f"{cell}: without speculation", 1e3 / float(plain), 1, "plain"))
            (times,) = numbers(ratio)
            bars.append(Bar("auto (default)", 1e3 / float(auto), times, "ours"))
    note = "of each request; bfloat16, an EAGLE-3 head; the small bundled pair's acceptance, at the cost of 8B"
    return Panel("A pair of Llama-3.1-8B's size on one NVIDIA H200", note, bars)


def drawn(panels: list[Panel]) -> str:
    """Return the SVG of the panels, one below the other. A bar shows its tokens per second and times no speculation."""
    parts, y = [], 0
    for panel in panels:
        scale = (WIDTH - LABELS - NUMBERS) / max(bar.rate for bar in panel.bars)
        parts.append(f'<text class="title" x="0" y="{y + 16}">{escape(panel.title)}: tokens per second</text>')
        parts.append(f'<text class="note" x="0" y="{y + 34}">{escape(panel.note)}</text>')
        y += 46
        for bar in panel.bars:
            length, middle = round(bar.rate * scale), y + 14
            parts.append(f'<text x="{LABELS - 10}" y="{middle}" text-anchor="end">{escape(bar.name)}</text>')
            parts.append(f'<rect class="{bar.kind}" x="{LABELS}" y="{y}" width="{length}" height="{BAR}" rx="2"/>')
            number = f"{bar.rate:.0f} ({bar.ratio:.2g}x)"
            parts.append(f'<text x="{LABELS + length + 8}" y="{middle}">{number}</text>')
            y += BAR + GAP
        y += 18
    label = "; ".join(f"{panel.title}: " + ", ".join(f"{b.name} {b.rate:.0f}" for b in panel.bars) for panel in panels)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" aria-label="{escape(label)}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def chart() -> str:
    """Return README's chart."""
    return drawn([smollm2(), h200()])


if __name__ == "__main__":
    CHART.write_text(chart(), encoding="utf-8")
