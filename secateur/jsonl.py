r"""JSON Lines files: one value per line. A line ends only with \n or \r\n.

Python splits at more characters: `str.splitlines` at U+2028, U+2029 and U+0085, which JSON strings may hold unescaped,
and text files at a lone \r, which is white space in JSON.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

MAX_LEVELS = 200
"""How deep a field of a request may be nested. What reads and writes JSON gives up at 255 levels or more."""
MAX_LINE_LEVELS = MAX_LEVELS + 2
"""The same for a line of a batch, which has the fields in its `body`."""


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, line without its end and byte order mark) for every line that is not blank."""
    for number, line in enumerate(text.split("\n"), 1):
        content = line.removesuffix("\r").removeprefix("\ufeff")
        if content.strip(" \t\r"):
            yield number, content


def content_of(line: bytes) -> bytes:
    """Return a line without its end, and without a byte order mark: joined files have theirs in the middle."""
    return line.removesuffix(b"\n").removesuffix(b"\r").removeprefix(codecs.BOM_UTF8)


def value_of(text: str | bytes) -> Any:
    """Return the value that a JSON text in UTF-8 describes. Raises ValueError, also for NaN and for too many levels."""
    text = text if isinstance(text, str) else text.decode()
    try:
        value = json.loads(text, parse_constant=_no_constant)
        is_too_deep = text.count("[") + text.count("{") > MAX_LINE_LEVELS and is_nested(value, MAX_LINE_LEVELS)
    except RecursionError:
        is_too_deep = True
    if is_too_deep:
        raise ValueError(f"nested more than {MAX_LINE_LEVELS} levels deep")
    return value


def is_nested(value: Any, levels: int) -> bool:
    """Return whether a JSON value is nested more than `levels` deep."""
    found: list[Any] = [[value]]
    for _ in range(levels + 1):
        inner = (item for each in found for item in (each.values() if isinstance(each, dict) else each))
        found = [item for item in inner if isinstance(item, dict | list)]
    return bool(found)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the keys of a JSON value's objects, and all that is neither an object nor a list, in any order."""
    pending = [value]
    while pending:
        match pending.pop():
            case dict() as fields:
                pending += [*fields.keys(), *fields.values()]
            case list() as items:
                pending += items
            case leaf:
                yield leaf


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
