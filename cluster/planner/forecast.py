"""The forecast for an engine: its cost table, its largest batch, its speed by batch, and a fleet under load."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cluster.planner.acceptance import TYPICAL, acceptance_curve
from cluster.planner.cost_model import PlannerCostModel
from cluster.planner.fleet import SPREAD, Fleet, Load, ReplicaSpec, simulate
from cluster.planner.memory import ModelShard, pages_on_device
from cluster.planner.predict import Prediction, Predictor, best, schedule
from cluster.planner.roofline import cost_table
from cluster.rank_placement import num_bundles
from secateur.config import EngineArgs
from secateur.errors import ConfigError, Problem
from secateur.plan import AcceptanceTable, CostTable, PlanRequest
from secateur.token_tree import MAX_NODES
from workers.config import EngineConfig
from workers.kv_sizing import usable_pages

Say = Callable[[str], None]

PROFILE_ROUNDS = 3
CPU_PROFILE_BATCH, PROFILE_BATCH = 8, 64
"""The most requests that a profile measures; larger batches are extrapolated."""


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

    pages: int | None
    """KV pages; None if unknown."""
    batch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Everything that `secateur plan` predicts of an engine."""

    table: CostTable
    accepted_from: str
    batch_limit: BatchLimit
    batches: tuple[BatchForecast, ...]
    fleet: Fleet | None


def predict_engine(
    args: EngineArgs, request: PlanRequest, config: EngineConfig, shards: list[ModelShard], say: Say
) -> Forecast:
    """Predict an engine's speed. `shards` come from `memory.model_shards`.

    Raises ConfigError before an engine is started, EngineDead while it is profiled.
    """
    if request.context > config.max_model_len:
        limit = f"{request.context} is more than max_model_len={config.max_model_len}"
        raise ConfigError(Problem("--context", f"{limit}; ask for less"))
    most = config.draft.tree.num_speculative_tokens if config.draft else 0
    if request.nodes and config.draft is None:
        raise ConfigError(Problem("--nodes", "without a drafter there are no trees: give --speculative-config"))
    if (request.nodes or 0) > most:
        limit = f"{request.nodes} is more than num_speculative_tokens={most}"
        raise ConfigError(Problem("--nodes", f"{limit}; ask for less, or write more in --speculative-config"))
    if request.acceptance is not None and config.draft is not None:
        acceptance_curve(request.acceptance, config.draft, request.temperature, request.context)
    batch_limit = _batch_limit(request, config, shards)
    load = _load(request, config, args.seed or 0) if request.is_simulated else None
    table = _table(args, request, config, shards, say)
    acceptance = request.acceptance or table.acceptance
    if config.draft is None or table.draft is None:
        budgets, accepted_from = [0], "no drafter"
    else:
        budgets = [request.nodes] if request.nodes is not None else list(range(min(most, max(table.draft.nodes)) + 1))
        accepted_from = "typical, not measured" if acceptance is None else _describe(acceptance)

    no_drafts = np.zeros(MAX_NODES + 1)

    def predictor(context: float, is_plain: bool = False) -> Predictor:
        accepted = (
            acceptance_curve(acceptance or TYPICAL, config.draft, request.temperature, context)
            if config.draft
            else no_drafts
        )
        return Predictor(
            PlannerCostModel(table), accepted, config.tensor_parallel_size if is_plain else num_bundles(config)
        )

    plain, drafting = predictor(request.context, is_plain=True), predictor(request.context)
    batches = [
        BatchForecast(
            off=plain(batch, 0, request.context),
            on=best(drafting, batch, request.context, budgets) if budgets != [0] else None,
        )
        for batch in _batches(request, batch_limit)
    ]
    fleet = None
    if load is not None:
        middle = float((load.prompt_J + load.output_J / 2).mean())
        loaded = predictor(middle)
        replica = ReplicaSpec(
            costs=loaded.costs,
            accepted=loaded.accepted,
            nodes_by_batch=schedule(loaded, config.max_num_seqs, middle, budgets),
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_kv_tokens=batch_limit.pages * config.page_size if batch_limit.pages else float("inf"),
            num_devices=num_bundles(config),
            spread=SPREAD,
        )
        fleet = simulate(load, replica, request.replicas or 1, args.seed or 0)
    return Forecast(
        table=table, accepted_from=accepted_from, batch_limit=batch_limit, batches=tuple(batches), fleet=fleet
    )


def _describe(table: AcceptanceTable) -> str:
    if table.probabilities:
        return "of the best trees by the given chances"
    temperatures = sorted({point.temperature for point in table.points})
    return f"as measured at temperature {', '.join(f'{t:g}' for t in temperatures)}"


def _table(
    args: EngineArgs, request: PlanRequest, config: EngineConfig, shards: list[ModelShard], say: Say
) -> CostTable:
    if request.costs is not None:
        return request.costs
    if request.hardware is not None:
        return cost_table(config, shards, request.hardware)
    table = profile(args, config, max(request.batches), request.temperature, say)
    if request.costs_output is not None:
        request.costs_output.write_text(table.model_dump_json(indent=1) + "\n")
        say(f"wrote {request.costs_output}")
    return table


def profile(args: EngineArgs, config: EngineConfig, max_batch: int, temperature: float, say: Say) -> CostTable:
    """Measure an engine's cost table on this machine with up to `max_batch` requests. Starts and stops an engine."""
    from cluster.bench.prompts import encode_prompts
    from cluster.bench.runner import Runner
    from cluster.convert import fetch_weights, load_tokenizer
    from cluster.planner.fit import fit
    from cluster.planner.profile import OUTPUT_TOKENS, ProfileGrid, Profiler, UniquePrompts, profiled
    from secateur.prompts import BUNDLED_PROMPTS, read_prompts

    if config.max_model_len < 2 * OUTPUT_TOKENS:
        raise ConfigError(Problem("--max-model-len", f"a profile needs at least {2 * OUTPUT_TOKENS} tokens"))
    texts = encode_prompts(load_tokenizer(args, config), read_prompts(BUNDLED_PROMPTS, 50))
    fetch_weights(args, config)
    config = profiled(config, min(max_batch, PROFILE_BATCH if config.device == "cuda" else CPU_PROFILE_BATCH))
    say("profile: starting an engine")
    with Runner(config) as runner:
        profiler = Profiler(runner, ProfileGrid.of(config), UniquePrompts(texts), temperature)
        profiler.warm_up()
        for number in range(1, PROFILE_ROUNDS + 1):
            say(f"profile: round {number} of {PROFILE_ROUNDS}")
            profiler.round()
    return fit(profiler.profile, config, hardware_name(config), temperature)


def hardware_name(config: EngineConfig) -> str:
    """Name the hardware that the engine runs on."""
    if config.device == "cuda":
        import torch

        return f"{num_bundles(config)} x {torch.cuda.get_device_name()}"
    return f"{os.cpu_count()} CPU cores, {platform.machine()}"


def _batch_limit(request: PlanRequest, config: EngineConfig, shards: list[ModelShard]) -> BatchLimit:
    pages = config.num_pages
    if pages is None and request.hardware is not None:
        pages = pages_on_device(config, shards, 1e9 * request.hardware.memory_gb)
    if pages is None:
        return BatchLimit(pages=None, batch=config.max_num_seqs, reason="max_num_seqs; memory is not counted")
    try:
        pages = usable_pages(config, pages) - 1  # without the null page
    except ValueError as error:  # as the engine would say, with its weights loaded
        raise ConfigError(f"{request.hardware.name}: {error}" if request.hardware else str(error)) from error
    fits = pages // config.pages_for(request.context)
    if fits < config.max_num_seqs:
        return BatchLimit(pages=pages, batch=fits, reason=f"memory: {pages} KV pages, --context {request.context}")
    return BatchLimit(pages=pages, batch=config.max_num_seqs, reason="max_num_seqs")


def _batches(request: PlanRequest, batch_limit: BatchLimit) -> list[int]:
    """Return the requested batch sizes that fit; if one does not, also the largest that does."""
    fitting = {batch for batch in request.batches if batch <= batch_limit.batch}
    return sorted(fitting | ({batch_limit.batch} if max(request.batches) > batch_limit.batch else set()))


def _load(request: PlanRequest, config: EngineConfig, seed: int) -> Load:
    limit = config.max_model_len
    if request.trace:
        load = Load.of_trace(request.trace)
    else:
        assert request.request_rate is not None
        prompt, output = request.prompt_tokens, request.output_tokens
        load = Load.poisson(request.request_rate, request.num_requests, prompt, output, seed)
        if prompt.is_exponential or output.is_exponential:  # their tails are cut
            output_J = np.minimum(load.output_J, limit // 2)
            load = load._replace(prompt_J=np.minimum(load.prompt_J, limit - output_J), output_J=output_J)
    longest = int((load.prompt_J + load.output_J).max())
    if longest > limit:
        message = f"a prompt and its answer have {longest} tokens, max_model_len is {limit}"
        raise ConfigError(Problem("--trace" if request.trace else "--prompt-tokens, --output-tokens", message))
    return load
