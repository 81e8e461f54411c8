"""`secateur bench step`: which steps count, its arguments, a quick run; and commands that have left the package."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from cluster.bench.breakdown import decoding_steps
from cluster.bench.runner import StatsSnapshot
from secateur import cli
from secateur.bench import StepPlan
from workers.comm.ipc import EngineStats

PARTS = ("draft", "transfer", "pack", "forward", "accept", "commit", "between")

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


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Return the calls of the measurement."""
    calls: list[tuple] = []
    stand_in = types.ModuleType("cluster.bench.step")
    stand_in.run = lambda *args, **more: calls.append((args, more)) or "done"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cluster.bench.step", stand_in)
    return calls


def test_step_reads_its_list_options(asked) -> None:
    assert cli.main(["bench", "step", "--nodes", "0", "8", "--rounds", "5"]) == 0
    [((_, plan, *_), _)] = asked
    assert (plan.nodes, plan.rounds, plan.batches) == ((0, 8), 5, StepPlan().batches)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--nodes", "99"], "nodes.0: must be less than or equal to 63"),
        (["--batches", "0"], "batches.0: must be greater than or equal to 1"),
        (["--no-speculation"], "give --speculative-config"),
        (["-sc", '{"model": "org/x", "num_speculative_tokens": 4}'], "is what the benchmark varies"),
    ],
)
def test_wrong_arguments_are_reported_before_anything_is_loaded(flags, says, asked, capsys) -> None:
    assert cli.main(["bench", "step", *flags]) == 2
    assert says in capsys.readouterr().err and asked == []


@pytest.mark.parametrize(
    ("command", "module"),
    [
        (["acceptance", "--temperatures", "0", "1"], "bench.acceptance"),
        (["latency"], "bench.speed"),
        (["throughput", "some/model", "--help"], "bench.speed"),
    ],
)
def test_commands_that_have_left_the_package_name_what_replaces_them(command, module, capsys) -> None:
    assert cli.main(["bench", *command]) == 2
    shown = capsys.readouterr()
    assert f"`python -m {module}`" in shown.err and shown.err.count("\n") == 1 and shown.out == ""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_step_benchmark(tmp_path: Path, capsys) -> None:
    assert cli.main(["bench", "step", "--quick", "--device", "cpu", "--output", str(tmp_path)]) == 0
    [file] = tmp_path.glob("*-step.json")
    steps = {(row["batch"], row["nodes"]): row for row in json.loads(file.read_text())["steps"]}
    assert set(steps) >= {(1, 0), (1, 8)}
    assert steps[1, 0]["draft_ms"] == 0 and steps[1, 0]["tokens_per_step"] == 1
    assert steps[1, 8]["draft_ms"] > 0 and 0 < steps[1, 8]["verified_per_step"] <= 8
    for row in steps.values():
        assert row["total_ms"] == pytest.approx(sum(row[f"{part}_ms"] for part in PARTS), rel=0.01)
    assert capsys.readouterr().out.strip() == file.with_suffix(".md").read_text().strip()
