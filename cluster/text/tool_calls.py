"""Reads tool calls out of an answer's text while it is written.

    reader = ToolCallReader("hermes")
    for text in texts:
        parts = reader.feed(text)     # content that belongs to no call, and parts of calls, in the order of the text
    parts = reader.finish()

Names are sent as soon as they are known, and so are arguments, as the model writes them. Text that turns out to be no
call is content. How families of models write calls is in `call_formats`. What a `tool_choice` demands is read by these:

    list        [{"name": ..., "parameters": {...}}, ...]                           `tool_choice: "required"`
    arguments   {...}                                                               `tool_choice` with a name
    input       any text                                                            the same, of a tool with a grammar
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from cluster.text.answer_parts import AnswerParts, CallPart, TextPart, longest_overlap, new_call_id
from cluster.text.call_formats import FORMATS, CallFormat, is_whole, json_of, json_of_bare, types_of
from cluster.text.json_call import JsonCall, JsonValue, text_of
from secateur.requests import ChatCompletionRequest


class ToolCallReader:
    """Reads the calls of one answer. format: of `FORMATS`, or what is demanded: list, arguments or input.

    most: calls beyond this number are dropped; None = all are read. name: of the function that the answer calls, for
    the format `arguments`. schemas: of the arguments, by function, for formats that write texts without quotes.
    """

    def __init__(
        self,
        format: str,
        *,
        most: int | None = None,
        name: str = "",
        schemas: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        self.num_calls = 0
        self._most, self._format, self._schemas = most, format, schemas
        self._form = FORMATS.get(format, CallFormat(taught="", opening=""))
        self._state: Callable[[str], str | None] = self._read_text
        self._num_read = 0  # characters
        self._rest = ""  # read, but not understood yet
        self._space = ""  # behind content: dropped if a call follows
        self._parts: list[TextPart | CallPart] = []
        self._head = ""  # the marks before the current call, which are content if it is none
        self._call = JsonCall()
        self._value: JsonValue | None = None
        self._name = ""  # of the current call ...
        self._num_arguments = 0  # ... and how many of its arguments have begun, where each stands alone
        self._types: frozenset[str] = frozenset()  # of the current one
        self._is_begun = False  # some of its text was sent
        self._is_announced = False  # the current call's name was sent
        self._is_behind_call = False  # and no content has followed
        self._has_content = False
        match format:
            case "arguments" | "input":
                self._announce(name)
                self._state = self._read_arguments if format == "arguments" else self._read_input
            case "list":
                self._state = self._read_list
            case _ if self._form.is_first:
                self._state = self._read_start

    @property
    def is_inside_call(self) -> bool:
        """Return whether a call has been told, but not to its end."""
        inside = (self._read_call, self._read_arguments, self._read_argument, self._read_value, self._read_bare)
        return self._is_announced and self._state in inside

    def feed(self, text: str) -> AnswerParts:
        """Read more of the answer."""
        self._num_read += len(text)
        self._rest += text
        while (rest := self._state(self._rest)) is not None:
            self._rest = rest
        return self._take()

    def finish(self) -> AnswerParts:
        """Return what is left at the end of the answer."""
        if self._state in (self._read_text, self._read_start):
            self._add_content(self._rest)
        elif self._state == self._read_closing:
            _, is_closed, behind = self._rest.rpartition(self._form.closing)
            self._add_content(behind if is_closed else "")
        elif self._state in (self._read_value, self._read_bare):
            self._add_arguments(self._rest if self._state == self._read_bare else self._value_json(self._rest))
        elif not self._is_announced:
            self._add_content(self._head + self._call.raw + self._rest)
        if self._space:
            self._parts.append(TextPart(self._space, self._num_read - len(self._space)))
        return self._take()

    def _take(self) -> AnswerParts:
        taken, self._parts = AnswerParts(self._parts), []
        return taken

    # ---- states: each returns what it has not read, or None if it needs more text

    def _read_text(self, text: str) -> str | None:
        """Read content up to the mark of a call."""
        opening, unopened = self._form.opening, self._form.unopened
        if not text or not opening:
            self._add_content(text)
            self._rest = ""
            return None
        places = [(at, mark) for mark in (opening, unopened) if mark and (at := text.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            self._add_content(text[:at], rest=text[at:])
            self._state = self._read_marks if mark == opening else self._read_unopened
            self._begin_call(mark if mark == opening else "")
            return text[at + len(mark) :] if mark == opening else text[at:]
        held = max(longest_overlap(text, opening), longest_overlap(text, unopened))
        self._rest = text[len(text) - held :]
        self._add_content(text[: len(text) - held], rest=self._rest)
        return None

    def _read_start(self, text: str) -> str | None:
        """Read the beginning of a Llama answer: it is a call if it begins with an object."""
        if (behind := _without_marks(text, self._form.opening)) is None:
            return None
        if behind[0] != "{":
            self._state = self._read_text
            return text
        self._state = self._read_call
        self._begin_call(text.removesuffix(behind))
        return behind

    def _read_marks(self, text: str) -> str | None:
        """Read what follows the mark of a call. If the mark is repeated, it counts once."""
        if (behind := _without_marks(text, self._form.opening)) is None:
            return None
        self._head += text.removesuffix(behind)
        if self._form.has_list and behind[0] in "[{":
            self._state = self._read_list
        else:
            self._state = self._read_call if self._form.head is None else self._read_head
        return behind

    def _read_unopened(self, text: str) -> str | None:
        """Read the beginning of a call whose opening is missing. It is content unless its function is offered."""
        head, mark = self._form.head, self._form.unopened
        assert head is not None
        found = head.pattern.match(text)
        if not found and head.may_begin(text):
            return None
        if found and found[1] in self._schemas:
            self._state = self._read_head
            return text
        self._state = self._read_text
        self._add_content(mark, rest=text[len(mark) :])
        return text[len(mark) :]

    def _read_head(self, text: str) -> str | None:
        """Read the name of a call, up to its arguments."""
        assert self._form.head is not None
        if found := self._form.head.pattern.match(text):
            self._announce(found[1])
            if self._form.argument is not None:
                self._num_arguments, self._state = 0, self._read_argument
            else:
                self._state = self._read_bare if self._form.quote else self._read_arguments
            return text[found.end() :]
        if self._form.head.may_begin(text):
            return None
        self._state = self._read_text
        self._add_content(self._head, rest=text)
        return text

    def _read_argument(self, text: str) -> str | None:
        """Read what is before a value, or the end of the call. Anything else ends it, too."""
        head, closing, stripped = self._form.argument, self._form.closing, text.lstrip()
        assert head is not None
        if found := head.pattern.match(stripped):
            properties = self._schemas.get(self._name, {}).get("properties")
            self._types = types_of(properties.get(found[1])) if isinstance(properties, Mapping) else frozenset()
            self._add_arguments(f"{', ' if self._num_arguments else '{'}{json.dumps(found[1], ensure_ascii=False)}: ")
            self._num_arguments, self._is_begun, self._state = self._num_arguments + 1, False, self._read_value
            return stripped[found.end() :]
        if not stripped.startswith(closing) and (closing.startswith(stripped) or head.may_begin(stripped)):
            return None
        self._add_arguments("}" if self._num_arguments else "{}")
        self._state = self._read_closing
        return stripped

    def _read_value(self, text: str) -> str | None:
        """Read a value. A text is sent as it comes, other values when they are complete."""
        end, break_ = self._form.value_end, "\n" if self._form.is_padded else ""
        if break_ and not self._is_begun and text in ("", break_):
            return None
        value, found, behind = text.partition(end)
        if found:
            self._add_arguments(self._value_json(value.removesuffix(break_)) + '"' * self._is_begun)
            self._state = self._read_argument
            return behind
        held = max(longest_overlap(text, end), longest_overlap(text, break_ + end))
        if self._types == {"string"} and held < len(text):
            self._add_arguments('"' * (not self._is_begun) + self._value_json(text[: len(text) - held], is_part=True))
            self._is_begun, self._rest = True, text[len(text) - held :]
        return None

    def _value_json(self, text: str, *, is_part: bool = False) -> str:
        """Return a value, or a part of one that is a text, as JSON."""
        if self._is_begun or is_part:
            return json.dumps(text if self._is_begun else self._unpadded(text), ensure_ascii=False)[1:-1]
        return json_of(self._unpadded(text), self._types)

    def _unpadded(self, text: str) -> str:
        return text.removeprefix("\n") if self._form.is_padded else text

    def _read_bare(self, text: str) -> str | None:
        """Read arguments whose keys are bare. They are sent when they are complete."""
        arguments, found, _ = text.partition(self._form.closing)
        if not found:
            return None
        self._add_arguments(json_of_bare(arguments, self._form.quote))
        self._state = self._read_closing
        return text[len(arguments) :]

    def _read_list(self, text: str) -> str | None:
        """Read what lies before, between and behind the objects of a list."""
        stripped = text.lstrip(" \t\r\n,;" if self._is_announced else " \t\r\n[")
        if not self._is_announced:
            self._head += text.removesuffix(stripped)
        if not stripped:
            self._rest = ""
            return None
        if stripped[0] == "{":
            self._state = self._read_call
            self._begin_call("" if self._is_announced else self._head)
            return stripped
        self._state = self._read_text
        if self._is_announced:
            return stripped.removeprefix("]")
        self._add_content(self._head, rest=stripped)
        return stripped

    def _read_call(self, text: str) -> str | None:
        if not text:
            return None
        rest = self._call.feed(text)
        if self._call.is_broken and not self._is_announced:
            self._add_content(self._head + self._call.raw, rest=rest)
            self._state = self._read_text
            return rest
        if self._call.name is not None:
            if not self._is_announced:
                self._announce(self._call.name)
            self._add_arguments(self._call.take())
        if self._call.is_complete or self._call.is_broken:
            self._state = self._read_closing if self._form.closing else self._read_list
        return rest

    def _read_closing(self, text: str) -> str | None:
        """Read the end of a call; its mark may be missing, or be repeated."""
        if (behind := _without_marks(text, self._form.closing)) is not None:
            self._state = self._read_ending if self._form.ending else self._read_text
        return behind

    def _read_ending(self, text: str) -> str | None:
        """Read the end of several calls, or go on with the next one."""
        ending, head = self._form.ending, self._form.head
        assert head is not None
        if head.pattern.match(text):
            self._begin_call("")
            self._state = self._read_head
            return text
        if (stripped := text.lstrip()).startswith(ending):
            self._state = self._read_text
            return stripped.removeprefix(ending)
        if ending.startswith(stripped) or head.may_begin(text):
            return None
        self._state = self._read_text
        return text

    def _read_arguments(self, text: str) -> str | None:
        """Read the arguments of a call whose name is known."""
        if not text:
            return None
        if self._value is None:
            stripped, closing = text.lstrip(), self._form.closing
            if closing and closing.startswith(stripped[: len(closing)]):
                if len(stripped) < len(closing):
                    return None
                self._add_arguments("{}")
                self._state = self._read_closing
                return stripped
            self._value = JsonValue(closing[:1])
        used = self._value.feed(text)
        self._add_arguments(text[:used])
        if self._value.is_complete:
            self._value, self._state = None, self._read_closing if self._form.closing else self._read_text
        return text[used:]

    def _read_input(self, text: str) -> str | None:
        """Read the input of a custom tool, which is the whole answer."""
        self._add_arguments(text)
        self._rest = ""
        return None

    # ---- what was read

    def _begin_call(self, head: str) -> None:
        self._call, self._is_announced, self._head = JsonCall(), False, head

    def _announce(self, name: str) -> None:
        self._name, self._is_announced, self._is_behind_call = name, True, True
        self._space = ""
        self.num_calls += 1
        if self._is_wanted:
            self._parts.append(CallPart(self.num_calls - 1, "", new_call_id(self._format), name))

    def _add_arguments(self, arguments: str) -> None:
        if arguments and self._is_wanted:
            self._parts.append(CallPart(self.num_calls - 1, arguments))

    def _add_content(self, text: str, *, rest: str = "") -> None:
        """Add content, without the space around calls. rest: what was read of the text behind it."""
        if self._format in ("list", "arguments"):
            return  # a grammar lets the model write nothing but calls
        text = self._space + text
        if self._is_behind_call:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            is_behind_call = self._is_behind_call and self._has_content
            start = self._num_read - len(rest) - len(text)
            self._parts.append(TextPart(kept, start, is_behind_call=is_behind_call))
            self._is_behind_call, self._has_content = False, True

    @property
    def _is_wanted(self) -> bool:
        return self._most is None or self.num_calls <= self._most


def _without_marks(text: str, mark: str) -> str | None:
    """Return a text without the marks, and the space around them, before it; None = more text may be one of them."""
    while (text := text.lstrip()).startswith(mark):
        text = text[len(mark) :]
    return None if mark.startswith(text) else text


class CustomInput:
    """The input of a custom tool's call, which models write as the only argument of a function.

    is_bare: it stands alone, because a grammar binds it.
    """

    def __init__(self, *, is_bare: bool) -> None:
        self._is_bare, self._is_whole, self._arguments = is_bare, False, ""

    def feed(self, arguments: str) -> str:
        """Return what the input gains by more of the arguments: all at once, when they are complete."""
        if self._is_bare or self._is_whole:
            return arguments if self._is_bare else ""
        self._arguments += arguments
        if not (arguments.rstrip().endswith("}") and is_whole(self._arguments)):
            return ""
        self._is_whole = True
        value = json.loads(self._arguments)
        text = value.get("input") if isinstance(value, dict) else None
        return self._arguments if not isinstance(text, str) or text_of(json.dumps(text)) is None else text

    def finish(self) -> str:
        """Return what the input gains at the end of a call that was not cut: what is no JSON stays as it is."""
        return "" if self._is_whole or self._is_bare else self._arguments


def reader_of_calls(body: ChatCompletionRequest, written: str | None) -> Callable[[], ToolCallReader] | None:
    """Return what makes the reader of each of a chat's answers; None if they have no calls.

    written: how the model writes calls of its own choice; None = that is unknown, and they are text.
    """
    most = None if body.parallel_tool_calls else 1
    if body.custom_call is not None:
        return partial(ToolCallReader, "input", name=body.custom_call)
    match body.calls:
        case "named":
            return partial(ToolCallReader, "arguments", name=body.called_tool or "")
        case "required":
            return partial(ToolCallReader, "list", most=most)
        case "auto" if written is not None:
            functions = [function for tool in body.offered.values() if (function := tool.called) is not None]
            schemas = {function.name: function.parameters or {} for function in functions}
            return partial(ToolCallReader, written, most=most, schemas=schemas)
    return None
