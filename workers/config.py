"""Engine configuration: what a worker process is told once, at the door.

`secateur.config` validates what users type; `cluster.convert` turns it into these frozen dataclasses; they travel to
every process as JSON (`to_json` / `from_json`) and are passed down as the part each piece needs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

MAX_TREE_NODES = 64
"""Rows of one request's tree, root included: ancestors are one 64-bit mask per node."""
START_TIMEOUT_S = 3600.0
"""From starting an engine until it serves: a large checkpoint is read from a cold disk within the first collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCosts:
    """Costs in milliseconds that `auto` uses instead of measurements, to study it apart from a machine."""

    step_ms: float
    row_ms: float
    draft_ms: float = 0.0
    level_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneConfig:
    """Dynamic pruning. Thresholds: 0.0 switches one off, a value equal to it is kept.

    `auto` chooses budgets from calibrated acceptance probabilities and costs, within the thresholds. Only `auto` uses
    `prompt_lookup` (it may also draft by copying earlier text, at no cost) and `simulated_costs` (None = measured).
    """

    auto: bool = False
    prompt_lookup: bool = True
    simulated_costs: SimulatedCosts | None = None
    min_prob: float = 0.0
    path_prob: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeConfig:
    """The shape a draft tree may take. `num_speculative_tokens` and `max_depth` exclude the root."""

    kind: Literal["dynamic", "chain", "static"] = "dynamic"
    num_speculative_tokens: int = 16
    max_depth: int = 8
    max_children: int = 8
    static_paths: tuple[tuple[int, ...], ...] = ()
    """Static trees only: breadth-first paths, e.g. ((0,), (1,), (0, 0))."""
    prune: PruneConfig = PruneConfig()

    @property
    def longest_path(self) -> int:
        """Tokens that can be accepted of one tree at most; no tree of this shape is deeper."""
        match self.kind:
            case "dynamic":
                return self.max_depth
            case "chain":
                return self.num_speculative_tokens
            case "static":
                return len(self.static_paths[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceConfig:
    """The service's acceptance rule; a request may choose its own kind and switch its draft probabilities off."""

    kind: Literal["coupled", "rejection"] = "coupled"
    rejection_method: Literal["traversal", "recursive"] = "traversal"
    sample_method: Literal["probabilistic", "hybrid", "greedy"] = "probabilistic"
    draft_probs: bool = True
    min_temperature: float = 0.3
    """Below it `rejection` drafts the most likely tokens instead of sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """The drafter: where its weights are, over how many ranks it is split, and the trees it grows."""

    method: Literal["ngram", "draft_model", "eagle", "eagle3", "mtp"]
    model_path: str
    """The drafter's checkpoint; the target's own for MTP, whose heads lie in it; empty for n-gram lookup."""
    prompt_lookup_min: int = 0
    prompt_lookup_max: int = 0
    """N-gram lookup only: shortest and longest match, in tokens."""
    tensor_parallel_size: int = 1
    placement: Literal["dedicated", "colocated"] = "dedicated"
    tree: TreeConfig = TreeConfig()
    acceptance: AcceptanceConfig = AcceptanceConfig()

    @property
    def reads_features(self) -> bool:
        """Whether each fed token comes with the target's feature of the token before it."""
        return self.method in ("eagle", "eagle3", "mtp")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: a tensor-parallel target and, unless `draft` is None, its drafter.

    World ranks are [verifier 0 .. T-1, drafter 0 .. D-1]; rank 0 runs the engine loop.
    """

    model_path: str
    tensor_parallel_size: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_model_len: int = 2048
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    page_size: int = 16
    num_pages: int | None = None
    """KV pages per pool; None = as many as memory allows, and no more than can ever be used."""
    enable_prefix_caching: bool = True
    memory_utilization: float = 0.9
    eos_token_ids: tuple[int, ...] = ()
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """auto: Triton on CUDA, torch on CPU."""
    enforce_eager: bool = False
    """On CUDA: launch every kernel by itself instead of replaying captured graphs."""
    step_timeout_s: float = 60.0
    """A rank that owes its group's leader an answer, and is silent for this long, is lost."""
    draft: DraftConfig | None = None

    @property
    def idle_timeout_s(self) -> float:
        """A rank that waits for its next message gives its sender up after this long. The sender may honestly take long
        over work of its own: rank 0 over a prompt chunk on a CPU, or over its start-up profile."""
        return 10 * self.step_timeout_s

    @property
    def draft_ranks(self) -> int:
        return self.draft.tensor_parallel_size if self.draft else 0

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size + self.draft_ranks

    @property
    def has_host_link(self) -> bool:
        """Whether messages between verifier 0 and drafter 0 pass through host memory: on CPU, and where the two share a
        device. NCCL refuses such ranks; a host id each would persuade it to use sockets, and keep a tensor-parallel
        group apart."""
        return self.device == "cpu" or (self.draft is not None and self.draft.placement == "colocated")

    @property
    def tree_rows(self) -> int:
        """Most rows one request can have in a verification step, root included."""
        return 1 + (self.draft.tree.num_speculative_tokens if self.draft else 0)

    def pages_for(self, num_tokens: int) -> int:
        """KV pages of one request with so many tokens and a tree behind them."""
        return -(-(num_tokens + self.tree_rows) // self.page_size)

    def role_of(self, rank: int) -> str:
        """Name of a world rank for logs and errors, e.g. "verifier 0" or "drafter 1"."""
        tp = self.tensor_parallel_size
        return f"verifier {rank}" if rank < tp else f"drafter {rank - tp}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> EngineConfig:
        raw: dict[str, Any] = json.loads(text)
        draft = raw.pop("draft")
        if draft is not None:
            tree = draft.pop("tree")
            prune = tree["prune"]
            simulated_costs = SimulatedCosts(**prune["simulated_costs"]) if prune["simulated_costs"] else None
            tree["prune"] = PruneConfig(**prune | {"simulated_costs": simulated_costs})
            tree["static_paths"] = tuple(tuple(path) for path in tree["static_paths"])
            acceptance = AcceptanceConfig(**draft.pop("acceptance"))
            draft = DraftConfig(**draft, tree=TreeConfig(**tree), acceptance=acceptance)
        raw["eos_token_ids"] = tuple(raw["eos_token_ids"])
        return EngineConfig(**raw, draft=draft)
