"""Models that reason before they answer: what is reasoning, and where clients find it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, combinations_with_replacement, pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.text.answer_reader import AnswerReaders
from cluster.text.detokenizer import IncrementalDetokenizer
from cluster.text.reasoning import MARKS, ReasoningCounter, ReasoningReader, marks_of_template
from cluster.text.tokenizer import Tokenizer
from secateur.requests import ChatCompletionRequest
from tests.cluster.http.test_responses_api import events, writing
from tests.cluster.http.test_structured_outputs import matches
from tests.support.fake_service import fake_service, stream
from tests.support.tools import CALLED, CHAT, HERMES, HI, TOOLS, copied_tokenizer
from workers.sampling.grammar import ThoughtMarks, TokenTable, grammar_text

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ tools }}{{ reasoning_effort }}"
    f"{{% if false %}}{HERMES}{{% endif %}}{{% if inside %}}<think>\n{{% endif %}}"
)


def read(pieces: list[str], begins_inside: bool) -> tuple[str, str]:
    reader = ReasoningReader(begins_inside=begins_inside)
    thoughts = [*map(reader.feed, pieces), reader.finish()]
    return "".join(each.reasoning for each in thoughts), "".join(each.answer for each in thoughts)


def counted(pieces: list[str], begins_inside: bool) -> list[int]:
    """Return the count of reasoning tokens after each token; the tokens have these texts."""
    counter, counts = ReasoningCounter(begins_inside=begins_inside), []
    for piece in pieces:
        counter.feed(piece)
        counts.append(counter.count)
    return counts


def num_inside(pieces: list[str], begins_inside: bool) -> int:
    """Return how many tokens have text between the marks, or come between them without text."""
    text = "".join(pieces)
    if not begins_inside and not text.lstrip().startswith("<think>"):
        return 0
    opened = 0 if begins_inside else text.index("<think>") + len("<think>")
    ends = [place for place in range(opened, len(text)) if "</think>".startswith(text[place : place + 8])]
    closed = ends[0] if ends else len(text) + 1
    starts = list(accumulate(map(len, pieces), initial=0))
    return sum(
        opened <= first < closed or first == last == closed or first < opened < min(last, closed)
        for first, last in pairwise(starts)
    )


CASES = pytest.mark.parametrize(
    ("text", "begins_inside", "reasoning", "answer"),
    [
        ("<think>\nSo 1 < 2.\n\nOk </thin\n</think>\n\nA </think> ", False, "So 1 < 2.\n\nOk </thin", "A </think> "),
        ("No <think>x</think>", False, "", "No <think>x</think>"),
        ("\n<think></think>A ", False, "", "A "),
        ("<think>\n\n</think>\n\n", False, "", ""),
        ("so what </thi", True, "so what </thi", ""),
        (" so what\n", True, "so what", ""),
        ("a b</think>\nc", True, "a b", "c"),
        (" <thi", False, "", " <thi"),
        ("", True, "", ""),
    ],
)  # fmt: skip


def divided(text: str) -> Iterator[list[str]]:
    """Yield the text in one, two and three pieces in all ways, empty ones included, and in characters."""
    for cuts in combinations_with_replacement(range(len(text) + 1), 2):
        yield [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    yield list(text)


@CASES
def test_the_tokens_of_reasoning_are_counted(text: str, begins_inside: bool, reasoning: str, answer: str) -> None:
    for pieces in divided(text):
        told = counted(pieces or [""], begins_inside)
        assert told[-1] == num_inside(pieces or [""], begins_inside)
        assert told == sorted(told), "clients see it grow"
        assert not reasoning or told[-1] > 0


@CASES
def test_an_answer_is_read_the_same_in_any_pieces(text: str, begins_inside: bool, reasoning: str, answer: str) -> None:
    for pieces in divided(text):
        assert read(pieces, begins_inside) == (reasoning, answer)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>\\n' }}", "think"),
        ("content.split('</think>')", "think"),
        ("{{ '<seed:think>' }}", "seed_oss"),
        ("[THINK]", "mistral"),
        ("{{- '<|channel>thought\\n<channel|>' -}}", "gemma4"),
        ("Write your thoughts after 'Here is my thought process:'", "granite"),
        ('{{- "<|start|>assistant<|channel|>analysis<|message|>" + m.thinking + "<|end|>" }}', "openai_gptoss"),
        ("<|end|>{{ messages }}", None),
    ],
)
def test_the_marks_are_those_of_the_template(template: str, name: str | None) -> None:
    marks = marks_of_template(template)
    assert marks == (None if name is None else MARKS[name])
    if marks is not None:
        text = f"{marks.opening}Hm. <{marks.closing}Tea."
        for size in range(1, 6):
            reader = ReasoningReader(begins_inside=False, marks=marks)
            thoughts = [*(reader.feed(text[at : at + size]) for at in range(0, len(text), size)), reader.finish()]
            assert "".join(each.reasoning for each in thoughts) == "Hm. <"
            assert "".join(each.answer for each in thoughts) == "Tea."


def test_gpt_oss_tells_its_parts_apart_by_channels(tmp_path: Path) -> None:
    knows = "{{ tools }}{# <|channel|>analysis <|channel|>commentary #}"
    template = f"{{% for m in messages %}}{{{{ m['content'] }}}}{{% endfor %}}{knows}"
    tokenizer = Tokenizer(str(copied_tokenizer(tmp_path, template)))
    text = (
        "<|channel|>analysis<|message|>Hm, tea.<|end|><|start|>assistant<|channel|>commentary<|message|>I order.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.order <|constrain|>json<|message|>{"what": "tea"}'
    )
    with fake_service(tokenizer, tmp_path, writing(tokenizer, text)) as own, own.http() as http:
        body = {"messages": [HI], "tools": TOOLS}
        whole = http.post(CHAT, json=body).raise_for_status().json()
        message = whole["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("Hm, tea.", "I order.")
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "order", "arguments": '{"what": "tea"}'}
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        assert of_stream(http, **body) == ("Hm, tea.", "I order.", ["order"])
        plain = http.post(CHAT, json={"messages": [HI]}).json()["choices"][0]["message"]
        assert plain["content"] == 'I order.\n{"what": "tea"}' and "tool_calls" not in plain


def of_stream(http: httpx2.Client, **body: Any) -> tuple[str, str, list[str]]:
    told = [choice["delta"] for event in stream(http, CHAT, **body)[:-1] for choice in event["choices"]]
    calls = [part["function"]["name"] for delta in told for part in delta.get("tool_calls", ()) if "id" in part]
    return "".join(d.get("reasoning_content", "") for d in told), "".join(d.get("content") or "" for d in told), calls


@pytest.mark.parametrize("inside", [False, True])
def test_chats_and_responses_tell_reasoning_apart(tmp_path: Path, inside: bool) -> None:
    tokenizer = Tokenizer(str(copied_tokenizer(tmp_path, TEMPLATE)))
    text = ("" if inside else "<think>\n") + f"Hm, tea.\n</think>\n\n{CALLED}"
    body = {"messages": [HI], "tools": TOOLS, "chat_template_kwargs": {"inside": inside}}
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.feed([id]) for id in tokenizer.encode(text, add_special_tokens=False)]
    num_tokens = num_inside(pieces, inside)
    assert num_tokens > 3
    with fake_service(tokenizer, tmp_path, writing(tokenizer, text)) as own, own.http() as http:
        whole = http.post(CHAT, json=body).json()
        message = whole["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm, tea.", "I order.")
        assert message["reasoning"] == message["reasoning_content"]
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_tokens
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["order"]
        assert of_stream(http, **body) == ("Hm, tea.", "I order.", ["order"])
        hidden = http.post(CHAT, json={**body, "include_reasoning": False}).json()["choices"][0]["message"]
        assert "reasoning_content" not in hidden and hidden["content"] == "I order."
        assert of_stream(http, **body, include_reasoning=False)[0] == ""
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = stream(http, CHAT, **body, include_reasoning=False, stream_options=options)[:-1]
        numbers = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
        assert numbers[0] == 0 and numbers == sorted(numbers) and set(numbers[-3:]) == {num_tokens}
        variables = {"chat_template_kwargs": {"inside": inside}}
        told = events(http, input="a", **variables)
        assert told[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": num_tokens}
        deltas = [event["delta"] for event in told if event["type"] == "response.reasoning_text.delta"]
        kinds = [item["type"] for item in told[-1]["response"]["output"]]
        assert "".join(deltas) == "Hm, tea." and kinds == ["reasoning", "message"]
        hidden = http.post("/v1/responses", json={"input": "a", "include_reasoning": False, **variables}).json()
        assert [item["type"] for item in hidden["output"]] == ["message"]
        assert hidden["usage"]["output_tokens_details"] == {"reasoning_tokens": num_tokens}
        again = http.post("/v1/responses", json={"input": [HI, *told[-1]["response"]["output"], HI]})
        assert again.status_code == 200, again.text
        prompt = tokenizer.decode(own.engine.submitted[-1].prompt)
        assert "I order." in prompt and "Hm, tea." not in prompt


CALL = '<tool_call>{"name": "order", "arguments": {"what": "tea"}}</tool_call>'
CONTINUED = pytest.mark.parametrize(
    ("begun", "text", "told", "echoed"),
    [
        ("<think>I was thinking", " hard.</think>Tea.", (" hard.", "Tea.", []), ("I was thinking hard.", "Tea.", [])),
        ("<think>I was ", "so</think>\nTea.", ("so", "Tea.", []), ("I was so", "Tea.", [])),
        ("<think>", "Hm.</think>Tea.", ("Hm.", "Tea.", []), ("Hm.", "Tea.", [])),
        ("<think>Hm.</thi", "nk>Tea.", ("", "Tea.", []), ("Hm.", "Tea.", [])),
        ("<think>Hm.</think>So", " <think>", ("", " <think>", []), ("Hm.", "So <think>", [])),
        ("So ", "<think>so", ("", "<think>so", []), ("", "So <think>so", [])),
        ("<tool_c", "all?", ("", "all?", []), ("", "<tool_call?", [])),
        (CALL[:40], CALL[40:] + "Ok.", ("", "Ok.", [CALL]), ("", "Ok.", [CALL])),
        (CALL[:14], CALL[14:], ("", "", [CALL]), ("", "", [CALL])),
        ("Ok." + CALL, CALL, ("", "", [CALL]), ("", "Ok.", [CALL, CALL])),
    ],
)


@CONTINUED
@given(data=st.data())
def test_an_answer_that_continues_a_message_is_read_from_the_messages_beginning(
    tokenizer: Tokenizer, begun: str, text: str, told: Any, echoed: Any, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text)))))
    for echo, wanted in ((False, told), (True, echoed)):
        said = {"role": "assistant", "content": begun}
        body = ChatCompletionRequest(messages=[HI, said], tools=TOOLS, continue_final_message=True, echo=echo)
        new_reader = AnswerReaders(tokenizer, "think").of(body, tokenizer.encode("a" + begun))
        assert new_reader is not None
        reader, calls = new_reader(), dict[int, str]()
        parts = [reader.feed(text[a:b], is_last=b == len(text)) for a, b in pairwise([0, *cuts, len(text)])]
        for call in (call for part in parts for call in part.calls):
            calls[call.number] = calls.get(call.number, "") + call.arguments
        assert reader.num_calls == len(calls)
        assert "".join(part.reasoning for part in parts) == wanted[0]
        assert "".join(part.content for part in parts) == wanted[1]
        assert [calls[number] for number in range(len(calls))] == ['{"what": "tea"}'] * len(wanted[2])


def test_a_continued_thought_reaches_clients_as_reasoning(tmp_path: Path) -> None:
    tokenizer = Tokenizer(str(copied_tokenizer(tmp_path, TEMPLATE)))
    text = " hard.</think>Tea."
    detokenizer = IncrementalDetokenizer(tokenizer)
    num_tokens = num_inside([detokenizer.feed([id]) for id in tokenizer.encode(text)], True)
    messages = [HI, {"role": "assistant", "content": "<think>I was thinking" + " so" * 40}]
    body = {"messages": messages, "continue_final_message": True}
    with fake_service(tokenizer, tmp_path, writing(tokenizer, text)) as own, own.http() as http:
        whole = http.post(CHAT, json=body).raise_for_status().json()
        message = whole["choices"][0]["message"]
        assert tokenizer.decode(own.engine.submitted[-1].prompt).endswith(" so so")
        assert (message["reasoning_content"], message["content"]) == (" hard.", "Tea.")
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_tokens > 0
        assert of_stream(http, **body) == (" hard.", "Tea.", [])
        whole_thought = "I was thinking" + " so" * 40 + " hard."
        assert of_stream(http, **body, echo=True) == (whole_thought, "Tea.", [])
        # the template opens the thought, and the message goes on with it
        variables = {"chat_template_kwargs": {"inside": True}}
        assert of_stream(http, messages=[HI], **variables)[:2] == ("hard.", "Tea.")


@pytest.mark.parametrize(
    ("opened", "right", "wrong"),
    [
        ("<think>\n", ["Hm.</think>\n\n[5]", "</think>[]"], ["[5]", "Hm.[5]", "Hm.</think>5"]),
        ("", ["<think>Hm.</think>\n\n[5]", "[5]"], ["Hm.</think>[5]", "<think>Hm.[5]", "<think></think>\n\n\n[5]"]),
        ("<think>\n\n</think>\n\n", ["[5]"], ["<think>Hm.</think>[5]", "Hm.</think>[5]"]),
    ],
    ids=["opened", "not opened", "switched off"],
)
def test_a_structure_begins_behind_the_reasoning(
    tmp_path: Path, opened: str, right: list[str], wrong: list[str]
) -> None:
    template = f"{{% for m in messages %}}{{{{ m['content'] }}}}{{% endfor %}}{{{{ {opened!r} }}}}{{# </think> #}}"
    tokenizer = Tokenizer(str(copied_tokenizer(tmp_path, template)))
    bound = {"structured_outputs": {"json": {"type": "array"}, "disable_any_whitespace": True}}
    with fake_service(tokenizer, tmp_path, writing(tokenizer, right[0])) as own, own.http() as http:
        body = {"messages": [HI], **bound}
        whole = http.post(CHAT, json=body).raise_for_status().json()
        message, thought = whole["choices"][0]["message"], "Hm." if "Hm." in right[0] else None
        assert (message["reasoning"], message["content"]) == (thought, "[5]")
        assert (whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0) == (thought is not None)
        assert of_stream(http, **body) == (thought or "", "[5]", [])
        grammar = own.engine.submitted[-1].sampling.constraints.grammar
        for texts, is_right in ((right, True), (wrong, False)):
            assert [matches(grammar, text, tokenizer.path) for text in texts] == [is_right] * len(texts)
        said = [HI, {"role": "assistant", "content": "So: "}]
        http.post(CHAT, json={"messages": said, "continue_final_message": True, **bound}).raise_for_status()
        assert matches(own.engine.submitted[-1].sampling.constraints.grammar, "[5]", tokenizer.path)


@pytest.mark.parametrize("demanded", ["required", {"type": "function", "function": {"name": "order"}}])
def test_a_demanded_call_begins_behind_the_reasoning(tmp_path: Path, demanded: Any) -> None:
    tokenizer = Tokenizer(str(copied_tokenizer(tmp_path, TEMPLATE)))
    call = '{"what": "tea"}' if isinstance(demanded, dict) else '[{"name": "order", "parameters": {"what": "tea"}}]'
    text = f"Hm, tea.</think>\n\n{call}"
    asked = {"tools": TOOLS, "tool_choice": demanded, "chat_template_kwargs": {"inside": True}}
    with fake_service(tokenizer, tmp_path, writing(tokenizer, text)) as own, own.http() as http:
        message = http.post(CHAT, json={"messages": [HI], **asked}).json()["choices"][0]["message"]
        [told] = message["tool_calls"]
        assert (message["reasoning"], told["function"]["arguments"]) == ("Hm, tea.", '{"what": "tea"}')
        assert of_stream(http, messages=[HI], **asked) == ("Hm, tea.", "", ["order"])
        assert matches(own.engine.submitted[-1].sampling.constraints.grammar, text, tokenizer.path)
        tools = [{"type": "function", "name": "order", "parameters": {"type": "object", "properties": {"what": {}}}}]
        variables = {"chat_template_kwargs": {"inside": True}}
        told = events(http, input="a", tools=tools, tool_choice="required", **variables)[-1]["response"]["output"]
        if demanded == "required":
            assert [item["type"] for item in told] == ["reasoning", "function_call"]
        for max_tokens in (1, 4):  # in the middle of the thought
            [choice] = http.post(CHAT, json={"messages": [HI], **asked, "max_tokens": max_tokens}).json()["choices"]
            assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
            assert of_stream(http, messages=[HI], **asked, max_tokens=max_tokens)[2] == []


def test_a_structure_of_gpt_oss_is_its_final_message(tmp_path: Path) -> None:
    template = "{{ messages[0]['content'] }}{{ tools }}{# <|channel|>analysis <|channel|>commentary #}"
    tokenizer = Tokenizer(str(copied_tokenizer(tmp_path, template)))
    thought, call = "<|channel|>analysis<|message|>Hm.<|end|>", '[{"name": "stop", "parameters": {}}]'
    text = f"{thought}<|start|>assistant<|channel|>final<|message|>{call}"
    body = {"messages": [HI], "tools": TOOLS, "tool_choice": "required"}
    with fake_service(tokenizer, tmp_path, writing(tokenizer, text)) as own, own.http() as http:
        assert of_stream(http, **body) == ("Hm.", "", ["stop"])
        whole = http.post(CHAT, json=body).json()["choices"][0]["message"]
        assert (whole["reasoning"], whole["content"], len(whole["tool_calls"])) == ("Hm.", None, 1)
        grammar = own.engine.submitted[-1].sampling.constraints.grammar
        assert matches(grammar, text, tokenizer.path) and not matches(grammar, thought + call, tokenizer.path)


def test_marks_may_be_special_tokens(tokenizer: Tokenizer) -> None:
    table = TokenTable(tokenizer.path, 2048, (0,))
    grammar = table.behind(ThoughtMarks("<|im_start|>thought\n", "<|pad|>"), grammar_text("choice", ["yes", "no"]))
    for text, is_right in (
        ("<|im_start|>thought\nHm.<|pad|>\nyes", True),
        ("no", True),
        ("<|im_start|>Hm.<|pad|>no", False),
        ("<|im_start|>thought\nHm.no", False),
        ("Hm.<|pad|>no", False),
    ):
        assert matches(grammar, text, tokenizer.path) == is_right, text


def test_the_effort_reaches_a_template_that_knows_it(tmp_path: Path, script: Any, tokenizer: Tokenizer) -> None:
    knows = Tokenizer(str(copied_tokenizer(tmp_path, TEMPLATE)))
    with fake_service(knows, tmp_path, script) as own, own.http() as http:
        response = http.post(CHAT, json={"messages": [HI], "reasoning_effort": "high"})
        assert "high" in knows.decode(own.engine.submitted[-1].prompt) and "x-secateur-ignored" not in response.headers
        http.post("/v1/responses", json={"input": "a", "reasoning": {"effort": "low"}})
        assert "low" in knows.decode(own.engine.submitted[-1].prompt)
    other = tmp_path / "other"
    other.mkdir()
    with fake_service(tokenizer, other, script) as own, own.http() as http:
        response = http.post(CHAT, json={"messages": [HI], "reasoning_effort": "high"})
        assert response.headers["x-secateur-ignored"] == "reasoning_effort"
        assert "reasoning_content" not in response.json()["choices"][0]["message"]


def test_the_flag_decides_where_the_template_is_wrong(tmp_path: Path, tokenizer: Tokenizer) -> None:
    script = writing(tokenizer, "<think>Hm.</think>Tea.")
    for parser, wanted in (("think", ("Hm.", "Tea.")), ("none", (None, "<think>Hm.</think>Tea."))):
        folder = tmp_path / parser
        folder.mkdir()
        with fake_service(tokenizer, folder, script, reasoning_parser=parser) as own, own.http() as http:
            message = http.post(CHAT, json={"messages": [HI]}).json()["choices"][0]["message"]
            assert (message.get("reasoning_content"), message["content"]) == wanted


def test_where_nothing_tells_reasoning_apart_no_tokens_of_it_are_told(http: httpx2.Client) -> None:
    chat = http.post(CHAT, json={"messages": [HI]}).json()
    assert "reasoning_tokens" not in chat["usage"]["completion_tokens_details"]
    message = chat["choices"][0]["message"]
    assert "reasoning_content" not in message and message["reasoning"] is None, "vLLM's clients read a null"
    response = http.post("/v1/responses", json={"input": "a"}).json()
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_templates_get_earlier_reasoning_under_both_names(tmp_path: Path, script: Any, name: str) -> None:
    template = "{% for m in messages %}{{ m.reasoning }}|{{ m.reasoning_content }}|{% endfor %}</think>"
    tokenizer = Tokenizer(str(copied_tokenizer(tmp_path, template)))
    with fake_service(tokenizer, tmp_path, script) as own, own.http() as http:
        said = {"role": "assistant", "content": "a", name: "Hm."}
        assert http.post(CHAT, json={"messages": [HI, said, HI]}).status_code == 200
        assert tokenizer.decode(own.engine.submitted[-1].prompt) == "||Hm.|Hm.|||</think>"
