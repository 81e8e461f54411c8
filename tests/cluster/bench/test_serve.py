"""`secateur bench serve`: metrics of known streams, arrivals, modes, and a quick load on a real service."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.bench import serve
from cluster.bench.serve import LoadRow, RequestResult, row_of
from cluster.text.tokenizer import Tokenizer
from secateur import cli
from secateur.bench import ServePlan
from secateur.errors import SecateurError
from secateur.prompts import BUNDLED_PROMPTS, BenchPrompt
from tests.support.fake_service import FakeService, fake_service

PLAN = ServePlan(goodput_ttft_ms=200.0, goodput_tpot_ms=100.0)


def outcome(first: float, each: float, tokens: int = 5) -> RequestResult:
    gaps = [each] * (tokens - 1)
    return RequestResult(num_prompt=7, num_tokens=tokens, first_seconds=first, seconds=first + sum(gaps), gaps=gaps)


def test_latency_metrics_are_defined_as_in_vllm() -> None:
    outcomes = [outcome(0.1, 0.05), outcome(0.3, 0.05), outcome(0.1, 0.2), RequestResult(error="503")]
    row = row_of("speculation", "4 clients", outcomes, 2.0, PLAN)
    assert (row.num_requests, row.num_failed, row.input_tokens, row.output_tokens) == (3, 1, 21, 15)
    assert row.requests_per_second == 1.5 and row.tokens_per_second == 7.5
    assert row.goodput == 0.5, "one waited too long for its first token, one for the others"
    assert row.ttft_ms["mean"] == pytest.approx(500 / 3, abs=1e-3) and row.ttft_ms["p50"] == 100.0
    assert row.tpot_ms["p50"] == pytest.approx(50.0) and row.e2e_ms["p99"] == pytest.approx(892)  # of 300, 500, 900


def test_percentiles_equal_numpys() -> None:
    rng = np.random.default_rng(0)
    firsts = rng.random(37)
    row = row_of("m", "l", [outcome(float(first), 0.1) for first in firsts], 1.0, ServePlan())
    for percent in (50, 90, 99):
        assert row.ttft_ms[f"p{percent}"] == pytest.approx(1e3 * np.percentile(firsts, percent), abs=1e-3)
    assert row.goodput is None


def test_a_chunk_of_several_tokens_counts_once_per_token() -> None:
    stream = RequestResult(num_prompt=1, num_tokens=9, first_seconds=0.1, seconds=0.5, gaps=[0.2, 0.2])
    row = row_of("m", "l", [stream], 1.0, ServePlan())
    assert row.tpot_ms["p50"] == pytest.approx(50.0) and row.itl_ms["p50"] == pytest.approx(200.0)


def test_a_load_without_any_answer_raises_the_requests_error() -> None:
    with pytest.raises(SecateurError, match="none of 2 requests was answered: connection refused"):
        row_of("m", "l", [RequestResult(error="connection refused")] * 2, 1.0, ServePlan())


def test_arrivals_follow_the_rate_and_repeat_with_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def ask(*_: object) -> RequestResult:
        return outcome(0.1, 0.1)

    monkeypatch.setattr(serve.asyncio, "sleep", sleep)
    monkeypatch.setattr(serve, "_ask", ask)
    client = serve._Client("http://127.0.0.1:1", None, {"seed": 0, "cache_salt": ""})
    asked = [BenchPrompt("a", None)] * 4000
    assert len(asyncio.run(serve._open_loop(client, asked, 50.0, 3))) == 4000
    first, waits[:] = list(waits), []
    asyncio.run(serve._open_loop(client, asked, 50.0, 3))
    assert waits == first and np.mean(first) == pytest.approx(1 / 50, rel=0.1)
    assert np.std(first) == pytest.approx(1 / 50, rel=0.1), "as exponential gaps have it"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Return the calls of the measurement."""
    calls: list[tuple] = []
    stand_in = types.ModuleType("cluster.bench.serve")
    stand_in.run = lambda *args, **more: calls.append((args, more)) or "done"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cluster.bench.serve", stand_in)
    return calls


def test_a_running_service_is_not_compared_by_default(asked) -> None:
    assert cli.main(["bench", "serve", "--base-url", "http://h:1", "--model", "m", "--request-rate", "1", "4"]) == 0
    assert cli.main(["bench", "serve", "--concurrency", "2"]) == 0
    ((args, plan, *_), more), ((own, other, *_), _) = asked
    assert args is None and not plan.compare and plan.request_rates == (1.0, 4.0) and more["model"] == "m"
    assert own.port == 0 and other.compare and other.concurrency == (2,)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--base-url", "h:1"], "base_url: must begin with http://"),
        (["--base-url", "http://h:1", "--dtype", "float32"], "--dtype: for a service started here"),
        (["--concurrency", "2", "--request-rate", "1"], "two kinds of load; give one of them"),
        (["--request-rate", "0"], "request_rates.0: must be greater than 0"),
        (["--concurrency", "0"], "concurrency.0: must be greater than or equal to 1"),
        (["--goodput-tpot-ms", "0"], "goodput_tpot_ms: must be greater than 0"),
        (["--max-tokens", "1"], "max_tokens: must be greater than or equal to 2"),
    ],
)
def test_wrong_arguments_are_reported_before_anything_is_loaded(flags, says, asked, capsys) -> None:
    assert cli.main(["bench", "serve", *flags]) == 2
    assert says in capsys.readouterr().err and asked == []


# -- a service that runs already -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running() -> Iterator[FakeService]:
    """A service named fake-model whose answers have three tokens."""
    tokenizer = Tokenizer(str(BUNDLED_PROMPTS.parent / "target"))
    ids = [*tokenizer.encode("x = 1"), 0]
    with tempfile.TemporaryDirectory() as folder, fake_service(tokenizer, Path(folder), lambda _: [ids]) as service:
        yield service


def bench_serve(service: FakeService, output: Path, *flags: str) -> dict[str, Any]:
    """Return the content of the newest report."""
    before = set(output.glob("*.json"))
    assert cli.main(["bench", "serve", "--base-url", service.url, "--quick", "--output", str(output), *flags]) == 0
    [file] = set(output.glob("*.json")) - before
    return json.loads(file.read_text())


def test_the_report_of_a_running_service_leaves_out_unknown_settings(running, tmp_path, capsys) -> None:
    result = bench_serve(running, tmp_path)
    assert {row["mode"] for row in result["rows"]} == {"as served"}
    about = result["about"]
    assert about["model"] == "fake-model" and about["service"] == running.url
    assert "the service's is not known" in about["hardware"] and not {"target", "speculative_config"} & about.keys()
    shown = capsys.readouterr().out
    assert "- model: fake-model\n" in shown and "| as served | 1 clients | 6 | 0 |" in shown
    assert "None" not in shown and "| speculation |" not in shown


def test_the_report_may_be_printed_as_json(running, tmp_path, capsys) -> None:
    result = bench_serve(running, tmp_path, "--concurrency", "1", "--json")
    assert json.loads(capsys.readouterr().out) == result and result["rows"]


def test_a_running_service_may_be_compared_with_itself_without_speculation(running, tmp_path) -> None:
    result = bench_serve(running, tmp_path, "--compare", "--model", "fake-model", "--concurrency", "2")
    assert [row["mode"] for row in result["rows"]] == ["as served", "no speculation"]
    assert result["about"]["model"] == "fake-model"


def test_a_second_report_of_the_same_day_gets_a_new_name(running, tmp_path) -> None:
    bench_serve(running, tmp_path, "--concurrency", "1")
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    bench_serve(running, tmp_path, "--concurrency", "2")
    bench_serve(running, tmp_path, "--concurrency", "3")
    assert {name: (tmp_path / name).read_bytes() for name in first} == first
    endings = sorted(path.name.partition("-serve")[2] for path in tmp_path.iterdir())
    assert endings == ["-2.json", "-2.md", "-3.json", "-3.md", ".json", ".md"]


def test_an_unreachable_service_is_one_error_and_writes_no_report(tmp_path, capsys) -> None:
    flags = ["--base-url", "http://127.0.0.1:9", "--quick", "--output", str(tmp_path / "results")]
    assert cli.main(["bench", "serve", *flags]) == 1
    assert "no answer from http://127.0.0.1:9" in capsys.readouterr().err
    assert not list(tmp_path.glob("results/*"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_load_on_a_real_service(tmp_path, capsys) -> None:
    flags = ["--quick", "--device", "cpu", "--request-rate", "20", "--output", str(tmp_path)]
    assert cli.main(["bench", "serve", *flags]) == 0
    [file] = tmp_path.glob("*-serve.json")
    rows = [LoadRow(**row) for row in json.loads(file.read_text())["rows"]]
    assert [(row.load, row.mode) for row in rows] == [
        ("20 requests/s", "speculation"),
        ("20 requests/s", "no speculation"),
    ]
    for row in rows:
        assert (row.num_requests, row.num_failed, row.output_tokens) == (6, 0, 6 * 16)
        assert 0 < row.ttft_ms["p50"] <= row.e2e_ms["p50"] <= row.e2e_ms["p99"]
    assert rows[0].itl_ms["p50"] > 0
    [report] = tmp_path.glob("*.md")
    assert capsys.readouterr().out.strip() == report.read_text().strip()
