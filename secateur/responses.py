"""Responses, stream chunks and errors of the OpenAI API, which the server writes and the client reads.

Responses carry two extensions: `speculative` when the request sets `return_speculative_stats`, and each choice's
`speculative_trees` when it sets `return_speculative_trees`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Generic, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    computed_field,
    model_serializer,
)

IGNORED_HEADER = "x-secateur-ignored"
REQUEST_ID_HEADER = "x-request-id"
LAST_EVENT_ID_HEADER = "last-event-id"
IDEMPOTENCY_HEADER = "idempotency-key"
LEARN_HEADER = "x-secateur-learn"
SSE_DONE = "data: [DONE]\n\n"


def new_id(prefix: str) -> str:
    """Return a unique id such as `cmpl-...` or `chatcmpl-...` that cannot be guessed."""
    return f"{prefix}-{uuid.uuid4().hex}"


def _now() -> int:
    return int(time.time())


Value = TypeVar("Value")
_NULLABLE = "nullable"
Nullable = Annotated[Value | None, _NULLABLE]
"""The type of a field whose null clients expect."""


class Response(BaseModel):
    """Base of all responses. Fields that are None are left out, except `Nullable` ones."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    # No return type: with one, the JSON schema of every response would shrink to "an object".
    @model_serializer(mode="wrap")
    def _leave_out_unset(self, handler: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def, unused-ignore]
        nullable = _nullable_fields(type(self))
        return {key: value for key, value in handler(self).items() if value is not None or key in nullable}

    def sse(self) -> str:
        """Return this object as one server-sent event."""
        return f"data: {self.model_dump_json()}\n\n"


@cache
def _nullable_fields(model: type[Response]) -> frozenset[str]:
    return frozenset(name for name, field in model.model_fields.items() if _NULLABLE in field.metadata)


class Listed(Response):
    """Base of what lists contain."""

    id: str


Entry = TypeVar("Entry", bound=Listed)


class ObjectList(Response, Generic[Entry]):
    """A page of a list. `last_id` is the `after` of the next page."""

    object: str = "list"
    data: list[Entry]
    first_id: Nullable[str]
    last_id: Nullable[str]
    has_more: bool

    @classmethod
    def page(cls, found: Sequence[Entry], limit: int) -> Self:
        """Return the first `limit` of these objects; any further one shows that there are more."""
        data = list(found[:limit])
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=data, first_id=first, last_id=last, has_more=len(found) > limit)


class CompletionTokensDetails(Response):
    """How many verified draft tokens are in the answer, and how many are not, and how many of its tokens are
    reasoning."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int | None = None
    """Only of models that reason, in chats."""


class PromptTokensDetails(Response):
    """How many prompt tokens the prefix cache held."""

    cached_tokens: int = 0


class Usage(Response):
    """Token counts. `prompt_tokens_details` counts the prompt's tokens that were found in the prefix cache,
    `completion_tokens_details` the verified draft tokens that are in the answer and those that are not, and the tokens
    of reasoning."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None

    @classmethod
    def of(
        cls,
        prompt: int,
        completion: int,
        *,
        cached: int | None = None,
        accepted: int | None = None,
        rejected: int = 0,
        reasoning: int | None = None,
    ) -> Self:
        """Return usage from counts; details that are None are left out."""
        details = None
        if accepted is not None or reasoning is not None:
            details = CompletionTokensDetails(
                accepted_prediction_tokens=accepted or 0,
                rejected_prediction_tokens=rejected,
                reasoning_tokens=reasoning,
            )
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=None if cached is None else PromptTokensDetails(cached_tokens=cached),
            completion_tokens_details=details,
        )


class SpeculativeStats(BaseModel):
    """Speculation statistics of one request, over all its answers.

    Every drafted node is either pruned before verification or verified; accepted tokens are the verified ones in the
    answer. The lists count the same by depth, beginning with the root's children.
    """

    num_drafts: int = 0
    """Steps that verified at least one drafted node."""
    num_draft_tokens: int = 0
    num_pruned: int = 0
    num_verified: int = 0
    num_accepted_tokens: int = 0
    num_copied_tokens: int = 0
    """Verified tokens that prompt lookup copied from earlier text, without the drafter."""
    num_accepted_copied_tokens: int = 0
    drafted_per_depth: list[int] = []
    pruned_per_depth: list[int] = []
    verified_per_depth: list[int] = []
    accepted_per_depth: list[int] = []

    @computed_field  # type: ignore[prop-decorator]  # pydantic documents this order
    @property
    def acceptance_length(self) -> float:
        """Return the tokens per verification: 1 + accepted / drafts, or 1.0 if nothing was drafted."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @computed_field  # type: ignore[prop-decorator]  # same
    @property
    def acceptance_rate(self) -> float:
        """Return the accepted share of the drafted tokens, or 0.0 if nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


PrunedBy = Literal["min_prob", "path_prob", "cost"]
"""Why a node was pruned: the names of `workers.settings.PruneReason`."""


class TreeNode(Response):
    """A node of a step's tree.

    Example: TreeNode(parent=0, depth=1, token_id=83, text=" of", draft_prob=0.61, weight=0.7, status="accepted")
    """

    parent: Nullable[int]
    """Index of its parent in `nodes`; null for the root, the last token before the step."""
    depth: int
    token_id: Nullable[int]
    """Null stands for children that were not drafted, because their parent was not expanded."""
    text: Nullable[str]
    draft_prob: Nullable[float]
    """The draft's probability of the token after its path, at the request's temperature; null if there is none."""
    weight: Nullable[float]
    """The estimated probability that the node survives verification; null if there is none."""
    status: Literal["root", "accepted", "rejected", "pruned"]
    """Accepted and rejected nodes were verified, pruned ones were not."""
    pruned_by: PrunedBy | None = None
    """The threshold that the parent failed, or the cost model of `auto`."""


class TreeToken(Response):
    """A token that a step added to the answer."""

    token_id: int
    text: str
    """What the token adds to the answer's text; empty while half a character or a stop string may follow."""
    origin: Literal["accepted", "copied", "bonus"]
    """An accepted node of a draft, one that prompt lookup copied, or the verifier's own token."""
    depth: int
    """Depth in the tree; the bonus token's is one more than that of the last accepted node."""


class SpeculativeTree(Response):
    """The tree of one verification, and the tokens that it brought."""

    nodes: list[TreeNode]
    """The root, the verified nodes by depth, then pruned ones."""
    tokens: list[TreeToken]
    is_copied: bool = False
    """Whether prompt lookup copied the draft from earlier text."""
    draft_ms: Nullable[float] = None
    """Time that the step, which serves all running requests, waited for the drafter; null if it drafted nothing."""
    verify_ms: float
    """Time of the target's forward pass and of the acceptance rule."""


FinishReason = Literal["stop", "length", "tool_calls"]


class CompletionLogprobs(BaseModel):
    """Log probabilities of a completion: four lists with an entry per token of the text."""

    model_config = ConfigDict(extra="allow")

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    """The most likely tokens at that position, and the sampled one."""
    text_offset: list[int] = []
    """Offset of the token in the answer's text, in characters. With `echo`, the text begins with the prompt."""


class PromptLogprob(BaseModel):
    """The log probability of a token at a position of the prompt, its rank (1 = the likeliest) and its text."""

    model_config = ConfigDict(extra="allow")

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""Per prompt token: token id -> log probability, of the prompt's own token and of the likeliest; null for the first."""


class TopLogprob(BaseModel):
    """A token and its log probability. `bytes` are its UTF-8 bytes, of which a character may need several tokens."""

    model_config = ConfigDict(extra="allow")

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    """A token of the answer; `top_logprobs` lists the most likely tokens at its position, best first."""

    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(Response):
    """Log probabilities of a chat answer, one entry per token."""

    content: Nullable[list[TokenLogprob]] = None
    refusal: Nullable[list[TokenLogprob]] = None


class Choice(Response):
    """Fields that all choices share."""

    index: int = 0
    finish_reason: Nullable[FinishReason] = None
    stop_reason: Nullable[int | str] = None
    """The stop string or stop token id that ended the answer (vLLM's field)."""
    token_ids: Nullable[list[int]] = None
    speculative_trees: list[SpeculativeTree] | None = None
    """One entry per step, with `return_speculative_trees`."""


class CompletionChoice(Choice):
    """One completion of a prompt, or a part of it in a stream."""

    text: str = ""
    prompt_token_ids: Nullable[list[int]] = None
    """Token ids of the prompt; in a stream, on the first chunk."""
    prompt_logprobs: Nullable[PromptLogprobs] = None
    logprobs: Nullable[CompletionLogprobs] = None


class FunctionCall(Response):
    """A function's name and its arguments; in a stream, the piece of the arguments that a chunk adds."""

    name: str | None = None
    arguments: str = ""
    """JSON, as the model wrote it."""


class CustomCall(Response):
    """A custom tool's name and its input; in a stream, the piece of the input that a chunk adds."""

    name: str | None = None
    input: str = ""


class ToolCall(Response):
    """A call that an answer makes, of a function or of a custom tool."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class ToolCallDelta(Response):
    """What a chunk adds to the answer's call number `index`. The first piece has id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class AssistantMessage(Response):
    """The message of a chat answer."""

    role: Literal["assistant"] = "assistant"
    content: Nullable[str] = None
    refusal: Nullable[str] = None
    reasoning_content: str | None = None
    """The model's reasoning, as DeepSeek has it."""
    reasoning: Nullable[str] = None
    """The same under vLLM's name."""
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Choice):
    """One answer of a chat."""

    message: AssistantMessage
    logprobs: Nullable[ChatLogprobs] = None


class ChatDelta(Response):
    """The part of a message that a chunk adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Choice):
    """One choice of a chat chunk."""

    delta: ChatDelta
    logprobs: Nullable[ChatLogprobs] = None


class GenerationResponse(Response):
    """Fields common to both responses and both stream chunks."""

    id: str
    created: int = Field(default_factory=_now)
    model: str
    usage: Usage | None = None
    speculative: SpeculativeStats | None = None


class CompletionResponse(GenerationResponse):
    """The response of /v1/completions."""

    id: str = Field(default_factory=lambda: new_id("cmpl"))
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]

    @property
    def text(self) -> str:
        """Return the first choice's text."""
        return self.choices[0].text if self.choices else ""


class CompletionChunk(CompletionResponse):
    """A stream chunk of /v1/completions, of one choice: OpenAI gives it the same `object` as the whole response."""


class ChatCompletionResponse(GenerationResponse):
    """The response of /v1/chat/completions."""

    id: str = Field(default_factory=lambda: new_id("chatcmpl"))
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_token_ids: Nullable[list[int]] = None
    """Token ids of the prompt, which all choices share."""
    prompt_logprobs: Nullable[PromptLogprobs] = None

    @property
    def text(self) -> str:
        """Return the first choice's content."""
        return (self.choices[0].message.content or "") if self.choices else ""


class ChatCompletionChunk(GenerationResponse):
    """A stream chunk of /v1/chat/completions."""

    id: str = Field(default_factory=lambda: new_id("chatcmpl"))
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None
    """Set on the chunk that opens an answer with its role."""

    @property
    def text(self) -> str:
        """Return the text that the chunk adds to choice `choices[0].index`."""
        return (self.choices[0].delta.content or "") if self.choices else ""


class TokenizeResponse(Response):
    """The response of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int | None = None
    token_strs: Nullable[list[str]] = None


class DetokenizeResponse(Response):
    """The response of /detokenize."""

    prompt: str


class ModelCard(Response):
    """A model in /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(default_factory=_now)
    owned_by: str = "secateur"
    root: str | None = None
    max_model_len: int | None = None


class ModelList(Response):
    """The response of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard] = []


class ErrorDetail(Response):
    """OpenAI's error object."""

    message: str
    type: str = "invalid_request_error"
    param: Nullable[str] = None
    code: Nullable[str | int] = None


class ErrorResponse(Response):
    """`{"error": {message, type, param, code}}`, the body of every response that is not 2xx."""

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
        """Return an error body."""
        # Quoted request text may hold a lone surrogate, which UTF-8 cannot encode.
        message = message.encode("utf-8", "backslashreplace").decode()
        return cls(error=ErrorDetail(message=message, type=type, param=param, code=code))
