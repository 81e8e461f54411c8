"""Models that reason before they answer: what is reasoning, and where clients find it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.http.reasoning import ReasoningReader
from cluster.http.tokenizer import Tokenizer
from tests.cluster.http.test_responses_api import events, writing
from tests.cluster.http.test_tool_calls import CALLED, CHAT, TOOLS, copied_tokenizer
from tests.support.fake_service import fake_service, stream

HI = {"role": "user", "content": "a"}
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ tools }}{{ reasoning_effort }}<tool_call>{% if inside %}"
    "<think>\n{% endif %}"
)


def read(pieces: list[str], begins_inside: bool) -> tuple[str, str]:
    reader = ReasoningReader(begins_inside=begins_inside)
    thoughts = [*map(reader.feed, pieces), reader.finish()]
    return "".join(each.reasoning for each in thoughts), "".join(each.answer for each in thoughts)


@pytest.mark.parametrize(
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
@given(data=st.data())
def test_an_answer_is_read_the_same_in_any_pieces(
    text: str, begins_inside: bool, reasoning: str, answer: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces, begins_inside) == read(list(text), begins_inside) == (reasoning, answer)


def of_stream(http: httpx2.Client, **body: Any) -> tuple[str, str, list[str]]:
    told = [choice["delta"] for event in stream(http, CHAT, **body)[:-1] for choice in event["choices"]]
    calls = [part["function"]["name"] for delta in told for part in delta.get("tool_calls", ()) if "id" in part]
    return "".join(d.get("reasoning_content", "") for d in told), "".join(d.get("content") or "" for d in told), calls


@pytest.mark.parametrize("inside", [False, True])
def test_chats_and_responses_tell_reasoning_apart(tmp_path: Path, inside: bool) -> None:
    tokenizer = Tokenizer(str(copied_tokenizer(tmp_path, TEMPLATE)))
    text = ("" if inside else "<think>\n") + f"Hm, tea.\n</think>\n\n{CALLED}"
    body = {"messages": [HI], "tools": TOOLS, "chat_template_kwargs": {"inside": inside}}
    with fake_service(tokenizer, tmp_path, writing(tokenizer, text)) as own, own.http() as http:
        message = http.post(CHAT, json=body).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm, tea.", "I order.")
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["order"]
        assert of_stream(http, **body) == ("Hm, tea.", "I order.", ["order"])
        hidden = http.post(CHAT, json={**body, "include_reasoning": False}).json()["choices"][0]["message"]
        assert "reasoning_content" not in hidden and hidden["content"] == "I order."
        assert of_stream(http, **body, include_reasoning=False)[0] == ""
        if inside:
            return  # /v1/responses has no variables of the template
        told = events(http, input="a")
        deltas = [event["delta"] for event in told if event["type"] == "response.reasoning_text.delta"]
        kinds = [item["type"] for item in told[-1]["response"]["output"]]
        assert "".join(deltas) == "Hm, tea." and kinds == ["reasoning", "message"]
        again = http.post("/v1/responses", json={"input": [HI, *told[-1]["response"]["output"], HI]})
        assert again.status_code == 200, again.text
        prompt = tokenizer.decode(own.engine.submitted[-1].prompt)
        assert "I order." in prompt and "Hm, tea." not in prompt


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
