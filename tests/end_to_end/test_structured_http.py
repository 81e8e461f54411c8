"""Structured outputs of a real tensor-parallel service: valid, and the same with and without drafts and streaming."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from cluster.local_service import local_service
from secateur import Client
from secateur.config import EngineArgs
from secateur.errors import APIError, BadRequestError
from secateur.sampling import AnswerFormat

pytestmark = pytest.mark.slow

DRAFTED = {"tree_prune": "off", "num_speculative_tokens": 12}
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "dark blue"]},
        "sizes": {"type": "array", "items": {"enum": [1, 2, 30]}, "minItems": 1, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["colour", "sizes", "ok"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
ASKED: list[dict[str, Any]] = [
    {"temperature": temperature, "seed": seed, "max_tokens": 80, "response_format": FORMAT}
    for temperature, seed in [(0, 1), (1, 1), (1, 2), (1.5, 3)]
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    args = {"port": 0, "device": "cpu", "max_num_seqs": 8, "max_model_len": 512, "tensor_parallel_size": 2}
    with local_service(EngineArgs.load(args)) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


def test_a_chat_follows_its_schema_with_the_same_tokens_whatever_is_drafted(client: Client) -> None:
    for asked in ASKED:
        texts = set()
        for speculative in (DRAFTED, {"enabled": False}, {**DRAFTED, "tree_prune": "auto"}):
            answer = client.chat("Describe it.", **asked, speculative=speculative)
            [choice] = answer.choices
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
            texts.add(choice.message.content)
        assert len(texts) == 1
        chunks = client.stream_chat("Describe it.", **asked, speculative=DRAFTED)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == texts.pop()


def test_under_rejection_answers_are_valid_too(client: Client) -> None:
    for asked in ASKED[1:]:
        answer = client.chat("Describe it.", **asked, n=4, speculative={**DRAFTED, "acceptance": "rejection"})
        assert len(answer.choices) == 4
        for choice in answer.choices:
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_a_completion_takes_a_choice_a_regex_and_a_grammar(client: Client) -> None:
    def text(**structured: Any) -> str:
        told = set()
        for speculative in (DRAFTED, {"enabled": False}):
            answer = client.complete(
                "The answer is", seed=5, max_tokens=60, structured_outputs=structured, speculative=speculative
            )
            assert answer.choices[0].finish_reason == "stop"
            told.add(answer.choices[0].text)
        assert len(told) == 1
        return told.pop()

    assert text(choice=["positive", "negative"]) in ("positive", "negative")
    assert len(text(regex=r"[0-9]{3}-[0-9]{4}")) == 8
    assert set(text(grammar='start: "(" N ("," N){0,3} ")"\nN: /[0-9]{1,2}/')) <= set("(,)0123456789")


def test_a_model_of_the_request_is_sent_under_its_json_name(client: Client) -> None:
    answer = client.chat("Describe it.", **{**ASKED[1], "response_format": AnswerFormat.model_validate(FORMAT)})
    assert answer.choices[0].message.content == client.chat("Describe it.", **ASKED[1]).choices[0].message.content


def test_drafts_are_accepted_under_a_grammar(client: Client) -> None:
    answer = client.chat("Describe it.", **ASKED[0], speculative=DRAFTED, return_speculative_stats=True)
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 3


def test_a_grammar_that_becomes_too_complex_is_a_400_of_its_request(client: Client) -> None:
    asked = {"structured_outputs": {"regex": "((a{1,500}){1,500}){1,500}"}, "max_tokens": 200, "temperature": 0}
    with pytest.raises(BadRequestError, match="could not follow its grammar") as refused:
        client.complete("a", **asked)
    assert refused.value.code == "grammar_failed"
    with pytest.raises(APIError, match="could not follow its grammar"):
        list(client.stream_complete("a", **asked))
    assert client.complete("a", structured_outputs={"choice": ["b"]}).choices[0].text == "b"


class Thing(BaseModel):
    colour: Literal["red", "green"]
    size: Literal[1, 2]


def test_openais_client_parses_an_answer(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as theirs:
        model = theirs.models.list().data[0].id
        answer = theirs.chat.completions.parse(
            model=model, messages=[{"role": "user", "content": "a"}], response_format=Thing, temperature=0, seed=1
        )
    assert isinstance(answer.choices[0].message.parsed, Thing)
