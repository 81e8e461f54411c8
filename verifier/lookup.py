"""Drafts for nothing: what followed the same tokens earlier in a request's own text (prompt lookup decoding).

This is how requests under `auto` are drafted for where asking the drafter does not pay and, while it is asked, where a
copy looks better than their tree. The places where the text's last token occurred before are walked back, latest first,
as LZ77 compressors do; the occurrence that agrees with the text for longest counts. What followed it is copied, over
and over where the copy reaches the text's end.

The more tokens agree, the likelier the copy goes on. How likely is learnt, for each length and with a factor for each
request, from every token said behind a place that was found, verified as a draft or not. A copy is a chain of
deterministic nodes, accepted when the target draws the same: lossless under `coupled` and target-only acceptance.
Legend: L tokens that agree.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from verifier.request import Request
    from workers.types import Verdict

_LONGEST = 8
"""Longer agreements are all alike."""
_MOST_PLACES = 64
"""Places looked at, so that a text of nothing but commas takes no longer than others."""
# How many tokens the first guess counts for: of the chance that a passage goes on, of a request's factor to it, and of
# what copies bring of what they promise.
_FIRST_COUNT, _FIRST_EXPECTED, _FIRST_PROMISE = 4, 4.0, 20.0
_RATE = 0.02  # how fast old tokens are forgotten
_TEMPERATURES = (0.0, 0.5)  # the hotter a text, the less it repeats itself: up to each of these it is a kind of its own
_LEAST_WEIGHT = 0.03  # no row is as cheap as this
_PROFIT_RATE, _LEAST_PROFIT = 0.02, 0.01  # less than a hundredth of a step is not worth looking in every step
_MARGIN = 1.03  # how much better copies have to look: what looks best was mostly overrated


def first_chance(length: int) -> float:
    """That a passage goes on after `length` tokens of agreement, before anything was seen: a third, a half, .6, ..."""
    return length / (length + 2)


class Passage(NamedTuple):
    """An earlier occurrence of the text's end."""

    place: int  # index of the token that follows it
    length: int  # tokens that agree, at most 8


class Passages:
    """Where the tokens of one text occurred; grows with the text, in a time that does not depend on its length."""

    def __init__(self) -> None:
        self.hits = 0  # tokens that were said as a passage has them ...
        self.expected = 0.0  # ... and how many had to be expected of any request
        self._latest: dict[int, int] = {}
        self._earlier = array("i")  # of each place: the one before it with the same token, -1 = none

    def find(self, tokens: Sequence[int]) -> Passage | None:
        """The longest of the latest agreements with the end of `tokens`: what it was given last, and more.

        Example: the end of [1, 3, 6, 2, 3, 4, 2, 3] agrees for two tokens with what place 5 follows.
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
        return Passage(place, longest) if longest else None

    def _extend(self, tokens: Sequence[int]) -> None:
        latest, earlier = self._latest, self._earlier
        for place in range(len(earlier), len(tokens)):
            token = tokens[place]
            earlier.append(latest.get(token, -1))
            latest[token] = place


class Trust:
    """How likely a passage goes on, by tokens of agreement, in texts of one kind."""

    def __init__(self) -> None:
        self._chance_L = [first_chance(length) for length in range(_LONGEST + 1)]
        self._count_L = [_FIRST_COUNT] * (_LONGEST + 1)
        self._promised = self._kept = _FIRST_PROMISE

    @property
    def faith(self) -> float:
        """What verified copies bring of what they promised: those that look best are overrated."""
        return min(1.0, self._kept / self._promised)

    def verified(self, promised: float, kept: int) -> None:
        """A copy was a draft that was expected to bring so many tokens, and brought so many."""
        self._promised += promised - _RATE * self._promised
        self._kept += kept - _RATE * self._kept

    def chance(self, length: int) -> float:
        return self._chance_L[min(length, _LONGEST)]

    def learn(self, length: int, goes_on: bool) -> None:
        length = min(length, _LONGEST)
        self._count_L[length] += 1
        rate = max(_RATE, 1 / self._count_L[length])
        self._chance_L[length] += rate * (goes_on - self._chance_L[length])


@dataclass(frozen=True, slots=True)
class Copy:
    """What may come next, token by token, and the chance of each of the first to survive as a draft."""

    passages: Passages
    trust: Trust
    length: int  # tokens that agreed
    tokens: list[int]  # one more than may be drafted: what comes behind a copy teaches, too
    weights: list[float]  # never rising

    def learn(self, said: Sequence[int]) -> None:
        """From what was said in its place, as far as it goes and until the first difference."""
        for length, (copied, token) in enumerate(zip(self.tokens, said, strict=False), self.length):
            goes_on = copied == token
            self.passages.expected += self.trust.chance(length)
            self.passages.hits += goes_on
            self.trust.learn(length, goes_on)
            if not goes_on:
                break


class Choice(NamedTuple):
    """How much of each copy to verify, and by what factor tokens per millisecond rise."""

    counts: list[int]
    gain: float


def choose(copies: Sequence[Copy], sure: float, ms_of: Callable[[int, int], float]) -> Choice:
    """As many tokens of the copies as bring most tokens per millisecond.

    sure: tokens that the step yields without them. ms_of(nodes, trees): what it takes with so many nodes in so many
    chains, all of both that the copies add.
    """
    # A chain's nodes stay in order: weights never rise along it, and the sort keeps the order of equals.
    ranked = sorted(((w, i) for i, copy in enumerate(copies) for w in copy.weights), key=itemgetter(0), reverse=True)
    plain_rate = sure / ms_of(0, 0)
    rate, best, num_trees, counts = _MARGIN * plain_rate, 0, 0, [0] * len(copies)
    for num_nodes, (weight, owner) in enumerate(ranked, 1):
        sure += weight
        num_trees += not counts[owner]
        counts[owner] += 1
        if (more := sure / ms_of(num_nodes, num_trees)) > rate:
            best, rate = num_nodes, more
    for _, owner in ranked[best:]:
        counts[owner] -= 1
    return Choice(counts, rate / plain_rate if best else 1.0)


class Lookup:
    """Looks for copies before a step, knows how far to trust them and whether looking pays for itself."""

    def __init__(self) -> None:
        self.chosen: dict[Request, list[int]] = {}
        """The copies of this step that are worth verifying where nothing else is drafted."""
        self.gain = 1.0
        """The factor by which tokens per millisecond rise with all of them."""
        self._found: dict[Request, Copy] = {}
        self._trusts = [Trust() for _ in range(len(_TEMPERATURES) + 1)]
        self._profit = 0.1  # of looking, as a share of the step: recent mean, hopeful at first

    def forget(self) -> None:
        """Nothing was looked for in this step."""
        self.chosen, self.gain, self._found = {}, 1.0, {}

    @property
    def pays(self) -> bool:
        """Whether looking was worth its time lately."""
        return self._profit >= _LEAST_PROFIT

    def look(
        self,
        requests: Sequence[Request],
        depth_of: Callable[[Request], int],
        sure: float,
        ms_of: Callable[[int, int], float],
    ) -> None:
        """depth_of: how long a request's draft may be. sure, ms_of: as `choose` takes them."""
        self.forget()
        for request in requests:
            assert request.limits is not None
            most = min(request.limits.num_nodes, depth_of(request))
            if most > 0 and (copy := self._find(request, most)):
                self._found[request] = copy
        able = [(request, copy) for request, copy in self._found.items() if copy.weights]
        if able:
            counts, self.gain = choose([copy for _, copy in able], sure, ms_of)
            self.chosen = {r: copy.tokens[:count] for (r, copy), count in zip(able, counts, strict=True) if count}

    def expected(self, request: Request) -> float:
        """Tokens that a chosen copy is expected to add."""
        return sum(self._found[request].weights[: len(self.chosen[request])])

    def learn(self, verdicts: Mapping[Request, Verdict], verified: Collection[Request], profit: float | None) -> None:
        """From what was said where there was something to copy. verified: whose copy was its draft; profit: what
        looking brought, as a share of the step, less what it took; None where that cannot be told."""
        for request, copy in self._found.items():
            copy.learn(verdicts[request].tokens)
        for request in verified:
            self._found[request].trust.verified(self.expected(request), len(verdicts[request].path))
        if profit is not None:
            self._profit += _PROFIT_RATE * (profit - self._profit)

    def _find(self, request: Request, most: int) -> Copy | None:
        """A copy of at most so many tokens, within the limits' thresholds; None if there is nothing to copy."""
        passages, text, limits = request.passages, request.tokens, request.limits
        passage = passages.find(text)
        if passage is None or limits is None:
            return None
        period = text[passage.place : passage.place + most + 1]
        tokens = (period * -(-(most + 1) // len(period)))[: most + 1]
        trust = self._trusts[bisect_left(_TEMPERATURES, request.submit.sampling.temperature)]
        factor = (_FIRST_EXPECTED + passages.hits) / (_FIRST_EXPECTED + passages.expected)
        weights: list[float] = []
        weight, faith = 1.0, trust.faith
        for length in range(passage.length, passage.length + most):
            chance = min(1.0, factor * trust.chance(length))
            if weight * chance < _LEAST_WEIGHT or chance < limits.min_prob or weight < limits.path_prob:
                break
            weight *= chance
            weights.append(faith * weight)
        return Copy(passages, trust, passage.length, tokens, weights)
