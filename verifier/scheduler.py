"""Decides one step: who decodes, whose prompt advances, who joins. A pure function of what it is shown.

Every decoding request verifies one tree. What is left of the step's token budget, or one page if less is left, goes
to prompts, oldest first, in chunks; then waiting requests join while a seat and pages for their whole life are free.
Reserving a life at admission (prompt + max_tokens + one tree) means that a running request can never run out of pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verifier.request import Request
from verifier.tree import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    tree_rows: int  # most rows of one tree, root included
    page_size: int

    def pages_for(self, request: Request) -> int:
        """Pages of the request's whole life: its tokens, and a tree's rows beyond the last one."""
        slots = request.num_prompt + request.submit.max_tokens + self.tree_rows
        return -(-slots // self.page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step's work. `admitted` requests take their pages before it starts; they are among `prefill`."""

    admitted: list[Request]
    decode: list[Request]
    prefill: list[tuple[Request, Chunk]]

    @property
    def is_empty(self) -> bool:
        return not self.decode and not self.prefill


def schedule(waiting: Sequence[Request], running: Sequence[Request], num_free_pages: int, limits: Limits) -> Step:
    """The next step. `waiting` and `running` are in order of arrival; neither is changed."""
    decode = [request for request in running if request.is_decoding]
    # However many trees there are, prompts advance by a page at least: nobody starves.
    budget = max(limits.page_size, limits.max_num_batched_tokens - len(decode) * limits.tree_rows)
    prefill: list[tuple[Request, Chunk]] = []

    def take(request: Request) -> None:
        nonlocal budget
        stop = min(request.num_prompt, request.num_computed + budget)
        prefill.append((request, Chunk(request.num_computed, stop)))
        budget -= stop - request.num_computed

    for request in running:
        if not request.is_decoding and budget > 0:
            take(request)
    admitted: list[Request] = []
    for request in waiting:
        pages = limits.pages_for(request)
        if budget <= 0 or pages > num_free_pages or len(running) + len(admitted) >= limits.max_num_seqs:
            break  # first come, first served: nobody overtakes
        num_free_pages -= pages
        admitted.append(request)
        take(request)
    return Step(admitted=admitted, decode=decode, prefill=prefill)
