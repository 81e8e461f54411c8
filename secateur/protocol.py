"""The OpenAI wire: every request, response and stream chunk as a model. The server writes them, the client reads them.

Requests keep fields nobody knows in `model_extra` (the server names them in the header `x-secateur-ignored`) and name
the fields we know but do not implement in `unsupported()` (the server answers 400). Responses carry one vendor object,
`speculative`, when the request sets `return_speculative_stats`.
"""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StrictBool,
    StrictInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    computed_field,
    field_validator,
    model_serializer,
    model_validator,
)

from secateur.errors import ConfigError, Problem
from secateur.schema import problems_of
from secateur.speculative import Speculative

IGNORED_HEADER = "x-secateur-ignored"
REQUEST_ID_HEADER = "x-request-id"
SSE_DONE = "data: [DONE]\n\n"
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; chat runs to the end of the context

TokenId = Annotated[StrictInt, Field(ge=0)]


class Unsupported(NamedTuple):
    """A parameter we know, set to something this version does not do."""

    param: str
    why: str


def _wrong(field: str, message: str) -> ConfigError:
    """For validators that look at several fields: an error that still names the one at fault."""
    return ConfigError(Problem(field, message))


# -- requests --------------------------------------------------------------------------------------------------------


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")

    include_usage: StrictBool = False
    """One more chunk at the end, without choices, with the usage."""
    continuous_usage_stats: StrictBool = False
    """The usage so far in every chunk."""


# param -> (values that change nothing, why others are refused). None always changes nothing.
_STRUCTURED = "structured outputs are not implemented in this version"
_TOOLS = "tools are not implemented in this version"
_PENALTY = "penalties are not implemented in this version"
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "only one answer per request is implemented; send the request n times"),
    "best_of": ((1,), "only one answer per request is implemented"),
    "use_beam_search": ((False,), "beam search is not implemented"),
    "logprobs": ((False,), "log probabilities are not implemented in this version"),
    "top_logprobs": ((0,), "log probabilities are not implemented in this version"),
    "prompt_logprobs": ((), "log probabilities are not implemented in this version"),
    "echo": ((False,), "echo is not implemented in this version"),
    "suffix": (("",), "insertion is not implemented"),
    "logit_bias": (({},), "logit_bias is not implemented in this version"),
    "presence_penalty": ((0,), _PENALTY),
    "frequency_penalty": ((0,), _PENALTY),
    "repetition_penalty": ((1,), _PENALTY),
    "length_penalty": ((1,), _PENALTY),
    "min_tokens": ((0,), "min_tokens is not implemented in this version"),
    "bad_words": (([],), "bad_words is not implemented in this version"),
    "allowed_token_ids": ((), "allowed_token_ids is not implemented in this version"),
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
    "cache_salt": ((), "salted prefix caching is not implemented in this version"),
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


class SamplingRequest(BaseModel):
    """What both generation requests share. A null means "not given"."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    model: str | None = None
    """None takes the one model the service has."""
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[StrictInt, Field(ge=-1)] = 0
    """-1 and 0 are off."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    """The newer name; wins over max_tokens."""
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] = []
    include_stop_str_in_output: StrictBool = False
    ignore_eos: StrictBool = False
    skip_special_tokens: StrictBool = True
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    return_token_ids: StrictBool = False
    return_speculative_stats: StrictBool = False
    speculative: Speculative | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    user: str | None = None

    # Known, and refused by `unsupported()` unless neutral; ranges are checked all the same.
    n: Annotated[StrictInt, Field(ge=1)] = 1
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0)] = 1.0
    min_tokens: Annotated[StrictInt, Field(ge=0)] = 0
    priority: StrictInt = 0

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if any(not text for text in self.stop_strings):
            raise _wrong("stop", "an empty string stops nothing; remove it")
        if self.stream_options is not None and not self.stream:
            raise _wrong("stream_options", "only allowed with stream=true")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def max_output_tokens(self) -> int | None:
        """The most tokens to generate; None is up to the end of the context."""
        return self.max_completion_tokens or self.max_tokens

    def unsupported(self) -> list[Unsupported]:
        """Every known parameter with a value this version does not implement. Empty means: go ahead."""
        found = []
        values = {**(self.model_extra or {}), **{name: getattr(self, name) for name in type(self).model_fields}}
        for param, (neutral, why) in UNSUPPORTED.items():
            value = values.get(param)
            # `0 == False` must not make logprobs=0 (one log probability) look like logprobs=false.
            if value is not None and not any(value == same and _both_bool(value, same) for same in neutral):
                found.append(Unsupported(param, why))
        return found

    def ignored(self) -> list[str]:
        """Fields nobody knows, sorted: accepted, without effect, to be named in `x-secateur-ignored`."""
        return sorted((self.model_extra or {}).keys() - UNSUPPORTED.keys())


def _both_bool(a: object, b: object) -> bool:
    return isinstance(a, bool) == isinstance(b, bool)


class CompletionRequest(SamplingRequest):
    """POST /v1/completions. `prompt`: a text, a list of texts, token ids, or a list of lists of token ids."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    add_special_tokens: StrictBool = True
    echo: StrictBool = False
    best_of: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: Annotated[StrictInt, Field(ge=0)] | StrictBool | None = None
    suffix: str | None = None

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _one_of_four_shapes(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:  # pydantic would list what is wrong with each of the four
            raise ValueError("must be a text, a list of texts, token ids, or a list of lists of token ids") from None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per choice to be answered. A prompt is a text or its token ids."""
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

    @model_validator(mode="after")
    def _some_prompt(self) -> Self:
        if isinstance(self.prompt, list) and (not self.prompt or any(item == [] for item in self.prompt)):
            raise _wrong("prompt", "an empty list has nothing to complete; give a text or token ids")
        return self


class ContentPart(BaseModel):
    """A part of a message; only text is understood."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message. `content` is a text or a list of text parts; `text` is both as one string."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1)]
    content: str | list[ContentPart] | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatCompletionRequest(SamplingRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    add_special_tokens: StrictBool = False
    """Off, as chat templates write them already."""
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _one_ending(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            if "add_generation_prompt" in self.model_fields_set:
                raise _wrong("continue_final_message", "contradicts add_generation_prompt=true; set one to false")
            self.add_generation_prompt = False
        return self


class TokenizeRequest(BaseModel):
    """POST /tokenize: `prompt`, or `messages` through the chat template."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise _wrong("prompt", "give either prompt or messages")
        return self


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    tokens: list[TokenId]


# -- responses -------------------------------------------------------------------------------------------------------


def new_id(prefix: str) -> str:
    """`cmpl-...`, `chatcmpl-...`: unique, not guessable."""
    return f"{prefix}-{uuid.uuid4().hex}"


def _now() -> int:
    return int(time.time())


class Response(BaseModel):
    """Base of what the server writes: an unset optional field is left out, unless OpenAI's clients expect its null."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    nullable: ClassVar[frozenset[str]] = frozenset()

    # No return type: with one, the JSON schema of every response would shrink to "an object".
    @model_serializer(mode="wrap")
    def _leave_out_unset(self, handler: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def, unused-ignore]
        return {key: value for key, value in handler(self).items() if value is not None or key in self.nullable}

    def sse(self) -> str:
        """This object as one server-sent event."""
        return f"data: {self.model_dump_json()}\n\n"


class CompletionTokensDetails(Response):
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(Response):
    """Token counts. `completion_tokens_details` counts drafted tokens that were accepted and rejected."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    completion_tokens_details: CompletionTokensDetails | None = None

    @classmethod
    def of(cls, prompt: int, completion: int, *, accepted: int | None = None, rejected: int = 0) -> Self:
        details = None
        if accepted is not None:
            details = CompletionTokensDetails(accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected)
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            completion_tokens_details=details,
        )


class SpeculativeStats(BaseModel):
    """What speculation did for one request: steps with a draft, nodes drafted, accepted and verified."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_verified: int = 0

    @computed_field  # type: ignore[prop-decorator]  # pydantic documents this order
    @property
    def acceptance_length(self) -> float:
        """Tokens per verification: 1 + accepted / drafts; 1.0 when nothing was drafted."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @computed_field  # type: ignore[prop-decorator]  # same
    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the drafted tokens; 0.0 when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


FinishReason = Literal["stop", "length"]


class Choice(Response):
    nullable = frozenset({"finish_reason", "logprobs"})

    index: int = 0
    finish_reason: FinishReason | None = None
    logprobs: Any = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it (vLLM's field)."""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(Choice):
    text: str = ""


class AssistantMessage(Response):
    nullable = frozenset({"content", "refusal"})

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: str | None = None


class ChatChoice(Choice):
    message: AssistantMessage


class ChatDelta(Response):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Choice):
    delta: ChatDelta


class Answer(Response):
    """Fields common to both responses and both stream chunks."""

    id: str
    created: int = Field(default_factory=_now)
    model: str
    usage: Usage | None = None
    speculative: SpeculativeStats | None = None


class CompletionResponse(Answer):
    id: str = Field(default_factory=lambda: new_id("cmpl"))
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text if self.choices else ""


class CompletionChunk(CompletionResponse):
    """A stream chunk of /v1/completions: OpenAI gives it the same `object` as the whole response."""


class ChatCompletionResponse(Answer):
    id: str = Field(default_factory=lambda: new_id("chatcmpl"))
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]

    @property
    def text(self) -> str:
        """The first choice's content."""
        return (self.choices[0].message.content or "") if self.choices else ""


class ChatCompletionChunk(Answer):
    id: str = Field(default_factory=lambda: new_id("chatcmpl"))
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]

    @property
    def text(self) -> str:
        """What the first choice gained with this chunk."""
        return (self.choices[0].delta.content or "") if self.choices else ""


class TokenizeResponse(Response):
    tokens: list[int]
    count: int
    max_model_len: int | None = None
    token_strs: list[str] | None = None


class DetokenizeResponse(Response):
    prompt: str


class ModelCard(Response):
    id: str
    object: Literal["model"] = "model"
    created: int = Field(default_factory=_now)
    owned_by: str = "secateur"
    root: str | None = None
    max_model_len: int | None = None


class ModelList(Response):
    object: Literal["list"] = "list"
    data: list[ModelCard] = []


class ErrorDetail(Response):
    nullable = frozenset({"param", "code"})

    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | int | None = None


class ErrorResponse(Response):
    """`{"error": {message, type, param, code}}`, the body of every answer that is not 2xx."""

    error: ErrorDetail

    @classmethod
    def of(
        cls,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | int | None = None,
    ) -> Self:
        return cls(error=ErrorDetail(message=message, type=type, param=param, code=code))

    @classmethod
    def from_validation(cls, error: ValidationError, model: type[BaseModel]) -> Self:
        """A 400 body for a request that `model` refused; `param` is the first field at fault."""
        problems = problems_of(error, model.model_fields)
        param = problems[0].field.split(".")[0] or None
        return cls.of("; ".join(dict.fromkeys(map(str, problems))), param=param)

    @classmethod
    def from_unsupported(cls, found: list[Unsupported]) -> Self:
        """A 400 body that names every parameter of `found`, which holds at least one."""
        message = "; ".join(f"{param}: {why}" for param, why in found)
        return cls.of(message, param=found[0].param, code="unsupported_parameter")


# -- batch files (one JSON object per line) --------------------------------------------------------------------------


class BatchInputLine(BaseModel):
    """Example: {"custom_id": "q-1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "def f("}}"""

    model_config = ConfigDict(extra="forbid")

    custom_id: Annotated[str, Field(min_length=1)]
    method: Literal["POST"]
    url: Literal["/v1/completions", "/v1/chat/completions"]
    body: dict[str, Any]

    @model_validator(mode="after")
    def _whole_answers(self) -> Self:
        if self.body.get("stream"):
            raise _wrong("body.stream", "a batch line is answered as a whole; remove stream")
        return self


class BatchResponse(BaseModel):
    status_code: int
    request_id: str
    body: Any


class BatchLineError(BaseModel):
    code: str
    message: str


class BatchOutputLine(BaseModel):
    """The answer to one input line: `error` is null exactly if it succeeded."""

    id: str
    custom_id: str
    response: BatchResponse | None = None
    error: BatchLineError | None = None

    @property
    def succeeded(self) -> bool:
        return self.error is None and self.response is not None and self.response.status_code == 200
