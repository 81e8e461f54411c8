"""Tools: calls that models write in several formats, calls that are demanded, and what templates and clients get."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any, get_args

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.text.answer_reader import AnswerReaders
from cluster.text.call_formats import FORMATS, format_of_template, json_of, types_of
from cluster.text.harmony import HarmonyReader
from cluster.text.reasoning import MARKS
from cluster.text.tokenizer import Tokenizer
from cluster.text.tool_calls import CustomInput, ToolCallReader, taught
from secateur.settings import EngineSettings, settings_of
from tests.cluster.conftest import MODEL
from tests.cluster.http.test_structured_outputs import matches
from tests.support.fake_service import FakeService, error_of, fake_service, stream
from workers.comm.ipc import Submit

CHAT = "/v1/chat/completions"
HI = {"role": "user", "content": "a"}
ORDER = {
    "type": "object",
    "properties": {"what": {"$ref": "#/$defs/thing"}, "more": {"$ref": "#"}, "const": {"$ref": "#/$defs/data"}},
    "required": ["what"],
    "additionalProperties": False,
    "$defs": {"thing": {"enum": ["tea", 5]}, "data": {"enum": [{"$ref": "#/a"}, {"const": "#"}]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "order", "description": "Orders a thing.", "parameters": ORDER}},
    {"type": "function", "function": {"name": "stop"}},
]
HERMES = '<tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>'
"""What a chat template says that teaches this format."""
SCHEMAS = {"f": {"properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": ["object", "null"]}}}}
Calls = list[tuple[str, str]]


def read(format: Any, pieces: list[str], **options: Any) -> tuple[str, Calls]:
    """Return the content and the calls, each with its name and arguments."""
    reader = HarmonyReader(**options) if format == "openai" else ToolCallReader(format, schemas=SCHEMAS, **options)
    content, calls, ids = "", [], set()
    for part in [*(reader.feed(piece) for piece in pieces), reader.finish()]:
        content += part.content
        for number, arguments, id, name, _ in part.calls:
            if id is not None:
                assert number == len(calls) and name
                calls.append((name, ""))
                ids.add(id)
            name, before = calls[number]
            calls[number] = (name, before + arguments)
    assert len(ids) == len(calls)
    return content, calls


WRITTEN: list[tuple[str, str, str, Calls]] = [
    # Hermes
    ("hermes", "no call < here <tool", "no call < here <tool", []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    (
        "hermes",
        'Let me see.\n\n<tool_call>{"name": "f", "arguments": {"a": "}\\"{"}}</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "g"}</tool_call>\n Done.',
        "Let me see.\nDone.",
        [("f", '{"a": "}\\"{"}'), ("g", "{}")],
    ),
    ("hermes", ' <tool_call>{"name": "f", "arguments": [1, {"a": null}]}', "", [("f", '[1, {"a": null}]')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"arguments": "", "name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f"', "", [("f", "")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>\nDone.', "Done.", [("f", "{}")]),
    ("hermes", "<tool_call>f(1)</tool_call>", "<tool_call>f(1)</tool_call>", []),
    ("hermes", '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}', '<tool_call>{"name": 5, "arguments": {}}', []),
    ("hermes", '<tool_call>{"na', '<tool_call>{"na', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a"', "", [("f", '{"a"')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": 5, "x": [true]}</tool_call>', "", [("f", "5")]),
    (
        "hermes",
        'So <tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n</tool_call>< Done.',
        "So\n< Done.",
        [("f", "{}")],
    ),
    ("hermes", "<tool_call> <tool_call>f(1)", "<tool_call> <tool_call>f(1)", []),
    ("hermes", "<tool_call>\n<tool_", "<tool_call>\n<tool_", []),
    (
        "hermes",
        '<tool_call>{"a": <tool_call>}{"b"<tool_call>{"name": "f", "arguments": {}}',
        '<tool_call>{"a": <tool_call>}{"b"',
        [("f", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "f", so <tool_call>{"name": "g"}', "so", [("f", ""), ("g", "{}")]),
    # Llama
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}',
        "",
        [("f", "{}"), ("g", '{"b": 2}')],
    ),
    ("llama3_json", '{"answer": 5}\n', '{"answer": 5}\n', []),
    ("llama3_json", 'Say {"name": "f", "parameters": {}}', 'Say {"name": "f", "parameters": {}}', []),
    ("llama3_json", "<|pyth", "<|pyth", []),
    ("llama3_json", '<|python_tag|> <|python_tag|>{"name": "f"}', "", [("f", "{}")]),
    ("llama3_json", '<|python_tag|>{"answer": 5}', '<|python_tag|>{"answer": 5}', []),
    ("llama3_json", "", "", []),
    # Mistral
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("mistral", 'So:[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', "So:", [("f", '{"a": 1}'), ("g", "{}")]),
    ("mistral", "Hello [TOOL", "Hello [TOOL", []),
    ("mistral", f"[TOOL_CALLS]{'f' * 64}[ARGS]{{}}", "", [("f" * 64, "{}")]),
    ("mistral", f"[TOOL_CALLS]{'f' * 90}", f"[TOOL_CALLS]{'f' * 90}", []),
    ("mistral", '[TOOL_CALLS][TOOL_CALLS][{"name": "f", "arguments": {}}] Done.', "Done.", [("f", "{}")]),
    ("mistral", "[TOOL_CALLS] [TOOL_CALLS]f{}", "", [("f", "{}")]),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{}", "", [("f", "{}")]),
    ("mistral", "[TOOL_CALLS]f of [TOOL_CALLS]g{}", "[TOOL_CALLS]f of", [("g", "{}")]),
    ("mistral", "[TOOL_CALLS] [5] [", "[TOOL_CALLS] [5] [", []),
    ("mistral", "[TOOL_CALLS] [ ", "[TOOL_CALLS] [ ", []),
    ("mistral", "[TOOL_CALLS]f[AR", "[TOOL_CALLS]f[AR", []),
    # Qwen3 Coder
    ("qwen3_coder", "a <tool_call>\n<function=f of", "a <tool_call>\n<function=f of", []),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n\n b\n", "", [("f", '{"a": "\\n b\\n')]),
    ("qwen3_coder", "<tool_call><function=f><parameter=n>5", "", [("f", '{"n": 5')]),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a></parameter>so</function></tool_call>",
        "so</function></tool_call>",
        [("f", '{"a": ""}')],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>\n</para\n\n</parameter></function>",
        "",
        [("f", '{"a": "</para\\n"}')],
    ),
    # GLM
    ("glm45", "<tool_call>f of x", "<tool_call>f of x", []),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key><arg_va", "", [("f", "")]),
    # Granite, Gemma, DeepSeek
    ("granite", "<|tool_call|>[] So", "<|tool_call|>[] So", []),
    ("gemma4", '<|tool_call>call:f{a:<|"|>b', "", [("f", '{a:<|"|>b')]),
    ("gemma4", "<|tool_call>call:f{a b}<tool_call|>", "", [("f", "{a b}")]),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>f<｜tool▁sep｜>{}", "<｜tool▁calls▁begin｜>f<｜tool▁sep｜>{}", []),
    # gpt-oss
    ("openai", "Plain text <|en", "Plain text <|en", []),
    ("openai", "to", "to", []),
    ("openai", "<|channel|>final<|message|>a<|end|>b<|return|>", "a\nb", []),
    ("openai", "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>fin", "", []),
    ("openai", " to=functions.f<|channel|>commentary <|constrain|>json<|message|>{", "", [("f", "{")]),
    # demanded calls
    (
        "list",
        '[{"name": "f", "parameters": {"a": [1, 2]}} ,\n {"name": "g", "parameters": {}}]',
        "",
        [("f", '{"a": [1, 2]}'), ("g", "{}")],
    ),
    ("list", '[{"name": "f', "", []),
]


@pytest.mark.parametrize(("format", "text", "content", "calls"), WRITTEN)
@given(data=st.data())
def test_an_answer_is_read_the_same_in_any_pieces(
    format: str, text: str, content: str, calls: Calls, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(format, pieces) == (content, calls)
    assert read(format, list(text)) == (content, calls)


RECORDED: list[tuple[str, str, str, Calls]] = [
    (
        "qwen3_coder",
        'I look.\n\n<tool_call>\n<function=f>\n<parameter=a>\nif a < "b":\n    🌳\n</parameter>\n<parameter=n>\n3\n'
        "</parameter>\n<parameter=o>\nNone\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n"
        "</function>\n</tool_call>",
        "I look.",
        [("f", '{"a": "if a < \\"b\\":\\n    🌳", "n": 3, "o": null}'), ("g", "{}")],
    ),
    (
        "glm45",
        "I look.\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>\n</arg_value>\n<arg_key>o</arg_key>\n"
        '<arg_value>{"b": [1, "2"]}</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>',
        "I look.",
        [("f", '{"a": "\\n", "o": {"b": [1, "2"]}}'), ("g", "{}")],
    ),
    # GLM 4.7
    (
        "glm45",
        "<tool_call>f<arg_key>n</arg_key><arg_value>3</arg_value><arg_key>x</arg_key><arg_value>b c</arg_value>"
        "</tool_call><tool_call>g</tool_call>",
        "",
        [("f", '{"n": 3, "x": "b c"}'), ("g", "{}")],
    ),
    (
        "minimax_m2",
        '\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">5</parameter>\n'
        '<parameter name="n">5</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
        "",
        [("f", '{"a": "5", "n": 5}'), ("g", "{}")],
    ),
    (
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "```"}\n```'
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("f", '{"a": "```"}'), ("g", "{}")],
    ),
    (
        "deepseek_v31",
        'I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "b"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look.",
        [("f", '{"a": "b"}'), ("g", "{}")],
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": "b"}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        "",
        [("f", '{"a": "b"}'), ("g", "{}")],
    ),
    (
        "gemma4",
        '<|tool_call>call:f{a:<|"|>{b: "c"}<|"|>,n:3,o:{x:[1,<|"|>y:<|"|>],z:true}}<tool_call|>'
        "<|tool_call>call:g{}<tool_call|>",
        "",
        [("f", '{"a":"{b: \\"c\\"}","n":3,"o":{"x":[1,"y:"],"z":true}}'), ("g", "{}")],
    ),
    (
        "functiongemma",
        "<start_function_call>call:f{a:<escape>b<escape>,n:3}<end_function_call>"
        "<start_function_call>call:g{}<end_function_call>",
        "",
        [("f", '{"a":"b","n":3}'), ("g", "{}")],
    ),
    (
        "granite",
        '<|tool_call|>[{"name": "f", "arguments": {"a": "b"}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"a": "b"}'), ("g", "{}")],
    ),
    (
        "openai",
        "<|channel|>analysis<|message|>Hm: 1 < 2.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        '<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "b"}<|end|>'
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}",
        "I look.",
        [("f", '{"a": "b"}'), ("g", "{}")],
    ),
]
"""Answers as the published templates write them."""


@pytest.mark.parametrize(("format", "text", "content", "calls"), RECORDED)
def test_a_recorded_answer_is_read_whole_and_in_small_pieces(
    format: str, text: str, content: str, calls: Calls
) -> None:
    for size in (len(text), 1, 2, 3, 4, 5):
        assert read(format, [text[at : at + size] for at in range(0, len(text), size)]) == (content, calls)
    for cut in range(len(text)):
        assert read(format, [text[:cut], text[cut:]]) == (content, calls)
        assert read(format, [text[:cut]]) == read(format, list(text[:cut]))
    if len(calls) > 1:
        assert read(format, list(text), most=1) == (content, calls[:1])


def test_a_text_is_sent_as_it_is_written() -> None:
    reader = ToolCallReader("qwen3_coder", schemas=SCHEMAS)
    pieces = ["<tool_call>\n<function=f>\n<parameter=a>\n", "one\n", 'two "', "\n</para", "meter>\n</function>"]
    told = ["".join(part.arguments for part in reader.feed(piece).calls) for piece in pieces]
    assert told == ['{"a": ', '"one', '\\ntwo \\"', "", '"}']


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", '"5"'),
        ({"type": "integer"}, " 5 ", "5"),
        ({"type": "integer"}, "five", '"five"'),
        ({"type": "number"}, "5", "5"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "object"}, "{'a': None}", '{"a": null}'),
        ({"type": "array"}, '["a",  1e3]', '["a",  1e3]'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "[5]", '"[5]"'),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"const": 1}, "1", "1"),
        ({}, "[5]", "[5]"),
        ({}, "a b", '"a b"'),
        ({"type": 5, "enum": 5, "anyOf": 5}, "[" * 100_000, json.dumps("[" * 100_000)),
        (None, "(1, 2)", '"(1, 2)"'),
    ],
)
def test_an_argument_has_the_type_of_its_schema(schema: Any, text: str, value: str) -> None:
    assert json_of(text, types_of(schema)) == value


def test_every_format_can_be_named_by_a_flag() -> None:
    for name, known in (("tool_call_parser", {"auto", *FORMATS}), ("reasoning_parser", {"auto", "none", *MARKS})):
        setting = settings_of(EngineSettings)[name]
        assert set(get_args(setting.kinds[0])) == known and set(setting.flag.vllm_values.values()) <= known


PARTS = [*'<>{}[]":,=\n x5', "tool_call", "function=f", "parameter=a", "</parameter>", "</function>", "</tool_call>"]
PARTS += ["<tool_call>", "f<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "call:f{", '<|"|>', "<|tool_call|>"]
PARTS += ["<|channel|>", "final<|message|>", "<|end|>", "<|start|>", "to=f", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"]
PARTS += [
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "```json\n",
    "<invoke name=",
    "TOOL_CALLS",
]


@given(parts=st.lists(st.sampled_from(PARTS), max_size=20))
@pytest.mark.parametrize("format", FORMATS)
def test_any_marks_are_read_to_their_end(format: str, parts: list[str]) -> None:
    text = "".join(parts)
    assert read(format, list(text)) == read(format, [text])


@given(text=st.text(st.sampled_from('<tool_call>{}[]":,\\ /nameargumts5[TOOL_CALLS]|;\n'), max_size=60))
@pytest.mark.parametrize("format", ["hermes", "llama3_json", "mistral", "list"])
def test_any_text_is_read_to_its_end(format: str, text: str) -> None:
    assert read(format, list(text)) == read(format, [text])


def test_arguments_are_sent_as_they_are_written() -> None:
    reader = ToolCallReader("hermes")
    seen = [reader.feed(piece).calls for piece in ('<tool_call>{"name": "f", "argu', 'ments": {"a', '": 1', "}}")]
    assert [[part.arguments for part in parts] for parts in seen] == [[""], ['{"a'], ['": 1'], ["}"]]


def test_content_is_sent_at_once_unless_it_may_be_the_beginning_of_a_call() -> None:
    reader = ToolCallReader("hermes")
    assert [reader.feed(piece).content for piece in ("a", "b<", "c", " <tool")] == ["a", "b", "<c", ""]


def test_one_call_is_read_of_several_if_no_more_are_wanted() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert read("hermes", list(text), most=1) == ("", [("f", "{}")])
    assert read("arguments", list('{"a": 1}'), name="f") == ("", [("f", '{"a": 1}')])


def test_mistrals_call_ids_have_the_length_that_its_templates_demand() -> None:
    for format, length in (("mistral", 9), ("hermes", 29)):
        opening = "[TOOL_CALLS]" if format == "mistral" else "<tool_call>"
        [part] = ToolCallReader(format).feed(opening + '{"name": "f", "arg').calls
        assert part.id is not None and len(part.id) == length


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (HERMES, "hermes"),
        # Qwen 2.5 and 3
        (
            r"within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": "
            r"<args-json-object>}\n</tool_call>",
            "hermes",
        ),
        # Hermes 2 Pro
        (
            """{{- "<tool_call>\\n" }}{{- '{"arguments": <args>, "name": <name>}\\n' }}{{- '</tool_call>' }}""",
            "hermes",
        ),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        # Llama 3.1
        (
            'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
            "<|python_tag|>",
            "llama3_json",
        ),
        # GLM 4.5
        (
            "{{ tools }}in this format:\n<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n"
            "<arg_value>{arg-value-1}</arg_value>\n...\n</tool_call>{{ '<tool_call>' + tc[\"name\"] }}",
            "glm45",
        ),
        # Qwen3 Coder
        ("{{ tools }}<tool_call>\n<function=example_function_name>\n<parameter=example>\n1\n", "qwen3_coder"),
        (
            r"{{- 'in this format:\n<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>' }}",
            "qwen3_coder",
        ),
        ('{%- set begin = "<minimax:tool_call>" -%}<invoke name="tool-name-1">', "minimax_m2"),
        # DeepSeek R1 and V3, then V3.1
        (
            "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + "
            "tool['function']['name'] + '\\n' + '```json' + '\\n' + tool['function']['arguments']}}",
            "deepseek_v3",
        ),
        ("{{'<｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' + arguments}}", "deepseek_v31"),
        ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ arguments }}", "kimi_k2"),
        ("{{- '<|tool_call>call:' + function['name'] + '{' -}}", "gemma4"),
        ("{{ '<start_function_call>call:' + function['name'] }}", "functiongemma"),
        ("write <|tool_call|> followed by a JSON list of tools used", "granite"),
        ("{{ '<|start|>assistant to=functions.' + name + '<|channel|>commentary json<|message|>' }}", "openai"),
        # Functionary
        ('{{ tools }}<function=example_function_name>{"example_name": "example_value"}</function><|python_tag|>', None),
        # a description of the tools
        ('{{ tools }}{"name": "f", "description": "", "parameters": {}}', None),
        ("{{ tools }}<tool_call>", None),
        ("{{ tools }}", None),
    ],
)
def test_the_format_is_that_which_the_template_teaches(template: str, format: str | None) -> None:
    assert format_of_template(template) == format


# ---- templates


def test_a_template_without_tools_gets_them_and_all_calls_as_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "order", "arguments": {"what": "tea"}}}
    messages = [
        {"role": "system", "content": "Be short."},
        HI,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": "1"},
    ]
    system, user, assistant, result = taught(messages, TOOLS)
    assert system["content"].startswith("Be short.\n\n") and '"name": "order"' in system["content"]
    assert user == HI
    assert assistant["content"] == '<tool_call>\n{"name": "order", "arguments": {"what": "tea"}}\n</tool_call>'
    assert (result["role"], result["content"]) == ("user", "<tool_response>\ndone\n</tool_response>")
    assert read("hermes", [assistant["content"]]) == ("", [("order", '{"what": "tea"}')])
    assert "tool_calls" not in assistant
    said = taught([{"role": "assistant", "content": "So:", "tool_calls": [call]}], None)[0]["content"]
    assert said == 'So:\n<tool_call>\n{"name": "order", "arguments": {"what": "tea"}}\n</tool_call>'
    assert (
        "Café" in taught([HI], [{"type": "function", "function": {"name": "f", "description": "Café"}}])[0]["content"]
    )
    [only, *rest] = taught([HI], TOOLS)
    assert only["role"] == "system" and rest == [HI] and taught([HI], None) == [HI]


def test_a_template_with_tools_gets_the_arguments_of_earlier_calls_as_objects(script: Any, tmp_path: Path) -> None:
    folder = copied_tokenizer(
        tmp_path,
        "{% for m in messages %}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
        "{{ c['function']['arguments']['what'] }}{% endfor %}{% endfor %}"
        "{% for tool in tools or [] %}|{{ tool['function']['name'] }}{% endfor %}<tool_call>",
    )
    arguments = json.dumps({"what": "tea"})
    call = {"id": "1", "type": "function", "function": {"name": "order", "arguments": arguments}}
    messages = [HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "ok"}]
    with fake_service(Tokenizer(str(folder)), tmp_path, script) as own, own.http() as http:
        body = {"messages": messages, "tools": TOOLS, "max_tokens": 1}
        assert http.post(CHAT, json=body).status_code == 200
        told = own.engine.submitted[-1].prompt
        assert own.service.tokenizer.decode(told) == "ateaok|order|stop<tool_call>"
        call["function"]["arguments"] = "{'what'"
        error = error_of(http.post(CHAT, json=body))
        assert error["message"].startswith("messages.1.tool_calls.0.function.arguments: is not JSON")
        assert error["param"] == "messages"


# ---- answers


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


CALLED = 'I order.\n<tool_call>\n{"name": "order", "arguments": {"what": "tea"}}\n</tool_call>'


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


def test_half_a_character_in_a_call_never_becomes_a_text() -> None:
    """JSON may spell a lone surrogate, which no answer can send."""
    assert read("hermes", [r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>'])[1] == []
    assert read("hermes", [r'<tool_call>{"name": "f", "arguments": "\ud800"}</tool_call>'])[1] == [("f", r'"\ud800"')]
    written = r'{"input": "\ud800"}'
    assert CustomInput(is_bare=False).feed(written) == written


def test_a_bare_input_that_is_cut_is_no_call(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """What there is of it may be JSON by accident."""
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


def copied_tokenizer(tmp_path: Path, template: str) -> Path:
    """Return a folder with the bundled tokenizer and another chat template."""
    folder = copytree(MODEL, tmp_path / "model", ignore=lambda _, names: [n for n in names if "safetensors" in n])
    (folder / "chat_template.jinja").write_text(template)
    return folder
