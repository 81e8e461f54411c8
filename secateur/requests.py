"""What may be asked: every request body of the OpenAI wire as a model, with its ranges and its contradictions.

Values have the JSON types of OpenAI's schema: a number may be written without a point, nothing else is converted.
Fields nobody knows are kept in `model_extra` (the server names them in the header `x-secateur-ignored`); fields we know
but do not implement are named by `unsupported()` (the server answers 400).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from secateur.errors import ConfigError, Problem
from secateur.speculative import Speculative

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; chat runs to the end of the context
MAX_ANSWERS = 128  # OpenAI's limit of `n`
MAX_LOGPROBS = 20  # OpenAI's for chats, vLLM's for both
MAX_BAD_WORDS = 128
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy, as in vLLM: dividing logits by less overflows, and the argmax is left anyway."""

MAX_TEMPERATURE = 1e6  # all tokens are alike long before; float32 logits divided by infinity are no numbers
MAX_STOPS, MAX_STOP_CHARS = 64, 1024  # looked for in every piece of text
MAX_TOKEN_IDS, MAX_ALLOWED = 1024, 8192  # token ids that travel with every step
MAX_WORD_CHARS = 128
MAX_SALT_CHARS = 512
MAX_TOKENS = 2**31 - 1
_MOST_LISTED = 20
MAX_ITEMS = 16_384  # messages, parts of one, prompts: a body of millions of them would keep the service busy reading

TokenId = Annotated[int, Field(ge=0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
NumTokens = Annotated[int, Field(le=MAX_TOKENS)]
StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class Unsupported(NamedTuple):
    """A parameter we know, set to something this version does not do."""

    param: str
    why: str


def _wrong(field: str, message: str) -> ConfigError:
    """For validators that look at several fields: an error that still names the one at fault."""
    return ConfigError(Problem(field, message))


def _one_line(text: str) -> str:
    """It goes into logs, where nobody else's line may begin within it."""
    if not text.isprintable():
        raise ValueError(f"must be printable characters of one line (got {text!r})")
    return text


# param -> (values that change nothing, why others are refused). None always changes nothing.
_STRUCTURED = "structured outputs are not implemented in this version"
_TOOLS = "tools are not implemented in this version"
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((), "choosing among more answers than are returned is not implemented; leave it out and set n"),
    "use_beam_search": ((False,), "beam search is not implemented"),
    "length_penalty": ((1,), "belongs to beam search, which is not implemented"),
    "prompt_logprobs": ((), "log probabilities of the prompt are not implemented; logprobs gives the answer's"),
    "echo": ((False,), "echo is not implemented in this version"),
    "suffix": (("",), "insertion is not implemented"),
    "logits_processors": (([],), "custom logits processors are not implemented"),
    "response_format": (({"type": "text"},), _STRUCTURED),
    "structured_outputs": ((), _STRUCTURED),
    "guided_json": ((), _STRUCTURED),
    "guided_regex": ((), _STRUCTURED),
    "guided_choice": ((), _STRUCTURED),
    "guided_grammar": ((), _STRUCTURED),
    "json_schema": ((), _STRUCTURED),
    "regex": ((), _STRUCTURED),
    "ebnf": ((), _STRUCTURED),
    "structural_tag": ((), _STRUCTURED),
    "tools": (([],), _TOOLS),
    "tool_choice": (("none", "auto"), _TOOLS),
    "functions": (([],), _TOOLS),
    "function_call": (("none", "auto"), _TOOLS),
    "parallel_tool_calls": ((True, False), _TOOLS),
    "reasoning_effort": (("none",), "reasoning effort is not implemented"),
    "modalities": ((["text"],), "only text is produced"),
    "audio": ((), "only text is produced"),
    "prediction": ((), "predicted outputs are not implemented"),
    "truncate_prompt_tokens": ((), "prompts are never truncated here; shorten the prompt"),
    "chat_template": ((), "the model's own chat template is used; it cannot be replaced per request"),
    "documents": (([],), "documents are not implemented; put them into the messages"),
    "priority": ((0,), "priorities are not implemented in this version"),
    "lora_path": ((), "adapters are not implemented"),
    "kv_transfer_params": ((), "KV transfer is not implemented"),
    "spaces_between_special_tokens": ((True,), "is not implemented; leave it out"),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "return_spec_tokens_details": ((False,), "use return_speculative_stats"),
    "no_stop_trim": ((False,), "use include_stop_str_in_output"),
    "rid": ((), "use request_id"),
}


class Body(BaseModel):
    """Base of everything in a request. JSON's types are kept strictly; a null means "not given"."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    def unsupported(self) -> list[Unsupported]:
        """Every known parameter with a value this version does not implement. Empty means: go ahead."""
        return _unsupported(self.model_extra or {})

    def ignored(self) -> list[str]:
        """Fields nobody knows, sorted: accepted, without effect, to be named in `x-secateur-ignored`."""
        return sorted((self.model_extra or {}).keys() - UNSUPPORTED.keys())


def _unsupported(values: Mapping[str, Any]) -> list[Unsupported]:
    return [
        Unsupported(param, why)
        for param, (neutral, why) in UNSUPPORTED.items()
        if values.get(param) is not None and not any(_is_same(values[param], value) for value in neutral)
    ]


def _is_same(value: Any, other: Any) -> bool:
    """As JSON has it: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


class StreamOptions(Body):
    include_usage: bool | None = None
    """One more chunk at the end, without choices, with the usage. None: as `continuous_usage_stats` says."""
    continuous_usage_stats: bool = False
    """In every chunk the usage so far of the answer that it belongs to, with its prompt. Without effect where
    include_usage is false (as in vLLM)."""

    @property
    def usage_at_end(self) -> bool:
        return self.continuous_usage_stats if self.include_usage is None else self.include_usage

    @property
    def usage_in_chunks(self) -> bool:
        return self.continuous_usage_stats and self.usage_at_end

    def ignored(self) -> list[str]:
        unread = ["continuous_usage_stats"] if self.continuous_usage_stats and not self.usage_in_chunks else []
        return sorted([*super().ignored(), *unread])


DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters whose defaults a model's generation_config.json may change, as in vLLM."""


def _told(message: str) -> WrapValidator:
    """For a field of several shapes: `message`, where pydantic would list what is wrong with each of them."""

    def checked(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(message) from None

    return WrapValidator(checked)


class SamplingRequest(Body):
    """What both generation requests share."""

    model: str | None = None
    """None takes the one model the service has."""
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 1
    """Answers per prompt."""
    temperature: Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    """-1 and 0 are off, and so is more than the vocabulary has."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Annotated[NumTokens, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[NumTokens, Field(ge=1)] | None = None
    """The newer name; wins over max_tokens."""
    min_tokens: Annotated[NumTokens, Field(ge=0)] = 0
    """Tokens before the end of text, a stop token or a stop string may end the answer."""
    stop: Annotated[
        StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None,
        _told(f"must be a text or a list of texts, at most {MAX_STOPS} of up to {MAX_STOP_CHARS:,} characters"),
    ] = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS)] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    # Any positive number means something, but float32 logits divided by 1e-40 do not.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] = 1.0
    """1.0 is off."""
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MAX_TOKEN_IDS)] = {}
    """Token id -> what is added to its logit. On the wire the ids are strings, as JSON keys are."""
    bad_words: Annotated[list[Annotated[str, Field(max_length=MAX_WORD_CHARS)]], Field(max_length=MAX_BAD_WORDS)] = []
    """Words that may not come, with or without a space before them."""
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED)] | None = None
    """Nothing but these may come."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_speculative_stats: bool = False
    speculative: Speculative | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=512), AfterValidator(_one_line)] | None = None
    user: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    """Prompts are shared in the prefix cache among requests of one salt only."""
    priority: int = 0

    def filled(self, defaults: Mapping[str, Any]) -> Self:
        """The same request, with these of `DEFAULTED` where it says nothing itself.

        Raises ConfigError if they contradict what it says.
        """
        left_out = [name for name in DEFAULTED if name in defaults and name not in self.model_fields_set]
        filled = self.model_copy(update={name: defaults[name] for name in left_out})
        filled._check_number_of_answers()
        return filled

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _ids_are_written_as_strings(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_TOKEN_IDS:  # before each of them is looked at
            raise ValueError(f"must have at most {MAX_TOKEN_IDS} entries, not {len(value)}")
        if strange := [key for key in value if not _is_token_id(key)]:
            raise ValueError(f'keys are token ids, as in {{"50256": -100}} (got {listed(map(repr, strange))})')
        return {int(key): bias for key, bias in value.items()}

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.unsupported():  # what the others ask for may follow from it; it is refused by name
            return self
        if any(not text for text in self.stop_strings):
            raise _wrong("stop", "an empty string stops nothing; remove it")
        if any(not text for text in self.bad_words):
            raise _wrong("bad_words", "an empty string forbids nothing; remove it")
        if self.stream_options is not None and not self.stream:
            raise _wrong("stream_options", "only allowed with stream=true")
        self._check_number_of_answers()
        limit = self.max_output_tokens
        if limit is not None and self.min_tokens > limit:
            raise _wrong("min_tokens", f"{self.min_tokens} is more than max_tokens={limit}; lower it or raise that")
        return self

    def _check_number_of_answers(self) -> None:
        if self.n > 1 and self.is_greedy:
            raise _wrong(
                "n", f"must be 1 when using greedy sampling, where all {self.n} answers are the same; raise temperature"
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def max_output_tokens(self) -> int | None:
        """The most tokens to generate; None is up to the end of the context."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report beside each token of the answer; None = report no log probabilities."""
        raise NotImplementedError

    def unsupported(self) -> list[Unsupported]:
        values = {**(self.model_extra or {}), **{name: getattr(self, name) for name in type(self).model_fields}}
        if values.get("best_of") == self.n:
            del values["best_of"]  # all answers are returned
        return _unsupported(values)

    def ignored(self) -> list[str]:
        nested = self.stream_options.ignored() if self.stream_options else []
        return sorted([*super().ignored(), *(f"stream_options.{name}" for name in nested)])


def listed(items: Iterable[str]) -> str:
    """The first of these with commas, and how many more there are: it goes into an error."""
    all_items = list(items)
    shown = [*all_items[:_MOST_LISTED], *([f"and {more} more"] if (more := len(all_items) - _MOST_LISTED) > 0 else [])]
    return ", ".join(shown)


def _is_token_id(key: object) -> bool:
    """Whether a JSON key spells an id, in the one way that keeps two keys from meaning the same."""
    return re.fullmatch("0|[1-9][0-9]{0,9}", str(key)) is not None


class CompletionRequest(SamplingRequest):
    """POST /v1/completions. `prompt`: a text, a list of texts, token ids, or a list of lists of token ids."""

    prompt: Annotated[
        str
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[str], Field(fail_fast=True, max_length=MAX_ITEMS)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True, max_length=MAX_ITEMS)],
        _told(
            "must be a text, a list of texts, token ids, or a list of lists of token ids, "
            f"of which there may be {MAX_ITEMS:,}"
        ),
    ]
    add_special_tokens: bool = True
    echo: bool = False
    best_of: Annotated[int, Field(ge=1)] | None = None
    logprobs: NumLogprobs | None = None
    """Most likely tokens to report per token; `true` is 1."""
    suffix: str | None = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _a_chats_spelling(cls, value: Any) -> Any:
        return (1 if value else None) if isinstance(value, bool) else value

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt to be answered, `n` times. A prompt is a text or its token ids."""
        match self.prompt:
            case str() as text:
                return [text]
            case [int(), *_] as ids:
                return [ids]  # type: ignore[list-item]  # mypy does not narrow list items by pattern
            case many:
                return list(many)  # type: ignore[arg-type]  # same

    @property
    def max_output_tokens(self) -> int | None:
        return super().max_output_tokens or DEFAULT_COMPLETION_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @model_validator(mode="after")
    def _some_prompt(self) -> Self:
        if isinstance(self.prompt, list) and (not self.prompt or any(item == [] for item in self.prompt)):
            raise _wrong("prompt", "an empty list has nothing to complete; give a text or token ids")
        if top := (self.model_extra or {}).get("top_logprobs"):
            raise _wrong("top_logprobs", f"belongs to chats; for a completion write logprobs={top!r}")
        return self


class ContentPart(Body):
    """A part of a message; only text is understood."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message. `content` is a text or a list of text parts; `text` is both as one string."""

    role: Annotated[str, Field(min_length=1)]
    """One of `ROLES`, or one that the model's chat template knows."""
    content: Annotated[
        str | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_ITEMS)] | None,
        _told(
            'must be a text or a list of {"type": "text", "text": ...}; nothing but text is understood, '
            f"in at most {MAX_ITEMS:,} parts"
        ),
    ] = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _some_content(self) -> Self:
        if self.content or isinstance(self.content, str):
            return self
        has_calls = bool(self.tool_calls or (self.model_extra or {}).keys() & {"function_call", "refusal"})
        if self.role in _WITH_CONTENT and not (self.role == "assistant" and has_calls):
            instead = " or tool_calls" if self.role == "assistant" else ""
            raise _wrong("content", f"a message of the role {self.role!r} needs content{instead}")
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Of messages, as OpenAI has them."""
_WITH_CONTENT = ROLES[:-1]  # OpenAI lets a function's be null


class Rendered(Body):
    """What goes through the model's chat template, and how."""

    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _one_ending(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            if "add_generation_prompt" in self.model_fields_set:
                raise _wrong("continue_final_message", "contradicts add_generation_prompt=true; set one to false")
            # vLLM's rule: continuing the last message implies that no new one is opened.
            self.__dict__["add_generation_prompt"] = False  # not given, therefore not in `model_fields_set`
        return self


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_ITEMS)]


class ChatCompletionRequest(SamplingRequest, Rendered):
    """POST /v1/chat/completions."""

    messages: Messages
    add_special_tokens: bool = False
    """Off, as chat templates write them already."""
    logprobs: bool = False
    top_logprobs: NumLogprobs = 0
    """Most likely tokens to report per token, with logprobs=true."""

    @field_validator("logprobs", mode="before")
    @classmethod
    def _not_a_number(cls, value: Any) -> Any:
        if type(value) is int:
            raise ValueError(f"is true or false in a chat; write logprobs=true and top_logprobs={value}")
        return value

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @model_validator(mode="after")
    def _top_of_something(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise _wrong("top_logprobs", "only allowed with logprobs=true")
        return self


class TokenizeRequest(Rendered):
    """POST /tokenize: `prompt`, or `messages` through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS)] | None = None
    """For the chat template."""
    add_special_tokens: bool | None = None
    """None adds them to a prompt; chat templates write them already."""
    return_token_strs: bool = False

    @property
    def with_special_tokens(self) -> bool:
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens

    def ignored(self) -> list[str]:
        of_chats = {*Rendered.model_fields, "tools"} & self.model_fields_set if self.messages is None else set()
        return sorted([*super().ignored(), *of_chats])

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise _wrong("prompt", "give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
