r"""JSON Lines files: one value per line. A line ends only with \n or \r\n.

Python splits at more characters: `str.splitlines` at U+2028, U+2029 and U+0085, which JSON strings may hold unescaped,
and text files at a lone \r, which is white space in JSON.
"""

from __future__ import annotations

from collections.abc import Iterator


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, line without its end) for every line that is not blank."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip(" \t\r"):
            yield number, line.removesuffix("\r")
