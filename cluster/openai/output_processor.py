"""Turns an engine request's token chunks into text: detokenization, stop strings, log probabilities."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cluster.text.detokenizer import IncrementalDetokenizer, StopStrings
from cluster.text.reasoning import ReasoningCounter
from cluster.text.tokenizer import Tokenizer
from workers.comm.ipc import RequestStats, Submit, TokenChunk, TokenLogprobs, TreeRecord


class ScoredToken(NamedTuple):
    """A generated token with its log probabilities. Its text starts at character `offset` of the choice's text."""

    token: int
    score: TokenLogprobs
    offset: int


class StepTree(NamedTuple):
    """A step's tree, and what each of its tokens adds to the text."""

    record: TreeRecord
    token_ids: Sequence[int]
    texts: Sequence[str]
    num_accepted: int
    is_copied: bool


@dataclass(slots=True, kw_only=True)
class TextDelta:
    """Holds what one engine step, or several, added to a choice.

    Example, the last of three: TextDelta(text="return", token_ids=[83, 0], num_tokens=7, finish_reason="stop")
    """

    text: str = ""
    token_ids: Sequence[int] = ()
    num_tokens: int = 0
    """Tokens generated so far, this delta included."""
    num_reasoning_tokens: int | None = None
    """Those of them that are reasoning; None = nothing tells reasoning apart."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    scored: Sequence[ScoredToken] = ()
    """The tokens whose text starts in this delta, if the request asked for log probabilities."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    num_accepted: int = 0
    """Leading `token_ids` that were accepted draft tokens."""
    is_copied: bool = False
    """The draft was copied from earlier text (prompt lookup) rather than drafted by the model."""
    stats: RequestStats | None = None
    """Statistics so far. Tokens removed by a stop string count as verified, not as accepted."""
    tree: StepTree | None = None
    """The step's tree, if the request asked for trees."""
    is_replayed: bool = False
    """The client has it from an earlier stream of the same answer."""

    @property
    def is_first(self) -> bool:
        """Return whether it has the choice's first tokens."""
        return self.num_tokens == len(self.token_ids)

    def joins(self, later: TextDelta) -> bool:
        """Return whether `join` may add the next delta of the choice. An event has at most one step's tree."""
        return self.is_replayed == later.is_replayed and self.tree is None and later.tree is None

    def join(self, later: TextDelta) -> None:
        """Add the next delta of the choice. The draft tokens of several steps are not counted: each was before."""
        self.text += later.text
        self.token_ids = [*self.token_ids, *later.token_ids]
        self.scored = [*self.scored, *later.scored]
        self.num_tokens, self.num_reasoning_tokens = later.num_tokens, later.num_reasoning_tokens
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.num_cached_tokens, self.stats = later.num_cached_tokens, later.stats


@dataclass(slots=True, kw_only=True)
class Generation:
    """One choice of a request: its engine request, how tokens become text, and the output so far."""

    submit: Submit
    tokenizer: Tokenizer
    number: int = 0
    """Position among the `n` choices of its prompt."""
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    scores_all: bool = False
    """Every delta has the log probabilities of all its tokens, also of tokens without text, or whose text is held back
    or removed."""
    is_empty: bool = False
    """Nothing is returned of the answer: the request is about its prompt."""
    reasoning: ReasoningCounter | None = None
    """Counts the reasoning; None = nothing tells it apart."""

    prompt_scores: list[TokenLogprobs] = field(default_factory=list)
    """Log probabilities of the prompt's tokens from the second on, if the request asked for them."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    trees: list[StepTree] = field(default_factory=list)
    last: TextDelta = field(default_factory=TextDelta)

    _detokenizer: IncrementalDetokenizer = field(init=False)
    _stops: StopStrings = field(init=False)
    _num_decoded: int = field(init=False, default=0)  # characters that the detokenizer has returned
    _pending: deque[ScoredToken] = field(init=False, default_factory=deque)  # tokens whose text is still held back

    def __post_init__(self) -> None:
        self._detokenizer = IncrementalDetokenizer(
            self.tokenizer, self.submit.prompt, skip_special_tokens=self.skip_special_tokens
        )
        self._stops = StopStrings(self.stop, include=self.include_stop)

    def process(self, chunk: TokenChunk) -> TextDelta:
        """Convert one chunk of tokens to text and add it to the output.

        With stop strings or reasoning, tokens are decoded one at a time, so both end at the same token however the
        engine grouped them. As in vLLM, a stop string completed within the first min_tokens tokens is ignored.
        """
        if self.is_empty:
            return self._add(replace(chunk, num_accepted=0), [], [], "length")
        visible = chunk.tokens
        if chunk.stop_token is not None and not self.include_stop:
            visible = visible[:-1]  # as in vLLM, the stop token is counted and not shown
        one_by_one = self.stop or self.reasoning or chunk.logprobs is not None or chunk.tree is not None
        if not one_by_one and chunk.finish_reason is None:  # most of all chunks
            text = self._detokenizer.feed(visible)
            self._num_decoded += len(text)
            return self._add(chunk, [text], visible)
        groups = [[token] for token in visible] if one_by_one else [visible]
        texts: list[str] = []
        for position, group in enumerate(groups, start=1):
            if chunk.logprobs is not None:
                score = chunk.logprobs[position - 1]
                self._pending.append(ScoredToken(visible[position - 1], score, self._num_decoded))
            text = self._detokenizer.feed(group)
            if self.reasoning is not None:
                self.reasoning.feed(text)
            safe, stop = self._check_stop(text, position)
            texts.append(safe)
            if stop is not None:
                return self._add(chunk, texts, chunk.tokens[:position], "stop", stop)
        if chunk.finish_reason is None:
            return self._add(chunk, texts, chunk.tokens)
        if self.reasoning is not None and len(visible) < len(chunk.tokens):
            is_visible = self.tokenizer.is_visible(chunk.tokens[-1], skip_special_tokens=self.skip_special_tokens)
            self.reasoning.feed(self.tokenizer.token_text(chunk.tokens[-1]).text if is_visible else "")
        if self.scores_all and chunk.logprobs is not None and len(visible) < len(chunk.tokens):
            self._pending.append(ScoredToken(chunk.tokens[-1], chunk.logprobs[-1], self._num_decoded))
        safe, stop = self._check_stop(self._detokenizer.flush(), len(chunk.tokens))
        if stop is not None:
            return self._add(chunk, [*texts, safe], chunk.tokens, "stop", stop)
        safe += self._stops.flush()
        stop_token = chunk.stop_token if chunk.stop_token in self.submit.stop_token_ids else None
        return self._add(chunk, [*texts, safe], chunk.tokens, chunk.finish_reason, stop_token)

    def _check_stop(self, text: str, position: int) -> tuple[str, str | None]:
        """Search `text`, which came with the chunk's token number `position` (from 1), for stop strings."""
        self._num_decoded += len(text)
        num_tokens = len(self.token_ids) + position
        return self._stops.feed(text, may_stop=num_tokens > self.submit.sampling.constraints.min_tokens)

    def _add(
        self,
        chunk: TokenChunk,
        texts: list[str],
        ids: list[int],
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> TextDelta:
        num_accepted, stats = min(chunk.num_accepted, len(ids)), chunk.stats
        if stats is not None and num_accepted < chunk.num_accepted:
            stats = stats.truncate(chunk.num_accepted, num_accepted, is_copied=chunk.is_copied)
        text, tree = "".join(texts), None
        if chunk.tree is not None:
            tree = StepTree(chunk.tree, ids, _text_of_each(texts, len(ids)), num_accepted, chunk.is_copied)
            self.trees.append(tree)
        self.text += text
        self.token_ids += ids
        self.last = TextDelta(
            text=text,
            token_ids=ids,
            num_tokens=len(self.token_ids),
            num_reasoning_tokens=None if self.reasoning is None else self.reasoning.count,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            scored=self._take_scored(
                takes_all=self.scores_all or (finish_reason is not None and not isinstance(stop_reason, str))
            ),
            num_cached_tokens=chunk.num_cached_tokens,
            num_accepted=num_accepted,
            is_copied=chunk.is_copied,
            stats=stats or self.last.stats,
            tree=tree,
        )
        self.scored += self.last.scored
        return self.last

    def _take_scored(self, *, takes_all: bool) -> list[ScoredToken]:
        """Take the pending log probabilities of tokens whose first character has been returned.

        Log probabilities follow the text: text that is held back holds them back, and those of text removed by a stop
        string, or of a hidden stop token, are dropped. At the end of a choice that no stop string cut, and with
        `scores_all`, all are taken, also those of tokens without text.
        """
        taken = []
        while self._pending and (takes_all or self._pending[0].offset < len(self.text)):
            taken.append(self._pending.popleft())
        return taken


def _text_of_each(texts: list[str], num_tokens: int) -> list[str]:
    """Return each token's text. The last one's includes what was flushed behind it; a hidden stop token has none."""
    last = max(0, num_tokens - 1)
    own = [*texts[:last], "".join(texts[last:])]
    return (own + [""] * num_tokens)[:num_tokens]
