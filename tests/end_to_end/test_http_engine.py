"""Requests to a real engine over HTTP: log probabilities, several choices, forbidden and forced tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copyfile
from typing import Any

import httpx2
import pytest
import tokenizers
from safetensors.torch import load_file, save_file

import secateur
from cluster.local_service import local_service
from cluster.text.tokenizer import Tokenizer
from secateur import Client
from secateur.config import EngineArgs
from secateur.responses import CompletionResponse
from tests.support.checkpoints import write_model

pytestmark = pytest.mark.slow

PROMPT = "def f(x):\n    return"
OFF = {"enabled": False}
DRAFTED = {"tree_prune": "off"}  # `auto` may find that drafting costs more than it gains here
REJECTION = {**DRAFTED, "acceptance": "rejection"}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with local_service(EngineArgs.load({"port": 0, "device": "cpu", "max_num_seqs": 8})) as url, Client(url) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(Path(secateur.__file__).parent / "bundled" / "target"))


def complete(client: Client, **asked: Any) -> CompletionResponse:
    return client.complete(PROMPT, **{"max_tokens": 12, "speculative": DRAFTED, **asked})


def test_log_probabilities_are_the_targets_with_and_without_drafts(client: Client) -> None:
    drafted, plain = (complete(client, temperature=0, logprobs=2, speculative=how) for how in (DRAFTED, OFF))
    assert drafted.usage.completion_tokens_details.accepted_prediction_tokens > 0
    first, second = drafted.choices[0].logprobs, plain.choices[0].logprobs
    assert first.tokens == second.tokens
    assert first.token_logprobs == pytest.approx(second.token_logprobs, abs=1e-4)
    for token, logprob, top in zip(first.tokens, first.token_logprobs, first.top_logprobs, strict=True):
        assert max(top, key=top.get) == token  # greedy
        assert top[token] == logprob


def test_the_first_of_n_choices_equals_a_single_choice(client: Client) -> None:
    three, one = (complete(client, seed=3, n=n) for n in (3, 1))
    assert three.choices[0].text == one.choices[0].text
    assert len({choice.text for choice in three.choices}) == 3
    assert three.usage.prompt_tokens == one.usage.prompt_tokens


def test_usage_reports_cached_tokens(client: Client) -> None:
    prompt = "class Cache:\n    def find(self, key):\n        return self.pages[key]\n\n    def drop(self):" * 3
    answers = [
        client.complete(prompt, max_tokens=8, temperature=0, speculative=DRAFTED, cache_salt=salt)
        for salt in (None, None, "mine", "mine", "another")
    ]
    assert len({answer.text for answer in answers}) == 1
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    shared = (answers[0].usage.prompt_tokens - 1) // 16 * 16
    assert cached == [0, shared, 0, shared, 0] and shared > 0


@pytest.mark.parametrize("how", [DRAFTED, OFF, REJECTION], ids=["coupled", "off", "rejection"])
def test_constraints_forbid_and_force_tokens(client: Client, tokenizer: Tokenizer, how: dict[str, Any]) -> None:
    usual = complete(client, temperature=0, speculative=how).text
    word = usual.split(".")[0].strip()
    assert word not in complete(client, temperature=0, speculative=how, bad_words=[word]).text
    letters = tokenizer.encode("xyz")
    assert set(complete(client, seed=1, speculative=how, allowed_token_ids=letters).text) <= set("xyz")
    forced = complete(client, seed=1, speculative=how, logit_bias={str(letters[0]): 100}).text
    assert forced == tokenizer.decode([letters[0]]) * 12


def test_tokens_behind_a_stop_string_are_not_reported_as_accepted(client: Client) -> None:
    prompt = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n"
    answer = client.complete(prompt, max_tokens=60, temperature=0, stop=["\n"], speculative=DRAFTED)
    details = answer.usage.completion_tokens_details
    assert 0 < details.accepted_prediction_tokens <= answer.usage.completion_tokens < 60
    metrics = httpx2.get(f"{client.base_url}/metrics").text.splitlines()
    told = {
        name: sum(float(line.split()[-1]) for line in metrics if line.startswith(f"secateur_{name}_total{{"))
        for name in ("spec_decode_num_accepted_tokens", "generation_tokens")
    }
    assert 0 < told["spec_decode_num_accepted_tokens"] <= told["generation_tokens"]


def test_min_tokens_keeps_an_answer_from_ending(client: Client) -> None:
    usual, ended, kept = (
        complete(client, temperature=0, **asked)
        for asked in ({}, {"logit_bias": {"0": 100}}, {"logit_bias": {"0": 100}, "min_tokens": 5})
    )
    assert [answer.choices[0].finish_reason for answer in (ended, kept)] == ["stop", "stop"]
    assert [answer.usage.completion_tokens for answer in (ended, kept)] == [1, 6]  # the end counts
    assert kept.text and usual.text.startswith(kept.text)


def test_a_request_whose_bad_words_leave_no_token_is_still_answered(client: Client, tokenizer: Tokenizer) -> None:
    x, y = (tokenizer.encode(letter)[0] for letter in "xy")
    answer = complete(client, allowed_token_ids=[x, y], bad_words=["xx", "xy", "yx", "yy"])
    assert answer.usage.completion_tokens == 12
    assert complete(client, temperature=0).text  # and the engine lives


HOWS = {"off": OFF, "coupled": DRAFTED, "rejection": REJECTION, "auto": None}
AT_THE_LIMITS: list[dict[str, Any]] = [
    {"top_k": 2**31},
    {"top_k": 1, "temperature": 1e6},
    {"temperature": 1e6, "bad_words": ["return"]},
    {"temperature": 1e-5},
    {"top_p": 1e-300, "min_p": 1e-300},
    {"min_p": 1.0},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"repetition_penalty": 100.0, "presence_penalty": 2.0, "frequency_penalty": -2.0},
    {"repetition_penalty": 0.01, "temperature": 1e6},
    {"logit_bias": {str(id): 100.0 for id in range(1024)}},
    {"stop_token_ids": list(range(1024)), "min_tokens": 12},
    {"allowed_token_ids": list(range(1, 2048))},
]


@pytest.mark.parametrize(
    ("asked", "how"),
    [
        pytest.param(asked, how, id=f"{'+'.join(asked)}-{name}", marks=[pytest.mark.full] if (row + column) % 2 else [])
        for row, asked in enumerate(AT_THE_LIMITS)
        for column, (name, how) in enumerate(HOWS.items())
    ],
)
def test_requests_at_the_limits_are_answered(
    client: Client, tokenizer: Tokenizer, how: dict[str, Any] | None, asked: dict[str, Any]
) -> None:
    """A request beyond the engine's limits would stop the engine and all answers."""
    answer = complete(client, **{"ignore_eos": True, "speculative": how, "return_token_ids": True, **asked})
    assert answer.usage.completion_tokens == 12
    for word in tokenizer.bad_words(asked.get("bad_words", ())):  # " returns" is a token of its own, not forbidden
        assert len(word) == 1 and word[0] not in answer.choices[0].token_ids


RECITED = 'I \n call:<tool_call>{"name": "f", "arguments": {"a": 10}}</tool_call> Done.'


def reciting_model(folder: Path, tokenizer: Tokenizer, text: str) -> Path:
    """Write a model that answers every chat with this text: each of its tokens is the one that follows another.

    As its own drafter it is always right, so the text comes in steps as long as the request allows.
    """
    pieces = [text[start : start + 3] for start in range(0, len(text), 3)]  # tokens that all differ
    assert len(set(pieces)) == len(pieces)
    spelling = tokenizers.Tokenizer.from_file(f"{tokenizer.path}/tokenizer.json")
    spelling.add_tokens([tokenizers.AddedToken(piece, normalized=False) for piece in pieces])
    answer = [spelling.token_to_id(piece) for piece in pieces]
    sizes = {"vocab_size": spelling.get_vocab_size(), "hidden_size": 256, "num_hidden_layers": 1}
    write_model(folder, "llama", **sizes, max_position_embeddings=2048, eos_token_id=0)
    spelling.save(str(folder / "tokenizer.json"))
    weights = load_file(folder / "model.safetensors")
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"].zero_()
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name].zero_()  # only the last token counts
    weights["model.norm.weight"].fill_(1)
    embedding[[id for id in range(len(embedding)) if id not in answer]] = embedding[0].clone()  # it begins behind them
    for before, after in zip([0, *answer], [*answer, 0], strict=True):
        head[after] = embedding[before]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        copyfile(f"{tokenizer.path}/{name}", folder / name)
    return folder


def test_items_of_a_response_are_the_same_in_whichever_steps_they_came(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = str(reciting_model(tmp_path / "model", tokenizer, RECITED))
    drafter = {"method": "draft_model", "model": model, "num_speculative_tokens": 12}
    args = {"port": 0, "device": "cpu", "model": model, "max_num_seqs": 4, "speculative_config": drafter}
    lengths = set()
    with local_service(EngineArgs.load(args)) as url, httpx2.Client(base_url=url, timeout=60) as http:
        for nodes in (None, 1, 2, 3, 5, 8, 12):
            how = OFF if nodes is None else DRAFTED | {"num_speculative_tokens": nodes}
            for stop in ([], ["10}}</tool_call> Done.X"]):
                body = {"input": "go", "tools": [{"type": "function", "name": "f"}], "temperature": 0, "stop": stop}
                body |= {"speculative": how, "include": ["message.output_text.logprobs"]}
                whole = http.post("/v1/responses", json=body)
                assert whole.status_code == 200, whole.text
                lines = http.post("/v1/responses", json={**body, "stream": True}).text.splitlines()
                told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
                assert told[-1]["type"] == "response.completed", told[-1]
                for response in (whole.json(), told[-1]["response"]):
                    first, call, last = response["output"]
                    assert (call["name"], call["arguments"]) == ("f", '{"a": 10}')
                    for message, text in ((first, "I \n call:"), (last, "Done.")):
                        [part] = message["content"]
                        assert part["text"] == "".join(score["token"] for score in part["logprobs"]).strip() == text
                lengths.add(len(told))
    assert len(lengths) > 2, "the steps differ"
