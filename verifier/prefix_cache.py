"""Automatic prefix caching: a request that begins like an earlier one shares its pages in both KV pools.

A page's key is the chained 256-bit BLAKE2b digest of the request's salt and of all tokens up to the page's end, so two
different prefixes never collide. A page is published when its slots hold final KV; the target never writes it again.
It is marked as drafted when the drafter's pool holds its tokens as well. A request shares any published page, and a
drafter that reads tokens alone is then fed those that it lacks. Beside an EAGLE head a request that is drafted for
shares drafted pages only, because the target's states that would fill in the others were not kept.

One state is kept for each page, that of its last token: the drafter's entry for the first token behind a shared prefix
of h tokens is (token h, feature of token h - 1). It is kept on verifier rank 0, from the step that computed it.

A hybrid can begin only where its recurrent state was kept, too. A few such checkpoints have seats of their own on every
rank. They lie behind the last full page of a prompt, where another one went its own way, and every thousand tokens. The
rows between the last checkpoint and the end of the published pages are computed again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from verifier.request import Request
from workers.kv_cache import NO_MATCH, Checkpoints, PageAllocator, PrefixMatch
from workers.transfer import to_device

CHECKPOINT_INTERVAL = 1024
"""Tokens between the recurrent states that are kept of a long text."""


class Keep(NamedTuple):
    """A recurrent state to keep: that of a request behind its first `position` tokens."""

    request: Request
    position: int
    seat: int


@dataclass(slots=True)
class _Published:
    """The keys of one request's leading full pages, and how many of these pages are published."""

    keys: list[bytes] = field(default_factory=list)
    num_pages: int = 0
    num_drafted: int = 0
    branch: int = 0  # pages that it found when it joined, if no state was kept behind any of them


class PrefixCache:
    """Knows which page holds which tokens. Owned by the engine, beside the allocator that it publishes to.

    checkpoints: of a hybrid; None = a request may begin behind any page.
    """

    def __init__(
        self, allocator: PageAllocator, page_size: int, *, is_enabled: bool, checkpoints: Checkpoints | None = None
    ) -> None:
        self._allocator = allocator
        self._checkpoints = checkpoints
        self._interval = max(1, CHECKPOINT_INTERVAL // page_size)  # in pages
        self._page_size = page_size
        self._is_enabled = is_enabled
        self._published: dict[Request, _Published] = {}
        self._state_PX: Tensor | None = None  # of each page's last token; the first states tell width and dtype

    def find(self, request: Request) -> PrefixMatch:
        """Return the pages that a waiting request may share.

        The request computes at least the token before its root itself. For a prompt that token's row draws the first
        output token. A request that asks for log-probabilities of its prompt computes all rows that they need.
        """
        if not self._is_enabled:
            return NO_MATCH
        keys = self._keys(request, request.num_shareable // self._page_size)
        is_drafted = request.has_drafter and request.reads_features
        found = self._allocator.find(keys, is_drafted=is_drafted)
        if self._checkpoints is None:
            return found
        count = len(found.pages)
        while count and keys[count - 1] not in self._checkpoints:
            count -= 1
        self._published[request].branch = 0 if count else len(found.pages)
        return self._allocator.find(keys[:count], is_drafted=is_drafted)

    def resume(self, request: Request, pages: list[int]) -> int:
        """Return the seat of the recurrent state behind these pages, which `find` returned; 0 if there is none."""
        if self._checkpoints is None or not pages:
            return 0
        return self._checkpoints.use(self._keys(request, len(pages))[-1])

    def keeps(self, spans: Iterable[tuple[Request, int, int]]) -> list[Keep]:
        """Return the recurrent states to keep in the next step, in which requests take in the positions start .. stop.

        Requests that join in that step have called `resume` before.
        """
        if not self._is_enabled or self._checkpoints is None:
            return []
        found, size = [], self._page_size
        for request, start, stop in spans:
            last = 0 if request.is_decoding else (request.root - 1) // size  # the most that an equal prompt can share
            for count in range(start // size + 1, stop // size + 1):
                if count in (last, self._published[request].branch) or self._is_regular(count):
                    seat = self._checkpoints.keep(self._keys(request, count)[-1])
                    found += [Keep(request, count * size, seat)] if seat is not None else []
        self._checkpoints.end_step()
        return found

    def _is_regular(self, count: int) -> bool:
        """Return whether a state is kept behind `count` pages of any text.

        The interval doubles from 8 of them on, so that a prompt of 128K tokens does not take all seats.
        """
        number, rest = divmod(count, self._interval)
        return not rest and number % (1 << max(0, (number - 1).bit_length() - 3)) == 0

    def share(self, request: Request, pages: list[int]) -> int:
        """Count a joining request among the holders of the pages that `find` returned for it.

        Returns how many of them, from the first, its drafter need not be fed.
        """
        self._allocator.share(pages)
        published = self._published.setdefault(request, _Published())
        published.num_pages = len(pages)
        published.num_drafted = self._allocator.num_drafted(pages) if request.has_drafter else 0
        return published.num_drafted

    def last_state(self, pages: list[int]) -> Tensor | None:
        """Return the state [1, X] of the last token of these pages; None if no states are kept."""
        return None if self._state_PX is None else self._state_PX.narrow(0, pages[-1], 1)

    def keep_states(self, rows_by_request: Mapping[Request, list[int]], state_NX: Tensor) -> None:
        """Keep the states of page ends. `rows_by_request` are the rows of each request's newest positions."""
        if not self._is_enabled:
            return
        kept, pages, size = [], [], self._page_size
        for request, rows in rows_by_request.items():
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
        """Publish the request's full pages among its first `num_settled` slots, whose KV has its final place.

        Must also precede the release of the request's pages.
        """
        if not self._is_enabled:
            return
        size = self._page_size
        published = self._published.get(request) or self._published.setdefault(request, _Published())
        if num_settled // size <= published.num_pages and request.num_fed // size <= published.num_drafted:
            return  # mostly
        full = min(num_settled, len(request.tokens)) // size
        fed = min(request.num_fed // size, full) if request.has_drafter else 0
        keys = self._keys(request, full)
        for index in range(published.num_pages, full):
            self._allocator.publish(request.pages[index], keys[index], is_drafted=False)
        for index in range(published.num_drafted, fed):
            self._allocator.publish(request.pages[index], keys[index], is_drafted=True)
        published.num_pages = max(published.num_pages, full)
        published.num_drafted = max(published.num_drafted, fed)

    def release(self, request: Request) -> None:
        """Forget the request's keys and which pages it has published; it no longer holds them."""
        self._published.pop(request, None)

    def _keys(self, request: Request, count: int) -> list[bytes]:
        """Return the keys of the request's first pages. They are kept, because tokens never change."""
        keys, size = self._published.setdefault(request, _Published()).keys, self._page_size
        for index in range(len(keys), count):
            parent = keys[-1] if keys else _root_key(request.submit.cache_salt)
            tokens = array("q", request.tokens[index * size : (index + 1) * size])
            keys.append(hashlib.blake2b(parent + tokens.tobytes(), digest_size=32).digest())
        return keys[:count]


def _root_key(salt: str | None) -> bytes:
    return bytes(32) if salt is None else hashlib.blake2b(salt.encode(), digest_size=32).digest()
