"""The arguments, files and output of `secateur plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.convert import engine_config
from cluster.planner.memory import model_shards
from cluster.planner.report import run
from cluster.planner.roofline import step_time
from secateur import cli
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from secateur.plan import HARDWARE, Hardware, PlanRequest, read_hardware

SLOW = Hardware(name="slow", memory_gb=10, bandwidth_gbs=100, tflops=0.4, link_gbs=1)
"""Where a row costs a noticeable part of a step."""


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
        (["--context", "64"], "--context: belongs to a prediction; add --hardware NAME"),
        (["--batch", "1", "2"], "--batch: belongs to a prediction"),
        (["--acceptance", "0.7", "0.2"], "--acceptance: belongs to a prediction"),
        (["--hardware", "h1000"], "'h1000' is not known (did you mean 'h100'?)"),
        (["--hardware", "/nowhere.json"], "--hardware: cannot read /nowhere.json"),
        (["--hardware", "h100", "--nodes", "64"], "nodes: must be less than or equal to 63 (got 64)"),
        (["--hardware", "h100", "--batch", "0"], "batches.0: must be greater than or equal to 1 (got 0)"),
        (["--hardware", "h100", "--acceptance", "1.2"], "acceptance.0: must be less than or equal to 1 (got 1.2)"),
        (["--hardware", "h100", "--acceptance", "0.8", "0.4"], "these add up to at most 1 (got 1.2)"),
        (["--hardware", "h100", "--context", "5000"], "--context: 5000 is more than max_model_len=2048"),
        (["--hardware", "h100", "--nodes", "17"], "--nodes: 17 is more than num_speculative_tokens=16; ask for less"),
        (["--hardware", "h100", "--device", "cpu"], "--hardware: describes a GPU, and the device is cpu"),
        (["--hardware", "h100", "--no-speculation", "--nodes", "4"], "--nodes: without a drafter there are no trees"),
        (["--hardware", "h100", "--no-speculation", "--acceptance", "1"], "--acceptance: without a drafter there are"),
    ],
)
def test_wrong_arguments_are_one_message_and_exit_code_2(flags: list[str], says: str, capsys: Any) -> None:
    assert cli.main(["plan", *flags]) == 2
    shown = capsys.readouterr()
    assert says in shown.err and shown.out == ""


# -- files -----------------------------------------------------------------------------------------------------------


def test_hardware_is_a_name_or_a_file(tmp_path: Path) -> None:
    assert read_hardware("H100") is HARDWARE["h100"]
    mine = {"memory_gb": 10, "bandwidth_gbs": 100, "tflops": 5, "link_gbs": 1}
    assert read_hardware(str(write(tmp_path / "mine.json", mine))).tflops == 5
    with pytest.raises(ConfigError, match="not JSON"):
        read_hardware(str(write(tmp_path / "broken.json", "{")))
    with pytest.raises(ConfigError, match="memory_gb: must be greater than 0"):
        read_hardware(str(write(tmp_path / "none.json", mine | {"memory_gb": 0})))


# -- the answer ------------------------------------------------------------------------------------------------------


def test_without_costs_plan_shows_the_topology_alone() -> None:
    text = run(args(), PlanRequest())
    assert "bundles  2, STRICT_PACK" in text and "costs" not in text
    assert list(answer(PlanRequest())) == ["topology"]


def test_a_prediction_is_the_rooflines_step_and_the_given_acceptance() -> None:
    found = answer(PlanRequest(hardware=SLOW, batches=(4, 1), context=100, nodes=16, acceptance=(0.5,)))
    assert [line["on"]["batch"] for line in found["batches"]] == [1, 4]
    config = engine_config(args(device="cuda"))
    for line in found["batches"]:
        batch, on, off = line["on"]["batch"], line["on"], line["off"]
        assert on["tokens_per_step"] == pytest.approx(sum(0.5**depth for depth in range(9)))  # of depth 8
        for one, nodes in ((on, 16), (off, 0)):
            step = step_time(config, model_shards(config), SLOW, batch, nodes, 100)
            assert one["step_ms"] == pytest.approx(step.ms)
            assert one["tokens_per_second"] == pytest.approx(1e3 * batch * one["tokens_per_step"] / step.ms)
        assert on["tokens_per_second_per_device"] == pytest.approx(on["tokens_per_second"] / 2)
        assert on["tokens_per_second_per_request"] == pytest.approx(on["tokens_per_second"] / batch)
        assert line["speedup"] == pytest.approx(on["tokens_per_second"] / off["tokens_per_second"])
        assert (on["devices"], off["devices"]) == (2, 1)
    assert found["acceptance"] == "as given"


def test_without_a_size_the_best_of_all_is_chosen() -> None:
    lines = answer(PlanRequest(hardware=SLOW, batches=(1, 8, 64)))["batches"]
    for line in lines:
        fixed = [
            answer(PlanRequest(hardware=SLOW, batches=(line["on"]["batch"],), nodes=n))["batches"][0]["on"]
            for n in range(0, 17, 2)
        ]
        assert line["on"]["tokens_per_second"] >= max(one["tokens_per_second"] for one in (*fixed, line["off"]))
    sizes = [line["on"]["nodes"] for line in lines]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]  # the fuller, the smaller the trees


def test_memory_bounds_the_batch() -> None:
    tiny = HARDWARE["l4"].model_copy(update={"memory_gb": 0.9, "name": "tiny"})
    found = answer(PlanRequest(hardware=tiny, batches=(1, 64), context=512))
    assert found["max_batch"] < 64 and found["max_batch_reason"].startswith("memory: ")
    assert [line["off"]["batch"] for line in found["batches"]] == [1, found["max_batch"]]
    assert found["max_batch"] == found["kv_pages"] // (-(-(512 + 17) // 16))


def test_plan_refuses_with_the_engine_s_words_what_the_engine_refuses() -> None:
    """Requests of `--context` would fit, but one of max_model_len does not."""
    small = HARDWARE["l4"].model_copy(update={"memory_gb": 0.87, "name": "small"})
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
