"""The forecast for an engine: its largest batch, and its speed by batch."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from cluster.engine.rank_placement import num_bundles
from cluster.planner.acceptance import acceptance_curve
from cluster.planner.fit import MemoryNeed, engine_pages, memory_needs, smallest_size
from cluster.planner.memory import ModelShard
from cluster.planner.roofline import step_time
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
    devices: int
    tokens_per_step: float
    """Tokens of one request per step: the accepted ones and the target's own."""
    step_ms: float
    verify_ms: float
    draft_ms: float
    transfer_ms: float
    host_ms: float
    tokens_per_second: float
    """Throughput of the whole batch."""
    tokens_per_second_per_request: float
    tokens_per_second_per_device: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchForecast:
    """One batch size: without speculation and, if there is a drafter, with the requested or the best tree size."""

    off: Prediction
    on: Prediction | None
    speedup: float
    """Throughput relative to no speculation."""

    @property
    def chosen(self) -> Prediction:
        """With speculation if there is a drafter."""
        return self.on or self.off


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Everything that `secateur plan` predicts of an engine. Its JSON has the same names."""

    acceptance: str
    """Says where the chances of acceptance come from."""
    memory: tuple[MemoryNeed, ...]
    smallest_tensor_parallel_size: int | None
    """The smallest one that fits."""
    max_batch: int
    """The largest batch of one replica."""
    max_batch_reason: str
    """Names what limits it."""
    kv_pages: int
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
    pages = _kv_pages(config, shards, hardware)
    fits = pages // config.pages_for(context)
    is_short = fits < config.max_num_seqs
    max_batch = fits if is_short else config.max_num_seqs
    accepted = np.zeros(1) if draft is None else acceptance_curve(draft, request.acceptance)

    def predict(batch: int, nodes: int, num_devices: int) -> Prediction:
        step = step_time(config, shards, hardware, batch, nodes, context)
        tokens_per_step = 1 + float(accepted[nodes])
        per_second = 1e3 * batch * tokens_per_step / step.ms
        return Prediction(
            batch=batch,
            nodes=nodes,
            context=context,
            devices=num_devices,
            tokens_per_step=tokens_per_step,
            step_ms=step.ms,
            **asdict(step),
            tokens_per_second=per_second,
            tokens_per_second_per_request=per_second / batch,
            tokens_per_second_per_device=per_second / num_devices,
        )

    def best(batch: int) -> Prediction:
        """Return the tree size with the highest throughput, the smallest of equals; 0 turns speculation off."""
        sizes = range(most + 1) if request.nodes is None else [request.nodes]
        return max((predict(batch, n, num_bundles(config)) for n in sizes), key=lambda p: p.tokens_per_second)

    def forecast(batch: int) -> BatchForecast:
        off, on = predict(batch, 0, config.tensor_parallel_size), None if draft is None else best(batch)
        return BatchForecast(off=off, on=on, speedup=(on or off).tokens_per_second / off.tokens_per_second)

    return Forecast(
        acceptance="no drafter" if draft is None else "as given" if request.acceptance else "typical, not measured",
        memory=tuple(memory_needs(config, shards, 1e9 * hardware.memory_gb)),
        smallest_tensor_parallel_size=smallest_size(config, 1e9 * hardware.memory_gb),
        max_batch=max_batch,
        max_batch_reason=f"memory: {pages} KV pages, --context {context}" if is_short else "max_num_seqs",
        kv_pages=pages,
        batches=tuple(map(forecast, _batches(request, max_batch))),
    )


def _kv_pages(config: EngineConfig, shards: list[ModelShard], hardware: Hardware) -> int:
    """Return the KV pages of the engine, without the null page. Raises ConfigError if it does not fit."""
    try:
        return engine_pages(config, shards, 1e9 * hardware.memory_gb) - 1
    except ValueError as error:  # as the engine would say, with its weights loaded
        raise ConfigError(_does_not_fit(config, shards, hardware, str(error))) from error


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


def _batches(request: PlanRequest, max_batch: int) -> list[int]:
    """Return the requested batch sizes that fit; if one does not, also the largest that does."""
    fitting = {batch for batch in request.batches if batch <= max_batch}
    return sorted(fitting | ({max_batch} if max(request.batches) > max_batch else set()))
