"""The other fronts before the same engine: how many requests they have there, and of which priority."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

from cluster.system.shared import Shared

RESERVED = -math.inf
"""The priority of a request that is admitted and not submitted yet: it counts before all others."""


class Neighbours:
    """Tells other fronts of this one's requests, and counts theirs.

    capacity: the most requests that all fronts together may have. A front that dies keeps its places until another one
    has its number.
    """

    def __init__(self, shared: Shared, capacity: int) -> None:
        self._shared, self._own = shared, shared.number
        self._is_taken = shared.array("taken", (shared.num_fronts, capacity), bool)
        self._priorities = shared.array("priorities", (shared.num_fronts, capacity))
        self._is_taken[self._own] = False
        self._free, self._places = list(range(capacity)), dict[int, int]()

    @property
    def number(self) -> int:
        """The number of this front for the engine, to which 0 is the process that started it."""
        return 1 + self._own

    def put(self, id: int, priority: float = RESERVED) -> None:
        """Tell of a request, or of its priority."""
        if id not in self._places:
            self._places[id] = self._free.pop()
        place = self._own, self._places[id]
        self._priorities[place], self._is_taken[place] = priority, True

    def drop(self, id: int) -> None:
        """Tell of a request's end."""
        if (place := self._places.pop(id, None)) is not None:
            self._is_taken[self._own, place] = False
            self._free.append(place)

    def num_before(self, priority: float = math.inf) -> int:
        """Return how many requests of other fronts are served before a new one of this priority."""
        before = (self._is_taken & (self._priorities <= priority)).sum(axis=1)
        return int(before.sum() - before[self._own])

    def admitting(self) -> AbstractContextManager[None]:
        """Keep other fronts from admitting requests meanwhile."""
        return self._shared.locked()
