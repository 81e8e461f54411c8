"""One request's state in the engine. Only `verifier.engine` changes it, by assignment or through its methods."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from workers.comm.ipc import RequestStats, Submit
from workers.sampling.logits_state import LogitsState, TokenCounter
from workers.settings import Rule, TreeLimits
from workers.types import Verdict


class NewTokens(NamedTuple):
    """The tokens that one request commits in one step: those of the verdict up to the end of the output."""

    tokens: list[int]
    path: tuple[int, ...]  # the verdict's
    num_accepted: int  # how many of the tokens, from the first, are accepted draft tokens
    finish_reason: str | None
    stop_token: int | None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """A request goes through prefill and decoding, and starts again after each preemption: its tokens stay, and the KV
    of its pages is recomputed from them. A request that a lost engine has begun is in the same state.

    Invariant while decoding: num_computed == len(tokens) - 1. The last token is the root of the next tree.
    """

    submit: Submit
    rule: Rule
    limits: TreeLimits | None  # None: the request is never drafted for
    first_draft_slot: int  # 1 for an EAGLE drafter, whose slot 0 stays empty; 0 for a draft model
    feed_first: int = 0  # leading positions that a drafter is fed although it does not draft, see `is_due`
    end_token_ids: frozenset[int] = frozenset()  # each ends the output
    id: int = field(init=False)  # that the front gave it
    tokens: list[int] = field(init=False)  # prompt and output
    num_prompt: int = field(init=False)
    tree_rows: int = field(init=False)  # the most rows of one tree, root included
    is_auto: bool = field(init=False)  # the adaptive controller decides whether it gets a tree
    has_drafter: bool = field(init=False)  # the drafter holds its beginning and may be fed the rest
    is_constrained: bool = field(init=False)
    has_grammar: bool = field(init=False)
    pages: array[int] = field(default_factory=partial(array, "i"))  # may be thousands, and every step reads them
    seat: int = 0  # its place in the pool of recurrent states while it runs; 0 = none
    read_seat: int = 0  # where the state before its next chunk is: nowhere (0), in a checkpoint, or in its own seat
    num_computed: int = 0  # positions whose KV the target holds
    num_fed: int = field(init=False)  # drafter slots filled
    num_scored: int = 0  # leading prompt positions whose next token's log-probability is known; see `to_score`
    num_cached: int | None = None  # prompt tokens found in the prefix cache when it first joined; None before that
    arrived_s: float = field(default_factory=lambda: time.perf_counter())
    queued_s: float = 0.0  # seconds from its arrival until it first joined
    stats: RequestStats = field(default_factory=RequestStats)
    _token_counter: TokenCounter = field(init=False)
    _output: array[int] = field(default_factory=partial(array, "i"))  # the grammar's, if there is one

    def __post_init__(self) -> None:
        self.id, self.tokens = self.submit.id, list(self.submit.prompt)
        self.num_prompt = len(self.tokens)
        self.tree_rows = 1 + (self.limits.num_speculative_tokens if self.limits else 0)
        self.is_auto = self.limits is not None and self.limits.auto
        self.has_drafter = self.limits is not None
        self.num_fed = self.first_draft_slot
        self.is_constrained = not self.submit.sampling.constraints.is_empty
        self.has_grammar = bool(self.submit.sampling.constraints.grammar)
        self._token_counter = TokenCounter(self.submit.sampling.constraints, self.submit.prompt)
        if (resumption := self.submit.resumption) is not None:
            self.stats, self.num_scored = resumption.stats, resumption.num_prompt_logprobs
            self.append(resumption.output)

    def forget(self) -> None:
        """Reset everything that the request's pages hold, when they are released."""
        self.pages, self.num_computed, self.num_fed = array("i"), 0, self.first_draft_slot
        self.seat = self.read_seat = 0

    def share(self, pages: list[int], page_size: int, num_drafted: int) -> None:
        """Begin with shared pages: their positions are computed, and those of the first `num_drafted` are fed."""
        self.pages, self.num_computed = array("i", pages), len(pages) * page_size
        self.num_fed = max(self.num_fed, num_drafted * page_size)

    def append(self, tokens: list[int]) -> None:
        """Commit output tokens."""
        self.tokens += tokens
        if self.is_constrained:
            self._token_counter.add(tokens)
        if self.has_grammar:
            self._output.extend(tokens)

    def new_tokens(self, verdict: Verdict) -> NewTokens:
        """Return the verdict's tokens up to a stop token or the length limit."""
        path, tokens = verdict.path, verdict.tokens
        room = self.num_prompt + self.submit.max_tokens - len(self.tokens)
        if len(tokens) < room and self.end_token_ids.isdisjoint(tokens):
            return NewTokens(list(tokens), path, len(path), None, None)
        for count, token in enumerate(tokens[:room], start=1):
            if token in self.end_token_ids:
                return NewTokens(list(tokens[:count]), path, min(len(path), count), "stop", token)
        reason = "length" if len(tokens) >= room else None
        return NewTokens(list(tokens[:room]), path, min(len(path), room), reason, None)

    def logits_state(self, eos_token_ids: tuple[int, ...]) -> LogitsState | None:
        """Return what drafter and target need to constrain the next tokens; None without constraints."""
        if not self.is_constrained:
            return None
        constraints = self.submit.sampling.constraints
        longest = max(map(len, constraints.bad_words), default=1)
        return LogitsState(
            constraints=constraints,
            # As in vLLM, min_tokens forbids the end token even where it would not end the output.
            end_token_ids=[*self.submit.stop_token_ids, *eos_token_ids],
            counts=self._token_counter.counts(),
            tail=self.tokens[max(self.num_prompt, len(self.tokens) - longest + 1) :],
            num_output=self.num_output,
            id=self.id,
            output=self._output.tobytes(),
        )

    def to_score(self, start: int, stop: int) -> range:
        """Return the positions of a prompt chunk whose next token's log-probability is asked for and still unknown."""
        if self.submit.num_prompt_logprobs is None:
            return range(0)
        return range(max(start, self.num_scored), min(stop, self.num_prompt - 1))

    @property
    def num_shareable(self) -> int:
        """Return how many leading positions a shared page may hold: not those of rows that the request needs itself.

        These are the one before the root, and those that `to_score` still names.
        """
        unknown = self.to_score(0, self.num_prompt)
        return min(unknown.start, self.root - 1) if unknown else self.root - 1

    @property
    def reads_features(self) -> bool:
        """Return whether its drafter is fed the target's states beside tokens."""
        return self.first_draft_slot > 0

    @property
    def order(self) -> tuple[int, float]:
        """Return the request's place among all others, a sort key: lower priorities first, then earlier arrivals."""
        return self.submit.priority, self.arrived_s

    @property
    def num_output(self) -> int:
        """Return the number of output tokens so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def draft_room(self) -> int:
        """Return how many draft tokens may be accepted: one less than max_tokens allows, for the bonus token.

        It never grows. At 0 the request is not drafted for any more.
        """
        return self.num_prompt + self.submit.max_tokens - len(self.tokens) - 1

    @property
    def root(self) -> int:
        """Return the position of the next tree's root. All positions before it are computed first, in chunks."""
        last = len(self.tokens) - 1
        return last if last > self.num_prompt else self.num_prompt  # every step asks, and `max` takes twice as long

    @property
    def is_decoding(self) -> bool:
        """Return whether all positions before the root are computed."""
        return self.num_computed == self.root

    @property
    def num_feedable(self) -> int:
        """Return the drafter slots that can be filled now. Slot j needs token j and, for EAGLE, feature j - 1."""
        computed, known = self.num_computed + 1, len(self.tokens)
        return computed if computed < known else known
