"""The forecast for an engine: its largest batch, and its speed by batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.engine.rank_placement import num_bundles
from cluster.planner.acceptance import acceptance_curve
from cluster.planner.fit import MemoryNeed, engine_pages, memory_needs, smallest_size
from cluster.planner.memory import ModelShard
from cluster.planner.roofline import StepTime, step_time
from cluster.planner.topology import bytes_text
from secateur.errors import ConfigError, Problem
from secateur.plan import Hardware, PlanRequest
from workers.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """`batch` requests of `context` cached tokens each, decoding with trees of `nodes`, step after step."""

    batch: int
    nodes: int
    context: int
    step: StepTime
    accepted: float
    """Draft tokens per step and request."""
    num_devices: int

    @property
    def tokens_per_step(self) -> float:
        """Tokens of one request per step: the accepted ones and the target's own."""
        return 1 + self.accepted

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the whole batch."""
        return 1e3 * self.batch * self.tokens_per_step / self.step.ms

    @property
    def per_request(self) -> float:
        """Tokens per second of one request."""
        return self.tokens_per_second / self.batch

    @property
    def per_device(self) -> float:
        """Tokens per second and device."""
        return self.tokens_per_second / self.num_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchForecast:
    """One batch size: without speculation and, if there is a drafter, with the requested or the best tree size."""

    off: Prediction
    on: Prediction | None

    @property
    def chosen(self) -> Prediction:
        """With speculation if there is a drafter."""
        return self.on or self.off

    @property
    def speedup(self) -> float:
        """Throughput relative to no speculation."""
        return self.chosen.tokens_per_second / self.off.tokens_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimit:
    """The largest batch of one replica, and what limits it."""

    pages: int
    """KV pages."""
    batch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Everything that `secateur plan` predicts of an engine."""

    accepted_from: str
    memory: tuple[MemoryNeed, ...]
    smallest_size: int | None
    """The smallest tensor parallel size that fits."""
    batch_limit: BatchLimit
    batches: tuple[BatchForecast, ...]


def predict_engine(request: PlanRequest, config: EngineConfig, shards: list[ModelShard]) -> Forecast:
    """Predict an engine's speed on `request.hardware`. `shards` come from `memory.model_shards`. Raises ConfigError."""
    if request.context > config.max_model_len:
        limit = f"{request.context} is more than max_model_len={config.max_model_len}"
        raise ConfigError(Problem("--context", f"{limit}; ask for less"))
    most = config.draft.tree.num_speculative_tokens if config.draft else 0
    if config.draft is None and (request.nodes or request.acceptance):
        flag = "--nodes" if request.nodes else "--acceptance"
        raise ConfigError(Problem(flag, "without a drafter there are no trees: give --speculative-config"))
    if (request.nodes or 0) > most:
        limit = f"{request.nodes} is more than num_speculative_tokens={most}"
        raise ConfigError(Problem("--nodes", f"{limit}; ask for less, or write more in --speculative-config"))
    hardware, draft, context = request.hardware, config.draft, request.context
    assert hardware is not None
    batch_limit = _batch_limit(request, config, shards)
    accepted = np.zeros(1) if draft is None else acceptance_curve(draft, request.acceptance)

    def predict(batch: int, nodes: int, num_devices: int) -> Prediction:
        return Prediction(
            batch=batch,
            nodes=nodes,
            context=context,
            step=step_time(config, shards, hardware, batch, nodes, context),
            accepted=float(accepted[nodes]),
            num_devices=num_devices,
        )

    def best(batch: int) -> Prediction:
        """Return the tree size with the highest throughput, the smallest of equals; 0 turns speculation off."""
        sizes = range(most + 1) if request.nodes is None else [request.nodes]
        return max((predict(batch, n, num_bundles(config)) for n in sizes), key=lambda p: p.tokens_per_second)

    return Forecast(
        accepted_from="no drafter" if draft is None else "as given" if request.acceptance else "typical, not measured",
        memory=tuple(memory_needs(config, shards, 1e9 * hardware.memory_gb)),
        smallest_size=smallest_size(config, 1e9 * hardware.memory_gb),
        batch_limit=batch_limit,
        batches=tuple(
            BatchForecast(off=predict(batch, 0, config.tensor_parallel_size), on=None if draft is None else best(batch))
            for batch in _batches(request, batch_limit)
        ),
    )


def _batch_limit(request: PlanRequest, config: EngineConfig, shards: list[ModelShard]) -> BatchLimit:
    hardware = request.hardware
    assert hardware is not None
    memory_bytes = 1e9 * hardware.memory_gb
    try:
        pages = engine_pages(config, shards, memory_bytes) - 1  # without the null page
    except ValueError as error:  # as the engine would say, with its weights loaded
        raise ConfigError(_does_not_fit(config, shards, hardware, str(error))) from error
    fits = pages // config.pages_for(request.context)
    if fits < config.max_num_seqs:
        return BatchLimit(pages=pages, batch=fits, reason=f"memory: {pages} KV pages, --context {request.context}")
    return BatchLimit(pages=pages, batch=config.max_num_seqs, reason="max_num_seqs")


def _does_not_fit(config: EngineConfig, shards: list[ModelShard], hardware: Hardware, reason: str) -> str:
    """Return the engine's reason, what is needed and there, and the smallest engine that would fit."""
    memory_bytes = 1e9 * hardware.memory_gb
    needs = "; ".join(
        f"{need.role} needs {bytes_text(need.needed)} of {bytes_text(need.available)} on each device"
        for need in memory_needs(config, shards, memory_bytes)
        if need.needed > need.available
    )
    size = smallest_size(config, memory_bytes)
    instead = "no tensor_parallel_size up to 16 fits" if size is None else f"tensor_parallel_size={size} fits"
    return f"{hardware.name}: {reason} ({needs}; {instead})"


def _batches(request: PlanRequest, batch_limit: BatchLimit) -> list[int]:
    """Return the requested batch sizes that fit; if one does not, also the largest that does."""
    fitting = {batch for batch in request.batches if batch <= batch_limit.batch}
    return sorted(fitting | ({batch_limit.batch} if max(request.batches) > batch_limit.batch else set()))
