"""What drafter and verifier do at the same time, and what that gains: python -m bench.overlap.

Every rank records its parts of a step (`workers.trace`). In each round the modes of `overlap`, and an engine without a
drafter, take turns on the same prompts. A timeline of all ranks is written for each mode, in Chrome's trace format
(chrome://tracing, Perfetto).
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from bench.harness import Plan, Run, main, scaled
from cluster.bench.report import Report
from cluster.bench.runner import GenerationJob, Runner
from cluster.bench.setup import workload
from cluster.convert import with_overlap
from cluster.system.temp_dirs import OwnedTempDir
from secateur.bench import PositiveInt, Some, Temperature, check_drafter
from secateur.cli.bench import say
from secateur.config import EngineArgs
from secateur.errors import ConfigError, Problem, SecateurError
from secateur.token_tree import MAX_NODES
from workers.config import EngineConfig, PruneConfig
from workers.settings import SamplingSettings

PLAIN = "no drafter"
NOTES = (
    "whole trees, T = temperature; means over the steps of a run that ask the drafter, medians over the rounds",
    "wait: the verifier waits for drafts; drafter: all that the drafter does, of which ahead is done after its answer; "
    "both: drafter and target's forward at the same time",
    "hidden: the share of the whole wait of overlap none that is gone; hit_rate: answers that were drafted ahead; a "
    "step of overlap alternate verifies half of the requests",
    "speed: tokens per second against overlap none, to_plain: against an engine without a drafter, means over the "
    "rounds and standard errors; bound: the speed if all drafting were hidden, (V + D) / max(V, D) with the step V and "
    "the wait D of overlap none",
)


class OverlapPlan(Plan):
    """The runs to record, each with every mode of `overlap` in turn."""

    modes: Some[Literal["none", "predraft", "alternate", "auto"]] = ("none", "predraft", "alternate", "auto")
    """Settings of `overlap`. The others are compared with `none`, so it must be among them."""
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] = 16
    """Draft nodes per tree."""
    batches: Some[PositiveInt] = (1, 8)
    """Requests in flight."""
    temperatures: Some[Temperature] = (0.0, 1.0)
    max_tokens: Annotated[int, Field(ge=2)] = 48
    rounds: PositiveInt = 3

    @model_validator(mode="after")
    def _has_a_measure(self) -> Self:
        if "none" not in self.modes:
            raise ConfigError(Problem("modes", "must include none, which the others are compared with"))
        return self


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
class OverlapRow:
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
    speed_error: float | None
    to_plain: float | None
    to_plain_error: float | None
    bound: float


Cell = tuple[int, float]
"""Batch size and temperature."""


def measure(run: Run) -> Report:
    """Measure. Raises ConfigError before anything is started, and EngineDead."""
    plan: OverlapPlan = run.plan
    check_drafter(run.args, plan.nodes)
    check_overlap(run.args)
    texts = run.texts(max(plan.batches) * (plan.rounds + 1))
    folder = OwnedTempDir()
    try:
        with scaled(run.args, plan.target_cost, plan.cache, say) as args:
            config, tokens = workload(args, texts, max_tokens=plan.max_tokens, max_num_seqs=max(plan.batches))
            with run.report("overlap", config, NOTES) as report:
                windows = _run(args, config, plan, tokens, folder.path)
                timelines: dict[str, Timeline] = {mode: read_timelines(folder.path / mode) for mode in plan.modes}
                for row in rows_of(timelines, windows):
                    report.add("rows", row)
    finally:
        folder.remove()
    for mode, timeline in timelines.items():
        path = report.stem.with_name(f"{report.stem.name}-{mode}.trace.json")
        path.write_text(json.dumps(chrome_trace(timeline)))
    return report


def check_overlap(args: EngineArgs) -> None:
    """Raise ConfigError unless a drafter is configured that can draft ahead, and whose `overlap` is not set."""
    spec = args.speculative_config
    if spec is None or spec.method == "ngram":
        raise ConfigError("nothing can be hidden without a draft model or head: give --speculative-config '{...}'")
    if spec.draft_tensor_parallel_size != 1:
        raise ConfigError(Problem("speculative_config.draft_tensor_parallel_size", "must be 1 to draft ahead"))
    if "overlap" in spec.model_fields_set:
        raise ConfigError(Problem("speculative_config.overlap", "is what the benchmark varies; remove it"))


def _run(
    args: EngineArgs, config: EngineConfig, plan: OverlapPlan, prompts: Sequence[list[int]], folder: Path
) -> dict[str, dict[Cell, list[Window]]]:
    """Run every cell in every mode, in turn in every round; the engines write their timelines to FOLDER/MODE."""
    assert config.draft is not None
    tree = replace(config.draft.tree, kind="dynamic", num_speculative_tokens=plan.nodes, prune=PruneConfig())
    windows: dict[str, dict[Cell, list[Window]]] = {mode: defaultdict(list) for mode in (*plan.modes, PLAIN)}
    with ExitStack() as stack:
        say("starting the engines")
        runners = {PLAIN: stack.enter_context(Runner(replace(config, draft=None)))}
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
                    told = set()
                    for name, runner in runners.items():
                        window, answers = _window(runner, jobs, batch)
                        told.add(str(answers))
                        if number:  # the first round warms up
                            windows[name][batch, temperature].append(window)
                    if len(told) > 1:
                        raise SecateurError("overlap changed a token")
            say(f"round {number} of {plan.rounds}")
    return windows


def _window(runner: Runner, jobs: Sequence[GenerationJob], batch: int) -> tuple[Window, list[list[int]]]:
    before, began = runner.stats, time.perf_counter()
    answers = runner.run(jobs, concurrency=batch)
    ended, after = time.perf_counter(), runner.stats
    num_trees = after.num_trees - before.num_trees
    window = Window(
        began=began,
        ended=ended,
        tokens_per_second=sum(len(answer.tokens) for answer in answers) / (ended - began),
        hit_rate=(after.num_predrafted - before.num_predrafted) / num_trees if num_trees else 0.0,
    )
    return window, [answer.tokens for answer in answers]


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
) -> list[OverlapRow]:
    """Return a row for every cell and mode, `none` included."""
    rows = []
    for cell in windows["none"]:
        means = {mode: _medians(timeline, windows[mode][cell]) for mode, timeline in timelines.items()}
        wait, alone = means["none"].wait_ms, means["none"].step_ms - means["none"].wait_ms
        whole_wait = wait * means["none"].num_steps
        for mode, own in means.items():
            speed, speed_error = _ratio(windows[mode][cell], windows["none"][cell])
            plain, plain_error = _ratio(windows[mode][cell], windows[PLAIN][cell]) if PLAIN in windows else (None, None)
            rows.append(
                OverlapRow(
                    overlap=mode,
                    batch=cell[0],
                    temperature=cell[1],
                    hidden=1 - own.wait_ms * own.num_steps / whole_wait if whole_wait else 0.0,
                    hit_rate=statistics.mean(window.hit_rate for window in windows[mode][cell]),
                    tokens_per_second=statistics.median(window.tokens_per_second for window in windows[mode][cell]),
                    speed=speed,
                    speed_error=speed_error,
                    to_plain=plain,
                    to_plain_error=plain_error,
                    bound=(alone + wait) / max(alone, wait) if wait else 1.0,
                    **own._asdict(),
                )
            )
    return rows


def _ratio(windows: Sequence[Window], others: Sequence[Window]) -> tuple[float, float | None]:
    """Return the mean ratio of speeds over the rounds, and its standard error if there are several."""
    ratios = [own.tokens_per_second / other.tokens_per_second for own, other in zip(windows, others, strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None
    return statistics.mean(ratios), error


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


if __name__ == "__main__":
    small = {"batches": (1,), "temperatures": (0.0,), "max_tokens": 24, "rounds": 1}
    main(OverlapPlan, measure, {"modes": ("none", "predraft"), **small})
