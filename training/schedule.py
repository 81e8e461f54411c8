"""Wall-clock budgets, the learning-rate schedule, and the pair of optimisers of all models."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from training.muon import Muon

logger = logging.getLogger(__name__)

MUON_LR = 0.02
ADAMW_LR = 0.003
MUON_WEIGHT_DECAY = 0.05
WARMUP_STEPS = 30
DECAY_FROM = 0.4
"""The learning rate is constant up to this fraction of the training, then falls linearly to nearly zero."""
NOT_HIDDEN = ("embed", "lm_head", "markov")
"""In the names of matrices with a row for each token."""
LOG_SECONDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBudget:
    """A span of wall-clock time. Example: `TimeBudget.from_now(60).fraction()` is 0.5 after half a minute."""

    start: float
    seconds: float

    @classmethod
    def from_now(cls, seconds: float) -> TimeBudget:
        """Return a budget of `seconds` that begins now."""
        return cls(start=time.monotonic(), seconds=max(seconds, 1e-3))

    def fraction(self) -> float:
        """Return the fraction of the budget that has passed."""
        return (time.monotonic() - self.start) / self.seconds

    def remaining(self) -> float:
        """Return the seconds that remain."""
        return self.start + self.seconds - time.monotonic()


def lr_factor(step: int, fraction: float) -> float:
    """Return the learning-rate factor: warm-up by steps, decay by the fraction of the training that is done."""
    decay = 1.0 if fraction < DECAY_FROM else max(0.02, (1 - fraction) / (1 - DECAY_FROM))
    return min(1.0, (step + 1) / WARMUP_STEPS) * decay


class Optimisers:
    """Muon for hidden matrices, AdamW for embeddings, output heads and gains.

    fraction: returns how much of the training is done, which the learning rates of both follow.
    """

    def __init__(self, model: nn.Module, fraction: Callable[[], float], name: str, muon_lr: float = MUON_LR):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        is_hidden = {n: p.ndim == 2 and not any(part in n for part in NOT_HIDDEN) for n, p in named}
        hidden = [p for n, p in named if is_hidden[n]]
        others = [p for n, p in named if not is_hidden[n]]
        self.optimisers = (
            Muon(hidden, lr=muon_lr, weight_decay=MUON_WEIGHT_DECAY),
            torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self.peak_lrs = (muon_lr, ADAMW_LR)
        self.fraction, self.name = fraction, name
        self.num_steps, self.num_tokens, self.last_log = 0, 0, time.monotonic()
        self.logged_tokens = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a later process needs to go on as if this one had not stopped."""
        states = [optimiser.state_dict() for optimiser in self.optimisers]
        return {"optimisers": states, "num_steps": self.num_steps, "num_tokens": self.num_tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        for optimiser, own in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(own)
        self.num_steps = state["num_steps"]
        self.num_tokens = self.logged_tokens = state["num_tokens"]

    def step(self, loss: Tensor, num_tokens: int) -> None:
        """Backpropagate, clip and update. Every 20 steps, synchronize the device, so that timing is right, and log."""
        factor = lr_factor(self.num_steps, self.fraction())
        for optimiser, lr in zip(self.optimisers, self.peak_lrs, strict=True):
            optimiser.param_groups[0]["lr"] = lr * factor
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.num_steps += 1
        self.num_tokens += num_tokens
        if self.num_steps % 20 == 0:
            if loss.is_cuda:
                torch.cuda.synchronize()
            self._maybe_log(loss)

    def _maybe_log(self, loss: Tensor) -> None:
        if time.monotonic() - self.last_log > LOG_SECONDS:
            rate = (self.num_tokens - self.logged_tokens) / (time.monotonic() - self.last_log)
            self.last_log, self.logged_tokens = time.monotonic(), self.num_tokens
            logger.info("%s: step %d, loss %.3f, %.0f tokens/s, %.0f %% done",
                        self.name, self.num_steps, loss.item(), rate, 100 * self.fraction())  # fmt: skip
