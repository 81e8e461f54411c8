"""Where an answer ends and what is counted of it, without a service."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock, call

import pytest

import secateur
from cluster.observe import answer_record
from cluster.observe.answer_record import AnswerRecord
from cluster.observe.metrics import Metrics, RequestTimes, descriptions
from cluster.openai.openai_format import total_usage
from cluster.openai.output_processor import Generation
from cluster.text.tokenizer import Tokenizer
from tests.support.fake_engine import StandingClock
from workers.comm.ipc import EngineStats, RequestStats, Submit, TokenChunk
from workers.settings import Constraints, SamplingSettings

COMMON = {"model_name": "model", "replica": "replica"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(Path(secateur.__file__).parent / "bundled" / "target"))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("model", "replica", EngineStats)


def generation(tokenizer: Tokenizer, *prompt: int, min_tokens: int = 0, number: int = 0, stop: str = "") -> Generation:
    sampling = SamplingSettings(constraints=Constraints(min_tokens=min_tokens))
    submit = Submit(id=1, prompt=list(prompt), max_tokens=99, sampling=sampling)
    stops = (stop,) if stop else ()
    return Generation(submit=submit, tokenizer=tokenizer, number=number, stop=stops)


@pytest.mark.parametrize("size", [1, 3, 99])
def test_a_stop_string_ends_an_answer_only_behind_its_first_min_tokens_tokens(tokenizer: Tokenizer, size: int) -> None:
    ids = tokenizer.encode("def f(x):\n    return x\n", add_special_tokens=False)
    complete = next(n for n in range(len(ids)) if ":" in tokenizer.decode(ids[:n]))
    for min_tokens, ends in ((complete - 1, "stop"), (complete, None), (complete + 1, None)):
        own = generation(tokenizer, 1, min_tokens=min_tokens, stop=":")
        for start in range(0, len(ids), size):
            delta = own.process(TokenChunk(id=1, tokens=ids[start : start + size]))
            if delta.finish_reason:
                break
        assert delta.finish_reason == ends, min_tokens
        assert own.token_ids == (ids[:complete] if ends else ids)


def test_a_prompt_and_what_the_cache_held_of_it_count_once_and_every_answer_counts(tokenizer: Tokenizer) -> None:
    answered = [
        generation(tokenizer, *prompt, number=number) for prompt in ([1, 2, 3], [4, 5, 6, 7, 8]) for number in range(3)
    ]
    for own in answered:
        stats = RequestStats(num_drafts=1, verified_per_depth=[3, 2], accepted_per_depth=[1, 1])
        cached = len(own.submit.prompt) - 1
        own.process(TokenChunk(id=1, tokens=[300, 301, 302], num_accepted=2, num_cached_tokens=cached, stats=stats))
    usage = total_usage(answered)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (8, 18, 26)
    assert usage.prompt_tokens_details.cached_tokens == 6
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (12, 18)


@pytest.mark.parametrize(("num_tokens", "mean_s"), [(1, None), (2, 6.0), (4, 2.0)])
def test_the_time_per_output_token_is_that_of_the_tokens_behind_the_first(
    metrics: Metrics, num_tokens: int, mean_s: float | None
) -> None:
    times = RequestTimes(submitted=0.5, scheduled=1.0, first_token=2.0, last_token=8.0, end=9.0)
    metrics.observe_finished("length", times, prompt_tokens=5, generation_tokens=num_tokens, max_tokens=7)
    found = {
        name: metrics.registry.get_sample_value(f"secateur_{name}_sum", COMMON)
        for name in (
            "time_to_first_token_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
            "request_inference_time_seconds", "e2e_request_latency_seconds", "request_prompt_tokens",
            "request_generation_tokens", "request_params_max_tokens", "request_time_per_output_token_seconds",
        )
    }  # fmt: skip
    assert list(found.values()) == [2.0, 1.0, 6.0, 7.0, 9.0, 5, num_tokens, 7, mean_s]
    ended = {
        reason: metrics.registry.get_sample_value(
            "secateur_request_success_total", COMMON | {"finished_reason": reason}
        )
        for reason in ("stop", "length", "abort", "error")
    }
    assert ended == {"stop": 0, "length": 1, "abort": 0, "error": 0}


@pytest.mark.parametrize(
    ("steps", "times", "gaps"),
    [
        (None, RequestTimes(end=4.0), []),
        ([], RequestTimes(submitted=1.0, end=5.0), []),
        ([[]], RequestTimes(submitted=1.0, scheduled=1.5, end=7.0), []),
        ([[5]], RequestTimes(submitted=1.0, scheduled=1.5, first_token=3.0, last_token=3.0, end=7.0), [None]),
        (
            [[], [5, 6], [7, 8], []],
            RequestTimes(submitted=1.0, scheduled=1.5, first_token=5.0, last_token=7.0, end=13.0),
            [None, None, 2.0, None],
        ),
    ],
)
def test_an_answer_s_times_are_those_of_its_steps(
    monkeypatch: pytest.MonkeyPatch, steps: list[list[int]] | None, times: RequestTimes, gaps: list[float | None]
) -> None:
    """Each token is returned alone, as where a stream goes on in the middle of a step."""
    monkeypatch.setattr(answer_record, "time", clock := StandingClock())
    metrics, trace = MagicMock(), MagicMock()
    submit = Submit(id=1, prompt=[1, 2], max_tokens=9)
    record = AnswerRecord(submit, "mine", clock.now, metrics, trace=trace)
    if steps is not None:
        clock.now += 1
        record.submitted(pays_for_prompt=True)
    for tokens in steps or ():
        clock.now += 2
        record.arrived(TokenChunk(id=1, tokens=tokens, queued_s=0.5))
        for _ in tokens:
            record.returned(1, 0, None, is_copied=False)
    clock.now += 4
    for reason in ("error", "abort"):
        record.ended(reason)
    lengths = {"prompt_tokens": 2, "generation_tokens": len(gaps), "max_tokens": 9}
    assert metrics.observe_finished.call_args_list == [call("error", times, **lengths)]
    assert [each.kwargs["gap_s"] for each in metrics.observe_tokens.call_args_list] == gaps
    assert metrics.observe_queued.call_args_list == [call(0.5)] * bool(steps)
    attributes = {
        "gen_ai.request.id": "mine",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": len(gaps),
    }
    assert trace.record.call_args_list == [call("error", times, attributes)]


def test_metrics_are_described_as_they_are_exported(metrics: Metrics) -> None:
    metrics.observe_http("GET", "/health", 200, 0.5)
    exported = {family.name: (family.type, family.documentation) for family in metrics.registry.collect()}
    described = {each.name: (each.kind, each.text) for each in descriptions()}
    assert len(described) > 40 and described.items() - exported.items() == set()
