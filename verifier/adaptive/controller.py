"""The adaptive controller: plans what each step drafts, and learns from what the step took and brought.

A step that drafts for the k most promising requests under `auto` is expected to take draft_ms(k) + verify_ms(k), and to
bring request r 1 + gain_r tokens, where gain_r = 0 without drafts. The controller chooses the k for which one more
token for every request takes the least time:

    (draft_ms(k) + verify_ms(k)) x sum over requests of 1 / (1 + gain_r)

k = 0, plain decoding, is one of the choices. This finishes n requests of one length soonest. (The most tokens per
millisecond of the step at hand would favour a few easy requests over the others, which then go on alone.) The gate
(`verifier.adaptive.gate`) decides between drafting and not, and probes the other choice. The drafter then sizes the
trees of the chosen k with the same costs (`drafter.tree.cost_model`).

A request without a tree may get a lookup draft (`verifier.adaptive.prompt_lookup`), which costs no message. Drafting is
switched on or off without regard to them; while it is on, a request gets a lookup draft in place of its tree if that is
expected to bring more. Every decision depends on past steps alone, so it may concern sampled trees too.
Legend: K choices, B requests.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from verifier.adaptive.calibration import Calibration
from verifier.adaptive.cost_model import CostModel, DraftWork, RowCosts
from verifier.adaptive.gate import SpeculationGate
from verifier.adaptive.prompt_lookup import LookupResult, PromptLookup
from verifier.draft_batch import DraftBatch
from verifier.draft_inputs import (
    DraftInput,
    backlog,
    draft_depth,
    is_due,
    max_backlog,
    max_message_rows,
    next_input,
    within_message,
)
from verifier.request import Request
from verifier.scheduler import Step
from workers.config import EngineConfig, PruneConfig
from workers.types import DraftCosts, DraftReply, Verdict

_RATE = 0.05  # of the averages over recent trees
_LOOK_EVERY = 96  # steps between two looks for lookup drafts, while they do not pay


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one step drafts.

    Example: Plan(inputs={a: DraftInput([5, 9], 16, 8), b: DraftInput([7], 0, 0)}, ..., lookup_drafts={b: [3, 4]})
    """

    inputs: Mapping[Request, DraftInput]
    """What the drafter hears. Requests with nodes are drafted for; the others are only fed."""
    costs: DraftCosts | None
    """What the drafter sizes trees by; None if nobody under `auto` is drafted for."""
    lookup_drafts: Mapping[Request, list[int]]
    """Chains for requests that the drafter makes no tree for."""
    found: LookupResult | None
    """What looking for lookup drafts found; None if the step did not look."""
    look_ms: float
    is_probe: bool
    """Whether the step drafts although plain decoding has the better forecast."""
    is_idle: bool
    """Whether drafting is off and the step is a plain one among many."""

    def is_drafted(self, request: Request) -> bool:
        return request in self.inputs and self.inputs[request].num_nodes > 0


class Exchange(NamedTuple):
    """The drafter's answer, and the milliseconds from packing the message to receiving it."""

    reply: DraftReply
    ms: float


class StepOutcome(NamedTuple):
    """What a planned step took and brought."""

    step: Step
    drafts: DraftBatch
    verdicts: list[Verdict]  # of the decoding requests, then of finished prompts
    exchange: Exchange | None
    ms: float  # of the whole step


class Controller:
    """Owned by the engine: one `plan` before each step, one `observe` after it.

    row_costs: the target's forward as timed at start-up; `auto` with given prices believes those instead.
    """

    def __init__(self, config: EngineConfig, row_costs: RowCosts) -> None:
        prune = config.draft.tree.prune if config.draft else PruneConfig()
        self._has_lookup = prune.prompt_lookup
        self._max_rows, self._max_backlog = max_message_rows(config), max_backlog(config)
        self._next_input, self._draft_depth = partial(next_input, config=config), partial(draft_depth, config=config)
        self._costs = CostModel(row_costs, prune.simulated_costs)
        self._gate = SpeculationGate()
        self._calibration = Calibration()
        self._lookup = PromptLookup()
        # Averages over recent trees, optimistic until the first.
        self._tree = _Average(np.array([2.0, 4.0]))  # tokens gained, nodes verified
        self._growth = _Average(np.array([3.0, 4.0]))  # levels of a batch, nodes run per tree
        self._num_steps = 0
        self._had_nodes = False  # a step had draft nodes, and no plain one was measured since

    # ---- before a step

    def plan(self, step: Step, running: list[Request]) -> Plan:
        """The step's drafts: no trees that do not pay, and no inputs without trees that can wait."""
        self._num_steps += 1
        found, look_ms = self._look(step)
        is_idle = self._gate.begin_step(len(step.decode))
        candidates = [r for r in running if not (is_idle and r.is_auto) or is_due(r, self._max_backlog)]
        inputs = {r: own for r in candidates if (own := self._next_input(r)) is not None}
        auto = [r for r, own in inputs.items() if own.num_nodes and r.is_auto]
        others = [r for r, own in inputs.items() if own.num_nodes and not r.is_auto]
        chosen = set(self._choose(auto, others, step, found)) if auto and not is_idle else set()
        inputs = self._sent(inputs, chosen)
        costs = None
        if any(own.num_nodes and r.is_auto for r, own in inputs.items()):
            costs = self._costs.for_drafter(inputs, step, self._calibration.fit_D2, is_probe=self._gate.is_probe)
        has_tree = {r for r, own in inputs.items() if own.num_nodes}
        return Plan(
            inputs=inputs,
            costs=costs,
            lookup_drafts={r: own for r, own in found.chosen.items() if r not in has_tree} if found else {},
            found=found,
            look_ms=look_ms,
            is_probe=self._gate.is_probe,
            is_idle=is_idle,
        )

    def _look(self, step: Step) -> tuple[LookupResult | None, float]:
        """Lookup drafts of the step's requests, and the milliseconds that looking took. Rare while it does not pay."""
        if not self._has_lookup or not (self._lookup.pays or self._num_steps % _LOOK_EVERY == 0):
            return None, 0.0
        able = [request for request in step.decode if request.is_auto and not request.rule.is_sampled]
        if not able:
            return None, 0.0
        began = time.perf_counter()
        found = self._lookup.look(able, self._draft_depth, len(step.decode), self._costs.verify_ms_of(step))
        return found, 0.0 if self._costs.is_given else 1e3 * (time.perf_counter() - began)

    def _choose(
        self, auto: list[Request], others: list[Request], step: Step, found: LookupResult | None
    ) -> list[Request]:
        """The requests under `auto` that get a tree. others: requests that get one in any case."""
        ranked = sorted(auto, key=self._rows_per_step)
        pace_K = self._paces(ranked, others, step)
        advantage = float(pace_K[1:].max() / pace_K[0])
        if not self._costs.has_measured_drafting:  # a guess switches nothing off
            advantage = max(1.0, advantage)
        self._gate.weigh(advantage, len(step.decode))
        if not self._gate.drafts:
            return []
        has_lookup = found.chosen if found else {}
        if self._gate.is_probe:
            return [min(auto, key=lambda request: (request in has_lookup, backlog(request)))]  # the cheapest probe
        best = 1 + int(pace_K[1:].argmax())
        if found and has_lookup:
            ranked.sort(key=found.expected_tokens)
            best = int(self._paces(ranked, others, step, found).argmax())
        return ranked[:best]

    def _paces(
        self, ranked: list[Request], others: list[Request], step: Step, found: LookupResult | None = None
    ) -> np.ndarray:
        """The pace [K], up to a factor, if the first 0 .. K - 1 requests get trees and, with `found`, the others their
        lookup drafts."""
        gain, num_nodes = self._tree.mean
        num_levels, nodes_run = self._growth.mean
        count_K = np.arange(len(ranked) + 1)
        trees_K = count_K + len(others)
        nodes_K = sum(r.limits.num_speculative_tokens for r in others if r.limits) + count_K * num_nodes
        fed_K = np.cumsum([sum(map(self._rows_per_step, others)), *map(self._rows_per_step, ranked)])
        work_K = DraftWork(messages=1, rows_fed=fed_K, levels=num_levels - 1, nodes_run=nodes_run * trees_K)
        draft_ms_K = self._costs.draft_ms(work_K) * (trees_K > 0)
        saved_K = trees_K * _saving(gain)
        if found:
            own = [(_saving(found.expected_tokens(r)), len(found.chosen.get(r, ())), r in found.chosen) for r in ranked]
            saved_by_lookup_K, copied_K, chains_K = np.cumsum([(0.0, 0, False), *own[::-1]], axis=0)[::-1].T
            saved_K, nodes_K, trees_K = saved_K + saved_by_lookup_K, nodes_K + copied_K, trees_K + chains_K
        verify_ms_K = self._costs.verify_ms(step, nodes_K, trees_K)
        return 1 / ((len(step.decode) - saved_K) * (verify_ms_K + draft_ms_K))

    def _rows_per_step(self, request: Request) -> float:
        """Rows that drafting feeds per step: the tokens gained, and the backlog spread over the steps still to come."""
        num_tokens = 1 + float(self._tree.mean[0])
        num_steps = (request.submit.max_tokens - request.num_output) / num_tokens
        return num_tokens + backlog(request) / max(1.0, num_steps)

    def _sent(self, inputs: dict[Request, DraftInput], chosen: set[Request]) -> dict[Request, DraftInput]:
        """The inputs that go into the step's message; requests under `auto` that were not chosen are fed if due."""
        sent = {}
        for request, own in inputs.items():
            if request in chosen or not request.is_auto:
                sent[request] = own
            elif is_due(request, self._max_backlog):
                sent[request] = DraftInput(own.tokens, 0, 0)
        return within_message(sent, self._max_rows, self._max_backlog)

    # ---- after it

    def observe(self, plan: Plan, outcome: StepOutcome) -> None:
        """Learns what the step took and brought. Costs next to nothing where nobody asks for `auto`."""
        step, drafts = outcome.step, outcome.drafts
        draft_ms = self._observe_exchange(plan, outcome.exchange) if outcome.exchange else 0.0
        if not any(request.is_auto for request in step.decode):
            return
        num_nodes, num_trees = drafts.num_nodes, drafts.num_trees
        verify_ms = self._costs.believed_ms(step, num_nodes, num_trees, outcome.ms - draft_ms)
        if plan.found is not None:
            self._observe_lookup(plan, plan.found, outcome, verify_ms)
        # A plain step after one with nodes is measured, too, or nodes would be blamed for what slows all steps down.
        if not plan.is_idle or draft_ms or num_nodes or self._had_nodes or self._gate.is_measured:
            self._costs.observe_step(step, num_nodes, num_trees, verify_ms)
            self._observe_trees(plan, outcome)
        # A step with prompts teaches no costs, so the next one has to.
        self._had_nodes = num_nodes > 0 or (self._had_nodes and bool(step.prefill))

    def _observe_exchange(self, plan: Plan, exchange: Exchange) -> float:
        """Returns the exchange's milliseconds, by the given prices if there are any."""
        reply = exchange.reply
        if num_trees := len(reply.trees.offsets) - 1:
            self._growth.add(np.array([reply.num_levels, reply.num_run / num_trees]))
        return self._costs.observe_exchange(plan.inputs, reply, exchange.ms)

    def _observe_trees(self, plan: Plan, outcome: StepOutcome) -> None:
        """What the drafter's trees brought to requests that leave their size to us."""
        own = list(zip(outcome.step.decode, outcome.drafts.verified, outcome.verdicts, strict=False))
        is_ours_B = [plan.is_drafted(r) and r.is_auto and any(nodes) for r, nodes, _ in own]
        if not any(is_ours_B):
            return
        ours = [verdict for (_, _, verdict), is_ours in zip(own, is_ours_B, strict=True) if is_ours]
        self._tree.add(np.array([(len(verdict.path), verdict.num_verified) for verdict in ours]).mean(axis=0))
        # The weights of sampled trees say what q alone expects: they calibrate nothing.
        is_shown_B = [is_ours and not r.rule.is_sampled for (r, _, _), is_ours in zip(own, is_ours_B, strict=True)]
        verdicts = outcome.verdicts[: len(outcome.step.decode)]
        self._calibration.learn(outcome.drafts.trees, verdicts, np.array(is_shown_B))

    def _observe_lookup(self, plan: Plan, found: LookupResult, outcome: StepOutcome, verify_ms: float) -> None:
        step, drafts = outcome.step, outcome.drafts
        verdicts = dict(zip(step.decode, outcome.verdicts, strict=False))
        self._lookup.observe(found, verdicts)
        copied = [request for request, is_copied in zip(step.decode, drafts.copied, strict=True) if is_copied]
        num_tokens = sum(len(verdict.tokens) for verdict in verdicts.values())
        if any(map(plan.is_drafted, step.decode)):  # what lookup drafts bring beyond the trees in whose place they are
            gain = float(self._tree.mean[0])
            brought = sum(len(verdicts[request].path) - gain for request in copied) / num_tokens
        elif not step.prefill:  # prompts would blur what a draft's rows cost
            plain_ms = float(self._costs.verify_ms(step, 0, 0)) / (self._gate.advantage if self._gate.is_on else 1)
            brought = num_tokens / len(step.decode) * plain_ms / verify_ms - 1 if copied else 0.0
        else:
            return
        self._lookup.observe_profit(brought - plan.look_ms / verify_ms)


class _Average:
    """A mean of all values while they are few, then of recent ones; `first` counts as one."""

    def __init__(self, first: np.ndarray) -> None:
        self.mean, self._count = first, 1

    def add(self, value: np.ndarray) -> None:
        self._count += 1
        self.mean = self.mean + max(_RATE, 1 / self._count) * (value - self.mean)


def _saving(gain: float) -> float:
    """The share of a request's steps that `gain` more tokens a step save."""
    return 1 - 1 / (1 + gain)
