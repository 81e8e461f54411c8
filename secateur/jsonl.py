r"""Files of JSON, one value a line. A line ends with \n or \r\n, and with nothing else.

Python knows more line ends: `str.splitlines` splits at U+2028, U+2029 and U+0085 too, which JSON strings hold as they
are, and a file opened as text at a lone \r, which is white space in JSON.
"""

from __future__ import annotations

from collections.abc import Iterator


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """(line number, line) for every line that is not blank, without its end."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip(" \t\r"):
            yield number, line.removesuffix("\r")
