"""The conversion of a request to the engine's Submits: limits, seeds, constraints, speculation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.errors import BadRequest
from cluster.openai.request_params import RequestLimits, SeedSource, build_submits, derive_seed, ineffective_settings
from secateur.requests import ChatCompletionRequest, CompletionRequest, SamplingRequest
from secateur.responses_api import ResponsesRequest
from secateur.speculative import Speculative
from tests.support.fake_service import CONFIG
from workers.comm.ipc import Speculation, Submit
from workers.settings import Constraints

LIMITS = RequestLimits(config=replace(CONFIG, eos_token_ids=(0,)), max_model_len=100, vocab_size=50)


def first_submit(
    request: SamplingRequest, prompt: list[int], *, limits: RequestLimits = LIMITS, bad_words: Any = ()
) -> Submit:
    return build_submits(request, prompt, ids=[1], seed=5, limits=limits, bad_words=bad_words)[0]


def submit(prompt_length: int = 1, *, bad_words: Any = (), **fields: Any) -> Submit:
    request = CompletionRequest(prompt="x", **fields)
    return first_submit(request, [1] * prompt_length, bad_words=bad_words)


def test_without_a_drafter_the_rule_is_coupled() -> None:
    limits = replace(LIMITS, config=replace(CONFIG, draft=None))
    asked = Speculative(enable_draft_probs=True)
    assert ineffective_settings(asked, limits) == ["speculative.enable_draft_probs"]
    assert ineffective_settings(Speculative(), limits) == []


def test_only_an_explicit_length_can_exceed_the_context() -> None:
    prompt = [1] * 95
    for fields in ({}, {"max_tokens": 5}, {"max_completion_tokens": 5}):
        assert first_submit(CompletionRequest(prompt="x", **fields), prompt).max_tokens == 5
    with pytest.raises(BadRequest, match="ask for at most 5"):
        first_submit(CompletionRequest(prompt="x", max_tokens=6), prompt)


def test_the_last_tokens_of_a_prompt_are_kept() -> None:
    prompt = list(range(50)) * 4

    def kept(**fields: Any) -> list[int]:
        return first_submit(CompletionRequest(prompt="x", **fields), prompt).prompt

    assert kept(truncate_prompt_tokens=3) == [47, 48, 49]
    assert kept(truncate_prompt_tokens=84) == prompt[-84:]
    assert kept(truncate_prompt_tokens=-1) == prompt[-84:]  # 16 are left for the answer, OpenAI's default
    assert kept(truncate_prompt_tokens=-1, max_tokens=70) == prompt[-30:]
    assert kept(truncate_prompt_tokens=-1, max_completion_tokens=99, max_tokens=5) == prompt[-1:]
    chat = {"messages": [{"role": "user", "content": "x"}], "truncate_prompt_tokens": -1}
    assert first_submit(ChatCompletionRequest.model_validate(chat), prompt).prompt == prompt[-99:]
    assert first_submit(ChatCompletionRequest.model_validate(chat), [7]).prompt == [7]
    assert kept(truncate_prompt_tokens=3, truncation_side="right") == [0, 1, 2]
    assert kept(truncate_prompt_tokens=3, truncation_side="left") == [47, 48, 49]
    assert kept(truncate_prompt_tokens=-1, truncation_side="right", max_tokens=70) == prompt[:30]


def test_a_priority_needs_a_service_that_serves_by_priority() -> None:
    urgent = CompletionRequest(prompt="x", priority=-3)
    assert (
        first_submit(urgent, [1], limits=replace(LIMITS, config=replace(CONFIG, scheduling_policy="priority"))).priority
        == -3
    )
    with pytest.raises(BadRequest, match="--scheduling-policy priority") as refused:
        first_submit(urgent, [1])
    assert refused.value.param == "priority"
    assert submit(priority=0).priority == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 101}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 90, "max_tokens": 11}, "max_tokens"),
        ({"truncate_prompt_tokens": 100}, "prompt"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 100}, "max_tokens"),
    ],
)
def test_a_truncated_prompt_must_leave_room(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        submit(200, **fields)
    assert caught.value.param == param


def test_a_chats_default_length_is_cut_to_the_context() -> None:
    limits = replace(LIMITS, default_max_tokens=30)

    def length(prompt_length: int = 1, **fields: Any) -> int:
        request = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})
        return first_submit(request, [1] * prompt_length, limits=limits).max_tokens

    assert (length(), length(95), length(max_tokens=40), length(max_completion_tokens=50)) == (30, 5, 40, 50)
    assert length(min_tokens=30) == 30
    assert first_submit(CompletionRequest(prompt="x"), [1], limits=limits).max_tokens == 16
    with pytest.raises(
        BadRequest, match="min_tokens=31 is more than max_tokens=30, this model's default; write max"
    ) as caught:
        length(min_tokens=31)
    assert caught.value.param == "min_tokens"


def test_max_completion_tokens_overrides_max_tokens() -> None:
    """`max_tokens` is deprecated, and clients send both."""
    message = {"messages": [{"role": "user", "content": "x"}]}
    for newer, older in ((5, 9), (9, 5)):
        request = ChatCompletionRequest.model_validate(message | {"max_completion_tokens": newer, "max_tokens": older})
        assert first_submit(request, [1]).max_tokens == newer
    request = ChatCompletionRequest.model_validate(message | {"max_completion_tokens": 100, "max_tokens": 5})
    with pytest.raises(BadRequest, match="max_completion_tokens=100") as caught:
        first_submit(request, [1])
    assert caught.value.param == "max_completion_tokens"


def test_fields_that_a_client_makes_up_do_not_reach_the_engine() -> None:
    made_up = {"resumption": {"output": [1]}, "grammar": "start: /a/", "constraints": 1, "sampling": 1}
    assert submit(**made_up) == submit()


def test_a_cache_salt_is_passed_on_and_must_not_be_empty() -> None:
    assert submit().cache_salt is None and submit(cache_salt="tenant 1").cache_salt == "tenant 1"
    with pytest.raises(ValueError, match="cache_salt"):
        submit(cache_salt="")


@pytest.mark.parametrize(("asked", "engine_s"), [(-1, 0), (0, 0), (1, 1), (49, 49), (50, 0), (2**31, 0), (10**30, 0)])
def test_top_k_is_off_if_it_keeps_every_token(asked: int, engine_s: int) -> None:
    assert submit(top_k=asked).sampling.top_k == engine_s


def test_a_request_s_own_seed_wins() -> None:
    assert first_submit(CompletionRequest(prompt="x"), [1]).sampling.seed == 5
    assert first_submit(CompletionRequest(prompt="x", seed=0), [1]).sampling.seed == 0


@pytest.mark.parametrize("fields", [{}, {"seed": 7}])
def test_the_first_answer_has_the_request_s_seed_and_the_others_derived_ones(fields: dict[str, int]) -> None:
    request = CompletionRequest(prompt="x", n=3, logprobs=2, **fields)
    first, *others = build_submits(request, [1], ids=[10, 11, 12], seed=5, limits=LIMITS)
    base = fields.get("seed", 5)
    assert (first.id, first.sampling.seed, len(others)) == (10, base, 2)
    for number, other in enumerate(others, start=1):
        assert (other.id, other.sampling.seed) == (10 + number, derive_seed(base, number))
        assert replace(other, id=10, sampling=replace(other.sampling, seed=base)) == first


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, Speculation()),
        ({"tree_prune": "off"}, Speculation(auto=False, rules={"min_prob": 0.0, "path_prob": 0.0})),
        ({"tree_prune": "auto"}, Speculation(auto=True)),
        ({"tree_prune": "auto", "tree_prune_path_prob": 0.1}, Speculation(auto=True, rules={"path_prob": 0.1})),
        ({"tree_prune": "thresholds", "tree_prune_min_prob": 0.1}, Speculation(auto=False, rules={"min_prob": 0.1})),
        ({"tree_prune_min_prob": 0.1}, Speculation(rules={"min_prob": 0.1})),
        ({"acceptance": "rejection"}, Speculation(acceptance="rejection")),
        ({"enable_draft_probs": False}, Speculation(draft_probs=False)),
        ({"enabled": False}, Speculation(enabled=False)),
    ],
)
def test_the_speculative_object_reaches_the_engine(asked: dict[str, Any], expected: Speculation) -> None:
    assert submit(speculative=asked).speculation == expected


def test_constraints_of_a_request_reach_the_engine() -> None:
    asked = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2, "min_tokens": 4}
    sampling = submit(logit_bias={"7": -3}, allowed_token_ids=[9, 7, 9], bad_words=[[3], [4, 5]], **asked).sampling
    assert sampling.constraints == Constraints(
        **asked, logit_bias={7: -3.0}, bad_words=[[3], [4, 5]], allowed_token_ids=[9, 7]
    )
    assert submit().sampling.constraints.is_empty


def test_log_probabilities_reach_the_engine_as_a_number() -> None:
    assert submit().sampling.num_logprobs is None
    assert submit(logprobs=0).sampling.num_logprobs == 0
    chat = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=4)
    assert first_submit(chat, [1]).sampling.num_logprobs == 4
    assert first_submit(chat, [1]).sampling.logprob_token_ids is None
    chosen = submit(logprobs=2, logprob_token_ids=[7, 3, 7]).sampling
    assert (chosen.num_logprobs, chosen.logprob_token_ids) == (2, [7, 3])


@pytest.mark.parametrize(
    ("param", "last", "beyond"),
    [
        ("logit_bias", {"49": 1}, {"50": 1}),
        ("stop_token_ids", [1, 49], [1, 50]),
        ("allowed_token_ids", [1, 49], [1, 50]),
        ("bad_words", [[1, 49]], [[1, 50]]),
        ("logprob_token_ids", [1, 49], [1, 50]),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(param: str, last: Any, beyond: Any) -> None:
    assert submit(logprobs=1, **{param: last})
    with pytest.raises(BadRequest, match="token id 50 is not in the vocabulary of 50") as caught:
        submit(logprobs=1, **{param: beyond})
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [3, 4], "bad_words": [[3], [4]]},
        {"allowed_token_ids": [0], "min_tokens": 1},
        {"allowed_token_ids": [0, 3, 4], "bad_words": [[3]], "stop_token_ids": [4], "min_tokens": 2},
    ],
)
def test_a_request_that_forbids_every_token_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="forbid all of them"):
        submit(**fields)


def test_a_request_that_allows_one_token_is_accepted() -> None:
    assert submit(allowed_token_ids=[0], min_tokens=1, ignore_eos=True)
    assert submit(allowed_token_ids=[3, 4], bad_words=[[3], [4, 3]])


def test_server_seeds_repeat_and_drawn_ones_do_not() -> None:
    def first(seed: int | None) -> list[int]:
        source = SeedSource(seed)
        return [source.next() for _ in range(5)]

    assert first(3) == first(3)
    assert first(3) != first(4)
    assert first(None) != first(None)
    assert all(0 <= seed < 2**63 for seed in first(3))


def test_a_vanishing_temperature_is_greedy() -> None:
    request = CompletionRequest(prompt="x", temperature=1e-7)
    assert first_submit(request, [1]).sampling.temperature == 0


def test_a_prompt_may_leave_room_for_a_single_token() -> None:
    assert submit(99).max_tokens == 1
    with pytest.raises(BadRequest, match="shorten it"):
        submit(100)


def test_a_request_may_ask_for_the_largest_tree_and_no_larger() -> None:
    assert submit(speculative={"num_speculative_tokens": 16}).speculation.num_speculative_tokens == 16
    with pytest.raises(BadRequest, match="17 is more than this service's 16"):
        submit(speculative={"num_speculative_tokens": 17})


def test_as_many_min_tokens_as_there_is_room_for_are_accepted_and_no_more() -> None:
    assert submit(95, min_tokens=5).sampling.constraints.min_tokens == 5
    told = "min_tokens=6 is more than the 5 that 95 prompt tokens leave .* ask for at most 5"
    with pytest.raises(BadRequest, match=told) as caught:
        submit(95, min_tokens=6)
    assert (caught.value.param, caught.value.code) == ("min_tokens", "context_length_exceeded")


def test_speculative_settings_without_a_drafter_are_an_error() -> None:
    request = CompletionRequest(prompt="x", speculative={"num_speculative_tokens": 2})  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=r"^speculative: this service runs without a drafter; leave it out$"):
        first_submit(request, [1], limits=replace(LIMITS, config=replace(CONFIG, draft=None)))


def test_a_request_opts_out_of_learning_by_its_body_or_by_its_header() -> None:
    assert submit().may_learn and submit(store=True).may_learn
    assert not submit(store=False).may_learn
    chat = ResponsesRequest.model_validate({"input": "hello", "store": False}).chat([])
    assert ChatCompletionRequest.model_validate(chat).store is False
    request = CompletionRequest(prompt="x")
    assert not build_submits(request, [1], ids=[1], seed=5, limits=LIMITS, may_learn=False)[0].may_learn
