"""Measurement plans of `secateur bench`, validated before anything is loaded."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field

from secateur.config import EngineArgs
from secateur.errors import ConfigError, Problem
from secateur.schema import Strict
from secateur.settings import ALL_THRESHOLDS, TREE_RULES
from secateur.token_tree import MAX_NODES

VARIED = (
    "num_speculative_tokens",
    "speculative_tree",
    "speculative_token_tree",
    "speculative_tree_prune",
    *TREE_RULES,
    ALL_THRESHOLDS,
    "acceptance",
    "enable_draft_probs",
)
"""Speculative settings that the benchmark itself varies."""

Entry = TypeVar("Entry")


def _not_empty(values: tuple[Entry, ...]) -> tuple[Entry, ...]:
    # `min_length` would complain of an empty tuple whenever an entry is wrong.
    if not values:
        raise ValueError("must have at least one entry")
    return values


Some = Annotated[tuple[Entry, ...], AfterValidator(_not_empty)]
PositiveInt = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0.0)]


class StepPlan(Strict):
    """The steps to measure: whole steps by nodes and requests."""

    batches: Some[PositiveInt] = (1, 4, 8)
    nodes: Some[Annotated[int, Field(ge=0, le=MAX_NODES)]] = (0, 4, 8, 16)
    """Draft nodes per tree in whole steps; 0 = no speculation."""
    max_tokens: Annotated[int, Field(ge=2)] = 48
    rounds: PositiveInt = 3

    @classmethod
    def quick(cls) -> StepPlan:
        """Return a plan that takes about a minute."""
        return cls(batches=(1, 2), nodes=(0, 8), max_tokens=16, rounds=2)


class ServePlan(Strict):
    """The load on a service: a closed loop of `concurrency` clients, or Poisson arrivals at `request_rates`."""

    num_requests: PositiveInt = 32
    concurrency: Some[PositiveInt] = (1, 4, 16)
    request_rates: tuple[Annotated[float, Field(gt=0.0)], ...] = ()
    """Requests per second, without a limit on requests in flight; replaces `concurrency`."""
    max_tokens: Annotated[int, Field(ge=2)] = 48
    temperature: Temperature = 0.0
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of arrival times and sampling."""
    compare: bool = True
    """Repeat every load with `speculative: {"enabled": false}` in each request (Secateur services only)."""
    goodput_ttft_ms: Annotated[float, Field(gt=0.0)] | None = None
    goodput_tpot_ms: Annotated[float, Field(gt=0.0)] | None = None
    """A request counts towards goodput if it meets every limit that is given."""

    @classmethod
    def quick(cls) -> ServePlan:
        """Return a plan that takes about a minute."""
        return cls(num_requests=6, concurrency=(1, 3), max_tokens=16)


def check_drafter(args: EngineArgs, nodes: int) -> None:
    """Raise ConfigError unless a drafter is configured that can grow `nodes` nodes and leaves varied settings unset."""
    spec = args.speculative_config
    if spec is None:
        raise ConfigError("without a drafter nothing is accepted: give --speculative-config '{\"model\": ...}'")
    if typed := [name for name in VARIED if name in spec.model_fields_set]:
        raise ConfigError(
            *(Problem(f"speculative_config.{name}", "is what the benchmark varies; remove it") for name in typed)
        )
    depth, children = spec.speculative_tree_max_depth, spec.speculative_tree_max_children
    if sum(children**level for level in range(1, depth + 1)) < nodes:
        raise ConfigError(
            Problem("--nodes", f"no tree of depth {depth} with {children} children per node has {nodes} nodes")
        )
