"""The hidden-state buffer: the target's states of positions that the drafter has not been fed yet.

While drafting is off, hundreds of states wait for every request. They lie in one tensor that is allocated at start-up,
before the remaining memory is divided into KV pages, so the memory they take is known.
Legend: N rows, X width of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice

import torch
from torch import Tensor

from verifier.request import Request
from workers.config import EngineConfig
from workers.transfer import to_device
from workers.workspace import max_backlog, max_message_rows, max_step_rows

Computed = Sequence[tuple[Request, list[int]]]
"""The rows of a step that hold each request's newest positions, the last of them its last computed position."""


def max_buffered_states(config: EngineConfig) -> int:
    """Return the most states that are ever buffered.

    A step adds no more rows than one message can feed, and requests over their backlog are fed first. The rows of a
    request's last tree may stay behind, because nothing is drafted after it.
    """
    return config.max_num_seqs * (max_backlog(config) + config.tree_rows) + 2 * max_message_rows(config)


def max_unsorted_states(config: EngineConfig) -> int:
    """Return the most states that are ever held outside the pool: those of a step, and a copy of them on their way."""
    return 2 * max(_MAX_UNSORTED_ROWS, max_step_rows(config))


class HiddenStatePool:
    """A fixed number of rows for states, on verifier rank 0. The caller records which row belongs to which request."""

    def __init__(self, num_rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._state_NX = torch.empty(num_rows, width, dtype=dtype, device=device)
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Return the number of free rows."""
        return len(self._free)

    def zeros(self, num_rows: int) -> Tensor:
        """Return so many states of zeros."""
        return self._state_NX.new_zeros(num_rows, self._state_NX.shape[1])

    def store(self, state_NX: Tensor) -> list[int]:
        """Copy the states into free rows and return the rows in the same order."""
        first = len(self._free) - len(state_NX)
        assert first >= 0, "the pool of hidden states is full"
        rows = self._free[first:]
        del self._free[first:]
        self._state_NX.index_copy_(0, to_device(rows, self._state_NX.device), state_NX.to(self._state_NX.dtype))
        return rows

    def take(self, rows: list[int]) -> Tensor:
        """Return the states [N, X] of these rows and free the rows."""
        self._free += rows
        return _select(self._state_NX, rows)

    def free(self, rows: list[int]) -> None:
        """Free these rows."""
        self._free += rows


_MAX_UNSORTED_ROWS = 512
"""States that may be held between steps outside the pool."""


class HiddenStateBuffer:
    """Holds each request's states until they are fed to the drafter.

    The states of a step stay in the step's own tensor until `flush` sorts them into the pool. Flushing several steps at
    once takes fewer kernel launches, and the states of requests that finish in the meantime are never copied.

    pool: None if the drafter reads no features. keep_page_ends: receives each request's rows of the states before they
    are sorted (`PrefixCache.keep_states`).
    """

    def __init__(
        self,
        pool: HiddenStatePool | None,
        keep_page_ends: Callable[[Mapping[Request, list[int]], Tensor], None],
    ) -> None:
        self._pool, self._keep_page_ends = pool, keep_page_ends
        self._pooled: dict[Request, list[int]] = {}  # rows of the pool, oldest position first
        self._computed: list[Computed] = []  # of each step since the last flush
        self._states: list[Tensor] = []
        self._num_unsorted = 0

    def rows_of(self, request: Request) -> Sequence[int]:
        """Return the rows of the pool that hold the request's states."""
        return self._pooled.get(request, ())

    def add(self, computed: Computed, state_NX: Tensor) -> None:
        """Add a step's states. The caller must not write to `state_NX` afterwards."""
        num_rows = len(state_NX)
        if self._num_unsorted + num_rows > _MAX_UNSORTED_ROWS:
            self.flush()  # otherwise a later flush would concatenate, and so copy, a large prompt's states
        self._computed.append(computed)
        self._states.append(state_NX)
        self._num_unsorted += num_rows
        if self._num_unsorted > _MAX_UNSORTED_ROWS:
            self.flush()

    def put(self, request: Request, state_NX: Tensor) -> None:
        """Add the states of positions that the request did not compute itself."""
        if self._pool is not None:
            self._pooled.setdefault(request, []).extend(self._pool.store(state_NX))

    def flush(self, leaving: Request | None = None) -> None:
        """Sort all added states into the pool, and those of page ends into the prefix cache.

        Must precede feeding the drafter and sharing a prefix. The states of `leaving` are not pooled.
        """
        if self._states:
            to_feed, state_NX = self._sorted(leaving)
            self._store(to_feed, state_NX)

    def take(self, counts: Mapping[Request, int]) -> Tensor | None:
        """Remove and return the oldest `counts[request]` states of each request, in order [N, X]. Flushes first.

        While trees are drafted in every step, these are all of the last step's: they do not go through the pool.
        Returns None without a pool or without states.
        """
        if self._states:
            to_feed, state_NX = self._sorted()
            takes_all = counts == {request: len(rows) for request, rows in to_feed.items()}
            if takes_all and counts and not any(map(self._pooled.get, counts)):
                return _select(state_NX, list(chain.from_iterable(map(to_feed.__getitem__, counts))))
            self._store(to_feed, state_NX)
        taken: list[int] = []
        for request, count in counts.items():
            if rows := self._pooled.get(request):
                taken += rows[:count]
                del rows[:count]
        if self._pool is None or not taken:
            return None
        assert len(taken) == sum(counts.values()), "every row that is fed has a state"
        return self._pool.take(taken)

    def free(self, request: Request) -> None:
        """Drop the states of a request that leaves."""
        self.flush(leaving=request)
        if self._pool is not None:
            self._pool.free(self._pooled.pop(request, []))

    def _sorted(self, leaving: Request | None = None) -> tuple[dict[Request, list[int]], Tensor]:
        """Return the added states, and which rows of them each request will feed. Nothing is added any more then."""
        rows_by_request = self._rows_by_request()
        state_NX = torch.cat(self._states) if len(self._states) > 1 else self._states[0]
        self._computed, self._states, self._num_unsorted = [], [], 0
        self._keep_page_ends(rows_by_request, state_NX)
        return {r: rows for r, rows in rows_by_request.items() if r.draft_room > 0 and r is not leaving}, state_NX

    def _store(self, to_feed: Mapping[Request, list[int]], state_NX: Tensor) -> None:
        """Put these rows into the pool."""
        assert self._pool is not None
        wanted = list(chain.from_iterable(to_feed.values()))
        if len(wanted) < len(state_NX):
            places = iter(self._pool.store(_select(state_NX, wanted)))
        else:
            places = map(self._pool.store(state_NX).__getitem__, wanted)
        for request, rows in to_feed.items():
            self._pooled.setdefault(request, []).extend(islice(places, len(rows)))

    def _rows_by_request(self) -> dict[Request, list[int]]:
        """Return the rows of every request that may be drafted for, in the concatenation of all steps' states."""
        rows_by_request: dict[Request, list[int]] = {}
        begin = 0
        for computed, state_NX in zip(self._computed, self._states, strict=True):
            for request, rows in computed:
                if request.has_drafter:
                    own = [begin + row for row in rows] if begin else rows
                    rows_by_request[request] = rows_by_request[request] + own if request in rows_by_request else own
            begin += len(state_NX)
        return rows_by_request


def _select(state_NX: Tensor, rows: Sequence[int]) -> Tensor:
    return state_NX.index_select(0, to_device(rows, state_NX.device))
