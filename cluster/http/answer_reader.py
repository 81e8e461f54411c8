"""Reads an answer's text as its parts: reasoning, content and tool calls.

new_reader = AnswerReaders(tokenizer).of(body, prompt)      for each chat
part = new_reader().feed(text, is_last=False)               for each of its answers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from cluster.http.detokenizer import IncrementalDetokenizer
from cluster.http.reasoning import ReasoningCounter, ReasoningReader, ends_inside, teaches_reasoning
from cluster.http.tokenizer import Tokenizer
from cluster.http.tool_calls import (
    TAUGHT_FORMAT,
    CallPart,
    ToolCallFormat,
    ToolCallReader,
    format_of_template,
    joined,
    reader_of_calls,
    shows_special_tokens,
)
from secateur.requests import ChatCompletionRequest, SamplingRequest

_END_TOKENS = 16  # of a prompt, enough for the mark with which it may end


class AnswerPart(NamedTuple):
    """Holds what some text added to an answer."""

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
        reasoning, answer = "", text
        if self._reasoning is not None:
            thoughts = [self._reasoning.feed(text), *([self._reasoning.finish()] if is_last else [])]
            reasoning, answer = ("".join(parts) for parts in zip(*thoughts, strict=True))
        if self._calls is None:
            return AnswerPart(reasoning, answer)
        read = [self._calls.feed(answer), *([self._calls.finish()] if is_last else [])]
        calls = joined(call for each in read for call in each.calls)
        return AnswerPart(reasoning, "".join(each.content for each in read), calls)


class AnswerReaders:
    """Knows how a model writes reasoning and calls, and makes the readers of its answers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        reasoning_parser: Literal["auto", "none", "think"] = "auto",
        tool_call_parser: Literal["auto"] | ToolCallFormat = "auto",
    ) -> None:
        self._tokenizer, template = tokenizer, tokenizer.template_source
        self._reasons = reasoning_parser == "think" or (reasoning_parser == "auto" and teaches_reasoning(template))
        self._call_format: ToolCallFormat | None = TAUGHT_FORMAT
        if tool_call_parser != "auto":
            self._call_format = tool_call_parser
        elif tokenizer.has_tools_template:
            self._call_format = format_of_template(template)

    def of(self, body: ChatCompletionRequest, prompt: Sequence[int]) -> Callable[[], AnswerReader] | None:
        """Return what makes the reader of each of a chat's answers; None if they are content alone.

        Raises BadRequest if the model may write calls and how it does is unknown.
        """
        new_calls = reader_of_calls(body, self._call_format)
        if not self._reasons:
            return None if new_calls is None else lambda: AnswerReader(None, new_calls())
        begins_inside = self._ends_inside(prompt)
        return lambda: AnswerReader(
            ReasoningReader(begins_inside=begins_inside), None if new_calls is None else new_calls()
        )

    def counter(
        self, body: SamplingRequest, prompt: Sequence[int], *, skip_special_tokens: bool
    ) -> ReasoningCounter | None:
        """Return what counts the reasoning of one answer; None if nothing tells reasoning apart."""
        if not self._reasons or not isinstance(body, ChatCompletionRequest):
            return None
        detokenizer = IncrementalDetokenizer(self._tokenizer, prompt, skip_special_tokens=skip_special_tokens)
        return ReasoningCounter(detokenizer, begins_inside=self._ends_inside(prompt))

    def read_special_tokens(self, body: SamplingRequest) -> bool:
        """Return whether special tokens in the answer's text mark its calls."""
        may_call = isinstance(body, ChatCompletionRequest) and body.calls == "auto"
        return may_call and shows_special_tokens(self._call_format)

    def _ends_inside(self, prompt: Sequence[int]) -> bool:
        """Return whether an answer to this prompt begins with reasoning."""
        return ends_inside(self._tokenizer.decode(prompt[-_END_TOKENS:], skip_special_tokens=False))
