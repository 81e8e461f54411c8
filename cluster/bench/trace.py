"""`secateur bench trace`: what drafter and verifier do at the same time, and how much of the drafting that hides.

Every rank records its parts of a step (`workers.trace`). In each round the modes of `overlap` take turns on the same
prompts. A timeline of all ranks is written for each mode, in Chrome's trace format (chrome://tracing, Perfetto).
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from cluster.bench.output import (
    Say,
    about,
    device_mark,
    draw,
    heading,
    markdown,
    rounded,
    stem_of,
    write_json,
    write_text,
)
from cluster.bench.runner import GenerationJob, Runner
from cluster.bench.setup import scaled, workload
from cluster.convert import with_overlap
from cluster.system.temp_dirs import OwnedTempDir
from secateur.bench import TracePlan
from secateur.config import EngineArgs
from secateur.prompts import BenchPrompt
from workers.config import EngineConfig, PruneConfig
from workers.settings import SamplingSettings

HIDDEN = ("modes", "batches", "temperatures", "target_cost")
NOTES = (
    "whole trees, T = temperature; means over the steps of a run that ask the drafter, medians over the rounds",
    "wait: the verifier waits for drafts; drafter: all that the drafter does, of which ahead is done after its answer; "
    "both: drafter and target's forward at the same time",
    "hidden: the share of the whole wait of overlap none that is gone; hits: answers that were drafted ahead; a step "
    "of overlap alternate verifies half of the requests",
    "speed: tokens per second against overlap none; bound: what it would be if all drafting were hidden, (V + D) / "
    "max(V, D) with the step V and the wait D of overlap none",
)


class Span(NamedTuple):
    """One part of a rank's work, in seconds of `time.perf_counter`."""

    part: str
    began: float
    ended: float


class Window(NamedTuple):
    """When one run of all jobs took place, its tokens per second, and its share of answers drafted ahead."""

    began: float
    ended: float
    tokens_per_second: float
    hit_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """Mean milliseconds of a step in one mode of `overlap`; see NOTES."""

    overlap: str
    batch: int
    temperature: float
    num_steps: int
    step_ms: float
    wait_ms: float
    forward_ms: float
    drafter_ms: float
    ahead_ms: float
    both_ms: float
    hidden: float
    hit_rate: float
    tokens_per_second: float
    speed: float
    bound: float


Cell = tuple[int, float]
"""Batch size and temperature."""


def run(
    args: EngineArgs,
    plan: TracePlan,
    prompts: Sequence[BenchPrompt],
    output: Path,
    say: Say,
    *,
    as_json: bool = False,
    cache: Path | None = None,
) -> str:
    """Measure, write DATE-trace.json, .md, .png and a timeline for each mode, and return the Markdown, or the JSON.

    Raises ConfigError before anything is started, and EngineDead.
    """
    with scaled(args, plan.size, cache, say) as args_:
        config, tokens = workload(args_, prompts, max_tokens=plan.max_tokens, max_num_seqs=max(plan.batches))
        stem = stem_of(output, "trace", plan.target_cost, device_mark(config))
        head = about(args, config, plan.model_dump(), NOTES)
        rows: list[TraceRow] = []
        folder = OwnedTempDir()
        try:
            windows = _run(args_, config, plan, tokens, folder.path, say)
            timelines: dict[str, Timeline] = {mode: read_timelines(folder.path / mode) for mode in plan.modes}
            rows += rows_of(timelines, windows)
        finally:
            folder.remove()
            write_json(stem, head, {"rows": [asdict(row) for row in rows]})
    for mode, timeline in timelines.items():
        stem.with_name(f"{stem.name}-{mode}.trace.json").write_text(json.dumps(chrome_trace(timeline)))
    text = f"{heading('Trace', head, HIDDEN)}\n\n{_table(rows)}\n"
    shown = write_text(stem, text, as_json=as_json)
    middle = {mode: _middle(windows[mode][plan.batches[0], plan.temperatures[0]][-1]) for mode in plan.modes}
    draw(say, stem, "timelines", timelines, middle)
    return shown


def _run(
    args: EngineArgs, config: EngineConfig, plan: TracePlan, prompts: Sequence[list[int]], folder: Path, say: Say
) -> dict[str, dict[Cell, list[Window]]]:
    """Run every cell in every mode, in turn in every round; the engines write their timelines to FOLDER/MODE."""
    assert config.draft is not None
    tree = replace(config.draft.tree, kind="dynamic", num_speculative_tokens=plan.nodes, prune=PruneConfig())
    windows: dict[str, dict[Cell, list[Window]]] = {mode: defaultdict(list) for mode in plan.modes}
    with ExitStack() as stack:
        say("starting the engines")
        runners = {}
        for mode in plan.modes:
            (folder / mode).mkdir()
            own = replace(config, draft=replace(config.draft, tree=tree), trace_path=str(folder / mode))
            own = with_overlap(args, own, mode)
            runners[mode] = stack.enter_context(Runner(own))
        for number in range(plan.rounds + 1):
            for batch in plan.batches:
                for temperature in plan.temperatures:
                    jobs = [
                        GenerationJob(
                            prompt=prompts[(number * batch + i) % len(prompts)],
                            max_tokens=plan.max_tokens,
                            sampling=SamplingSettings(temperature=temperature, seed=i),
                        )
                        for i in range(batch)
                    ]
                    for mode, runner in runners.items():
                        window = _window(runner, jobs, batch)
                        if number:  # the first round warms up
                            windows[mode][batch, temperature].append(window)
            say(f"round {number} of {plan.rounds}")
    return windows


def _window(runner: Runner, jobs: Sequence[GenerationJob], batch: int) -> Window:
    before, began = runner.stats, time.perf_counter()
    answers = runner.run(jobs, concurrency=batch)
    ended, after = time.perf_counter(), runner.stats
    num_trees = after.num_trees - before.num_trees
    return Window(
        began=began,
        ended=ended,
        tokens_per_second=sum(len(answer.tokens) for answer in answers) / (ended - began),
        hit_rate=(after.num_predrafted - before.num_predrafted) / num_trees if num_trees else 0.0,
    )


# -- timelines -------------------------------------------------------------------------------------------------------

Timeline = Mapping[str, Sequence[Span]]
"""The spans of each rank, in the order in which they ended."""


def read_timelines(folder: Path) -> Timeline:
    """Read what `workers.trace` wrote, the verifier's ranks first."""
    files = sorted(folder.glob("*.json"), key=lambda file: (file.stem.startswith("drafter"), file.stem))
    return {file.stem: [Span(*span) for span in json.loads(file.read_text())] for file in files}


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline in Chrome's trace event format, one process for each rank, times in microseconds."""
    zero = min((span.began for spans in timeline.values() for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for number, (role, spans) in enumerate(timeline.items()):
        events.append({"name": "process_name", "ph": "M", "pid": number, "args": {"name": role}})
        events += [
            {
                "name": span.part,
                "ph": "X",
                "pid": number,
                "tid": 0,
                "ts": round(1e6 * (span.began - zero), 1),
                "dur": round(1e6 * (span.ended - span.began), 1),
            }
            for span in spans
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def overlap_s(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Return the seconds in which a span of each list lasts. The spans of a list must not overlap each other."""
    total, i, j = 0.0, 0, 0
    first, second = sorted(first, key=lambda s: s.began), sorted(second, key=lambda s: s.began)
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i].ended, second[j].ended) - max(first[i].began, second[j].began))
        if first[i].ended < second[j].ended:
            i += 1
        else:
            j += 1
    return total


def _middle(window: Window) -> tuple[float, float]:
    """Return the seconds around the middle of a run that a plot shows."""
    half = min(0.1, (window.ended - window.began) / 4)
    middle = (window.began + window.ended) / 2
    return middle - half, middle + half


# -- the table -------------------------------------------------------------------------------------------------------


class _Means(NamedTuple):
    """Mean milliseconds over the steps of one run that ask the drafter."""

    num_steps: int
    step_ms: float
    wait_ms: float
    forward_ms: float
    drafter_ms: float
    ahead_ms: float
    both_ms: float


def rows_of(
    timelines: Mapping[str, Timeline], windows: Mapping[str, Mapping[Cell, Sequence[Window]]]
) -> list[TraceRow]:
    """Return a row for every cell and mode, `none` included."""
    rows = []
    for cell in windows["none"]:
        means = {mode: _medians(timelines[mode], own[cell]) for mode, own in windows.items()}
        rates = {
            mode: statistics.median(window.tokens_per_second for window in own[cell]) for mode, own in windows.items()
        }
        wait, alone = means["none"].wait_ms, means["none"].step_ms - means["none"].wait_ms
        whole_wait = wait * means["none"].num_steps
        for mode, own in means.items():
            rows.append(
                TraceRow(
                    overlap=mode,
                    batch=cell[0],
                    temperature=cell[1],
                    hidden=rounded(1 - own.wait_ms * own.num_steps / whole_wait if whole_wait else 0.0),
                    hit_rate=rounded(statistics.mean(window.hit_rate for window in windows[mode][cell])),
                    tokens_per_second=rounded(rates[mode]),
                    speed=rounded(rates[mode] / rates["none"]),
                    bound=rounded((alone + wait) / max(alone, wait) if wait else 1.0),
                    num_steps=own.num_steps,
                    **{name: rounded(value) for name, value in own._asdict().items() if name != "num_steps"},
                )
            )
    return rows


def _medians(timeline: Timeline, windows: Sequence[Window]) -> _Means:
    runs = [_means(timeline, window) for window in windows]
    steps, *columns = zip(*runs, strict=True)
    return _Means(sum(steps), *(statistics.median(column) for column in columns))


def _means(timeline: Timeline, window: Window) -> _Means:
    verifier, drafter = (
        [span for span in timeline[role] if window.began <= span.began and span.ended <= window.ended]
        for role in ("verifier 0", "drafter 0")
    )
    waits = _named(verifier, "wait for drafts")
    steps = [step for step in _named(verifier, "step") if overlap_s([step], waits) > 0]
    forwards = [forward for forward in _named(verifier, "forward") if overlap_s([forward], steps) > 0]
    ahead = _named(drafter, "draft ahead")
    count = max(len(steps), 1)

    def mean_ms(spans: Sequence[Span]) -> float:
        return 1e3 * sum(span.ended - span.began for span in spans) / count

    return _Means(
        len(steps),
        step_ms=mean_ms(steps),
        wait_ms=mean_ms(waits),
        forward_ms=mean_ms(forwards),
        drafter_ms=mean_ms(drafter),
        ahead_ms=mean_ms(ahead),
        both_ms=1e3 * overlap_s(drafter, forwards) / count,
    )


def _named(spans: Sequence[Span], part: str) -> list[Span]:
    return [span for span in spans if span.part == part]


def _table(rows: Sequence[TraceRow]) -> str:
    parts = ("step", "wait", "forward", "drafter", "ahead", "both")
    lines = [
        [row.batch, f"{row.temperature:g}", row.overlap]
        + [f"{getattr(row, f'{part}_ms'):.2f}" for part in parts]
        + [f"{row.hidden:.0%}", f"{row.hit_rate:.0%}", f"{row.tokens_per_second:.1f}"]
        + [f"{row.speed:.2f}", f"{row.bound:.2f}"]
        for row in rows
    ]
    header = ["requests", "T", "overlap", *(f"{part} ms" for part in parts)]
    return markdown([*header, "hidden", "hits", "tokens/s", "speed", "bound"], lines)
