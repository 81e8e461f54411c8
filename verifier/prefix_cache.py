"""Automatic prefix caching: a request that begins like an earlier one shares its pages, target's and drafter's alike.

A page is named by the chained digest of all tokens up to its end (and of the request's salt), 256 bits of BLAKE2b, so
that two prompts are never mixed up. It is published as soon as its slots hold final KV; from then on nobody writes it.
It is drafted once the drafter's pool holds its tokens too. A request that never drafts shares any published page, one
that drafts only drafted ones: shared pages are never written, and what an EAGLE head would need to fill them in, the
target's states, was not kept.

The one state that is kept of a page is that of its last token: the drafter's entry for the first token behind a
shared prefix is (token h, feature of token h - 1). It lives here, on verifier rank 0, from the step that computed it.
"""

from __future__ import annotations

import hashlib
from array import array

from torch import Tensor

from verifier.hidden_states import HiddenStatePool
from verifier.request import Request
from workers.kv_cache import NO_MATCH, PageAllocator, PrefixMatch
from workers.transfer import to_device


class PrefixCache:
    """What the pages hold. Owned by the engine, beside the allocator that it publishes to."""

    def __init__(
        self, allocator: PageAllocator, page_size: int, waiting: HiddenStatePool | None = None, *, is_enabled: bool
    ) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._waiting = waiting
        self._is_enabled = is_enabled
        self._state_PX: Tensor | None = None  # of each page's last token; the first states tell width and dtype

    def find(self, request: Request) -> PrefixMatch:
        """The pages that a waiting request may share; what it computes itself is at least the token before its root,
        which for a prompt is the one whose row draws."""
        if not self._is_enabled:
            return NO_MATCH
        keys = self._keys(request, (request.root - 1) // self._page_size)
        return self._allocator.find(keys, is_drafted=request.limits is not None)

    def adopt(self, request: Request, pages: list[int]) -> None:
        """A request joins with the pages that `find` has found for it."""
        if self._is_enabled and request.limits is not None:
            keys = self._keys(request, (request.root - 1) // self._page_size)
            request.is_repeated = len(self._allocator.find(keys, is_drafted=False).pages) > len(pages)
        if not pages:
            return
        self._allocator.share(pages)
        request.pages, request.num_published = array("i", pages), len(pages)
        request.num_computed = len(pages) * self._page_size
        if request.limits is not None:
            request.num_published_drafted, request.num_fed = len(pages), request.num_computed
            if self._state_PX is not None and self._waiting is not None:
                request.states = self._waiting.keep(self._state_PX.narrow(0, pages[-1], 1))

    def keep_states(self, owed: dict[Request, list[int]], state_NX: Tensor) -> None:
        """The states of requests' newest positions, which lie in these rows; those of pages' last positions stay."""
        if not self._is_enabled:
            return
        kept, pages, size = [], [], self._page_size
        for request, rows in owed.items():
            first = request.num_computed - len(rows)
            for index in range(first // size, request.num_computed // size):
                kept.append(rows[(index + 1) * size - 1 - first])
                pages.append(request.pages[index])
        if self._state_PX is None:
            self._state_PX = state_NX.new_zeros(self._allocator.num_pages, state_NX.shape[1])
        if pages:
            device = state_NX.device
            self._state_PX[to_device(pages, device)] = state_NX[to_device(kept, device)]

    def publish(self, request: Request, num_settled: int) -> None:
        """Lets others share the request's full pages among its first `num_settled` slots, whose KV is where it stays.
        Also before it leaves; its states of those slots are kept by then."""
        if not self._is_enabled:
            return
        full = min(num_settled, len(request.tokens)) // self._page_size
        fed = min(request.num_fed // self._page_size, full) if request.limits is not None else 0
        if full <= request.num_published and fed <= request.num_published_drafted:
            return
        keys = self._keys(request, full)
        for index in range(request.num_published, full):
            self._allocator.publish(request.pages[index], keys[index], is_drafted=False)
        for index in range(request.num_published_drafted, fed):
            self._allocator.publish(request.pages[index], keys[index], is_drafted=True)
        request.num_published = max(request.num_published, full)
        request.num_published_drafted = max(request.num_published_drafted, fed)

    def _keys(self, request: Request, count: int) -> list[bytes]:
        """The keys of the request's first pages; once computed they are kept, as tokens never change."""
        keys, size = request.keys, self._page_size
        for index in range(len(keys), count):
            parent = keys[-1] if keys else _root(request.submit.cache_salt)
            tokens = array("q", request.tokens[index * size : (index + 1) * size])
            keys.append(hashlib.blake2b(parent + tokens.tobytes(), digest_size=32).digest())
        return keys[:count]


def _root(salt: str | None) -> bytes:
    return bytes(32) if salt is None else hashlib.blake2b(salt.encode(), digest_size=32).digest()
