"""The parts of an answer's text: texts and pieces of calls, in the order in which the model wrote them.

Marks separate them: `longest_overlap` says how much of a text may be the beginning of one.
"""

from __future__ import annotations

import secrets
import string
from typing import NamedTuple

_ALPHANUMERIC = string.ascii_letters + string.digits


class CallPart(NamedTuple):
    """A piece of a call. `id` and `name` come with its first piece.

    is_custom: `arguments` are the input of a custom tool.
    """

    number: int
    arguments: str
    id: str | None = None
    name: str | None = None
    is_custom: bool = False


class TextPart(NamedTuple):
    """A piece of text that belongs to no call, as it is in the answer from character `start` on.

    is_behind_call: content came before it, and then a call; the two are told as separate lines, or messages.
    """

    text: str
    start: int
    is_reasoning: bool = False
    is_behind_call: bool = False

    @property
    def end(self) -> int:
        """Return where it ends in the answer."""
        return self.start + len(self.text)


class AnswerParts(tuple[TextPart | CallPart, ...]):
    """The parts that some text added to an answer, in the order of the text."""

    __slots__ = ()

    @property
    def reasoning(self) -> str:
        """Return the reasoning."""
        return "".join(part.text for part in self if isinstance(part, TextPart) and part.is_reasoning)

    @property
    def content(self) -> str:
        """Return the content."""
        texts = [part for part in self if isinstance(part, TextPart) and not part.is_reasoning]
        return "".join("\n" * part.is_behind_call + part.text for part in texts)

    @property
    def calls(self) -> tuple[CallPart, ...]:
        """Return the parts of calls."""
        return tuple(part for part in self if isinstance(part, CallPart))


def longest_overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` with which `mark` begins, if it is not all of it."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)


def new_call_id(format: str) -> str:
    """Return an id for a call that a model writes in this format."""
    if format == "mistral":  # its templates accept nothing else
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
