"""Half-batches that take turns: the target verifies one while the drafter drafts for the other.

In each step the engine verifies the requests whose trees were asked for in the step before, and asks for the trees of
others, which rest meanwhile. Which requests share a turn is decided anew in every step, so halves stay equal while
requests come and go, and nothing waits for a request that has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from verifier.adaptive.controller import Plan
from verifier.request import Request
from verifier.tree import select
from workers.types import DraftReply, TreeTrace


class Asked(NamedTuple):
    """What the drafter was asked for."""

    plan: Plan
    turn: list[Request]  # the decoding requests that the plan is for
    sent_s: float | None  # seconds spent on sending the message; None = nothing was sent, and no reply will come

    def only(self, reply: DraftReply, requests: Sequence[Request]) -> DraftReply:
        """Return the reply without the trees of requests that have left since."""
        here, drafted = set(requests), [request for request, own in self.plan.inputs.items() if own.num_nodes]
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
