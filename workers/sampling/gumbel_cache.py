"""A cache of the target's Gumbel noise: every position is needed on several tree levels and in several steps.

Drafter and verifier read G(seed, index, token) for the same few positions after each request's root, and the root moves
by fewer positions per step than a tree is deep. Legend: R rows, W token ids of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from workers.sampling.philox import gumbel
from workers.transfer import to_device

MAX_BYTES = 64 << 20
"""Size of the cache: 8,192 rows of a vocabulary of 2,048, or 110 of 151,936."""
_VALUES_AHEAD, _INDICES_AHEAD = 1 << 17, 16
"""How much is computed at once on CPU when a row is missing. It is limited because outputs end."""

Key = tuple[int, int]


class GumbelCache:
    """Noise of target ids [start, stop), or of a subset `ids` of them, by (seed, index). make: `Kernels.gumbel`."""

    def __init__(self, start: int, stop: int, ids: Tensor | None = None, make: Callable[..., Tensor] = gumbel) -> None:
        self._range, self._ids, self._make = (start, stop), ids, make
        self._most = max(1, MAX_BYTES // (4 * max(1, stop - start if ids is None else len(ids))))
        self._row: dict[Key, Tensor] = {}  # oldest first

    def rows(self, seeds: Sequence[int], indices: Sequence[int], device: torch.device | str) -> Tensor:
        """Return the noise, float32 [R, W] on the device, or [1, W] if all rows have the same key."""
        keys = list(zip(seeds, indices, strict=True))
        different = dict.fromkeys(keys)
        missing = [key for key in different if key not in self._row]
        if missing:
            self._compute(self._and_following(missing) if torch.device(device).type == "cpu" else missing, device)
        noise = self._row[keys[0]][None] if len(different) == 1 else torch.stack([self._row[key] for key in keys])
        while len(self._row) > self._most:
            del self._row[next(iter(self._row))]
        return noise

    def prepare(
        self, seeds: Sequence[int], first: Sequence[int], counts: Sequence[int], device: torch.device | str
    ) -> None:
        """Compute what `rows` will need: `counts` positions from `first` on for each seed.

        Does nothing if that would evict entries that are in use.
        """
        if sum(counts) <= self._most // 2:
            spans = zip(seeds, first, counts, strict=True)
            self._compute([(seed, start + i) for seed, start, count in spans for i in range(count)], device)

    def _and_following(self, keys: list[Key]) -> dict[Key, None]:
        """Add each seed's next positions, which later steps need; computed together they take a third of the time."""
        start, stop = self._range
        most = min(_VALUES_AHEAD // (stop - start), self._most // 2)
        count = min(max(1, most // len(keys)), _INDICES_AHEAD)
        return dict.fromkeys((seed, index + i) for seed, index in keys for i in range(count))

    def _compute(self, keys: Iterable[Key], device: torch.device | str) -> None:
        missing = [key for key in keys if key not in self._row]
        if missing:
            columns = to_device(torch.tensor(missing, dtype=torch.int64), device)
            noise = self._make(columns[:, 0], columns[:, 1], *self._range)
            rows: Iterable[Tensor] = noise if self._ids is None else noise[:, self._ids]
            if len(missing) > self._most:  # a view would keep the evicted rows alive
                rows = map(torch.clone, rows)
            self._row.update(zip(missing, rows, strict=True))
