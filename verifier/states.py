"""What the drafter will be told of positions that it has not been fed yet: the target's states, until they are fed.

While drafting does not pay they wait by the hundred for every request. They lie in one tensor that is made at start-up,
before memory is divided among KV pages, so that however many wait, what they take is known.
Legend: N rows, X width of a state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verifier.feeds import max_backlog, most_fed
from workers.config import EngineConfig
from workers.transfer import sent


def most_waiting(config: EngineConfig) -> int:
    """States that wait at most: a step adds no more rows than a message may feed, and those of requests that are owed
    too much are fed first. A last tree's rows may stay behind, when nothing is drafted any more."""
    return config.max_num_seqs * (max_backlog(config) + config.tree_rows) + 2 * most_fed(config)


_STEPS_AT_ONCE = 16
_FEW = 64
"""A step's new states, if they are few, are moved to their rows with those of other steps: on CPU a move takes 100 us,
cold, however few they are."""


class WaitingStates:
    """On verifier rank 0. The caller keeps which rows are whose."""

    def __init__(self, num_rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._state_NX = torch.empty(num_rows, width, dtype=dtype, device=device)
        self._free = list(range(num_rows - 1, -1, -1))
        self._new: list[Tensor] = []  # not in their rows yet ...
        self._new_rows: list[int] = []  # ... which are these
        self._left: list[int] = []  # free as soon as the new ones are in their rows

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._left)

    def keep(self, state_NX: Tensor) -> list[int]:
        """The rows where these wait from now on, in their order. Nobody may write to `state_NX` any more."""
        if len(state_NX) > len(self._free):
            self._move()
        first = len(self._free) - len(state_NX)
        assert first >= 0, "more states wait than ever can"
        rows = self._free[first:]
        del self._free[first:]
        if len(rows) > _FEW:
            self._put(rows, state_NX)
            return rows
        self._new.append(state_NX)
        self._new_rows += rows
        if len(self._new) == _STEPS_AT_ONCE:
            self._move()
        return rows

    def take(self, rows: list[int]) -> Tensor:
        """The states [N, X] of these rows, which are free then."""
        self._move()
        self._free += rows
        return self._state_NX.index_select(0, sent(rows, self._state_NX.device))

    def free(self, rows: list[int]) -> None:
        self._left += rows

    def _move(self) -> None:
        if self._new:
            self._put(self._new_rows, torch.cat(self._new))
        self._free += self._left
        self._new, self._new_rows, self._left = [], [], []

    def _put(self, rows: list[int], state_NX: Tensor) -> None:
        self._state_NX.index_copy_(0, sent(rows, self._state_NX.device), state_NX.to(self._state_NX.dtype))
