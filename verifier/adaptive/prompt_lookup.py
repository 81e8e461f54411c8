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
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from verifier.request import Request
from workers.types import Verdict

RATE = 0.02  # of averages, once they have 1 / RATE values
_LONGEST = 8
"""Longer matches count as matches of this length."""
_MOST_PLACES = 64
"""The most occurrences compared; it bounds the search in a text that repeats one token."""
_PRIOR_COUNT = 4  # weight of the prior acceptance of a length, in matches
_PRIOR_TOKENS = 4.0  # weight of the prior of a request's factor, in tokens
_PRIOR_LOOKS = 4  # weight of the prior profit, in lookups
_LEAST_WEIGHT = 0.03  # drafts end where the path's probability falls below
_LEAST_PROFIT = 0.01  # below 1 % of a step, a look in every step does not pay
_MARGIN = 1.03  # the required gain: the best drafts are overrated


class Average:
    """The mean of all values at first, then of some 1 / rate recent ones, numbers or arrays.

    `first` counts as `count` values.
    """

    def __init__(self, first: Any, count: int = 1, rate: float = RATE) -> None:
        self.mean, self._count, self._rate = first, count, rate

    def add(self, value: Any) -> None:
        """Take a value into the mean."""
        self._count += 1
        self.mean = self.mean + max(self._rate, 1 / self._count) * (value - self.mean)


class Match(NamedTuple):
    """An earlier occurrence of the end of the text."""

    place: int  # index of the token that follows it
    length: int  # tokens that match, at most 8


class TokenIndex:
    """The occurrences of each token in one text. Adding a token takes constant time."""

    def __init__(self) -> None:
        self.hits = self.expected = _PRIOR_TOKENS  # draft tokens that the text continued with; and as estimated
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


@dataclass(frozen=True, slots=True)
class LookupDraft:
    """A candidate draft: its tokens, and the probability of each but the last that the path is accepted up to it."""

    index: TokenIndex
    length: int  # tokens that matched
    tokens: list[int]  # one more than may be drafted, to learn from the bonus token
    weights: list[float]  # non-increasing


def choose(
    drafts: Sequence[LookupDraft], num_requests: int, ms_of: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[list[int], float]:
    """Return the number of tokens of each draft to verify, and the factor by which the pace rises.

    The pace is the controller's objective. num_requests: of the step. ms_of(nodes, trees): its time with that many
    draft nodes and chains, for arrays of both.
    """
    saved_N = np.concatenate([-np.diff(1 / (1 + np.cumsum([0.0, *draft.weights]))) for draft in drafts])
    owner_N = np.repeat(np.arange(len(drafts)), [len(draft.weights) for draft in drafts])
    # The sort is stable and a chain's later nodes save less, so its nodes stay in order.
    order_N = np.argsort(-saved_N, kind="stable")
    is_first_N = np.diff(owner_N, prepend=-1)[order_N] != 0
    nodes_N, trees_N = np.arange(len(order_N) + 1), np.concatenate([[0], np.cumsum(is_first_N)])
    pace_N = 1 / ((num_requests - np.concatenate([[0.0], np.cumsum(saved_N[order_N])])) * ms_of(nodes_N, trees_N))
    best = int(np.where(nodes_N, pace_N / _MARGIN, pace_N).argmax())
    counts = np.bincount(owner_N[order_N[:best]], minlength=len(drafts)).tolist()
    return counts, float(pace_N[best] / pace_N[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupResult:
    """The result of one lookup: every candidate, and the drafts that are worth verifying."""

    candidates: Mapping[Request, LookupDraft]
    chosen: Mapping[Request, list[int]]
    gain: float
    """The factor by which the pace rises if all chosen drafts are verified."""

    def expected_tokens(self, request: Request) -> float:
        """Return the expected accepted tokens of the request's chosen draft; 0 without one."""
        return sum(self.candidates[request].weights[: len(self.chosen[request])]) if request in self.chosen else 0.0


CountAllowed = Callable[[Request, list[int]], int]
"""Returns how many of some tokens, from the first, a request's grammar allows next."""


class PromptLookup:
    """Finds lookup drafts, and learns how often matches continue and whether lookups pay.

    A draft ends before the first token that the request's grammar forbids.
    """

    def __init__(self, count_allowed: CountAllowed) -> None:
        self._count_allowed = count_allowed
        # How often matches of each length continue: at first 0, 1/3, 1/2, 3/5, ...
        self._chance_L = [Average(length / (length + 2), _PRIOR_COUNT) for length in range(_LONGEST + 1)]
        self.profit = Average(0.1, _PRIOR_LOOKS)  # of a lookup, as a share of the step: optimistic at first
        self._index: WeakKeyDictionary[Request, TokenIndex] = WeakKeyDictionary()

    @property
    def pays(self) -> bool:
        """Return whether recent lookups were worth their time."""
        return self.profit.mean >= _LEAST_PROFIT

    def look(
        self,
        requests: Sequence[Request],
        depth_of: Callable[[Request], int],
        num_requests: int,
        ms_of: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ) -> LookupResult:
        """Find and choose drafts. depth_of: the longest draft of a request. num_requests, ms_of: see `choose`."""
        candidates = {}
        for request in requests:
            assert request.limits is not None
            most = min(request.limits.num_speculative_tokens, depth_of(request))
            if most > 0 and (draft := self._draft(request, most)):
                candidates[request] = draft
        able = [(request, draft) for request, draft in candidates.items() if draft.weights]
        if not able:
            return LookupResult(candidates=candidates, chosen={}, gain=1.0)
        counts, gain = choose([draft for _, draft in able], num_requests, ms_of)
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
                chance, goes_on = self._chance(length), copied == token
                draft.index.expected += chance.mean
                draft.index.hits += goes_on
                chance.add(goes_on)
                if not goes_on:
                    break

    def _chance(self, length: int) -> Average:
        return self._chance_L[min(length, _LONGEST)]

    def _draft(self, request: Request, most: int) -> LookupDraft | None:
        """Return a draft of at most `most` tokens within the request's thresholds; None without a match."""
        index, text, limits = self._index.setdefault(request, TokenIndex()), request.tokens, request.limits
        match = index.find(text)
        if match is None or limits is None:
            return None
        period = text[match.place : match.place + most + 1]
        tokens = (period * -(-(most + 1) // len(period)))[: most + 1]
        tokens = tokens[: self._count_allowed(request, tokens)]
        weights: list[float] = []
        weight = 1.0
        for length in range(match.length, match.length + min(most, len(tokens))):
            chance = min(1.0, index.hits / index.expected * self._chance(length).mean)
            if weight * chance < _LEAST_WEIGHT or chance < limits.min_prob or weight < limits.path_prob:
                break
            weight *= chance
            weights.append(weight)
        return LookupDraft(index, match.length, tokens, weights)
