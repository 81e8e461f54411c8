"""Divides the time of a decoding step by its parts, from the statistics that an engine sends after every step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.bench.runner import StatsSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """Mean milliseconds per part of a decoding step; counts are per request and step."""

    num_steps: int
    tokens_per_step: float
    acceptance_length: float
    verified_per_step: float
    draft_ms: float
    transfer_ms: float
    pack_ms: float
    forward_ms: float
    accept_ms: float
    commit_ms: float
    """Allocating pages and committing tokens."""
    between_ms: float
    """Between two steps: receiving requests, scheduling."""

    @property
    def total_ms(self) -> float:
        """The whole step."""
        return self.draft_ms + self.transfer_ms + self.forward_ms + self.host_ms

    @property
    def host_ms(self) -> float:
        """The time of the engine's host code."""
        return self.pack_ms + self.accept_ms + self.commit_ms + self.between_ms

    @property
    def outside_models(self) -> float:
        """Share of the step in which neither model computes."""
        return (self.host_ms + self.transfer_ms) / self.total_ms

    @property
    def row(self) -> dict[str, Any]:
        """All of it as the row of a report."""
        return {**asdict(self), "total_ms": self.total_ms, "outside_models": self.outside_models}


def decoding_steps(snapshots: Sequence[StatsSnapshot], batch: int) -> StepBreakdown | None:
    """Average the steps in which exactly `batch` requests decode and no prompt is computed; None without any.

    The first step after a prompt does not count, because the drafter reads the prompt in it. The time between steps is
    taken where no request finishes: the engine tells of such a step in the middle of the next, of the last at its end.
    """
    spans = []
    for before, old, new in zip(snapshots, snapshots[1:], snapshots[2:], strict=False):
        had_prompt = new.stats.prompt_tokens > before.stats.prompt_tokens
        is_full = old.stats.num_running == batch and old.stats.num_waiting == 0
        if not had_prompt and is_full and new.stats.steps == old.stats.steps + 1:
            spans.append((old, new))
    if not spans:
        return None
    count = len(spans)
    between = [
        new.at - old.at - (new.stats.step_seconds - old.stats.step_seconds)
        for old, new in spans
        if new.stats.num_running == batch
    ]

    def mean_ms(name: str) -> float:
        return 1e3 * sum(getattr(new.stats, name) - getattr(old.stats, name) for old, new in spans) / count

    def per_request(name: str) -> float:
        return sum(getattr(new.stats, name) - getattr(old.stats, name) for old, new in spans) / count / batch

    draft, transfer, forward, accept = map(
        mean_ms, ("draft_seconds", "transfer_seconds", "forward_seconds", "accept_seconds")
    )
    verify, step, drafts = mean_ms("verify_seconds"), mean_ms("step_seconds"), per_request("num_drafts")
    return StepBreakdown(
        num_steps=count,
        tokens_per_step=per_request("generation_tokens"),
        acceptance_length=1 + per_request("num_accepted_tokens") / drafts if drafts else 1.0,
        verified_per_step=per_request("num_verified_tokens"),
        draft_ms=draft,
        transfer_ms=transfer,
        pack_ms=verify - forward - accept,
        forward_ms=forward,
        accept_ms=accept,
        commit_ms=step - verify - draft - transfer,
        between_ms=1e3 * sum(between) / max(1, len(between)),
    )


def median_steps(turns: Sequence[StepBreakdown]) -> StepBreakdown | None:
    """Return the median of each part over the turns; None without any."""
    if not turns:
        return None
    values = [asdict(turn) for turn in turns]
    medians = {key: statistics.median(value[key] for value in values) for key in values[0]}
    return StepBreakdown(**medians | {"num_steps": int(medians["num_steps"])})
