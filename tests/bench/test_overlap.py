"""`bench.overlap`: timelines, what they add up to, and a quick run."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from bench import harness
from bench.overlap import (
    PLAIN,
    OverlapPlan,
    Span,
    Window,
    check_overlap,
    chrome_trace,
    measure,
    overlap_s,
    read_timelines,
    rows_of,
)
from cluster.bench.report import rounded
from secateur.config import EngineArgs
from secateur.errors import ConfigError


def spans(part: str, *times: tuple[float, float]) -> list[Span]:
    return [Span(part, began, ended) for began, ended in times]


@pytest.mark.parametrize(
    ("first", "second", "seconds"),
    [
        ([(0, 2), (3, 5)], [(1, 4)], 2.0),
        ([(1, 4)], [(0, 2), (3, 5)], 2.0),
        ([(3, 5), (0, 2)], [(1, 4)], 2.0),
        ([(0, 10)], [(1, 2), (4, 5), (9, 12)], 3.0),
        ([(0, 1)], [(1, 2)], 0.0),
        ([], [(1, 2)], 0.0),
    ],
)
def test_overlap_is_the_time_in_which_both_work(first, second, seconds) -> None:
    assert overlap_s(spans("draft", *first), spans("forward", *second)) == seconds


def as_written(*args: Any) -> list[SimpleNamespace]:
    """Return the rows with numbers as in a report."""
    return [SimpleNamespace(**rounded(asdict(row))) for row in rows_of(*args)]


def sync_timeline() -> dict[str, list[Span]]:
    """Two steps of 10 ms, each with 4 ms of waiting and a forward of 5 ms; a prompt's step before them."""
    verifier = [
        *spans("forward", (1.000, 1.030)),
        *spans("step", (1.000, 1.031)),
        *spans("wait for drafts", (1.040, 1.044), (1.050, 1.054)),
        *spans("forward", (1.0445, 1.0495), (1.0545, 1.0595)),
        *spans("step", (1.040, 1.050), (1.050, 1.060)),
    ]
    return {"verifier 0": verifier, "drafter 0": spans("draft", (1.0405, 1.0435), (1.0505, 1.0535))}


def predrafting_timeline() -> dict[str, list[Span]]:
    """Two steps of 7 ms, each with 1 ms of waiting; the drafter works during 2 of the 5 ms of a forward."""
    verifier = [
        *spans("wait for drafts", (2.000, 2.001), (2.007, 2.008)),
        *spans("forward", (2.0015, 2.0065), (2.0085, 2.0135)),
        *spans("step", (2.000, 2.007), (2.007, 2.014)),
    ]
    drafter = [
        *spans("draft", (2.0003, 2.0006)),
        *spans("draft ahead", (2.0006, 2.0035)),
        *spans("draft", (2.0073, 2.0076)),
        *spans("draft ahead", (2.0076, 2.0105)),
    ]
    return {"verifier 0": verifier, "drafter 0": drafter}


def test_the_table_tells_what_is_hidden_and_what_that_gains() -> None:
    window = {"none": Window(0.9, 1.1, 100.0, 0.0), "predraft": Window(1.9, 2.1, 140.0, 0.75)}
    none, predraft = as_written(
        {"none": sync_timeline(), "predraft": predrafting_timeline()},
        {mode: {(1, 0.0): [own]} for mode, own in window.items()},
    )
    assert (none.overlap, none.num_steps, none.step_ms, none.wait_ms, none.forward_ms) == ("none", 2, 10.0, 4.0, 5.0)
    assert (none.drafter_ms, none.ahead_ms, none.both_ms, none.hidden, none.speed) == (3.0, 0.0, 0.0, 0.0, 1.0)
    assert none.bound == predraft.bound == pytest.approx(10 / 6, rel=1e-3), "of overlap none: (V + D) / max(V, D)"
    assert (predraft.wait_ms, predraft.hidden, predraft.hit_rate, predraft.speed) == (1.0, 0.75, 0.75, 1.4)
    assert (predraft.drafter_ms, predraft.ahead_ms, predraft.both_ms) == (3.2, 2.9, 2.0)


def test_speeds_are_compared_round_by_round() -> None:
    def rounds(*speeds: float) -> dict:
        return {(1, 0.0): [Window(0.9, 1.1, speed, 0.0) for speed in speeds]}

    timelines = {"none": sync_timeline(), "predraft": sync_timeline()}
    windows = {"none": rounds(100.0, 50.0), "predraft": rounds(110.0, 65.0), PLAIN: rounds(55.0, 65.0)}
    none, predraft = rows_of(timelines, windows)
    assert (none.speed, none.speed_error) == (1.0, 0.0)
    assert (predraft.speed, predraft.speed_error) == (pytest.approx(1.2), pytest.approx(0.1))
    assert (predraft.to_plain, predraft.to_plain_error) == (pytest.approx(1.5), pytest.approx(0.5))


def test_only_spans_within_a_run_count() -> None:
    second = Window(1.049, 1.1, 100.0, 0.0)
    [row] = as_written({"none": sync_timeline()}, {"none": {(1, 0.0): [second]}})
    assert (row.num_steps, row.step_ms, row.drafter_ms) == (1, 10.0, 3.0)


def test_a_timeline_becomes_chromes_trace_events() -> None:
    trace = chrome_trace({"verifier 0": spans("forward", (5.0, 5.002)), "drafter 0": spans("draft", (5.001, 5.003))})
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    assert names == ["verifier 0", "drafter 0"]
    assert [event for event in trace["traceEvents"] if event["ph"] == "X"] == [
        {"name": "forward", "ph": "X", "pid": 0, "tid": 0, "ts": 0.0, "dur": 2000.0},
        {"name": "draft", "ph": "X", "pid": 1, "tid": 0, "ts": 1000.0, "dur": 2000.0},
    ]


def test_timelines_are_read_with_the_verifier_first(tmp_path: Path) -> None:
    for role in ("drafter 0", "verifier 1", "verifier 0"):
        (tmp_path / f"{role}.json").write_text(json.dumps([[role, 1.0, 2.0]]))
    found = read_timelines(tmp_path)
    assert list(found) == ["verifier 0", "verifier 1", "drafter 0"]
    assert found["verifier 1"] == [Span("verifier 1", 1.0, 2.0)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"method": "ngram"}, "nothing can be hidden without a draft model or head"),
        (
            {"model": "bundled:eagle3-head", "overlap": "none"},
            "speculative_config.overlap: is what the benchmark varies; remove it",
        ),
        (
            {"model": "bundled:eagle3-head", "draft_tensor_parallel_size": 2},
            "draft_tensor_parallel_size: must be 1 to draft ahead",
        ),
    ],
)
def test_settings_that_leave_nothing_to_compare_are_refused(spec, message) -> None:
    args = EngineArgs(speculative_config=spec, tensor_parallel_size=spec.get("draft_tensor_parallel_size", 1))
    with pytest.raises(ConfigError, match=message):
        check_overlap(args)


def test_the_modes_are_compared_with_none() -> None:
    with pytest.raises(ConfigError, match="must include none"):
        OverlapPlan.load({"modes": ("predraft",)})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_run(tmp_path: Path) -> None:
    few = {"modes": ("none", "predraft"), "batches": (1,), "temperatures": (0.0,), "max_tokens": 24, "rounds": 1}
    flags = ["--quick", "--device", "cpu", "--output", str(tmp_path)]
    with mock.patch.object(sys, "argv", ["overlap", *flags]), pytest.raises(SystemExit) as end:
        harness.main(OverlapPlan, measure, few)
    assert end.value.code == 0
    [result] = [file for file in tmp_path.glob("*.json") if not file.name.endswith(".trace.json")]
    none, predraft = json.loads(result.read_text())["rows"]
    assert none["num_steps"] > 0 and none["wait_ms"] > 0 and none["both_ms"] < none["drafter_ms"]
    assert predraft["ahead_ms"] > 0 and predraft["both_ms"] > 0, "the drafter works while the target does"
    assert predraft["to_plain"] > 0 and predraft["speed_error"] is None
    for mode in ("none", "predraft"):
        trace = json.loads(result.with_name(f"{result.stem}-{mode}.trace.json").read_text())
        names = {event["name"] for event in trace["traceEvents"]}
        assert {"step", "wait for drafts", "forward", "accept", "draft", "draft ahead"} <= names
