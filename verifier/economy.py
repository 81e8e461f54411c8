"""What `auto` knows and decides before a step: what things cost here, how far drafts can be trusted, whether to draft.

Measured time steers. From what past steps were paid and brought, a step that drafts for the k most promising of the
requests under `auto` is expected to take draft_ms(k) + rest_ms(k), and to bring request r 1 + gain_r tokens, gain_r = 0
without drafts. Chosen is the k for which a token more for everybody takes least:

    (draft_ms(k) + rest_ms(k)) x sum over requests of 1 / (1 + gain_r)

k = 0, plain decoding, is one of the choices. This is what makes n requests of a length finish soonest. (Tokens per
millisecond of the step at hand would not: they are most if a few easy requests are drafted for at the expense of the
others, which then go on alone.) The choice between drafting and not drafting is put to the test (`verifier.switch`).
How large the trees of those k are is then up to the drafter (`drafter.budget`), by the same numbers.

Who is not drafted for may have a copy of earlier text instead (`verifier.lookup`), which costs no message and no draft.
Whether drafting is on is decided without regard to copies; in a step in which it is on, whoever has a copy that is
expected to bring more gets the copy. Everything here depends on past steps alone, so that it may decide about sampled
trees too.
Legend: B requests, N packed rows, K choices.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from verifier.bills import Drafting, StepPrices
from verifier.calibration import Calibration
from verifier.costs import RowCosts
from verifier.drafts import Drafts
from verifier.feeds import Feed, backlog, is_due, within_a_message
from verifier.lookup import Lookup
from verifier.request import Request
from verifier.scheduler import Step
from verifier.switch import Switch
from workers.config import PruneConfig
from workers.types import DraftCosts, DraftReply, Verdict

_RATE_OF_REQUEST, _RATE_OF_ALL = 0.1, 0.05
_LOOK_EVERY = 96  # steps between two looks for something to copy, while copies do not pay
_FADE = 0.5  # whenever a plain step is priced: what sets a request apart is forgotten while nothing is drafted


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

    def __init__(self, verify: RowCosts, prune: PruneConfig, *, most_fed: int, max_backlog: int) -> None:
        self._most_fed, self._max_backlog, self._copies = most_fed, max_backlog, prune.copies
        self._prices = StepPrices(verify, prune.prices)
        self._switch = Switch()
        self._calibration = Calibration()
        self._lookup = Lookup()
        # What a tree adds and what it takes; hopeful until seen.
        self._tree = _Average(np.array([2.0, 4.0]))  # tokens gained, nodes verified
        self._growth = _Average(np.array([3.0, 4.0]))  # levels of a batch, nodes run per tree
        self._missed = {False: 1.0, True: 1.0}  # what steps took over their price lately, without and with copies
        self._num_steps = 0
        self._had_nodes = False  # a step before, and no plain one has been priced since
        # Of this step: whether it is plain unasked, who is drafted for, what that took, what looking for copies took.
        self._rests = False
        self._drafted: set[Request] = set()
        self._draft_ms = 0.0
        self._looked: _Looked | None = None

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
        self._num_steps, self._draft_ms, self._drafted = self._num_steps + 1, 0.0, set()
        self._look(step, depth_of)
        rests = self._rests = self._switch.rests(len(step.decode))
        if rests:
            requests = [r for r in requests if not r.is_auto or is_due(r, self._max_backlog)]
        feeds = {r: feed for r in requests if (feed := next_feed(r)) is not None}
        auto = [r for r, feed in feeds.items() if feed.num_nodes and r.is_auto]
        others = [r for r, feed in feeds.items() if feed.num_nodes and not r.is_auto]
        chosen = set(self._choose(auto, others, step)) if auto and not rests else set()
        kept = {}
        for request, feed in feeds.items():
            if request in chosen or not request.is_auto:
                kept[request] = feed
            elif is_due(request, self._max_backlog):
                kept[request] = Feed(feed.tokens, 0, 0)
        return within_a_message(kept, self._most_fed, self._max_backlog)

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
        able = [request for request in step.decode if request.is_auto and not request.rule.is_sampled]
        if able:
            began = time.perf_counter()
            ms_of, excess = self._prices.step_ms_of(step), self._missed[True] / self._missed[False]
            self._lookup.look(able, depth_of, len(step.decode), lambda n, trees: ms_of(n, trees) * (excess if n else 1))
            self._looked = _Looked(0.0 if self._prices.is_given else 1e3 * (time.perf_counter() - began), ms_of)

    def _choose(self, auto: list[Request], others: list[Request], step: Step) -> list[Request]:
        copies = self._lookup.chosen
        ranked = sorted(auto, key=self._gain_of, reverse=True)
        pace_K = self._paces(ranked, others, step, copying=False)
        best = 1 + int(pace_K[1:].argmax())
        advantage = float(pace_K[best] / pace_K[0])
        if not self._prices.has_drafted:  # guesses switch nothing off
            advantage = max(1.0, advantage)
        self._switch.weigh(advantage, len(step.decode))
        if not self._switch.drafts:
            return []
        if not self._switch.is_on:
            return [min(auto, key=lambda request: (request in copies, backlog(request)))]  # the cheapest trial
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
        bill_K = Drafting(messages=1, fed=fed_K, levels=num_levels - 1, run=num_run * trees_K)
        draft_ms_K = self._prices.draft_ms(bill_K) * (trees_K > 0)
        if copying:
            copies = self._lookup.chosen
            own = [(self._saving_of_copy(r), len(copies.get(r, ())), r in copies) for r in ranked]
            saved_by_copies_K, copied_K, chains_K = np.cumsum([(0.0, 0, False), *own[::-1]], axis=0)[::-1].T
            saved_K, nodes_K, trees_K = saved_K + saved_by_copies_K, nodes_K + copied_K, trees_K + chains_K
        step_ms_K = self._prices.step_ms(step, nodes_K, trees_K)
        return 1 / ((len(step.decode) - saved_K) * (step_ms_K + draft_ms_K))

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
        return num_tokens + backlog(request) / max(1.0, num_steps)

    def costs(self, feeds: dict[Request, Feed], step: Step) -> DraftCosts | None:
        """For the drafter; None if nobody asks for `auto`."""
        if not any(feed.num_nodes and r.is_auto for r, feed in feeds.items()):
            return None
        return self._prices.for_drafter(feeds, step, self._calibration.fit_D2, is_trial=self._switch.is_trial)

    # ---- after it

    def learn_draft(self, feeds: dict[Request, Feed], reply: DraftReply, seconds: float) -> None:
        """What an exchange with the drafter took."""
        self._draft_ms = self._prices.exchange_took(self._num_steps, feeds, reply, seconds)
        self._drafted = {r for r, feed in feeds.items() if feed.num_nodes}
        if num_trees := len(reply.trees.offsets) - 1:
            self._growth.add(np.array([reply.num_levels, reply.num_run / num_trees]))

    def learn(self, step: Step, drafts: Drafts, verdicts: list[Verdict], seconds: float) -> None:
        """What a step brought, and what it took. Costs nothing where nobody asks for `auto`."""
        if self._teaches_nothing:
            return self._switch.pay(1e3 * seconds, 0.0)
        if not any(request.is_auto for request in step.decode):
            return
        num_nodes, num_trees = drafts.num_nodes, drafts.num_trees
        rest_ms = self._prices.rest_took(step, num_nodes, num_trees, 1e3 * seconds - self._draft_ms)
        if self._looked is not None:
            self._learn_copies(self._looked, step, drafts, verdicts, rest_ms)
        otherwise_ms = self._otherwise_ms(step, verdicts) if self._switch.is_trial else 0.0
        self._switch.pay(self._draft_ms + rest_ms, otherwise_ms)
        # A plain step after one with nodes is priced, too: or nodes would be blamed for what all steps take longer.
        if self._draft_ms or num_nodes or self._had_nodes or self._switch.is_priced:
            self._prices.learn_rest(self._num_steps, step, num_nodes, num_trees, rest_ms)
            self._learn_trees(step, drafts, verdicts)
        # A step with prompts teaches no prices: the next one has to.
        self._had_nodes = num_nodes > 0 or (self._had_nodes and bool(step.prefill))

    @property
    def _teaches_nothing(self) -> bool:
        """Whether the step is one of the many plain ones, of which little more is asked than the time."""
        told = self._draft_ms or self._looked is not None or self._had_nodes or self._switch.is_priced
        return self._rests and not (told or self._prices.is_given)

    def _otherwise_ms(self, step: Step, verdicts: list[Verdict]) -> float:
        """What a try's tokens would have taken without it."""
        num_tokens = sum(len(verdict.tokens) for verdict in verdicts[: len(step.decode)]) / len(step.decode)
        gain = self._switch.advantage if self._switch.is_on else self._lookup.gain
        return self._prices.prompts_ms(step) + num_tokens * float(self._prices.step_ms(step, 0, 0)) / gain

    def _learn_trees(self, step: Step, drafts: Drafts, verdicts: list[Verdict]) -> None:
        """What the drafter's trees brought, of whoever left their size to us."""
        own = list(zip(step.decode, drafts.verified, verdicts, strict=False))
        auto_B = [r in self._drafted and r.is_auto and any(nodes) for r, nodes, _ in own]
        if not any(auto_B):
            if self._switch.is_priced:
                for request in step.decode:
                    request.draft_bonus *= 1 - _FADE
            return
        drafted = [(r, verdict) for (r, _, verdict), is_mine in zip(own, auto_B, strict=True) if is_mine]
        for request, verdict in drafted:
            request.draft_bonus += _RATE_OF_REQUEST * (len(verdict.path) - self._gain_of(request))
        self._tree.add(np.array([(len(verdict.path), verdict.num_verified) for _, verdict in drafted]).mean(axis=0))
        is_shown_B = [is_mine and not r.rule.is_sampled for (r, _, _), is_mine in zip(own, auto_B, strict=True)]
        self._calibration.learn(drafts.trees, verdicts[: len(step.decode)], np.array(is_shown_B))

    def _learn_copies(
        self, looked: _Looked, step: Step, drafts: Drafts, verdicts: list[Verdict], rest_ms: float
    ) -> None:
        copied = [request for request, is_copied in zip(step.decode, drafts.copied, strict=True) if is_copied]
        brought = None
        num_tokens = sum(len(verdict.tokens) for verdict in verdicts[: len(step.decode)])
        own = dict(zip(step.decode, verdicts, strict=False))
        if self._drafted:  # what copies bring beyond the drafts in whose place they are
            brought = sum(len(own[r].path) - self._gain_of(r) for r in copied) / num_tokens
        elif not step.prefill:  # prompts would blur what a copy's rows cost
            has_copies = drafts.num_nodes > 0
            excess = min(rest_ms / looked.ms_of(drafts.num_nodes, drafts.num_trees), 2.0) - self._missed[has_copies]
            self._missed[has_copies] += _RATE_OF_ALL * excess
            usual_ms = looked.ms_of(0, 0) * self._missed[False] / (self._switch.advantage if self._switch.is_on else 1)
            brought = num_tokens / len(step.decode) * usual_ms / rest_ms - 1 if copied else 0.0
        profit = None if brought is None else brought - looked.took_ms / rest_ms
        self._lookup.learn(own, verified=copied, profit=profit)


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
