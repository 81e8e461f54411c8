"""Measurement plans of `secateur bench`, validated before anything is loaded."""

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

TARGET_COSTS = {"300m": (1024, 22), "8b": (4096, 32)}
"""Hidden width and number of layers by model size; '8b' has those of Llama-3-8B."""
_WIDTH_STEP = 256


@dataclass(frozen=True, slots=True)
class TargetSize:
    """The size of a padded target with the proportions of Llama-3."""

    hidden_size: int
    num_layers: int

    @staticmethod
    def parse(text: str) -> TargetSize:
        """Parse '300m', '8b' or HIDDENxLAYERS such as '512x12'. Raises ValueError."""
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
        """Return the width of the MLP."""
        return self.hidden_size * 7 // 2

    @property
    def head_dim(self) -> int:
        """Return the width of an attention head."""
        return 128 if self.hidden_size >= 2048 else 64 if self.hidden_size >= 1024 else 32

    @property
    def num_heads(self) -> int:
        """Return the number of query heads."""
        return self.hidden_size // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        """Return a quarter of the query heads, or half of them where a quarter is too few or uneven."""
        return self.num_heads // 4 if self.num_heads % 4 == 0 and self.num_heads >= 16 else self.num_heads // 2

    @property
    def layer_parameters(self) -> int:
        """Return the number of weights that every forward reads: all but the embedding and the LM head."""
        attention = 2 * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * self.hidden_size * (attention + 3 * self.intermediate_size)


class AcceptancePlan(Strict):
    """The cells of the acceptance table, and the requests that each cell runs."""

    temperatures: Some[Temperature] = (
        *(0.0, 0.3, 0.5, 0.7),
        *(1.0, 1.3, 1.5, 2.0),
    )
    nodes: Some[Annotated[int, Field(ge=1, le=MAX_NODES)]] = (4, 8, 16, 32)
    """Tree nodes per step, without the root."""
    num_prompts: PositiveInt = 24
    max_tokens: Annotated[int, Field(ge=2)] = 32
    """Tokens per answer; end-of-sequence tokens are ignored."""
    concurrency: PositiveInt = 8
    seed: Annotated[int, Field(ge=0)] = 0
    """Answer i of every cell uses the seed H(seed, i)."""
    row_prices: tuple[Annotated[float, Field(gt=0.0)], ...] = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06)
    """Simulated verify costs for `auto`, independent of the machine: the share of a step that one verified row costs,
    if drafting is free and all requests in flight share the step."""

    @classmethod
    def quick(cls) -> AcceptancePlan:
        """Return a plan that takes under a minute, to check that everything works."""
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
    "vllm",
    "vllm_eagle3",
    "vllm_ngram",
    "llamacpp",
    "openvino",
]
"""Secateur without and with speculation, the generation modes of transformers, and other projects."""
TRANSFORMERS: tuple[ContestantName, ...] = ("generate", "generate_2_threads", "assisted", "prompt_lookup")
PEERS: tuple[ContestantName, ...] = ("vllm", "vllm_eagle3", "vllm_ngram", "llamacpp", "openvino")
"""Contestants from other projects, which run in virtual environments of their own."""
ALONE: tuple[ContestantName, ...] = ("assisted", "prompt_lookup")
"""Contestants that answer one request at a time."""


class _Scalable(Strict):
    """A plan whose target may be padded to the cost of a larger model."""

    target_cost: str | None = None
    """Pad the target to the cost of a larger model without changing its outputs, see `TargetSize.parse`."""

    @field_validator("target_cost")
    @classmethod
    def _is_a_size(cls, value: str | None) -> str | None:
        if value is not None:
            TargetSize.parse(value)
        return value

    @property
    def size(self) -> TargetSize | None:
        """Return the size that `target_cost` names, or None."""
        return None if self.target_cost is None else TargetSize.parse(self.target_cost)


class SpeedPlan(_Scalable):
    """The contestants and batch sizes of a speed comparison. The defaults are those of `latency`."""

    contestants: Some[ContestantName] = tuple(name for name in get_args(ContestantName) if name not in PEERS)
    batches: Some[PositiveInt] = (1, 4)
    """Requests in flight."""
    temperatures: Some[Temperature] = (0.0, 1.0)
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] = 16
    """Draft nodes of dynamic and static trees."""
    chain: Annotated[int, Field(ge=1, le=MAX_NODES)] = 5
    """Length of chains, for all contestants."""
    peer_threads: PositiveInt = 2
    """Threads with which each peer computes; ours are two processes of one thread, drafter and verifier."""
    num_prompts: PositiveInt = 2
    """Prompts per turn, at least one batch. Short turns end before the machine's speed drifts."""
    max_tokens: Annotated[int, Field(ge=2)] = 48
    """Tokens per answer; end-of-sequence tokens are ignored."""
    rounds: PositiveInt = 6
    """In each round, every contestant runs the next prompts once; the report gives medians."""
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _has_a_measure(self) -> Self:
        if "off" not in self.contestants:
            raise ConfigError(Problem("contestants", "must include off, which all ratios refer to"))
        return self

    @classmethod
    def throughput(cls) -> SpeedPlan:
        """Return the defaults of `secateur bench throughput`."""
        ours: tuple[ContestantName, ...] = ("off", "chain", "static", "dynamic", "auto", "generate")
        return cls(contestants=ours, batches=(1, 2, 4, 8, 16, 32), num_prompts=1, rounds=8)

    @classmethod
    def quick(cls) -> SpeedPlan:
        """Return a plan that takes under a minute, to check that everything works."""
        some: tuple[ContestantName, ...] = ("off", "dynamic", "auto", "generate", "assisted")
        return cls(contestants=some, batches=(1, 2), temperatures=(0.0,), num_prompts=2, max_tokens=16, rounds=2)


class StepPlan(_Scalable):
    """The steps to profile: forwards by rows, requests and context; whole steps by nodes and requests."""

    rows: Some[PositiveInt] = (1, 2, 4, 5, 8, 9, 17, 33)
    """Rows per request in the target's forward."""
    batches: Some[PositiveInt] = (1, 4, 8)
    contexts: Some[PositiveInt] = (128, 512, 1024)
    """Cached tokens before those rows."""
    nodes: Some[Annotated[int, Field(ge=0, le=MAX_NODES)]] = (0, 4, 8, 16)
    """Draft nodes per tree in whole steps; 0 = no speculation."""
    max_tokens: Annotated[int, Field(ge=2)] = 48
    rounds: PositiveInt = 3

    @classmethod
    def quick(cls) -> StepPlan:
        """Return a plan that takes about a minute."""
        return cls(rows=(1, 9), batches=(1, 2), contexts=(128, 256), nodes=(0, 8), max_tokens=16, rounds=2)


class TracePlan(_Scalable):
    """The runs to record, each with every mode of `overlap` in turn."""

    modes: Some[Literal["none", "predraft", "alternate", "auto"]] = ("none", "predraft", "alternate", "auto")
    """Settings of `overlap`. The others are compared with `none`, so it must be among them."""
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] = 16
    """Draft nodes per tree."""
    batches: Some[PositiveInt] = (1, 8)
    """Requests in flight."""
    temperatures: Some[Temperature] = (0.0, 1.0)
    max_tokens: Annotated[int, Field(ge=2)] = 48
    rounds: PositiveInt = 3

    @model_validator(mode="after")
    def _has_a_measure(self) -> Self:
        if "none" not in self.modes:
            raise ConfigError(Problem("modes", "must include none, which the others are compared with"))
        return self

    @classmethod
    def quick(cls) -> TracePlan:
        """Return a plan that takes about half a minute."""
        return cls(modes=("none", "predraft"), batches=(1,), temperatures=(0.0,), max_tokens=24, rounds=1)


class ServePlan(_Scalable):
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


def check_overlap(args: EngineArgs) -> None:
    """Raise ConfigError unless a drafter is configured that can draft ahead, and whose `overlap` is not set."""
    spec = args.speculative_config
    if spec is None or spec.method == "ngram":
        raise ConfigError("nothing can be hidden without a draft model or head: give --speculative-config '{...}'")
    if spec.draft_tensor_parallel_size != 1:
        raise ConfigError(Problem("speculative_config.draft_tensor_parallel_size", "must be 1 to draft ahead"))
    if "overlap" in spec.model_fields_set:
        raise ConfigError(Problem("speculative_config.overlap", "is what the benchmark varies; remove it"))
