"""How the engine gets the trees of a step: it asks the drafter, waits, and completes the reply to one tree per request.

Drafting       in turn: the drafter drafts, then the target verifies
HalfBatches    (`verifier.turns`) the drafter drafts for half of the requests while the target verifies the others
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from verifier.adaptive.controller import Controller, Exchange, Plan
from verifier.draft_batch import DraftBatch
from verifier.drafter_peer import DrafterPeer
from verifier.hidden_states import HiddenStateBuffer
from verifier.request import Request
from verifier.scheduler import Step
from verifier.step_inputs import StepInputs
from verifier.target import Target
from workers import trace
from workers.comm.ipc import EngineStats
from workers.types import DraftReply


class Asked(NamedTuple):
    """A plan, and what the drafter was asked for."""

    plan: Plan
    requests: list[Request]  # the decoding requests that the plan is for
    sent_s: float | None  # seconds spent on sending the message; None = nothing was sent, and no reply will come


class Drafts(NamedTuple):
    """The trees of a step's decoding requests, and how they came about."""

    plan: Plan
    batch: DraftBatch
    exchange: Exchange | None  # None = nothing was asked of the drafter, or it is lost


class Drafting:
    """Drafts in turn with verification. Counts in `stats`."""

    def __init__(
        self,
        controller: Controller,
        drafter: DrafterPeer,
        target: Target,
        hidden_states: HiddenStateBuffer,
        inputs: StepInputs,
        stats: EngineStats,
    ) -> None:
        self._controller, self._drafter, self._target = controller, drafter, target
        self._hidden_states, self._inputs, self._stats = hidden_states, inputs, stats

    @property
    def owes_reply(self) -> bool:
        """Return whether the drafter works on a reply, which will show that it lives."""
        return False

    def resting(self, running: list[Request]) -> Collection[Request]:
        """Return the decoding requests that the next step leaves out."""
        return ()

    def draft(self, step: Step, running: list[Request], while_waiting: Callable[[], None]) -> Drafts:
        """Return the trees of all decoding requests of a step: the drafter's, lookup drafts and bare roots.

        while_waiting: called once the drafter is at work.
        """
        asked = self._ask(step, running)
        exchange = self._receive(asked, while_waiting)
        return self._completed(step, asked.plan, exchange, exchange and exchange.reply)

    def _ask(self, step: Step, running: list[Request]) -> Asked:
        """Plan the drafts of a step, and send the drafter the requests' new tokens."""
        mine = set(step.decode)
        plan = self._controller.plan(step, [r for r in running if r in mine or not r.is_decoding])
        return Asked(plan, step.decode, self._send(plan) if plan.inputs else None)

    def _send(self, plan: Plan) -> float | None:
        """Send the drafter a plan's message; return the seconds that this took, or None if the drafter is lost."""
        began = time.perf_counter()
        state_MX = self._hidden_states.take({request: len(own.tokens) for request, own in plan.inputs.items()})
        features_MH = None if state_MX is None else self._target.features(state_MX)
        message = self._inputs.draft_request(plan.inputs, features_MH, plan.costs)
        if not self._drafter.send(message, self._stats.steps):
            return None
        for request, own in plan.inputs.items():
            request.num_fed += len(own.tokens)
        return time.perf_counter() - began

    def _receive(self, asked: Asked, while_waiting: Callable[[], None] = lambda: None) -> Exchange | None:
        """Wait for the trees that were asked for; None if there are none to come, or the drafter is lost."""
        if asked.sent_s is None or not self._drafter.is_connected:
            return None
        began = time.perf_counter()
        while_waiting()
        if (reply := self._drafter.receive()) is None:
            return None
        ended = time.perf_counter()
        trace.record("wait for drafts", began, ended)
        seconds = asked.sent_s + ended - began
        self._stats.draft_seconds += reply.seconds
        self._stats.transfer_seconds += seconds - reply.seconds
        self._stats.num_trees += len(reply.pruned_GD)
        return Exchange(reply, 1e3 * seconds)

    def _completed(self, step: Step, plan: Plan, exchange: Exchange | None, reply: DraftReply | None) -> Drafts:
        """Complete the reply, whose trees are those of the step's requests, to one tree per request."""
        drafted = [reply is not None and plan.is_drafted(request) for request in step.decode]
        chains = [[request.tokens[-1], *plan.lookup_drafts.get(request, ())] for request in step.decode]
        return Drafts(plan, DraftBatch.of(reply, drafted, chains), exchange)
