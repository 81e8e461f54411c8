"""Pieces of generated text as OpenAI's objects: one shape for completions, one for chats, each whole and streamed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from cluster.http.logprobs import chat_logprobs, completion_logprobs
from cluster.http.metrics import by_depth
from cluster.http.output_processor import Piece, ScoredToken
from cluster.http.tokenizer import Tokenizer
from secateur.requests import SamplingRequest
from secateur.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatDelta,
    CompletionChoice,
    CompletionChunk,
    CompletionResponse,
    FinishReason,
    SpeculativeStats,
    Usage,
    new_id,
)
from workers.comm.ipc import RequestStats

Whole = CompletionResponse | ChatCompletionResponse
Chunk = CompletionChunk | ChatCompletionChunk


@dataclass(slots=True)
class Answer:
    """One choice, as far as it has come."""

    prompt_ids: list[int]
    number: int = 0
    """Which of the `n` answers to its prompt it is."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    last: Piece | None = None
    stats: RequestStats | None = None

    @property
    def num_cached(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return self.last.num_cached_tokens if self.last else 0

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.scored += piece.scored
        self.last = piece
        self.stats = piece.stats or self.stats


class Shape(Protocol):
    """Completion or chat: how a choice looks."""

    def whole(self, answers: Sequence[Answer]) -> Whole: ...

    def opening(self, index: int, answer: Answer) -> Chunk | None:
        """What a stream says before its first token."""
        ...

    def chunk(self, index: int, answer: Answer, piece: Piece) -> Chunk: ...

    def closing(self, usage: Usage | None, speculative: SpeculativeStats | None) -> Chunk:
        """The chunk without choices, after the last."""
        ...


class _Shape:
    prefix: str

    def __init__(self, request: SamplingRequest, model: str, tokenizer: Tokenizer) -> None:
        self.request = request
        self.tokenizer = tokenizer
        self.with_ids = request.return_token_ids
        self.with_logprobs = request.num_logprobs is not None
        # As OpenAI has it, all chunks of a stream were created at one time.
        self.head: dict[str, Any] = {"id": new_id(self.prefix), "created": int(time.time()), "model": model}

    def ending(self, index: int, piece: Piece | None, ids: list[int]) -> dict[str, Any]:
        """What both choices of a shape share."""
        return {
            "index": index,
            "finish_reason": cast("FinishReason | None", piece.finish_reason if piece else None),
            "stop_reason": piece.stop_reason if piece else None,
            "token_ids": list(ids) if self.with_ids else None,
        }

    def prompt_ids(self, answer: Answer) -> list[int] | None:
        return answer.prompt_ids if self.with_ids else None

    def totals(self, answers: Sequence[Answer]) -> dict[str, Any]:
        stats = speculative_stats(answers) if self.request.return_speculative_stats else None
        return {"usage": usage_of(answers), "speculative": stats}


class CompletionShape(_Shape):
    prefix = "cmpl"

    def whole(self, answers: Sequence[Answer]) -> CompletionResponse:
        choices = [
            CompletionChoice(
                text=answer.text,
                logprobs=completion_logprobs(self.tokenizer, answer.scored) if self.with_logprobs else None,
                prompt_token_ids=self.prompt_ids(answer),
                **self.ending(index, answer.last, answer.token_ids),
            )
            for index, answer in enumerate(answers)
        ]
        return CompletionResponse(**self.head, choices=choices, **self.totals(answers))

    def opening(self, index: int, answer: Answer) -> None:
        return None

    def chunk(self, index: int, answer: Answer, piece: Piece) -> CompletionChunk:
        is_first = piece.num_tokens == len(piece.token_ids)
        choice = CompletionChoice(
            text=piece.text,
            logprobs=completion_logprobs(self.tokenizer, piece.scored) if piece.scored else None,
            prompt_token_ids=self.prompt_ids(answer) if is_first else None,
            **self.ending(index, piece, piece.token_ids),
        )
        return CompletionChunk(**self.head, choices=[choice])

    def closing(self, usage: Usage | None, speculative: SpeculativeStats | None) -> CompletionChunk:
        return CompletionChunk(**self.head, choices=[], usage=usage, speculative=speculative)


class ChatShape(_Shape):
    prefix = "chatcmpl"

    def whole(self, answers: Sequence[Answer]) -> ChatCompletionResponse:
        choices = [
            ChatChoice(
                message=AssistantMessage(content=answer.text),
                logprobs=chat_logprobs(self.tokenizer, answer.scored) if self.with_logprobs else None,
                **self.ending(index, answer.last, answer.token_ids),
            )
            for index, answer in enumerate(answers)
        ]
        ids = self.prompt_ids(answers[0])
        return ChatCompletionResponse(**self.head, choices=choices, prompt_token_ids=ids, **self.totals(answers))

    def opening(self, index: int, answer: Answer) -> ChatCompletionChunk:
        choice = ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
        return ChatCompletionChunk(**self.head, choices=[choice], prompt_token_ids=self.prompt_ids(answer))

    def chunk(self, index: int, answer: Answer, piece: Piece) -> ChatCompletionChunk:
        choice = ChatChunkChoice(
            delta=ChatDelta(content=piece.text),
            logprobs=chat_logprobs(self.tokenizer, piece.scored) if piece.scored else None,
            **self.ending(index, piece, piece.token_ids),
        )
        return ChatCompletionChunk(**self.head, choices=[choice])

    def closing(self, usage: Usage | None, speculative: SpeculativeStats | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self.head, choices=[], usage=usage, speculative=speculative)


def usage_of(answers: Sequence[Answer]) -> Usage:
    """Tokens of all choices, each prompt counted once; what became of verified draft tokens, as far as is known."""
    stats = _stats(answers)
    accepted = sum(item.num_accepted_tokens for item in stats)
    return Usage.of(
        sum(len(answer.prompt_ids) for answer in answers if answer.number == 0),
        sum(len(answer.token_ids) for answer in answers),
        cached=sum(answer.num_cached for answer in answers if answer.number == 0),
        accepted=accepted if stats else None,
        rejected=sum(item.num_verified_tokens for item in stats) - accepted,
    )


def usage_of_one(answer: Answer) -> Usage:
    """Of one choice so far, its prompt counted with it (vLLM's `continuous_usage_stats`)."""
    return usage_of([replace(answer, number=0)])


def speculative_stats(answers: Sequence[Answer]) -> SpeculativeStats:
    stats = _stats(answers)
    pruned = by_depth(*(item.pruned_per_depth for item in stats))
    verified = by_depth(*(item.verified_per_depth for item in stats))
    accepted = by_depth(*(item.accepted_per_depth for item in stats))
    drafted = by_depth(pruned, verified)
    return SpeculativeStats(
        num_drafts=sum(item.num_drafts for item in stats),
        num_draft_tokens=sum(drafted),
        num_pruned=sum(pruned),
        num_verified=sum(verified),
        num_accepted_tokens=sum(accepted),
        num_copied_tokens=sum(item.num_copied_tokens for item in stats),
        num_accepted_copied_tokens=sum(item.num_accepted_copied_tokens for item in stats),
        drafted_per_depth=drafted,
        pruned_per_depth=pruned,
        verified_per_depth=verified,
        accepted_per_depth=accepted,
    )


def _stats(answers: Sequence[Answer]) -> list[RequestStats]:
    return [answer.stats for answer in answers if answer.stats is not None]
