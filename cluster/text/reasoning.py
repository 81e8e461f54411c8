"""Separates a model's reasoning, such as that between <think> and </think>, from its answer while both are written."""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import NamedTuple

from cluster.text.answer_parts import longest_overlap


class Marks(NamedTuple):
    """Holds the marks around a family's reasoning, and a pattern that its chat templates contain."""

    opening: str
    closing: str
    taught: str
    are_special: bool = False
    """They are special tokens, which are otherwise left out of the text."""
    answer: str = ""
    """This text stands between the closing mark and a structured answer."""


MARKS: dict[str, Marks] = {
    "openai_gptoss": Marks(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        taught=r"<\|channel\|>analysis",
        are_special=True,
        answer="<|start|>assistant<|channel|>final<|message|>",
    ),
    "gemma4": Marks("<|channel>thought\n", "<channel|>", r"<\|channel>thought", are_special=True),
    "seed_oss": Marks("<seed:think>", "</seed:think>", "<seed:think>"),
    "mistral": Marks("[THINK]", "[/THINK]", r"\[THINK\]", are_special=True),
    "granite": Marks("Here is my thought process:", "Here is my response:", "Here is my thought process:"),
    "think": Marks("<think>", "</think>", "</?think>"),
}
"""By vLLM's names, but for `think`, of which vLLM has one for each family."""
THINK = MARKS["think"]


class Thought(NamedTuple):
    """Holds the reasoning, from character `start` of all text on, and the answer that some text added."""

    reasoning: str = ""
    answer: str = ""
    start: int = 0


def marks_of_template(template: str) -> Marks | None:
    """Return how the model of a chat template marks its reasoning; None if it does not reason."""
    return next((marks for marks in MARKS.values() if re.search(marks.taught, template)), None)


def ends_inside(prompt: str, marks: Marks = THINK) -> bool:
    """Return whether a prompt ends with the opening mark, so that the answer begins with reasoning."""
    return prompt.rstrip().endswith(marks.opening.rstrip())


class ReasoningReader:
    """Reads one answer. begins_inside: the prompt ends with the opening mark.

    An answer without an opening mark at its beginning has no reasoning, and everything before a closing mark that is
    missing is reasoning.
    """

    def __init__(self, *, begins_inside: bool, marks: Marks = THINK) -> None:
        self._marks = marks
        self._state = "inside" if begins_inside else "start"  # or "behind" the reasoning, or in the "answer"
        self._num_read = 0  # characters
        self._rest = ""  # read, but not understood yet
        self._space = ""  # behind reasoning: dropped if it ends
        self._has_reasoning = False

    def feed(self, text: str) -> Thought:
        """Read more of the answer."""
        self._num_read += len(text)
        self._rest += text
        reasoning, start = "", 0
        if self._state == "start":
            stripped = self._rest.lstrip()
            if stripped.startswith(self._marks.opening):
                self._state, self._rest = "inside", stripped[len(self._marks.opening) :]
            elif not self._marks.opening.startswith(stripped):
                self._state = "answer"
        if self._state == "inside":
            before, found, behind = self._rest.partition(self._marks.closing)
            kept = len(before) if found else len(before) - longest_overlap(before, self._marks.closing)
            reasoning, start = self._reasoning(before[:kept], len(self._rest) - kept)
            self._rest = before[kept:]
            if found:
                self._state, self._rest = "behind", behind
        if self._state == "behind" and (stripped := self._rest.lstrip()):
            self._state, self._rest = "answer", stripped
        answer = ""
        if self._state == "answer":
            answer, self._rest = self._rest, ""
        return Thought(reasoning, answer, start)

    def finish(self) -> Thought:
        """Return what is left at the end of the answer."""
        rest, self._rest = self._rest, ""
        if self._state == "inside":
            reasoning, start = self._reasoning(rest, 0)
            return Thought(reasoning, start=start)
        return Thought(answer=rest if self._state == "start" else "")

    def _reasoning(self, text: str, num_behind: int) -> tuple[str, int]:
        """Return reasoning without the space around it, and where it begins. num_behind: characters read behind it."""
        text = self._space + text if self._has_reasoning else text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._has_reasoning = self._has_reasoning or bool(kept)
        return kept, self._num_read - num_behind - len(text)


class ReasoningCounter:
    """Counts the tokens of one answer's reasoning, without those of the marks around it.

    begins_inside: the prompt ends with the opening mark. begun: text of the prompt with which the answer begins.
    Like `ReasoningReader`, it looks for the marks in the text, since a mark may be several tokens.
    """

    def __init__(self, *, begins_inside: bool, begun: str = "", marks: Marks = THINK) -> None:
        self.count = 0
        self._marks = marks
        self._state = "inside" if begins_inside else "start"  # or in the "answer"
        self._text = ""  # at the start, or inside the reasoning
        self._starts: list[int] = []  # where the text of each token of the reasoning begins
        if begun:
            self.feed(begun)
            self._starts, self.count = [], 0

    def feed(self, text: str) -> None:
        """Read the text of the answer's next token."""
        if self._state == "answer":
            return
        start, self._text = len(self._text), self._text + text
        if self._state == "start":
            stripped = self._text.lstrip()
            if not stripped.startswith(self._marks.opening):
                self._state = "start" if self._marks.opening.startswith(stripped) else "answer"
                return
            self._state, self._text, start = "inside", stripped[len(self._marks.opening) :], 0
            if not self._text:
                return
        self._starts.append(start)
        end = self._text.find(self._marks.closing, max(0, start - len(self._marks.closing)))
        if end >= 0:
            self._state = "answer"
        elif held := longest_overlap(self._text, self._marks.closing):
            end = len(self._text) - held
        self.count = max(self.count, len(self._starts) if end < 0 else bisect_left(self._starts, end))
