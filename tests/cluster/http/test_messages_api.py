"""/v1/messages: Anthropic's messages over chats, whole and as events, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from cluster.text.tokenizer import Tokenizer
from secateur.messages_api import Message, MessagesError, MessagesRequest
from tests.cluster.http.test_responses_api import rendered, writing
from tests.cluster.http.test_structured_outputs import matches
from tests.support.fake_service import ANSWER, FakeService, fake_service
from tests.support.tools import CALLED

PATH = "/v1/messages"
USER = [{"role": "user", "content": "Hi"}]
ORDER = {"name": "order", "input_schema": {"type": "object", "properties": {"what": {}}}}
THOUGHT = "<think>\nTea?\n</think>\n\n"


def create(http: httpx2.Client, **body: Any) -> dict[str, Any]:
    response = http.post(PATH, json={"max_tokens": 500, "messages": USER, **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(http: httpx2.Client, **body: Any) -> list[dict[str, Any]]:
    text = http.post(PATH, json={"max_tokens": 500, "messages": USER, "stream": True, **body}).raise_for_status().text
    told = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    return told


def joined(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client builds of a stream, as Anthropic documents it."""
    message: dict[str, Any] = told[0]["message"]
    arguments: dict[int, str] = {}
    for event in told[2:]:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(message["content"])
                message["content"].append(block)
            case {"type": "content_block_delta", "index": index, "delta": {"type": "input_json_delta", **added}}:
                arguments[index] = arguments.get(index, "") + added["partial_json"]
            case {"type": "content_block_delta", "index": index, "delta": {"type": str(), **added}}:
                [(field, text)] = added.items()
                message["content"][index][field] += text
            case {"type": "content_block_stop", "index": index} if index in arguments:
                message["content"][index]["input"] = json.loads(arguments[index])
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message.update(delta, usage=usage)
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "id"} | {
        "content": [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    }


def test_a_message_has_anthropics_fields(http: httpx2.Client, service: FakeService, tokenizer: Tokenizer) -> None:
    answer = create(http, system="Be short.", metadata={"user_id": "a"}, model="fake-model", temperature=0.5)
    num_prompt = len(service.engine.submitted[-1].prompt)
    assert answer.pop("id").startswith("msg-")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "fake-model",
        "content": [{"type": "text", "text": ANSWER}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt - 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": answer["usage"]["output_tokens"],
        },
    }
    assert rendered(tokenizer, service) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_events_come_in_anthropics_order_and_bytes(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.openai.messages_api.new_id", lambda prefix: f"{prefix}-0")
    monkeypatch.setattr("cluster.text.tool_calls.new_call_id", lambda format: "call-0")
    settings: dict[str, Any] = {"reasoning_parser": "think"}
    call = '<tool_call>{"name": "order", "arguments": {"what": "tea"}}</tool_call>'
    with (
        fake_service(tokenizer, tmp_path, writing(tokenizer, f"{THOUGHT}I order.{call}", 99), **settings) as own,
        own.http() as http,
    ):
        body = {"max_tokens": 99, "messages": USER, "stream": True, "tools": [ORDER]}
        text = http.post(PATH, json=body).text
        num_prompt = len(own.engine.submitted[-1].prompt)
        num_output = sum(map(len, own.engine.script(own.engine.submitted[-1])))
    counts = f'"input_tokens": {num_prompt - 1}, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 1'
    start = (
        '{"id": "msg-0", "type": "message", "role": "assistant", "model": "fake-model", "content": [], '
        f'"stop_reason": null, "stop_sequence": null, "usage": {{{counts}, "output_tokens": 0}}}}'
    )
    thinking = text.partition('"thinking_tokens": ')[2].partition("}")[0]
    expected = [
        f'{{"type": "message_start", "message": {start}}}',
        '{"type": "ping"}',
        '{"type": "content_block_start", "index": 0, "content_block": '
        '{"type": "thinking", "thinking": "", "signature": ""}}',
        '{"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Tea?"}}',
        '{"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": '
        '"f4253659c2a9aa3244a72ff4ce33674a"}}',
        '{"type": "content_block_stop", "index": 0}',
        '{"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}}',
        '{"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "I order."}}',
        '{"type": "content_block_stop", "index": 1}',
        '{"type": "content_block_start", "index": 2, "content_block": '
        '{"type": "tool_use", "id": "call-0", "name": "order", "input": {}}}',
        '{"type": "content_block_delta", "index": 2, "delta": '
        r'{"type": "input_json_delta", "partial_json": "{\"what\": \"tea\"}"}}',
        '{"type": "content_block_stop", "index": 2}',
        '{"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": null}, "usage": '
        f'{{{counts}, "output_tokens": {num_output}, "output_tokens_details": {{"thinking_tokens": {thinking}}}}}}}',
        '{"type": "message_stop"}',
    ]
    assert text == "".join(f"event: {json.loads(data)['type']}\ndata: {data}\n\n" for data in expected)


@pytest.mark.parametrize("size", [1, 3, 99])
def test_a_stream_builds_the_whole_message(tokenizer: Tokenizer, tmp_path: Path, size: int) -> None:
    script = writing(tokenizer, f"{THOUGHT}{CALLED}{CALLED} Done.", size)
    with fake_service(tokenizer, tmp_path, script, reasoning_parser="think") as own, own.http() as http:
        whole = create(http, tools=[ORDER])
        told = events(http, tools=[ORDER])
        assert without_ids(joined(told)) == without_ids(whole)
        assert [block["type"] for block in whole["content"]] == [
            *("thinking", "text", "tool_use", "text", "tool_use", "text")
        ]
        assert whole["content"][2]["input"] == {"what": "tea"} and whole["stop_reason"] == "tool_use"
        one = create(http, tools=[ORDER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert [block["type"] for block in one["content"]] == ["thinking", "text", "tool_use", "text"]
        silent = create(http, tools=[ORDER], thinking={"type": "disabled"})
        assert silent["content"][0]["type"] == "text" and silent["usage"] == whole["usage"]


def test_the_stop_reason_says_why_the_answer_ends(http: httpx2.Client) -> None:
    cut = create(http, max_tokens=4)
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 4)
    stopped = create(http, stop_sequences=["return", "never"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "return")
    assert stopped["content"] == [{"type": "text", "text": ANSWER.partition("return")[0]}]
    assert events(http, stop_sequences=["return"])[-2]["delta"] == {
        "stop_reason": "stop_sequence",
        "stop_sequence": "return",
    }


def test_an_answer_may_fill_the_context(tokenizer: Tokenizer, tmp_path: Path) -> None:
    endless: Callable[..., Any] = lambda submit: [[5]] * submit.max_tokens  # noqa: E731
    with fake_service(tokenizer, tmp_path, endless, engine={"max_model_len": 64}) as own, own.http() as http:
        answer = create(http, max_tokens=32_000)
        assert answer["stop_reason"] == "model_context_window_exceeded"
        assert len(own.engine.submitted[-1].prompt) + answer["usage"]["output_tokens"] == 64
        response = http.post(PATH, json={"max_tokens": 9, "messages": [{"role": "user", "content": "a" * 200}]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"].startswith("prompt is too long: ")


def test_a_call_that_is_cut_is_left_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with fake_service(tokenizer, tmp_path, writing(tokenizer, CALLED)) as own, own.http() as http:
        num = len(tokenizer.encode(CALLED.partition("tea")[0], add_special_tokens=False))
        cut = create(http, tools=[ORDER], max_tokens=num)
        assert [block["type"] for block in cut["content"]] == ["text"] and cut["stop_reason"] == "max_tokens"
        told = events(http, tools=[ORDER], max_tokens=num)
        assert [event["type"] for event in told[-3:]] == ["content_block_stop", "message_delta", "message_stop"]


def test_arguments_that_are_no_object_are_not_lost(tokenizer: Tokenizer, tmp_path: Path) -> None:
    written = '<tool_call>{"name": "order", "arguments": "tea"}</tool_call>'
    with fake_service(tokenizer, tmp_path, writing(tokenizer, written)) as own, own.http() as http:
        [call] = create(http, tools=[ORDER])["content"]
    assert call["input"] == {"arguments": "tea"}


def test_demanded_calls_follow_their_schemas(http: httpx2.Client, service: FakeService, tokenizer: Tokenizer) -> None:
    def grammar(**body: Any) -> str:
        create(http, **body)
        return service.engine.submitted[-1].sampling.constraints.grammar

    named = grammar(tools=[ORDER], tool_choice={"type": "tool", "name": "order"})
    assert matches(named, '{"what": "tea"}', tokenizer.path)
    demanded = grammar(tools=[ORDER], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    one = '{"name": "order", "parameters": {"what": "tea"}}'
    assert matches(demanded, f"[{one}]", tokenizer.path) and not matches(demanded, f"[{one}, {one}]", tokenizer.path)
    schema = {"type": "object", "properties": {"a": {"enum": [5]}}, "required": ["a"]}
    bound = grammar(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert matches(bound, '{"a": 5}', tokenizer.path) and not matches(bound, '{"a": 6}', tokenizer.path)
    assert grammar(tools=[ORDER], tool_choice={"type": "none"}) == ""


AGENT: dict[str, Any] = {
    "max_tokens": 400,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.160; cch=9f3a1;"},
        {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [
        {
            "name": "Read",
            "description": "Reads a file.",
            "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
            "cache_control": {"type": "ephemeral"},
        },
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "thinking": {"type": "enabled", "budget_tokens": 2048},
    "metadata": {"user_id": "user_5_session_7"},
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Today is Friday.</system-reminder>"},
                {"type": "text", "text": "What does a.py do?", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I must read it.", "signature": "9a"},
                {"type": "redacted_thinking", "data": "b3BhcXVl"},
                {"type": "text", "text": "I read it."},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a.py"}},
                {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {"path": "b.py"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "pass"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such file", "is_error": True},
                {"type": "text", "text": "Go on."},
            ],
        },
        {"role": "system", "content": "The file was changed."},
    ],
}


def test_a_conversation_of_a_coding_agent_is_a_chat() -> None:
    chat = MessagesRequest.model_validate(AGENT).chat()
    calls = [
        {"id": f"toolu_{n}", "type": "function", "function": {"name": "Read", "arguments": f'{{"path": "{file}"}}'}}
        for n, file in ((1, "a.py"), (2, "b.py"))
    ]
    assert chat["messages"] == [
        {"role": "system", "content": "You are a coding agent."},
        {
            "role": "user",
            "content": "<system-reminder>Today is Friday.</system-reminder>\nWhat does a.py do?",
        },
        {"role": "assistant", "content": "I read it.", "reasoning": "I must read it.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "pass"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "no such file"},
        {"role": "user", "content": "Go on.\nThe file was changed."},
    ]
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["Read"]
    assert chat["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True}
    assert not chat["continue_final_message"]
    ignored = MessagesRequest.model_validate(AGENT).ignored()
    assert ignored == ["messages.content.is_error", "thinking.budget_tokens", "tools.1 (web_search_20250305)"]


def test_what_has_no_effect_is_named(http: httpx2.Client) -> None:
    text = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}, "citations": []}
    body = {
        "max_tokens": 5,
        "system": [text],
        "messages": [{"role": "user", "content": [text, text], "name": "a"}],
        "tools": [ORDER | {"strict": True, "eager_input_streaming": True}],
        "tool_choice": {"type": "auto", "forced": True},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "output_config": {"effort": "max", "task_budget": {"type": "tokens"}},
        "context_management": {"edits": []},
        "metadata": {"user_id": "a", "team": "b"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
    }
    response = http.post(f"{PATH}?beta=true", json=body, headers={"anthropic-beta": "effort-2025-11-24"})
    assert response.raise_for_status().headers["x-secateur-ignored"].split(", ") == [
        "context_management",
        "messages.content.citations",
        "messages.name",
        "metadata.team",
        "output_config.task_budget",
        "service_tier",
        "system.citations",
        "thinking.display",
        "tool_choice.forced",
        "tools.strict",
        "output_config.effort",
    ]


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([{"role": "system", "content": "a"}, *USER], [("system", "a"), ("user", "Hi")]),
        ([*USER, *USER], [("user", "Hi\nHi")]),
        ([*USER, {"role": "assistant", "content": "a"}, {"role": "system", "content": "b"}], [
            ("user", "Hi"), ("assistant", "a"), ("user", "b"),
        ]),
        ([*USER, {"role": "assistant", "content": [{"type": "text", "text": "a "}]}], [
            ("user", "Hi"), ("assistant", "a "),
        ]),
        ([{"role": "user", "content": ""}], [("user", "")]),
    ],
)  # fmt: skip
def test_neighbours_of_one_role_are_one_message(messages: list[Any], told: list[tuple[str, str]]) -> None:
    chat = MessagesRequest.model_validate({"max_tokens": 1, "messages": messages}).chat()
    assert [(message["role"], message["content"]) for message in chat["messages"]] == told
    assert chat["continue_final_message"] == (told[-1][0] == "assistant")


def test_an_agent_has_its_answer(http: httpx2.Client, service: FakeService, tokenizer: Tokenizer) -> None:
    response = http.post(f"{PATH}?beta=true", json=AGENT, headers={"anthropic-version": "2023-06-01"})
    answer = Message.model_validate(response.raise_for_status().json())
    text = rendered(tokenizer, service)
    assert "You are a coding agent." in text and "cc_version" not in text and "no such file" in text
    counted = http.post(f"{PATH}/count_tokens", json={key: AGENT[key] for key in ("system", "tools", "messages")})
    usage = answer.usage
    assert counted.json() == {"input_tokens": usage.input_tokens + usage.cache_read_input_tokens}


def test_images_are_refused_or_named(http: httpx2.Client, service: FakeService, tokenizer: Tokenizer) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": [result, image]}]}
    refused = http.post(PATH, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("messages.0.content.0.content.0 (image): nothing but text")
    shown = http.post(PATH, json=body | {"unsupported_content": "placeholder"})
    assert shown.headers["x-secateur-ignored"] == (
        "messages.0.content.0.content.0 (image), messages.0.content.1 (image)"
    )
    assert rendered(tokenizer, service).count("[image left out: this model reads text only]") == 2


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"max_tokens": None}, "max_tokens: is required"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role: "),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id: is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text: is missing"),
        ({"tool_choice": {"type": "tool"}}, 'name: belongs to the type "tool"'),
        ({"tool_choice": {"type": "any"}}, '{"type": "any"} needs tools'),
        ({"tool_choice": {"type": "tool", "name": "pay"}, "tools": [ORDER]}, "there is no tool 'pay' in tools"),
        ({"stop_sequences": [""]}, "an empty string stops nothing"),
        ({"thinking": {"type": "much"}}, "thinking.type: "),
        ({"model": "another"}, "the model 'another' does not exist"),
    ],
)
def test_errors_are_anthropics(http: httpx2.Client, body: dict[str, Any], told: str) -> None:
    response = http.post(PATH, json={"max_tokens": 5, "messages": USER} | body)
    error = MessagesError.model_validate(response.json()).error
    assert (response.status_code, error.type) in ((400, "invalid_request_error"), (404, "not_found_error"))
    assert told in error.message


def test_an_engine_that_fails_ends_the_events_with_the_reason(own: Callable[..., FakeService]) -> None:
    running = own(script=lambda submit: [[300]] * 1000, engine={"step_s": 0.05})
    body = {"max_tokens": 99, "messages": USER, "stream": True}
    with running.http() as http:
        with http.stream("POST", PATH, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            running.fail("verifier 0 was killed")
            *_, name, data = [line for line in lines if line]
        later = http.post(PATH, json=body)
    assert name == "event: error"
    for told in (json.loads(data.removeprefix("data: ")), later.json()):
        assert MessagesError.model_validate(told).error.type == "overloaded_error" and "verifier 0" in str(told)
    assert later.status_code == 503 and "Retry-After" in later.headers
