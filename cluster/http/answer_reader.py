"""Reads an answer's text as its parts: reasoning, content and tool calls."""

from __future__ import annotations

from typing import NamedTuple

from cluster.http.reasoning import ReasoningReader
from cluster.http.tool_calls import CallPart, ToolCallReader


class AnswerPart(NamedTuple):
    """What some text was."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPart, ...] = ()


class AnswerReader:
    """Reads one answer. reasoning, calls: their readers; None = there are none."""

    def __init__(self, reasoning: ReasoningReader | None, calls: ToolCallReader | None) -> None:
        self._reasoning, self._calls = reasoning, calls

    @property
    def num_calls(self) -> int:
        """Return how many calls there are so far."""
        return 0 if self._calls is None else self._calls.num_calls

    def feed(self, text: str, *, is_last: bool) -> AnswerPart:
        """Read more of the answer."""
        reasoning, answers = "", [text]
        if self._reasoning is not None:
            thoughts = [self._reasoning.feed(text), *([self._reasoning.finish()] if is_last else [])]
            reasoning, answers = "".join(each.reasoning for each in thoughts), [each.answer for each in thoughts]
        answer = "".join(answers)
        if self._calls is None:
            return AnswerPart(reasoning, answer)
        read = [self._calls.feed(answer), *([self._calls.finish()] if is_last else [])]
        return AnswerPart(
            reasoning, "".join(each.content for each in read), tuple(c for each in read for c in each.calls)
        )
