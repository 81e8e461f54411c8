"""Keeps what was verified lately, in memory of known size: windows of tokens and the features that they came with.

A window is learnt from at once, or first scored by the canary, or held out: a few of each tenant show what a head costs
them, however little of the traffic is theirs. Those to learn from, and those held out, are samples of the last hour.
Legend: B requests of a message, M its rows, N rows of a window, H width of a feature.
"""

from __future__ import annotations

import random
import time
from collections import Counter
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
MAX_HELD = 12
"""Windows of one tenant that are never learnt from."""
MAX_TENANTS = 16
"""That are told apart; later ones are one."""
_QUIET_MESSAGES = 64
"""A request that had no rows in so many messages has ended."""


class Window(NamedTuple):
    """Consecutive rows of one request: row n has token t and the target's feature of the token before it."""

    token_N: Tensor  # int64
    features_NH: Tensor
    begin: int  # the first row whose token the target drew, or that is not context
    temperature: float
    born_s: float
    tenant: int = 0

    @property
    def num_bytes(self) -> int:
        """Return the memory that it takes, roughly."""
        return self.features_NH.nbytes + self.token_N.nbytes


class _Open:
    """A request's rows since its last whole window."""

    def __init__(self, begin: int, temperature: float, tenant: int) -> None:
        self.tokens: list[int] = []
        self.features: list[Tensor] = []
        self.begin, self.temperature, self.tenant = begin, temperature, tenant
        self.next_slot = self.seen = 0

    def window(self) -> Window | None:
        """Return the rows as a window; None if too few of them are the target's own."""
        if len(self.tokens) - self.begin < FEWEST:
            return None
        return Window(
            torch.tensor(self.tokens),
            torch.cat(self.features),
            self.begin,
            self.temperature,
            time.monotonic(),
            self.tenant,
        )

    def keep_context(self) -> None:
        """Go on behind the window that was taken."""
        self.tokens, features_NH = self.tokens[-CONTEXT:], torch.cat(self.features)
        self.features, self.begin = [features_NH[-CONTEXT:].clone()], len(self.tokens)


class Reservoir:
    """Holds windows of requests that may be learnt from. It is never written to disk.

    learnt: to learn from. held: never to learn from, by tenant. fresh: for the canary, at most the newest `max_fresh`
    of a share of all windows; a learner learns from them afterwards.
    """

    def __init__(self, max_fresh: int, seed: int = 0, fresh_share: float = 0.5) -> None:
        self.learnt: list[Window] = []
        self.fresh: list[Window] = []
        self.held: dict[int, list[Window]] = {}
        self._num_held: Counter[int] = Counter()  # ever offered, by tenant
        self.num_rows = 0  # ever kept
        self._max_fresh, self._fresh_share, self._random = max_fresh, fresh_share, random.Random(seed)
        self._open: dict[int, _Open] = {}
        self._num_messages = self._num_offered = 0

    def add(self, message: DraftRequest) -> None:
        """Keep a copy of the rows of a message whose requests may be learnt from."""
        self._num_messages += 1
        if message.learn is None or message.features_MH is None:
            return
        ends, slots = message.offsets.tolist(), message.start_B.tolist()
        told = message.learn
        rules = zip(told.id_B.tolist(), told.num_prompt_B.tolist(), told.tenant_B.tolist(), strict=True)
        temperatures = message.sampling.temperature_B.tolist()
        for b, (id, num_prompt, tenant) in enumerate(rules):
            first = ends[b] + max(0, num_prompt - CONTEXT - slots[b])
            if id and first < ends[b + 1]:
                begin = max(0, num_prompt - (slots[b] + first - ends[b]))
                own = self._open.get(id)
                if own is None or own.next_slot != slots[b] + first - ends[b]:  # it began anew after a preemption
                    self._keep(own.window() if own else None)
                    own = self._open[id] = _Open(begin, temperatures[b], tenant)
                own.seen, own.next_slot = self._num_messages, slots[b] + ends[b + 1] - ends[b]
                own.tokens += message.token_M[first : ends[b + 1]].tolist()
                own.features.append(message.features_MH[first : ends[b + 1]].clone())
                if len(own.tokens) >= WINDOW:
                    self._keep(own.window())
                    own.keep_context()
        if self._num_messages % _QUIET_MESSAGES == 0:
            self.sweep(_QUIET_MESSAGES)

    def sweep(self, quiet_messages: int) -> None:
        """Close the windows of requests without rows in so many messages, and forget what is old."""
        for id, own in list(self._open.items()):
            if own.seen <= self._num_messages - quiet_messages:
                self._keep(self._open.pop(id).window())
        oldest = time.monotonic() - MAX_AGE_S
        self.learnt = [window for window in self.learnt if window.born_s >= oldest]
        self.fresh = [window for window in self.fresh if window.born_s >= oldest]
        held = {tenant: [own for own in windows if own.born_s >= oldest] for tenant, windows in self.held.items()}
        self.held = {tenant: windows for tenant, windows in held.items() if windows}

    def _keep(self, window: Window | None) -> None:
        if window is None:
            return
        self.num_rows += len(window.token_N) - window.begin
        place = self._random.random()
        if place < self._fresh_share:
            self.fresh = [*self.fresh[-self._max_fresh + 1 :], window]
        elif place > (1 + self._fresh_share) / 2 or not self._hold(window):
            self.learn(window)

    def _hold(self, window: Window) -> bool:
        """Hold a window out, unless others of its tenant stay or it has the same tokens as one of them."""
        tenant = window.tenant if window.tenant in self.held or len(self.held) < MAX_TENANTS else 0
        held, tokens = self.held.setdefault(tenant, []), set(window.token_N.tolist())
        if any(tokens == set(other.token_N.tolist()) for other in held):
            return False
        self._num_held[tenant] += 1
        if len(held) < MAX_HELD:
            held.append(window)
        elif (place := self._random.randrange(self._num_held[tenant])) < MAX_HELD:
            held[place] = window
        else:
            return False
        return True

    def learn(self, window: Window) -> None:
        """Add a window to learn from, in place of another one if there is no room."""
        self._num_offered += 1
        if (len(self.learnt) + 1) * window.num_bytes <= MAX_BYTES:
            self.learnt.append(window)
        elif (place := self._random.randrange(self._num_offered)) < 2 * len(self.learnt):
            self.learnt[place % len(self.learnt)] = window

    def sample(self) -> Window:
        """Return one of the windows to learn from: of each tenant as often."""
        tenant = self._random.choice(sorted({window.tenant for window in self.learnt}))
        return self._random.choice([window for window in self.learnt if window.tenant == tenant])
