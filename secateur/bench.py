"""What `secateur bench` is asked to measure, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self, TypeVar, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

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

Entry = TypeVar("Entry")


def _not_empty(values: tuple[Entry, ...]) -> tuple[Entry, ...]:
    # `min_length` would complain of an empty tuple whenever an entry is wrong.
    if not values:
        raise ValueError("must have at least one entry")
    return values


Some = Annotated[tuple[Entry, ...], AfterValidator(_not_empty)]
PositiveInt = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0.0)]

TARGET_COSTS = {"300m": (1024, 22), "8b": (4096, 32)}
"""Hidden width and layers of targets as costly as models of so many parameters; the second is Llama-3-8B's."""
_WIDTH_STEP = 256


@dataclass(frozen=True, slots=True)
class TargetSize:
    """Sizes of a cost-scaled target, in the proportions of Llama-3."""

    hidden_size: int
    num_layers: int

    @staticmethod
    def parse(text: str) -> TargetSize:
        """'300m', '8b' or HIDDENxLAYERS, such as '512x12'. Raises ValueError."""
        hidden, _, layers = text.partition("x")
        if text in TARGET_COSTS:
            return TargetSize(*TARGET_COSTS[text])
        if not (hidden.isdecimal() and layers.isdecimal() and int(layers) > 0):
            raise ValueError(f"must be 300m, 8b or HIDDENxLAYERS such as 512x12 (got {text!r})")
        if int(hidden) % _WIDTH_STEP or int(hidden) == 0:
            raise ValueError(f"the hidden width must be a multiple of {_WIDTH_STEP} (got {hidden})")
        return TargetSize(int(hidden), int(layers))

    def __str__(self) -> str:
        return f"{self.hidden_size}x{self.num_layers}"

    @property
    def intermediate_size(self) -> int:
        return self.hidden_size * 7 // 2

    @property
    def head_dim(self) -> int:
        return 128 if self.hidden_size >= 2048 else 64 if self.hidden_size >= 1024 else 32

    @property
    def num_heads(self) -> int:
        return self.hidden_size // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        """A quarter of the heads, or half where that would be few or uneven."""
        return self.num_heads // 4 if self.num_heads % 4 == 0 and self.num_heads >= 16 else self.num_heads // 2

    @property
    def layer_parameters(self) -> int:
        """Weights that every forward reads: all but embedding and vocabulary head."""
        attention = 2 * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * self.hidden_size * (attention + 3 * self.intermediate_size)


class AcceptancePlan(Strict):
    """The cells of the table, and the requests that each of them answers."""

    temperatures: Some[Temperature] = (
        *(0.0, 0.3, 0.5, 0.7),
        *(1.0, 1.3, 1.5, 2.0),
    )
    nodes: Some[Annotated[int, Field(ge=1, le=MAX_NODES)]] = (4, 8, 16, 32)
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

    @classmethod
    def quick(cls) -> AcceptancePlan:
        """Under a minute: enough to see that everything works, and no more."""
        small = {"num_prompts": 4, "max_tokens": 24, "concurrency": 4}
        return cls(temperatures=(0.0, 1.0), nodes=(12,), row_prices=(0.03,), **small)


ContestantName = Literal[
    "off",
    "chain",
    "static",
    "dynamic",
    "auto",
    "draft_model",
    "generate",
    "generate_2_threads",
    "assisted",
    "prompt_lookup",
]
"""Whose speed is compared: ours without and with speculation, then transformers' `generate` in its ways."""
PEERS: tuple[ContestantName, ...] = ("generate", "generate_2_threads", "assisted", "prompt_lookup")
ALONE: tuple[ContestantName, ...] = ("assisted", "prompt_lookup")
"""These answer one request at a time."""


class _Scalable(Strict):
    target_cost: str | None = None
    """A target that computes the bundled one's function at the cost of a larger one, see `TargetSize.parse`."""

    @field_validator("target_cost")
    @classmethod
    def _is_a_size(cls, value: str | None) -> str | None:
        if value is not None:
            TargetSize.parse(value)
        return value

    @property
    def size(self) -> TargetSize | None:
        return None if self.target_cost is None else TargetSize.parse(self.target_cost)


class SpeedPlan(_Scalable):
    """Who is compared on how many requests at a time. The defaults are those of `latency`."""

    contestants: Some[ContestantName] = get_args(ContestantName)
    batches: Some[PositiveInt] = (1, 4)
    """Requests in flight."""
    temperatures: Some[Temperature] = (0.0, 1.0)
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] = 16
    """Of dynamic and static trees."""
    chain: Annotated[int, Field(ge=1, le=MAX_NODES)] = 5
    """Length of chains, theirs and ours."""
    num_prompts: PositiveInt = 2
    """In a turn, and at least one batch: a short turn is over before the machine's own speed changes."""
    max_tokens: Annotated[int, Field(ge=2)] = 48
    """Per answer; it does not end earlier."""
    rounds: PositiveInt = 6
    """In each, all take their turn with the next prompts; medians count."""
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _has_a_measure(self) -> Self:
        if "off" not in self.contestants:
            raise ConfigError(Problem("contestants", "must include off, which all ratios refer to"))
        return self

    @classmethod
    def throughput(cls) -> SpeedPlan:
        ours: tuple[ContestantName, ...] = ("off", "chain", "static", "dynamic", "auto", "generate")
        return cls(contestants=ours, batches=(1, 2, 4, 8, 16, 32), num_prompts=1, rounds=8)

    @classmethod
    def quick(cls) -> SpeedPlan:
        """Under a minute: enough to see that everything works."""
        some: tuple[ContestantName, ...] = ("off", "dynamic", "auto", "generate", "assisted")
        return cls(contestants=some, batches=(1, 2), temperatures=(0.0,), num_prompts=2, max_tokens=16, rounds=2)


class StepPlan(_Scalable):
    """The steps that are taken apart: forwards by rows, requests and context, whole steps by nodes and requests."""

    rows: Some[PositiveInt] = (1, 2, 4, 5, 8, 9, 17, 33)
    """Of each request, in the target's forward alone."""
    batches: Some[PositiveInt] = (1, 4, 8)
    contexts: Some[PositiveInt] = (128, 512, 1024)
    """Tokens before those rows."""
    nodes: Some[Annotated[int, Field(ge=0, le=MAX_NODES)]] = (0, 4, 8, 16)
    """Of the trees of whole steps; 0 = no speculation."""
    max_tokens: Annotated[int, Field(ge=2)] = 48
    rounds: PositiveInt = 3

    @classmethod
    def quick(cls) -> StepPlan:
        return cls(rows=(1, 9), batches=(1, 2), contexts=(128, 256), nodes=(0, 8), max_tokens=16, rounds=2)


class ServePlan(_Scalable):
    """The load on a service: closed loops of so many clients, or arrivals of a Poisson process."""

    num_requests: PositiveInt = 32
    concurrency: Some[PositiveInt] = (1, 4, 16)
    request_rates: tuple[Annotated[float, Field(gt=0.0)], ...] = ()
    """Per second, each with as many requests in flight as come; instead of `concurrency` if given."""
    max_tokens: Annotated[int, Field(ge=2)] = 48
    temperature: Temperature = 0.0
    seed: Annotated[int, Field(ge=0)] = 0
    """Of arrival times and sampling."""
    compare: bool = True
    """Every load once more with `speculative: {"enabled": false}` in each request; ours only."""
    goodput_ttft_ms: Annotated[float, Field(gt=0.0)] | None = None
    goodput_tpot_ms: Annotated[float, Field(gt=0.0)] | None = None
    """A request is good if it keeps both that are given."""

    @classmethod
    def quick(cls) -> ServePlan:
        return cls(num_requests=6, concurrency=(1, 3), max_tokens=16)


def check_drafter(args: EngineArgs, nodes: int) -> None:
    """Raises ConfigError unless there is a drafter, whose trees, of at most so many nodes, are the benchmark's."""
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
