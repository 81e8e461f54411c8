"""Engine configuration: the settings that every worker process receives once, at start-up.

`secateur.config` validates what users write, and `cluster.convert` turns it into these frozen dataclasses. They travel
to every process as JSON (`to_json` and `from_json`), and each component gets only the part that it needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Generic, Literal, TypeVar

from pydantic import TypeAdapter

MAX_TREE_NODES = 64
"""Maximum number of nodes in a request's tree, root included: ancestors are stored as one 64-bit mask per node."""
ORDINARY_PASS = 2048 * 131072
"""Tokens of a forward pass times tokens of its context: any GPU that holds such a context computes the pass well within
the default of `hang_timeout_s`. An L4 takes 5 s for an 8B model."""
DRAFT_LINK_VARIABLE = "SECATEUR_DRAFT_LINK"
"""Environment variable of drafters that replace lost ones: the address at which verifier 0 offers a link."""
PULSE_VARIABLE = "SECATEUR_PULSE"
"""Environment variable of ranks: the address to which they send signs of life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCosts:
    """Costs in milliseconds that `auto` uses instead of measurements, to study it apart from a machine."""

    step_ms: float
    row_ms: float
    draft_ms: float = 0.0
    level_ms: float = 0.0


Value = TypeVar("Value")
Other = TypeVar("Other")
_OFF: Any = 0.0
_COLUMN = {"memory": "float32"}
"""A column of these values, as `workers.types.column` describes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRules(Generic[Value]):
    """Thresholds of dynamic pruning: of the service, of a request, or as columns [B] of a message's requests.

    0.0 disables one; a node whose probability equals a threshold is kept. `drafter.tree.thresholds` applies them.
    """

    min_prob: Value = field(default=_OFF, metadata=_COLUMN)
    """A node is expanded only if its most likely next token has at least this draft probability."""
    path_prob: Value = field(default=_OFF, metadata=_COLUMN)
    """A node is expanded only if the draft probabilities along its path multiply to at least this value."""

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the names of the rules, which are those of the settings behind `speculative_tree_prune_`."""
        return tuple(rule.name for rule in fields(TreeRules))

    @property
    def values(self) -> tuple[Value, ...]:
        """The values of the rules, in their order."""
        return tuple(getattr(self, name) for name in self.names())

    def each(self, change: Callable[[Value], Other]) -> TreeRules[Other]:
        """Return the rules with every value changed."""
        return TreeRules(**dict(zip(self.names(), map(change, self.values), strict=True)))

    @staticmethod
    def stack(rules: Sequence[TreeRules[Value]], column: Callable[[list[Value]], Other]) -> TreeRules[Other]:
        """Return the rules of several requests, each made a column of their values."""
        return TreeRules(**{name: column([getattr(each, name) for each in rules]) for name in TreeRules.names()})


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneConfig(TreeRules[float]):
    """Dynamic pruning of draft trees.

    `auto` chooses budgets from calibrated acceptance probabilities and costs, within the thresholds. Only `auto` uses
    `prompt_lookup` (it may also draft by copying earlier text, at no cost) and `simulated_costs` (None = measured).
    """

    auto: bool = False
    prompt_lookup: bool = True
    simulated_costs: SimulatedCosts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeConfig:
    """The shape of draft trees. `num_speculative_tokens` and `max_depth` exclude the root."""

    kind: Literal["dynamic", "chain", "static"] = "dynamic"
    num_speculative_tokens: int = 16
    max_depth: int = 8
    max_children: int = 8
    static_paths: tuple[tuple[int, ...], ...] = ()
    """Static trees only: breadth-first paths, e.g. ((0,), (1,), (0, 0))."""
    prune: PruneConfig = PruneConfig()

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """All nodes of a tree whose shape is known beforehand, as `static_paths`; none of a dynamic tree."""
        if self.kind == "chain":
            return tuple((0,) * (i + 1) for i in range(self.num_speculative_tokens))
        return self.static_paths

    @property
    def num_children(self) -> int:
        """Most children of a node."""
        return 1 + max(path[-1] for path in self.paths) if self.paths else self.max_children

    @property
    def longest_path(self) -> int:
        """Depth of the deepest tree of this shape, and so the most draft tokens that a step can accept."""
        return len(self.paths[-1]) if self.paths else self.max_depth


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceConfig:
    """The service's acceptance rule. A request may choose another kind and disable draft probabilities."""

    kind: Literal["coupled", "rejection"] = "coupled"
    rejection_method: Literal["traversal", "recursive"] = "traversal"
    sample_method: Literal["probabilistic", "hybrid", "greedy"] = "probabilistic"
    draft_probs: bool = True
    min_temperature: float = 0.3
    """Below this temperature, `rejection` drafts the most likely tokens instead of sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """The drafter: its weights, its ranks and the trees that it grows."""

    method: str
    """A name in `workers.models.draft_methods.METHODS`."""
    model_path: str
    """The drafter's checkpoint: for MTP the target's, which contains the heads; for n-gram lookup empty."""
    prompt_lookup_min: int = 0
    prompt_lookup_max: int = 0
    """Shortest and longest match in tokens, for n-gram lookup only."""
    tensor_parallel_size: int = 1
    placement: Literal["dedicated", "colocated"] = "dedicated"
    link: Literal["auto", "nccl", "host"] = "auto"
    """Between devices: features over NCCL, if it connects them, and the rest as measured; all over NCCL; or all through
    the host."""
    fallback: bool = True
    """Whether the engine goes on without drafts if it loses its drafter, until a new one connects."""
    learning_path: str = ""
    """The folder of the heads that it learns while it serves; "" = it does not learn."""
    tree: TreeConfig = TreeConfig()
    acceptance: AcceptanceConfig = AcceptanceConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: a tensor-parallel target and, unless `draft` is None, its drafter.

    World ranks are [verifier 0 .. T-1, drafter 0 .. D-1]; rank 0 runs the engine loop.
    """

    model_path: str
    tensor_parallel_size: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """The type of keys and values, in the pools of target and drafter: `dtype`, or 8 bits (e4m3)."""
    max_model_len: int = 2048
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    page_size: int = 16
    num_pages: int | None = None
    """KV pages per pool. None means as many as memory allows, up to the number that can ever be used."""
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Whether requests may have priorities; without them they are served in order of arrival."""
    memory_utilization: float = 0.9
    eos_token_ids: tuple[int, ...] = ()
    tokenizer_path: str = ""
    """The folder of the tokenizer, which structured outputs need; empty = the model's."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """`auto` selects Triton on CUDA and torch on CPU."""
    enforce_eager: bool = False
    batch_invariant: bool = False
    """Give a row of the target the same bits, whatever is computed beside it."""
    """On CUDA, launch every kernel separately instead of replaying captured graphs."""
    threads: int = 1
    """Threads of a verifier rank on CPU. A drafter rank has one."""
    hang_timeout_s: float = 10.0
    """A rank that shows no sign of life or no progress for this long is killed; 0 = never (see `workers.pulse`). While
    it waits for its device, `device_timeout_s` applies."""
    startup_timeout_s: float = 3600.0
    """Timeout from starting an engine until it serves, also of each wait for another rank before its first step.
    Reading a large checkpoint from a cold disk, compiling and capturing fall within it."""
    step_timeout_s: float = 60.0
    """A rank is considered lost when its group's leader has waited this long for its answer in a step."""
    standby: bool = True
    """Whether a process that has imported what ranks need starts them by forking: so lost ones come back sooner."""
    draft: DraftConfig | None = None

    @property
    def idle_timeout_s(self) -> float:
        """How long a rank waits for its next message before it considers the sender lost.

        It is ten times `step_timeout_s`, because the sender may be busy: rank 0 with a prompt chunk on a CPU.
        """
        return 10 * self.step_timeout_s

    @property
    def device_timeout_s(self) -> float:
        """How long a rank may wait for its device: `hang_timeout_s`, and more where larger passes are configured."""
        return self.hang_timeout_s * self._size_of_passes

    @property
    def reply_timeout_s(self) -> float:
        """How long a group's leader waits for an answer in a step: `step_timeout_s`, and more for larger passes."""
        return self.step_timeout_s * self._size_of_passes

    @property
    def _size_of_passes(self) -> float:
        """The largest pass that is configured, in ordinary ones; at least 1."""
        return max(1.0, self.max_num_batched_tokens * self.max_model_len / ORDINARY_PASS)

    @property
    def item_bytes(self) -> int:
        """Bytes of one value of the models' type."""
        return 4 if self.dtype == "float32" else 2

    @property
    def kv_item_bytes(self) -> int:
        """Bytes of one value of a key or a value."""
        return 1 if self.kv_cache_dtype == "fp8" else self.item_bytes

    @property
    def num_state_checkpoints(self) -> int:
        """Number of recurrent states behind cached prefixes that a hybrid keeps beside those of running requests."""
        return max(8, self.max_num_seqs // 2) if self.enable_prefix_caching else 0

    @property
    def num_seats(self) -> int:
        """Number of recurrent states of a hybrid: those of running requests, then those of cached prefixes."""
        return self.max_num_seqs + self.num_state_checkpoints

    @property
    def draft_ranks(self) -> int:
        """Number of drafter ranks."""
        return self.draft.tensor_parallel_size if self.draft else 0

    @property
    def world_size(self) -> int:
        """Number of ranks, verifier and drafter together."""
        return self.tensor_parallel_size + self.draft_ranks

    @property
    def has_host_link(self) -> bool:
        """True if messages between verifier 0 and drafter 0 pass through host memory: if asked to, on CPU, or on a
        shared device.

        NCCL refuses two ranks on one device. Separate host ids would make it fall back to sockets, but would also
        split a tensor-parallel group.
        """
        draft = self.draft
        return self.device == "cpu" or (draft is not None and (draft.placement == "colocated" or draft.link == "host"))

    @property
    def tree_rows(self) -> int:
        """Maximum number of rows of one request in a verification step, root included."""
        return 1 + (self.draft.tree.num_speculative_tokens if self.draft else 0)

    def pages_for(self, num_tokens: int) -> int:
        """Number of KV pages for a request of `num_tokens` tokens followed by a tree."""
        return -(-(num_tokens + self.tree_rows) // self.page_size)

    def role_of(self, rank: int) -> str:
        """Name of a world rank in logs and errors, e.g. "verifier 0" or "drafter 1"."""
        tp = self.tensor_parallel_size
        return f"verifier {rank}" if rank < tp else f"drafter {rank - tp}"

    def ranks_on_device_of(self, rank: int) -> list[int]:
        """Return the ranks on the same device as this rank, itself included."""
        ranks = list(range(self.world_size))
        if self.device == "cpu":
            return ranks
        if self.draft is None or self.draft.placement != "colocated":
            return [rank]
        tp = self.tensor_parallel_size
        return [other for other in ranks if other % tp == rank % tp]

    def to_json(self) -> str:
        """Serialize for another process."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> EngineConfig:
        """Parse the result of `to_json`."""
        return TypeAdapter(EngineConfig).validate_json(text)
