"""The rows of the acceptance table, one per cell, with all that the report and the plots need."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from cluster.bench.runner import GeneratedAnswer
    from workers.comm.ipc import Speculation

Tree = Literal["chain", "static", "dynamic"]
Acceptance = Literal["coupled", "rejection", "none"]
ACCEPTANCES: tuple[Acceptance, ...] = ("coupled", "rejection", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningSetting:
    """How a cell prunes its trees; by default it does not."""

    prune: Literal["off", "thresholds", "auto"] = "off"
    min_prob: float = 0.0
    path_prob: float = 0.0
    row_price: float | None = None
    """Cost of a verified row as a share of a step, for `auto` with given costs. None = measured costs."""

    def __str__(self) -> str:
        if self.row_price is not None:
            return f"auto at {self.row_price:g} a row"
        if self.prune != "thresholds":
            return self.prune
        return f"min_prob {self.min_prob:g}" if self.min_prob else f"path_prob {self.path_prob:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceCell:
    """The settings of one row.

    Example: AcceptanceCell(tree="dynamic", acceptance="coupled", num_nodes=16, temperature=1.0)
    """

    tree: Tree
    acceptance: Acceptance
    num_nodes: int
    temperature: float
    pruning: PruningSetting = PruningSetting()

    @property
    def speculation(self) -> Speculation:
        """The request parameters. `none` is rejection without draft probabilities: top-k children, target only."""
        from workers.comm.ipc import Speculation  # needs msgpack, which plotting does not

        return Speculation(
            num_speculative_tokens=self.num_nodes,
            auto=self.pruning.prune == "auto",
            min_prob=self.pruning.min_prob,
            path_prob=self.pruning.path_prob,
            acceptance="coupled" if self.acceptance == "coupled" else "rejection",
            draft_probs=self.acceptance == "rejection",
        )

    def __str__(self) -> str:
        pruned = "" if self.pruning.prune == "off" else f", {self.pruning}"
        return f"{self.tree} of {self.num_nodes}, {self.acceptance}, T={self.temperature:g}{pruned}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceRow:
    """One row of the table. Counts per token cover all generated tokens; acceptance covers steps with a draft."""

    method: str
    tree: Tree
    acceptance: Acceptance
    num_speculative_tokens: int
    """The budget of draft nodes per step."""
    temperature: float
    max_depth: int
    """The depth cap, also of chains."""
    num_nodes: int
    """Nodes of the largest tree within budget and cap."""
    static_tree: str | None
    prune: Literal["off", "thresholds", "auto"]
    prune_min_prob: float
    prune_path_prob: float
    prune_row_price: float | None
    """See `PruningSetting`."""
    acceptance_length: float
    """1 + accepted / drafts over all prompts: tokens per step with at least one draft node."""
    acceptance_length_se: float | None
    """Standard error of the mean over prompts; None with a single one."""
    acceptance_lengths: list[float]
    """The same for each prompt, in the same order in all rows."""
    tokens_per_step: float
    """Over all decoding steps, including those that pruning left without a draft."""
    verified_per_token: float
    drafted_per_token: float
    tokens_per_second: float
    num_prompts: int
    num_tokens: int

    @property
    def pruning(self) -> PruningSetting:
        """How the row's trees were pruned."""
        return PruningSetting(
            prune=self.prune,
            min_prob=self.prune_min_prob,
            path_prob=self.prune_path_prob,
            row_price=self.prune_row_price,
        )


def row_of(
    cell: AcceptanceCell,
    answers: Sequence[GeneratedAnswer],
    seconds: float,
    *,
    method: str,
    budget: int,
    max_depth: int,
    static_tree: str | None = None,
) -> AcceptanceRow:
    """Make the row of a cell that took `seconds`. budget: the node budget the row is listed under."""
    num_tokens = sum(len(answer.tokens) for answer in answers)
    lengths = [acceptance_length([answer]) for answer in answers]
    return AcceptanceRow(
        method=method,
        tree=cell.tree,
        acceptance=cell.acceptance,
        num_speculative_tokens=budget,
        temperature=cell.temperature,
        max_depth=max_depth,
        num_nodes=cell.num_nodes,
        static_tree=static_tree,
        prune=cell.pruning.prune,
        prune_min_prob=cell.pruning.min_prob,
        prune_path_prob=cell.pruning.path_prob,
        prune_row_price=cell.pruning.row_price,
        acceptance_length=round(acceptance_length(answers), 4),
        acceptance_length_se=round(standard_error(lengths), 4) if len(lengths) > 1 else None,
        acceptance_lengths=[round(length, 4) for length in lengths],
        tokens_per_step=round((num_tokens - len(answers)) / max(1, sum(answer.num_steps for answer in answers)), 4),
        verified_per_token=round(sum(answer.stats.num_verified_tokens for answer in answers) / num_tokens, 4),
        drafted_per_token=round(sum(answer.stats.num_draft_tokens for answer in answers) / num_tokens, 4),
        tokens_per_second=round(num_tokens / seconds, 1),
        num_prompts=len(answers),
        num_tokens=num_tokens,
    )


def acceptance_length(answers: Sequence[GeneratedAnswer]) -> float:
    """Return 1 + accepted / drafts, or 1 if nothing was drafted."""
    drafts = sum(answer.stats.num_drafts for answer in answers)
    return 1 + sum(answer.stats.num_accepted_tokens for answer in answers) / max(1, drafts)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of two or more values."""
    return statistics.stdev(values) / len(values) ** 0.5
