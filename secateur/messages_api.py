"""The bodies of /v1/messages, Anthropic's interface: what a request says, and the objects of its answer.

A request is a chat in other words: `CountTokensRequest.chat` translates it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from secateur.bodies import Body, UnsupportedContent, placeholder, wrong
from secateur.requests import MAX_ITEMS
from secateur.responses import Nullable, Response
from secateur.sampling import MAX_STOPS, NumTokens, SamplingOptions, StopString
from secateur.tools import MAX_TOOLS

NAMES = {
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config",
    '"required"': '{"type": "any"}',
    'tool_choice="none"': 'tool_choice={"type": "none"}',
}
"""Words about chats, and what stands for them here."""
_NEEDED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
"""Type of a block that is understood -> the fields that it needs."""
_NEEDLESS = {"cache_control", "data", "eager_input_streaming", "signature"}
"""Fields that ask for nothing: every prefix is cached, arguments always come as they are written, and reasoning is not
signed or encrypted."""
_BILLING = "x-anthropic-billing-header"
"""Claude Code begins its system prompt with it and a number that differs in each request: no prefix would be shared."""


class ContentBlock(Body):
    """A part of a message: text, reasoning, a call, or the result of one."""

    type: str
    """`text`, `thinking`, `redacted_thinking`, `tool_use` or `tool_result`; see `unsupported_content` for others."""
    text: str | None = None
    """The text."""
    thinking: str | None = None
    """Earlier reasoning, for chat templates that show it. Signatures are not checked."""
    id: str | None = None
    """The call's id."""
    name: str | None = None
    """The tool that was called."""
    input: dict[str, Any] | None = None
    """The call's arguments."""
    tool_use_id: str | None = None
    """The call that a result answers."""
    content: Content | None = None
    """The result: a text or blocks of text. `is_error` has no effect: the text says what went wrong."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if missing := [name for name in _NEEDED.get(self.type, ()) if getattr(self, name) is None]:
            raise wrong(missing[0], f"is missing; a block of the type {self.type!r} needs it")
        return self

    @property
    def shown(self) -> str:
        """Return the text that the model reads of a block that is neither reasoning nor about calls."""
        if self.type != "text":
            return placeholder(self.type)
        return "" if self.text is None or self.text.startswith(_BILLING) else self.text


Content = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[ContentBlock], Field(fail_fast=True, max_length=MAX_ITEMS), Tag("blocks")],
    Discriminator(lambda given: "text" if isinstance(given, str) else "blocks"),
]


class InputMessage(Body):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    """The author. The text of a later `system` message joins the message before it: few templates know one there."""
    content: Content
    """A text or blocks."""


class MessagesTool(Body):
    """A tool that the model may call."""

    type: str = "custom"
    """Tools of other types than `custom` run on Anthropic's servers: they are left out, and named as ignored."""
    name: str
    """Letters, digits, underscores, dots and dashes."""
    description: str | None = None
    """A description, which the model reads."""
    input_schema: dict[str, Any] | None = None
    """A JSON schema of its arguments."""


class MessagesToolChoice(Body):
    """Decides whether the answer calls tools."""

    type: Literal["auto", "any", "tool", "none"]
    """If the model writes calls, at least one, this one, or none."""
    name: str | None = None
    """The tool, with the type `tool`."""
    disable_parallel_tool_use: bool = False
    """The answer has at most one call."""

    @model_validator(mode="after")
    def _name_with_its_type(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise wrong("name", f'belongs to the type "tool", and only to it (got {self.type!r})')
        return self

    def chat_choice(self) -> Any:
        """Return the `tool_choice` of a chat."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(Body):
    """Decides whether the model reasons before it answers."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    """Sets the variables `enable_thinking` and `thinking` of the chat template. With `disabled` the answer has no
    reasoning even if the model writes some."""
    budget_tokens: int | None = None
    """Has no effect."""


class OutputFormat(Body):
    """Constrains the answer's text."""

    type: Literal["json_schema"]
    """JSON of the schema."""
    definition: Annotated[dict[str, Any], Field(alias="schema")]
    """The schema. In JSON the field is called `schema`."""


class OutputConfig(Body):
    """Sets effort and format of the answer."""

    effort: Annotated[str, Field(max_length=32)] | None = None
    """As the `reasoning_effort` of chats."""
    format: OutputFormat | None = None
    """As the `response_format` of chats; None = any text."""


class CountTokensRequest(SamplingOptions):
    """POST /v1/messages/count_tokens. What it shares with chats means what it does there."""

    model: str | None = None
    """None = the service's only model."""
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_ITEMS)]
    """The conversation so far. If the last message is the assistant's, the answer goes on with it."""
    system: Content | None = None
    """The system message: a text or blocks of text."""
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    """The tools that the model may call."""
    tool_choice: MessagesToolChoice | None = None
    """None = `auto` with tools."""
    thinking: Thinking | None = None
    """None = as the chat template has it."""
    output_config: OutputConfig | None = None
    """Effort and format of the answer."""
    chat_template_kwargs: dict[str, Any] | None = None
    """As in chats."""
    unsupported_content: UnsupportedContent | None = None
    """As in chats, also for results of calls."""

    @property
    def unread_parts(self) -> list[str]:
        """Return the blocks of messages and results that are not understood."""
        places = [(f"messages.{number}.content", message.content) for number, message in enumerate(self.messages)]
        return [part for place, content in [("system", self.system), *places] for part in _unread(content, place)]

    def ignored(self) -> list[str]:
        """Return unknown fields, those of blocks and tools without their numbers, and fields without effect."""
        unread = [f"tools.{at} ({tool.type})" for at, tool in enumerate(self.tools or ()) if tool.type != "custom"]
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            unread.append("thinking.budget_tokens")
        nested = {found for name in type(self).model_fields for found in _unknown(getattr(self, name), name)}
        return sorted([*({*super().ignored()} - _NEEDLESS), *nested, *unread, *self.unread_parts])

    def chat(self) -> dict[str, Any]:
        """Return the body of the chat that answers this request."""
        messages = self._chat_messages()
        body: dict[str, Any] = {
            **self.model_dump(include=_AS_IN_CHATS, exclude_unset=True, by_alias=True),
            "messages": messages,
            "continue_final_message": bool(messages) and messages[-1]["role"] == "assistant",
        }
        if self.tools:
            body["tools"] = [
                {
                    "type": "function",
                    "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
                }
                for tool in self.tools
                if tool.type == "custom"
            ]
        if (choice := self.tool_choice) is not None:
            body["tool_choice"] = choice.chat_choice()
            body["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
            variables = {"enable_thinking": thinks, "thinking": thinks}
            body["chat_template_kwargs"] = variables | (self.chat_template_kwargs or {})
            body["include_reasoning"] = thinks
        if (config := self.output_config) is not None:
            body["reasoning_effort"] = config.effort
            if config.format is not None:
                schema = {"name": "answer", "schema": config.format.definition}
                body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body

    def _chat_messages(self) -> list[dict[str, Any]]:
        """Return the messages of the chat. Neighbours of one role are one message, as at Anthropic."""
        told: list[dict[str, Any]] = [{"role": "system", "content": _text(self.system)}]
        for message in self.messages:
            for block in _blocks(message.content):
                match block.type:
                    case "tool_result":
                        answered = {"role": "tool", "tool_call_id": block.tool_use_id}
                        told.append(answered | {"content": _text(block.content)})
                    case "tool_use":
                        function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                        calls = _holder(told, "assistant").setdefault("tool_calls", [])
                        calls.append({"id": block.id, "type": "function", "function": function})
                    case "thinking":
                        holder = _holder(told, "assistant")
                        holder["reasoning"] = holder.get("reasoning", "") + (block.thinking or "")
                    case "redacted_thinking":
                        pass
                    case _:
                        holder = _holder(told, message.role)
                        holder["content"] = "\n".join(filter(None, (holder["content"], block.shown)))
        return told if told[0]["content"] else told[1:]


class Metadata(Body):
    """The `metadata` of a request."""

    user_id: str | None = None
    """Accepted as at Anthropic; it has no effect."""


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages. What it shares with chats means what it does there."""

    max_tokens: Annotated[NumTokens, Field(ge=1)]
    """The most tokens to generate. What the context has no room for is left out of it."""
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    """Texts that end the answer before them."""
    stream: bool = False
    """Send events instead of one message."""
    metadata: Metadata | None = None
    """Accepted, without effect."""

    def chat(self) -> dict[str, Any]:
        """Return the body of the chat that answers this request."""
        stop = {} if self.stop_sequences is None else {"stop": self.stop_sequences}
        return {**super().chat(), "max_completion_tokens": self.max_tokens, **stop}


_AS_IN_CHATS = {*SamplingOptions.model_fields, "model", "stream", "chat_template_kwargs"}


def _blocks(content: str | list[ContentBlock] | None) -> list[ContentBlock]:
    return [ContentBlock(type="text", text=content)] if isinstance(content, str) else content or []


def _text(content: str | list[ContentBlock] | None) -> str:
    return "\n".join(filter(None, (block.shown for block in _blocks(content))))


def _unread(content: str | list[ContentBlock] | None, place: str) -> Iterator[str]:
    """Yield the places and types of blocks that are not understood, also of those in results."""
    for number, block in enumerate(_blocks(content)):
        if block.type not in _NEEDED:
            yield f"{place}.{number} ({block.type})"
        yield from _unread(block.content, f"{place}.{number}.content")


def _unknown(value: Any, place: str) -> Iterator[str]:
    """Yield the unknown fields inside a value, but of blocks and tools that are left out as a whole."""
    match value:
        case [*items]:
            for item in items:
                yield from _unknown(item, place)
        case ContentBlock(type=kind) if kind not in _NEEDED:
            return
        case MessagesTool(type=kind) if kind != "custom":
            return
        case Body():
            yield from (f"{place}.{name}" for name in {*value.ignored()} - _NEEDLESS)
            for name in value.model_fields_set & type(value).model_fields.keys():
                yield from _unknown(getattr(value, name), f"{place}.{name}")


def _holder(told: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """Return the message that takes what this role says: the last one, or a new one behind it.

    What a late system message says goes to the user's message or the tool's result before it.
    """
    if role == "system" and told[-1]["role"] == "assistant":
        role = "user"
    if role not in ("system", told[-1]["role"]):
        told.append({"role": role, "content": ""})
    return told[-1]


class TextBlock(Response):
    """Text of an answer."""

    type: Literal["text"] = "text"
    text: str = ""


class ThinkingBlock(Response):
    """Reasoning of an answer."""

    type: Literal["thinking"] = "thinking"
    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Response):
    """A call of an answer."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any] = {}


class ThinkingTokens(Response):
    """Counts the output tokens that were reasoning."""

    thinking_tokens: int


class MessageUsage(Response):
    """Token counts. `input_tokens` are those that the prefix cache did not hold."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0
    output_tokens_details: ThinkingTokens | None = None


class Message(Response):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
    stop_reason: Nullable[
        Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    ] = None
    stop_sequence: Nullable[str] = None
    usage: MessageUsage


class MessageTokens(Response):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class MessagesErrorDetail(Response):
    """Describes what went wrong."""

    type: str
    message: str


class MessagesError(Response):
    """Anthropic's error object, the body of every response of these routes that is not 2xx."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
