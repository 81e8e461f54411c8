"""Prompt lookup: drafts copied from a request's own text (Saxena 2023), for requests under `auto` without a tree.

Earlier occurrences of the text's last token are searched, latest first, for the longest match with the text's end. The
tokens behind the match are the draft; they are repeated if they reach the text's end. Longer matches continue with a
higher probability, which is learnt for each match length from every match found, verified or not. A lookup draft is a
chain of deterministic nodes, which is lossless under `coupled` and target-only acceptance.
Legend: L match lengths.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple
from weakref import WeakKeyDictionary

from verifier.request import Request
from workers.types import Verdict

_LONGEST = 8
"""Longer matches count as matches of this length."""
_MOST_PLACES = 64
"""The most occurrences compared; it bounds the search in a text that repeats one token."""
_PRIOR_COUNT = 4  # weight of the prior acceptance of a length, in matches
_PRIOR_TOKENS = 4.0  # weight of the prior of a request's factor, in tokens
_RATE = 0.02  # of the averages, after 1 / _RATE matches
_LEAST_WEIGHT = 0.03  # drafts end where the path's probability falls below
_PROFIT_RATE, _LEAST_PROFIT = 0.02, 0.01  # below 1 % of a step, a look in every step does not pay
_MARGIN = 1.03  # the required gain: the best drafts are overrated


def prior_acceptance(length: int) -> float:
    """Return the prior probability that a match of `length` tokens continues: 1/3, 1/2, 3/5, ..."""
    return length / (length + 2)


class Match(NamedTuple):
    """An earlier occurrence of the end of the text."""

    place: int  # index of the token that follows it
    length: int  # tokens that match, at most 8


class TokenIndex:
    """The occurrences of each token in one text. Adding a token takes constant time."""

    def __init__(self) -> None:
        self.hits = 0  # draft tokens that the text continued with
        self.expected = 0.0  # and how many were expected
        self._latest: dict[int, int] = {}
        self._earlier = array("i")  # for each place, the previous place of the same token; -1 = none

    def find(self, tokens: Sequence[int]) -> Match | None:
        """Return the longest match with the end of `tokens`, the latest of equals.

        `tokens` must extend the text of the last call.

        Example: the end of [1, 3, 6, 2, 3, 4, 2, 3] matches the two tokens before place 5.
        """
        self._extend(tokens)
        last = len(tokens) - 1
        at, place, longest = self._earlier[last], 0, 0
        for _ in range(_MOST_PLACES):
            if at < 0 or longest == _LONGEST:
                break
            length, most = 1, min(_LONGEST, at + 1)
            while length < most and tokens[at - length] == tokens[last - length]:
                length += 1
            if length > longest:
                place, longest = at + 1, length
            at = self._earlier[at]
        return Match(place, longest) if longest else None

    def _extend(self, tokens: Sequence[int]) -> None:
        latest, earlier = self._latest, self._earlier
        for place in range(len(earlier), len(tokens)):
            token = tokens[place]
            earlier.append(latest.get(token, -1))
            latest[token] = place


class AcceptanceEstimator:
    """Estimates the probability that a match of each length continues, as an average over recent matches."""

    def __init__(self) -> None:
        self._mean_L = [prior_acceptance(length) for length in range(_LONGEST + 1)]
        self._count_L = [_PRIOR_COUNT] * (_LONGEST + 1)

    def of(self, length: int) -> float:
        """Return the estimate for matches of `length` tokens."""
        return self._mean_L[min(length, _LONGEST)]

    def observe(self, length: int, goes_on: bool) -> None:
        """Record whether a match of `length` tokens continued."""
        length = min(length, _LONGEST)
        self._count_L[length] += 1
        rate = max(_RATE, 1 / self._count_L[length])
        self._mean_L[length] += rate * (goes_on - self._mean_L[length])


@dataclass(frozen=True, slots=True)
class LookupDraft:
    """A candidate draft: its tokens, and the probability of each but the last that the path is accepted up to it."""

    index: TokenIndex
    length: int  # tokens that matched
    tokens: list[int]  # one more than may be drafted, to learn from the bonus token
    weights: list[float]  # non-increasing


class DraftLengths(NamedTuple):
    """The number of tokens of each draft to verify, and the factor by which tokens per millisecond rise."""

    counts: list[int]
    gain: float


def choose(drafts: Sequence[LookupDraft], base_tokens: float, ms_of: Callable[[int, int], float]) -> DraftLengths:
    """Return the lengths of the drafts that maximise tokens per millisecond.

    base_tokens: tokens of the step without drafts. ms_of(nodes, trees): its time with that many draft nodes and chains.
    """
    # The sort is stable and weights never rise along a chain, so its nodes stay in order.
    ranked = sorted(((w, i) for i, draft in enumerate(drafts) for w in draft.weights), key=itemgetter(0), reverse=True)
    plain_rate = base_tokens / ms_of(0, 0)
    rate, best, num_trees, counts = _MARGIN * plain_rate, 0, 0, [0] * len(drafts)
    tokens = base_tokens
    for num_nodes, (weight, owner) in enumerate(ranked, 1):
        tokens += weight
        num_trees += not counts[owner]
        counts[owner] += 1
        if (more := tokens / ms_of(num_nodes, num_trees)) > rate:
            best, rate = num_nodes, more
    for _, owner in ranked[best:]:
        counts[owner] -= 1
    return DraftLengths(counts, rate / plain_rate if best else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupResult:
    """The result of one lookup: every candidate, and the drafts that are worth verifying."""

    candidates: Mapping[Request, LookupDraft]
    chosen: Mapping[Request, list[int]]
    gain: float
    """The factor by which tokens per millisecond rise if all chosen drafts are verified."""

    def expected_tokens(self, request: Request) -> float:
        """Return the expected accepted tokens of the request's chosen draft; 0 without one."""
        return sum(self.candidates[request].weights[: len(self.chosen[request])]) if request in self.chosen else 0.0


CountAllowed = Callable[[Request, list[int]], int]
"""Returns how many of some tokens, from the first, a request's grammar allows next."""


def allow_all(request: Request, tokens: list[int]) -> int:
    """Return the number of tokens: without a grammar, all are allowed."""
    return len(tokens)


class PromptLookup:
    """Finds lookup drafts, and learns how often matches continue and whether lookups pay.

    A draft ends before the first token that the request's grammar forbids.
    """

    def __init__(self, count_allowed: CountAllowed = allow_all) -> None:
        self._count_allowed = count_allowed
        self._acceptance = AcceptanceEstimator()
        self._profit = 0.1  # of a lookup, as a share of the step: recent mean, optimistic at first
        self._index: WeakKeyDictionary[Request, TokenIndex] = WeakKeyDictionary()

    @property
    def pays(self) -> bool:
        """Return whether recent lookups were worth their time."""
        return self._profit >= _LEAST_PROFIT

    def look(
        self,
        requests: Sequence[Request],
        depth_of: Callable[[Request], int],
        base_tokens: float,
        ms_of: Callable[[int, int], float],
    ) -> LookupResult:
        """Find and choose drafts. depth_of: the longest draft of a request. base_tokens, ms_of: see `choose`."""
        candidates = {}
        for request in requests:
            assert request.limits is not None
            most = min(request.limits.num_speculative_tokens, depth_of(request))
            if most > 0 and (draft := self._draft(request, most)):
                candidates[request] = draft
        able = [(request, draft) for request, draft in candidates.items() if draft.weights]
        if not able:
            return LookupResult(candidates=candidates, chosen={}, gain=1.0)
        counts, gain = choose([draft for _, draft in able], base_tokens, ms_of)
        chosen = {r: draft.tokens[:count] for (r, draft), count in zip(able, counts, strict=True) if count}
        return LookupResult(candidates=candidates, chosen=chosen, gain=gain)

    def observe(self, found: LookupResult, verdicts: Mapping[Request, Verdict]) -> None:
        """Compare every candidate with the tokens that followed, up to the first difference.

        Requests without a verdict have left since the lookup.
        """
        for request, draft in found.candidates.items():
            if request not in verdicts:
                continue
            for length, (copied, token) in enumerate(
                zip(draft.tokens, verdicts[request].tokens, strict=False), draft.length
            ):
                goes_on = copied == token
                draft.index.expected += self._acceptance.of(length)
                draft.index.hits += goes_on
                self._acceptance.observe(length, goes_on)
                if not goes_on:
                    break

    def observe_profit(self, profit: float) -> None:
        """Record the gain of a lookup minus its time, as a share of the step."""
        self._profit += _PROFIT_RATE * (profit - self._profit)

    def _draft(self, request: Request, most: int) -> LookupDraft | None:
        """Return a draft of at most `most` tokens within the request's thresholds; None without a match."""
        index, text, limits = self._index.setdefault(request, TokenIndex()), request.tokens, request.limits
        match = index.find(text)
        if match is None or limits is None:
            return None
        period = text[match.place : match.place + most + 1]
        tokens = (period * -(-(most + 1) // len(period)))[: most + 1]
        tokens = tokens[: self._count_allowed(request, tokens)]
        if not tokens:
            return None
        factor = (_PRIOR_TOKENS + index.hits) / (_PRIOR_TOKENS + index.expected)
        weights: list[float] = []
        weight = 1.0
        for length in range(match.length, match.length + min(most, len(tokens))):
            chance = min(1.0, factor * self._acceptance.of(length))
            if weight * chance < _LEAST_WEIGHT or chance < limits.min_prob or weight < limits.path_prob:
                break
            weight *= chance
            weights.append(weight)
        return LookupDraft(index, match.length, tokens, weights)
