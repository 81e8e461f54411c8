"""/v1/messages: a chat's answer as Anthropic's message, whole or as events."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

from cluster.errors import HttpError, messages_error
from cluster.openai.output_processor import Generation, TextDelta
from cluster.text.answer_parts import CallPart
from cluster.text.answer_reader import AnswerReader
from cluster.text.call_formats import is_whole
from secateur.messages_api import (
    Message,
    MessageUsage,
    TextBlock,
    ThinkingBlock,
    ThinkingTokens,
    ToolUseBlock,
)
from secateur.requests import ChatCompletionRequest
from secateur.responses import new_id


class MessageBuilder:
    """Builds a message from its deltas. The public methods return the events of a stream that tell what they did.

    fills_context: the answer's longest length is the room that the context has.
    """

    def __init__(
        self,
        chat: ChatCompletionRequest,
        model: str,
        reader: AnswerReader,
        generation: Generation,
        *,
        fills_context: bool,
    ) -> None:
        # As at Anthropic, tokens from the cache are not among the others.
        cached = generation.last.num_cached_tokens
        usage = MessageUsage(input_tokens=len(generation.submit.prompt) - cached, cache_read_input_tokens=cached)
        self.message = Message(id=new_id("msg"), model=model, usage=usage)
        self._reader, self._has_reasoning, self._fills_context = reader, chat.include_reasoning, fills_context
        self._block: TextBlock | ThinkingBlock | ToolUseBlock | None = None  # the open one
        self._arguments = ""  # of the open call
        self._events: list[dict[str, Any]] = []

    def begin(self) -> list[dict[str, Any]]:
        """Open the message."""
        self._tell("message_start", message=self.message.model_dump())
        self._tell("ping")
        return self._take_events()

    def feed(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Add one delta."""
        for part in self._reader.feed(delta.text, is_last=delta.finish_reason is not None):
            if isinstance(part, CallPart):
                if part.id is not None:
                    self._open(ToolUseBlock(id=part.id, name=part.name or ""))
                self._add_arguments(part.arguments)
            elif not part.is_reasoning:
                if not isinstance(self._block, TextBlock):
                    self._open(TextBlock())
                elif part.is_behind_call:  # of a call that was dropped
                    self._add("text", "\n")
                self._add("text", part.text)
            elif self._has_reasoning:
                if not isinstance(self._block, ThinkingBlock):
                    self._open(ThinkingBlock())
                self._add("thinking", part.text)
        return self._take_events()

    def end(self, generation: Generation) -> list[dict[str, Any]]:
        """Close the message."""
        message, last = self.message, generation.last
        is_cut, block = last.finish_reason == "length", self._block
        self._close()
        if is_cut and isinstance(block, ToolUseBlock) and not self._reader.has_whole_call:
            message.content = message.content[:-1]  # a stream has told its beginning
        if is_cut:
            message.stop_reason = "model_context_window_exceeded" if self._fills_context else "max_tokens"
        elif self._reader.num_calls:
            message.stop_reason = "tool_use"
        elif isinstance(last.stop_reason, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", last.stop_reason
        else:
            message.stop_reason = "end_turn"
        message.usage.output_tokens = last.num_tokens
        if last.num_reasoning_tokens is not None:
            message.usage.output_tokens_details = ThinkingTokens(thinking_tokens=last.num_reasoning_tokens)
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        self._tell("message_delta", delta=delta, usage=message.usage.model_dump())
        self._tell("message_stop")
        return self._take_events()

    def fail(self, error: HttpError) -> list[dict[str, Any]]:
        """End a stream with an error."""
        return [messages_error(error).model_dump()]

    def _open(self, block: TextBlock | ThinkingBlock | ToolUseBlock) -> None:
        """Add a block behind the open one, which is complete."""
        self._close()
        self._block, self._arguments = block, ""
        self.message.content = [*self.message.content, block]
        self._tell("content_block_start", index=self._index, content_block=block.model_dump())

    def _add(self, field: str, text: str) -> None:
        setattr(self._block, field, getattr(self._block, field) + text)
        self._tell_delta(f"{field}_delta", field, text)

    def _add_arguments(self, text: str) -> None:
        self._arguments += text
        if text:
            self._tell_delta("input_json_delta", "partial_json", text)

    def _close(self) -> None:
        """Close the open block, if there is one."""
        match self._block:
            case None:
                return
            case ThinkingBlock() as block:  # it signs nothing, but some clients drop what has no signature
                block.signature = blake2b(block.thinking.encode(), digest_size=16).hexdigest()
                self._tell_delta("signature_delta", "signature", block.signature)
            case ToolUseBlock() as block:
                block.input = _input(self._arguments)
        self._tell("content_block_stop", index=self._index)
        self._block = None

    @property
    def _index(self) -> int:
        return len(self.message.content) - 1

    def _tell_delta(self, kind: str, field: str, text: str) -> None:
        self._tell("content_block_delta", index=self._index, delta={"type": kind, field: text})

    def _tell(self, what: str, **fields: Any) -> None:
        self._events.append({"type": what, **fields})

    def _take_events(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; what a model has written wrongly is one field of it."""
    value = json.loads(arguments) if is_whole(arguments) else None
    return value if isinstance(value, dict) else {"arguments": arguments}
