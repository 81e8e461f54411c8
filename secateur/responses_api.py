"""The bodies of /v1/responses: what a request says, and the objects of its answer.

A request is a chat in other words: `ResponsesRequest.messages` and `ResponsesRequest.chat` translate it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from secateur.bodies import Body, Metadata, Unsupported, UnsupportedContent, placeholder, told, wrong
from secateur.requests import MAX_ITEMS, left_out
from secateur.responses import FunctionCall, Listed, Nullable, ObjectList, Response, TokenLogprob, new_id
from secateur.sampling import NumLogprobs, NumTokens, SamplingOptions
from secateur.tools import CALLED_TYPES, MAX_TOOLS

MAX_ID_CHARS = 256
LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log probabilities."""
TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text")
"""Types of parts that are text."""
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
}
"""Fields of chats, and what they are called here."""


_CHOICES = (
    'must be "none", "auto", "required", {"type": "function", "name": ...}, the same of the type custom, or '
    '{"type": "allowed_tools", "mode": "auto", "tools": [...]}'
)


class InputPart(Body):
    """A part of a message; only text is understood."""

    type: str
    """One of `TEXT_PARTS`, with no effect; see `unsupported_content` for others."""
    text: str = ""
    """The part's text; parts are joined."""
    refusal: str = ""
    """The text of a refusal."""


Content = Annotated[
    str | Annotated[list[InputPart], Field(fail_fast=True, max_length=MAX_ITEMS)] | None,
    told('must be a text or a list of {"type": "input_text", "text": ...}; nothing but text is understood'),
]


_ITEMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "message": ("msg", ("role", "content")),
    "function_call": ("fc", ("call_id", "name", "arguments")),
    "function_call_output": ("fco", ("call_id", "output")),
    "custom_tool_call": ("ctc", ("call_id", "name", "input")),
    "custom_tool_call_output": ("fco", ("call_id", "output")),
    "reasoning": ("rs", ()),
    "item_reference": ("", ("id",)),
}
"""Type of an item -> what its id begins with, and the fields that it needs."""


class InputItem(Body):
    """A message, an earlier call, its result, earlier reasoning, which is left out, or the id of a stored item."""

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
        "item_reference",
    ] = "message"
    """What it is."""
    id: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    """The item's id; an `item_reference` has the id of an item of a stored response."""
    role: Literal["user", "assistant", "system", "developer"] | None = None
    """Who wrote a message."""
    content: Content = None
    """A message's text or text parts."""
    call_id: str | None = None
    """Connects a call and its result."""
    name: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    """The function that was called, by any name that a model has written."""
    arguments: str | None = None
    """The call's arguments, as JSON."""
    input: str | None = None
    """The input of a custom tool's call."""
    output: Content = None
    """The call's result."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        _, needed = _ITEMS[self.type]
        if missing := [name for name in needed if getattr(self, name) is None]:
            raise wrong(missing[0], f"is missing; an item of the type {self.type!r} needs it")
        return self


class ResponsesTool(Body):
    """A function or a custom tool that the model may call."""

    type: str
    """`function` or `custom`. Tools of other types are left out, and named as ignored."""
    name: str | None = None
    """Letters, digits, underscores, dots and dashes."""
    description: str | None = None
    """What it does, for the model."""
    parameters: dict[str, Any] | None = None
    """A JSON schema of its arguments; None = it has none."""
    format: dict[str, Any] | None = None
    """Of the input of a custom tool: {"type": "text"}, or {"type": "grammar", "syntax": "lark", "definition": ...}."""
    strict: bool | None = None
    """Has no effect, as in chats."""

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        if self.type in CALLED_TYPES and self.name is None:
            raise wrong("name", "is required")
        return self

    def told(self) -> dict[str, Any]:
        """Return the tool as the answer repeats it, with OpenAI's default for functions."""
        return ({"strict": True} if self.type == "function" else {}) | self.model_dump(exclude_none=True)

    def chat_tool(self) -> dict[str, Any]:
        """Return the tool of a chat."""
        if self.type not in CALLED_TYPES:
            return {"type": self.type}
        if self.type == "function":
            fields = {"name", "description", "parameters"}
            return {"type": self.type, "function": self.model_dump(include=fields, exclude_none=True)}
        tool = self.model_dump(include={"name", "description"}, exclude_none=True)
        if self.format is not None:
            kind, grammar = self.format.get("type"), {k: v for k, v in self.format.items() if k != "type"}
            tool["format"] = {"type": kind} | ({"grammar": grammar} if grammar else {})
        return {"type": "custom", "custom": tool}


class ResponsesToolChoice(Body):
    """A `tool_choice` that demands one tool, or allows some."""

    type: str
    """`function` or `custom`, with a name; `allowed_tools`, with mode and tools."""
    name: str | None = None
    """The tool to call."""
    mode: str | None = None
    """Whether one of the allowed tools must be called: `auto` or `required`."""
    tools: Annotated[list[ResponsesToolChoice], Field(max_length=MAX_TOOLS)] | None = None
    """The allowed tools."""

    def chat_choice(self) -> dict[str, Any]:
        """Return the `tool_choice` of a chat."""
        if self.type == "allowed_tools":
            tools = [tool.chat_choice() for tool in self.tools or ()]
            return {"type": self.type, "allowed_tools": {"mode": self.mode, "tools": tools}}
        return {"type": self.type, self.type: {"name": self.name}} if self.type in CALLED_TYPES else {"type": self.type}


class TextFormat(Body):
    """What the answer's text must be."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    """Any text, any JSON object, or JSON of the schema."""
    name: str | None = None
    """The schema's name; no effect."""
    description: str | None = None
    """What the schema is for; no effect."""
    definition: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """The schema itself. In JSON the field is called `schema`."""
    strict: bool = True
    """Has no effect: every schema is followed strictly."""

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.definition is not None):
            raise wrong("schema", f'belongs to the type "json_schema", and only to it (got {self.type!r})')
        return self


class TextOptions(Body):
    """The `text` of a request."""

    format: TextFormat | None = None
    """None = any text."""


class ReasoningOptions(Body):
    """The `reasoning` of a request."""

    effort: Annotated[str, Field(max_length=32)] | None = None
    """For chat templates that know it, such as `low`, `medium` and `high`."""


class ResponsesRequest(SamplingOptions):
    """POST /v1/responses. What it shares with chats means what it does there."""

    model: str | None = None
    """None = the service's only model."""
    input: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS), Tag("items")],
        Discriminator(lambda given: "text" if isinstance(given, str) else "items"),
    ]
    """A user's message, or a list of messages, calls, results, and ids of stored items."""
    instructions: str | None = None
    """A system message before the input. It does not carry over to later responses."""
    previous_response_id: str | None = None
    """A stored response, whose conversation this one continues."""
    store: bool = True
    """Keep the conversation for `previous_response_id`, in this replica's memory."""
    stream: bool = False
    """Send events instead of one response."""
    max_output_tokens: Annotated[NumTokens, Field(ge=1)] | None = None
    """The most tokens to generate; None = the model's default or the rest of the context."""
    top_logprobs: NumLogprobs | None = None
    """Most likely tokens to report per token, with `message.output_text.logprobs` in `include`."""
    include: list[str] = []
    """What to return as well; `message.output_text.logprobs` is known."""
    text: TextOptions | None = None
    """The answer's format."""
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS)] | None = None
    """Functions and custom tools that the model may call. Tools of other types are left out, and named as ignored."""
    tool_choice: Annotated[Literal["none", "auto", "required"] | ResponsesToolChoice | None, told(_CHOICES)] = None
    """As in chats."""
    parallel_tool_calls: bool = True
    """The answer may have several calls."""
    metadata: Metadata | None = None
    """Returned as it is."""
    reasoning: ReasoningOptions | None = None
    """How much the model reasons."""
    chat_template_kwargs: dict[str, Any] | None = None
    """As in chats."""
    include_reasoning: bool | None = None
    """As in chats."""
    unsupported_content: UnsupportedContent | None = None
    """As in chats, also for results of calls."""

    @property
    def unread_parts(self) -> list[str]:
        """Return the parts of messages and results that are no text."""
        return [
            f"input.{number}.{name}.{place} ({part.type})"
            for number, item in enumerate(self.input if isinstance(self.input, list) else ())
            for name, content in (("content", item.content), ("output", item.output))
            for place, part in enumerate(content if isinstance(content, list) else ())
            if part.type not in TEXT_PARTS
        ]

    @property
    def has_logprobs(self) -> bool:
        """Return whether the answer carries log probabilities."""
        return LOGPROBS in self.include

    def items(self) -> list[InputItem]:
        """Return the input as items."""
        if isinstance(self.input, str):
            return [InputItem(role="user", content=self.input)]
        return self.input

    def messages(self) -> list[dict[str, Any]]:
        """Return the input as the messages of a chat. Its references must have been resolved.

        An answer with calls is one message, whatever their order.
        """
        messages: list[dict[str, Any]] = []
        for item in self.items():
            match item.type:
                case "message":
                    text, last = _text(item.content), messages[-1] if messages else {}
                    if item.role == "assistant" and "tool_calls" in last:
                        last["content"] = "\n".join(part for part in (last["content"], text) if part)
                    else:
                        messages.append({"role": item.role, "content": text})
                case "function_call" | "custom_tool_call":
                    arguments = item.arguments if item.type == "function_call" else json.dumps({"input": item.input})
                    function = {"name": item.name, "arguments": arguments}
                    if not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant", "content": ""})
                    calls = messages[-1].setdefault("tool_calls", [])
                    calls.append({"id": item.call_id, "type": "function", "function": function})
                case "function_call_output" | "custom_tool_call_output":
                    messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
                case "item_reference":
                    raise AssertionError(f"item {item.id!r} has not been looked up")
        return messages

    def chat(self, history: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the body of the chat that answers this request after `history`."""
        first = [{"role": "system", "content": self.instructions}] if self.instructions is not None else []
        body: dict[str, Any] = {
            "messages": [*first, *history, *self.messages()],
            "max_completion_tokens": self.max_output_tokens,
            "store": self.store,
            "logprobs": self.has_logprobs,
            "top_logprobs": self.top_logprobs if self.has_logprobs else None,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            **self.model_dump(include=_AS_IN_CHATS, exclude_unset=True, by_alias=True),
        }
        if self.tools:
            body["tools"] = [tool.chat_tool() for tool in self.tools]
        choice = self.tool_choice
        body["tool_choice"] = choice.chat_choice() if isinstance(choice, ResponsesToolChoice) else choice
        if self.text is not None and (format := self.text.format) is not None:
            schema = {"json_schema": {"schema": format.definition}} if format.definition is not None else {}
            body["response_format"] = {"type": format.type, **schema}
        return body

    def unsupported(self) -> list[Unsupported]:
        """Return every known parameter with a value that is not implemented."""
        extra = self.model_extra or {}
        return super().unsupported() + [
            Unsupported(name, why)
            for name, (neutral, why) in _UNSUPPORTED.items()
            if extra.get(name, neutral) != neutral
        ]

    def ignored(self) -> list[str]:
        """Return unknown fields, including those of nested objects, and fields without effect."""
        unread = [f"include.{name}" for name in self.include if name != LOGPROBS]
        if self.top_logprobs is not None and not self.has_logprobs:
            unread.append("top_logprobs")
        if self.reasoning is not None:
            unread += [f"reasoning.{name}" for name in self.reasoning.ignored()]
        if self.text is not None:
            unread += [f"text.{name}" for name in self.text.ignored()]
        if isinstance(self.tool_choice, ResponsesToolChoice):
            unread += [f"tool_choice.{name}" for name in left_out(self.tool_choice.tools or ())]
        unread += [*left_out(self.tools or ()), *self.unread_parts]
        return sorted([*(name for name in super().ignored() if name not in _UNSUPPORTED), *unread])


_AS_IN_CHATS = {
    *SamplingOptions.model_fields,
    *("model", "stream", "parallel_tool_calls", "chat_template_kwargs", "include_reasoning"),
}
_UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "background": (False, "responses in the background are not implemented"),
    "conversation": (None, "conversations are not implemented; write previous_response_id"),
    "prompt": (None, "prompt templates are not implemented; write instructions and input"),
    "truncation": ("disabled", "the input is never shortened"),
}


def _text(content: str | list[InputPart] | None) -> str:
    if isinstance(content, list):
        return "".join(
            part.text or part.refusal if part.type in TEXT_PARTS else placeholder(part.type) for part in content
        )
    return content or ""


class OutputText(Response):
    """The text of an output message."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class _Output(Response):
    """What the items of an answer share."""

    type: str
    id: str
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"


class OutputMessage(_Output):
    """A message of the answer."""

    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class _OutputCall(_Output):
    call_id: str
    name: str


class OutputCall(_OutputCall):
    """A call of the answer."""

    type: Literal["function_call"] = "function_call"
    arguments: str = ""


class OutputCustomCall(_OutputCall):
    """A call of a custom tool in the answer."""

    type: Literal["custom_tool_call"] = "custom_tool_call"
    input: str = ""

    @property
    def arguments(self) -> str:
        """Return the input as the arguments of the function that stands for the tool."""
        return json.dumps({"input": self.input}, ensure_ascii=False)


class ReasoningText(Response):
    """The text of reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class OutputReasoning(_Output):
    """The model's reasoning."""

    type: Literal["reasoning"] = "reasoning"
    summary: list[Any] = []
    content: list[ReasoningText] = []


class InputTokensDetails(Response):
    """How many input tokens the prefix cache held."""

    cached_tokens: int = 0


class OutputTokensDetails(Response):
    """How many output tokens were reasoning, of models that reason."""

    reasoning_tokens: int = 0


OutputItem = OutputMessage | OutputCall | OutputCustomCall | OutputReasoning


class ResponseUsage(Response):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(Response):
    """The answer of /v1/responses. Fields of the request are repeated in it, as at OpenAI."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    model: str
    output: list[OutputItem] = []
    error: Nullable[dict[str, Any]] = None
    incomplete_details: Nullable[dict[str, str]] = None
    instructions: Nullable[str] = None
    previous_response_id: Nullable[str] = None
    max_output_tokens: Nullable[int] = None
    temperature: float | None = None
    top_p: float | None = None
    text: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    store: bool = True
    truncation: Literal["disabled"] = "disabled"
    metadata: Nullable[dict[str, str]] = None
    usage: Nullable[ResponseUsage] = None

    def message(self) -> dict[str, Any]:
        """Return the answer as the message of a chat, without a call that was cut."""
        text = "\n".join(part.text for item in self.output if isinstance(item, OutputMessage) for part in item.content)
        calls = [
            {
                "id": item.call_id,
                "type": "function",
                "function": FunctionCall(name=item.name, arguments=item.arguments).model_dump(),
            }
            for item in self.output
            if isinstance(item, OutputCall | OutputCustomCall) and item.status == "completed"
        ]
        return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


class InputTokens(Response):
    """The answer of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ListedItem(Listed):
    """An item of a request's input, as OpenAI lists it."""

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
    ]
    status: Literal["completed"] = "completed"
    role: str | None = None
    content: list[dict[str, str]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | None = None
    summary: list[Any] | None = None

    @classmethod
    def of(cls, item: InputItem) -> Self:
        """Return an item whose reference, if it was one, has been resolved. One without an id gets a new one."""
        assert item.type != "item_reference", f"item {item.id!r} has not been looked up"
        prefix, names = _ITEMS[item.type]
        fields: dict[str, Any] = {name: getattr(item, name) for name in names}
        if item.type == "message":
            kind = "output_text" if item.role == "assistant" else "input_text"
            fields["content"] = [{"type": kind, "text": _text(item.content)}]
        elif item.type == "reasoning":
            fields["summary"] = []
        elif "output" in fields:
            fields["output"] = _text(item.output)
        return cls(id=item.id or new_id(prefix), type=item.type, **fields)


class InputItems(ObjectList[ListedItem]):
    """GET /v1/responses/{id}/input_items."""


class DeletedResponse(Response):
    """DELETE /v1/responses/{id}."""

    id: str
    object: str = "response"
    deleted: bool = True
