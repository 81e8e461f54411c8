"""The request bodies of the OpenAI API as models that check types, ranges and contradictions.

Values have the JSON types of OpenAI's schema: an integer is accepted as a float, nothing else is converted. Unknown
fields are kept in `model_extra` (the server lists them in the header `x-secateur-ignored`). `unsupported()` returns
known fields that are not implemented (the server answers 400).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from secateur.bodies import (
    Body,
    Structure,
    Unsupported,
    UnsupportedContent,
    listed,
    placeholder,
    told,
    unsupported_of,
    wrong,
)
from secateur.errors import ConfigError
from secateur.sampling import AnswerFormat, GenerationOptions, NumLogprobs, NumTokens, TokenId, Truncation
from secateur.schema import problems_of
from secateur.tools import CALLED_TYPES, MAX_TOOLS, AllowedTools, Tool, ToolChoice, calls_of

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; chat runs to the end of the context
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy, as in vLLM: dividing logits by less overflows, and the argmax is left anyway."""

REQUEST_HEADERS = {
    "Last-Event-ID": "The `id:` of the last event of a stream that broke off. With the same body, byte for byte, the "
    "stream goes on behind that event.",
    "Idempotency-Key": "Requests with the same key and body have the same seed. It has no effect beside a `seed`, or "
    "if the service has one.",
    "X-Secateur-Learn": "`off`: as `store: false`, nothing of this request is kept to learn from; `on` is the default.",
}
"""Headers of completions and chats, and what they do."""

MAX_ITEMS = 16_384  # messages, parts, prompts: parsing millions of them would block the service


class StreamOptions(Body):
    """The `stream_options` of a request."""

    include_usage: bool | None = None
    """Send the usage in a last chunk without choices; None follows `continuous_usage_stats`."""
    continuous_usage_stats: bool = False
    """Send in every chunk the usage so far of its choice, including the prompt. As in vLLM, this has no effect if
    include_usage is false."""

    @property
    def usage_at_end(self) -> bool:
        """Return whether a last chunk carries the usage."""
        return self.continuous_usage_stats if self.include_usage is None else self.include_usage

    @property
    def usage_in_chunks(self) -> bool:
        """Return whether every chunk carries the usage so far."""
        return self.continuous_usage_stats and self.usage_at_end

    def ignored(self) -> list[str]:
        """Return unknown fields, and `continuous_usage_stats` if it has no effect."""
        unread = ["continuous_usage_stats"] if self.continuous_usage_stats and not self.usage_in_chunks else []
        return sorted([*super().ignored(), *unread])


DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters whose defaults a model's generation_config.json may change, as in vLLM."""


class SamplingRequest(GenerationOptions):
    """Fields that completions and chat completions share."""

    model: str | None = None
    """None = the service's only model."""
    max_tokens: Annotated[NumTokens, Field(ge=1)] | None = None
    """The most tokens to generate. None means 16 for completions, and the model's default or the rest of the context
    for chats."""
    max_completion_tokens: Annotated[NumTokens, Field(ge=1)] | None = None
    """The newer name; wins over max_tokens."""
    response_format: AnswerFormat | None = None
    """JSON that the answer must be."""
    stream: bool = False
    """Send the answer in server-sent events, one per step."""
    stream_options: StreamOptions | None = None
    """What a stream contains beside the answer."""
    return_token_ids: bool = False
    """Return the token ids of prompt and answer."""
    return_tokens_as_token_ids: bool = False
    """Write the tokens of log probabilities as `token_id:123`, which tells apart tokens of the same text. Left out, it
    is as the service's `--return-tokens-as-token-ids` has it."""
    truncation_side: Literal["left", "right"] = "left"
    """The side on which a prompt is cut: `right` keeps its first tokens. It needs `truncate_prompt_tokens`."""
    return_speculative_stats: bool = False
    """Return how many tokens were drafted, pruned, verified and accepted, by depth."""
    return_speculative_trees: bool = False
    """Return the tree of each step: its nodes, what became of them, and how each token came."""
    store: bool | None = None
    """False: a draft head that learns while it serves keeps nothing of this request. Answers are not stored anyway."""
    user: str | None = None
    """Accepted as at OpenAI; it has no effect."""

    def filled(self, defaults: Mapping[str, Any]) -> Self:
        """Return a copy with `defaults` for the parameters of `DEFAULTED` that the request leaves out.

        Raises ConfigError if a default contradicts the request.
        """
        left_out = [name for name in DEFAULTED if name in defaults and name not in self.model_fields_set]
        filled = self.model_copy(update={name: defaults[name] for name in left_out})
        filled._check_number_of_answers()
        return filled

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.unsupported():  # the caller rejects these by name, so other checks would mislead
            return self
        if any(not text for text in self.stop_strings):
            raise wrong("stop", "an empty string stops nothing; remove it")
        if any(not text for text in self.bad_words):
            raise wrong("bad_words", "an empty string forbids nothing; remove it")
        if self.structured_outputs is not None and self.response_format is not None and self.response_format.structure:
            raise wrong("structured_outputs", "contradicts response_format; remove one of them")
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "only allowed with stream=true")
        if self.logprob_token_ids is not None and self.num_logprobs is None:
            raise wrong("logprob_token_ids", "needs logprobs: true in a chat, 0 or more in a completion")
        if self.logprob_token_ids is not None and self.max_output_tokens == 0:
            raise wrong("logprob_token_ids", "max_tokens=0 has no answer to report them for; remove one of the two")
        if self.prompt_logprobs is not None and self.stream:
            raise wrong("prompt_logprobs", "not available with stream=true; leave one of the two out")
        self._check_number_of_answers()
        limit = self.max_output_tokens
        if limit is not None and self.min_tokens > limit:
            raise wrong("min_tokens", f"{self.min_tokens} is more than max_tokens={limit}; lower it or raise that")
        return self

    def _check_number_of_answers(self) -> None:
        if self.n > 1 and self.is_greedy:
            raise wrong(
                "n", f"must be 1 when using greedy sampling, where all {self.n} answers are the same; raise temperature"
            )

    @property
    def structure(self) -> Structure | None:
        """Return what the answer must be; None = any text."""
        if self.structured_outputs is not None:
            return self.structured_outputs.structure
        return self.response_format.structure if self.response_format is not None else None

    @property
    def closes_objects(self) -> bool:
        """Return whether objects have no properties that their schema does not name, where it says nothing of them."""
        own = self.structured_outputs.disable_additional_properties if self.structured_outputs is not None else None
        return self.disable_additional_properties if own is None else own

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return the stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def max_output_tokens(self) -> int | None:
        """Return the token limit; None = up to the end of the context."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def is_greedy(self) -> bool:
        """Return whether the temperature is low enough for greedy sampling."""
        return self.temperature < GREEDY_BELOW

    @property
    def num_logprobs(self) -> int | None:
        """Return the number of most likely tokens to report per token; None = no log probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Return the number of most likely tokens to report per prompt token; None = no log probabilities."""
        return self.prompt_logprobs

    def unsupported(self) -> list[Unsupported]:
        """Return every known parameter with a value that is not implemented."""
        values = {**(self.model_extra or {}), **{name: getattr(self, name) for name in type(self).model_fields}}
        if values.get("best_of") == self.n:
            del values["best_of"]  # all answers are returned
        return unsupported_of(values)

    def ignored(self) -> list[str]:
        """Return unknown fields, including those of nested objects, and fields without effect."""
        parts: dict[str, Body | None] = {
            "stream_options": self.stream_options,
            "response_format": self.response_format,
            "response_format.json_schema": self.response_format.json_schema if self.response_format else None,
            "structured_outputs": self.structured_outputs,
        }
        nested = [f"{name}.{field}" for name, part in parts.items() if part is not None for field in part.ignored()]
        unread = ["return_tokens_as_token_ids"] if self.return_tokens_as_token_ids and self.num_logprobs is None else []
        if "truncation_side" in self.model_fields_set and self.truncate_prompt_tokens is None:
            unread.append("truncation_side")
        if "disable_additional_properties" in self.model_fields_set and self.structure is None:
            unread.append("disable_additional_properties")
        return sorted([*super().ignored(), *nested, *unread])


def check_sampling(fields: Mapping[str, Any]) -> None:
    """Check fields of a request before there is one, as the service will. Raises ConfigError."""
    try:
        CompletionRequest.model_validate({"prompt": "", **fields})
    except ValidationError as error:
        raise ConfigError(*problems_of(error, CompletionRequest.model_fields)) from None


def left_out(tools: Iterable[Any]) -> list[str]:
    """Return the names, in the header of ignored fields, of tools that the model is not told of."""
    return [f"tools.{place} ({tool.type})" for place, tool in enumerate(tools) if tool.type not in CALLED_TYPES]


class CompletionRequest(SamplingRequest):
    """POST /v1/completions. `prompt`: a text, a list of texts, token ids, or a list of lists of token ids."""

    prompt: Annotated[
        str
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[str], Field(fail_fast=True, max_length=MAX_ITEMS)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True, max_length=MAX_ITEMS)],
        told(
            "must be a text, a list of texts, token ids, or a list of lists of token ids, "
            f"of which there may be {MAX_ITEMS:,}"
        ),
    ]
    """A text, a list of texts, token ids, or a list of lists of token ids."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens, such as the one that begins a sequence, to texts."""
    max_tokens: Annotated[NumTokens, Field(ge=0)] | None = None
    """0 returns the prompt alone, with `echo` or `prompt_logprobs`."""
    echo: bool = False
    """Begin the answer's text with the prompt, and its log probabilities with the prompt's."""
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Only the value of `n`: all answers are returned."""
    logprobs: NumLogprobs | None = None
    """Most likely tokens to report per token; `true` is 1."""
    suffix: str | None = None
    """Only the empty text: insertion is not implemented."""

    @field_validator("logprobs", mode="before")
    @classmethod
    def _a_chats_spelling(cls, value: Any) -> Any:
        return (1 if value else None) if isinstance(value, bool) else value

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or token ids; each gets `n` answers."""
        match self.prompt:
            case str() as text:
                return [text]
            case [int(), *_] as ids:
                return [ids]  # type: ignore[list-item]  # mypy does not narrow list items by pattern
            case many:
                return list(many)  # type: ignore[arg-type]  # same

    @property
    def max_output_tokens(self) -> int | None:
        """Return the token limit; OpenAI's default is 16."""
        limit = super().max_output_tokens
        return DEFAULT_COMPLETION_TOKENS if limit is None else limit

    @property
    def num_logprobs(self) -> int | None:
        """Return the number of logprobs per token, or None."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Return the number of logprobs per prompt token, or None; an echo needs them as well."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((num for num in asked if num is not None), default=None)

    @model_validator(mode="after")
    def _some_prompt(self) -> Self:
        if isinstance(self.prompt, list) and (not self.prompt or any(item == [] for item in self.prompt)):
            raise wrong("prompt", "an empty list has nothing to complete; give a text or token ids")
        if top := (self.model_extra or {}).get("top_logprobs"):
            raise wrong("top_logprobs", f"belongs to chats; for a completion write logprobs={top!r}")
        if self.max_output_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise wrong("max_tokens", "0 is only allowed with echo or prompt_logprobs; ask for at least 1")
        return self


class ContentPart(Body):
    """A part of a message; only text is understood."""

    type: str
    """`text`; see `unsupported_content` for others."""
    text: str = ""
    """The part's text; parts are joined."""

    @model_validator(mode="after")
    def _text_with_its_type(self) -> Self:
        if self.type == "text" and "text" not in self.model_fields_set:
            raise wrong("text", "is required")
        return self


class ChatMessage(Body):
    """One message. `content` is a text or a list of text parts; `text` is both as one string."""

    role: Annotated[str, Field(min_length=1)]
    """One of `ROLES`, or another role that the model's chat template supports."""
    content: Annotated[
        str | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_ITEMS)] | None,
        told(
            'must be a text or a list of {"type": "text", "text": ...}; nothing but text is understood, '
            f"in at most {MAX_ITEMS:,} parts"
        ),
    ] = None
    """A text or a list of text parts."""
    name: str | None = None
    """The author's name, for the chat template."""
    tool_calls: list[dict[str, Any]] | None = None
    """Calls of an earlier answer, for the chat template."""
    tool_call_id: str | None = None
    """The call that a message of the role tool answers, for the chat template."""

    @model_validator(mode="after")
    def _some_content(self) -> Self:
        if self.content or isinstance(self.content, str):
            return self
        has_calls = bool(self.tool_calls or (self.model_extra or {}).keys() & {"function_call", "refusal"})
        if self.role in _WITH_CONTENT and not (self.role == "assistant" and has_calls):
            instead = " or tool_calls" if self.role == "assistant" else ""
            raise wrong("content", f"a message of the role {self.role!r} needs content{instead}")
        return self

    @property
    def text(self) -> str:
        """Return the content as one string."""
        if isinstance(self.content, list):
            return "".join(part.text if part.type == "text" else placeholder(part.type) for part in self.content)
        return self.content or ""


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""OpenAI's message roles."""
_WITH_CONTENT = ROLES[:-1]  # OpenAI allows null content for function messages


class Rendered(Body):
    """Options of the chat template."""

    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template."""
    add_generation_prompt: bool = True
    """End the prompt with the beginning of an answer."""
    continue_final_message: bool = False
    """Continue the last message instead of beginning an answer."""
    unsupported_content: UnsupportedContent | None = None
    """Whether parts of messages that are no text, such as images, are an error, or become a placeholder that tells the
    model so. Left out, it is as the service's `--unsupported-content`."""

    @property
    def unread_parts(self) -> list[str]:
        """Return the parts of messages that are no text."""
        return [
            f"messages.{number}.content.{place} ({part.type})"
            for number, message in enumerate(getattr(self, "messages", None) or ())
            for place, part in enumerate(message.content if isinstance(message.content, list) else ())
            if part.type != "text"
        ]

    @model_validator(mode="after")
    def _one_ending(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            if "add_generation_prompt" in self.model_fields_set:
                raise wrong("continue_final_message", "contradicts add_generation_prompt=true; set one to false")
            # vLLM's rule: continuing the last message implies that no new one is opened.
            self.__dict__["add_generation_prompt"] = False  # not given, therefore not in `model_fields_set`
        return self


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_ITEMS)]


_FIELDS_OF_CHATS = {"tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"}


class ChatCompletionRequest(SamplingRequest, Rendered):
    """POST /v1/chat/completions."""

    messages: Messages
    """The conversation so far."""
    add_special_tokens: bool = False
    """Add the tokenizer's special tokens. False by default, because chat templates add them themselves."""
    echo: bool = False
    """Begin the answer with the last message if it is the assistant's."""
    logprobs: bool = False
    """Return the log probabilities of the answer's tokens."""
    top_logprobs: NumLogprobs = 0
    """Most likely tokens to report per token, with logprobs=true."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    """Functions and custom tools that the model may call. Tools of other types are left out, and named as ignored."""
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ToolChoice | None,
        told(
            'must be "none", "auto", "required", {"type": "function", "function": {"name": ...}}, the same of the type '
            'custom, or {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}'
        ),
    ] = None
    """Whether the answer calls tools: never, if the model writes calls (`auto`), always (`required`), this one, or some
    (`allowed_tools`). None = `auto` with tools. Calls that are demanded follow their schemas or grammars exactly."""
    parallel_tool_calls: bool = True
    """The answer may have several calls."""
    include_reasoning: bool = True
    """Return the reasoning of models that reason, as `reasoning_content` and as `reasoning`."""
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    """For chat templates that know it, such as `low`, `medium` and `high`."""

    @field_validator("logprobs", mode="before")
    @classmethod
    def _not_a_number(cls, value: Any) -> Any:
        if type(value) is int:
            raise ValueError(f"is true or false in a chat; write logprobs=true and top_logprobs={value}")
        return value

    @property
    def echoed_text(self) -> str:
        """Return what the answer repeats."""
        last = self.messages[-1]
        return last.text if self.echo and last.role == "assistant" else ""

    @property
    def begun_text(self) -> str:
        """Return the beginning of the answer that the prompt ends with. A structured output begins behind it."""
        last = self.messages[-1]
        is_begun = self.continue_final_message and last.role == "assistant" and self.structure is None
        return last.text if is_begun else ""

    @property
    def num_logprobs(self) -> int | None:
        """Return the number of logprobs per token, or None."""
        return self.top_logprobs if self.logprobs else None

    @property
    def allowed(self) -> AllowedTools | None:
        """Return which tools the choice allows; None = all."""
        return self.tool_choice.allowed_tools if isinstance(self.tool_choice, ToolChoice) else None

    @property
    def offered(self) -> dict[str, Tool]:
        """Return the tools that the model may call, by name."""
        known = {function.name: tool for tool in self.tools or () if (function := tool.called) is not None}
        names = known.keys() if self.allowed is None else {each.name for each in self.allowed.tools}
        return {name: tool for name, tool in known.items() if name in names}

    @property
    def calls(self) -> Literal["none", "auto", "required", "named"]:
        """Return whether the answer calls tools."""
        if not self.offered:
            return "none"
        if isinstance(self.tool_choice, ToolChoice):
            return "named" if self.allowed is None else self.allowed.mode
        return self.tool_choice or "auto"

    @property
    def called_tool(self) -> str | None:
        """Return the only tool that the answer calls; None if the choice names none."""
        return self.tool_choice.name if isinstance(self.tool_choice, ToolChoice) else None

    @property
    def custom_call(self) -> str | None:
        """Return the custom tool with a grammar whose input is the whole answer; None if there is none."""
        name = next(iter(self.offered)) if self.calls == "required" and len(self.offered) == 1 else self.called_tool
        return name if name is not None and self.offered[name].grammar is not None else None

    @property
    def structure(self) -> Structure | None:
        """Return what the answer must be: the calls that the tool choice demands, or what other fields say."""
        if self.custom_call is not None and (grammar := self.offered[self.custom_call].grammar) is not None:
            return Structure("grammar" if grammar.syntax == "lark" else "regex", grammar.definition, "tools")
        if self.called_tool is not None and (function := self.offered[self.called_tool].called) is not None:
            return Structure("json", function.schema_of_arguments, "tools", "usual")
        if self.calls == "required":
            functions = [function for tool in self.offered.values() if (function := tool.called) is not None]
            return calls_of(functions, parallel=self.parallel_tool_calls)
        return super().structure

    def unsupported(self) -> list[Unsupported]:
        """Return every known parameter with a value that is not implemented."""
        return [each for each in super().unsupported() if each.param not in _FIELDS_OF_CHATS]

    def ignored(self) -> list[str]:
        """Return unknown fields, including those of nested objects, and fields without effect."""
        nested = [
            f"{name}.{field}"
            for place, tool in enumerate(self.tools or ())
            if tool.called is not None
            for name, part in ((f"tools.{place}", tool), (f"tools.{place}.function", tool.function))
            if part is not None
            for field in part.ignored()
        ]
        unknown = [
            f"tool_choice.allowed_tools.tools.{place} ({tool.type})"
            for place, tool in enumerate(self.allowed.tools if self.allowed is not None else ())
            if tool.name is None
        ]
        return sorted([*super().ignored(), *nested, *left_out(self.tools or ()), *unknown, *self.unread_parts])

    @model_validator(mode="after")
    def _calls_of_known_tools(self) -> Self:
        names = [function.name for tool in self.tools or () if (function := tool.called) is not None]
        if twice := [name for name in names if names.count(name) > 1]:
            raise wrong("tools", f"{twice[0]!r} is there twice; names of tools must differ")
        allowed = self.allowed.tools if self.allowed is not None else ()
        for name in (self.called_tool, *(tool.name for tool in allowed)):
            if name is not None and name not in names:
                raise wrong("tool_choice", f"there is no tool {name!r} in tools; it has {listed(names) or 'none'}")
        if "required" in (self.tool_choice, self.allowed and self.allowed.mode) and not self.offered:
            raise wrong("tool_choice", '"required" needs tools; give a function or a custom tool, or leave it out')
        bound = [name for name, tool in self.offered.items() if tool.grammar and tool.grammar.syntax == "lark"]
        if self.calls == "required" and bound and len(self.offered) > 1:
            told = f'"required" among several tools cannot bind the input of {bound[0]!r} to its Lark grammar'
            raise wrong("tool_choice", f'{told}; write "auto", or name the tool')
        if self.structured_outputs is not None and self.calls != "none":
            raise wrong("structured_outputs", 'contradicts tools; remove one of them, or write tool_choice="none"')
        if self.calls == "auto" and super().structure is not None:
            instead = 'remove one of them, or write tool_choice="required" or "none"'
            raise wrong("response_format", f"contradicts tools that the answer may call; {instead}")
        return self

    @model_validator(mode="after")
    def _top_of_something(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "only allowed with logprobs=true")
        return self


class TokenizeRequest(Rendered):
    """POST /tokenize: `prompt`, or `messages` through the chat template."""

    model: str | None = None
    """None = the service's only model."""
    prompt: str | None = None
    """The text to tokenize."""
    messages: Messages | None = None
    """A conversation, which the chat template renders first."""
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS)] | None = None
    """For the chat template."""
    add_special_tokens: bool | None = None
    """Add special tokens. None adds them to a prompt only, because chat templates add them themselves."""
    return_token_strs: bool = False
    """Return the tokens' vocabulary entries as well."""
    truncate_prompt_tokens: Truncation | None = None
    """Keep this many of the last tokens; -1 keeps as many as the context has."""

    @property
    def with_special_tokens(self) -> bool:
        """Return whether to add special tokens."""
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens

    def ignored(self) -> list[str]:
        """Return fields without effect; chat fields have none beside a prompt."""
        of_chats = {*Rendered.model_fields, "tools"} & self.model_fields_set if self.messages is None else set()
        return sorted([*super().ignored(), *of_chats, *self.unread_parts])

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    """None = the service's only model."""
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    """Token ids."""
