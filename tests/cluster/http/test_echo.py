"""Answers that begin with their prompt, and log-probabilities of prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from cluster.openai.openai_format import echoed_prompt
from cluster.text.tokenizer import Tokenizer
from secateur.responses import CompletionResponse
from tests.support.fake_service import ANSWER, FakeService, stream
from tests.support.tokenizer_kinds import load, rewriting

PROMPT = "def grüße(🌳):\n    "
WHOLE = {"max_tokens": 64}


def choice_of(http: httpx2.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    CompletionResponse.model_validate(response.json())  # OpenAI's model forbids the null of the first token
    [choice] = response.json()["choices"]
    return choice


def tokens_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_text(id).text for id in ids]


def test_the_text_begins_with_the_prompt(http: httpx2.Client, tokenizer: Tokenizer) -> None:
    plain = choice_of(http, prompt=PROMPT, echo=True, **WHOLE)
    assert plain["text"] == PROMPT + ANSWER and plain["logprobs"] is None and plain["prompt_logprobs"] is None
    ids = tokenizer.encode(PROMPT)
    assert choice_of(http, prompt=ids, echo=True, **WHOLE)["text"] == PROMPT + ANSWER
    cut = choice_of(http, prompt=PROMPT, echo=True, truncate_prompt_tokens=3, **WHOLE)
    assert cut["text"] == tokenizer.decode(ids[-3:]) + ANSWER


@pytest.mark.parametrize("num", [0, 1, 3])
def test_log_probabilities_of_an_echo_begin_with_the_prompts(
    http: httpx2.Client, tokenizer: Tokenizer, num: int
) -> None:
    ids, answer = tokenizer.encode(PROMPT), tokenizer.encode(ANSWER)
    found = choice_of(http, prompt=PROMPT, echo=True, logprobs=num, **WHOLE)["logprobs"]
    assert found["tokens"] == tokens_of(tokenizer, [*ids, *answer])
    assert found["token_logprobs"] == [None] + [-1.0] * (len(ids) + len(answer) - 1)
    assert found["top_logprobs"][0] is None
    top = {tokenizer.token_text(ids[1] + 1).text: -0.5} if num else {}
    assert {**top, found["tokens"][1]: -1.0}.items() <= found["top_logprobs"][1].items()
    assert {len(entry) for entry in found["top_logprobs"][1:]} <= {max(num, 1), num + 1}
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert token.startswith("bytes:") or (PROMPT + ANSWER)[offset:].startswith(token)


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"logprobs": 1, "n": 2, "return_tokens_as_token_ids": True}])
@pytest.mark.parametrize("prompt", [PROMPT, ["a b c", PROMPT]])
def test_a_stream_is_the_whole_answer_in_parts(http: httpx2.Client, prompt: Any, more: dict[str, Any]) -> None:
    body = {"prompt": prompt, "echo": True, "seed": 1, **WHOLE, **more}
    whole = http.post("/v1/completions", json=body).json()["choices"]
    parts: list[dict[str, Any]] = [{"text": "", "logprobs": {}} for _ in whole]
    for chunk in stream(http, "/v1/completions", **body)[:-1]:
        [choice] = chunk["choices"]
        part = parts[choice["index"]]
        part["text"] += choice["text"]
        for key, values in (choice["logprobs"] or {}).items():
            part["logprobs"].setdefault(key, []).extend(values)
    assert [part["text"] for part in parts] == [choice["text"] for choice in whole]
    assert [part["logprobs"] or None for part in parts] == [choice["logprobs"] for choice in whole]


def test_the_prompt_alone_comes_back(http: httpx2.Client, service: FakeService, tokenizer: Tokenizer) -> None:
    body = {"prompt": ["a b c", PROMPT], "echo": True, "logprobs": 1, "max_tokens": 0, "return_token_ids": True}
    answer = http.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == body["prompt"]
    assert answer["usage"]["completion_tokens"] == 0
    for choice, prompt in zip(answer["choices"], ["a b c", PROMPT], strict=True):
        assert (choice["finish_reason"], choice["token_ids"]) == ("length", [])
        assert choice["logprobs"]["tokens"] == tokens_of(tokenizer, tokenizer.encode(prompt))
    streamed = stream(http, "/v1/completions", **body)[:-1]
    assert sorted(chunk["choices"][0]["text"] for chunk in streamed) == sorted(body["prompt"])
    assert "speculative_trees" not in choice_of(http, prompt="a", echo=True, max_tokens=0)
    trees = choice_of(http, prompt="a", echo=True, max_tokens=0, return_speculative_trees=True)
    assert trees["speculative_trees"] == []


def test_a_prompt_of_one_token_has_no_log_probability(http: httpx2.Client) -> None:
    choice = choice_of(http, prompt=[5], echo=True, logprobs=2, max_tokens=0, prompt_logprobs=1)
    assert choice["logprobs"]["token_logprobs"] == choice["prompt_logprobs"] == [None]


def test_prompt_logprobs_have_vllms_format(http: httpx2.Client, tokenizer: Tokenizer, service: FakeService) -> None:
    ids = tokenizer.encode(PROMPT)
    choice = choice_of(http, prompt=PROMPT, prompt_logprobs=2, logprobs=3, **WHOLE)
    assert choice["text"] == ANSWER and len(choice["logprobs"]["tokens"]) == len(tokenizer.encode(ANSWER))
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(ids)
    for id, entry in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True):
        assert entry == {
            str(id): {"logprob": -1.0, "rank": 2, "decoded_token": tokenizer.token_text(id).text},
            str(id + 1): {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.token_text(id + 1).text},
        }
    none = choice_of(http, prompt=PROMPT, prompt_logprobs=0, max_tokens=0)
    assert [list(entry) for entry in none["prompt_logprobs"][1:]] == [[str(id)] for id in ids[1:]]
    both = choice_of(http, prompt=PROMPT, echo=True, logprobs=1, prompt_logprobs=3, **WHOLE)
    assert {len(entry) for entry in both["logprobs"]["top_logprobs"][1:]} == {2}
    assert {len(entry) for entry in both["prompt_logprobs"][1:]} == {3}
    assert service.engine.submitted[-1].num_prompt_logprobs == 3


def test_a_chats_prompt_logprobs_are_the_responses(http: httpx2.Client, service: FakeService) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "prompt_logprobs": 1, "n": 2, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    first, *entries = answer["prompt_logprobs"]
    assert first is None
    assert [next(iter(entry)) for entry in entries] == [str(id) for id in answer["prompt_token_ids"][1:]]
    # The second answer has the same prompt: it is scored once.
    assert [submit.num_prompt_logprobs for submit in service.engine.submitted[-2:]] == [1, None]


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
@pytest.mark.parametrize(
    ("last", "repeated"),
    [
        ({"role": "assistant", "content": "An apple"}, "An apple"),
        (
            {"role": "assistant", "content": [{"type": "text", "text": "An "}, {"type": "text", "text": "apple"}]},
            "An apple",
        ),
        ({"role": "user", "content": "Go on."}, ""),
    ],
)
def test_a_chats_echo_is_the_assistants_last_message(http: httpx2.Client, last: Any, repeated: str, tools: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, last]
    body = {"messages": messages, "echo": True, "n": 2, "seed": 1, **({"tools": tools} if tools else {})}
    plain = http.post("/v1/chat/completions", json={**body, "echo": False}).json()["choices"]
    whole = http.post("/v1/chat/completions", json=body).json()["choices"]
    told = [choice["message"]["content"] for choice in whole]
    assert told == [repeated + choice["message"]["content"] for choice in plain]
    parts = ["", ""]
    for chunk in stream(http, "/v1/chat/completions", **body)[:-1]:
        [choice] = chunk["choices"]
        parts[choice["index"]] += choice["delta"].get("content") or ""
    assert parts == told


def test_an_echo_without_log_probabilities_scores_nothing(http: httpx2.Client, service: FakeService) -> None:
    choice_of(http, prompt=PROMPT, echo=True, **WHOLE)
    assert service.engine.submitted[-1].num_prompt_logprobs is None
    assert http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 0}).status_code == 400


def test_an_answer_to_the_end_of_the_context(own: Callable[..., FakeService]) -> None:
    """The engine needs room for a token even if none is returned."""
    with own().http() as http:
        body = {"echo": True, "max_tokens": 0, "logprobs": 0}
        assert http.post("/v1/completions", json={"prompt": [5] * 2047, **body}).status_code == 200
        refused = http.post("/v1/completions", json={"prompt": [5] * 2048, **body})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_echo_is_the_text_as_it_was_given_even_where_its_tokens_read_otherwise(
    http: httpx2.Client, tokenizer: Tokenizer, is_streamed: bool
) -> None:
    prompt = "a<|im_start|>b"
    assert tokenizer.decode(tokenizer.encode(prompt)) == "ab", "special tokens are left out of answers"
    body = {"prompt": prompt, "echo": True, "max_tokens": 1}
    if is_streamed:
        events = stream(http, "/v1/completions", **body)[:-1]
        text = "".join(choice["text"] for event in events for choice in event["choices"])
    else:
        text = choice_of(http, **body)["text"]
    assert text.startswith(prompt)
    given_as_ids = choice_of(http, prompt=tokenizer.encode(prompt), echo=True, max_tokens=0, logprobs=0)
    assert given_as_ids["text"] == prompt, "special tokens are part of what was given"
    assert [prompt[offset:] for offset in given_as_ids["logprobs"]["text_offset"]] == [prompt, prompt[1:], "b"]


def test_a_text_is_echoed_as_it_was_given_by_a_tokenizer_that_rewrites(
    own: Callable[..., FakeService], tmp_path: Path
) -> None:
    rewriter, prompt = load(rewriting, tmp_path), "b a"
    ids = rewriter.encode(prompt)
    assert rewriter.decode(ids) != prompt
    with own(tokenizer=rewriter, script=lambda submit: [[ids[0]]]).http() as http:
        assert choice_of(http, prompt=prompt, echo=True, max_tokens=0)["text"] == prompt


def test_a_token_that_the_tokenizer_adds_is_no_part_of_a_text_that_was_given(tokenizer: Tokenizer) -> None:
    class Beginning:
        """A tokenizer that puts <|im_start|> before every text."""

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    begin, rest = tokenizer.encode("<|im_start|>"), tokenizer.encode("ab c")
    for given, offsets in (("ab c", [0, 0]), ("<|im_start|>ab c", [0, len("<|im_start|>")])):
        echo = echoed_prompt(Beginning(), [*begin, *rest], given)  # type: ignore[arg-type]
        assert echo.text == given and echo.offsets[: len(offsets)] == offsets


def test_prompt_logprobs_have_as_many_tokens_as_asked_even_if_an_echo_asks_for_more(http: httpx2.Client) -> None:
    choice = choice_of(http, prompt="a b c", echo=True, logprobs=5, prompt_logprobs=2, max_tokens=1)
    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} == {2}
    assert {len(entry) for entry in choice["logprobs"]["top_logprobs"][1:]} == {5}
