"""The scheduler: decides which requests decode, prefill, join and are preempted in one step. A pure function.

Every decoding request verifies one tree; under `auto` it is expected to have twice the nodes of the last step's. The
rest of the step's token budget, but at least one page, goes to prompts in chunks, in order. Then waiting requests join
in order, while seats and pages last. The order is that of priorities, and of arrival among equal ones; without
priorities it is that of arrival alone.

A prompt that needs several steps leaves up to half of each to shorter prompts behind it, those that fit whole; it gets
back what they do not need. So a long prompt delays them by a step, and they delay it by as much again at most.

A joining request shares the pages that already hold the beginning of its tokens and computes the rest: at least its
last prompt token, whose row draws the first output token. Shared pages that other requests hold cost nothing. Shared
pages without a holder count as free until the request takes them.

Pages are allocated on demand. A running request holds pages up to the end of its next tree. When the next trees do not
fit, the last in order are preempted until they do. A preempted request releases its pages and returns to its place in
the queue, before all later arrivals of its priority. Later it recomputes the KV that the prefix cache has lost, in
chunks like a prompt.

No deadlock: a request that fits the pool alone can finish, because the first in order is never preempted. No thrashing:
a preempted request needs more pages than it released, so it rejoins only after another request has left; and a request
joins only if the other requests' trees of the next step fit as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verifier.request import Request
from verifier.tree import PromptChunk
from workers.kv_cache import NO_MATCH, PrefixMatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    max_scored_rows: int = 1 << 16
    """Prompt rows of one step with log-probabilities: 20 MB for the front, with 20 alternatives each."""

    def pages_for(self, request: Request, num_trees: int = 1) -> int:
        """Return the pages up to the end of the next tree, or of the num_trees-th if all are fully accepted."""
        return -(-(request.root + num_trees * request.tree_rows) // self.page_size)

    def pages_for_life(self, request: Request) -> int:
        """Return the most pages that the request can ever need at once."""
        return -(-(request.num_prompt + request.submit.max_tokens - 1 + request.tree_rows) // self.page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step's work.

    The engine first preempts `preempted`, then admits `shared`, whose requests are also in `prefill`, and then
    allocates `pages`.
    """

    preempted: list[Request]  # the last in order first
    shared: list[tuple[Request, list[int]]]  # joining requests with their shared pages
    pages: list[tuple[Request, int]]  # the pages to allocate for each request
    decode: list[Request]
    prefill: list[tuple[Request, PromptChunk]]
    lacks_pages: bool = False  # requests wait for pages rather than for a seat or the step's token budget

    @property
    def admitted(self) -> list[Request]:
        """Return the requests that join in this step."""
        return [request for request, _ in self.shared]

    @property
    def finishing(self) -> list[tuple[Request, PromptChunk]]:
        """Return the prompts that this step completes, so that their first token is drawn.

        A request that was preempted while decoding is not among them: its prefill stops before its last token, the root
        of its next tree. The result is valid only before the step's tokens are committed.
        """
        return [(request, chunk) for request, chunk in self.prefill if chunk.stop == len(request.tokens)]

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to compute."""
        return not self.decode and not self.prefill


def schedule(
    waiting: Sequence[Request],
    running: Sequence[Request],
    num_free_pages: int,
    limits: Limits,
    find: Callable[[Request], PrefixMatch] = lambda request: NO_MATCH,
    auto_rows: float = math.inf,
) -> Step:
    """Return the next step. `waiting` and `running` are sorted by `Request.order`; neither is changed.

    auto_rows: how many rows a tree under `auto` is expected to have; its request verifies no more if prompts need them.
    find: returns the shareable pages of a waiting request (`PrefixCache.find`). Every request must fit the pool alone.
    """
    kept, preempted = list(running), []
    lacking = [limits.pages_for(request) - len(request.pages) for request in kept]
    num_free_pages -= sum(lacking)
    while num_free_pages < 0:
        leaving = kept.pop()
        preempted.append(leaving)
        still_held = {page for request in kept for page in request.pages}
        num_free_pages += limits.pages_for(leaving) - len(still_held.intersection(leaving.pages))

    decode = [request for request in kept if request.is_decoding]
    tree_rows = sum(min(r.tree_rows, auto_rows) if r.is_auto else r.tree_rows for r in decode)
    prompts = _PromptRows(limits, math.ceil(tree_rows))
    is_prefilling = len(decode) < len(kept)
    for request in kept if is_prefilling else ():
        if not request.is_decoding and prompts.fits(request, request.num_computed):
            prompts.take(request, request.num_computed)
    shared: list[tuple[Request, list[int]]] = []
    candidates, lacks_pages = [] if preempted else waiting, bool(preempted)
    room = num_free_pages
    if candidates:
        room -= sum(limits.pages_for(request, 2) - limits.pages_for(request) for request in decode)
    for request in candidates:
        if prompts.budget <= 0 or len(kept) + len(shared) >= limits.max_num_seqs:
            break
        found = find(request)
        start = len(found.pages) * limits.page_size
        if not prompts.fits(request, start):
            break
        room -= limits.pages_for(request) - found.num_held
        if room < 0:
            lacks_pages = True
            break  # nobody overtakes for want of pages, or large requests would starve
        shared.append((request, found.pages))
        prompts.take(request, start)
    lacking[len(kept) :] = [limits.pages_for(request) - len(pages) for request, pages in shared]
    joined = kept + [request for request, _ in shared]
    return Step(
        preempted=preempted,
        shared=shared,
        pages=[(request, count) for request, count in zip(joined, lacking, strict=True) if count],
        decode=decode,
        prefill=prompts.finished(),
        lacks_pages=lacks_pages,
    )


class _PromptRows:
    """The prompt rows of a step, given to requests in their order."""

    def __init__(self, limits: Limits, num_tree_rows: int) -> None:
        self._page_size = limits.page_size
        # Prompts advance by at least a page however many trees there are, so no request starves.
        self.budget = max(limits.page_size, limits.max_num_batched_tokens - num_tree_rows)
        self._num_scorable = limits.max_scored_rows
        self._chunks: list[tuple[Request, PromptChunk]] = []
        self._long: int | None = None  # the place of a prompt that this step does not finish; none after it does so

    def fits(self, request: Request, start: int) -> bool:
        """Return whether a prompt may have rows from `start` on."""
        return self.budget > 0 and (self._long is None or request.root - start <= self.budget)

    def take(self, request: Request, start: int) -> None:
        """Give a prompt its rows; a long one at first half of them, so that short ones go along."""
        stop = min(request.root, start + self.budget)
        if stop < request.root:
            self._long = len(self._chunks)
            stop -= max(0, min(self.budget // 2, self.budget - self._page_size))
        if unknown := request.to_score(start, stop):
            stop = min(stop, unknown.start + max(self._page_size, self._num_scorable))
            self._num_scorable -= stop - unknown.start
        self._chunks.append((request, PromptChunk(start, stop)))
        self.budget -= stop - start

    def finished(self) -> list[tuple[Request, PromptChunk]]:
        """Give the long prompt what is left, and return the chunks."""
        if self._long is not None and self.budget > 0:
            request, chunk = self._chunks[self._long]
            stop = min(request.root, chunk.stop + self.budget)
            if unknown := request.to_score(chunk.stop, stop):
                stop = min(stop, unknown.start + max(0, self._num_scorable))
            self._chunks[self._long] = request, PromptChunk(chunk.start, stop)
        return self._chunks
