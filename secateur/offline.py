"""Offline generation in this Python process, with vLLM's names: no server, no port, no Ray.

    from secateur import LLM, SamplingParams

    with LLM("smollm2", dtype="bfloat16") as llm:
        for output in llm.generate(["Hello,", "The sea"], SamplingParams(temperature=0, max_tokens=32)):
            print(output.prompt, output.outputs[0].text)

The engine's processes start with the object. They end with `close`, with the `with` block, when the object is garbage,
or with this process.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self, TypeVar

from pydantic import ConfigDict, Field, ValidationError, model_validator

from secateur.config import EngineArgs
from secateur.errors import ConfigError, Problem
from secateur.install import service_part
from secateur.outputs import RequestOutput
from secateur.requests import DEFAULT_COMPLETION_TOKENS, ChatCompletionRequest, CompletionRequest, SamplingRequest
from secateur.sampling import GenerationOptions, NumLogprobs, NumTokens
from secateur.schema import problems_of

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""
Conversation = Sequence[Mapping[str, Any]]
_Body = TypeVar("_Body", bound=SamplingRequest)


class SamplingParams(GenerationOptions):
    """How to sample, with vLLM's names and defaults; the fields are those of an HTTP request. None = not given.

    Raises ConfigError.
    """

    model_config = ConfigDict(extra="forbid")

    max_tokens: Annotated[NumTokens, Field(ge=1)] | None = DEFAULT_COMPLETION_TOKENS
    """None = to the end of the context."""
    logprobs: NumLogprobs | None = None
    """Most likely tokens to report per token, beside the token itself."""

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise ConfigError(*problems_of(error, type(self).model_fields)) from None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None or name == "max_tokens"}


class _Completion(CompletionRequest):
    """A completion whose `max_tokens` has no default of 16."""

    @property
    def max_output_tokens(self) -> int | None:
        """Return the token limit; None = up to the end of the context."""
        return self.max_completion_tokens or self.max_tokens


class LLM:
    """An engine on this machine. `settings` are those of `secateur serve`, such as `tensor_parallel_size`.

    Raises ConfigError before anything starts.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        args = EngineArgs.load({**settings, **({"model": model} if model is not None else {})})
        self._engine = service_part("offline_engine", user="LLM")(args)
        self._finalizer = weakref.finalize(self, self._engine.stop)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, all at once, and return the outputs in their order.

        sampling_params: for all prompts, or one for each; None = the model's own, as `default_sampling_params`.
        Raises ConfigError if a prompt or a parameter is wrong, before anything is generated, BadRequestError if an
        output cannot follow its grammar, and SecateurError if the engine is lost.
        """
        texts = _prompts(prompts)
        bodies = [
            _body(_Completion, own, prompt=text)
            for text, own in zip(texts, self._params(sampling_params, len(texts)), strict=True)
        ]
        return self._engine.run(bodies, has_progress=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, and return the outputs in their order.

        sampling_params and errors: see `generate`.
        """
        many: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        template = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        bodies = [
            _body(ChatCompletionRequest, own, messages=[dict(message) for message in conversation], **template)
            for conversation, own in zip(many, self._params(sampling_params, len(many)), strict=True)
        ]
        return self._engine.run(bodies, has_progress=use_tqdm)

    def default_sampling_params(self) -> SamplingParams:
        """Return parameters that follow the model's generation_config.json, up to the end of the context."""
        return SamplingParams(max_tokens=None)

    def close(self) -> None:
        """Stop the engine and wait until its processes have ended."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            given = self.default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            problem = f"{len(given)} for {count} prompts; give one for all, or one for each"
            raise ConfigError(Problem("sampling_params", problem))
        return list(given)


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """Return the prompts, of which there may be one, as texts or token ids."""
    is_one = isinstance(prompts, str | Mapping) or (bool(prompts) and all(isinstance(item, int) for item in prompts))
    many: list[Any] = [prompts] if is_one else list(prompts)
    found: list[str | list[int]] = []
    for prompt in many:
        if isinstance(prompt, Mapping):
            if prompt.keys() not in ({"prompt"}, {"prompt_token_ids"}):
                raise ConfigError(Problem("prompts", 'a dict has exactly one key, "prompt" or "prompt_token_ids"'))
            (prompt,) = prompt.values()
        found.append(prompt if isinstance(prompt, str) else list(prompt))
    return found


def _body(model: type[_Body], params: SamplingParams, **fields: Any) -> _Body:
    """Return a prompt and its parameters as the body of a request, which has the checks."""
    given = {"max_tokens": params.max_tokens, **params.model_dump(exclude_unset=True, by_alias=True)}
    num_logprobs = given.pop("logprobs", 0 if params.logprob_token_ids is not None else None)
    if num_logprobs is not None:
        is_chat = model is ChatCompletionRequest
        given |= {"logprobs": True, "top_logprobs": num_logprobs} if is_chat else {"logprobs": num_logprobs}
    try:
        return model.model_validate({**given, **{name: value for name, value in fields.items() if value is not None}})
    except ValidationError as error:
        raise ConfigError(*problems_of(error, model.model_fields)) from None
