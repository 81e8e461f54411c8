"""Describes how families of models write tool calls, and turns their arguments into JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn


class Head(NamedTuple):
    """Marks the beginning of a call or an argument: a pattern whose first group is its name.

    example: any beginning of what matches, completed by an end of the example, matches.
    """

    pattern: re.Pattern[str]
    example: str

    def may_begin(self, text: str) -> bool:
        """Return whether more text may make this text a head."""
        return any(self.pattern.match(text + self.example[start:]) for start in range(len(self.example)))


class CallFormat(NamedTuple):
    """Describes how a family writes calls.

    Without `head`, a call is a JSON object with a name and arguments; with `argument`, each argument stands alone; with
    `quote`, arguments are an object whose keys are bare and whose texts stand between this mark; else they are JSON.
    """

    taught: str
    """A pattern of what chat templates have that teach it."""
    opening: str
    """The mark before a call, or before several."""
    closing: str = ""
    """The mark behind a call."""
    ending: str = ""
    """The mark behind all calls of an opening."""
    head: Head | None = None
    """From the opening, or the call before, to the arguments."""
    argument: Head | None = None
    """From the head, or the argument before, to a value."""
    value_end: str = ""
    """The mark behind a value."""
    is_padded: bool = False
    """A line break on each side of a value is not part of it."""
    quote: str = ""
    """The mark around texts."""
    has_list: bool = False
    """The opening may be before a list of objects."""
    is_first: bool = False
    """A call that begins the answer needs no mark."""
    unopened: str = ""
    """Begins a call whose opening the model left out."""


def _head(pattern: str, example: str) -> Head:
    return Head(re.compile(pattern), example)


_NAME = r"([\w.:/-]{1,128})"
FORMATS: dict[str, CallFormat] = {
    "openai": CallFormat(taught=r"<\|channel\|>commentary", opening=""),  # gpt-oss; see `harmony`
    "qwen3_coder": CallFormat(
        taught=r"<function=[^>]*>\\?n?\s*<parameter=",
        opening="<tool_call>",
        unopened="<function=",
        head=_head(rf"\s*<function={_NAME}\s*>", "<function=x>"),
        argument=_head(r"<parameter=([^>]+)>", "<parameter=x>"),
        value_end="</parameter>",
        is_padded=True,
        closing="</function>",
        ending="</tool_call>",
    ),
    "glm45": CallFormat(
        taught="<arg_key>",
        opening="<tool_call>",
        head=_head(rf"\s*{_NAME}\s*(?=<)", "x<"),
        argument=_head(r"<arg_key>\s*([^<]+?)\s*</arg_key>\s*<arg_value>", "<arg_key>x</arg_key><arg_value>"),
        value_end="</arg_value>",
        closing="</tool_call>",
    ),
    "minimax_m2": CallFormat(
        taught="<minimax:tool_call>",
        opening="<minimax:tool_call>",
        unopened='<invoke name="',
        head=_head(rf'\s*<invoke name="{_NAME}">', '<invoke name="x">'),
        argument=_head(r'<parameter name="([^">]+)">', '<parameter name="x">'),
        value_end="</parameter>",
        closing="</invoke>",
        ending="</minimax:tool_call>",
    ),
    "deepseek_v3": CallFormat(
        taught="<｜tool▁sep｜>.{0,200}```json",
        opening="<｜tool▁calls▁begin｜>",
        unopened="<｜tool▁call▁begin｜>",
        head=_head(
            rf"\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}\s*```json\s*(?=\S)",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>x```json{",
        ),
        closing="```<｜tool▁call▁end｜>",
        ending="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": CallFormat(
        taught="<｜tool▁sep｜>",
        opening="<｜tool▁calls▁begin｜>",
        unopened="<｜tool▁call▁begin｜>",
        head=_head(rf"\s*<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>", "<｜tool▁call▁begin｜>x<｜tool▁sep｜>"),
        closing="<｜tool▁call▁end｜>",
        ending="<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": CallFormat(
        taught=r"<\|tool_call_argument_begin\|>",
        opening="<|tool_calls_section_begin|>",
        unopened="<|tool_call_begin|>",
        head=_head(
            r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]{1,128}?)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
            "<|tool_call_begin|>x:0<|tool_call_argument_begin|>",
        ),
        closing="<|tool_call_end|>",
        ending="<|tool_calls_section_end|>",
    ),
    "gemma4": CallFormat(
        taught=r"<\|tool_call>call:",
        opening="<|tool_call>",
        head=_head(rf"\s*call:{_NAME}\s*(?={{)", "call:x{"),
        quote='<|"|>',
        closing="<tool_call|>",
    ),
    "functiongemma": CallFormat(
        taught="<start_function_call>call:",
        opening="<start_function_call>",
        head=_head(rf"\s*call:{_NAME}\s*(?={{)", "call:x{"),
        quote="<escape>",
        closing="<end_function_call>",
    ),
    "granite": CallFormat(taught=r"<\|tool_call\|>", opening="<|tool_call|>", has_list=True),
    "mistral": CallFormat(
        taught=r"\[TOOL_CALLS\]",
        opening="[TOOL_CALLS]",
        head=_head(
            r"\s{0,9}([\w.-]{1,64})\s{0,9}(?:\[CALL_ID\]\s{0,9}[\w-]{1,64}\s{0,9})?(?:\[ARGS\]\s{0,9})?(?=\{)",
            "x[CALL_ID]x[ARGS]{",
        ),
        has_list=True,
    ),
    "hermes": CallFormat(
        taught=r'<tool_call>(?:(?!</tool_call>).)*?"name\\?"\s*:', opening="<tool_call>", closing="</tool_call>"
    ),
    "llama3_json": CallFormat(
        taught=r'\{\\?"name\\?":[^,{}]*, ?\\?"parameters\\?":', opening="<|python_tag|>", is_first=True
    ),
}
"""By vLLM's names, in the order in which templates are searched: what the first ones teach, others may mention."""


def format_of_template(template: str) -> str | None:
    """Return the format that a chat template teaches; None if it is another one. Without tools it teaches none."""
    return next((name for name, form in FORMATS.items() if re.search(form.taught, template, re.DOTALL)), None)


def shows_special_tokens(format: str | None) -> bool:
    """Return whether calls may be marked by special tokens, which are otherwise left out of the text."""
    return format not in (None, "hermes")


def is_whole(arguments: str) -> bool:
    """Return whether a call's arguments are JSON; those of a call that was cut are not."""
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True


def types_of(schema: Any) -> frozenset[str]:
    """Return the types of JSON that a schema allows; none = any."""
    if not isinstance(schema, Mapping):
        return frozenset()
    if (type := schema.get("type")) is not None:
        return frozenset(each for each in _listed(type) or [type] if isinstance(each, str))
    values = [schema["const"]] if "const" in schema else _listed(schema.get("enum"))
    branches = [branch for name in ("anyOf", "oneOf", "allOf") for branch in _listed(schema.get(name))]
    return frozenset(map(_type_of, values)).union(*map(types_of, branches))


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the value of an argument as JSON: a text, unless it can be read as another of these types."""
    others = types - {"string"} | ({"integer"} if "number" in types else set())
    for read in (_read_json, ast.literal_eval) if others or not types else ():
        try:
            value = read(text.strip())
            if (type := _type_of(value)) and type != "string" and (not types or type in others):
                return text.strip() if read is _read_json else json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return json.dumps(text, ensure_ascii=False)


def json_of_bare(text: str, quote: str) -> str:
    """Return an object with bare keys, and with texts between marks, as JSON; what is none stays as it is."""
    parts = text.split(quote)
    parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    parts[::2] = [re.sub(r'([{,]\s*)([^\s{}\[\],:"]+)\s*:', r'\1"\2":', part) for part in parts[::2]]
    written = "".join(parts)
    return written if is_whole(written) else text


def _type_of(value: Any) -> str:
    """Return the type of JSON of a value."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    return "null" if value is None else names.get(type(value), "")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _read_json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
