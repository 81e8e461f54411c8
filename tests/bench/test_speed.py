"""The harness, and the benchmarks of speed and of a forward: flags, ratios, ceilings, and quick runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from bench import forward, harness, speed
from bench.contestants import Timing, TransformersContestant, Turn, assistant, load_model
from bench.plans import SpeedPlan
from bench.speed import CHAIN_ACCEPTANCE, STAR_ACCEPTANCE, SpeedRow, row_of
from cluster.bench.breakdown import StepBreakdown
from cluster.bench.report import Report
from cluster.bench.runner import GenerationJob
from secateur.prompts import BUNDLED_PROMPTS
from tests.support.engines import BUNDLED, ROOT, prompts, transformers_greedy
from workers.settings import SamplingSettings

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
    row, steps = row_of("dynamic", 0.0, 1, rounds)
    assert steps is None
    assert row.tpot_ratio == pytest.approx(4.0) and row.tpot_ms == pytest.approx(10.0) and row.same_tokens == 1
    assert row_of("off", 0.0, 1, rounds)[0].tpot_ratio == 1.0


def test_the_ceiling_counts_the_time_of_the_models_alone() -> None:
    off = turn(0.050, [1, 2, 3], forward_ms=40.0, tokens_per_step=1.0, between_ms=10.0)
    own = turn(0.025, [1, 2, 4], forward_ms=60.0, draft_ms=20.0, transfer_ms=5.0, commit_ms=15.0, tokens_per_step=4.0)
    row, steps = row_of("dynamic", 0.0, 1, [{"off": off, "dynamic": own}])
    assert row.ceiling == pytest.approx(4.0 * 40 / (60 + 20)) and row.tpot_ratio == pytest.approx(2.0)
    assert row.step_gain == pytest.approx(4.0 * 50 / 100) and row.ceiling_share == pytest.approx(1.0)
    assert steps.row["outside_models"] == pytest.approx(20 / 100) and steps.row["total_ms"] == pytest.approx(100)
    assert row.same_tokens == 0 and row_of("off", 0.0, 1, [{"off": off}])[0].ceiling is None


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


def run(plan: type[harness.BenchmarkPlan], benchmark: object, quick: dict, *flags: str) -> int:
    """Run a benchmark with these flags, in this process; return its exit code."""
    with mock.patch.object(sys, "argv", ["bench", *flags]), pytest.raises(SystemExit) as end:
        harness.main(plan, benchmark, quick)
    return end.value.code


@pytest.fixture
def asked() -> list[harness.Run]:
    return []


def speed_of(asked: list[harness.Run], *flags: str) -> int:
    def benchmark(run: harness.Run) -> Report:
        asked.append(run)
        return Report(Path("x"), "done", {})

    benchmark.__module__ = "bench.speed"
    return run(SpeedPlan, benchmark, {"rounds": 2}, *flags)


def test_settings_are_flags(asked, capsys) -> None:
    flags = ["--contestants", "off, prompt-lookup", "--temperatures", "0", "0.7", "bundled:target"]
    assert speed_of(asked, *flags, "--cache", "x", "--chain", "3") == 0
    [(args, plan, prompts, output)] = asked
    assert plan.contestants == ("off", "prompt_lookup") and plan.temperatures == (0.0, 0.7)
    assert (plan.rounds, plan.chain, plan.cache, args.model) == (6, 3, "x", "bundled:target")
    assert (prompts, output) == (BUNDLED_PROMPTS, Path("results"))
    assert capsys.readouterr().out.startswith("# Done\n")


def test_quick_replaces_defaults_and_not_what_is_given(asked) -> None:
    assert speed_of(asked, "--quick") == speed_of(asked, "--quick", "--rounds", "4") == 0
    assert [found.plan.rounds for found in asked] == [2, 4]


def test_help_has_the_settings_their_defaults_and_the_modules_example(asked, capsys) -> None:
    assert speed_of(asked, "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Requests in flight. [1 4]" in shown and "Example: python -m bench.speed" in shown
    assert "--speculative-config" in shown


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--contestants", "off,warp"], "contestants.1: must be 'off', 'chain'"),
        (["--contestants", "dynamic"], "contestants: must include off, which all ratios refer to"),
        (["--batches", "0"], "batches.0: must be greater than or equal to 1"),
        (["--target-cost", "300M"], "target_cost: must be 300m, 8b or HIDDENxLAYERS such as 512x12"),
        (["--target-cost", "100x9"], "must be a multiple of 256 (got 100)"),
        (["--rownds", "3"], "there is no option --rownds (did you mean --rounds?)"),
    ],
)
def test_wrong_settings_are_reported_before_anything_is_loaded(flags, says, asked, capsys) -> None:
    assert speed_of(asked, *flags) == 2
    assert says in capsys.readouterr().err and asked == []


@pytest.mark.slow
def test_model_dependent_errors_are_reported_before_an_engine_starts(capsys, tmp_path) -> None:
    for flags, says in (
        (["--no-speculation"], "give --speculative-config"),
        (["-sc", '{"model": "org/x", "num_speculative_tokens": 4}'], "is what the benchmark varies"),
        (["--target-cost", "256x9", "-sc", '{"method": "ngram"}'], "--target-cost: scales a target and its EAGLE-3"),
        (["--target-cost", "256x4"], "number of layers is 8, a target of 256x4 has only 4"),
        (["--max-tokens", "4000"], "max_model_len is 2048"),
    ):
        assert run(SpeedPlan, speed.measure, {}, *flags, "--device", "cpu", "--output", str(tmp_path)) == 2
        assert says in capsys.readouterr().err
    assert not any(tmp_path.glob("*.json"))


def test_the_static_tree_assumes_falling_acceptance() -> None:
    assert list(CHAIN_ACCEPTANCE) == sorted(CHAIN_ACCEPTANCE, reverse=True)
    assert list(STAR_ACCEPTANCE.values()) == sorted(STAR_ACCEPTANCE.values())
    assert STAR_ACCEPTANCE[1] == CHAIN_ACCEPTANCE[0]


# -- real runs -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_comparison_on_a_cost_scaled_target(tmp_path, capsys) -> None:
    flags = ["--device", "cpu", "--target-cost", "256x9", "--output", str(tmp_path)]
    names = ("off", "dynamic", "auto", "generate", "assisted")
    few = {"contestants": names, "batches": (1, 2), "temperatures": (0.0,), "max_tokens": 16, "rounds": 2}
    few |= {"prompt_tokens": (900,), "shared": True}
    assert run(SpeedPlan, speed.measure, few, "--quick", *flags) == 0
    [file] = tmp_path.glob("*-speed-256x9.json")
    result = json.loads(file.read_text())
    assert result["about"]["target_cost"] == "256x9"
    rows = [SpeedRow(**row) for row in result["speed"]]
    assert [row.contestant for row in rows if row.batch == 1] == list(names)
    assert [row.contestant for row in rows if row.batch == 2] == list(names[:-1]), "assisted generation is for one"
    for row in rows:
        assert row.same_tokens == 1, f"{row.contestant}: greedy tokens are everybody's"
        assert row.tpot_ms > 0 and row.ttft_ms > 0 and row.tokens_per_second > 0 and row.tpot_ratio > 0
    alone = {row.contestant: row for row in rows if row.batch == 1}
    assert alone["generate"].step_gain is None and alone["off"].ceiling is None
    assert alone["dynamic"].tokens_per_step > 2 and alone["dynamic"].ceiling > 0
    [start] = result["start"]
    assert start["drafter"] == "dynamic" and start["predicted_gb"] > 0, "one engine, whose requests may want no drafts"
    assert [row["ttft_ms"] > 0 for row in result["first tokens"]] == [True] * len(names)
    steps = {row["contestant"]: row for row in result["a decoding step"] if row["batch"] == 1}
    assert set(steps) == {"off", "dynamic", "auto"} and steps["dynamic"]["draft_ms"] > 0
    assert capsys.readouterr().out.strip() == file.with_suffix(".md").read_text().strip()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_benchmark_that_is_terminated_keeps_its_rows(tmp_path: Path) -> None:
    flags = ["--contestants", "off", "--batches", *map(str, range(1, 17)), "--rounds", "3", "--device", "cpu"]
    command = [sys.executable, "-m", "bench.speed", *flags, "--output", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        assert any("batch 1, off" in line for line in process.stderr)
        process.terminate()
        process.communicate()
    [file] = tmp_path.glob("*-speed.json")
    rows = json.loads(file.read_text())["speed"]
    assert process.returncode != 0 and rows[0]["batch"] == 1 and len(rows) < 32


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_forwards_are_timed_by_rows_requests_and_context(tmp_path) -> None:
    few = {"rows": (1, 9), "batches": (1, 2), "contexts": (128, 256), "rounds": 1}
    threads = torch.get_num_threads()
    assert run(forward.ForwardPlan, forward.measure, few, "--quick", "--device", "cpu", "--output", str(tmp_path)) == 0
    assert torch.get_num_threads() == threads
    [file] = tmp_path.glob("*-forward.json")
    rows = json.loads(file.read_text())["forwards"]
    assert {(row["rows"], row["batch"], row["context"]) for row in rows} == {
        (r, b, c) for r in (1, 9) for b in (1, 2) for c in (128, 256)
    }
    assert all(row["ms"] > 0 and (row["rows"] > 1 or row["times_fewest_rows"] == 1) for row in rows)
