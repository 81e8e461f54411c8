"""Reads JSON values, and calls that are written as JSON objects, from text that arrives in pieces."""

from __future__ import annotations

import json

_NAMES, _ARGUMENTS = ("name", "function"), ("arguments", "parameters")


class JsonValue:
    """Finds the end of one JSON value in text that arrives in pieces. It does not check the value.

    stop: a character that no value has outside of its strings, which ends it.
    """

    def __init__(self, stop: str = "") -> None:
        self.is_complete = False
        self._stop, self._depth = stop, 0
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
            elif char == self._stop:
                self.is_complete = True
                return position
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
        """Read up to the name, the end of the object or the first mistake; return the rest, a mistake included.

        It stops behind the name, so that a call is announced there, however the text is split, even if it breaks later.
        """
        was_named = self.name is not None
        while text and not (self.is_complete or self.is_broken or (self.name is not None and not was_named)):
            if self._value is None:
                self._read_between(text[0])
                if not self.is_broken:
                    self.raw, text = self.raw + text[0], text[1:]
                continue
            used = self._value.feed(text)
            self._text += text[:used]
            self.raw, text = self.raw + text[:used], text[used:]
            if self._reads_arguments and self._text[0] not in '"n':  # a string and null are read when they are complete
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
                self._arguments = self._arguments or "{}"  # clients parse it
            case ("key", '"') | ("value", _):
                self._value, self._text = JsonValue(), char
                self._value.feed(char)
            case _:
                self.is_broken = True

    def _end_value(self) -> None:
        text, self._value = self._text, None
        if self._expects == "key":
            self._key, self._expects = text_of(text), ":"
            self.is_broken = self._key is None
            return
        if self._key in _NAMES and self.name is None:
            self.name = text_of(text) or None
            self.is_broken = self.name is None
        elif self._reads_arguments:
            self._has_arguments = True
            if text.startswith('"'):
                decoded = text_of(text)
                self._arguments = (text if decoded is None else decoded).strip()
            elif text != "null":
                self._arguments = text
        self._key, self._expects = None, ","

    @property
    def _reads_arguments(self) -> bool:
        return self._key in _ARGUMENTS and not self._has_arguments


def text_of(text: str) -> str | None:
    """Return the value of a JSON string; None if it is no string, or has half a character, which no answer can send."""
    try:
        value = json.loads(text, strict=False)
        return value if isinstance(value, str) and value.encode() is not None else None
    except ValueError:
        return None
