"""Half-batches that take turns: the target verifies one while the drafter drafts for the other.

In each step the engine verifies the requests whose trees were asked for in the step before, and asks for the trees of
others, which rest meanwhile. Which requests share a turn is decided anew in every step, so halves stay equal while
requests come and go, and nothing waits for a request that has left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch

from verifier.adaptive.controller import Plan
from verifier.drafting import Asked, Drafting, Drafts
from verifier.request import Request
from verifier.scheduler import Step
from verifier.tree import select
from workers.types import DraftReply, TreeTrace


class HalfBatches(Drafting):
    """Drafts for one half of the requests while the other is verified, for as long as the controller says so."""

    _asked: Asked | None = None  # whose trees the drafter grows now

    @property
    def owes_reply(self) -> bool:
        """See `Drafting`."""
        return self._asked is not None and self._asked.sent_s is not None

    def resting(self, running: list[Request]) -> Collection[Request]:
        """Return the decoding requests whose turn it is not."""
        if self._asked is not None and not any(request in running for request in self._asked.requests):
            self._receive(self._asked)  # all of them have left
            self._asked = None
        decoding = _decoding(running)
        if self._asked is not None:
            turn = self._asked.requests
        elif self._takes_turns(decoding):
            turn = next_turn(decoding, ())
        else:
            return ()
        return set(decoding).difference(turn)

    def draft(self, step: Step, running: list[Request], while_waiting: Callable[[], None]) -> Drafts:
        """Return the trees that were asked for in the last step, and ask for those of the next one."""
        asked, self._asked = self._asked or self._ask(step, running), None
        exchange = self._receive(asked, while_waiting)
        if self._takes_turns(decoding := _decoding(running)) and (turn := next_turn(decoding, step.decode)):
            self._asked = self._ask(Step(preempted=[], shared=[], pages=[], decode=turn, prefill=[]), running)
        reply = exchange and of_those_here(exchange.reply, asked.plan, step.decode)
        return self._completed(step, asked.plan, exchange, reply)

    def _takes_turns(self, decoding: list[Request]) -> bool:
        return self._drafter.is_connected and self._controller.takes_turns(len(decoding))


def _decoding(running: list[Request]) -> list[Request]:
    return [request for request in running if request.is_decoding]


def of_those_here(reply: DraftReply, plan: Plan, requests: Sequence[Request]) -> DraftReply:
    """Return the reply without the trees of requests that have left since they were asked for."""
    here, drafted = set(requests), [request for request, own in plan.inputs.items() if own.num_nodes]
    return _only(reply, [g for g, request in enumerate(drafted) if request in here])


def next_turn(decoding: Sequence[Request], verified: Sequence[Request]) -> list[Request]:
    """Return whose trees to ask for while `verified` are verified: at most half of all, those that rest the longest.

    The result is in the order of `decoding`. Requests with equal rests are taken in that order.
    """
    busy = set(verified)
    resting = sorted((r for r in decoding if r not in busy), key=lambda request: request.last_step)
    chosen = set(resting[: -(-len(decoding) // 2)])
    return [request for request in decoding if request in chosen]


def _only(reply: DraftReply, kept: list[int]) -> DraftReply:
    if len(kept) == len(reply.pruned_GD):
        return reply
    trees, probs, _ = select(reply.trees, reply.probs, kept)
    trace = None if reply.trace is None else _only_traces(reply.trace, kept)
    return replace(reply, trees=trees, probs=probs, pruned_GD=reply.pruned_GD[kept], trace=trace)


def _only_traces(trace: TreeTrace, kept: list[int]) -> TreeTrace:
    begins = trace.offsets.tolist()
    rows = torch.cat([torch.arange(0), *(torch.arange(begins[g], begins[g + 1]) for g in kept)])
    sizes = trace.offsets.diff()[kept]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int32), sizes.cumsum(0, dtype=torch.int32)])
    columns = {name: getattr(trace, name)[rows] for name in TreeTrace.__slots__ if name.endswith("_T")}
    return TreeTrace(offsets=offsets, **columns)
