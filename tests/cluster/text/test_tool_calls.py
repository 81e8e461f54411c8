"""Calls that models write in several formats, read in any pieces."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.text.call_formats import FORMATS, format_of_template, json_of, types_of
from cluster.text.harmony import HarmonyReader
from cluster.text.reasoning import MARKS
from cluster.text.tool_calls import CustomInput, ToolCallReader
from secateur.settings import EngineSettings, settings_of
from tests.support.tools import HERMES

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
    ("llama3_json", 'I look. <|python_tag|>{"name": "f", "parameters": {}}', "I look.", [("f", "{}")]),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
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
    # calls whose opening is missing, of functions that are offered
    (
        "qwen3_coder",
        "I look.\n<function=f>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>",
        "I look.",
        [("f", '{"n": 5}')],
    ),
    ("qwen3_coder", "Write <function=example> or <function=f", "Write <function=example> or <function=f", []),
    ("minimax_m2", '<invoke name="f"></invoke></minimax:tool_call>', "", [("f", "{}")]),
    ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "", [("f", "{}")]),
    ("kimi_k2", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{}<|tool_call_end|>", "", [("f", "{}")]),
    # GLM
    ("glm45", "<tool_call>f of x", "<tool_call>f of x", []),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key><arg_va", "", [("f", "")]),
    # Granite, Gemma, DeepSeek
    ("granite", "<|tool_call|>[] So", "<|tool_call|>[] So", []),
    ("gemma4", '<|tool_call>call:f{a:<|"|>b', "", [("f", '{a:<|"|>b')]),
    ("gemma4", "<|tool_call>call:f{a b}<tool_call|>", "", [("f", "{a b}")]),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>f<｜tool▁sep｜>{}", "<｜tool▁calls▁begin｜>f<｜tool▁sep｜>{}", []),
    # empty and broken arguments, before another call
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜> <｜tool▁call▁end｜>"
        '<｜tool▁call▁begin｜>g<｜tool▁sep｜>{"a": [1}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "<｜tool▁call▁end｜>"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>So',
        "So",
        [("f", "{}"), ("g", '{"a": [1}'), ("f", '{"a": "<｜tool▁call▁end｜>"}')],
    ),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n\n```<｜tool▁call▁end｜>"
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{"a": "```"}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "",
        [("f", "{}"), ("g", '{"a": "```"}')],
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|><|tool_call_end|>"
        "<|tool_call_begin|>g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "",
        [("f", "{}"), ("g", "{}")],
    ),
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


RECORDED: list[tuple[str, str, str, Calls]] = [
    (
        "hermes",
        'I look.\n<tool_call>\n{"name": "f", "arguments": {"a": "if a < \\"b\\":\\n    🌳"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        "I look.",
        [("f", '{"a": "if a < \\"b\\":\\n    🌳"}'), ("g", "{}")],
    ),
    ("llama3_json", '{"name": "f", "parameters": {"a": "🌳", "n": 3}}', "", [("f", '{"a": "🌳", "n": 3}')]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "🌳"}, "id": "a1b2c3d4e"}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"a": "🌳"}'), ("g", "{}")],
    ),
    (
        "mistral",
        'I look.[TOOL_CALLS]f[ARGS]{"a": "b"}[TOOL_CALLS]g[ARGS]{}',
        "I look.",
        [("f", '{"a": "b"}'), ("g", "{}")],
    ),
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
assert {format for format, *_ in RECORDED} == set(FORMATS)


@pytest.mark.parametrize(("format", "text", "content", "calls"), WRITTEN + RECORDED)
def test_an_answer_is_read_the_same_whole_and_in_pieces(format: str, text: str, content: str, calls: Calls) -> None:
    for size in (len(text) + 1, 1, 2, 3, 4, 5):
        assert read(format, [text[at : at + size] for at in range(0, len(text), size)]) == (content, calls)
    for cut in range(len(text)):
        assert read(format, [text[:cut], text[cut:]]) == (content, calls)


@pytest.mark.parametrize(("format", "text", "content", "calls"), RECORDED)
def test_an_answer_is_read_up_to_any_end_and_any_number_of_calls(
    format: str, text: str, content: str, calls: Calls
) -> None:
    for end in range(len(text)):
        assert read(format, [text[:end]]) == read(format, list(text[:end]))
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


def test_half_a_character_in_a_call_never_becomes_a_text() -> None:
    """JSON may spell a lone surrogate, which no answer can send."""
    assert read("hermes", [r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>'])[1] == []
    assert read("hermes", [r'<tool_call>{"name": "f", "arguments": "\ud800"}</tool_call>'])[1] == [("f", r'"\ud800"')]
    written = r'{"input": "\ud800"}'
    assert CustomInput(is_bare=False).feed(written) == written
