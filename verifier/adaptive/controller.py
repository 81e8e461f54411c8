"""The adaptive controller: plans what each step drafts, and learns from the step's time and verdicts.

A step that drafts for the k most promising requests under `auto` is expected to take draft_ms(k) + verify_ms(k), and
request r gains 1 + gain_r tokens, where gain_r = 0 without drafts. The controller chooses the k that minimises the time
in which every request gains one token:

    (draft_ms(k) + verify_ms(k)) x sum over requests of 1 / (1 + gain_r)

Plain decoding is k = 0. This objective finishes n requests of equal length soonest. Maximising the tokens per
millisecond of one step would favour a few easy requests, and the others would finish alone. The gate
(`verifier.adaptive.gate`) switches drafting on and off, and probes it while it is off. The drafter then sizes the trees
of the chosen k by the same costs (`drafter.tree.cost_model`).

A request without a tree may get a lookup draft (`verifier.adaptive.prompt_lookup`), which needs no message. The gate
ignores lookup drafts. While drafting is on, requests get lookup drafts instead of trees if the pace is higher with
them. Every decision depends on past steps only, so it may concern sampled trees as well.
Legend: K choices, B requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from verifier.adaptive.calibration import Calibration
from verifier.adaptive.cost_model import CostModel, DraftWork, RowCosts, TimedExchange, num_step_rows
from verifier.adaptive.gate import SpeculationGate
from verifier.adaptive.prompt_lookup import Average, CountAllowed, LookupResult, PromptLookup
from verifier.draft_batch import DraftBatch
from verifier.draft_inputs import DraftInput, backlog, draft_depth, is_due, next_input, within_message
from verifier.request import Request
from verifier.scheduler import Step
from workers.config import EngineConfig, PruneConfig
from workers.types import DraftCosts, DraftReply, Verdict
from workers.workspace import max_backlog, max_message_rows, max_step_rows

_LOOK_EVERY = 96  # steps between two lookups while they do not pay
_TREE_RATE = 0.005  # of the average tree, over some 200: over 50 it varies by 8 % of the pace, and so does the gate


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The drafts of one step.

    Example: Plan(inputs={a: DraftInput([5, 9], 16, 8), b: DraftInput([7], 0, 0)}, ..., lookup_drafts={b: [3, 4]})
    """

    inputs: Mapping[Request, DraftInput]
    """The rows to feed to the drafter. Requests with nodes get a tree; the others are only fed."""
    costs: DraftCosts | None
    """The costs by which the drafter sizes trees; None if no request under `auto` gets one."""
    lookup_drafts: Mapping[Request, list[int]]
    """Chains for requests without a tree."""
    found: LookupResult | None
    """The result of prompt lookup; None if the step had no lookup."""
    look_ms: float
    is_probe: bool
    """Whether the step drafts although plain decoding is forecast to be faster."""

    def is_drafted(self, request: Request) -> bool:
        """Return whether the request gets a tree from the drafter."""
        return request in self.inputs and self.inputs[request].num_nodes > 0


class Exchange(NamedTuple):
    """The drafter's reply, and the milliseconds from building the message to receiving the reply, or to having sent it.

    reply: None = the message only feeds, so that nobody waits for the drafter.
    """

    reply: DraftReply | None
    ms: float


class StepOutcome(NamedTuple):
    """The drafts, verdicts and time of a planned step."""

    step: Step
    drafts: DraftBatch
    verdicts: list[Verdict]  # of decoding requests, then of completed prompts
    exchange: Exchange | None
    ms: float  # of the whole step


class Controller:
    """Owned by the engine, which calls `plan` before each step and `observe` after it.

    row_costs, exchanges: the start-up profile of the target and of drafting. Simulated costs in the configuration
    replace it. count_allowed: how many of some tokens, from the first, a request's grammar allows next.
    """

    def __init__(
        self,
        config: EngineConfig,
        row_costs: RowCosts,
        count_allowed: CountAllowed,
        exchanges: Sequence[TimedExchange] = (),
    ) -> None:
        prune = config.draft.tree.prune if config.draft else PruneConfig()
        self._has_lookup = prune.prompt_lookup
        self._max_rows, self._max_backlog = max_message_rows(config), max_backlog(config)
        self._next_input, self._draft_depth = partial(next_input, config=config), partial(draft_depth, config=config)
        self._costs = CostModel(row_costs, prune.simulated_costs, exchanges)
        self._gate = SpeculationGate()
        self._lookup = PromptLookup(count_allowed)
        self._growth = Average(np.array([3.0, 4.0]))  # levels of a batch, nodes run per tree
        self._num_steps = 0
        self._max_step_rows = max_step_rows(config)
        self.auto_rows = 1 + 4.0  # of a request in the next step, as the scheduler is to expect
        self.forget_trees()

    def forget_trees(self) -> None:
        """Forget what trees brought, because another head draws the next ones: be optimistic until they are seen."""
        self._calibration = Calibration()
        self._tree = Average(np.array([2.0, 4.0]), rate=_TREE_RATE)  # tokens gained, nodes verified
        self._num_trees = 0  # that this average has seen

    # ---- before a step

    def plan(self, step: Step, running: list[Request]) -> Plan:
        """Plan the step: trees where they pay, and inputs without trees only where they cannot wait."""
        self._num_steps += 1
        found, look_ms = self._look(step)
        is_idle = self._gate.begin_step(len(step.decode))
        candidates = [r for r in running if not (is_idle and r.is_auto) or is_due(r, self._max_backlog)]
        inputs = {r: own for r in candidates if (own := self._next_input(r)) is not None}
        others = [r for r, own in inputs.items() if own.num_nodes and not r.is_auto]
        room = self._max_step_rows - num_step_rows(step) - sum(inputs[r].num_nodes for r in others)
        auto = _fitting({r: own.num_nodes for r, own in inputs.items() if r.is_auto}, room)
        chosen = set(self._choose(auto, others, step, found)) if auto and not is_idle else set()
        inputs = self._sent(inputs, chosen)
        costs = None
        if any(own.num_nodes and r.is_auto for r, own in inputs.items()):
            costs = self._costs.for_drafter(inputs, step, self._calibration.log_odds_D)
        has_tree = {r for r, own in inputs.items() if own.num_nodes}
        room -= sum(own.num_nodes for r, own in inputs.items() if r.is_auto)
        chains = {r: len(own) for r, own in found.chosen.items() if r not in has_tree} if found else {}
        lookup_drafts = {r: found.chosen[r] for r in _fitting(chains, room)} if found else {}
        return Plan(
            inputs=inputs, costs=costs, lookup_drafts=lookup_drafts, found=found, look_ms=look_ms,
            is_probe=self._gate.is_probe,
        )  # fmt: skip

    def _look(self, step: Step) -> tuple[LookupResult | None, float]:
        """Return the lookup drafts of the step's requests and the lookup's milliseconds. Rare while it does not pay."""
        is_due = self._has_lookup and (self._lookup.pays or self._num_steps % _LOOK_EVERY == 0)
        able = [request for request in step.decode if is_due and request.is_auto and not request.rule.is_sampled]
        if not able:
            return None, 0.0
        began = time.perf_counter()
        found = self._lookup.look(able, self._draft_depth, len(step.decode), partial(self._costs.verify_ms, step))
        return found, 0.0 if self._costs.is_given else 1e3 * (time.perf_counter() - began)

    def _choose(
        self, auto: list[Request], others: list[Request], step: Step, found: LookupResult | None
    ) -> list[Request]:
        """Return the requests under `auto` that get a tree. others: requests that always get one."""
        ranked = sorted(auto, key=self._rows_per_step)
        pace_K = self._paces(ranked, others, step)
        if not self._gate.weigh(float(pace_K[1:].max() / pace_K[0]), len(step.decode)):
            return []
        if self._gate.is_probe:  # the cheapest one
            return [min(auto, key=lambda request: (found is not None and request in found.chosen, backlog(request)))]
        if found is None:
            return ranked[: 1 + int(pace_K[1:].argmax())]
        ranked.sort(key=found.expected_tokens)
        return ranked[: int(self._paces(ranked, others, step, found).argmax())]

    def _paces(
        self, auto: list[Request], others: list[Request], step: Step, found: LookupResult | None = None
    ) -> np.ndarray:
        """Return the pace [K], up to a factor, if the first 0 .. K - 1 requests under `auto` get trees.

        With `found`, the others get their lookup drafts.
        """
        gain, num_nodes = self._tree.mean
        # A few bad trees tell little: one standard error is added, for a deviation of one token, less the average's.
        gain += max(0.0, 1 / math.sqrt(1 + self._num_trees) - math.sqrt(_TREE_RATE))
        num_levels, nodes_run = self._growth.mean
        count_K = np.arange(len(auto) + 1)
        trees_K = count_K + len(others)
        nodes_K = sum(r.limits.num_speculative_tokens for r in others if r.limits) + count_K * num_nodes
        fed_K = np.cumsum([sum(map(self._rows_per_step, others)), *map(self._rows_per_step, auto)])
        work_K = DraftWork(messages=1, rows_fed=fed_K, levels=num_levels - 1, nodes_run=nodes_run * trees_K)
        draft_ms_K, saved_K = self._costs.draft_ms(work_K) * (trees_K > 0), trees_K * _saving(gain)
        if found:
            own = [(_saving(found.expected_tokens(r)), len(found.chosen.get(r, ())), r in found.chosen) for r in auto]
            saved_by_lookup_K, copied_K, chains_K = np.cumsum([(0.0, 0, False), *own[::-1]], axis=0)[::-1].T
            saved_K, nodes_K, trees_K = saved_K + saved_by_lookup_K, nodes_K + copied_K, trees_K + chains_K
        verify_ms_K = self._costs.verify_ms(step, nodes_K, trees_K)
        return 1 / ((len(step.decode) - saved_K) * (verify_ms_K + draft_ms_K))

    def _rows_per_step(self, request: Request) -> float:
        """Return the rows fed per step: the tokens gained, and the backlog spread over the remaining steps."""
        num_tokens = 1 + float(self._tree.mean[0])
        num_steps = (request.submit.max_tokens - request.num_output) / num_tokens
        return num_tokens + backlog(request) / max(1.0, num_steps)

    def _sent(self, inputs: dict[Request, DraftInput], chosen: set[Request]) -> dict[Request, DraftInput]:
        """Return the inputs of the step's message; requests under `auto` that were not chosen are fed if due."""
        sent = {}
        for request, own in inputs.items():
            if request in chosen or not request.is_auto:
                sent[request] = own
            elif is_due(request, self._max_backlog):
                sent[request] = DraftInput(own.tokens, 0, 0)
        return within_message(sent, self._max_rows, self._max_backlog)

    # ---- after it

    def observe(self, plan: Plan, outcome: StepOutcome) -> None:
        """Learn from the step's outcome. Takes almost no time without requests under `auto`."""
        step, num_nodes, num_trees = outcome.step, outcome.drafts.num_nodes, outcome.drafts.num_trees
        draft_ms = self._observe_exchange(plan, outcome.exchange) if outcome.exchange else 0.0
        if not any(request.is_auto for request in step.decode):
            return
        self.auto_rows = 1 + max(1.0, 2 * num_nodes / len(step.decode))  # twice as many, so that trees may grow
        verify_ms = self._costs.believed_ms(step, num_nodes, num_trees, outcome.ms - draft_ms - plan.look_ms)
        if plan.is_probe:
            self._observe_probe(plan, outcome, draft_ms + verify_ms)
        if plan.found is not None:
            self._observe_lookup(plan, plan.found, outcome)
        self._costs.observe_step(step, num_nodes, num_trees, verify_ms)
        if num_nodes:
            self._observe_trees(plan, outcome)

    def _observe_probe(self, plan: Plan, outcome: StepOutcome, ms: float) -> None:
        """Tell the gate what the probe lost: its time minus that of its tokens without it, in plain steps."""
        step = outcome.step
        num_tokens = sum(len(verdict.tokens) for verdict in outcome.verdicts[: len(step.decode)])
        plain_steps = num_tokens / len(step.decode) / (plan.found.gain if plan.found else 1.0)
        plain_ms = float(self._costs.verify_ms(step, 0, 0))
        self._gate.observe_probe((ms - self._costs.prefill_ms(step)) / plain_ms - plain_steps)

    def _observe_lookup(self, plan: Plan, found: LookupResult, outcome: StepOutcome) -> None:
        """Learn how often matches go on, and what the lookup drafts brought, as a share of a plain step."""
        step, verdicts = outcome.step, dict(zip(outcome.step.decode, outcome.verdicts, strict=False))
        self._lookup.observe(found, verdicts)
        num_nodes_2, num_trees_2 = np.array([0, outcome.drafts.num_nodes]), np.array([0, outcome.drafts.num_trees])
        plain_ms, ms = self._costs.verify_ms(step, num_nodes_2, num_trees_2)
        if any(map(plan.is_drafted, step.decode)):  # the gain over the trees that were replaced
            ms, gain = plain_ms, self._tree.mean[0]
        else:
            gain = 0.0
        brought = sum(len(verdicts[request].path) - gain for request in plan.lookup_drafts) / len(step.decode)
        self._lookup.profit.add(float(brought - (ms - plain_ms + plan.look_ms) / plain_ms))

    def _observe_exchange(self, plan: Plan, exchange: Exchange) -> float:
        """Learn from an exchange; return its milliseconds, by the given prices if there are any."""
        reply = exchange.reply
        if reply is None:
            return exchange.ms
        self._growth.add(np.array([reply.num_levels, reply.num_run / (len(reply.trees.offsets) - 1)]))
        return self._costs.observe_exchange(plan.inputs, reply, exchange.ms)

    def _observe_trees(self, plan: Plan, outcome: StepOutcome) -> None:
        """Learn from the verdicts on the drafter's trees for requests under `auto`."""
        own = list(zip(outcome.step.decode, outcome.drafts.verified, outcome.verdicts, strict=False))
        is_ours_B = [plan.is_drafted(r) and r.is_auto and any(nodes) for r, nodes, _ in own]
        if not any(is_ours_B):
            return
        ours = [verdict for (_, _, verdict), is_ours in zip(own, is_ours_B, strict=True) if is_ours]
        self._num_trees += len(ours)
        self._tree.add(np.array([(len(verdict.path), verdict.num_verified) for verdict in ours]).mean(axis=0))
        # The weights of sampled trees are expectations under q alone, so they do not calibrate confidence.
        is_shown_B = [is_ours and not r.rule.is_sampled for (r, _, _), is_ours in zip(own, is_ours_B, strict=True)]
        verdicts = outcome.verdicts[: len(outcome.step.decode)]
        self._calibration.learn(outcome.drafts.trees, verdicts, np.array(is_shown_B))


def _fitting(nodes: Mapping[Request, int], room: int) -> list[Request]:
    """Return the requests with nodes, in order, whose nodes fit into a step's `room`."""
    found = []
    for request, count in nodes.items():
        if 0 < count <= room:
            found.append(request)
            room -= count
    return found


def _saving(gain: float) -> float:
    """Return the share of a request's steps that is saved by gaining `gain` more tokens per step."""
    return 1 - 1 / (1 + gain)
