"""The HTTP service over a fake engine: OpenAI's shapes, its errors, streams, limits, disconnects."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fake_engine import STATS
from fake_service import CONFIG, FakeService, fake_service
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from prometheus_client.parser import text_string_to_metric_families

import secateur
from cluster.generation import ScoredToken
from cluster.logprobs import chat_logprobs, completion_logprobs
from cluster.submit import derive_seed
from cluster.tokens import Tokenizer
from secateur import AsyncClient, Client
from workers.config import EngineConfig
from workers.ipc import Submit, TokenLogprobs

MODEL = Path(secateur.__file__).parent / "bundled" / "target"
ANSWER = "def f(x):\n    return '🌳', x + 1\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(MODEL))


@pytest.fixture(scope="module")
def script(tokenizer: Tokenizer) -> Callable[[Submit], list[list[int]]]:
    """ANSWER in steps of three tokens, then the end of text."""
    ids = [*tokenizer.encode(ANSWER), 0]
    return lambda submit: [ids[i : i + 3] for i in range(0, len(ids), 3)]


@pytest.fixture(scope="module")
def service(tokenizer: Tokenizer, script: Any) -> Iterator[FakeService]:
    with tempfile.TemporaryDirectory() as folder, fake_service(tokenizer, Path(folder), script) as running:
        yield running


@pytest.fixture
def http(service: FakeService) -> Iterator[httpx2.Client]:
    with service.http() as client:
        yield client


@pytest.fixture
def own(tokenizer: Tokenizer, script: Any) -> Iterator[Callable[..., FakeService]]:
    """A service of one's own, with settings."""
    with ExitStack() as stack:

        def start(**settings: Any) -> FakeService:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            return stack.enter_context(fake_service(tokenizer, folder, settings.pop("script", script), **settings))

        yield start


def events(response: httpx2.Response) -> list[Any]:
    """The decoded `data:` lines of a stream; [DONE] as it is."""
    payloads = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [text if text == "[DONE]" else json.loads(text) for text in payloads]


def stream(http: httpx2.Client, path: str, **body: Any) -> list[Any]:
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response)


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """The error object, which always has these keys."""
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert "Traceback" not in response.text
    return error


def wait_for(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Answers


def test_a_completion_is_openai_s(http: httpx2.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "def", "max_tokens": 64})
    parsed = Completion.model_validate(response.json())
    assert parsed.choices[0].text == ANSWER
    assert parsed.choices[0].finish_reason == "stop"
    assert parsed.usage is not None
    assert parsed.usage.total_tokens == parsed.usage.prompt_tokens + parsed.usage.completion_tokens
    assert parsed.usage.completion_tokens_details.accepted_prediction_tokens == 3
    assert parsed.usage.completion_tokens_details.rejected_prediction_tokens == 5
    assert parsed.usage.prompt_tokens_details.cached_tokens == 1


def test_a_chat_is_openai_s(http: httpx2.Client) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Write "}, {"type": "text", "text": "f."}]}]
    parsed = ChatCompletion.model_validate(http.post("/v1/chat/completions", json={"messages": messages}).json())
    assert parsed.choices[0].message.content == ANSWER
    assert parsed.choices[0].message.role == "assistant"
    assert parsed.object == "chat.completion"


def test_a_completion_without_max_tokens_gets_sixteen(http: httpx2.Client, service: FakeService) -> None:
    response = http.post("/v1/completions", json={"prompt": "def"})
    assert response.json()["usage"]["completion_tokens"] == 16
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert service.engine.submitted[-1].max_tokens == 16


def test_a_chat_without_max_tokens_may_fill_the_context(http: httpx2.Client, service: FakeService) -> None:
    http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
    submit = service.engine.submitted[-1]
    assert submit.max_tokens == service.engine.max_model_len - len(submit.prompt)


@pytest.mark.parametrize(
    ("prompt", "choices"), [("def", 1), (["def", "class"], 2), ([300, 301], 1), ([[300], [301], [302]], 3)]
)
def test_every_prompt_gets_a_choice(http: httpx2.Client, prompt: Any, choices: int) -> None:
    body = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 64}).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(choices))
    assert all(choice["text"] == ANSWER for choice in body["choices"])


def test_token_ids_are_told_on_request(http: httpx2.Client, tokenizer: Tokenizer) -> None:
    body = {"prompt": [300, 301], "max_tokens": 4, "return_token_ids": True}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["prompt_token_ids"] == [300, 301]
    assert choice["token_ids"] == tokenizer.encode(ANSWER)[:4]


def test_speculative_statistics_are_told_on_request(http: httpx2.Client) -> None:
    body = {"prompt": "def", "return_speculative_stats": True}
    stats = http.post("/v1/completions", json=body).json()["speculative"]
    assert stats["acceptance_length"] == 2.5
    assert stats["num_verified"] == 8


def test_speculative_statistics_tell_pruned_verified_and_accepted_apart(http: httpx2.Client) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "return_speculative_stats": True}
    stats = http.post("/v1/completions", json=body).json()["speculative"]
    assert stats["num_drafts"] == 4 * STATS.num_drafts
    assert (stats["num_draft_tokens"], stats["num_pruned"]) == (48, 16)
    assert (stats["num_verified"], stats["num_accepted_tokens"]) == (32, 12)
    assert stats["drafted_per_depth"] == [28, 16, 4]
    assert stats["pruned_per_depth"] == [8, 4, 4]
    assert stats["verified_per_depth"] == [20, 12]
    assert stats["accepted_per_depth"] == [8, 4]


def test_an_answer_cut_by_a_stop_string_has_its_statistics_too(http: httpx2.Client) -> None:
    body = {"prompt": "def", "stop": "return", "return_speculative_stats": True}
    assert http.post("/v1/completions", json=body).json()["speculative"]["num_verified"] == 8


def test_sampling_parameters_reach_the_engine(http: httpx2.Client, service: FakeService) -> None:
    body = {"prompt": "def", "temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.1, "seed": -7}
    body |= {"stop_token_ids": [5], "ignore_eos": True}
    body |= {"speculative": {"num_speculative_tokens": 4, "tree_prune_min_prob": 0.2}}
    assert http.post("/v1/completions", json=body).status_code == 200
    submit = service.engine.submitted[-1]
    assert (submit.sampling.temperature, submit.sampling.top_k, submit.sampling.top_p) == (0.5, 0, 0.9)
    assert (submit.sampling.min_p, submit.sampling.seed) == (0.1, -7)
    assert (submit.stop_token_ids, submit.ignore_eos) == ([5], True)
    assert (submit.speculation.num_tokens, submit.speculation.min_prob) == (4, 0.2)
    assert (submit.speculation.enabled, submit.speculation.path_prob) == (True, None)


def test_what_a_request_forbids_and_favours_reaches_the_engine(
    http: httpx2.Client, service: FakeService, tokenizer: Tokenizer
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "min_tokens": 2}
    body |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}
    body |= {"logit_bias": {"5": -100}, "allowed_token_ids": [5, 6], "bad_words": ["return"]}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    constraints = service.engine.submitted[-1].sampling.constraints
    assert (constraints.presence_penalty, constraints.frequency_penalty) == (0.5, 0.25)
    assert (constraints.repetition_penalty, constraints.min_tokens) == (1.5, 2)
    assert (constraints.logit_bias, constraints.allowed_token_ids) == ({5: -100.0}, [5, 6])
    assert constraints.bad_words == tokenizer.bad_words(["return"])


def test_a_request_may_choose_its_acceptance_rule_and_pruning(http: httpx2.Client, service: FakeService) -> None:
    asked = {"acceptance": "rejection", "enable_draft_probs": True, "tree_prune": "auto"}
    assert http.post("/v1/completions", json={"prompt": "def", "speculative": asked}).status_code == 200
    speculation = service.engine.submitted[-1].speculation
    assert (speculation.acceptance, speculation.draft_probs, speculation.auto) == ("rejection", True, True)


def test_speculation_can_be_switched_off_per_request(http: httpx2.Client, service: FakeService) -> None:
    http.post("/v1/completions", json={"prompt": "def", "speculative": {"enabled": False}})
    assert service.engine.submitted[-1].speculation.enabled is False


def test_a_server_seed_makes_seeds_repeat(own: Callable[..., FakeService]) -> None:
    seeds = []
    for _ in range(2):
        running = own(seed=11)
        with running.http() as http:
            for _ in range(2):
                http.post("/v1/completions", json={"prompt": "def"})
        seeds.append([submit.sampling.seed for submit in running.engine.submitted])
    assert seeds[0] == seeds[1]
    assert seeds[0][0] != seeds[0][1]


def test_unseeded_requests_differ(http: httpx2.Client, service: FakeService) -> None:
    before = len(service.engine.submitted)
    http.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
    assert len({submit.sampling.seed for submit in service.engine.submitted[before:]}) == 3


# Several answers


def test_n_answers_per_prompt_are_told_prompt_by_prompt(http: httpx2.Client, service: FakeService) -> None:
    before = len(service.engine.submitted)
    prompts = [[300], [301, 302]]
    body = http.post(
        "/v1/completions", json={"prompt": prompts, "n": 3, "max_tokens": 64, "seed": 7, "return_token_ids": True}
    ).json()
    parsed = Completion.model_validate(body)
    assert [choice.index for choice in parsed.choices] == list(range(6))
    assert all(choice.text == ANSWER for choice in parsed.choices)
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [[300]] * 3 + [[301, 302]] * 3
    submitted = service.engine.submitted[before:]
    assert len({submit.id for submit in submitted}) == 6
    seeds = [submit.sampling.seed for submit in sorted(submitted, key=lambda submit: submit.id)]
    assert seeds == [7, derive_seed(7, 1), derive_seed(7, 2)] * 2
    assert parsed.usage is not None
    assert parsed.usage.prompt_tokens == 3  # each prompt once
    assert parsed.usage.completion_tokens == sum(len(choice["token_ids"]) for choice in body["choices"])


def test_n_answers_are_streamed_side_by_side(http: httpx2.Client) -> None:
    *chunks, usage, done = stream(
        http,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Hi"}],
        n=3,
        stream_options={"include_usage": True},
    )
    texts, ends = ["", "", ""], [0, 0, 0]
    for chunk in chunks:
        [choice] = ChatCompletionChunk.model_validate(chunk).choices
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] += choice.finish_reason is not None
    assert (texts, ends, done) == ([ANSWER] * 3, [1, 1, 1], "[DONE]")
    alone = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]}).json()["usage"]
    assert usage["usage"]["prompt_tokens"] == alone["prompt_tokens"]
    assert usage["usage"]["completion_tokens"] == 3 * alone["completion_tokens"]


def test_every_answer_counts_for_admission(own: Callable[..., FakeService]) -> None:
    running = own(max_pending=4)
    with running.http() as http:
        assert http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2}).status_code == 200
        error = error_of(http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 3}))
        assert error["param"] == "n"
        assert "2 x 3 answers (prompts x n) are more than the 4" in error["message"]


def test_a_client_that_leaves_ends_all_its_answers(own: Callable[..., FakeService]) -> None:
    running = own(script=lambda submit: [[5]] * 1000, engine={"step_s": 0.02})
    body = {"prompt": "a", "n": 3, "max_tokens": 999, "stream": True}
    with running.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    wait_for(lambda: len(running.engine.aborted) == 3)
    assert running.client.num_pending == 0


# Log probabilities


def test_a_chat_s_log_probabilities_are_openai_s(http: httpx2.Client, tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2}
    parsed = ChatCompletion.model_validate(http.post("/v1/chat/completions", json=body).json())
    assert parsed.choices[0].logprobs is not None
    content = parsed.choices[0].logprobs.content
    assert content is not None
    ids = tokenizer.encode(ANSWER)
    assert [entry.token for entry in content] == [tokenizer.token_text(id).text for id in ids]
    assert bytes(byte for entry in content for byte in entry.bytes or ()).decode() == ANSWER
    assert {entry.logprob for entry in content} == {-1.0}
    best = content[0].top_logprobs
    assert [(item.token, item.logprob) for item in best] == [
        (tokenizer.token_text(ids[0] + 1).text, -0.5),
        (tokenizer.token_text(ids[0]).text, -1.0),
    ]


def test_a_completion_s_log_probabilities_are_openai_s(http: httpx2.Client, tokenizer: Tokenizer) -> None:
    body = {"prompt": "def", "max_tokens": 64, "logprobs": 1}
    parsed = Completion.model_validate(http.post("/v1/completions", json=body).json())
    found = parsed.choices[0].logprobs
    assert found is not None and found.tokens and found.text_offset and found.top_logprobs
    ids = tokenizer.encode(ANSWER)
    assert found.tokens == [tokenizer.token_text(id).text for id in ids]
    assert found.token_logprobs == [-1.0] * len(ids)
    # One was asked for; the token that came is told beside it.
    assert found.top_logprobs[0] == {tokenizer.token_text(ids[0] + 1).text: -0.5, found.tokens[0]: -1.0}
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert token.startswith("bytes:") or ANSWER[offset:].startswith(token)


def test_log_probabilities_are_left_out_unless_asked_for(http: httpx2.Client, service: FakeService) -> None:
    choice = http.post("/v1/completions", json={"prompt": "def"}).json()["choices"][0]
    assert choice["logprobs"] is None
    assert service.engine.submitted[-1].sampling.num_logprobs is None
    choice = http.post("/v1/completions", json={"prompt": "def", "logprobs": 0}).json()["choices"][0]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [1] * 16


def test_minus_infinity_is_written_as_a_number() -> None:
    entry = ScoredToken(5, TokenLogprobs(logprob=-math.inf, rank=9, top=[(5, -math.inf)]), 0)
    tokenizer = Tokenizer(str(MODEL))
    assert chat_logprobs(tokenizer, [entry]).content[0].logprob == -9999.0
    assert completion_logprobs(tokenizer, [entry]).token_logprobs == [-9999.0]


@pytest.mark.parametrize("settings", [{}, {"stop": "x +"}, {"stop": "x +", "include_stop_str_in_output": True}])
@pytest.mark.parametrize("size", [1, 2, 50])
def test_log_probabilities_follow_the_text_whatever_the_steps(
    own: Callable[..., FakeService], tokenizer: Tokenizer, settings: Any, size: int
) -> None:
    ids = [*tokenizer.encode(ANSWER), 0]
    running = own(script=lambda submit: [ids[i : i + size] for i in range(0, len(ids), size)])
    asked = {"prompt": "def", "max_tokens": 64, "logprobs": 0, **settings}
    with running.http() as http:
        choice = http.post("/v1/completions", json=asked).json()["choices"][0]
        chunks = [chunk["choices"][0] for chunk in stream(http, "/v1/completions", **asked)[:-1]]
    whole = choice["logprobs"]
    shown = b"".join(tokenizer.token_text(id).utf8 for id in ids[: len(whole["tokens"])]).decode()
    assert shown.startswith(choice["text"])  # the last token may be shown in part
    assert whole["text_offset"][-1] < len(choice["text"])
    joined: dict[str, list[Any]] = {key: [] for key in whole}
    for chunk in chunks:
        for key, values in (chunk["logprobs"] or {}).items():
            joined[key] += values
    assert joined == whole
    if not settings:
        assert len(whole["tokens"]) == len(ids) - 1  # the hidden end of text has none


def test_a_shown_stop_token_has_its_log_probability(http: httpx2.Client) -> None:
    body = {"prompt": "def", "max_tokens": 64, "logprobs": 0}
    body |= {"include_stop_str_in_output": True, "skip_special_tokens": False}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == ANSWER + "<|endoftext|>"
    assert choice["logprobs"]["tokens"][-1] == "<|endoftext|>"


def test_every_answer_has_its_own_log_probabilities(http: httpx2.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "n": 2}
    choices = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert choices[0]["logprobs"] == choices[1]["logprobs"]
    assert choices[0]["logprobs"]["content"][0]["top_logprobs"] == []


# Stopping


def test_a_stop_string_is_cut_off_and_ends_the_request_in_the_engine(own: Callable[..., FakeService]) -> None:
    running = own(engine={"step_s": 0.05})
    with running.http() as http:
        body = http.post("/v1/completions", json={"prompt": "def", "max_tokens": 64, "stop": ["return"]}).json()
    [choice] = body["choices"]
    assert choice["text"] == ANSWER.split("return")[0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "return")
    wait_for(lambda: running.engine.aborted == [running.engine.submitted[0].id])


def test_a_stop_string_costs_the_same_tokens_whatever_the_steps(
    own: Callable[..., FakeService], tokenizer: Tokenizer
) -> None:
    counts = set()
    for size in (1, 2, 50):
        ids = tokenizer.encode(ANSWER)
        steps = [ids[i : i + size] for i in range(0, len(ids), size)]
        running = own(script=lambda submit, steps=steps: [list(step) for step in steps])
        with running.http() as http:
            body = http.post("/v1/completions", json={"prompt": "def", "max_tokens": 64, "stop": "return"}).json()
        counts.add((body["usage"]["completion_tokens"], body["choices"][0]["text"]))
    assert len(counts) == 1


@pytest.mark.parametrize("size", [1, 3, 50])
def test_a_stop_string_within_the_first_tokens_is_text(
    own: Callable[..., FakeService], tokenizer: Tokenizer, size: int
) -> None:
    ids = tokenizer.encode("a b a b a b")
    running = own(script=lambda submit: [ids[i : i + size] for i in range(0, len(ids), size)])
    body = {"prompt": "def", "max_tokens": 64, "stop": "b", "min_tokens": 3}
    with running.http() as http:
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "a b a "
        assert http.post("/v1/completions", json=body | {"min_tokens": 0}).json()["choices"][0]["text"] == "a "


def test_a_stop_token_is_named_and_not_shown(http: httpx2.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(ANSWER)
    body = {"prompt": "def", "max_tokens": 64, "stop_token_ids": [ids[4]]}
    [choice] = http.post("/v1/completions", json=body).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[4])
    assert choice["text"] == tokenizer.decode(ids[:4])


# Streams


def test_a_stream_of_a_chat_is_openai_s(http: httpx2.Client) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    *chunks, usage, done = stream(
        http, "/v1/chat/completions", messages=messages, stream_options={"include_usage": True}
    )
    assert done == "[DONE]"
    parsed = [ChatCompletionChunk.model_validate(chunk) for chunk in chunks]
    assert parsed[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in parsed[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in parsed) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in parsed] == [None] * (len(parsed) - 1) + ["stop"]
    assert len({chunk.id for chunk in parsed}) == 1
    assert usage["choices"] == []
    assert ChatCompletionChunk.model_validate(usage).usage.completion_tokens > 0


def test_a_stream_of_completions_tells_every_choice(http: httpx2.Client) -> None:
    *chunks, done = stream(http, "/v1/completions", prompt=["a", "b"], max_tokens=64)
    texts = ["", ""]
    for chunk in chunks:
        assert chunk["object"] == "text_completion"
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [ANSWER, ANSWER]
    assert done == "[DONE]"


def test_a_step_is_one_event_at_once(own: Callable[..., FakeService], tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three four five six")
    running = own(engine={"step_s": 0.15}, script=lambda submit: [ids[:2], ids[2:4], ids[4:]])
    times = []
    with running.http() as http:
        body = {"prompt": "x", "max_tokens": 64, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    times.append(time.monotonic())
    assert len(times) == 3
    assert all(later - earlier > 0.1 for earlier, later in zip(times, times[1:], strict=False))


def test_usage_may_come_with_every_chunk(http: httpx2.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = stream(http, "/v1/completions", prompt="a", max_tokens=12, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_a_stream_and_the_whole_answer_agree(http: httpx2.Client) -> None:
    whole = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 64, "stop": "x +"}).json()
    chunks = stream(http, "/v1/completions", prompt="a", max_tokens=64, stop="x +")[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]


def test_statistics_end_a_stream(http: httpx2.Client) -> None:
    *_, last, done = stream(http, "/v1/completions", prompt="a", return_speculative_stats=True)
    assert last["speculative"]["num_drafts"] == 2
    assert done == "[DONE]"


# Clients


def test_openai_s_own_client_is_content(service: FakeService) -> None:
    client = OpenAI(base_url=f"{service.url}/v1", api_key="unused")
    assert client.models.list().data[0].id == "fake-model"
    chunks = client.chat.completions.create(
        model="fake-model",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        extra_body={"min_p": 0.1, "speculative": {"enabled": False}},
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER


def test_our_own_client_is_content(service: FakeService) -> None:
    with Client(service.url) as client:
        assert client.health()
        assert client.complete("def", max_tokens=64).text == ANSWER
        assert "".join(chunk.text for chunk in client.stream_chat("Hi")) == ANSWER
        assert client.detokenize(client.tokenize("def f").tokens).prompt == "def f"
        answer = client.chat("Hi", n=2, logprobs=True, top_logprobs=1)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.choices[1].logprobs.content[0].top_logprobs[0].logprob == -0.5
        chunks = client.stream_complete("def", max_tokens=64, logprobs=0)
        assert sum(len(chunk.choices[0].logprobs.tokens) for chunk in chunks if chunk.choices[0].logprobs) > 0


async def test_many_clients_at_once_get_their_own_answers(service: FakeService) -> None:
    import asyncio

    async with AsyncClient(service.url) as client:
        answers = await asyncio.gather(*(client.complete("def", max_tokens=64) for _ in range(24)))
    assert all(answer.text == ANSWER for answer in answers)


# Refusals


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "n": 2, "temperature": 0}, "n"),
        ({"prompt": "a", "n": 33}, "n"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "top_logprobs": 2}, "top_logprobs"),
        ({"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"five": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"2048": 1}}, "logit_bias"),
        ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
        ({"prompt": "a", "allowed_token_ids": [2048]}, "allowed_token_ids"),
        ({"prompt": "a", "allowed_token_ids": [0, 2], "min_tokens": 1}, "allowed_token_ids"),
        ({"prompt": "a", "bad_words": [""]}, "bad_words"),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
        ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
        ({"prompt": "a", "guided_json": {}}, "guided_json"),
        ({"prompt": "a", "max_tokens": 2048}, "max_tokens"),
        ({"prompt": [5] * 2048}, "prompt"),
        ({"prompt": "a", "speculative": {"num_speculative_tokens": 17}}, "speculative"),
        ({"prompt": "a", "speculative": {"acceptance": "exact"}}, "speculative"),
        ({"prompt": "a", "speculative": {"enabeld": True}}, "speculative"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": ["a"] * 33}, "prompt"),
    ],
)
def test_a_wrong_request_is_a_400_that_names_the_parameter(http: httpx2.Client, body: Any, param: str) -> None:
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_too_long_a_request_is_told_in_numbers(http: httpx2.Client) -> None:
    message = error_of(http.post("/v1/completions", json={"prompt": [5] * 2000, "max_tokens": 100}))["message"]
    assert "2048" in message
    assert "2000" in message
    assert "2100" in message
    assert "at most 48" in message


@pytest.mark.parametrize("content", [b"{", b"[1]", b"null", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 3000])
def test_a_body_that_is_no_request_is_a_400(http: httpx2.Client, content: bytes) -> None:
    response = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error_of(response)


def test_a_body_of_another_type_is_told_which_to_send(http: httpx2.Client) -> None:
    response = http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert response.status_code == 400
    assert "application/json" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("GET", "/v1/models/gpt", 404)],
)
def test_a_wrong_path_is_openai_s_error_too(http: httpx2.Client, method: str, path: str, status: int) -> None:
    response = http.request(method, path)
    assert response.status_code == status
    error_of(response)


def test_another_model_is_a_404_that_names_ours(http: httpx2.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "a", "model": "gpt-4"})
    assert response.status_code == 404
    error = error_of(response)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "fake-model" in error["message"]


def test_a_body_without_end_is_a_413(http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.door.MAX_BODY_BYTES", 1 << 20)
    response = http.post("/v1/completions", json={"prompt": "a" * (1 << 20)})
    assert response.status_code == 413
    assert error_of(response)["message"] == "the body is larger than 1 MiB; send less at once"
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("max_tokens", "9" * 4300),
        ("top_logprobs", r'"\ud800"'),
        ("stop_token_ids", f"[{', '.join(100 * ['-1'])}]"),
        ("stop_token_ids", f'["{10_000 * "a"}"]'),
    ],
)
def test_what_is_quoted_of_a_wrong_request_is_short_and_can_be_written(
    http: httpx2.Client, field: str, text: str
) -> None:
    headers = {"Content-Type": "application/json"}
    response = http.post("/v1/completions", content=f'{{"prompt": "a", "{field}": {text}}}', headers=headers)
    assert response.status_code == 400
    assert error_of(response)["param"] == field
    assert len(response.content) < 4000


def test_a_chat_the_template_cannot_render_is_a_400(http: httpx2.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"add_generation_prompt": 1}}
    assert http.post("/v1/chat/completions", json=body).status_code == 400


def test_unknown_fields_are_accepted_and_named(http: httpx2.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "a", "zeta": 1, "alpha\r\nx: y": 2})
    assert response.status_code == 200
    assert "zeta" in response.headers["x-secateur-ignored"]


@pytest.mark.parametrize(("acceptance", "is_named"), [(None, True), ("coupled", True), ("rejection", False)])
def test_draft_probabilities_under_coupling_are_named_as_without_effect(http, acceptance, is_named) -> None:
    speculative = {"enable_draft_probs": False} | ({"acceptance": acceptance} if acceptance else {})
    response = http.post("/v1/completions", json={"prompt": "a", "speculative": speculative})
    assert response.status_code == 200
    assert response.headers.get("x-secateur-ignored") == ("speculative.enable_draft_probs" if is_named else None)


def test_without_a_drafter_asking_for_one_is_a_400(own: Callable[..., FakeService]) -> None:
    running = own(config=EngineConfig(model_path="model", max_num_seqs=4))
    with running.http() as http:
        assert http.post("/v1/completions", json={"prompt": "a", "speculative": {"enabled": False}}).status_code == 200
        response = http.post("/v1/completions", json={"prompt": "a", "speculative": {"enabled": True}})
    assert error_of(response)["param"] == "speculative"


# Keys and ids


def test_a_key_guards_what_generates_or_tells(own: Callable[..., FakeService]) -> None:
    running = own(api_key="sesame")
    with running.http() as http:
        for path in ("/v1/models", "/server_info", "/v1/models/fake-model"):
            assert http.get(path).status_code == 401
            assert http.get(path, headers={"Authorization": "Bearer sesam"}).status_code == 401
            assert http.get(path, headers={"Authorization": "Bearer sesame"}).status_code == 200
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            response = http.post(path, json={"prompt": "a"})
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
        assert http.get("/health").status_code == 200
        assert http.get("/metrics").status_code == 200


def test_the_request_id_comes_back(http: httpx2.Client) -> None:
    assert http.get("/health", headers={"X-Request-ID": "mine-1"}).headers["x-request-id"] == "mine-1"
    drawn = {http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(drawn) == 3
    assert http.get("/nowhere", headers={"X-Request-ID": "mine-2"}).headers["x-request-id"] == "mine-2"


# Load, loss, leaving


def test_too_many_requests_are_told_to_come_back(own: Callable[..., FakeService]) -> None:
    running = own(max_pending=1)
    running.engine.hold.set()
    with running.http() as http, running.http() as other:
        body = {"prompt": "a", "stream": True}
        request = http.build_request("POST", "/v1/completions", json=body)
        import threading

        first: list[httpx2.Response] = []
        waiting = threading.Thread(target=lambda: first.append(http.send(request)))
        waiting.start()
        wait_for(lambda: running.client.num_pending == 1)
        response = other.post("/v1/completions", json={"prompt": "b"})
        assert response.status_code == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert error_of(response)["type"] == "rate_limit_error"
        running.engine.hold.clear()
        waiting.join()
        assert first[0].status_code == 200
        assert other.post("/v1/completions", json={"prompt": "b"}).status_code == 200
        assert "secateur_requests_rejected_total" in other.get("/metrics").text


def test_a_dead_engine_is_a_503(own: Callable[..., FakeService]) -> None:
    running = own()
    running.engine.die()
    wait_for(lambda: running.client.dead is not None)
    with running.http() as http:
        response = http.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == 503
        assert "Retry-After" in response.headers
        assert error_of(response)["type"] == "service_unavailable_error"
        assert http.get("/health").status_code == 503


def test_an_engine_that_dies_under_a_stream_ends_it_with_an_error(
    own: Callable[..., FakeService], tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(ANSWER)
    running = own(script=lambda submit: [ids[:3]] + [[ids[3]]] * 500, engine={"step_s": 0.05})
    with running.http() as http:
        body = {"prompt": "a", "max_tokens": 500, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            running.engine.die()
            payloads = [line.removeprefix("data: ") for line in lines if line]
    assert payloads[-1] == "[DONE]"
    assert "engine" in json.loads(payloads[-2])["error"]["message"]


def test_an_engine_that_dies_before_the_first_token_is_a_500(own: Callable[..., FakeService]) -> None:
    running = own()
    running.engine.hold.set()
    import threading

    with running.http() as http:
        threading.Timer(0.3, running.engine.die).start()
        response = http.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert response.status_code == 500
    assert error_of(response)["code"] == "engine_error"


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_ends_its_requests_in_the_engine(
    own: Callable[..., FakeService], tokenizer: Tokenizer, streamed: bool
) -> None:
    running = own(script=lambda submit: [[5]] * 1000, engine={"step_s": 0.02})
    body = {"prompt": ["a", "b"], "max_tokens": 1000, "stream": streamed}
    if streamed:
        with running.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
    else:
        with running.http() as http, pytest.raises(httpx2.ReadTimeout):
            http.post("/v1/completions", json=body, timeout=0.3)
    wait_for(lambda: sorted(running.engine.aborted) == sorted(submit.id for submit in running.engine.submitted))
    assert len(running.engine.aborted) == 2
    assert running.client.num_pending == 0


def test_a_client_that_leaves_while_it_waits_for_its_turn_is_forgotten(own: Callable[..., FakeService]) -> None:
    running = own()
    running.engine.hold.set()
    with running.http() as http, pytest.raises(httpx2.ReadTimeout):
        http.post("/v1/completions", json={"prompt": "a", "stream": True}, timeout=0.3)
    wait_for(lambda: len(running.engine.aborted) == 1)


# What tells


def test_health_metrics_version_and_info(http: httpx2.Client) -> None:
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 64})
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/version").json()["version"]
    info = http.get("/server_info").json()
    assert info["topology"][0]["role"] == "verifier 0"
    assert info["config"]["draft"]["tree"]["num_nodes"] == CONFIG.draft.tree.num_nodes


def test_the_metrics_have_vllm_s_stems(http: httpx2.Client) -> None:
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 64})
    families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}
    for stem in (
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_pruned_tokens",
        "spec_decode_num_verified_tokens",
        "spec_decode_num_accepted_tokens",
        "num_preemptions",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "time_to_first_token_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_success",
        "prompt_tokens",
        "generation_tokens",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
    ):
        assert f"secateur_{stem}" in families, stem
    assert families["secateur_spec_decode_num_drafts"].samples[0].value == 3
    assert families["secateur_spec_decode_num_pruned_tokens"].samples[0].value == 7
    assert families["secateur_num_preemptions"].samples[0].value == 5
    assert families["secateur_prefix_cache_queries"].samples[0].value == 40
    assert families["secateur_prefix_cache_hits"].samples[0].value == 16
    for kind, expected in (
        ("draft", [10, 5, 1]),
        ("pruned", [4, 2, 1]),
        ("verified", [6, 3]),
        ("accepted", [3, 2]),
    ):
        samples = families[f"secateur_spec_decode_num_{kind}_tokens_per_pos"].samples
        assert [(sample.labels["position"], sample.value) for sample in samples] == [
            (str(position), value) for position, value in enumerate(expected)
        ]


def test_every_sample_says_which_replica_of_which_model_it_is(own: Callable[..., FakeService]) -> None:
    running = own()
    with running.http() as http:
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 64})
        text = http.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.name.split("_")[0] for sample in samples} == {"secateur"}
    assert {(s.labels["model_name"], s.labels["replica"]) for s in samples} == {("fake-model", "fake-replica")}
    # One metric observed here, one read from the engine, as Prometheus reads them.
    assert 'secateur_prompt_tokens_total{model_name="fake-model",replica="fake-replica"} ' in text
    assert 'secateur_engine_steps_total{model_name="fake-model",replica="fake-replica"} ' in text


def test_no_prompt_gets_into_the_log(service: FakeService, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with service.http() as http:
        http.post("/v1/completions", json={"prompt": "a very secret prompt", "max_tokens": 3, "temperatur": 1})
    assert "secret" not in caplog.text
    assert "temperatur" in caplog.text


def test_tokenize_renders_chats_too(http: httpx2.Client, tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "return_token_strs": True}
    answer = http.post("/tokenize", json=body).json()
    assert answer["tokens"] == tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048


def test_detokenizing_an_unknown_id_is_a_400(http: httpx2.Client) -> None:
    assert http.post("/detokenize", json={"tokens": [99999]}).status_code == 400


def test_the_schema_of_all_this_is_served(http: httpx2.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= paths.keys()
