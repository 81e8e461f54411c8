"""The arguments, files and output of `secateur plan`; and a small real profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.planner.report import run
from secateur import cli
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from secateur.plan import (
    HARDWARE,
    CostTable,
    LengthDistribution,
    PlanRequest,
    read_acceptance,
    read_costs,
    read_hardware,
    read_trace,
)

TABLE: dict[str, Any] = {
    "hardware": "a test",
    "verify": {"rows": [1, 64], "ms": [10, 30.5], "kv_token_ms": 0.001},
    "draft": {"requests": [1, 8], "nodes": [1, 16], "ms": [[1, 5], [2, 9]], "transfer_ms": [[1, 1], [1, 1]]},
    "host_ms": 1,
}


def write(path: Path, value: object) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def args(**fields: Any) -> EngineArgs:
    return EngineArgs.load(fields)


def answer(request: PlanRequest, **fields: Any) -> dict[str, Any]:
    return json.loads(run(args(**fields), request, as_json=True))


# -- the door --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--context", "64"], "--context: predicts from costs: add --costs FILE, --profile or --hardware NAME"),
        (["--batch", "1", "2"], "--batch: predicts from costs"),
        (["--hardware", "h100", "--profile"], "--hardware and --profile: each give the time of a step; keep one"),
        (["--hardware", "h1000"], "'h1000' is not known (did you mean 'h100'?)"),
        (["--costs", "/nowhere.json"], "--costs: cannot read /nowhere.json"),
        (["--hardware", "h100", "--costs-output", "x.json"], "--costs-output: needs --profile"),
        (["--profile", "--costs-output", "/nowhere/x.json"], "--costs-output: there is no folder /nowhere"),
        (["--profile", "--max-model-len", "100", "--context", "50"], "--max-model-len: a profile needs at least 192"),
        (["--hardware", "h100", "--replicas", "3"], "--replicas: describes a fleet under load: add --request-rate"),
        (["--hardware", "h100", "--nodes", "64"], "nodes: must be less than or equal to 63 (got 64)"),
        (["--hardware", "h100", "--batch", "0"], "batches.0: must be greater than or equal to 1 (got 0)"),
        (["--hardware", "h100", "--request-rate", "0"], "request_rate: must be greater than 0"),
        (["--hardware", "h100", "--request-rate", "1", "--prompt-tokens", "9-4"], "second number not less"),
        (["--hardware", "h100", "--request-rate", "1", "--output-tokens", "many"], "write 512, 64-512 or exp:512"),
        (["--hardware", "h100", "--context", "5000"], "--context: 5000 is more than max_model_len=2048"),
        (["--hardware", "h100", "--nodes", "17"], "--nodes: 17 is more than num_speculative_tokens=16; ask for less"),
        (["--hardware", "h100", "--device", "cpu"], "--hardware: describes a GPU, and the device is cpu"),
        (["--hardware", "h100", "--no-speculation", "--nodes", "4"], "--nodes: without a drafter there are no trees"),
        (["--hardware", "h100", "--request-rate", "1", "--prompt-tokens", "2000"], "have 2128 tokens, max_model_len"),
    ],
)
def test_wrong_arguments_are_one_message_and_exit_code_2(flags: list[str], says: str, capsys: Any) -> None:
    assert cli.main(["plan", *flags]) == 2
    shown = capsys.readouterr()
    assert says in shown.err and shown.out == ""


def test_a_trace_replaces_rate_and_lengths(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", '{"seconds": 1, "prompt_tokens": 4, "output_tokens": 2}')
    with pytest.raises(ConfigError, match="--num-requests, --prompt-tokens: come from the --trace"):
        PlanRequest(hardware=HARDWARE["h100"], trace=read_trace(trace), num_requests=3, prompt_tokens="4")
    assert PlanRequest(hardware=HARDWARE["h100"], trace=read_trace(trace), replicas=2).is_simulated


@pytest.mark.parametrize(
    ("text", "low", "high", "is_exponential"),
    [("512", 512, None, False), ("64-512", 64, 512, False), ("exp:90", 90, None, True)],
)
def test_lengths(text: str, low: int, high: int | None, is_exponential: bool) -> None:
    assert LengthDistribution.parse(text) == LengthDistribution(low=low, high=high, is_exponential=is_exponential)


@pytest.mark.parametrize("text", ["", "0", "-5", "5-", "5-4", "exp:", "exp:3-4", "log:5", "1.5", "exp5"])
def test_invalid_lengths_are_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"write 512, 64-512 or exp:512 tokens|must be at least 1"):
        LengthDistribution.parse(text)


# -- files -----------------------------------------------------------------------------------------------------------


def edited(**changes: Any) -> dict[str, Any]:
    return TABLE | {key: TABLE[key] | value if isinstance(value, dict) else value for key, value in changes.items()}


def test_a_cost_table_survives_writing_and_reading(tmp_path: Path) -> None:
    table = read_costs(write(tmp_path / "costs.json", TABLE))
    assert table.source == "given" and table.verify.ms == (10, 30.5)
    again = read_costs(write(tmp_path / "again.json", table.model_dump_json()))
    assert again == table


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("{", "not JSON"),
        (edited(verify={"rows": [1, 1]}), "verify.rows: must have at least one entry and rise"),
        (edited(verify={"ms": [10]}), "verify.ms: has 1 entries, rows has 2"),
        (edited(verify={"ms": [10, 9]}), "verify.ms: may never fall"),
        (edited(verify={"kv_ms": 1}), "unknown key 'kv_ms'"),
        (edited(draft={"ms": [[1, 2]]}), "draft.ms: must be 2 lines of 2"),
        (edited(draft={"kv_token_ms": [1]}), "draft.kv_token_ms: must have 2 entries"),
        (edited(draft={"nodes": [1, 64]}), "draft.nodes.1: must be less than or equal to 63"),
        (edited(host_ms=-1), "host_ms: must be greater than or equal to 0"),
        (edited(host="1"), "unknown key 'host'"),
        (TABLE | {"acceptance": {}}, "acceptance: give either points or probabilities"),
        ({}, "verify: is required"),
    ],
)
def test_an_invalid_cost_table_is_reported_by_file_and_field(table: object, says: str, tmp_path: Path) -> None:
    path = write(tmp_path / "costs.json", table)
    with pytest.raises(ConfigError) as error:
        read_costs(path)
    assert says in str(error.value) and f"--costs {path}" in str(error.value)


def test_hardware_is_a_name_or_a_file(tmp_path: Path) -> None:
    assert read_hardware("H100") is HARDWARE["h100"]
    mine = {"memory_gb": 10, "bandwidth_gbs": 100, "tflops": 5, "link_gbs": 1}
    assert read_hardware(str(write(tmp_path / "mine.json", mine))).tflops == 5
    with pytest.raises(ConfigError, match="memory_gb: must be greater than 0"):
        read_hardware(str(write(tmp_path / "none.json", mine | {"memory_gb": 0})))


def test_acceptance_may_be_probabilities_by_child(tmp_path: Path) -> None:
    path = write(tmp_path / "chances.json", {"probabilities": [[0.7, 0.2], [0.5]]})
    assert read_acceptance(path).probabilities == ((0.7, 0.2), (0.5,))
    for wrong, says in (
        ({"probabilities": [[1.2]]}, "less than or equal to 1"),
        ({"probabilities": [[]]}, "at least one child"),
        ([{"tree": "chain"}], "not rows of `secateur bench acceptance`"),
        ([], "give either points or probabilities"),
    ):
        with pytest.raises(ConfigError, match=says):
            read_acceptance(write(tmp_path / "wrong.json", wrong))


def test_a_trace_is_sorted_and_checked_line_by_line(tmp_path: Path) -> None:
    line = '{{"seconds": {}, "prompt_tokens": 4, "output_tokens": 2}}\n'
    trace = read_trace(write(tmp_path / "t.jsonl", line.format(3) + "\n" + line.format(1.5)))
    assert [arrival.seconds for arrival in trace] == [1.5, 3]
    for text, says in (("", "no arrivals"), (line.format(1) + "{", "line 2: not JSON"), (line.format(-1), "line 1")):
        with pytest.raises(ConfigError, match=says):
            read_trace(write(tmp_path / "wrong.jsonl", text))


# -- the answer ------------------------------------------------------------------------------------------------------


def test_without_costs_plan_shows_the_topology_alone() -> None:
    text = run(args(), PlanRequest())
    assert "bundles  2, STRICT_PACK" in text and "costs" not in text
    assert list(answer(PlanRequest())) == ["topology"]


def test_predictions_use_the_given_table() -> None:
    found = answer(PlanRequest(costs=CostTable.load(TABLE), batches=(4, 1), context=100, nodes=16))
    assert [line["on"]["batch"] for line in found["batches"]] == [1, 4]
    one = found["batches"][0]
    verify = 10 + 20.5 * 16 / 63 + 0.1
    assert one["on"]["step_ms"] == pytest.approx(verify + 5 + 1 + 1)
    assert one["off"]["step_ms"] == pytest.approx(10 + 0.1 + 1)
    assert one["speedup"] == pytest.approx(one["on"]["tokens_per_second"] / one["off"]["tokens_per_second"])
    assert (one["on"]["devices"], one["off"]["devices"]) == (2, 1)
    assert found["acceptance"] == "typical, not measured" and found["fleet"] is None


def test_without_a_size_the_best_of_the_table_s_is_chosen() -> None:
    table = CostTable.load(TABLE)
    chosen = answer(PlanRequest(costs=table, batches=(1, 32)))["batches"]
    for line in chosen:
        fixed = [
            answer(PlanRequest(costs=table, batches=(line["on"]["batch"],), nodes=n))["batches"][0]["on"]
            for n in (1, 4, 9, 16)
        ]
        assert line["on"]["tokens_per_second"] >= max(one["tokens_per_second"] for one in (*fixed, line["off"]))
        assert line["on"]["nodes"] <= 16
    assert chosen[0]["on"]["nodes"] >= chosen[1]["on"]["nodes"]


def test_memory_bounds_the_batch() -> None:
    tiny = HARDWARE["l4"].model_copy(update={"memory_gb": 0.86, "name": "tiny"})
    found = answer(PlanRequest(hardware=tiny, batches=(1, 64), context=512))
    assert found["max_batch"] < 64 and found["max_batch_reason"].startswith("memory: ")
    assert [line["off"]["batch"] for line in found["batches"]] == [1, found["max_batch"]]
    assert found["max_batch"] == found["kv_pages"] // (-(-(512 + 17) // 16))


def test_plan_refuses_with_the_engine_s_words_what_the_engine_refuses() -> None:
    """Requests of `--context` would fit, but one of max_model_len does not."""
    small = HARDWARE["l4"].model_copy(update={"memory_gb": 0.84, "name": "small"})
    assert answer(PlanRequest(hardware=small, context=256), max_model_len=256)["max_batch"] >= 1
    with pytest.raises(ConfigError, match=r"small: the KV cache has room for .* max_model_len 2048 needs"):
        answer(PlanRequest(hardware=small, context=256))
    with pytest.raises(ConfigError, match="room for 0 pages"):
        answer(PlanRequest(hardware=small.model_copy(update={"memory_gb": 0.25})))


@pytest.mark.parametrize(("configured", "best"), [(2, 2), (8, 8), (16, 16)])
def test_no_more_nodes_are_predicted_than_are_configured(configured: int, best: int) -> None:
    spec = {"method": "eagle3", "model": "bundled:eagle3", "num_speculative_tokens": configured}
    found = answer(PlanRequest(hardware=HARDWARE["h100"], batches=(1,)), speculative_config=spec)
    assert found["batches"][0]["on"]["nodes"] == best


def test_predictions_from_published_figures_are_marked() -> None:
    text = run(args(), PlanRequest(hardware=HARDWARE["h100"], batches=(1,)))
    assert "PREDICTED for h100 from published figures and assumptions; nothing was measured" in text
    assert "dedicated 2 devices" in text and "colocated 1 devices" in text


def test_a_fleet_is_simulated_and_the_same_for_the_same_seed() -> None:
    request = PlanRequest(
        hardware=HARDWARE["h100"], request_rate=200.0, num_requests=500, replicas=3, prompt_tokens="exp:300"
    )
    first, again = (answer(request, seed=7)["fleet"] for _ in range(2))
    assert first == again != answer(request, seed=8)["fleet"]
    assert (first["replicas"], first["devices"], first["requests"]) == (3, 6, 500)
    assert 0 < first["utilisation"] <= 1
    assert set(first["seconds_of"]) == {"TTFT", "TPOT", "E2E"}
    assert first["seconds_of"]["E2E"]["p50"] <= first["seconds_of"]["E2E"]["p99"]
    assert "fleet    3 replicas, 6 devices; 500 requests" in run(args(seed=7), request)


@pytest.mark.slow
def test_a_small_profile_of_a_real_engine_becomes_a_table(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("cluster.planner.forecast.PROFILE_ROUNDS", 1)
    path = tmp_path / "costs.json"
    spec = '{"model": "bundled:eagle3", "num_speculative_tokens": 1}'
    command = ["plan", "-sc", spec, "--max-model-len", "200", "--profile", "--batch", "1", "--context", "100"]
    assert cli.main([*command, "--costs-output", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    table = read_costs(path)
    assert table.source == "measured" and table.draft is not None and table.acceptance is not None
    assert table.verify.ms[-1] > 0 and table.verify.request_ms == 0
    assert 0.3 < table.acceptance.points[0].accepted <= 1
    assert found["costs"] == table.model_dump(mode="json")
    off, on = found["batches"][0]["off"], found["batches"][0]["on"]
    assert off["step_ms"] > 0 and on["nodes"] in (0, 1)
    # What was written predicts the same without a profile.
    assert answer(PlanRequest(costs=table, batches=(1,), context=100), max_model_len=200)["batches"] == found["batches"]
