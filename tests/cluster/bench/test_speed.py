"""`secateur bench latency`, `throughput` and `step`: decoding steps, ratios, ceilings, and quick runs."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from cluster.bench import step
from cluster.bench.contestants import (
    StepBreakdown,
    Timing,
    TransformersContestant,
    Turn,
    assistant,
    decoding_steps,
    load_model,
)
from cluster.bench.output import stem_of, write_json
from cluster.bench.plots import STEP_PARTS
from cluster.bench.runner import GenerationJob, StatsSnapshot
from cluster.bench.speed import CHAIN_ACCEPTANCE, STAR_ACCEPTANCE, SpeedRow, row_of
from secateur import cli
from secateur.bench import SpeedPlan, StepPlan
from secateur.cli.bench import MAX_PROMPTS
from tests.support.engines import BUNDLED, prompts, transformers_greedy
from workers.comm.ipc import EngineStats
from workers.settings import SamplingSettings


def test_a_run_without_rows_leaves_no_file(tmp_path: Path) -> None:
    first = stem_of(tmp_path, "latency")
    write_json(first, {"date": "today"}, {"rows": [{"ms": 1.5}]})
    written = first.with_suffix(".json").read_text()
    write_json(stem_of(tmp_path, "latency"), {"date": "today"}, {"rows": []})
    assert [path.read_text() for path in tmp_path.iterdir()] == [written]


# -- which steps count -----------------------------------------------------------------------------------------------


def frame(at: float, steps: int, *, prompts: int, tokens: int, running: int = 1, **seconds: float) -> StatsSnapshot:
    stats = EngineStats(steps=steps, prompt_tokens=prompts, generation_tokens=tokens, num_running=running)
    for name, value in seconds.items():
        setattr(stats, f"{name}_seconds", value)
    return StatsSnapshot(at, stats)


def test_steps_with_a_prompt_and_the_following_step_do_not_count() -> None:
    snapshots = [
        frame(0.0, 0, prompts=0, tokens=0, running=0),
        frame(9.0, 1, prompts=50, tokens=1, step=9.0, verify=9.0, forward=9.0),  # the prompt
        frame(12.0, 2, prompts=50, tokens=2, step=12.0, verify=10.0, forward=10.0, draft=1.5),  # and its feed
        frame(14.0, 3, prompts=50, tokens=5, step=13.9, verify=11.0, forward=10.8, accept=0.1, draft=2.0, transfer=0.3),
    ]
    costs = decoding_steps(snapshots, batch=1)
    assert costs is not None and costs.num_steps == 1 and costs.tokens_per_step == 3
    assert costs.forward_ms == pytest.approx(800) and costs.draft_ms == pytest.approx(500)
    assert costs.pack_ms == pytest.approx(100) and costs.accept_ms == pytest.approx(100)
    assert costs.commit_ms == pytest.approx(1900 - 1000 - 500 - 300) and costs.between_ms == pytest.approx(100)
    assert costs.total_ms == pytest.approx(2000)


def test_steps_with_fewer_requests_than_the_batch_do_not_count() -> None:
    snapshots = [frame(float(i), i, prompts=5, tokens=2 * i, running=2 if i < 3 else 1) for i in range(6)]
    costs = decoding_steps(snapshots, batch=2)
    assert costs is not None and costs.num_steps == 2 and costs.tokens_per_step == 1  # per request
    assert decoding_steps(snapshots, batch=3) is None


# -- rows ------------------------------------------------------------------------------------------------------------


def turn(seconds_per_token: float, tokens: list[int], **steps: float) -> Turn:
    """A turn of one answer; with `steps`, by our engine."""
    seconds = 1.0 + seconds_per_token * (len(tokens) - 1)
    costs = None
    if steps:
        zero = dict.fromkeys(StepBreakdown.__slots__, 0.0)
        costs = StepBreakdown(**zero | steps)  # type: ignore[arg-type]
    return Turn(seconds=seconds, timings=[Timing(tokens=tokens, first_seconds=1.0, seconds=seconds)], steps=costs)


def test_ratios_are_medians_of_ratios_within_a_round() -> None:
    """In the second round the machine is three times as slow for both."""
    slow = [1.0, 3.0, 1.0]
    rounds = [{"off": turn(0.04 * f, [1, 2, 3]), "dynamic": turn(0.01 * f, [1, 2, 3])} for f in slow]
    row = row_of("dynamic", 0.0, 1, rounds)
    assert row.tpot_ratio == pytest.approx(4.0) and row.tpot_ms == pytest.approx(10.0) and row.same_tokens == 1
    assert row_of("off", 0.0, 1, rounds).tpot_ratio == 1.0


def test_the_ceiling_counts_the_time_of_the_models_alone() -> None:
    off = turn(0.050, [1, 2, 3], forward_ms=40.0, tokens_per_step=1.0, between_ms=10.0)
    own = turn(0.025, [1, 2, 4], forward_ms=60.0, draft_ms=20.0, transfer_ms=5.0, commit_ms=15.0, tokens_per_step=4.0)
    row = row_of("dynamic", 0.0, 1, [{"off": off, "dynamic": own}])
    assert row.ceiling == pytest.approx(4.0 * 40 / (60 + 20)) and row.tpot_ratio == pytest.approx(2.0)
    assert row.step_gain == pytest.approx(4.0 * 50 / 100) and row.ceiling_share == pytest.approx(1.0)
    assert row.outside_models == pytest.approx(20 / 100)
    assert row.same_tokens == 0 and row_of("off", 0.0, 1, [{"off": off}]).ceiling is None


# -- transformers' ways ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_generate_answers_a_padded_batch_as_it_answers_each_alone() -> None:
    some = prompts(3)
    assert len({len(prompt) for prompt in some}) > 1
    expected = transformers_greedy(some, 12)
    model = load_model(BUNDLED / "target", "float32", "cpu")
    small = assistant(load_model(BUNDLED / "draft", "float32", "cpu"), 3)
    ways = [
        (TransformersContestant("generate", model), 3),
        (TransformersContestant("assisted", model, max_batch=1, assistant_model=small), 1),
        (TransformersContestant("lookup", model, max_batch=1, prompt_lookup_num_tokens=3), 1),
    ]
    jobs = [GenerationJob(prompt=prompt, max_tokens=12) for prompt in some]
    threads = torch.get_num_threads()
    for way, batch in ways:
        answered = way.take_turn(jobs, batch)
        assert [timing.tokens for timing in answered.timings] == expected, way.name
        assert all(0 < timing.first_seconds < timing.seconds for timing in answered.timings)
    assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_generate_samples_at_a_temperature() -> None:
    model = load_model(BUNDLED / "target", "float32", "cpu")
    jobs = [
        GenerationJob(prompt=prompts(1)[0], max_tokens=24, sampling=SamplingSettings(temperature=1.5, seed=i))
        for i in (1, 2)
    ]
    first, second = TransformersContestant("generate", model).take_turn(jobs, 1).timings
    assert first.tokens != second.tokens


# -- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Return the calls of the measurement."""
    calls: list[tuple] = []
    for name in ("speed", "step"):
        stand_in = types.ModuleType(f"cluster.bench.{name}")
        stand_in.run = lambda *args, **more: calls.append((args, more)) or "done"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"cluster.bench.{name}", stand_in)
    return calls


def test_latency_and_throughput_differ_in_their_defaults(asked, tmp_path) -> None:
    assert cli.main(["bench", "latency", "--contestants", "off, prompt-lookup", "--temperatures", "0", "0.7"]) == 0
    assert cli.main(["bench", "throughput", "--batches", "1", "40", "--cache", str(tmp_path)]) == 0
    ((_, plan, texts, _, _), latency), ((_, other, more, _, _), throughput) = asked
    assert (latency["name"], throughput["name"], throughput["cache"]) == ("latency", "throughput", tmp_path)
    assert plan.contestants == ("off", "prompt_lookup") and plan.temperatures == (0.0, 0.7)
    assert len(texts) == 4 * plan.rounds, "four at a time, others in each round"
    assert other == SpeedPlan.throughput().model_copy(update={"batches": (1, 40)}) and len(more) == MAX_PROMPTS


def test_step_reads_its_list_options(asked) -> None:
    flags = ["--rows", "1", "9", "--contexts", "64", "--nodes", "0", "8", "--target-cost", "512x12"]
    assert cli.main(["bench", "step", *flags]) == 0
    [((_, plan, *_), _)] = asked
    assert (plan.rows, plan.contexts, plan.nodes, str(plan.size)) == ((1, 9), (64,), (0, 8), "512x12")
    assert plan.batches == StepPlan().batches


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["latency", "--contestants", "off,warp"], "contestants.1: must be 'off', 'chain'"),
        (["latency", "--contestants", "dynamic"], "contestants: must include off, which all ratios refer to"),
        (["latency", "--batches", "0"], "batches.0: must be greater than or equal to 1"),
        (["throughput", "--target-cost", "300M"], "target_cost: must be 300m, 8b or HIDDENxLAYERS such as 512x12"),
        (["throughput", "--target-cost", "100x9"], "must be a multiple of 256 (got 100)"),
        (["throughput", "--no-speculation"], "give --speculative-config"),
        (["throughput", "-sc", '{"model": "x", "num_speculative_tokens": 4}'], "is what the benchmark varies"),
        (["step", "--rows", "0"], "rows.0: must be greater than or equal to 1"),
        (["step", "--nodes", "99"], "nodes.0: must be less than or equal to 63"),
        (["step", "--no-speculation"], "give --speculative-config"),
    ],
)
def test_wrong_arguments_are_reported_before_anything_is_loaded(flags, says, asked, capsys) -> None:
    assert cli.main(["bench", *flags]) == 2
    assert says in capsys.readouterr().err and asked == []


@pytest.mark.slow
def test_model_dependent_errors_are_reported_before_an_engine_starts(capsys, tmp_path) -> None:
    method = '{"method": "ngram", "prompt_lookup_max": 3}'
    flags = ["--quick", "--device", "cpu", "--output", str(tmp_path)]
    assert cli.main(["bench", "latency", "--target-cost", "256x9", "-sc", method, *flags]) == 2
    assert "--target-cost: scales a target and its EAGLE-3 head" in capsys.readouterr().err
    assert cli.main(["bench", "latency", "--target-cost", "256x4", *flags]) == 2
    assert "number of layers is 8, a target of 256x4 has only 4" in capsys.readouterr().err
    assert cli.main(["bench", "latency", "--max-tokens", "4000", *flags]) == 2
    assert "max_model_len is 2048" in capsys.readouterr().err
    assert not any(tmp_path.glob("*.json"))


def test_the_static_tree_assumes_falling_acceptance() -> None:
    assert list(CHAIN_ACCEPTANCE) == sorted(CHAIN_ACCEPTANCE, reverse=True)
    assert list(STAR_ACCEPTANCE.values()) == sorted(STAR_ACCEPTANCE.values())
    assert STAR_ACCEPTANCE[1] == CHAIN_ACCEPTANCE[0]


# -- real runs -------------------------------------------------------------------------------------------------------


def written(output: Path, name: str) -> dict:
    [file] = output.glob(f"*-{name}.json")
    [plot] = output.glob(f"*-{name}.png")
    assert plot.stat().st_size > 10_000
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_comparison_on_a_cost_scaled_target(tmp_path, capsys) -> None:
    flags = ["--quick", "--device", "cpu", "--target-cost", "256x9", "--max-tokens", "24", "--output", str(tmp_path)]
    assert cli.main(["bench", "latency", *flags]) == 0
    result = written(tmp_path, "latency-256x9")
    label = "cost-scaled (same function as the bundled target, cost of a 256x9 model)"
    assert result["about"]["target"] == label
    rows = [SpeedRow(**row) for row in result["rows"]]
    names = ("off", "dynamic", "auto", "generate", "assisted")
    assert [row.contestant for row in rows if row.batch == 1] == list(names)
    assert [row.contestant for row in rows if row.batch == 2] == list(names[:-1]), "assisted generation is for one"
    for row in rows:
        assert row.same_tokens == 1, f"{row.contestant}: greedy tokens are everybody's"
        assert row.tpot_ms > 0 and row.ttft_ms > 0 and row.tokens_per_second > 0 and row.tpot_ratio > 0
    alone = {row.contestant: row for row in rows if row.batch == 1}
    assert alone["generate"].forward_ms is None and alone["off"].ceiling is None
    dynamic = alone["dynamic"]
    assert dynamic.tokens_per_step > 2 and dynamic.draft_ms > 0 and dynamic.ceiling > 0 and dynamic.ceiling_share > 0
    [report] = tmp_path.glob("*.md")
    assert capsys.readouterr().out.strip() == report.read_text().strip() and label in report.read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_benchmark_that_is_terminated_keeps_its_rows(tmp_path: Path) -> None:
    plan = ["--contestants", "off", "--batches", *map(str, range(1, 17)), "--rounds", "3"]
    command = [
        sys.executable,
        "-m",
        "secateur",
        "bench",
        "latency",
        "--device",
        "cpu",
        "--output",
        str(tmp_path),
        *plan,
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("batch 1, off" in line for line in process.stderr)
        process.terminate()
        process.communicate()
    [file] = tmp_path.glob("*-latency.json")
    rows = json.loads(file.read_text())["rows"]
    assert process.returncode != 0 and rows[0]["batch"] == 1 and len(rows) < 32


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_step_benchmark(tmp_path) -> None:
    assert cli.main(["bench", "step", "--quick", "--device", "cpu", "--output", str(tmp_path)]) == 0
    result = written(tmp_path, "step")
    forwards = {(row["rows"], row["batch"], row["context"]): row["ms"] for row in result["forwards"]}
    assert set(forwards) == {(r, b, c) for r in (1, 9) for b in (1, 2) for c in (128, 256)}
    assert min(forwards.values()) > 0 and result["streaming"] == []
    steps = {(row["batch"], row["nodes"]): row for row in result["steps"]}
    assert set(steps) >= {(1, 0), (1, 8)}
    assert steps[1, 0]["draft_ms"] == 0 and steps[1, 0]["tokens_per_step"] == 1
    assert steps[1, 8]["draft_ms"] > 0 and 0 < steps[1, 8]["verified_per_step"] <= 8
    for row in steps.values():
        assert row["total_ms"] == pytest.approx(sum(row[f"{part}_ms"] for part in STEP_PARTS), rel=0.01)


def test_the_copy_that_measures_bandwidth_counts_both_directions(monkeypatch) -> None:
    monkeypatch.setattr(step, "_BANDWIDTH_BYTES", 1 << 20)
    times = iter(range(100))
    monkeypatch.setattr(step.time, "perf_counter", lambda: float(next(times)))
    assert step.measured_bandwidth_gbs(torch.device("cpu")) == pytest.approx(2 * 2**20 / 1e9)
