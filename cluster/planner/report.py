"""`secateur plan`: the printed report or its JSON. Starts nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from cluster.convert import engine_config, visible_gpus
from cluster.engine.rank_placement import num_bundles
from cluster.pairs import settled
from cluster.planner.memory import model_shards
from cluster.planner.topology import bytes_text, describe
from secateur.config import EngineArgs
from secateur.errors import ConfigError, Problem
from secateur.plan import Hardware, PlanRequest
from workers.config import EngineConfig

if TYPE_CHECKING:
    from cluster.planner.forecast import BatchForecast, Forecast


def run(args: EngineArgs, request: PlanRequest, *, as_json: bool = False) -> str:
    """Return the report. Raises ConfigError."""
    if request.hardware is not None:
        if args.device == "cpu":
            raise ConfigError(Problem("--hardware", "describes a GPU, and the device is cpu; keep one of the two"))
        args = args.model_copy(update={"device": "cuda"})
    args = settled(args)
    # Another machine's devices are not counted here.
    config = engine_config(args, num_gpus=(visible_gpus() or None) if request.hardware is None else None)
    try:
        shards = model_shards(config)
    except ValueError as error:  # files that cannot be read
        raise ConfigError(str(error)) from error
    topology = describe(args.model_id, config, shards)
    if request.hardware is None:
        return json.dumps({"topology": topology.splitlines()}, indent=1) if as_json else topology
    from cluster.planner.forecast import predict_engine  # imports torch, which a topology may do without

    forecast = predict_engine(request, config, shards)
    if as_json:
        hardware = request.hardware.model_dump(mode="json")
        return json.dumps({"topology": topology.splitlines(), "hardware": hardware, **asdict(forecast)}, indent=1)
    return "\n\n".join([topology, *_text(forecast, request.hardware, config)])


_COLUMNS = (6, 7, 13, 10, 9, 8, 10, 8, 11, 11, 12, 9)


def _text(forecast: Forecast, hardware: Hardware, config: EngineConfig) -> list[str]:
    head = [
        f"costs    PREDICTED for {hardware.name} from published figures and assumptions; nothing was measured; "
        f"acceptance {forecast.acceptance}",
        *(
            f"memory   {need.role}: {bytes_text(need.needed)} needed, with one longest request, of "
            f"{bytes_text(need.available)} available on each device; KV pages take the rest"
            for need in forecast.memory
        ),
        f"smallest tensor_parallel_size that fits: {forecast.smallest_tensor_parallel_size}",
        f"batch    at most {forecast.max_batch} requests ({forecast.max_batch_reason})",
        f"decoding after {forecast.batches[0].off.context:g} tokens each:",
    ]
    rows = [
        _cells("batch", "nodes", "tokens/step", "step ms", "verify", "draft", "transfer", "host")
        + _cells("tokens/s", "of each", "per device", "speedup", start=8),
        *(_batch_row(batch) for batch in forecast.batches),
    ]
    parts = ["\n".join(head), "\n".join(row.rstrip() for row in rows)]
    if config.draft is not None and config.device == "cuda":
        parts.append(_placements(forecast, config))
    return parts


def _batch_row(batch: BatchForecast) -> str:
    p = batch.chosen
    times = (p.step_ms, p.verify_ms, p.draft_ms, p.transfer_ms, p.host_ms)
    speeds = (p.tokens_per_second, p.tokens_per_second_per_request, p.tokens_per_second_per_device)
    return _cells(p.batch, p.nodes, f"{p.tokens_per_step:.2f}", *(f"{ms:.2f}" for ms in times)) + _cells(
        *(f"{speed:.4g}" for speed in speeds), f"{batch.speedup:.2f}", start=8
    )


def _cells(*cells: object, start: int = 0) -> str:
    return "".join(str(cell).rjust(width) for cell, width in zip(cells, _COLUMNS[start:], strict=False))


def _placements(forecast: Forecast, config: EngineConfig) -> str:
    """Compare placements. Drafting and verifying take turns, so a dedicated drafter adds devices but no speed."""
    assert config.draft is not None
    batch = forecast.batches[-1]
    off, parts = batch.off, []
    for placement in ("dedicated", "colocated"):
        devices = num_bundles(replace(config, draft=replace(config.draft, placement=placement)))
        per_device = batch.chosen.tokens_per_second / devices
        parts.append(f"{placement} {devices} devices, {per_device:.4g} tokens/s each")
    plain = f"without speculation {off.devices} devices, {off.tokens_per_second_per_device:.4g} tokens/s each"
    return f"devices  at batch {off.batch}: " + "; ".join([*parts, plain])
