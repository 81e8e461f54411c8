"""Decides one step: who decodes, whose prompt advances, who joins, who gives way. A pure function of what it is shown.

Every decoding request verifies one tree. What is left of the step's token budget, or one page if less is left, goes
to prompts, oldest first, in chunks; then waiting requests join while there is a seat and room.

A joining request shares the pages that already hold the beginning of its tokens, and computes the rest: at least its
last prompt token, from whose row its first token is drawn. Pages shared with others cost it nothing; found pages that
nobody holds count among the free ones until it takes them.

Pages are taken as they are needed. A running request holds those up to the end of its next tree. When the next trees
do not fit, the last to arrive are preempted until they do: a preempted request gives back the pages that it holds
alone, goes to the head of the line and later computes its tokens' KV again, in chunks like a prompt's, as far as nobody
kept it.

No deadlock: whatever fits the pool alone can finish, because the oldest is never preempted. No ping-pong: what a
preempted request gave back is less than it needs, so it rejoins only after somebody has left; and nobody joins unless
the trees that the others verify a step later fit as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verifier.request import Request
from verifier.tree import PromptChunk
from workers.kv_cache import NO_MATCH, PrefixMatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int

    def pages_for(self, request: Request, num_trees: int = 1) -> int:
        """Pages up to the end of its next tree, or of the last of several if each is accepted whole."""
        return self._pages(request.root + num_trees * request.tree_rows)

    def pages_for_life(self, request: Request) -> int:
        """The most that it can ever need at once."""
        return self._pages(request.num_prompt + request.submit.max_tokens - 1 + request.tree_rows)

    def _pages(self, num_slots: int) -> int:
        return -(-num_slots // self.page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step's work. Before it starts, `preempted` give back their pages, the admitted take their seats and the pages
    that they share, and only then `pages` are taken; the admitted are among `prefill`."""

    preempted: list[Request]  # last to arrive first
    shared: list[tuple[Request, list[int]]]  # the admitted, with the pages that hold the beginning of their tokens
    pages: list[tuple[Request, int]]  # how many more a request takes
    decode: list[Request]
    prefill: list[tuple[Request, PromptChunk]]

    @property
    def admitted(self) -> list[Request]:
        return [request for request, _ in self.shared]

    @property
    def finishing(self) -> list[tuple[Request, PromptChunk]]:
        """The prompts that this step completes: their first token is drawn. A preempted request stops before its last
        token, the root of its next tree. To be asked before tokens are committed."""
        return [(request, chunk) for request, chunk in self.prefill if chunk.stop == len(request.tokens)]

    @property
    def is_empty(self) -> bool:
        return not self.decode and not self.prefill


def schedule(
    waiting: Sequence[Request],
    running: Sequence[Request],
    num_free_pages: int,
    limits: Limits,
    find: Callable[[Request], PrefixMatch] = lambda request: NO_MATCH,
) -> Step:
    """The next step. `waiting` and `running` are in order of arrival; neither is changed.

    find: the pages that hold the beginning of a waiting request's tokens, without its last prompt token. Every request
    should fit the pool alone for its whole life.
    """
    kept, preempted = list(running), []
    num_free_pages -= sum(limits.pages_for(request) - len(request.pages) for request in kept)
    while num_free_pages < 0:
        leaving = kept.pop()
        preempted.append(leaving)
        still_held = {page for request in kept for page in request.pages}
        num_free_pages += limits.pages_for(leaving) - len(still_held.intersection(leaving.pages))

    decode = [request for request in kept if request.is_decoding]
    # However many trees there are, prompts advance by a page at least: nobody starves.
    budget = max(limits.page_size, limits.max_num_batched_tokens - sum(request.tree_rows for request in decode))
    prefill: list[tuple[Request, PromptChunk]] = []

    def take(request: Request, start: int) -> None:
        nonlocal budget
        stop = min(request.root, start + budget)
        prefill.append((request, PromptChunk(start, stop)))
        budget -= stop - start

    for request in kept:
        if not request.is_decoding and budget > 0:
            take(request, request.num_computed)
    shared: list[tuple[Request, list[int]]] = []
    candidates = [] if preempted else waiting
    room = num_free_pages
    if candidates:
        room -= sum(limits.pages_for(request, 2) - limits.pages_for(request) for request in decode)
    for request in candidates:
        if budget <= 0 or len(kept) + len(shared) >= limits.max_num_seqs:
            break
        found = find(request)
        room -= limits.pages_for(request) - found.num_held
        if room < 0:
            break  # first come, first served: nobody overtakes
        shared.append((request, found.pages))
        take(request, len(found.pages) * limits.page_size)
    taken = [(request, limits.pages_for(request) - len(request.pages)) for request in kept]
    taken += [(request, limits.pages_for(request) - len(pages)) for request, pages in shared]
    return Step(
        preempted=preempted,
        shared=shared,
        pages=[(request, count) for request, count in taken if count],
        decode=decode,
        prefill=prefill,
    )
