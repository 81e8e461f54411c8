"""One prompt's way through the engine: token chunks in, pieces of text out, stop strings applied, times recorded."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cluster.http.metrics import Metrics
from cluster.http.tokenizer import Cut, IncrementalDetokenizer, StopStrings, Tokenizer
from workers.comm.ipc import EngineStats, Ready, RequestStats, Submit, TokenChunk, TokenLogprobs

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What the ingress needs of an engine; `EngineClient` is one."""

    ready: Ready | None
    stats: EngineStats

    @property
    def num_pending(self) -> int: ...

    def new_id(self) -> int: ...

    def submit(self, request: Submit) -> AsyncGenerator[TokenChunk]: ...

    def health(self) -> tuple[bool, str]: ...


class EngineFailed(RuntimeError):
    """The engine gave up on a request; its text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One answer to be generated: what goes to the engine, and how its tokens become text."""

    submit: Submit
    request_id: str
    arrival: float
    """time.perf_counter() when the HTTP request came."""
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True


class ScoredToken(NamedTuple):
    """A token of the answer with its log probabilities; its text begins at `offset` of the answer's text."""

    token: int
    score: TokenLogprobs
    offset: int


@dataclass(slots=True, kw_only=True)
class Piece:
    """What one step added to an answer.

    Example: the last of three: Piece(text="return", token_ids=[83, 0], num_tokens=7, finish_reason="stop")
    """

    text: str
    token_ids: list[int]
    num_tokens: int
    """Generated so far, this piece included."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    scored: list[ScoredToken] = field(default_factory=list)
    """Of the tokens whose text began to leave with this piece, if the request asked for log probabilities."""
    num_cached_tokens: int = 0
    """Of the prompt, found in the prefix cache."""
    num_accepted: int = 0
    """Of `token_ids` the leading ones, which were drafted ..."""
    is_copied: bool = False
    """... or, if this is set, copied from earlier text."""
    stats: RequestStats | None = None
    """The request's so far. What a stop string cut off counts as verified, not as accepted."""


@dataclass(slots=True)
class _Clock:
    """When a request's tokens came, in seconds since its arrival."""

    arrival: float
    first: float | None = None
    last: float | None = None
    reason: str = "abort"
    num_tokens: int = 0

    def now(self) -> float:
        return time.perf_counter() - self.arrival

    def saw_tokens(self) -> None:
        self.last = self.now()
        if self.first is None:
            self.first = self.last


async def generate(engine: Engine, tokenizer: Tokenizer, metrics: Metrics, prompt: Prompt) -> AsyncGenerator[Piece]:
    """The answer piece by piece, one per engine step; the last one has a finish_reason.

    Closing it early aborts the request in the engine. Raises EngineFailed, EngineDead. A stop string ends the answer
    at the same token whatever the steps were: with stop strings, tokens are read one at a time. One that is complete
    within the first min_tokens tokens ends nothing, as in vLLM.
    """
    submit = prompt.submit
    clock = _Clock(prompt.arrival)
    text = _AnswerText(tokenizer, prompt)
    try:
        async with aclosing(engine.submit(submit)) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason == "error":
                    raise EngineFailed(chunk.error or "the engine failed on this request")
                if chunk.tokens:
                    clock.saw_tokens()
                piece = text.feed(chunk)
                clock.num_tokens = piece.num_tokens
                metrics.answered(len(piece.token_ids), piece.num_accepted, is_copied=piece.is_copied)
                if piece.finish_reason is not None:
                    clock.reason = piece.finish_reason
                yield piece
                if piece.finish_reason is not None:
                    return
    except Exception:  # neither cancelled nor closed early: those are aborts
        clock.reason = "error"
        raise
    finally:
        metrics.request_ended(
            clock.reason,
            prompt_tokens=len(submit.prompt),
            generation_tokens=clock.num_tokens,
            total_s=clock.now(),
            first_token_s=clock.first,
            last_token_s=clock.last,
        )
        logger.info(
            "request %s/%d: %s after %d prompt and %d new tokens, %.3f s, seed %d",
            prompt.request_id,
            submit.id,
            clock.reason,
            len(submit.prompt),
            clock.num_tokens,
            clock.now(),
            submit.sampling.seed,
        )


class _AnswerText:
    """Tokens to text for one answer: detokenizer, then stop strings.

    Log probabilities follow the text: a token's leave with its first character. What is held back holds them back, and
    those of a text that a stop string cuts off, or of a stop token that is not shown, never leave.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt) -> None:
        self._prompt = prompt
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt.submit.prompt, skip_special_tokens=prompt.skip_special_tokens
        )
        self._stops = StopStrings(prompt.stop, include=prompt.include_stop)
        self._min_tokens = prompt.submit.sampling.constraints.min_tokens
        self._num_tokens = 0
        self._num_decoded = 0  # characters that came out of the detokenizer ...
        self._num_shown = 0  # ... and those that have left
        self._scored: deque[ScoredToken] = deque()  # whose text has not left yet

    def feed(self, chunk: TokenChunk) -> Piece:
        shown = chunk.tokens
        if chunk.stop_token is not None and not self._prompt.include_stop:
            shown = shown[:-1]  # the token that stopped it is counted, not shown (as in vLLM)
        one_by_one = self._prompt.stop or chunk.logprobs is not None
        groups = [[token] for token in shown] if one_by_one else [shown]
        text = ""
        for position, group in enumerate(groups, start=1):
            if chunk.logprobs is not None:
                self._scored.append(ScoredToken(shown[position - 1], chunk.logprobs[position - 1], self._num_decoded))
            cut = self._cut(self._detokenizer.feed(group), self._num_tokens + position)
            text += cut.text
            if cut.stop is not None:
                return self._piece(chunk, text, chunk.tokens[:position], "stop", cut.stop)
        if chunk.finish_reason is None:
            return self._piece(chunk, text, chunk.tokens)
        cut = self._cut(self._detokenizer.flush(), self._num_tokens + len(chunk.tokens))
        text += cut.text
        if cut.stop is not None:
            return self._piece(chunk, text, chunk.tokens, "stop", cut.stop)
        text += self._stops.flush()
        own_stop = chunk.stop_token if chunk.stop_token in self._prompt.submit.stop_token_ids else None
        piece = self._piece(chunk, text, chunk.tokens, chunk.finish_reason, own_stop)
        piece.scored += self._scored  # tokens without text at the end of an answer that nothing cut
        return piece

    def _cut(self, text: str, num_tokens: int) -> Cut:
        """`text` came with token number `num_tokens`, counted from 1."""
        self._num_decoded += len(text)
        return self._stops.feed(text, may_stop=num_tokens > self._min_tokens)

    def _piece(
        self,
        chunk: TokenChunk,
        text: str,
        ids: list[int],
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> Piece:
        num_accepted, stats = min(chunk.num_accepted, len(ids)), chunk.stats
        if stats is not None and num_accepted < chunk.num_accepted:
            stats = stats.truncate(chunk.num_accepted, num_accepted, is_copied=chunk.is_copied)
        self._num_tokens += len(ids)
        self._num_shown += len(text)
        scored = []
        while self._scored and self._scored[0].offset < self._num_shown:
            scored.append(self._scored.popleft())
        return Piece(
            text=text,
            token_ids=ids,
            num_tokens=self._num_tokens,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            scored=scored,
            num_cached_tokens=chunk.num_cached_tokens,
            num_accepted=num_accepted,
            is_copied=chunk.is_copied,
            stats=stats,
        )
