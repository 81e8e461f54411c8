"""`response_format` and `structured_outputs`: what reaches the engine, and what is refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import llguidance
import pytest

from cluster.text.tokenizer import Tokenizer
from cluster.text.tokenizer_pool import JobTooCostly, TokenizerForkServer, TokenizerPool
from cluster.text.tokenizer_worker import JobLimits
from secateur.bodies import Structure
from tests.support.fake_service import FakeService, error_of, stream
from workers.sampling.grammar import MAX_GRAMMAR_CHARS, TokenTable

CHAT = {"messages": [{"role": "user", "content": "a"}]}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", 5]}}, "required": ["a"], "additionalProperties": False}
OPEN = {key: value for key, value in SCHEMA.items() if key != "additionalProperties"}
LONG_CHAIN = "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(3000)) + 'r3000: "a"'
"""Overflows a stack of 8 MiB."""
ONE_OF_OPEN = {
    "oneOf": [
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
        {"type": "object", "properties": {"b": {"type": "null"}}},
    ]
}
"""{"a": null} matches both, also if the second is closed."""
HOSTILE = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2500)}}


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, **more}}


def matches(grammar: str, text: str, folder: str) -> bool:
    matcher = llguidance.LLMatcher(TokenTable(folder, 2048, (0, 2)).load(), grammar, log_level=0)
    ids = Tokenizer(folder).encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("asked", "right", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, '{"b": [1, null]}', "[1]"),
        ({"response_format": schema_format(SCHEMA, strict=True)}, '{"a": 5}', '{"a": 6}'),
        ({"response_format": schema_format(SCHEMA, strict=False, description="a thing")}, '{"a":"x"}', "{}"),
        ({"structured_outputs": {"json": SCHEMA}}, '{ "a": "x"\n}', '{"a": null}'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a": 5}', '{"b": 5}'),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, '{"a":5}', '{"a": 5}'),
        ({"structured_outputs": {"json_object": True}}, "{}", "5"),
        ({"structured_outputs": {"regex": r"a/[0-9]{2}\n"}}, "a/12\n", "a/123\n"),
        ({"structured_outputs": {"choice": ['say "x"', "🌳"]}}, 'say "x"', "say"),
        ({"response_format": schema_format(OPEN, strict=False)}, '{"a": 5}', '{"a": 5, "z": 1}'),
        ({"structured_outputs": {"json": OPEN, "disable_additional_properties": False}}, '{"a":5, "z":1}', '{"z":1}'),
        ({"structured_outputs": {"json": OPEN}, "disable_additional_properties": False}, '{"a":5, "z":1}', '{"z":1}'),
        ({"structured_outputs": {"grammar": 'start: "a" b+\nb: "b" | "c"'}}, "abc", "a"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]+'}}, "a12", "12"),
        ({"structured_outputs": {"choice": ["a", "b"]}, "response_format": {"type": "text"}}, "b", "ab"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_engine_gets_the_grammar(
    http: httpx2.Client, service: FakeService, tokenizer: Tokenizer, path: str, asked: Any, right: str, wrong: str
) -> None:
    prompt = CHAT if "chat" in path else {"prompt": "a"}
    response = http.post(path, json={**prompt, **asked, "n": 2})
    assert response.status_code == 200 and "x-secateur-ignored" not in response.headers
    first, second = (submit.sampling.constraints.grammar for submit in service.engine.submitted[-2:])
    assert first == second
    assert matches(first, right, tokenizer.path) and not matches(first, wrong, tokenizer.path)
    assert stream(http, path, **prompt, **asked)[-1] == "[DONE]"


def test_without_a_structure_there_is_no_grammar(http: httpx2.Client, service: FakeService) -> None:
    for asked in ({}, {"response_format": {"type": "text"}}, {"structured_outputs": None, "response_format": None}):
        assert http.post("/v1/completions", json={"prompt": "a", **asked}).status_code == 200
        assert service.engine.submitted[-1].sampling.constraints.grammar == ""


@pytest.mark.parametrize(
    ("asked", "param", "told"),
    [
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"response_format": {"type": "yaml"}}, "response_format", "must be 'text', 'json_object' or 'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema: is missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format", "is required"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format", "belongs to"),
        ({"response_format": schema_format({"type": "thing"})}, "response_format", "Invalid type: thing"),
        ({"response_format": schema_format({"not": {}})}, "response_format", 'Unimplemented keys: ["not"]'),
        ({"response_format": schema_format({"$ref": "http://127.0.0.1/a"})}, "response_format", "not present"),
        (
            {"response_format": schema_format({"type": "string", "minLength": 3, "maxLength": 2})},
            "response_format",
            "Unsatisfiable schema",
        ),
        (
            {"response_format": schema_format({"const": 2**53 + 1})},
            "response_format",
            "const: 9007199254740993 has more",
        ),
        ({"response_format": schema_format(ONE_OF_OPEN)}, "response_format", "oneOf is only supported where"),
        ({"structured_outputs": {}}, "structured_outputs", "give exactly one of json, regex, choice, grammar"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "(got json and regex)"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "(got none)"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "Expecting property name"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs", "a JSON schema is an object"),
        ({"structured_outputs": {"json": "5} ] }"}}, "structured_outputs", "Extra data"),
        ({"structured_outputs": {"json": "[" * 50_000}}, "structured_outputs", "nested too deeply"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": r"[^\s\S]"}}, "structured_outputs", "no text matches it"),
        ({"structured_outputs": {"regex": "a" * MAX_GRAMMAR_CHARS}}, "structured_outputs", "characters; at most"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "must have at least 1 item"),
        ({"structured_outputs": {"grammar": "start: stop"}}, "structured_outputs", 'unknown name: "stop"'),
        ({"structured_outputs": {"grammar": LONG_CHAIN}}, "structured_outputs", "2 MiB of stack to compile"),
        (
            {"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "contradicts response_format",
        ),
        ({"guided_json": SCHEMA}, "guided_json", 'is obsolete; write structured_outputs={"json": ...}'),
        ({"guided_choice": ["a"]}, "guided_choice", 'write structured_outputs={"choice": ...}'),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_wrong_structure_is_a_400_that_says_why(
    http: httpx2.Client, path: str, asked: Any, param: str, told: str
) -> None:
    prompt = CHAT if "chat" in path else {"prompt": "a"}
    response = http.post(path, json={**prompt, **asked, "stream": "chat" in path})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert told in error["message"] and len(error["message"]) < 600


def test_a_service_may_leave_objects_open(own: Callable[..., FakeService], tokenizer: Tokenizer) -> None:
    running = own(closes_objects=False)
    tool = {"type": "function", "function": {"name": "f", "parameters": OPEN}}
    named = {"type": "function", "function": {"name": "f"}}
    with running.http() as http:
        for asked, is_open in [
            ({"response_format": schema_format(OPEN)}, True),
            ({"response_format": schema_format(OPEN), "disable_additional_properties": True}, False),
            ({"tools": [tool], "tool_choice": named}, True),
            ({"tools": [tool], "tool_choice": named, "disable_additional_properties": True}, False),
        ]:
            assert http.post("/v1/chat/completions", json={**CHAT, **asked}).status_code == 200
            grammar = running.engine.submitted[-1].sampling.constraints.grammar
            assert matches(grammar, '{"a": 5, "z": 1}', tokenizer.path) == is_open
            assert matches(grammar, '{"a": 5}', tokenizer.path)


def test_unknown_parts_are_named_as_ignored(http: httpx2.Client) -> None:
    asked = {"structured_outputs": {"regex": "a", "backend": "xgrammar"}, "prompt": "a"}
    assert http.post("/v1/completions", json=asked).headers["x-secateur-ignored"] == "structured_outputs.backend"
    asked = {"disable_additional_properties": False, "prompt": "a"}
    assert http.post("/v1/completions", json=asked).headers["x-secateur-ignored"] == "disable_additional_properties"


async def test_a_grammar_that_takes_too_long_costs_its_worker_and_nothing_else(tokenizer: Tokenizer) -> None:
    parent = TokenizerForkServer(tokenizer, JobLimits(grammar_s=0.05))
    parent.wait_loaded()
    async with TokenizerPool(tokenizer, num_workers=1, parent=parent) as pool:
        await pool.ready()
        asked = {"end_token_ids": (0, 2), "vocab_size": 2048}
        with pytest.raises(JobTooCostly, match=r"response_format: it took more than 0\.05 s") as refused:
            await pool.grammar(Structure("json", HOSTILE, "response_format"), **asked)
        assert (refused.value.param, refused.value.code) == ("response_format", "grammar_too_costly")
        assert await pool.grammar(Structure("choice", ["a"], "structured_outputs"), **asked)
    parent.close()


def test_a_service_whose_model_has_no_end_token_says_so(own: Callable[..., FakeService], service: FakeService) -> None:
    from dataclasses import replace

    running = own(config=replace(service.service.config, eos_token_ids=()), parent=None)
    with running.http() as http:
        error = error_of(http.post("/v1/completions", json={"prompt": "a", "structured_outputs": {"regex": "a"}}))
        assert error["message"].startswith("structured_outputs: structured outputs need a model with an end token")


async def test_a_model_without_tokenizer_json_or_a_service_without_the_package_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from workers.sampling.grammar import GrammarError, grammar_text

    with pytest.raises(GrammarError, match=r"need a model with a tokenizer\.json"):
        TokenTable(str(tmp_path), 2048, (0,)).compile(grammar_text("regex", "a"))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarError, match="need the package llguidance, which is not installed here"):
        grammar_text("regex", "a")
