"""Tools over HTTP: calls of the model's own choice, calls that are demanded, and custom tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from cluster.text.answer_reader import AnswerReaders
from cluster.text.tokenizer import Tokenizer
from tests.cluster.http.test_structured_outputs import matches
from tests.support.fake_service import FakeService, error_of, fake_service, stream
from tests.support.tools import CALLED, CHAT, HI, TOOLS, copied_tokenizer
from workers.comm.ipc import Submit

Calls = list[tuple[str, str]]


@pytest.fixture
def answering(tokenizer: Tokenizer, tmp_path: Path) -> Callable[..., Any]:
    """Return a service whose engine writes this text, three tokens a step."""

    def service(text: str, **settings: Any) -> Any:
        ids = tokenizer.encode(text, add_special_tokens=False)
        steps = [ids[start : start + 3] for start in range(0, len(ids), 3)]
        steps = [*steps[:-1], [*(steps[-1] if steps else []), 0]]
        return fake_service(tokenizer, tmp_path, lambda submit: [list(step) for step in steps], **settings)

    return service


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message and the reason of a stream, as clients assemble them."""
    message: dict[str, Any] = {"content": None, "tool_calls": []}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            assert delta or choice["finish_reason"], "an empty chunk"
            if delta.get("content"):
                message["content"] = (message["content"] or "") + delta["content"]
            numbers = [part["index"] for part in delta.get("tool_calls", ())]
            assert len(set(numbers)) == len(numbers), "some clients read only the first part of a call"
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    assert part["index"] == len(message["tool_calls"])
                    message["tool_calls"].append(part | {"function": dict(part["function"])})
                else:
                    own = message["tool_calls"][part["index"]]["function"]
                    own["arguments"] += part["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
    return message


@pytest.mark.parametrize(
    ("text", "asked", "content", "calls", "reason"),
    [
        (CALLED, {}, "I order.", [("order", '{"what": "tea"}')], "tool_calls"),
        (CALLED, {"tool_choice": "auto"}, "I order.", [("order", '{"what": "tea"}')], "tool_calls"),
        (CALLED, {"tool_choice": "none"}, CALLED, [], "stop"),
        ("No call.", {}, "No call.", [], "stop"),
        ("", {}, "", [], "stop"),
        (CALLED + CALLED, {"parallel_tool_calls": False}, "I order.\nI order.", [("order", '{"what": "tea"}')], None),
        (
            '[{"name": "order", "parameters": {"what": 5}}, {"name": "stop", "parameters": {}}]',
            {"tool_choice": "required"},
            None,
            [("order", '{"what": 5}'), ("stop", "{}")],
            "tool_calls",
        ),
        (
            '{"what": 5}',
            {"tool_choice": {"type": "function", "function": {"name": "order"}}},
            None,
            [("order", '{"what": 5}')],
            "stop",
        ),
    ],
)
def test_calls_reach_the_client_whole_and_in_a_stream(
    answering: Any, text: str, asked: Any, content: str | None, calls: Calls, reason: str | None
) -> None:
    with answering(text) as service, service.http() as http:
        body = {"messages": [HI], "tools": TOOLS, **asked}
        choice = http.post(CHAT, json=body).raise_for_status().json()["choices"][0]
        message = choice["message"]
        got = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        assert (message["content"], got, choice["finish_reason"]) == (content, calls, reason or "tool_calls")
        assert all(call["type"] == "function" and call["id"] for call in message.get("tool_calls", ()))
        streamed = assembled(stream(http, CHAT, **body)[:-1])
        got = [(call["function"]["name"], call["function"]["arguments"]) for call in streamed["tool_calls"]]
        assert (streamed["content"], got, streamed["finish_reason"]) == (content or None, calls, reason or "tool_calls")


TWO_CALLS = '[{"name": "order", "parameters": {"what": 5}}, {"name": "stop", "parameters": {}}]'


def custom(format: dict[str, Any] | None = None) -> dict[str, Any]:
    about = {"name": "patch", "description": "Edits files."} | ({"format": format} if format else {})
    return {"type": "custom", "custom": about}


def allowing(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools, {"type": "web_search"}]}}


LARK = """start: "*** Begin" LF change+ "*** End" LF?
change: "+" /(.*)/ LF
%import common.LF"""
PATCH = custom({"type": "grammar", "grammar": {"syntax": "lark", "definition": LARK}})
NAMED_CUSTOM = {"type": "custom", "custom": {"name": "patch"}}
EDIT = '*** Begin\n+a "b"\n*** End'
WRITTEN_EDIT = f'Yes.\n<tool_call>\n{{"name": "patch", "arguments": {json.dumps({"input": EDIT})}}}\n</tool_call>'
BROKEN_EDIT = '<tool_call>{"name": "patch", "arguments": {"input": a}}</tool_call>'


@pytest.mark.parametrize(
    ("written", "asked", "content", "input", "reason"),
    [
        (WRITTEN_EDIT, {"tools": [PATCH]}, "Yes.", EDIT, "tool_calls"),
        (WRITTEN_EDIT, {"tools": [*TOOLS, custom()], "tool_choice": "auto"}, "Yes.", EDIT, "tool_calls"),
        (BROKEN_EDIT, {"tools": [PATCH]}, None, '{"input": a}', "tool_calls"),
        (EDIT, {"tools": [PATCH], "tool_choice": "required"}, None, EDIT, "tool_calls"),
        (EDIT, {"tools": [*TOOLS, PATCH], "tool_choice": NAMED_CUSTOM}, None, EDIT, "stop"),
        (json.dumps({"input": EDIT}), {"tools": [custom()], "tool_choice": NAMED_CUSTOM}, None, EDIT, "stop"),
        (
            json.dumps([{"name": "patch", "parameters": {"input": EDIT}}]),
            {"tools": [*TOOLS, custom()], "tool_choice": "required"},
            None,
            EDIT,
            "tool_calls",
        ),
    ],
)
def test_a_custom_tool_gets_text(
    tokenizer: Tokenizer, tmp_path: Path, written: str, asked: Any, content: str | None, input: str, reason: str
) -> None:
    ids = [*tokenizer.encode(written, add_special_tokens=False), 0]
    script = lambda submit: [ids[start : start + 3] for start in range(0, len(ids), 3)]  # noqa: E731
    with fake_service(tokenizer, tmp_path, script) as own, own.http() as http:
        body = {"messages": [HI], **asked}
        [choice] = http.post(CHAT, json=body).raise_for_status().json()["choices"]
        message = choice["message"]
        [call] = message["tool_calls"]
        assert (message["content"], choice["finish_reason"]) == (content, reason)
        assert (call["type"], call["custom"], call.keys()) == (
            "custom",
            {"name": "patch", "input": input},
            {"id", "type", "custom"},
        )
        deltas = [chunk["choices"][0]["delta"] for chunk in stream(http, CHAT, **body)[:-1] if chunk["choices"]]
        parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
        assert parts[0]["type"] == "custom" and parts[0]["custom"]["name"] == "patch"
        assert "".join(part["custom"].get("input", "") for part in parts) == input
        http.post(CHAT, json={"messages": [HI, message, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]})
        prompt = tokenizer.decode(own.engine.submitted[-1].prompt, skip_special_tokens=False)
        assert json.dumps({"name": "patch", "arguments": {"input": input}}) in prompt


def test_a_bare_input_that_is_cut_is_no_call(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The part that has come may be JSON by accident."""
    digits = custom({"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]+"}})
    ids = tokenizer.encode("1234", add_special_tokens=False)
    with fake_service(tokenizer, tmp_path, lambda submit: [[id] for id in ids]) as own, own.http() as http:
        body = {"messages": [HI], "tools": [digits], "tool_choice": NAMED_CUSTOM, "max_tokens": len(ids)}
        [choice] = http.post(CHAT, json=body).raise_for_status().json()["choices"]
    assert choice["finish_reason"] == "length" and not choice["message"].get("tool_calls")


def test_the_model_is_told_of_a_custom_tool_as_of_a_function(
    http: httpx2.Client, service: FakeService, tokenizer: Tokenizer
) -> None:
    digits = custom({"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]{2}"}})
    asked = {"messages": [HI], "tools": [PATCH]}
    http.post(CHAT, json=asked).raise_for_status()
    prompt = tokenizer.decode(service.engine.submitted[-1].prompt, skip_special_tokens=False)
    assert '"name": "patch"' in prompt and json.dumps(LARK)[1:-1] in prompt and '"required": ["input"]' in prompt
    for tools, choice, right, wrong in [
        ([PATCH], NAMED_CUSTOM, EDIT, "*** Begin\n*** End"),
        ([digits, *TOOLS], NAMED_CUSTOM, "12", "123"),
        (
            [digits, *TOOLS],
            "required",
            '[{"name": "patch", "parameters": {"input": "12"}}]',
            '[{"name": "patch", "parameters": {"input": "123"}}]',
        ),
    ]:
        http.post(CHAT, json={"messages": [HI], "tools": tools, "tool_choice": choice}).raise_for_status()
        grammar = service.engine.submitted[-1].sampling.constraints.grammar
        assert matches(grammar, right, tokenizer.path) and not matches(grammar, wrong, tokenizer.path)


def test_tools_of_other_kinds_are_left_out_and_named(
    http: httpx2.Client, service: FakeService, tokenizer: Tokenizer
) -> None:
    search = {"type": "web_search", "search_context_size": "low"}
    response = http.post(CHAT, json={"messages": [HI], "tools": [search, TOOLS[0], {"type": "local_shell"}]})
    assert response.headers["x-secateur-ignored"] == "tools.0 (web_search), tools.2 (local_shell)"
    prompt = tokenizer.decode(service.engine.submitted[-1].prompt, skip_special_tokens=False)
    assert '"order"' in prompt and "search" not in prompt
    assert http.post(CHAT, json={"messages": [HI], "tools": [search]}).status_code == 200


def test_allowed_tools_are_those_that_the_model_may_call(
    http: httpx2.Client, service: FakeService, tokenizer: Tokenizer
) -> None:
    for mode in ("auto", "required"):
        response = http.post(CHAT, json={"messages": [HI], "tools": TOOLS, "tool_choice": allowing(mode, "stop")})
        assert response.headers["x-secateur-ignored"] == "tool_choice.allowed_tools.tools.1 (web_search)"
        submit = service.engine.submitted[-1]
        prompt = tokenizer.decode(submit.prompt, skip_special_tokens=False)
        assert '"stop"' in prompt and '"order"' not in prompt
    grammar = submit.sampling.constraints.grammar
    assert matches(grammar, '[{"name": "stop", "parameters": {}}]', tokenizer.path)
    assert not matches(grammar, '[{"name": "order", "parameters": {"what": 1}}]', tokenizer.path)


NAMED = {"tool_choice": {"type": "function", "function": {"name": "order"}}}


@pytest.mark.parametrize(
    ("text", "asked", "whole_calls"),
    [
        (CALLED, {}, [("order", '{"what": "tea"}')]),
        (TWO_CALLS, {"tool_choice": "required"}, [("order", '{"what": 5}'), ("stop", "{}")]),
        ('{"what": "tea, and more"}', NAMED, [("order", '{"what": "tea, and more"}')]),
    ],
)
def test_an_answer_that_is_cut_has_no_half_call(
    answering: Any, tokenizer: Tokenizer, text: str, asked: Any, whole_calls: Calls
) -> None:
    """A whole message cannot mark a call as half; a stream has sent it by then. Both say that they were cut."""
    with answering(text) as service, service.http() as http:
        body, numbers = {"messages": [HI], "tools": TOOLS, **asked}, set()
        for max_tokens in range(1, len(tokenizer.encode(text, add_special_tokens=False))):
            choice = http.post(CHAT, json={**body, "max_tokens": max_tokens}).json()["choices"][0]
            calls = choice["message"].get("tool_calls", [])
            told = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            assert choice["finish_reason"] == "length" and told == whole_calls[: len(told)]
            assert calls or choice["message"]["content"] is not None
            assert not asked or not choice["message"]["content"], "a demanded call is no content"
            numbers.add(len(told))
        assert 0 in numbers and len(numbers) >= len(whole_calls)
        streamed = assembled(stream(http, CHAT, **body, max_tokens=max_tokens - 4)[:-1])
        assert streamed["finish_reason"] == "length" and streamed["tool_calls"]


@pytest.mark.parametrize(
    ("asked", "right", "wrong"),
    [
        (
            {"tool_choice": "required"},
            '[{"name": "order", "parameters": {"what": "tea", "more": {"what": 5}}}, '
            '{"name": "stop", "parameters": {}}]',
            '[{"name": "order", "parameters": {"what": 6}}]',
        ),
        ({"tool_choice": "required"}, '[{"name": "stop", "parameters": {}}]', "[]"),
        *(
            (
                {"tool_choice": "required"},
                f'[{{"name": "order", "parameters": {{"what": "tea", "const": {data}}}}}]',
                '[{"name": "order", "parameters": {"what": "tea", "const": {"$ref": "#/$defs/order/a"}}}]',
            )
            for data in ('{"$ref": "#/a"}', '{"const": "#"}')
        ),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            '[{"name": "stop", "parameters": {}}]',
            '[{"name": "stop", "parameters": {}}, {"name": "stop", "parameters": {}}]',
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "order"}}},
            '{"what": "tea", "more": {"what": "tea"}}',
            '{"what": "tea", "more": {}}',
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "stop"}}}, "{}", '{"a": 1}'),
    ],
)
def test_demanded_calls_follow_their_schemas(
    http: httpx2.Client, service: FakeService, tokenizer: Tokenizer, asked: Any, right: str, wrong: str
) -> None:
    assert http.post(CHAT, json={"messages": [HI], "tools": TOOLS, **asked}).status_code == 200
    grammar = service.engine.submitted[-1].sampling.constraints.grammar
    assert matches(grammar, right, tokenizer.path) and not matches(grammar, wrong, tokenizer.path)


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "pattern"),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0.function: is required"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools", "tools.0.custom.name: is required"),
        ({"tools": [{"type": "code"}], "tool_choice": "required"}, "tool_choice", "give a function or a custom tool"),
        ({"tools": TOOLS, "tool_choice": {"type": "code"}}, "tool_choice", '"allowed_tools": {"mode": "auto", "tools"'),
        ({"tools": TOOLS, "tool_choice": allowing("required", "x")}, "tool_choice", "no tool 'x' in tools"),
        ({"tools": [*TOOLS, PATCH], "tool_choice": "required"}, "tool_choice", "bind the input of 'patch' to its Lark"),
        (
            {"tools": [custom({"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: x"}})]}
            | {"tool_choice": {"type": "custom", "custom": {"name": "patch"}}},
            "tools",
            'unknown name: "x"',
        ),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "'order' is there twice"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", '"none", "auto", "required", {'),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "no tool 'x' in tools; it has order, stop",
        ),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "contradicts tools"),
        (
            {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "contradicts tools",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "write tools"),
    ],
)
def test_what_cannot_be_called_is_refused(http: httpx2.Client, asked: Any, param: str, words: str) -> None:
    response = http.post(CHAT, json={"messages": [HI], **asked})
    error = error_of(response)
    assert response.status_code == 400 and error["param"].startswith(param) and words in error["message"]


def test_tools_beside_a_format_are_accepted_if_none_is_called_or_calls_are_demanded(
    http: httpx2.Client, service: FakeService, tokenizer: Tokenizer
) -> None:
    for choice, right in (
        ("none", '{"a": 1}'),
        ("required", '[{"name": "stop", "parameters": {}}]'),
        ({"type": "function", "function": {"name": "order"}}, '{"what": "tea"}'),
    ):
        body = {"messages": [HI], "tools": TOOLS, "tool_choice": choice, "response_format": {"type": "json_object"}}
        assert http.post(CHAT, json=body).status_code == 200
        assert matches(service.engine.submitted[-1].sampling.constraints.grammar, right, tokenizer.path)


UNKNOWN = '<function=order>{"what": "tea"}</function>'


def test_calls_in_a_format_that_is_unknown_stay_text_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer(str(copied_tokenizer(tmp_path, "{{ messages[0]['content'] }}{{ tools }}" + UNKNOWN)))
    text = [UNKNOWN]

    def script(submit: Submit) -> list[list[int]]:
        return [tokenizer.encode(text[0], add_special_tokens=False), [0]]

    with fake_service(tokenizer, tmp_path, script) as own, own.http() as http:
        [record] = [record for record in caplog.records if record.name == "cluster.text.answer_reader"]
        assert "stay text" in record.message and "--tool-call-parser" in record.message
        for asked in ({}, {"tool_choice": "auto"}):
            body = {"messages": [HI], "tools": TOOLS, **asked}
            choice = http.post(CHAT, json=body).raise_for_status().json()["choices"][0]
            assert choice["message"]["content"] == UNKNOWN and "tool_calls" not in choice["message"]
            streamed = assembled(stream(http, CHAT, **body)[:-1])
            assert (streamed["content"], choice["finish_reason"], streamed["finish_reason"]) == (
                UNKNOWN,
                "stop",
                "stop",
            )
        text[0] = '[{"name": "stop", "parameters": {}}]'
        [call] = http.post(CHAT, json={**body, "tool_choice": "required"}).json()["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "stop", "arguments": "{}"}
        text[0] = "[TOOL_CALLS]stop{}"
        own.service.answers = AnswerReaders(own.service.tokenizer, tool_call_parser="mistral")
        assert http.post(CHAT, json=body).json()["choices"][0]["finish_reason"] == "tool_calls"
