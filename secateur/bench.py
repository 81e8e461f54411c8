"""What `secateur bench acceptance` is asked to measure, checked before anything is loaded."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from secateur.config import EngineArgs
from secateur.errors import ConfigError, Problem
from secateur.schema import Strict
from secateur.token_tree import MAX_NODES

VARIED = (
    "num_speculative_tokens",
    "speculative_tree",
    "speculative_token_tree",
    "speculative_tree_prune",
    "speculative_tree_prune_min_prob",
    "speculative_tree_prune_path_prob",
    "speculative_tree_prune_threshold",
    "acceptance",
    "enable_draft_probs",
)
"""Settings of the speculative configuration that the benchmark itself goes through."""

PositiveInt = Annotated[int, Field(ge=1)]


class AcceptancePlan(Strict):
    """The cells of the table, and the requests that each of them answers."""

    temperatures: tuple[Annotated[float, Field(ge=0.0)], ...] = (
        *(0.0, 0.3, 0.5, 0.7),
        *(1.0, 1.3, 1.5, 2.0),
    )
    nodes: tuple[Annotated[int, Field(ge=1, le=MAX_NODES)], ...] = (4, 8, 16, 32)
    """Tree nodes per step, without the root."""
    num_prompts: PositiveInt = 24
    max_tokens: Annotated[int, Field(ge=2)] = 32
    """Per answer; it does not end earlier."""
    concurrency: PositiveInt = 8
    seed: Annotated[int, Field(ge=0)] = 0
    """Answer i of every cell has the seed H(seed, i)."""
    row_prices: tuple[Annotated[float, Field(gt=0.0)], ...] = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06)
    """`auto` is also shown apart from the machine: shares of a step that a request's verified row costs if drafting is
    free and the step shared by as many requests as are in flight."""

    @field_validator("temperatures", "nodes")
    @classmethod
    def _some(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        # `min_length` would complain of an empty tuple whenever an entry is wrong.
        if not values:
            raise ValueError("must have at least one entry")
        return values

    @classmethod
    def quick(cls) -> AcceptancePlan:
        """Under a minute: enough to see that everything works, and no more."""
        small = {"num_prompts": 4, "max_tokens": 24, "concurrency": 4}
        return cls(temperatures=(0.0, 1.0), nodes=(12,), row_prices=(0.03,), **small)


def check_drafter(args: EngineArgs, plan: AcceptancePlan) -> None:
    """Raises ConfigError unless there is a drafter, whose trees and rules are left to the benchmark."""
    spec = args.speculative_config
    if spec is None:
        raise ConfigError("without a drafter nothing is accepted: give --speculative-config '{\"model\": ...}'")
    if typed := [name for name in VARIED if name in spec.model_fields_set]:
        raise ConfigError(
            *(Problem(f"speculative_config.{name}", "is what the benchmark varies; remove it") for name in typed)
        )
    depth, children = spec.speculative_tree_max_depth, spec.speculative_tree_max_children
    if sum(children**level for level in range(1, depth + 1)) < max(plan.nodes):
        raise ConfigError(
            Problem(
                "--nodes", f"no tree of depth {depth} with {children} children per node has {max(plan.nodes)} nodes"
            )
        )
