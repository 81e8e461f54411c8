"""Answers over HTTP: OpenAI's format, several choices, log probabilities, stop conditions."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.chat import ChatCompletionChunk as OpenAIChunk
from prometheus_client.parser import text_string_to_metric_families

import secateur
from cluster.openai.openai_format import chat_logprobs, completion_logprobs
from cluster.openai.output_processor import ScoredToken
from cluster.openai.request_params import derive_seed
from cluster.text.tokenizer import Tokenizer
from secateur.responses import ChatCompletionChunk, ChatCompletionResponse
from tests.support.fake_engine import STATS
from tests.support.fake_service import ANSWER, FakeService, error_of, fake_service, stream, wait_for
from tests.support.tokenizer_kinds import Kind, gemma, llama, load
from workers.comm.ipc import TokenLogprobs

MODEL = Path(secateur.__file__).parent / "bundled" / "target"


def test_a_completion_has_openais_format(http: httpx2.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "def", "max_tokens": 64})
    parsed = Completion.model_validate(response.json())
    assert parsed.choices[0].text == ANSWER
    assert parsed.choices[0].finish_reason == "stop"
    assert parsed.usage is not None
    assert parsed.usage.total_tokens == parsed.usage.prompt_tokens + parsed.usage.completion_tokens
    assert parsed.usage.completion_tokens_details.accepted_prediction_tokens == 3
    assert parsed.usage.completion_tokens_details.rejected_prediction_tokens == 5
    assert parsed.usage.prompt_tokens_details.cached_tokens == 1


def test_a_chat_completion_has_openais_format(http: httpx2.Client) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Write "}, {"type": "text", "text": "f."}]}]
    parsed = ChatCompletion.model_validate(http.post("/v1/chat/completions", json={"messages": messages}).json())
    assert parsed.choices[0].message.content == ANSWER
    assert parsed.choices[0].message.role == "assistant"
    assert parsed.object == "chat.completion"


@pytest.fixture
def frank(tmp_path: Path, script: Any) -> Iterator[FakeService]:
    """A model whose template prints its messages."""
    for file in MODEL.glob("*token*.json"):
        shutil.copy(file, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for message in messages %}{{ message | tojson }}{% endfor %}")
    with tempfile.TemporaryDirectory() as folder, fake_service(Tokenizer(str(tmp_path)), Path(folder), script) as own:
        yield own


@pytest.mark.parametrize("message", [{}, {"name": None}, {"name": "Ann"}, {"name": "Ann", "tool_calls": None}])
def test_templates_get_a_messages_fields_without_nulls(
    frank: FakeService, message: dict[str, Any], tokenizer: Tokenizer
) -> None:
    """Templates test whether a field exists, and a null field would exist."""
    body = {"messages": [{"role": "user", "content": "x"} | message]}
    with frank.http() as http:
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        ids = http.post("/tokenize", json=body).json()["tokens"]
    expected = {key: value for key, value in body["messages"][0].items() if value is not None}
    for prompt in (frank.engine.submitted[-1].prompt, ids):
        assert json.loads(tokenizer.decode(prompt)) == expected


def test_a_completion_without_max_tokens_gets_sixteen_tokens(http: httpx2.Client, service: FakeService) -> None:
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


def test_token_ids_are_returned_on_request(http: httpx2.Client, tokenizer: Tokenizer) -> None:
    body = {"prompt": [300, 301], "max_tokens": 4, "return_token_ids": True}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["prompt_token_ids"] == [300, 301]
    assert choice["token_ids"] == tokenizer.encode(ANSWER)[:4]


def test_a_chat_returns_its_prompts_ids_once(http: httpx2.Client, tokenizer: Tokenizer) -> None:
    """As in vLLM, they are outside of the choices, which share the prompt."""
    messages = [{"role": "user", "content": "Hi"}]
    asked = {"messages": messages, "n": 2, "max_tokens": 8, "return_token_ids": True}
    ids = tokenizer.encode_chat(messages)
    whole = ChatCompletionResponse.model_validate(http.post("/v1/chat/completions", json=asked).json())
    assert whole.prompt_token_ids == ids
    assert [choice.token_ids for choice in whole.choices] == [tokenizer.encode(ANSWER)[:8]] * 2
    chunks = stream(http, "/v1/chat/completions", **asked)[:-1]
    assert not any("prompt_token_ids" in choice for chunk in chunks for choice in chunk["choices"])
    assert ["prompt_token_ids" in chunk for chunk in chunks].count(True) == 2, "as in vLLM, later chunks have no null"
    read = [ChatCompletionChunk.model_validate(chunk) for chunk in chunks]
    for index in (0, 1):
        own = [chunk for chunk in read if chunk.choices[0].index == index]
        assert [chunk.prompt_token_ids for chunk in own] == [ids] + [None] * (len(own) - 1)
        assert own[0].choices[0].delta.role == "assistant" and own[0].choices[0].token_ids == []
        assert [id for chunk in own for id in chunk.choices[0].token_ids] == tokenizer.encode(ANSWER)[:8]


def test_speculative_statistics_are_returned_on_request(http: httpx2.Client) -> None:
    body = {"prompt": "def", "return_speculative_stats": True}
    stats = http.post("/v1/completions", json=body).json()["speculative"]
    assert stats["acceptance_length"] == 2.5
    assert stats["num_verified"] == 8


def test_speculative_statistics_count_pruned_verified_and_accepted_tokens(http: httpx2.Client) -> None:
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


@pytest.mark.parametrize("stop", [None, "return", "🌳", "x"])
def test_tokens_behind_a_stop_string_do_not_count_as_accepted(
    own: Callable[..., FakeService], tokenizer: Tokenizer, stop: str | None
) -> None:
    """A stop string may end an answer inside the tokens of one step."""
    ids = tokenizer.encode(ANSWER)
    running = own(engine={"drafts": True}, script=lambda submit: [[*ids, 0]])
    body = {"prompt": "def", "max_tokens": 64, "stop": stop, "return_speculative_stats": True}
    with running.http() as http:
        answer = http.post("/v1/completions", json=body).json()
        *_, totals, _ = stream(http, "/v1/completions", **body, stream_options={"include_usage": True})
        families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}
    num_tokens = answer["usage"]["completion_tokens"]
    num_accepted = min(num_tokens, len(ids))
    for usage, stats in ((answer["usage"], answer["speculative"]), (totals["usage"], totals["speculative"])):
        assert usage["completion_tokens"] == num_tokens
        details = usage["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == num_accepted
        assert details["rejected_prediction_tokens"] == len(ids) - num_accepted
        assert stats["num_accepted_tokens"] == sum(stats["accepted_per_depth"]) == num_accepted
        assert stats["num_verified"] == len(ids)
    told = families["secateur_spec_decode_num_accepted_tokens"].samples[0].value
    per_depth = families["secateur_spec_decode_num_accepted_tokens_per_pos"].samples
    assert told == sum(sample.value for sample in per_depth) == 2 * num_accepted
    assert families["secateur_generation_tokens"].samples[0].value == 2 * num_tokens


def test_sampling_parameters_reach_the_engine(http: httpx2.Client, service: FakeService) -> None:
    body = {"prompt": "def", "temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.1, "seed": -7}
    body |= {"stop_token_ids": [5], "ignore_eos": True}
    body |= {"speculative": {"num_speculative_tokens": 4, "tree_prune_min_prob": 0.2}}
    assert http.post("/v1/completions", json=body).status_code == 200
    submit = service.engine.submitted[-1]
    assert (submit.sampling.temperature, submit.sampling.top_k, submit.sampling.top_p) == (0.5, 0, 0.9)
    assert (submit.sampling.min_p, submit.sampling.seed) == (0.1, -7)
    assert (submit.stop_token_ids, submit.ignore_eos) == ([5], True)
    assert (submit.speculation.num_speculative_tokens, submit.speculation.rules) == (4, {"min_prob": 0.2})
    assert submit.speculation.enabled


def test_parameters_left_out_come_from_the_models_generation_config(own: Callable[..., FakeService]) -> None:
    running = own(sampling_defaults={"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1})
    with running.http() as http:
        http.post("/v1/completions", json={"prompt": "a", "temperature": 0.9, "top_k": None})
        http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "top_p": 0.5})
        assert http.get("/server_info").json()["sampling_defaults"]["top_k"] == 20
    sent = [submit.sampling for submit in running.engine.submitted]
    assert [(s.temperature, s.top_k, s.top_p) for s in sent] == [(0.9, 20, 1.0), (0.6, 20, 0.5)]
    assert [s.constraints.repetition_penalty for s in sent] == [1.1, 1.1]


def test_a_chats_default_length_comes_from_the_models_generation_config(own: Callable[..., FakeService]) -> None:
    running = own(sampling_defaults={"max_tokens": 9})
    with running.http() as http:
        http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
        http.post("/v1/completions", json={"prompt": "a"})
    assert [submit.max_tokens for submit in running.engine.submitted] == [9, 16]


def test_constraints_of_a_request_reach_the_engine(
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


@pytest.mark.parametrize("kind", [llama, gemma], ids=lambda kind: kind.__name__)
def test_text_does_not_depend_on_steps_or_on_streaming(kind: Kind, tmp_path: Path) -> None:
    """Five bytes: a whole character and half of one, cut by max_tokens."""
    tokenizer = load(kind, tmp_path)
    ids = tokenizer._tokenizer.convert_tokens_to_ids(["<0xE4>", "<0xB8>", "<0x96>", "<0xF0>", "<0x9F>", "<0x8C>"])
    texts = []
    for number, size in enumerate((1, 2, 5)):
        (tmp_path / str(number)).mkdir()
        script = lambda _, size=size: [ids[i : i + size] for i in range(0, len(ids), size)]  # noqa: E731
        with fake_service(tokenizer, tmp_path / str(number), script) as running, running.http() as http:
            for more in ({}, {"stop": ["never"]}, {"logprobs": 0}):
                asked = {"prompt": "a", "max_tokens": 5, **more}
                choice = http.post("/v1/completions", json=asked).json()["choices"][0]
                chunks = stream(http, "/v1/completions", **asked)[:-1]
                texts += [choice["text"], "".join(chunk["choices"][0]["text"] for chunk in chunks)]
            assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 1]
            texts.append(http.post("/detokenize", json={"tokens": ids[:5]}).json()["prompt"])
    assert set(texts) == {"世\ufffd"}


# Several answers


def test_choices_are_numbered_prompt_by_prompt(http: httpx2.Client, service: FakeService) -> None:
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


def test_choices_are_streamed_concurrently(http: httpx2.Client) -> None:
    *chunks, usage, done = stream(
        http,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Hi"}],
        n=3,
        stream_options={"include_usage": True},
    )
    texts, ends = ["", "", ""], [0, 0, 0]
    for chunk in chunks:
        [choice] = OpenAIChunk.model_validate(chunk).choices
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] += choice.finish_reason is not None
    assert (texts, ends, done) == ([ANSWER] * 3, [1, 1, 1], "[DONE]")
    alone = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]}).json()["usage"]
    assert usage["usage"]["prompt_tokens"] == alone["prompt_tokens"]
    assert usage["usage"]["completion_tokens"] == 3 * alone["completion_tokens"]


def test_every_choice_counts_for_admission(own: Callable[..., FakeService]) -> None:
    running = own(max_pending=4)
    with running.http() as http:
        assert http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2}).status_code == 200
        error = error_of(http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 3}))
        assert error["param"] == "n"
        assert "2 x 3 answers (prompts x n) are more than the 4" in error["message"]


def test_every_choice_counts_when_requests_arrive_at_once(own: Callable[..., FakeService]) -> None:
    running = own(max_pending=4)
    running.engine.hold.set()
    statuses: list[int] = []

    def ask() -> None:
        with running.http() as http:
            statuses.append(http.post("/v1/completions", json={"prompt": "a", "n": 3}).status_code)

    clients = [threading.Thread(target=ask) for _ in range(6)]
    for client in clients:
        client.start()
    wait_for(lambda: len(statuses) == 5)  # all are admitted before any is tokenized, so they are counted again then
    running.engine.hold.clear()
    for client in clients:
        client.join(20)
    assert sorted(statuses) == [200, *[429] * 5]


def test_a_disconnect_aborts_all_choices(own: Callable[..., FakeService]) -> None:
    running = own(script=lambda submit: [[5]] * 1000, engine={"step_s": 0.02})
    body = {"prompt": "a", "n": 3, "max_tokens": 999, "stream": True}
    with running.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    wait_for(lambda: len(running.engine.aborted) == 3)
    assert running.client.num_pending == 0


# Log probabilities


def test_a_chats_log_probabilities_have_openais_format(http: httpx2.Client, tokenizer: Tokenizer) -> None:
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


def test_tokens_of_log_probabilities_can_be_named_by_their_ids(http: httpx2.Client, tokenizer: Tokenizer) -> None:
    ids, more = tokenizer.encode(ANSWER), {"return_tokens_as_token_ids": True}
    names = [f"token_id:{id}" for id in ids]
    response = http.post("/v1/completions", json={"prompt": "def", "max_tokens": 64, "logprobs": 1, **more})
    found = response.json()["choices"][0]["logprobs"]
    assert found["tokens"] == names and "x-secateur-ignored" not in response.headers
    assert found["top_logprobs"][0] == {f"token_id:{ids[0] + 1}": -0.5, names[0]: -1.0}
    chunks = stream(http, "/v1/completions", prompt="def", max_tokens=64, logprobs=1, **more)
    parts = [chunk["choices"][0]["logprobs"] or {"tokens": []} for chunk in chunks[:-1]]
    assert [name for part in parts for name in part["tokens"]] == names
    body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 1, **more}
    content = http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == names
    assert [entry["top_logprobs"][0]["token"] for entry in content] == [f"token_id:{id + 1}" for id in ids]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == ANSWER


def test_a_service_may_name_tokens_by_their_ids_unless_a_request_says_otherwise(
    own: Callable[..., FakeService], tokenizer: Tokenizer
) -> None:
    ids, texts = tokenizer.encode(ANSWER), {"return_tokens_as_token_ids": False}
    names = [f"token_id:{id}" for id in ids]
    include = ["message.output_text.logprobs"]
    with own(names_tokens_by_id=True).http() as http:

        def tokens(path: str, *place: str | int, **body: Any) -> list[Any]:
            response = http.post(path, json=body)
            assert "x-secateur-ignored" not in response.headers
            found = response.json()
            for key in place:
                found = found[key]
            return [entry["token"] if isinstance(entry, dict) else entry for entry in found]

        completion = ("/v1/completions", "choices", 0, "logprobs", "tokens")
        assert tokens(*completion, prompt="def", max_tokens=64, logprobs=1) == names
        chat = ("/v1/chat/completions", "choices", 0, "logprobs", "content")
        messages = [{"role": "user", "content": "Hi"}]
        assert tokens(*chat, messages=messages, logprobs=True) == names
        own_texts = [tokenizer.token_text(id).text for id in ids]
        assert tokens(*completion, prompt="def", max_tokens=64, logprobs=1, **texts) == own_texts
        assert tokens(*chat, messages=messages, logprobs=True, **texts) == own_texts
        assert tokens("/v1/responses", "output", 0, "content", 0, "logprobs", input="Hi", include=include) == names
        assert "x-secateur-ignored" not in http.post("/v1/completions", json={"prompt": "a"}).headers


@pytest.mark.parametrize("streamed", [False, True])
def test_chosen_tokens_replace_the_likeliest_at_every_position(
    streamed: bool, http: httpx2.Client, tokenizer: Tokenizer
) -> None:
    """As in vLLM: whatever number of likeliest ones is asked for, and beside the answer's own token."""
    ids = tokenizer.encode(ANSWER)
    chosen, more = [9, 8, ids[1]], {"return_tokens_as_token_ids": True, "max_tokens": 64}
    body = {"prompt": "def", "logprobs": 1, "logprob_token_ids": chosen, **more}
    if streamed:
        parts = [chunk["choices"][0]["logprobs"] or {} for chunk in stream(http, "/v1/completions", **body)[:-1]]
        tops = [top for part in parts for top in part.get("top_logprobs", ())]
    else:
        tops = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["top_logprobs"]
    told = {f"token_id:{id}": id / -1000 for id in chosen}
    assert tops == [told | {f"token_id:{id}": -1.0} for id in ids]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "logprob_token_ids": chosen, **more}
    if streamed:
        choices = [chunk["choices"][0] for chunk in stream(http, "/v1/chat/completions", **chat)[:-1]]
        content = [entry for choice in choices for entry in (choice.get("logprobs") or {}).get("content", ())]
    else:
        content = http.post("/v1/chat/completions", json=chat).json()["choices"][0]["logprobs"]["content"]
    for id, entry in zip(ids, content, strict=True):
        expected = [f"token_id:{other}" for other in dict.fromkeys([id, *chosen])]
        assert [item["token"] for item in entry["top_logprobs"]] == expected
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"] == -1.0


def test_prompts_of_an_echo_keep_their_likeliest_tokens(http: httpx2.Client) -> None:
    body = {"prompt": [5, 6], "echo": True, "logprobs": 2, "logprob_token_ids": [9], "return_tokens_as_token_ids": True}
    tops = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert tops[1] == {"token_id:7": -0.5, "token_id:6": -1.0} and tops[2]["token_id:9"] == -0.009


def test_of_two_tokens_with_the_same_text_the_more_likely_one_is_told(tokenizer: Tokenizer) -> None:
    same = [(5, -3.0), (6, -1.0), (7, -2.0)]
    names = {5: "a", 6: "b", 7: "b", 8: "a"}
    tokenizer = SimpleNamespace(token_text=lambda id: SimpleNamespace(text=names[id]))
    for top in (same, same[::-1]):
        entry = ScoredToken(8, TokenLogprobs(logprob=-4.0, rank=9, top=top), 0)
        assert completion_logprobs(tokenizer, [entry]).top_logprobs == [{"a": -3.0, "b": -1.0}]


def test_a_completions_log_probabilities_have_openais_format(http: httpx2.Client, tokenizer: Tokenizer) -> None:
    body = {"prompt": "def", "max_tokens": 64, "logprobs": 1}
    parsed = Completion.model_validate(http.post("/v1/completions", json=body).json())
    found = parsed.choices[0].logprobs
    assert found is not None and found.tokens and found.text_offset and found.top_logprobs
    ids = tokenizer.encode(ANSWER)
    assert found.tokens == [tokenizer.token_text(id).text for id in ids]
    assert found.token_logprobs == [-1.0] * len(ids)
    # One was asked for; the token that came is told beside it, and first, as in vLLM.
    other = tokenizer.token_text(ids[0] + 1).text
    assert list(found.top_logprobs[0].items()) == [(found.tokens[0], -1.0), (other, -0.5)]
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert token.startswith("bytes:") or ANSWER[offset:].startswith(token)


def test_log_probabilities_are_returned_on_request_only(http: httpx2.Client, service: FakeService) -> None:
    choice = http.post("/v1/completions", json={"prompt": "def"}).json()["choices"][0]
    assert choice["logprobs"] is None
    assert service.engine.submitted[-1].sampling.num_logprobs is None
    choice = http.post("/v1/completions", json={"prompt": "def", "logprobs": 0}).json()["choices"][0]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [1] * 16


@pytest.mark.parametrize("more", [{}, {"stop": "x +"}, {"stop": "never", "max_tokens": 8}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_beside_token_ids_every_token_has_its_log_probability(http: httpx2.Client, path: str, more: Any) -> None:
    """As in vLLM: trainers need those of the token that ends the answer, too."""
    prompt = (
        {"prompt": "a", "logprobs": 1}
        if "chat" not in path
        else {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
    )
    names = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    asked = {**prompt, "max_tokens": 64, **more, **names}

    def named(choice: dict[str, Any]) -> list[str]:
        told = choice["logprobs"]
        return told["tokens"] if "chat" not in path else [entry["token"] for entry in told["content"]]

    [choice] = http.post(path, json=asked).json()["choices"]
    assert named(choice) == [f"token_id:{id}" for id in choice["token_ids"]]
    assert (choice["token_ids"][-1] == 0) == (more == {}), "the token that ends the answer"
    chunks = [chunk["choices"][0] for chunk in stream(http, path, **asked)[:-1]]
    for chunk in chunks[1:] if "chat" in path else chunks:
        assert named(chunk) == [f"token_id:{id}" for id in chunk["token_ids"]] != []


def test_minus_infinity_is_written_as_a_number(tokenizer: Tokenizer) -> None:
    entry = ScoredToken(5, TokenLogprobs(logprob=-math.inf, rank=9, top=[(5, -math.inf)]), 0)
    assert chat_logprobs(tokenizer, [entry]).content[0].logprob == -9999.0
    assert completion_logprobs(tokenizer, [entry]).token_logprobs == [-9999.0]


@pytest.mark.parametrize("settings", [{}, {"stop": "x +"}, {"stop": "x +", "include_stop_str_in_output": True}])
@pytest.mark.parametrize("size", [1, 2, 50])
def test_log_probabilities_are_sent_with_their_text_for_any_steps(
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


@pytest.mark.parametrize(
    ("path", "asked"),
    [("completions", {"prompt": "a"}), ("chat/completions", {"messages": [{"role": "user", "content": "a"}]})],
)
def test_special_tokens_are_shown_on_request_only(own: Callable[..., FakeService], path: str, asked: Any) -> None:
    running = own(script=lambda submit: [[5, 0, 6]])
    with running.http() as http:
        for skip, shown in [({}, False), ({"skip_special_tokens": False}, True)]:
            answer = http.post(f"/v1/{path}", json={**asked, "max_tokens": 3, "ignore_eos": True, **skip})
            assert ("<|endoftext|>" in answer.raise_for_status().text) is shown


def test_every_answer_has_its_own_log_probabilities(http: httpx2.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "n": 2}
    choices = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert choices[0]["logprobs"] == choices[1]["logprobs"]
    assert choices[0]["logprobs"]["content"][0]["top_logprobs"] == []


# Stopping


def test_a_stop_string_is_cut_off_and_ends_the_request_in_the_engine(
    own: Callable[..., FakeService], script: Any
) -> None:
    """The engine would go on for much longer than it takes to tell it."""
    running = own(engine={"step_s": 0.02}, script=lambda submit: [*script(submit)[:-1], *[[300]] * 1000])
    with running.http() as http:
        body = http.post("/v1/completions", json={"prompt": "def", "max_tokens": 1900, "stop": ["return"]}).json()
    [choice] = body["choices"]
    assert choice["text"] == ANSWER.split("return")[0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "return")
    wait_for(lambda: running.engine.aborted == [running.engine.submitted[0].id])


def test_a_stop_string_ends_after_the_same_token_for_any_steps(
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
def test_a_stop_string_before_min_tokens_is_text(
    own: Callable[..., FakeService], tokenizer: Tokenizer, size: int
) -> None:
    ids = tokenizer.encode("a b a b a b")
    running = own(script=lambda submit: [ids[i : i + size] for i in range(0, len(ids), size)])
    body = {"prompt": "def", "max_tokens": 64, "stop": "b", "min_tokens": 3}
    with running.http() as http:
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "a b a "
        assert http.post("/v1/completions", json=body | {"min_tokens": 0}).json()["choices"][0]["text"] == "a "


def test_a_stop_token_is_reported_and_not_part_of_the_text(http: httpx2.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(ANSWER)
    body = {"prompt": "def", "max_tokens": 64, "stop_token_ids": [ids[4]]}
    [choice] = http.post("/v1/completions", json=body).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[4])
    assert choice["text"] == tokenizer.decode(ids[:4])
