"""Structured outputs over hundreds of JSON schemas: refused by name, or valid and the same whatever is drafted.

`--full` asks for all schemas at several temperatures and seeds, instead of one in ten at one of them.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from cluster.local_service import local_service
from cluster.text.tokenizer import Tokenizer
from secateur.config import EngineArgs
from tests.support.engines import BUNDLED
from tests.support.json_schemas import WRITTEN, check_valid, completed, random_schema, suite
from workers.sampling.grammar import TokenTable, grammar_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SHARE = 10
NUM_RANDOM = 80
MAX_TOKENS = 96
CONCURRENCY = 16
SPECULATIVE = ({"enabled": False}, {"num_speculative_tokens": 12, "tree_prune": "off"})
REFUSED = {
    "some of three properties": "minProperties",
    "map with a minimum": "minProperties",
    "one of that overlap": "oneOf",
    "not": "not",
    "if": "if",
    "unique items": "uniqueItems",
    "contains": "contains",
    "property names": "propertyNames",
    "dependent properties": "dependentRequired",
    "unevaluated properties": "unevaluatedProperties",
}
"""The written schemas that are refused, and what the refusal names."""
ALL = (
    {f"written: {name}": schema for name, schema in WRITTEN.items()}
    | {f"suite: {name}": schema for name, schema in suite().items()}
    | {f"random: {seed}": random_schema(random.Random(seed)) for seed in range(NUM_RANDOM)}
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    args = {"port": 0, "device": "cpu", "max_num_seqs": CONCURRENCY, "max_model_len": 256}
    with local_service(EngineArgs.load(args)) as url:
        yield url


@pytest.fixture(scope="module")
def table() -> TokenTable:
    return TokenTable(str(BUNDLED / "target"), 2048, (0, 2))


def asked(schema: dict[str, Any], temperature: float, seed: int, speculative: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": "data = ",
        "max_tokens": MAX_TOKENS,
        "temperature": temperature,
        "seed": seed,
        "return_token_ids": True,
        "structured_outputs": {"json": schema, "disable_any_whitespace": True},
        "speculative": speculative,
    }


async def answers(url: str, bodies: list[dict[str, Any]]) -> list[httpx2.Response]:
    """Return the responses, in order."""
    free = asyncio.Semaphore(CONCURRENCY)

    async def answer(http: httpx2.AsyncClient, body: dict[str, Any]) -> httpx2.Response:
        async with free:
            return await http.post("/v1/completions", json=body)

    async with httpx2.AsyncClient(base_url=url, timeout=120) as http:
        return await asyncio.gather(*(answer(http, body) for body in bodies))


def check_refusal(name: str, schema: dict[str, Any], response: httpx2.Response) -> None:
    """Check that a 400 names a keyword or a value of the schema, or says that nothing satisfies it."""
    assert response.status_code == 400, (name, response.text)
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "structured_outputs"), (name, error)
    named = [word for word in _words(schema) if word in error["message"]]
    assert named or "Unsatisfiable" in error["message"], (name, error)


def _words(schema: Any) -> set[str]:
    """Return the keywords, names and texts of a schema."""
    if isinstance(schema, dict):
        return set(schema) | {word for part in schema.values() for word in _words(part)}
    if isinstance(schema, list):
        return {word for part in schema for word in _words(part)}
    return {schema} if isinstance(schema, str) and schema else set()


def test_answers_are_valid_and_the_same_with_and_without_drafts_or_the_schema_is_refused(
    url: str, table: TokenTable, request: pytest.FixtureRequest
) -> None:
    is_full = request.config.getoption("--full")
    names = list(ALL)[:: 1 if is_full else SHARE]
    settings = [(0, 1), (1, 1), (1, 2)]
    cases = [
        (name, *setting)
        for place, name in enumerate(names)
        for setting in (settings if is_full else [settings[place % len(settings)]])
    ]
    bodies = [asked(ALL[name], *setting, draft) for name, *setting in cases for draft in SPECULATIVE]
    responses = asyncio.run(answers(url, bodies))
    tokenizer = Tokenizer(str(BUNDLED / "target"))
    texts = [tokenizer.decode([token]) for token in range(table.vocab_size)]

    refused, num_valid, num_cut, num_accepted = set(), 0, 0, 0
    for place, (name, *setting) in enumerate(cases):
        plain, drafted = responses[2 * place : 2 * place + 2]
        if plain.status_code != 200:
            check_refusal(name, ALL[name], plain)
            check_refusal(name, ALL[name], drafted)
            refused.add(name)
            continue
        [choice], [other] = plain.json()["choices"], drafted.json()["choices"]
        assert choice["token_ids"] == other["token_ids"] and choice["text"] == other["text"], (name, setting)
        text = choice["text"]
        if choice["finish_reason"] == "length":
            num_cut += 1
            grammar = grammar_text("json", ALL[name], whitespace="none")
            text = tokenizer.decode(completed(table, grammar, choice["token_ids"], texts))
        check_valid(text, ALL[name])
        num_valid += 1
        num_accepted += drafted.json()["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    told = {
        "schemas": len(names), "refused": len(refused), "answers": 2 * num_valid, "cut": 2 * num_cut,
        "draft tokens accepted": num_accepted,
    }  # fmt: skip
    print(json.dumps(told))
    assert num_accepted > num_valid, "next to nothing is drafted"
    assert num_cut < num_valid / 2, "most answers must come to their own end"
    written = {name.removeprefix("written: ") for name in names if name.startswith("written: ")}
    assert {name.removeprefix("written: ") for name in refused if name.startswith("written: ")} == written & set(
        REFUSED
    )
    assert not any(name.startswith("random: ") for name in refused)


def test_a_refusal_names_the_keyword(url: str) -> None:
    bodies = [asked(WRITTEN[name], 0, 1, {}) for name in REFUSED]
    for name, response in zip(REFUSED, asyncio.run(answers(url, bodies)), strict=True):
        check_refusal(name, WRITTEN[name], response)
        assert REFUSED[name] in response.json()["error"]["message"]
