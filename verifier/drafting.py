"""How the engine gets a step's trees: it asks the drafter, waits, and completes the reply to one tree per request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from verifier.adaptive.controller import Controller, Exchange, Plan
from verifier.draft_batch import DraftBatch
from verifier.drafter_peer import DrafterPeer
from verifier.hidden_states import HiddenStateBuffer
from verifier.request import Request
from verifier.scheduler import Step
from verifier.step_inputs import StepInputs
from verifier.target import Target


class Drafts(NamedTuple):
    """The trees of a step's decoding requests, and how they came about."""

    plan: Plan
    batch: DraftBatch
    exchange: Exchange | None  # None = nothing was asked of the drafter, or it is lost


class Drafting:
    """The drafts of a step, planned by the controller."""

    def __init__(
        self,
        controller: Controller,
        drafter: DrafterPeer,
        target: Target,
        hidden_states: HiddenStateBuffer,
        inputs: StepInputs,
    ) -> None:
        self._controller, self._drafter, self._target = controller, drafter, target
        self._hidden_states, self._inputs = hidden_states, inputs

    def draft(self, step: Step, number: int, running: list[Request], while_waiting: Callable[[], None]) -> Drafts:
        """Return the trees of all decoding requests of a step: the drafter's, lookup drafts and bare roots.

        while_waiting: called once the drafter is at work.
        """
        plan, exchange = self._controller.plan(step, running), None
        if plan.inputs:
            exchange = self._exchange(plan, number, while_waiting)
        reply = None if exchange is None else exchange.reply
        if reply is None and not plan.lookup_drafts:
            return Drafts(plan, DraftBatch.bare([request.tokens[-1] for request in step.decode]), exchange)
        has_tree = set() if reply is None else {request for request, own in plan.inputs.items() if own.num_nodes}
        drafted = [request in has_tree for request in step.decode]
        chains = [request.tokens[-1:] for request in step.decode]
        if plan.lookup_drafts:
            chains = [[*own, *plan.lookup_drafts.get(r, ())] for r, own in zip(step.decode, chains, strict=True)]
        return Drafts(plan, DraftBatch.of(reply, drafted, chains), exchange)

    def _exchange(self, plan: Plan, number: int, while_waiting: Callable[[], None]) -> Exchange | None:
        """Send the drafter a plan's message and wait for its trees, if there are any; None if it is lost."""
        began = time.perf_counter()
        state_MX = self._hidden_states.take({request: len(own.tokens) for request, own in plan.inputs.items()})
        features_MH = None if state_MX is None else self._target.features(state_MX)
        candidate_MH = None if state_MX is None else self._target.candidate_features(state_MX)
        message = self._inputs.draft_request(plan.inputs, features_MH, plan.costs, candidate_MH)
        if not self._drafter.send(message, number):
            return None
        reply = None
        if message.is_answered:
            while_waiting()
            if (reply := self._drafter.receive()) is None:
                return None
        return Exchange(reply, 1e3 * (time.perf_counter() - began))
