"""What `auto` knows and decides before a step: what things cost here, how far drafts can be trusted, whether to draft.

Measured time steers. From what past steps were paid and brought, a step that drafts for the k most promising of the
requests under `auto` is expected to take draft_ms(k) + rest_ms(k), and to bring request r 1 + gain_r tokens, gain_r = 0
without drafts. Chosen is the k for which a token more for everybody takes least:

    (draft_ms(k) + rest_ms(k)) x sum over requests of 1 / (1 + gain_r)

k = 0, plain decoding, is one of the choices. This is what makes n requests of a length finish soonest. (Tokens per
millisecond of the step at hand would not: they are most if a few easy requests are drafted for at the expense of the
others, which then go on alone.) The choice between drafting and not drafting is put to the test: the other one is tried
for a step now and then, as often as a hundredth of the time, or less where there is little hope, pays for what is lost
by it. How large the trees of those k are is then up to the drafter (`drafter.budget`), by the same numbers.

Who is not drafted for may have a copy of earlier text instead (`verifier.lookup`), which costs no message and no draft.
Whether drafting is on is decided without regard to copies; in a step in which it is on, whoever has a copy that is
expected to bring more gets the copy. Everything here depends on past steps alone, so that it may decide about sampled
trees too.
Legend: B requests, N packed rows, K choices.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from verifier.calibration import Calibration
from verifier.costs import Bill, RowCosts, given
from verifier.drafts import Drafts
from verifier.lookup import Lookup
from verifier.pack import Feed
from verifier.request import Request
from verifier.scheduler import Step
from workers.config import PruneConfig
from workers.types import DraftCosts, DraftReply, Verdict

_TRY_SHARE = 0.01  # of all time may be lost to tries of what is expected to be nearly as good as what is chosen
_TRY_EVERY = 8  # steps between two tries, at least; while drafting is off, between two plain steps that are priced
_LOOK_EVERY = 16  # steps between two looks at whether drafting would pay, while it is off, or copies, while they do not
_HYSTERESIS = 1.05
_RATE_OF_REQUEST, _RATE_OF_ALL = 0.1, 0.05
_UNPAID = 2  # first exchanges that bring trees: what the drafter has not met yet is loaded and compiled in them
_FADE = 0.3  # every 8 steps: what sets a request apart is forgotten while nothing is drafted

_MEASURED = PruneConfig()

_Amount = Any  # a number or, for several bills at once, an array


class _Drafting(NamedTuple):
    """What drafting is billed by."""

    messages: _Amount = 0.0
    fed: _Amount = 0.0  # rows
    levels: _Amount = 0.0  # beyond the first
    run: _Amount = 0.0  # nodes on those; all there are, where trees grow at once


class _Rest(NamedTuple):
    """What the rest of a step is billed by. What the table of rows does not know, such as how attention copes with many
    requests of several rows, is billed by having trees at all and by tree."""

    steps: _Amount = 0.0
    table_ms: _Amount = 0.0
    requests: _Amount = 0.0
    has_trees: _Amount = 0.0
    trees: _Amount = 0.0


class _Looked(NamedTuple):
    """What looking for copies took, and what the step takes with so many nodes in so many trees."""

    took_ms: float
    ms_of: Callable[[int, int], float]


class Economy:
    """Owned by the engine, which asks of every step: `worthwhile`; `costs` and `learn_draft`, if the drafter is to hear
    anything; `copies`; `learn`.

    verify: what start-up measured; the prices of `prune` are believed instead. most_fed: rows of one message to the
    drafter. max_backlog: tokens that it may be owed by a request that it does not draft for.
    """

    def __init__(
        self, verify: RowCosts, prune: PruneConfig = _MEASURED, *, most_fed: int = 2048, max_backlog: int = 256
    ) -> None:
        self._most_fed, self._max_backlog, self._copies = most_fed, max_backlog, prune.copies
        self._is_given = prune.prices is not None
        if (prices := prune.prices) is not None:
            self._verify = given(prices)
            self._draft_bill = Bill(_Drafting(messages=prices.draft, levels=prices.level))
            self._rest_bill = Bill(_Rest(table_ms=1.0))
        else:
            self._verify = verify
            row = float(verify.ms(1))
            draft = _Drafting(messages=0.2 * row, fed=0.01 * row, levels=0.1 * row, run=0.01 * row)
            self._draft_bill = Bill(draft, doubts=draft, has_scale=False)
            self._rest_bill = Bill(
                _Rest(steps=0.05 * row, table_ms=1.0, requests=0.02 * row, has_trees=0.02 * row, trees=0.02 * row),
                doubts=_Rest(steps=0.1 * row, table_ms=0.25, requests=0.05 * row, has_trees=0.3 * row, trees=0.1 * row),
            )
        self._calibration = Calibration()
        self._lookup = Lookup()
        self._drafted: set[Request] = set()  # in this step
        self._looked: _Looked | None = None  # for copies in this step
        self._missed = {False: 1.0, True: 1.0}  # what steps took over their price lately, without and with copies
        self._table_ms = lru_cache(maxsize=2)(self._verify.ms_up_to)  # the batch is mostly that of the step before
        # What a tree adds and what it takes; hopeful until seen.
        self._tree = _Average(np.array([2.0, 4.0]))  # tokens gained, nodes verified
        self._growth = _Average(np.array([3.0, 4.0]))  # levels of a batch, nodes run per tree
        self._is_on = True
        self._is_trial = False
        self._waited = _TRY_EVERY - 2  # the first try is soon: all is guessed yet
        self._owed_ms = 0.0  # lost to tries, beyond their share so far
        self._advantage = 1.0  # of drafting, as expected of the last step
        self._num_weighed = 0  # requests of the last step that was weighed
        self._num_steps = self._num_exchanges = 0
        self._draft_ms = 0.0  # paid in this step

    # ---- before a step

    def worthwhile(
        self,
        requests: list[Request],
        next_feed: Callable[[Request], Feed | None],
        step: Step,
        depth_of: Callable[[Request], int],
    ) -> dict[Request, Feed]:
        """What the drafter shall hear of: no trees that do not pay, and no feeds without trees that can wait. depth_of:
        how long a copy for a request may be."""
        self._num_steps, self._draft_ms, self._is_trial = self._num_steps + 1, 0.0, False
        self._drafted = set()
        self._look(step, depth_of)
        rests = not (self._is_on or self._may_try or self._is_time_to_weigh(len(step.decode)))
        if rests:
            self._waited += 1
            requests = [r for r in requests if not _is_auto(r) or self._is_due(r)]
        feeds = {r: feed for r in requests if (feed := next_feed(r)) is not None}
        auto = [r for r, feed in feeds.items() if feed.num_nodes and _is_auto(r)]
        others = [r for r, feed in feeds.items() if feed.num_nodes and not _is_auto(r)]
        chosen = set(self._choose(auto, others, step)) if auto and not rests else set()
        kept = {}
        for request, feed in feeds.items():
            if request in chosen or not _is_auto(request):
                kept[request] = feed
            elif self._is_due(request):
                kept[request] = Feed(feed.tokens, 0, 0)
        return kept if _num_fed(kept) <= self._most_fed else self._within_a_message(kept)

    def _is_due(self, request: Request) -> bool:
        """Whether a request must be fed even without a tree."""
        has_sharers = request.is_repeated and request.num_fed < request.num_prompt
        return has_sharers or _backlog(request) > self._max_backlog

    def _within_a_message(self, feeds: dict[Request, Feed]) -> dict[Request, Feed]:
        """As much of them as may be sent at once, what is due first. Who is not fed whole gets no tree."""
        room, sent = self._most_fed, {}
        for request in sorted(feeds, key=lambda r: (_is_auto(r), not self._is_due(r))):
            feed = feeds[request]
            if len(feed.tokens) <= room:
                sent[request] = feed
            elif room > 0:
                sent[request] = Feed(feed.tokens[:room], 0, 0)
            room -= len(feed.tokens)
        return {request: sent[request] for request in feeds if request in sent}

    def copies(self) -> dict[Request, list[int]]:
        """Drafts for the step's requests under `auto` that the drafter made none for, as far as they pay: what followed
        the same tokens earlier in their text."""
        return {r: tokens for r, tokens in self._lookup.chosen.items() if r not in self._drafted}

    def _look(self, step: Step, depth_of: Callable[[Request], int]) -> None:
        """For something to copy; rarely, while that brings less than it takes."""
        self._lookup.forget()
        self._looked = None
        if not self._copies or not self._lookup.pays and self._num_steps % _LOOK_EVERY:
            return
        able = [request for request in step.decode if _is_auto(request) and not request.rule.is_sampled]
        if able:
            began = time.perf_counter()
            ms_of, excess = self._prices(step), self._missed[True] / self._missed[False]
            self._lookup.look(able, depth_of, len(step.decode), lambda n, trees: ms_of(n, trees) * (excess if n else 1))
            self._looked = _Looked(0.0 if self._is_given else 1e3 * (time.perf_counter() - began), ms_of)

    def _choose(self, auto: list[Request], others: list[Request], step: Step) -> list[Request]:
        copies, self._num_weighed = self._lookup.chosen, len(step.decode)
        ranked = sorted(auto, key=self._gain_of, reverse=True)
        pace_K = self._paces(ranked, others, step, copying=False)
        best = 1 + int(pace_K[1:].argmax())
        self._weigh(float(pace_K[best] / pace_K[0]))
        if self._is_on == self._is_trial:
            return []
        if not self._is_on:
            return [min(auto, key=lambda request: (request in copies, _backlog(request)))]  # the cheapest trial
        if copies:
            ranked = sorted(auto, key=lambda r: self._saving_of(r) - self._saving_of_copy(r), reverse=True)
            best = int(self._paces(ranked, others, step, copying=True).argmax())
        return ranked[:best]

    def _paces(self, ranked: list[Request], others: list[Request], step: Step, *, copying: bool) -> np.ndarray:
        """Relative to each other, with the first 0 .. K requests drafted for and, when copying, copies for the rest."""
        _, num_nodes = self._tree.mean
        num_levels, num_run = self._growth.mean
        count_K = np.arange(len(ranked) + 1)
        saved_K = np.array([sum(map(self._saving_of, others)), *map(self._saving_of, ranked)]).cumsum()
        trees_K = count_K + len(others)
        nodes_K = sum(r.limits.num_nodes for r in others if r.limits) + count_K * num_nodes
        fed_K = np.array([sum(map(self._fed_per_step, others)), *map(self._fed_per_step, ranked)]).cumsum()
        bill_K = _Drafting(messages=1, fed=fed_K, levels=num_levels - 1, run=num_run * trees_K)
        draft_ms_K = self._draft_bill.price(*bill_K) * (trees_K > 0)
        if copying:
            copies = self._lookup.chosen
            own = [(self._saving_of_copy(r), len(copies.get(r, ())), r in copies) for r in ranked]
            saved_by_copies_K, copied_K, chains_K = np.cumsum([(0.0, 0, False), *own[::-1]], axis=0)[::-1].T
            saved_K, nodes_K, trees_K = saved_K + saved_by_copies_K, nodes_K + copied_K, trees_K + chains_K
        return 1 / ((len(step.decode) - saved_K) * (self._step_ms(step, nodes_K, trees_K) + draft_ms_K))

    def _weigh(self, advantage: float) -> None:
        """Settles whether drafting is on and whether this step tries the opposite. `advantage`: the expected pace with
        drafts over the one without."""
        self._advantage = advantage
        prefers = advantage * _HYSTERESIS > 1 if self._is_on else advantage > _HYSTERESIS
        if prefers != self._is_on:
            self._is_on, self._waited = prefers, 0
        self._waited += 1
        self._is_trial = self._may_try
        if self._is_trial:
            self._waited = 0

    @property
    def _may_try(self) -> bool:
        return self._waited > _TRY_EVERY and not self._owed_ms

    def _is_time_to_weigh(self, num_decoding: int) -> bool:
        """While drafting is off: rarely, as that takes time itself, or when the batch has become another one."""
        is_other_batch = num_decoding > 0 and 4 * abs(num_decoding - self._num_weighed) > self._num_weighed
        return is_other_batch or self._waited % _LOOK_EVERY == 0

    def _gain_of(self, request: Request) -> float:
        return max(0.0, float(self._tree.mean[0]) + request.draft_bonus)

    def _saving_of(self, request: Request) -> float:
        """With drafts."""
        return _saving(self._gain_of(request))

    def _saving_of_copy(self, request: Request) -> float:
        return _saving(self._lookup.expected(request)) if request in self._lookup.chosen else 0.0

    def _fed_per_step(self, request: Request) -> float:
        """Rows: the tokens it gains, and what the drafter is owed, spread over the steps that it may still take."""
        num_tokens = 1 + self._gain_of(request)
        num_steps = (request.submit.max_tokens - request.num_output) / num_tokens
        return num_tokens + _backlog(request) / max(1.0, num_steps)

    def _step_ms(self, step: Step, num_nodes: np.ndarray | float, num_trees: np.ndarray | float) -> np.ndarray:
        """What a step with so many nodes takes beside drafting and prompts: those must be computed some time whatever
        is drafted, and make no token of this step dearer."""
        table_ms = self._verify.ms(_num_rows(step) + num_nodes)
        has_trees = np.minimum(num_trees, 1)
        bill = _Rest(steps=1, table_ms=table_ms, requests=len(step.decode), has_trees=has_trees, trees=num_trees)
        return self._rest_bill.price(*bill) - self._prompts_ms(step)

    def _prompts_ms(self, step: Step) -> float:
        """What the step's prompts add to it."""
        if not step.prefill:
            return 0.0
        table_ms = self._verify.ms(_num_rows(step)) - self._verify.ms(len(step.decode))
        return float(self._rest_bill.price(*_Rest(table_ms=table_ms)))

    def _otherwise_ms(self, step: Step, verdicts: list[Verdict]) -> float:
        """What a try's tokens would have taken without it."""
        num_tokens = sum(len(verdict.tokens) for verdict in verdicts[: len(step.decode)]) / len(step.decode)
        usual_ms = float(self._step_ms(step, 0, 0)) / (self._advantage if self._is_on else self._lookup.gain)
        return self._prompts_ms(step) + num_tokens * usual_ms

    def costs(self, feeds: dict[Request, Feed], step: Step) -> DraftCosts | None:
        """For the drafter; None if nobody asks for `auto`."""
        if not any(feed.num_nodes and _is_auto(r) for r, feed in feeds.items()):
            return None
        num_rows, most = _num_rows(step), sum(feed.num_nodes for feed in feeds.values())
        num_trees = sum(feed.num_nodes > 0 for feed in feeds.values())
        knots = self._verify.rows_T - num_rows
        nodes_T = np.array([0, *knots[(knots > 0) & (knots < most)], most])
        bills = _Drafting(messages=1, fed=_num_fed(feeds)), _Drafting(levels=1), _Drafting(run=1)
        prices = [self._draft_bill.price(*bill) for bill in bills]
        return DraftCosts(
            nodes_T=torch.from_numpy(nodes_T.astype(np.int32)),
            verify_ms_T=torch.from_numpy(self._step_ms(step, nodes_T, num_trees).astype(np.float32)),
            draft_ms_3=torch.tensor(prices, dtype=torch.float32),
            sure_1=torch.tensor([len(step.decode)], dtype=torch.float32),
            calibration_D2=torch.from_numpy(self._calibration.fit_D2),
        )

    def _prices(self, step: Step) -> Callable[[int, int], float]:
        """What a step takes with so many nodes in so many trees: `_step_ms`, for one at a time and many of them."""
        most = sum(r.limits.num_nodes for r in step.decode if r.limits)
        table_ms_N = self._table_ms(_num_rows(step), most)
        plain = _Rest(steps=1, requests=len(step.decode))
        terms = plain, _Rest(table_ms=1), _Rest(has_trees=1), _Rest(trees=1)
        plain_ms, scale, trees_ms, tree_ms = (float(self._rest_bill.price(*bill)) for bill in terms)
        plain_ms -= self._prompts_ms(step)
        return lambda nodes, trees: (
            plain_ms + scale * table_ms_N[nodes] + (trees_ms + trees * tree_ms if trees else 0.0)
        )

    # ---- after it

    def learn_draft(self, feeds: dict[Request, Feed], reply: DraftReply, seconds: float) -> None:
        """What an exchange with the drafter took."""
        bill = _Drafting(messages=1, fed=_num_fed(feeds), levels=max(reply.num_levels - 1, 0), run=reply.num_run)
        self._draft_ms = float(self._draft_bill.price(*bill)) if self._is_given else 1e3 * seconds
        num_trees = len(reply.trees.offsets) - 1
        self._num_exchanges += num_trees > 0
        if self._num_exchanges > _UNPAID:
            self._draft_bill.paid(self._num_steps, self._draft_ms, *bill)
        self._drafted = {r for r, feed in feeds.items() if feed.num_nodes}
        if num_trees:
            self._growth.add(np.array([reply.num_levels, reply.num_run / num_trees]))

    def learn(self, step: Step, drafts: Drafts, verdicts: list[Verdict], seconds: float) -> None:
        """What a step brought, and what it took. Costs nothing where nobody asks for `auto`."""
        if not any(map(_is_auto, step.decode)):
            return
        num_nodes = len(drafts.trees.token_N) - len(step.decode)
        num_trees = sum(map(any, drafts.verified)) if num_nodes else 0
        rest_ms = 1e3 * seconds - self._draft_ms
        if self._is_given:
            rest_ms = float(self._step_ms(step, num_nodes, num_trees)) + self._prompts_ms(step)
        step_ms = self._draft_ms + rest_ms
        if self._looked is not None:
            self._learn_copies(self._looked, step, verdicts, rest_ms, num_nodes, num_trees)
        hope = min(self._advantage, 1 / self._advantage)
        self._owed_ms = max(0.0, self._owed_ms - _TRY_SHARE * hope * step_ms)
        if self._is_trial:
            self._owed_ms += max(0.0, step_ms - self._otherwise_ms(step, verdicts))
        if not self._draft_ms and not num_nodes and self._waited % _TRY_EVERY:
            return
        if not step.prefill:  # prompts would blur what a tree's rows cost
            table_ms = float(self._verify.ms(len(step.decode) + num_nodes))
            has_trees = num_trees > 0
            bill = _Rest(steps=1, table_ms=table_ms, requests=len(step.decode), has_trees=has_trees, trees=num_trees)
            self._rest_bill.paid(self._num_steps, rest_ms, *bill)
        auto_B = [
            r in self._drafted and _is_auto(r) and any(n) for r, n in zip(step.decode, drafts.verified, strict=True)
        ]
        if not any(auto_B):
            if self._waited % _TRY_EVERY == 0:
                for request in step.decode:
                    request.draft_bonus *= 1 - _FADE
            return
        for request, verdict, is_drafted in zip(step.decode, verdicts, auto_B, strict=False):
            if is_drafted:
                request.draft_bonus += _RATE_OF_REQUEST * (len(verdict.path) - self._gain_of(request))
        drafted = [(len(v.path), v.num_verified) for v, is_mine in zip(verdicts, auto_B, strict=False) if is_mine]
        self._tree.add(np.array(drafted).mean(axis=0))
        is_shown_B = [is_auto and not r.rule.is_sampled for r, is_auto in zip(step.decode, auto_B, strict=True)]
        self._calibration.learn(drafts.trees, verdicts[: len(step.decode)], np.array(is_shown_B))

    def _learn_copies(
        self, looked: _Looked, step: Step, verdicts: list[Verdict], rest_ms: float, num_nodes: int, num_trees: int
    ) -> None:
        copies, brought = self.copies(), None
        num_tokens = sum(len(verdict.tokens) for verdict in verdicts[: len(step.decode)])
        own = dict(zip(step.decode, verdicts, strict=False))
        if self._drafted:  # what copies bring beyond the drafts in whose place they are
            brought = sum(len(own[r].path) - self._gain_of(r) for r in copies) / num_tokens
        elif not step.prefill:  # prompts would blur what a copy's rows cost
            missed = self._missed[num_nodes > 0]
            excess = min(rest_ms / looked.ms_of(num_nodes, num_trees), 2.0) - missed
            self._missed[num_nodes > 0] += _RATE_OF_ALL * excess
            usual_ms = looked.ms_of(0, 0) * self._missed[False] / (self._advantage if self._is_on else 1)
            brought = num_tokens / len(step.decode) * usual_ms / rest_ms - 1 if copies else 0.0
        profit = None if brought is None else brought - looked.took_ms / rest_ms
        self._lookup.learn(own, verified=copies, profit=profit)


class _Average:
    """Of all values so far while they are few, then of recent ones; `first` counts as one."""

    def __init__(self, first: np.ndarray) -> None:
        self.mean, self._count = first, 1

    def add(self, value: np.ndarray) -> None:
        self._count += 1
        self.mean = self.mean + max(_RATE_OF_ALL, 1 / self._count) * (value - self.mean)


def _saving(gain: float) -> float:
    """Steps that a token needs less if each brings so many more."""
    return 1 - 1 / (1 + gain)


def _is_auto(request: Request) -> bool:
    return request.limits is not None and request.limits.auto


def _num_rows(step: Step) -> int:
    """Rows of the target that the step holds without any draft."""
    return len(step.decode) + sum(chunk.stop - chunk.start for _, chunk in step.prefill)


def _num_fed(feeds: dict[Request, Feed]) -> int:
    return sum(len(feed.tokens) for feed in feeds.values())


def _backlog(request: Request) -> int:
    """Rows that the drafter has not been fed."""
    return request.num_feedable - request.num_fed
