"""Reads an answer's text as its parts: reasoning, content and tool calls.

new_reader = AnswerReaders(tokenizer).of(body, prompt)      for each chat
parts = new_reader().feed(text, is_last=False)              for each of its answers
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from functools import partial

from cluster.text.answer_parts import AnswerParts, CallPart, TextPart
from cluster.text.call_formats import format_of_template, is_whole, shows_special_tokens
from cluster.text.harmony import FORMAT as HARMONY
from cluster.text.harmony import HarmonyReader
from cluster.text.reasoning import MARKS, ReasoningCounter, ReasoningReader, ends_inside, marks_of_template
from cluster.text.tokenizer import Tokenizer
from cluster.text.tool_calls import CustomInput, ToolCallReader, reader_of_calls
from cluster.text.tool_prompts import TAUGHT_FORMAT
from secateur.requests import ChatCompletionRequest, SamplingRequest
from workers.sampling.grammar import ThoughtMarks

logger = logging.getLogger(__name__)

_END_TOKENS = 16  # of a prompt, enough for the mark with which it may end


class AnswerReader:
    """Reads one answer. reasoning, calls: their readers; None = there are none.

    begun: what the prompt has of the answer. It is read, but only told with `echoes`, except that a call that it leaves
    open is told from its beginning. Parts say where they are in `begun` and the text behind it. customs: the names of
    custom tools. has_bare_input: the answer is the input of one.
    """

    def __init__(
        self,
        reasoning: ReasoningReader | None = None,
        calls: ToolCallReader | HarmonyReader | None = None,
        begun: str = "",
        *,
        echoes: bool = False,
        customs: Container[str] = (),
        has_bare_input: bool = False,
    ) -> None:
        self._inputs: dict[int, CustomInput] = {}  # of custom tools, by the numbers of their calls
        self._customs, self._has_bare_input = customs, has_bare_input
        self._arguments = ""  # of the latest call, as the model writes them
        self._reasoning, self._calls = reasoning, calls
        self._num_read = self._num_answer = 0  # characters, of everything and behind the reasoning
        self._first = self._num_whole = 0  # the first character, and the first call, that is told
        self._begun = self._read(begun) if begun else []
        if not echoes:
            self._first = len(begun)
            if begun and calls is not None:
                self._num_whole = calls.num_calls - calls.is_inside_call

    @property
    def num_calls(self) -> int:
        """Return how many calls there are so far."""
        return 0 if self._calls is None else self._calls.num_calls - self._num_whole

    def feed(self, text: str, *, is_last: bool) -> AnswerParts:
        """Read more of the answer. Each call has at most one of the parts: of several, some clients read only one."""
        parts, self._begun = self._begun + self._read(text, is_last=is_last), []
        told: list[TextPart | CallPart] = []
        for part in parts:
            if isinstance(part, CallPart):
                self._add_call(told, part)
            elif part.start >= self._first:
                told.append(part)
            elif part.end > self._first:
                told.append(TextPart(part.text[self._first - part.start :], self._first, part.is_reasoning))
        return AnswerParts(whole for each in told if (whole := self._with_input(each)) is not None)

    @property
    def has_whole_call(self) -> bool:
        """Return whether the arguments of the latest call are JSON. An input that is the answer may always go on."""
        return not self._has_bare_input and is_whole(self._arguments)

    def rest(self, number: int) -> str:
        """Return what the input of a custom tool gains at the end of its call, if that was not cut."""
        return self._inputs[number].finish()

    def rests(self) -> list[CallPart]:
        """Return what the inputs of all calls gain at the end of an answer that was not cut."""
        return [CallPart(number, rest, is_custom=True) for number in self._inputs if (rest := self.rest(number))]

    def _with_input(self, part: TextPart | CallPart) -> TextPart | CallPart | None:
        """Return a part of a custom tool's call with what its input gains; None if that is nothing."""
        if not isinstance(part, CallPart):
            return part
        self._arguments = part.arguments if part.id else self._arguments + part.arguments
        if part.name is not None and part.name in self._customs:
            self._inputs[part.number] = CustomInput(is_bare=self._has_bare_input)
        if (input := self._inputs.get(part.number)) is None:
            return part
        added = input.feed(part.arguments)
        return part._replace(arguments=added, is_custom=True) if added or part.id else None

    def _add_call(self, told: list[TextPart | CallPart], part: CallPart) -> None:
        last, number = told[-1] if told else None, part.number - self._num_whole
        if isinstance(last, CallPart) and last.number == number:
            told[-1] = last._replace(arguments=last.arguments + part.arguments)
        elif number >= 0:
            told.append(part._replace(number=number))

    def _read(self, text: str, *, is_last: bool = False) -> list[TextPart | CallPart]:
        self._num_read += len(text)
        parts: list[TextPart | CallPart] = []
        answer = text
        if self._reasoning is not None:
            thoughts = [self._reasoning.feed(text), *([self._reasoning.finish()] if is_last else [])]
            parts += [TextPart(each.reasoning, each.start, is_reasoning=True) for each in thoughts if each.reasoning]
            answer = "".join(each.answer for each in thoughts)
        self._num_answer += len(answer)
        if self._reasoning is not None and not self._num_answer:
            return parts  # a call that is demanded by name begins behind the reasoning
        if self._calls is None:
            return [*parts, TextPart(answer, self._num_read - len(answer))] if answer else parts
        start = self._num_read - self._num_answer  # of what the calls' reader gets
        for part in [*self._calls.feed(answer), *(self._calls.finish() if is_last else ())]:
            parts.append(part if isinstance(part, CallPart) else part._replace(start=part.start + start))
        return parts


class AnswerReaders:
    """Knows how a model writes reasoning and calls, and makes the readers of its answers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        reasoning_parser: str = "auto",
        tool_call_parser: str = "auto",
    ) -> None:
        """The parsers are names of `MARKS` and `FORMATS`, `none`, or `auto`: what the chat template has."""
        self._tokenizer, template = tokenizer, tokenizer.template_source
        self._marks = marks_of_template(template) if reasoning_parser == "auto" else MARKS.get(reasoning_parser)
        self._call_format: str | None = TAUGHT_FORMAT
        if tool_call_parser != "auto":
            self._call_format = tool_call_parser
        elif tokenizer.has_tools_template:
            self._call_format = format_of_template(template)
            if self._call_format is None:
                logger.warning(
                    "the chat template teaches tool calls in a format that is unknown here: calls of the model's own "
                    'choice stay text; tool_choice="required" works; --tool-call-parser names a format'
                )

    def of(self, body: ChatCompletionRequest, prompt: Sequence[int]) -> Callable[[], AnswerReader] | None:
        """Return what makes the reader of each of a chat's answers; None if they are content alone."""
        marks = self._marks
        new_calls: Callable[[], ToolCallReader | HarmonyReader] | None = reader_of_calls(body, self._call_format)
        if marks is not None and body.structure is not None:
            marks = marks._replace(closing=marks.closing + marks.answer)
        elif self._call_format == HARMONY and body.structure is None:  # it has messages for reasoning and content, too
            most = 0 if body.calls == "none" else None if body.parallel_tool_calls else 1
            marks, new_calls = None, partial(HarmonyReader, most=most)
        if marks is None and new_calls is None:
            return None
        begins_inside = self._begins_inside(body, prompt)
        return lambda: AnswerReader(
            None if marks is None else ReasoningReader(begins_inside=begins_inside, marks=marks),
            None if new_calls is None else new_calls(),
            body.begun_text,
            echoes=body.echo,
            customs={name for name, tool in body.offered.items() if tool.type == "custom"},
            has_bare_input=body.custom_call is not None,
        )

    def counter(self, body: SamplingRequest, prompt: Sequence[int]) -> ReasoningCounter | None:
        """Return what counts the reasoning of one answer; None if nothing tells reasoning apart."""
        if self._marks is None or not isinstance(body, ChatCompletionRequest):
            return None
        begins_inside = self._begins_inside(body, prompt)
        return ReasoningCounter(begins_inside=begins_inside, begun=body.begun_text, marks=self._marks)

    def read_special_tokens(self, body: SamplingRequest) -> bool:
        """Return whether special tokens in the answer's text mark its reasoning or its calls."""
        if not isinstance(body, ChatCompletionRequest):
            return False
        may_call = body.calls == "auto" and shows_special_tokens(self._call_format)
        return may_call or (self._marks is not None and self._marks.are_special)

    def thought(self, body: SamplingRequest, prompt: Sequence[int]) -> ThoughtMarks | None:
        """Return the marks around the reasoning that a structured answer may begin with; None = there is none.

        A prompt that ends with the closing mark has switched reasoning off.
        """
        marks = self._marks
        if marks is None or not isinstance(body, ChatCompletionRequest):
            return None
        if body.continue_final_message or self._end_of(body, prompt).endswith(marks.closing):
            return None
        return ThoughtMarks("" if self._begins_inside(body, prompt) else marks.opening, marks.closing + marks.answer)

    def _begins_inside(self, body: ChatCompletionRequest, prompt: Sequence[int]) -> bool:
        """Return whether the answer begins with reasoning. One that continues a message with a structure does not."""
        if self._marks is None or (body.structure is not None and body.continue_final_message):
            return False
        return ends_inside(self._end_of(body, prompt), self._marks)

    def _end_of(self, body: ChatCompletionRequest, prompt: Sequence[int]) -> str:
        """Return the end of a prompt, before what it has of the answer and without space behind it."""
        begun = body.begun_text.strip()
        end = prompt[-_END_TOKENS - len(begun.encode()) :]  # a token has at least a byte
        text = self._tokenizer.decode(end, skip_special_tokens=False).rstrip()
        return text.removesuffix(begun).rstrip()
