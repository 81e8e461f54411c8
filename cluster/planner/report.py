"""`secateur plan`: the printed report or its JSON. Only a profile starts an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster.convert import engine_config, visible_gpus
from cluster.planner.memory import model_shards
from cluster.planner.topology import describe
from cluster.rank_placement import num_bundles
from secateur.config import EngineArgs
from secateur.errors import ConfigError, Problem
from secateur.plan import PlanRequest
from workers.config import EngineConfig

if TYPE_CHECKING:
    from cluster.planner.fleet import Fleet
    from cluster.planner.forecast import BatchForecast, Forecast
    from cluster.planner.predict import Prediction

Say = Callable[[str], None]

PERCENTILES = (50, 90, 99)


def run(args: EngineArgs, request: PlanRequest, *, as_json: bool = False, say: Say = print) -> str:
    """Return the report. Raises ConfigError before an engine is started, EngineDead while it is profiled."""
    if request.hardware is not None:
        if args.device == "cpu":
            raise ConfigError(Problem("--hardware", "describes a GPU, and the device is cpu; keep one of the two"))
        args = args.model_copy(update={"device": "cuda"})
    # Another machine's devices are not counted here.
    config = engine_config(args, num_gpus=(visible_gpus() or None) if request.hardware is None else None)
    try:
        shards = model_shards(config)
    except ValueError as error:  # files that cannot be read
        raise ConfigError(str(error)) from error
    topology = describe(args.model_id, config, shards)
    forecast = None
    if request.predicts:
        from cluster.planner.forecast import predict_engine  # imports torch, which a topology may do without

        forecast = predict_engine(args, request, config, shards, say)
    if as_json:
        return json.dumps({"topology": topology.splitlines(), **(_json(forecast) if forecast else {})}, indent=1)
    return "\n\n".join([topology, *(_text(forecast, config) if forecast else [])])


# -- as text ---------------------------------------------------------------------------------------------------------

_COLUMNS = (6, 7, 13, 10, 9, 8, 10, 8, 11, 11, 12, 9)


def _text(forecast: Forecast, config: EngineConfig) -> list[str]:
    table = forecast.table
    how = {
        "measured": f"measured on {table.hardware or 'some machine'}",
        "predicted": f"PREDICTED for {table.hardware} from published figures and assumptions; nothing was measured",
        "given": f"given{' for ' + table.hardware if table.hardware else ''}",
    }[table.source]
    error = f" (median error of a step {table.fit_error:.0%})" if table.fit_error is not None else ""
    head = [
        f"costs    {how}{error}; acceptance {forecast.accepted_from}",
        f"batch    at most {forecast.batch_limit.batch} requests ({forecast.batch_limit.reason})",
        f"decoding behind {forecast.batches[0].off.context:g} tokens each:",
    ]
    rows = [
        _cells("batch", "nodes", "tokens/step", "step ms", "verify", "draft", "transfer", "host")
        + _cells("tokens/s", "of each", "per device", "speedup", start=8),
        *(_batch_row(batch) for batch in forecast.batches),
    ]
    parts = ["\n".join(head), "\n".join(row.rstrip() for row in rows)]
    if config.draft is not None and config.device == "cuda":
        parts.append(_placements(forecast, config))
    if forecast.fleet is not None:
        parts.append(_fleet_text(forecast.fleet))
    return parts


def _batch_row(batch: BatchForecast) -> str:
    p = batch.chosen
    step = (p.step.ms, p.step.verify_ms, p.step.draft_ms, p.step.transfer_ms, p.step.host_ms)
    return _cells(p.batch, p.nodes, f"{p.tokens_per_step:.2f}", *(f"{ms:.2f}" for ms in step)) + _cells(
        *(f"{value:.4g}" for value in (p.tokens_per_second, p.per_request, p.per_device)),
        f"{batch.speedup:.2f}",
        start=8,
    )


def _cells(*cells: object, start: int = 0) -> str:
    return "".join(str(cell).rjust(width) for cell, width in zip(cells, _COLUMNS[start:], strict=False))


def _placements(forecast: Forecast, config: EngineConfig) -> str:
    """Compare placements. No overlap is predicted, so a dedicated drafter adds devices but no speed."""
    assert config.draft is not None
    batch = forecast.batches[-1]
    parts = []
    for placement in ("dedicated", "colocated"):
        devices = num_bundles(replace(config, draft=replace(config.draft, placement=placement)))
        per_device = batch.chosen.tokens_per_second / devices
        parts.append(f"{placement} {devices} devices, {per_device:.4g} tokens/s each")
    plain = f"without speculation {batch.off.num_devices} devices, {batch.off.per_device:.4g} tokens/s each"
    return f"devices  at batch {batch.off.batch}: " + "; ".join([*parts, plain])


def _fleet_text(fleet: Fleet) -> str:
    lines = [
        f"fleet    {fleet.num_replicas} replicas, {fleet.num_devices} devices; {len(fleet.finish_J)} requests in "
        f"{fleet.seconds:.1f} s (simulated)",
        f"         {fleet.tokens_per_second:.4g} tokens/s, {fleet.per_device:.4g} per device; busy "
        f"{fleet.utilisation:.0%}, then {fleet.mean_batch:.1f} requests decode at a time",
        "".join(name.rjust(12) for name in ("ms", *(f"p{p}" for p in PERCENTILES), "mean")),
    ]
    for name, values in _latencies(fleet).items():
        lines.append("".join(cell.rjust(12) for cell in (name, *(f"{1e3 * value:.1f}" for value in values.values()))))
    return "\n".join(lines)


def _latencies(fleet: Fleet) -> dict[str, dict[str, float]]:
    """Return TTFT, TPOT and E2E percentiles in seconds."""
    seen = {"TTFT": fleet.ttft_J, "TPOT": fleet.tpot_J, "E2E": fleet.e2e_J}
    return {
        name: {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES} | {"mean": float(values.mean())}
        for name, values in seen.items()
        if len(values)
    }


# -- as JSON ---------------------------------------------------------------------------------------------------------


def _json(forecast: Forecast) -> dict[str, Any]:
    fleet = forecast.fleet
    return {
        "costs": forecast.table.model_dump(mode="json"),
        "acceptance": forecast.accepted_from,
        "max_batch": forecast.batch_limit.batch,
        "max_batch_reason": forecast.batch_limit.reason,
        "kv_pages": forecast.batch_limit.pages,
        "batches": [
            {"off": _prediction(batch.off), "on": _prediction(batch.on) if batch.on else None, "speedup": batch.speedup}
            for batch in forecast.batches
        ],
        "fleet": None if fleet is None else _fleet_json(fleet),
    }


def _prediction(p: Prediction) -> dict[str, float]:
    return {
        "batch": p.batch,
        "nodes": p.nodes,
        "context": p.context,
        "devices": p.num_devices,
        "tokens_per_step": p.tokens_per_step,
        "step_ms": p.step.ms,
        "verify_ms": p.step.verify_ms,
        "draft_ms": p.step.draft_ms,
        "transfer_ms": p.step.transfer_ms,
        "host_ms": p.step.host_ms,
        "tokens_per_second": p.tokens_per_second,
        "tokens_per_second_per_request": p.per_request,
        "tokens_per_second_per_device": p.per_device,
    }


def _fleet_json(fleet: Fleet) -> dict[str, Any]:
    return {
        "replicas": fleet.num_replicas,
        "devices": fleet.num_devices,
        "requests": len(fleet.finish_J),
        "seconds": fleet.seconds,
        "tokens_per_second": fleet.tokens_per_second,
        "tokens_per_second_per_device": fleet.per_device,
        "utilisation": fleet.utilisation,
        "mean_batch": fleet.mean_batch,
        "seconds_of": _latencies(fleet),
    }
