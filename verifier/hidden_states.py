"""What the drafter will be told of positions that it has not been fed yet: the target's states, until they are fed.

While drafting does not pay they wait by the hundred for every request. They lie in one tensor that is made at start-up,
before memory is divided among KV pages, so that however many wait, what they take is known.
Legend: N rows, X width of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from verifier.draft_inputs import max_backlog, max_message_rows
from verifier.request import Request
from workers.config import EngineConfig
from workers.transfer import to_device


def max_buffered_states(config: EngineConfig) -> int:
    """States that wait at most: a step adds no more rows than a message may feed, and those of requests that are owed
    too much are fed first. A last tree's rows may stay behind, when nothing is drafted any more."""
    return config.max_num_seqs * (max_backlog(config) + config.tree_rows) + 2 * max_message_rows(config)


class HiddenStatePool:
    """On verifier rank 0. The caller keeps which rows are whose."""

    def __init__(self, num_rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._state_NX = torch.empty(num_rows, width, dtype=dtype, device=device)
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def keep(self, state_NX: Tensor) -> list[int]:
        """The rows where these wait from now on, in their order."""
        first = len(self._free) - len(state_NX)
        assert first >= 0, "more states wait than ever can"
        rows = self._free[first:]
        del self._free[first:]
        self._state_NX.index_copy_(0, to_device(rows, self._state_NX.device), state_NX.to(self._state_NX.dtype))
        return rows

    def take(self, rows: list[int]) -> Tensor:
        """The states [N, X] of these rows, which are free then."""
        self._free += rows
        return self._state_NX.index_select(0, to_device(rows, self._state_NX.device))

    def free(self, rows: list[int]) -> None:
        self._free += rows


_ROWS_AT_ONCE = 512
"""So many more states may be in memory between steps that nobody has counted."""


class HiddenStateBuffer:
    """What the last steps leave for the drafter, as they left it. Several are seen to at once: each alone takes longer,
    and what a request is owed that has ended by then need not be kept."""

    def __init__(
        self, waiting: HiddenStatePool | None, keep_ends: Callable[[dict[Request, list[int]], Tensor], None]
    ) -> None:
        self._waiting, self._keep_ends = waiting, keep_ends
        self._computed: list[list[tuple[Request, list[int]]]] = []  # of each step
        self._states: list[Tensor] = []
        self._num_rows = 0

    def add(self, computed: list[tuple[Request, list[int]]], state_NX: Tensor) -> None:
        """A step's states, and in which rows the newest positions of each request are, up to its last that is computed.
        Nobody may write to `state_NX` any more."""
        if self._num_rows + len(state_NX) > _ROWS_AT_ONCE:
            self.settle()  # or a large prompt's states would be copied to be beside others
        self._computed.append(computed)
        self._states.append(state_NX)
        self._num_rows += len(state_NX)
        if self._num_rows > _ROWS_AT_ONCE:
            self.settle()

    def settle(self, leaving: Request | None = None) -> None:
        """Puts every state where it belongs: to its request's, and to its page if it is that of a page's end. Comes
        before a request is fed or finds a prefix."""
        if not self._states:
            return
        assert self._waiting is not None
        owed = self._rows_by_request()
        state_NX = torch.cat(self._states) if len(self._states) > 1 else self._states[0]
        self._keep_ends(owed, state_NX)
        fed = {request: rows for request, rows in owed.items() if request.draft_room > 0 and request is not leaving}
        wanted: Sequence[int] = range(len(state_NX))
        if sum(map(len, fed.values())) < len(wanted):
            wanted = list(chain.from_iterable(fed.values()))
            state_NX = state_NX.index_select(0, to_device(wanted, state_NX.device))
        place_of = dict(zip(wanted, self._waiting.keep(state_NX), strict=True))
        for request, rows in fed.items():
            request.states += map(place_of.__getitem__, rows)
        self._computed, self._states, self._num_rows = [], [], 0

    def free(self, request: Request) -> None:
        """The request leaves."""
        self.settle(leaving=request)
        if self._waiting is not None:
            self._waiting.free(request.states)

    def _rows_by_request(self) -> dict[Request, list[int]]:
        """Rows of all steps' states, one behind the other, of whoever may ever be drafted for."""
        owed: dict[Request, list[int]] = {}
        begin = 0
        for computed, state_NX in zip(self._computed, self._states, strict=True):
            for request, rows in computed:
                if request.limits is not None:
                    owed.setdefault(request, []).extend(map(begin.__add__, rows))
            begin += len(state_NX)
        return owed
