"""Log probabilities of an answer's tokens as OpenAI writes them: objects in chats, four lists in completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.http.output_processor import ScoredToken
from cluster.http.tokenizer import Tokenizer
from secateur.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write (OpenAI's and vLLM's number)."""


def chat_logprobs(tokenizer: Tokenizer, scored: Sequence[ScoredToken]) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            TokenLogprob(
                **_entry(tokenizer, token, score.logprob),
                top_logprobs=[TopLogprob(**_entry(tokenizer, *pair)) for pair in score.top],
            )
            for token, score, _ in scored
        ]
    )


def completion_logprobs(tokenizer: Tokenizer, scored: Sequence[ScoredToken]) -> CompletionLogprobs:
    """The token that came is among its `top_logprobs` even if it is not one of the most likely (as in vLLM)."""
    answer = CompletionLogprobs()
    for token, score, offset in scored:
        top: dict[str, float] = {}
        for id, logprob in [*score.top, (token, score.logprob)]:
            top.setdefault(tokenizer.token_text(id).text, _written(logprob))  # of two alike the likelier one stays
        answer.tokens.append(tokenizer.token_text(token).text)
        answer.token_logprobs.append(_written(score.logprob))
        answer.top_logprobs.append(top)
        answer.text_offset.append(offset)
    return answer


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    text, utf8 = tokenizer.token_text(token)
    return {"token": text, "logprob": _written(logprob), "bytes": list(utf8)}


def _written(logprob: float) -> float:
    return max(logprob, LOWEST)
