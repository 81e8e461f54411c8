"""/v1/responses: whole answers, events, calls and structured text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.openai.openai_format import ChatFormat
from cluster.openai.output_processor import Generation
from cluster.openai.responses_api import ResponseBuilder, chat_of
from cluster.text.answer_reader import AnswerReaders
from cluster.text.tokenizer import Tokenizer
from secateur.responses_api import LOGPROBS, ResponsesRequest
from tests.cluster.http.test_structured_outputs import matches
from tests.support.fake_engine import score
from tests.support.fake_service import ANSWER, FakeService, error_of, fake_service
from tests.support.tools import CALLED
from workers.comm.ipc import Submit, TokenChunk

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "order", "parameters": {"type": "object", "properties": {"what": {}}}}
USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "id": "fc-1", "call_id": "call-1", "name": "order", "arguments": '{"what": "tea"}'}
RESULT = {"type": "function_call_output", "call_id": "call-1", "output": [{"type": "input_text", "text": "done"}]}


def create(http: httpx2.Client, **body: Any) -> dict[str, Any]:
    response = http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(http: httpx2.Client, **body: Any) -> list[dict[str, Any]]:
    with http.stream("POST", PATH, json={**body, "stream": True}) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    types = [line.removeprefix("event: ") for line in lines[::2]]
    found = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [event["type"] for event in found] == types
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def rendered(tokenizer: Tokenizer, service: FakeService) -> str:
    return tokenizer.decode(service.engine.submitted[-1].prompt, skip_special_tokens=False)


def writing(tokenizer: Tokenizer, text: str, size: int = 3) -> Callable[[Submit], list[list[int]]]:
    """Return the script of an engine that writes this text, `size` tokens a step."""
    ids = [*tokenizer.encode(text, add_special_tokens=False), 0]
    return lambda submit: [ids[start : start + size] for start in range(0, len(ids), size)]


def test_a_response_has_openais_fields(http: httpx2.Client, service: FakeService, tokenizer: Tokenizer) -> None:
    answer = create(http, input="Hi", instructions="Be short.", metadata={"a": "b"}, temperature=0.5)
    assert answer["id"].startswith("resp_") or answer["id"].startswith("resp-")
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "fake-model")
    [message] = answer["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}]
    assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"]
    assert answer["usage"]["input_tokens_details"] == {"cached_tokens": 1}
    assert (answer["instructions"], answer["metadata"], answer["temperature"]) == ("Be short.", {"a": "b"}, 0.5)
    assert answer["error"] is answer["incomplete_details"] is answer["previous_response_id"] is None
    assert rendered(tokenizer, service) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_tokens_of_an_input_are_counted_as_a_response_counts_them(http: httpx2.Client) -> None:
    body = {"input": "What is the weather?", "instructions": "Be short.", "tools": [TOOL]}
    first = create(http, **body)
    later = {"input": "And tomorrow?", "previous_response_id": first["id"]}
    for asked in (body, later):
        counted = http.post(f"{PATH}/input_tokens", json=asked).json()
        assert counted == {
            "object": "response.input_tokens",
            "input_tokens": create(http, **asked)["usage"]["input_tokens"],
        }
    error = error_of(http.post(f"{PATH}/input_tokens", json={"input": "a", "previous_response_id": "resp-none"}))
    assert error["param"] == "previous_response_id"


def test_a_response_that_is_cut_is_incomplete(http: httpx2.Client) -> None:
    answer = create(http, input="Hi", max_output_tokens=4)
    assert answer["status"] == answer["output"][0]["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"} and answer["usage"]["output_tokens"] == 4


def test_the_events_tell_of_every_part(http: httpx2.Client) -> None:
    told = events(http, input="Hi")
    types = [event["type"] for event in told]
    deltas = [event for event in told if event["type"] == "response.output_text.delta"]
    assert types[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert types[4:-4] == ["response.output_text.delta"] * len(deltas) and len(deltas) > 2
    assert types[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event["delta"] for event in deltas) == told[-4]["text"] == ANSWER
    final = told[-1]["response"]
    assert final["output"][0]["content"][0]["text"] == ANSWER and final["status"] == "completed"
    assert final["output"] == [told[-2]["item"]]
    assert told[0]["response"]["status"] == "in_progress" and told[0]["response"]["usage"] is None
    assert events(http, input="Hi", max_output_tokens=3)[-1]["type"] == "response.incomplete"


def test_log_probabilities_come_on_request(http: httpx2.Client) -> None:
    asked = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    [part] = create(http, **asked)["output"][0]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) and len(part["logprobs"][0]["top_logprobs"]) == 2
    told = [event for event in events(http, **asked) if event["type"] == "response.output_text.delta"]
    assert [entry for event in told for entry in event["logprobs"]] == part["logprobs"]


def test_text_may_be_bound_to_a_schema(http: httpx2.Client, service: FakeService, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [5]}}, "required": ["a"], "additionalProperties": False}
    create(http, input="Hi", text={"format": {"type": "json_schema", "name": "a", "schema": schema}})
    grammar = service.engine.submitted[-1].sampling.constraints.grammar
    assert matches(grammar, '{"a": 5}', tokenizer.path) and not matches(grammar, '{"a": 6}', tokenizer.path)


def test_calls_are_items_whole_and_in_events(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with fake_service(tokenizer, tmp_path, writing(tokenizer, CALLED)) as own, own.http() as http:
        message, call = create(http, input="Hi", tools=[TOOL])["output"]
        assert message["content"][0]["text"] == "I order."
        assert (call["type"], call["name"], call["arguments"]) == ("function_call", "order", '{"what": "tea"}')
        told = events(http, input="Hi", tools=[TOOL])
        pieces = [event["delta"] for event in told if event["type"] == "response.function_call_arguments.delta"]
        assert "".join(pieces) == '{"what": "tea"}' and len(pieces) > 1
        added = [event["item"]["type"] for event in told if event["type"] == "response.output_item.added"]
        done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
        assert added == ["message", "function_call"] and done[1]["arguments"] == '{"what": "tea"}'
        assert [event["output_index"] for event in told if event["type"] == "response.output_item.done"] == [0, 1]
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            message,
            call,
            {"type": "function_call_output", "call_id": call["call_id"], "output": "done"},
        ]
        create(http, input=items, tools=[TOOL], tool_choice="none")
        text = rendered(tokenizer, own)
        assert 'I order.\n<tool_call>\n{"name": "order", "arguments": {"what": "tea"}}\n</tool_call>' in text
        assert "<tool_response>\ndone\n</tool_response>" in text


EDIT = "*** Begin\n+a\n*** End"
PATCH = {
    "type": "custom",
    "name": "patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin\\n" /[^*]+/ "*** End"'},
}


@pytest.mark.parametrize(
    ("written", "choice", "num_deltas"),
    [
        (f'<tool_call>{{"name": "patch", "arguments": {json.dumps({"input": EDIT})}}}</tool_call>', "auto", 1),
        (EDIT, {"type": "custom", "name": "patch"}, 2),
    ],
)
def test_a_custom_tool_gets_text(
    tokenizer: Tokenizer, tmp_path: Path, written: str, choice: Any, num_deltas: int
) -> None:
    asked = {"input": "Hi", "tools": [PATCH, {"type": "web_search"}], "tool_choice": choice}
    with fake_service(tokenizer, tmp_path, writing(tokenizer, written)) as own, own.http() as http:
        response = http.post(PATH, json=asked)
        assert response.headers["x-secateur-ignored"] == "tools.1 (web_search)"
        answer = response.json()
        [call] = answer["output"]
        assert (call["type"], call["name"], call["input"], call["status"]) == (
            "custom_tool_call",
            "patch",
            EDIT,
            "completed",
        )
        told = events(http, **asked)
        deltas = [event for event in told if event["type"] == "response.custom_tool_call_input.delta"]
        assert "".join(event["delta"] for event in deltas) == EDIT and len(deltas) >= num_deltas
        [item] = told[-1]["response"]["output"]
        assert item["id"].startswith("ctc-")
        assert {(event["item_id"], event["output_index"]) for event in deltas} == {(item["id"], 0)}
        [done] = [event for event in told if event["type"] == "response.custom_tool_call_input.done"]
        assert done["input"] == EDIT
        result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
        create(http, input=[{"role": "user", "content": "Hi"}, call, result])
        whole = rendered(tokenizer, own)
        assert json.dumps({"name": "patch", "arguments": {"input": EDIT}}) in whole and "done" in whole
        later = create(http, input=[result], previous_response_id=answer["id"])
        assert rendered(tokenizer, own) == whole
        listed = http.get(f"{PATH}/{later['id']}/input_items").json()["data"]
        assert [item["type"] for item in listed] == ["custom_tool_call_output"]
        cut = create(http, **asked, max_output_tokens=3)["output"][-1]
        assert cut["status"] == "incomplete"


CALL_OF_PATCH = f'<tool_call>{{"name": "patch", "arguments": {json.dumps({"input": EDIT})}'
"""A call up to the end of its arguments."""


@pytest.mark.parametrize(
    ("written", "is_cut", "items"),
    [
        (f"{CALL_OF_PATCH}}}</tool_call> So", True, [(EDIT, "completed"), ("So", "incomplete")]),
        (CALL_OF_PATCH, True, [(EDIT, "completed")]),
        (CALL_OF_PATCH[:-1], True, [("", "incomplete")]),
        (CALL_OF_PATCH[:-1], False, [(json.dumps({"input": EDIT})[:-1], "completed")]),
    ],
    ids=["text behind it is cut", "its end is cut", "its arguments are cut", "its arguments are no JSON"],
)
def test_each_item_of_an_answer_with_a_custom_call_has_its_own_status(
    own: Callable[..., FakeService], tokenizer: Tokenizer, written: str, is_cut: bool, items: list[tuple[str, str]]
) -> None:
    asked: dict[str, Any] = {"input": "Hi", "tools": [PATCH]}
    if is_cut:
        asked["max_output_tokens"] = len(tokenizer.encode(written, add_special_tokens=False))
    with own(script=writing(tokenizer, written)).http() as http:
        answer = create(http, **asked)
    told = [
        (item.get("input") or item.get("content", [{"text": ""}])[0]["text"], item["status"])
        for item in answer["output"]
    ]
    assert told == items


def test_an_image_in_a_result_is_an_error_or_a_placeholder(
    http: httpx2.Client, own: Callable[..., FakeService], tokenizer: Tokenizer
) -> None:
    parts = [{"type": "input_text", "text": "Here: "}, {"type": "input_image", "image_url": "data:image/png;base64,A"}]
    asked = {
        "input": [
            {"role": "user", "content": "Look."},
            {"type": "function_call", "call_id": "c", "name": "order", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": parts,
            },
        ]
    }
    error = error_of(http.post(PATH, json=asked))
    assert error["param"] == "input" and error["message"].startswith("input.2.output.1 (input_image): nothing but text")
    running = own(unsupported_content="placeholder")
    with running.http() as lenient:
        assert lenient.post(PATH, json={**asked, "unsupported_content": "error"}).status_code == 400
        for body in (asked, {**asked, "unsupported_content": "placeholder"}):
            response = lenient.post(PATH, json=body)
            assert response.headers["x-secateur-ignored"] == "input.2.output.1 (input_image)"
            assert "Here: [image left out: this model reads text only]" in rendered(tokenizer, running)
            later = create(
                lenient, input="And?", previous_response_id=response.json()["id"], unsupported_content="error"
            )
            assert later["status"] == "completed" and "[image left out" in rendered(tokenizer, running)
        message = {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        body = {"messages": [{"role": "user", "content": "Look."}, message]}
        for path in ("/v1/chat/completions", "/tokenize"):
            response = lenient.post(path, json=body)
            assert response.headers["x-secateur-ignored"] == "messages.1.content.0 (image_url)"
            error = error_of(http.post(path, json=body))
            assert error["param"] == "messages" and 'unsupported_content="placeholder"' in error["message"]
            assert http.post(path, json={**body, "unsupported_content": "placeholder"}).status_code == 200


def test_allowed_tools_filter(http: httpx2.Client, service: FakeService, tokenizer: Tokenizer) -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "order"}]}
    answer = create(http, input="Hi", tools=[TOOL, PATCH], tool_choice=allowed)
    assert answer["tool_choice"] == allowed and [tool["name"] for tool in answer["tools"]] == ["order", "patch"]
    prompt, grammar = rendered(tokenizer, service), service.engine.submitted[-1].sampling.constraints.grammar
    assert "order" in prompt and "patch" not in prompt
    assert matches(grammar, '[{"name": "order", "parameters": {"what": 1}}]', tokenizer.path)


def test_a_demanded_call_is_a_structured_output(
    http: httpx2.Client, service: FakeService, tokenizer: Tokenizer
) -> None:
    for choice, right in (
        ("required", '[{"name": "order", "parameters": {"what": 1}}]'),
        ({"type": "function", "name": "order"}, '{"what": 1}'),
    ):
        create(http, input="Hi", tools=[TOOL], tool_choice=choice)
        assert matches(service.engine.submitted[-1].sampling.constraints.grammar, right, tokenizer.path)


CALL_OF_TEA = '<tool_call>{"name": "order", "arguments": {"what": "🌳"}}</tool_call>'
"""A call that is not alone in its answer."""
Item = tuple[str, str, list[str]]
"""The type of an item, its text or the arguments of its call, and the tokens that have log probabilities."""


def in_steps(
    tokenizer: Tokenizer, ids: list[int], cuts: Iterable[int], *, stop: tuple[str, ...] = (), **asked: Any
) -> tuple[list[Item], dict[str, Any]]:
    """Return the items of a response, and the message of a chat, whose tokens came in these steps.

    Both are checked to be the same whole and in a stream. Behind a last token 0 the answer has ended.
    """
    body = ResponsesRequest(input="a", include=[LOGPROBS], **{"tools": [TOOL], **asked})
    chat = chat_of(body.chat([]))
    new_reader = AnswerReaders(tokenizer, "think").of(chat, [5])
    builder = ResponseBuilder(body, chat, "m", tokenizer, new_reader, "r")
    format = ChatFormat(chat, "m", tokenizer, new_reader)
    submit = Submit(id=1, prompt=[5], max_tokens=999, stop_token_ids=[0])
    generation = Generation(submit=submit, tokenizer=tokenizer, stop=stop)
    events, chunks = builder.begin(), []
    steps = list(pairwise([0, *cuts, len(ids)]))
    for start, end in steps:
        has_ended, tokens = (start, end) == steps[-1], ids[start:end]
        is_stopped = has_ended and ids[-1] == 0 and stop != ("never",)
        delta = generation.process(
            TokenChunk(
                id=1,
                tokens=tokens,
                finish_reason=("stop" if is_stopped else "length") if has_ended else None,
                stop_token=0 if is_stopped else None,
                logprobs=[score(token, 0) for token in tokens],
            )
        )
        events += builder.feed(delta)
        chunks.append(format.chunk(0, generation, delta))
        if delta.finish_reason is not None:
            break
    events += builder.end(generation)
    items = builder.response.model_dump()["output"]
    assert all(item["status"] == "completed" for item in items[:-1])
    told: dict[int, Any] = {}
    for event in events:
        if "output_index" in event:
            text, tokens = told.setdefault(event["output_index"], ("", []))
            added = event.get("delta", "") if event["type"].endswith(".delta") else ""
            scores = event.get("logprobs", []) if event["type"].endswith(".delta") else []
            told[event["output_index"]] = (text + added, tokens + [each["token"] for each in scores])
            is_part = event["type"].split(".")[1] in ("content_part", "output_text", "reasoning_text")
            assert event.get("content_index") == (0 if is_part else None)
            assert event.get("item_id", event.get("item", {}).get("id")) == items[event["output_index"]]["id"]
    named: list[Item] = []
    for place, item in enumerate(items):
        [part] = item.get("content") or [{"text": item.get("arguments")}]
        named.append((item["type"], part["text"], [each["token"] for each in part.get("logprobs", [])]))
        assert told[place] == named[-1][1:]
    message = message_of(format, generation, chunks)
    for kind, behind, text in (("message", "\n", message["content"]), ("reasoning", "", message["reasoning"])):
        assert behind.join(own for type, own, _ in named if type == kind) == text
    return named, message


def message_of(format: ChatFormat, generation: Generation, chunks: list[Any]) -> dict[str, Any]:
    """Return a chat's message, whole, and check that its stream tells the same."""
    choice = format.response([generation]).model_dump()["choices"][0]
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "scored": []}
    for chunk in (chunk for chunk in chunks if chunk is not None):
        [part] = chunk.model_dump()["choices"]
        message["content"] += part["delta"].get("content") or ""
        message["reasoning"] += part["delta"].get("reasoning") or ""
        message["scored"] += [each["token"] for each in (part.get("logprobs") or {}).get("content", ())]
        for call in part["delta"].get("tool_calls") or ():
            name, arguments = message["calls"].get(call["index"], (call["function"].get("name"), ""))
            message["calls"][call["index"]] = (name, arguments + call["function"]["arguments"])
    whole = choice["message"]
    assert (whole["content"] or "", whole["reasoning"] or "") == (message["content"], message["reasoning"])
    assert [each["token"] for each in choice["logprobs"]["content"]] == message["scored"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in whole.get("tool_calls") or ()]
    assert calls == list(message["calls"].values()) or choice["finish_reason"] == "length"
    return message


ANSWERS: list[tuple[str, dict[str, Any]]] = [
    (f"{CALL_OF_TEA} Done.", {}),
    (f"{CALL_OF_TEA} Done.", {"stop": ("}}</tool_call> Done.X", "🌳Y")}),
    (f"<think>\nHm, \n tea.\n</think>\n\nI order. \n {CALL_OF_TEA}\n {CALL_OF_TEA}\nDone. \n<tool_call>?", {}),
    (f"A {CALL_OF_TEA} \n B \n{CALL_OF_TEA} \n C \n", {"parallel_tool_calls": False}),
    (f"<tool_call>\n{CALL_OF_TEA}</tool_call>\n<tool_call>{{}}</tool_call> \n", {}),
    ("def f(x):\n\n    return '🌳' \n\n", {}),
    ("def f(x):\n\n    return '🌳' \n\n", {"tools": []}),
    (
        '[{"name": "order", "parameters": {"what": "🌳"}}, {"name": "order", "parameters": {}}]',
        {"tool_choice": "required"},
    ),
    ('{"what": "🌳"}', {"tool_choice": {"type": "function", "name": "order"}}),
    ("<think>so", {"include_reasoning": False}),
]


@pytest.mark.parametrize(("text", "asked"), ANSWERS)
@given(data=st.data())
def test_an_answer_depends_on_its_tokens_and_not_on_the_steps_in_which_they_came(
    tokenizer: Tokenizer, text: str, asked: dict[str, Any], data: st.DataObject
) -> None:
    ending = data.draw(st.sampled_from(["stop", "length", "special tokens"]))
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids += {"stop": [0], "length": [], "special tokens": [0, 0]}[ending]
    asked = asked | ({"stop": ("never",)} if ending == "special tokens" else {})
    cuts = data.draw(st.sets(st.integers(1, len(ids) - 1)).map(sorted))
    assert in_steps(tokenizer, ids, cuts, **asked) == in_steps(tokenizer, ids, [], **asked)


@pytest.mark.parametrize(("text", "asked"), ANSWERS)
def test_an_answer_is_the_same_in_any_two_steps_wherever_it_is_cut(
    tokenizer: Tokenizer, text: str, asked: dict[str, Any]
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    for num in (len(ids), len(ids) * 2 // 3):
        wanted = in_steps(tokenizer, ids[:num], [], **asked)
        for cut in range(1, num):
            assert in_steps(tokenizer, ids[:num], [cut], **asked) == wanted


def test_items_have_the_order_of_the_text_and_the_log_probabilities_of_their_own_tokens(tokenizer: Tokenizer) -> None:
    text = f"<think>Hm.</think>I \n\n order. \n{CALL_OF_TEA} Done.\n{CALL_OF_TEA} A <tool"  # what may begin a call
    ids = [*tokenizer.encode(text, add_special_tokens=False), 0]
    items, message = in_steps(tokenizer, ids, [])
    assert [(kind, text) for kind, text, _ in items] == [
        ("reasoning", "Hm."),
        ("message", "I \n\n order."),
        ("function_call", '{"what": "🌳"}'),
        ("message", "Done."),
        ("function_call", '{"what": "🌳"}'),
        ("message", "A <tool"),
    ]
    for kind, text, tokens in items:
        assert "".join(tokens).strip() == (text if kind == "message" else "")
    assert message["content"] == "I \n\n order.\nDone.\nA <tool" and len(message["calls"]) == 2


def test_an_answer_whose_items_a_client_sends_back_is_one_message(
    http: httpx2.Client, service: FakeService, tokenizer: Tokenizer
) -> None:
    said = {"type": "message", "role": "assistant", "content": "Done."}
    create(http, input=[USER, {**said, "content": "I order."}, CALL, said, RESULT])
    text = rendered(tokenizer, service)
    assert text.count("<|im_start|>assistant\n") == 2 and "\nI order.\nDone.\n<tool_call>" in text


DEMANDED = '[{"name": "order", "parameters": {"what": "a pot of tea"}}]'


def test_a_call_that_is_cut_is_incomplete_and_not_told_as_done(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """As at OpenAI: the call stays, with what there is of its arguments, and says that it is not complete."""
    asked = {"input": "Hi", "tools": [TOOL], "tool_choice": "required"}
    seen: set[tuple[str, str]] = set()
    with fake_service(tokenizer, tmp_path, writing(tokenizer, DEMANDED)) as own, own.http() as http:
        for max_tokens in range(1, len(tokenizer.encode(DEMANDED, add_special_tokens=False))):
            told = events(http, **asked, max_output_tokens=max_tokens)
            final = told[-1]["response"]
            assert (told[-1]["type"], final["status"]) == ("response.incomplete", "incomplete")
            assert final["incomplete_details"] == {"reason": "max_output_tokens"}
            [item] = final["output"]
            assert item["type"] == "function_call" or item["content"][0]["text"] == "", "a demanded call is no text"
            done = [event for event in told if event["type"] == "response.function_call_arguments.done"]
            is_whole = item.get("arguments") == '{"what": "a pot of tea"}'
            assert item["status"] == ("completed" if is_whole else "incomplete")
            assert [event["arguments"] for event in done] == [item.get("arguments")] * is_whole
            assert item == told[-2]["item"], "the last event but one closes the item"
            seen.add((item["type"], item["status"]))
            whole = create(http, **asked, max_output_tokens=max_tokens)
            assert [each["status"] for each in whole["output"]] == [item["status"]]
            again = http.post(PATH, json={"input": "More", "previous_response_id": whole["id"]})
            assert again.status_code == 200, again.text
            assert ('"name": "order"' in rendered(tokenizer, own)) == is_whole
    assert seen == {("message", "incomplete"), ("function_call", "incomplete"), ("function_call", "completed")}


def test_fields_of_chats_mean_the_same(http: httpx2.Client, service: FakeService) -> None:
    sampling = {
        "top_k": 3, "min_p": 0.1, "temperature": 0.5, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.25,
        "repetition_penalty": 1.5, "logit_bias": {"5": 1.0}, "stop_token_ids": [9], "ignore_eos": True,
        "cache_salt": "s", "structured_outputs": {"regex": "a+"}, "stop": "x +", "max_output_tokens": 40,
    }  # fmt: skip
    response = http.post(PATH, json={"input": "Hi", "include_stop_str_in_output": True, **sampling})
    assert response.status_code == 200 and "x-secateur-ignored" not in response.headers
    assert response.json()["output"][0]["content"][0]["text"].endswith("x +")
    through_responses = service.engine.submitted[-1]
    sampling["max_tokens"] = sampling.pop("max_output_tokens")
    messages = [{"role": "user", "content": "Hi"}]
    assert http.post("/v1/chat/completions", json={"messages": messages, **sampling}).status_code == 200
    assert replace(through_responses, id=0) == replace(service.engine.submitted[-1], id=0)
    for field, value in (("top_k", -2), ("stop", 5), ("logit_bias", {"x": 1.0}), ("structured_outputs", {})):
        refused = http.post(PATH, json={"input": "Hi", field: value})
        assert (refused.status_code, str(error_of(refused)["param"]).split(".")[0]) == (400, field)
    text = {"format": {"type": "json_object"}}
    refused = http.post(PATH, json={"input": "Hi", "text": text, "structured_outputs": {"regex": "a"}})
    assert "contradicts text" in error_of(refused)["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "required"),
        ({"input": []}, "input", "at least 1"),
        ({"input": 5}, "input", "input.items: must be a valid list"),
        ({"input": [{"type": "image"}]}, "input", "input.items.0.type: must be 'message'"),
        ({"input": [{"type": "item_reference"}]}, "input", "needs it"),
        ({"input": [{"type": "item_reference", "id": "msg-0"}]}, "input", "send the item itself"),
        ({"input": [{"role": "user"}]}, "input", "needs it"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "call_id"),
        ({"input": "a", "tools": [{"type": "custom"}]}, "tools", "name"),
        ({"input": "a", "tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}, "tools", "grammar"),
        ({"input": "a", "tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", "must be"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"input": "a", "metadata": {str(n): "" for n in range(17)}}, "metadata", "at most 16 pairs"),
        ({"input": "a", "metadata": {"k" * 65: ""}}, "metadata", "keys of up to 64"),
        ({"input": "a", "metadata": {"k": "v" * 513}}, "metadata", "values of up to 512"),
        ({"input": "a", "metadata": {"k": 1}}, "metadata", "pairs of strings"),
        ({"input": "a", "background": True}, "background", "not implemented"),
        ({"input": "a", "truncation": "auto"}, "truncation", "never shortened"),
        ({"input": "a", "temperature": -1.0}, "temperature", "greater than or equal to 0"),
        ({"input": "a", "max_output_tokens": 99_999}, "max_output_tokens", "max_output_tokens=99999"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text", "schema"),
        ({"input": "a", "model": "other"}, "model", "does not exist"),
    ],
)
def test_what_cannot_be_done_is_refused_in_the_requests_own_words(
    http: httpx2.Client, body: Any, param: str, words: str
) -> None:
    response = http.post(PATH, json=body)
    error = error_of(response)
    assert response.status_code in (400, 404)
    assert str(error["param"]).startswith(param) and words in error["message"], error


def test_fields_without_effect_are_named(http: httpx2.Client) -> None:
    body = {"input": "a", "zeta": 1, "top_logprobs": 2, "include": ["reasoning.x"]}
    body["speculative"] = {"enable_draft_probs": True}  # under the coupled rule
    ignored = http.post(PATH, json=body).headers["x-secateur-ignored"]
    assert ignored == "include.reasoning.x, top_logprobs, zeta, speculative.enable_draft_probs"


def test_an_engine_that_fails_ends_the_events_with_the_reason(own: Callable[..., FakeService]) -> None:
    running = own(script=lambda submit: [[300]] * 1000, engine={"step_s": 0.05})
    with running.http() as http, http.stream("POST", PATH, json={"input": "a", "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        running.fail("verifier 0 was killed")
        last = [line for line in lines if line][-1]
    told = json.loads(last.removeprefix("data: "))
    assert told["type"] == "response.failed" and "verifier 0 was killed" in told["response"]["error"]["message"]
