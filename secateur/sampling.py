"""How a request is sampled, drafted for and constrained: the fields that several kinds of requests share."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from secateur.bodies import Body, Structure, listed, told, wrong
from secateur.errors import ConfigError, Problem
from secateur.speculative import Speculative

MAX_ANSWERS = 128  # OpenAI's limit of `n`
MAX_LOGPROBS = 20  # OpenAI's for chats, vLLM's for both
MAX_LOGPROB_IDS = 128  # vLLM's limit
MAX_BAD_WORDS = 128
MAX_TEMPERATURE = 1e6  # sampling is uniform long before; dividing float32 logits by infinity gives NaN
MAX_STOPS, MAX_STOP_CHARS = 64, 1024  # every piece of text is searched for them
MAX_TOKEN_IDS, MAX_ALLOWED = 1024, 8192  # these token ids are sent with every step
MAX_WORD_CHARS = 128
MAX_SALT_CHARS = 512
MAX_TOKENS = 2**31 - 1
MAX_CHOICES = 1024

TokenId = Annotated[int, Field(ge=0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
NumTokens = Annotated[int, Field(le=MAX_TOKENS)]
StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


def _some_or_all(value: int) -> int:
    if value == 0:
        raise ValueError("must be -1 or at least 1: no prompt is empty")
    return value


Truncation = Annotated[int, Field(ge=-1, le=MAX_TOKENS), AfterValidator(_some_or_all)]


def _one_line(text: str) -> str:
    """Check that a text is one printable line: it is logged and must not forge log lines."""
    if not text.isprintable():
        raise ValueError(f"must be printable characters of one line (got {text!r})")
    return text


_ANY_OBJECT = {"type": "object"}


class JsonSchema(Body):
    """The `json_schema` of a `response_format`."""

    name: str | None = None
    """The schema's name; no effect."""
    description: str | None = None
    """What the schema is for; no effect."""
    definition: Annotated[dict[str, Any], Field(alias="schema")]
    """The schema itself. In JSON the field is called `schema`."""
    strict: bool = True
    """Has no effect: every schema is followed strictly."""


class AnswerFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    """Any text, any JSON object, or JSON of the schema."""
    json_schema: JsonSchema | None = None
    """The schema, with the type `json_schema`."""

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise wrong("json_schema", 'is missing; write {"name": ..., "schema": {...}}')
        if self.type != "json_schema" and self.json_schema is not None:
            raise wrong("json_schema", f'belongs to the type "json_schema", not to {self.type!r}')
        return self

    @property
    def structure(self) -> Structure | None:
        """Return what the answer must be; None = any text."""
        if self.json_schema is not None:
            return Structure("json", self.json_schema.definition, "response_format")
        return Structure("json", _ANY_OBJECT, "response_format") if self.type == "json_object" else None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: exactly one of the first five fields."""

    json_: Annotated[
        dict[str, Any] | str | None, Field(alias="json"), told("must be a JSON schema: an object, or its text")
    ] = None
    """A JSON schema, as an object or as its text. In JSON the field is called `json`."""
    regex: str | None = None
    """A regular expression that the whole answer matches."""
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    """The texts of which the answer is one."""
    grammar: str | None = None
    """A context-free grammar in Lark's or GBNF's notation."""
    json_object: bool = False
    """The answer is any JSON object."""
    disable_any_whitespace: bool = False
    """JSON has no whitespace between its tokens."""
    disable_additional_properties: bool | None = None
    """As the request's field of this name, which it replaces."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        values = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        given = [name for name, value in values.items() if value is not None] + ["json_object"] * self.json_object
        if len(given) != 1:
            told = " and ".join(given) or "none"
            message = f"give exactly one of json, regex, choice, grammar and json_object=true (got {told})"
            raise ConfigError(Problem("", message))
        return self

    @property
    def structure(self) -> Structure:
        """Return what the answer must be."""
        param = "structured_outputs"
        if self.regex is not None:
            return Structure("regex", self.regex, param)
        if self.choice is not None:
            return Structure("choice", self.choice, param)
        if self.grammar is not None:
            return Structure("grammar", self.grammar, param)
        whitespace: Literal["none", "free"] = "none" if self.disable_any_whitespace else "free"
        return Structure("json", _ANY_OBJECT if self.json_ is None else self.json_, param, whitespace)


class SamplingOptions(Body):
    """How to sample, how to draft, and when: what completions, chats, responses and `secateur.LLM` share."""

    temperature: Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE)] = 1.0
    """Divides the logits before sampling; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the most probable tokens up to this mass; 1 is off."""
    top_k: Annotated[int, Field(ge=-1)] = 0
    """Sample from this many of the most probable tokens. -1, 0 and values above the vocabulary size are off."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Sample from tokens with at least this share of the most probable token's probability; 0 is off."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """The same seed gives the same answer, up to near-ties of rounding, except under `rejection`. None takes the
    service's seed, or a random one."""
    stop: Annotated[
        StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None,
        told(f"must be a text or a list of texts, at most {MAX_STOPS} of up to {MAX_STOP_CHARS:,} characters"),
    ] = None
    """Texts that end the answer before them."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS)] = []
    """Tokens that end the answer, beside the model's end-of-sequence tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string or stop token at the end of the text."""
    ignore_eos: bool = False
    """Let end-of-sequence tokens not end the answer."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logits of tokens that the answer already has."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit for each time that the answer already has it."""
    # The lower bound keeps float32 logits finite after division.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] = 1.0
    """Makes tokens that prompt or answer already have less likely if above 1; 1.0 is off."""
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MAX_TOKEN_IDS)] = {}
    """Token id -> value added to its logit. In JSON the ids are strings, like all keys."""
    structured_outputs: StructuredOutputs | None = None
    """A JSON schema, regular expression, list of choices or grammar that the answer must follow."""
    disable_additional_properties: bool = True
    """Objects have no properties that their JSON schema does not name, where it says nothing of `additionalProperties`;
    also in calls that `tool_choice` demands. Left out, it is as the service's `--disable-additional-properties`."""
    speculative: Speculative | None = None
    """Settings of speculation for this request."""
    request_id: Annotated[str, Field(min_length=1, max_length=512), AfterValidator(_one_line)] | None = None
    """The request's id in the service's log; None takes that of the header X-Request-ID."""
    prompt_cache_key: str | None = None
    """Requests with the same key go to the same replica, which may have their prefix in its cache."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    """Requests share prefix-cache entries only with requests of the same salt."""
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Lower is served earlier, before all requests of higher numbers. Other values than 0 need a service with
    `--scheduling-policy priority`."""
    first_token_timeout_s: Annotated[float, Field(gt=0.0, le=86_400.0)] | None = None
    """Seconds after its arrival within which the answer must begin. A request that would wait longer, or has, is
    refused with status 429 instead of being run. None waits as long as it takes."""

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _ids_are_written_as_strings(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_TOKEN_IDS:  # before every entry is validated
            raise ValueError(f"must have at most {MAX_TOKEN_IDS} entries, not {len(value)}")
        if strange := [key for key in value if not _is_token_id(key)]:
            raise ValueError(f'keys are token ids, as in {{"50256": -100}} (got {listed(map(repr, strange))})')
        return {int(key): bias for key, bias in value.items()}


class GenerationOptions(SamplingOptions):
    """Fields that completions, chats and `secateur.LLM` share, and responses do not have."""

    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 1
    """Answers per prompt."""
    min_tokens: Annotated[NumTokens, Field(ge=0)] = 0
    """Minimum number of tokens before an end-of-sequence token, stop token or stop string ends the answer."""
    bad_words: Annotated[list[Annotated[str, Field(max_length=MAX_WORD_CHARS)]], Field(max_length=MAX_BAD_WORDS)] = []
    """Words that must not occur, with or without a leading space."""
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED)] | None = None
    """Only these tokens may be sampled."""
    prompt_logprobs: NumLogprobs | None = None
    """Most likely tokens to report per prompt token, beside the prompt's own. Not in streams."""
    logprob_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_LOGPROB_IDS)] | None = None
    """Tokens whose log probabilities to report at each position of the answer, beside the answer's own and instead of
    the most likely ones. It needs `logprobs`."""
    truncate_prompt_tokens: Truncation | None = None
    """Keep this many of the prompt's last tokens; -1 keeps as many as fit beside the tokens to generate."""


def _is_token_id(key: object) -> bool:
    """Return whether a JSON key is a token id in canonical form, so that no two keys mean the same id."""
    return re.fullmatch("0|[1-9][0-9]{0,9}", str(key)) is not None
