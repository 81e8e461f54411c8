"""The results of offline generation (`secateur.offline`), with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from secateur.responses import PromptLogprob, SpeculativeStats

Logprobs = dict[int, PromptLogprob]
"""Token id -> log probability, of the token itself and of the likeliest."""


@dataclass(kw_only=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[Logprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(kw_only=True)
class RequestOutput:
    """A prompt and its `n` answers."""

    request_id: str
    prompt: str | None
    """The text; None if the prompt was given as token ids or is a conversation."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    speculative: SpeculativeStats
    """Speculative statistics of all answers together."""
    finished: bool = field(default=True, init=False)
