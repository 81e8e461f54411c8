"""Defines what a request asks of an engine: acceptance rule, tree limits, sampling parameters, constraints.

Like all that the service front imports at once, this module does without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from workers.config import TreeRules


class Rule(IntEnum):
    """How a request's drafts are chosen and verified. Fixed at admission, because changing it later biases the output.

    Compare arrays with `.value`: comparing them with the member itself takes numpy ten times as long.
    """

    COUPLED = 0  # children follow the target's own noise; a child is accepted if the target draws it
    TARGET_ONLY = 1  # children are the draft's most likely tokens; a child is accepted if the target draws it
    TRAVERSAL = 2  # children are sampled from the draft; traversal verification (on chains: block verification)
    RECURSIVE = 3  # children are sampled from the draft; recursive rejection

    @property
    def is_sampled(self) -> bool:
        """True for rules that need draft probabilities."""
        return self >= Rule.TRAVERSAL


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLimits(TreeRules[float]):
    """Limits of one request's trees: the server's TreeConfig narrowed by the request's `speculative` object."""

    num_speculative_tokens: int
    auto: bool = False  # `auto` chooses node budgets from calibrated acceptance probabilities and measured costs


class HeadAction(IntEnum):
    """Names what a drafter does with another head."""

    TAKE = 0  # load it and draft with it
    SCORE = 1  # load it and score it beside the serving head; it drafts nothing
    TELL = 2  # of the head being scored: the scores so far
    END = 3  # the same, and forget it


class PruneReason(IntEnum):
    """Why a node was kept out of the tree that is verified."""

    KEPT = 0  # it was not
    MIN_PROB = 1
    PATH_PROB = 2
    COST = 3  # under `auto`: it costs more to verify, or to draft, than it is worth


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """One request's logits processors: penalties, biases and masks, which depend on the tokens so far."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: list[list[int]] = field(default_factory=list)  # token sequences that must not be completed
    allowed_token_ids: list[int] | None = None  # None = all are allowed
    min_tokens: int = 0  # no end token may come before this many output tokens
    grammar: str = ""  # in llguidance's notation, see `workers.sampling.grammar`; "" = none

    @property
    def is_empty(self) -> bool:
        """True if no logit is ever edited."""
        return self == _UNCONSTRAINED

    @property
    def penalties(self) -> tuple[float, float, float]:
        """The repetition (1 = none), frequency and presence penalties."""
        return self.repetition_penalty, self.frequency_penalty, self.presence_penalty

    @property
    def has_penalties(self) -> bool:
        """True if any penalty is set."""
        return self.penalties != (1, 0, 0)


_UNCONSTRAINED = Constraints()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """One request's validated sampling parameters. Temperature 0 is greedy; top_k 0 and top_p 1 are disabled."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # any 64-bit value
    constraints: Constraints = _UNCONSTRAINED
    num_logprobs: int | None = None  # most likely tokens to report with each emitted one; None = no logprobs
    logprob_token_ids: list[int] | None = None  # with num_logprobs: report these instead of the most likely ones
