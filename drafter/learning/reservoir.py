"""Keeps what was verified lately, in memory of known size: windows of tokens and the features that they came with.

A window is learnt from at once, or first scored by the canary. Those to learn from are a sample of the last hour.
Legend: B requests of a message, M its rows, N rows of a window, H width of a feature.
"""

from __future__ import annotations

import random
import time
from typing import NamedTuple

import torch
from torch import Tensor

from workers.types import DraftRequest

WINDOW = 48
CONTEXT = 16
"""Rows of a window that are only read, because what follows attends to them."""
FEWEST = 8
"""Rows behind its context that make a window worth keeping."""
MAX_BYTES = 64 << 20
MAX_AGE_S = 3600.0
_QUIET_MESSAGES = 64
"""A request that had no rows in so many messages has ended."""


class Window(NamedTuple):
    """Consecutive rows of one request: row n has token t and the target's feature of the token before it."""

    token_N: Tensor  # int64
    features_NH: Tensor
    begin: int  # the first row whose token the target drew, or that is not context
    temperature: float
    born_s: float

    @property
    def num_bytes(self) -> int:
        """Return the memory that it takes, roughly."""
        return self.features_NH.nbytes + self.token_N.nbytes


class _Open:
    """A request's rows since its last whole window."""

    def __init__(self, begin: int, temperature: float) -> None:
        self.tokens: list[int] = []
        self.features: list[Tensor] = []
        self.begin, self.temperature = begin, temperature
        self.next_slot = self.seen = 0

    def window(self) -> Window | None:
        """Return the rows as a window; None if too few of them are the target's own."""
        if len(self.tokens) - self.begin < FEWEST:
            return None
        now = time.monotonic()
        return Window(torch.tensor(self.tokens), torch.cat(self.features), self.begin, self.temperature, now)

    def keep_context(self) -> None:
        """Go on behind the window that was taken."""
        self.tokens, features_NH = self.tokens[-CONTEXT:], torch.cat(self.features)
        self.features, self.begin = [features_NH[-CONTEXT:].clone()], len(self.tokens)


class Reservoir:
    """Holds windows of requests that may be learnt from. It is never written to disk.

    learnt: to learn from. fresh: for the canary, at most the newest `max_fresh`; it hands them to `learn` afterwards.
    """

    def __init__(self, max_fresh: int, seed: int = 0) -> None:
        self.learnt: list[Window] = []
        self.fresh: list[Window] = []
        self.num_rows = 0  # ever kept
        self._max_fresh, self._random = max_fresh, random.Random(seed)
        self._open: dict[int, _Open] = {}
        self._num_messages = self._num_offered = 0

    def add(self, message: DraftRequest) -> None:
        """Keep a copy of the rows of a message whose requests may be learnt from."""
        self._num_messages += 1
        if message.learn is None or message.features_MH is None:
            return
        ends, slots = message.offsets.tolist(), message.start_B.tolist()
        rules = zip(message.learn.id_B.tolist(), message.learn.num_prompt_B.tolist(), strict=True)
        temperatures = message.sampling.temperature_B.tolist()
        for b, (id, num_prompt) in enumerate(rules):
            first = ends[b] + max(0, num_prompt - CONTEXT - slots[b])
            if id and first < ends[b + 1]:
                begin = max(0, num_prompt - (slots[b] + first - ends[b]))
                own = self._open.get(id)
                if own is None or own.next_slot != slots[b] + first - ends[b]:  # it began anew after a preemption
                    self._keep(own.window() if own else None)
                    own = self._open[id] = _Open(begin, temperatures[b])
                own.seen, own.next_slot = self._num_messages, slots[b] + ends[b + 1] - ends[b]
                own.tokens += message.token_M[first : ends[b + 1]].tolist()
                own.features.append(message.features_MH[first : ends[b + 1]].clone())
                if len(own.tokens) >= WINDOW:
                    self._keep(own.window())
                    own.keep_context()
        if self._num_messages % _QUIET_MESSAGES == 0:
            self._sweep()

    def _sweep(self) -> None:
        """Close the windows of requests that have ended, and forget what is old."""
        for id, own in list(self._open.items()):
            if own.seen <= self._num_messages - _QUIET_MESSAGES:
                self._keep(self._open.pop(id).window())
        oldest = time.monotonic() - MAX_AGE_S
        self.learnt = [window for window in self.learnt if window.born_s >= oldest]
        self.fresh = [window for window in self.fresh if window.born_s >= oldest]

    def _keep(self, window: Window | None) -> None:
        if window is None:
            return
        self.num_rows += len(window.token_N) - window.begin
        if self._random.random() < 0.5:
            self.fresh = [*self.fresh[-self._max_fresh + 1 :], window]
        else:
            self.learn(window)

    def learn(self, window: Window) -> None:
        """Add a window to learn from, in place of another one if there is no room."""
        self._num_offered += 1
        if (len(self.learnt) + 1) * window.num_bytes <= MAX_BYTES:
            self.learnt.append(window)
        elif (place := self._random.randrange(self._num_offered)) < 2 * len(self.learnt):
            self.learnt[place % len(self.learnt)] = window

    def sample(self) -> Window:
        """Return one of the windows to learn from."""
        return self._random.choice(self.learnt)
