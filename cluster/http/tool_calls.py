"""Reads tool calls out of an answer's text while it is written.

    reader = ToolCallReader("hermes")
    for text in texts:
        parts = reader.feed(text)     # content that belongs to no call, and parts of calls
    parts = reader.finish()

Names and arguments are sent as soon as they are known; arguments are sent as the model writes them. Text that turns out
to be no call is content. Formats, and the families that use them:

    hermes      <tool_call>{"name": ..., "arguments": {...}}</tool_call>           Hermes, Qwen
    llama3_json {"name": ..., "parameters": {...}}; {...}                           Llama 3
    mistral     [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or name{...}  Mistral
    list        [{"name": ..., "parameters": {...}}, ...]                           `tool_choice: "required"`
    arguments   {...}                                                               `tool_choice` with a name
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from cluster.http.errors import BadRequest, PromptError
from secateur.requests import ChatCompletionRequest, TokenizeRequest

ToolCallFormat = Literal["hermes", "llama3_json", "mistral"]

TAUGHT_FORMAT: ToolCallFormat = "hermes"
"""The format that `taught` teaches models whose chat templates know no tools."""
_OPENINGS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}
_CLOSING = "</tool_call>"  # of hermes
_PYTHON_TAG = "<|python_tag|>"  # Llama 3 may write it before a call
_MAX_HEAD_CHARS = 72  # of Mistral's newer form: a name, [ARGS] and the opening brace
_NAMES, _ARGUMENTS = ("name", "function"), ("arguments", "parameters")
_ALPHANUMERIC = string.ascii_letters + string.digits

_TEACHING = """\
You may call functions. These are their signatures, as JSON:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as JSON between <tool_call> and </tool_call>:
<tool_call>
{{"name": "the function's name", "arguments": {{"the argument's name": "its value"}}}}
</tool_call>"""


class CallPart(NamedTuple):
    """A piece of a call. `id` and `name` come with its first piece."""

    number: int
    arguments: str
    id: str | None = None
    name: str | None = None


def joined(parts: Iterable[CallPart]) -> tuple[CallPart, ...]:
    """Return one part per call: of several of one call, some clients read only the first."""
    found: dict[int, CallPart] = {}
    for part in parts:
        before = found.get(part.number)
        found[part.number] = part if before is None else before._replace(arguments=before.arguments + part.arguments)
    return tuple(found.values())


class ReadText(NamedTuple):
    """Holds the content and the parts of calls that some text added."""

    content: str = ""
    calls: tuple[CallPart, ...] = ()


def format_of_template(template: str) -> ToolCallFormat | None:
    """Return the format that a chat template teaches; None if it is another one. Without tools it teaches none."""
    if "<function=" in template and "<parameter=" in template:
        return None  # Qwen3-Coder's
    if _OPENINGS["mistral"] in template:
        return "mistral"
    if _OPENINGS["hermes"] in template:
        return "hermes"
    if _PYTHON_TAG in template or '"parameters": ' in template:
        return "llama3_json"
    return None


def shows_special_tokens(format: ToolCallFormat | None) -> bool:
    """Return whether calls are marked by special tokens, which are otherwise left out of the text."""
    return format in ("llama3_json", "mistral")


class JsonValue:
    """Finds the end of one JSON value in text that arrives in pieces. It does not check the value."""

    def __init__(self) -> None:
        self.is_complete = False
        self._depth = 0
        self._is_string = self._is_escaped = self._is_plain = False

    def feed(self, text: str) -> int:
        """Return how many of the characters belong to the value; fewer than all if it ends before."""
        for position, char in enumerate(text):
            if self._is_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._is_string = False
                    self.is_complete = self._depth == 0
            elif char == '"':
                self._is_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]" and self._depth:
                self._depth -= 1
                self.is_complete = self._depth == 0
            elif self._depth == 0 and char in ",}] \t\r\n":  # the end of a number, true, false or null
                if self._is_plain:
                    self.is_complete = True
                    return position
            elif self._depth == 0:
                self._is_plain = True
            if self.is_complete:
                return position + 1
        return len(text)


class JsonCall:
    """Reads one call, an object with a name and arguments, from text that arrives in pieces."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.raw = ""
        self.is_complete = self.is_broken = False
        self._expects = "{"  # or "key", ":", "value" or ","
        self._key: str | None = None
        self._value: JsonValue | None = None  # the key or value that is being read ...
        self._text = ""  # ... and what was read of it
        self._arguments = ""
        self._has_arguments = False  # complete; those of a second key are dropped
        self._num_taken = 0

    def feed(self, text: str) -> str:
        """Read up to the name, the end of the object or the first mistake; return the rest.

        It stops behind the name, so that a call is announced there, however the text is split, even if it breaks later.
        """
        was_named = self.name is not None
        while text and not (self.is_complete or self.is_broken or (self.name is not None and not was_named)):
            if self._value is None:
                char, text = text[0], text[1:]
                self.raw += char
                self._read_between(char)
                continue
            used = self._value.feed(text)
            self._text += text[:used]
            self.raw, text = self.raw + text[:used], text[used:]
            if self._reads_arguments and not self._text.startswith('"'):  # a string is decoded when it is complete
                self._arguments = self._text
            if self._value.is_complete:
                self._end_value()
        return text

    def take(self) -> str:
        """Return the arguments that are known and were not taken before. Call it once the name is known."""
        new, self._num_taken = self._arguments[self._num_taken :], len(self._arguments)
        return new

    def _read_between(self, char: str) -> None:
        """Read a character outside of keys and values."""
        match self._expects, char:
            case _, (" " | "\t" | "\r" | "\n"):
                pass
            case ("{", "{") | (",", ","):
                self._expects = "key"
            case ":", ":":
                self._expects = "value"
            case ("key" | ",", "}"):
                self.is_complete, self.is_broken = self.name is not None, self.name is None
            case ("key", '"') | ("value", _):
                self._value, self._text = JsonValue(), char
                self._value.feed(char)
            case _:
                self.is_broken = True

    def _end_value(self) -> None:
        text, self._value = self._text, None
        if self._expects == "key":
            self._key, self._expects = _decoded(text), ":"
            self.is_broken = self._key is None
            return
        if self._key in _NAMES and self.name is None:
            self.name = _decoded(text) or None
            self.is_broken = self.name is None
        elif self._reads_arguments:
            self._has_arguments = True
            if text.startswith('"'):
                self._arguments = _decoded(text) or ""
        self._key, self._expects = None, ","

    @property
    def _reads_arguments(self) -> bool:
        return self._key in _ARGUMENTS and not self._has_arguments


class ToolCallReader:
    """Reads the calls of one answer. most: calls beyond this number are dropped; None = all are read.

    name: of the function that the answer calls, for the format `arguments`.
    """

    def __init__(
        self, format: ToolCallFormat | Literal["list", "arguments"], *, most: int | None = None, name: str = ""
    ) -> None:
        self.num_calls = 0
        self._most, self._format = most, format
        self._state: Callable[[str], str | None] = self._read_text
        self._rest = ""  # read, but not understood yet
        self._space = ""  # behind content: dropped if a call follows
        self._content = ""
        self._parts: list[CallPart] = []
        self._call = JsonCall()
        self._value: JsonValue | None = None
        self._is_announced = False  # the current call's name was sent
        self._is_behind_call = False  # and no content has followed
        self._has_content = False
        match format:
            case "arguments":
                self._announce(name)
                self._state = self._read_arguments
            case "list":
                self._state = self._read_list
            case "llama3_json":
                self._state = self._read_start

    def feed(self, text: str) -> ReadText:
        """Read more of the answer."""
        self._rest += text
        while (rest := self._state(self._rest)) is not None:
            self._rest = rest
        return self._take()

    def finish(self) -> ReadText:
        """Return what is left at the end of the answer."""
        if self._state == self._read_call and not self._is_announced:
            self._add_broken_call()
        elif self._state in (self._read_text, self._read_start, self._read_name):
            self._add_content(self._rest)
        self._content += self._space
        return self._take()

    def _take(self) -> ReadText:
        taken = ReadText(self._content, tuple(self._parts))
        self._content, self._parts = "", []
        return taken

    # ---- states: each returns what it has not read, or None if it needs more text

    def _read_text(self, text: str) -> str | None:
        """Read content up to the mark of a call."""
        opening = _OPENINGS.get(self._format)
        if not text or opening is None:
            self._add_content(text)
            self._rest = ""
            return None
        before, found, behind = text.partition(opening)
        if found:
            self._add_content(before)
            self._state = self._read_call if self._format == "hermes" else self._read_mistral
            self._begin_call()
            return behind
        held = _longest_overlap(text, opening)
        self._add_content(text[: len(text) - held])
        self._rest = text[len(text) - held :]
        return None

    def _read_start(self, text: str) -> str | None:
        """Read the beginning of a Llama answer: it is a call if it begins with an object."""
        stripped = text.lstrip()
        if not stripped or (stripped != _PYTHON_TAG and _PYTHON_TAG.startswith(stripped)):
            return None
        stripped = stripped.removeprefix(_PYTHON_TAG).lstrip()
        if not stripped:
            return None
        if stripped[0] == "{":
            self._state = self._read_call
            self._begin_call()
            return stripped
        self._state = self._read_text
        return text

    def _read_mistral(self, text: str) -> str | None:
        """Read what follows Mistral's mark: a list of calls, or a function's name and its arguments."""
        stripped = text.lstrip()
        if not stripped:
            return None
        self._state = self._read_list if stripped[0] in "[{" else self._read_name
        return stripped

    def _read_name(self, text: str) -> str | None:
        """Read Mistral's newer form: name{...} or name[ARGS]{...}."""
        blank = text.find("\n\n")
        most = blank + 2 if 0 <= blank < _MAX_HEAD_CHARS else _MAX_HEAD_CHARS
        found = re.match(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)", text[:most])
        if found:
            self._announce(found[1])
            self._state = self._read_arguments
            return text[found.end() :]
        if len(text) < most:
            return None
        self._state = self._read_text
        return text

    def _read_list(self, text: str) -> str | None:
        """Read what lies before, between and behind the objects of a list."""
        stripped = text.lstrip(" \t\r\n[,;]")
        if not stripped:
            self._rest = ""
            return None
        if stripped[0] == "{":
            self._state = self._read_call
            self._begin_call()
        else:
            self._state = self._read_text
        return stripped

    def _read_call(self, text: str) -> str | None:
        if not text:
            return None
        rest = self._call.feed(text)
        if self._call.is_broken and not self._is_announced:
            self._add_broken_call()
            self._state = self._read_text
            return rest
        if self._call.name is not None:
            if not self._is_announced:
                self._announce(self._call.name)
            self._add_arguments(self._call.take())
        if self._call.is_complete or self._call.is_broken:
            self._state = self._read_closing if self._format == "hermes" else self._read_list
        return rest

    def _read_closing(self, text: str) -> str | None:
        """Read the end of a Hermes call."""
        stripped = text.lstrip()
        if stripped.startswith(_CLOSING):
            self._state = self._read_text
            return stripped[len(_CLOSING) :]
        if _CLOSING.startswith(stripped):
            return None
        self._state = self._read_text  # the mark is missing
        return stripped

    def _read_arguments(self, text: str) -> str | None:
        """Read the arguments of a call whose name is known."""
        if not text:
            return None
        if self._value is None:
            self._value = JsonValue()
        used = self._value.feed(text)
        self._add_arguments(text[:used])
        if self._value.is_complete:
            self._value, self._state = None, self._read_text
        return text[used:]

    # ---- what was read

    def _begin_call(self) -> None:
        self._call, self._is_announced = JsonCall(), False

    def _announce(self, name: str) -> None:
        self._is_announced = self._is_behind_call = True
        self._space = ""
        self.num_calls += 1
        if self._is_wanted:
            self._parts.append(CallPart(self.num_calls - 1, "", _new_id(self._format), name))

    def _add_arguments(self, arguments: str) -> None:
        if arguments and self._is_wanted:
            self._parts.append(CallPart(self.num_calls - 1, arguments))

    def _add_broken_call(self) -> None:
        """Add what looked like a call as content."""
        self._add_content((_OPENINGS["hermes"] if self._format == "hermes" else "") + self._call.raw)

    def _add_content(self, text: str) -> None:
        """Add content, without the space around calls."""
        text = self._space + text
        if self._is_behind_call:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._content += "\n" + kept if self._is_behind_call and self._has_content else kept
            self._is_behind_call, self._has_content = False, True

    @property
    def _is_wanted(self) -> bool:
        return self._most is None or self.num_calls <= self._most


def _longest_overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` with which `mark` begins."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)


def _decoded(text: str) -> str | None:
    """Return the value of a JSON string; None if it is no string."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _new_id(format: str) -> str:
    if format == "mistral":  # its templates accept nothing else
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def is_whole(arguments: str) -> bool:
    """Return whether a call's arguments are JSON; those of a call that was cut are not."""
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True


def reader_of_calls(body: ChatCompletionRequest, written: ToolCallFormat | None) -> Callable[[], ToolCallReader] | None:
    """Return what makes the reader of each of a chat's answers; None if they have no calls.

    written: how the model writes calls of its own choice. Raises BadRequest if that is allowed and unknown.
    """
    most = None if body.parallel_tool_calls else 1
    match body.calls:
        case "none":
            return None
        case "named":
            return partial(ToolCallReader, "arguments", name=body.called_function or "")
        case "required":
            return partial(ToolCallReader, "list", most=most)
        case "auto":
            if written is None:
                raise BadRequest(
                    "this model's chat template teaches it tool calls in a format that is unknown here; write "
                    'tool_choice="required" or "none", or start the service with --tool-call-parser',
                    param="tools",
                )
            return partial(ToolCallReader, written, most=most)


def tools_of(body: ChatCompletionRequest | TokenizeRequest) -> list[dict[str, Any]] | None:
    """Return the tools that the chat template gets; as in vLLM, it gets them whatever the tool choice is."""
    if isinstance(body, TokenizeRequest):
        return body.tools
    return [tool.model_dump(exclude_unset=True) for tool in body.tools or ()] or None


def decoded_calls(calls: Sequence[Mapping[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return the calls of message `number` with their arguments as objects, which chat templates expect.

    Raises PromptError for arguments that are not JSON.
    """
    decoded = []
    for place, call in enumerate(calls):
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
            decoded.append(dict(call))
            continue
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            where = f"messages.{number}.tool_calls.{place}.function.arguments"
            raise PromptError(f"{where}: is not JSON; write an object, as text", param="messages") from None
        decoded.append({**call, "function": {**function, "arguments": arguments}})
    return decoded


def taught(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Return a conversation for a chat template that knows neither tools nor calls: both become text."""
    plain = [_as_text(message) for message in messages]
    if not tools:
        return plain
    text = _TEACHING.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose calls, or whose role `tool`, are text."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [call["function"] for call in message.get("tool_calls", ()) if isinstance(call.get("function"), Mapping)]
    written = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    content = "\n".join([text for text in (message["content"],) if text] + written)
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}
