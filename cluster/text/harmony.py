"""Reads answers of gpt-oss, which are messages of their own: reasoning, calls and content (OpenAI's harmony format).

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    <|message|>{"a": 1}<|call|>

The prompt ends with `<|start|>assistant`, and the engine hides the token that ends the answer.
"""

from __future__ import annotations

import re

from cluster.text.answer_parts import AnswerParts, CallPart, TextPart, longest_overlap, new_call_id

FORMAT = "openai"
"""vLLM's name of it."""
_MESSAGE = "<|message|>"
_HEADS = ("<|start|>", "<|channel|>", "to=")
"""A message's head begins with one of these; other text is content."""
_MARKS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_END = re.compile(r"(<\|(?:end|call|return)\|>)|<\|(?:start|channel)\|>")
"""A message ends at a mark of its own, or at the next head."""
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")


class HarmonyReader:
    """Reads one answer; used like a `ToolCallReader`, which reads only calls.

    most: calls beyond this number are dropped; None = all are read, 0 = they are content.
    """

    def __init__(self, *, most: int | None = None) -> None:
        self.num_calls = 0
        self._most = most
        self._num_read = 0  # characters
        self._rest = ""  # read, but not understood yet
        self._kind: str | None = None  # of the message that is read: reasoning, call or content; None = its head
        self._is_told = False  # the message has some text
        self._has_content = False
        self._parts: list[TextPart | CallPart] = []

    @property
    def is_inside_call(self) -> bool:
        """Return whether a call has been told, but not to its end."""
        return self._kind == "call"

    def feed(self, text: str) -> AnswerParts:
        """Read more of the answer."""
        self._num_read += len(text)
        self._rest += text
        while self._rest and (self._read_head() if self._kind is None else self._read_message()):
            pass
        return self._take()

    def finish(self) -> AnswerParts:
        """Return what is left at the end of the answer. A head without a message is dropped."""
        if self._kind is None and not self._rest.lstrip().startswith("<"):
            self._begin("content")
        if self._kind is not None:
            self._add(self._rest, num_behind=0)
        return self._take()

    def _take(self) -> AnswerParts:
        taken, self._parts = AnswerParts(self._parts), []
        return taken

    def _read_head(self) -> bool:
        """Read the head of a message; return whether there is more to read."""
        stripped = self._rest.lstrip()
        if not any(stripped.startswith(head) or head.startswith(stripped) for head in _HEADS):
            self._begin("content")
            return True
        head, found, behind = self._rest.partition(_MESSAGE)
        if not found:
            return False
        self._rest = behind
        recipient = _RECIPIENT.search(head)
        if recipient is not None and self._most != 0:
            self._begin("call")
            self.num_calls += 1
            if self._is_wanted:
                self._parts.append(CallPart(self.num_calls - 1, "", new_call_id(FORMAT), recipient[1]))
        else:
            self._begin("reasoning" if "<|channel|>analysis" in head else "content")
        return True

    def _read_message(self) -> bool:
        """Read a message up to its end; return whether there is more to read."""
        found = _END.search(self._rest)
        if found is None:
            end = len(self._rest) - max(longest_overlap(self._rest, mark) for mark in _MARKS)
            text, self._rest = self._rest[:end], self._rest[end:]
        else:
            text, self._rest = self._rest[: found.start()], self._rest[found.end() if found[1] else found.start() :]
        self._add(text, num_behind=len(self._rest) + (len(found[1] or "") if found else 0))
        if found is not None:
            self._kind = None
        return found is not None

    def _begin(self, kind: str) -> None:
        self._kind, self._is_told = kind, False

    def _add(self, text: str, *, num_behind: int) -> None:
        """Add text of the message. num_behind: characters that were read behind it."""
        if not text:
            return
        if self._kind == "call":
            if self._is_wanted:
                self._parts.append(CallPart(self.num_calls - 1, text))
            return
        start, is_reasoning = self._num_read - num_behind - len(text), self._kind == "reasoning"
        is_next = not is_reasoning and self._has_content and not self._is_told
        self._parts.append(TextPart(text, start, is_reasoning=is_reasoning, is_behind_call=is_next))
        self._is_told, self._has_content = True, self._has_content or not is_reasoning

    @property
    def _is_wanted(self) -> bool:
        return self._most is None or self.num_calls <= self._most
