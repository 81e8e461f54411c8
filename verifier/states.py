"""What the drafter will be told of positions that it has not been fed yet: the target's states, until they are fed.

While drafting does not pay they wait by the hundred for every request. They lie in one tensor that is made at start-up,
before memory is divided among KV pages, so that however many wait, what they take is known.
Legend: N rows, X width of a state.
"""

from __future__ import annotations

from itertools import chain, compress, islice, repeat
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verifier.feeds import max_backlog, most_fed
from verifier.request import Request
from workers.config import EngineConfig
from workers.transfer import sent

if TYPE_CHECKING:
    from verifier.prefixes import Prefixes


def most_waiting(config: EngineConfig) -> int:
    """States that wait at most: a step adds no more rows than a message may feed, and those of requests that are owed
    too much are fed first. A last tree's rows may stay behind, when nothing is drafted any more."""
    return config.max_num_seqs * (max_backlog(config) + config.tree_rows) + 2 * most_fed(config)


class WaitingStates:
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
        self._state_NX.index_copy_(0, sent(rows, self._state_NX.device), state_NX.to(self._state_NX.dtype))
        return rows

    def take(self, rows: list[int]) -> Tensor:
        """The states [N, X] of these rows, which are free then."""
        self._free += rows
        return self._state_NX.index_select(0, sent(rows, self._state_NX.device))

    def free(self, rows: list[int]) -> None:
        self._free += rows


_STEPS_AT_ONCE = 64
_ROWS_AT_ONCE = 512
"""So many more states may be in memory that nobody has counted."""


class OwedStates:
    """What the last steps leave for the drafter. Several are seen to at once: each alone takes longer, and what a
    request is owed that has ended by then need not be kept."""

    def __init__(self, waiting: WaitingStates | None, prefixes: Prefixes) -> None:
        self._waiting, self._prefixes = waiting, prefixes
        self._owed: list[tuple[Request, slice]] = []  # positions
        self._states: list[Tensor] = []  # of each step
        self._num_rows = 0

    def add(self, owed: list[tuple[Request, int]], state_NX: Tensor) -> None:
        """The states of so many newest positions of each request, packed. Nobody may write to `state_NX` any more."""
        if self._num_rows + len(state_NX) > _ROWS_AT_ONCE:
            self.settle()
        self._owed += [(r, slice(r.num_computed - count, r.num_computed)) for r, count in owed]
        self._states.append(state_NX)
        self._num_rows += len(state_NX)
        if len(self._states) == _STEPS_AT_ONCE:
            self.settle()

    def settle(self) -> None:
        """Puts every state where it belongs: to its request's, and to its page if it is that of a page's end. Comes
        before a request is fed, finds a prefix, or leaves."""
        if not self._owed:
            return
        assert self._waiting is not None
        state_NX = torch.cat(self._states) if len(self._states) > 1 else self._states[0]
        self._prefixes.keep_states(self._owed, state_NX)
        sizes = [positions.stop - positions.start for _, positions in self._owed]
        is_fed = [request.draft_room > 0 for request, _ in self._owed]
        if not all(is_fed):
            wanted = [row for row, is_own in enumerate(chain.from_iterable(map(repeat, is_fed, sizes))) if is_own]
            state_NX = state_NX.index_select(0, sent(wanted, state_NX.device))
        rows = iter(self._waiting.keep(state_NX))
        for (request, _), size in compress(zip(self._owed, sizes, strict=True), is_fed):
            request.states += islice(rows, size)
        self._owed, self._states, self._num_rows = [], [], 0

    def free(self, request: Request) -> None:
        """The request leaves."""
        self.settle()
        if self._waiting is not None:
            self._waiting.free(request.states)
