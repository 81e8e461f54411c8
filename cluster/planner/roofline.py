"""A cost table from the roofline model (Williams et al. 2009), for hardware where nothing was measured.

`secateur.plan.Hardware` assumes the fraction of peak bandwidth and arithmetic that kernels reach, and the fixed times.
The matrices of a forward with n rows take the longer of reading and multiplying:

    max(weight bytes / bandwidth, 2 n weights / flops)

In a mixture of experts a row uses the share s of the experts' weights. It multiplies with that share. If rows choose
experts uniformly and independently, 1 - (1 - s)^n of the experts' weights are read.

These are added, because kernels run one after the other: reading keys and values once per request; four operations per
row, cached token and attention width; a fixed time per layer; and with T ranks two all-reduces per layer, each of
2 (T - 1) / T times n rows. Adding attention's reads and arithmetic is pessimistic by at most a factor of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cluster.planner.memory import ModelShard
from secateur.plan import CostTable, DraftCostTable, Hardware, VerifyCostTable
from workers.config import EngineConfig

_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 63)


def cost_table(config: EngineConfig, shards: Sequence[ModelShard], hardware: Hardware) -> CostTable:
    """Predict an engine's cost table; `shards` are one rank of the target and one of the drafter."""
    target, ranks = shards[0], config.tensor_parallel_size
    rows = _table_rows(target, hardware)
    return CostTable(
        source="predicted",
        hardware=hardware.name,
        model=config.model_path,
        drafter=config.draft.method if config.draft else "",
        verify=VerifyCostTable(
            rows=rows,
            ms=tuple(forward_ms(target, n, ranks, hardware) for n in rows),
            kv_token_ms=kv_token_ms(target, hardware),
            row_kv_token_ms=1e3 * 4 * target.attention_width * target.num_layers / _flops(hardware),
        ),
        draft=_draft_costs(config, shards[1], hardware) if config.draft else None,
        host_ms=hardware.host_ms,
        host_request_ms=hardware.host_request_ms,
    )


def _table_rows(shard: ModelShard, hardware: Hardware) -> tuple[float, ...]:
    """Return the row counts to tabulate: 1, the roofline's ridge point, and twice and four times that.

    A mixture of experts reads more weights with more rows, so it also gets the powers of 2 below the ridge point.
    """
    ridge = reading_ms(shard, math.inf, hardware) / row_ms(shard, hardware)
    powers = [2.0**power for power in range(1, math.ceil(math.log2(max(2.0, ridge))))] if shard.expert_items else []
    return tuple(sorted({1.0, *powers, *(max(2.0, factor * ridge) for factor in (1, 2, 4))}))


def _draft_costs(config: EngineConfig, shard: ModelShard, hardware: Hardware) -> DraftCostTable:
    """Predict drafting costs.

    A tree of n nodes counts as deep as allowed, as best-first trees nearly are. Its first level reads the tokens that
    the last step committed, about two rows per request; the other levels share the nodes evenly.
    """
    assert config.draft is not None
    ranks, levels = config.draft_ranks, [min(n, config.draft.tree.max_depth) for n in _NODES]

    def grow_ms(requests: int, nodes: int, depth: int) -> float:
        first = forward_ms(shard, 2 * requests, ranks, hardware)
        return first + (depth - 1) * forward_ms(shard, requests * nodes / depth, ranks, hardware)

    return DraftCostTable(
        requests=_REQUESTS,
        nodes=_NODES,
        ms=tuple(tuple(grow_ms(r, n, d) for n, d in zip(_NODES, levels, strict=True)) for r in _REQUESTS),
        transfer_ms=tuple((hardware.transfer_ms,) * len(_NODES) for _ in _REQUESTS),
        kv_token_ms=tuple(depth * kv_token_ms(shard, hardware) for depth in levels),
        prompt_token_ms=row_ms(shard, hardware),
    )


def forward_ms(shard: ModelShard, rows: float, ranks: int, hardware: Hardware) -> float:
    """Predict a forward of one rank with its all-reduces, without attention."""
    matrices = max(reading_ms(shard, rows, hardware), rows * row_ms(shard, hardware))
    reduced = rows * shard.hidden_size * shard.item_bytes * 2 * (ranks - 1) / ranks
    reduce_ms = 1e-3 * hardware.link_latency_us + reduced / (1e6 * hardware.link_gbs) if ranks > 1 else 0.0
    return matrices + shard.num_layers * (1e-3 * hardware.layer_us + 2 * reduce_ms)


def reading_ms(shard: ModelShard, rows: float, hardware: Hardware) -> float:
    """Predict the time to read every matrix once, except those of experts that no row has chosen."""
    unread = shard.expert_items * (1 - shard.expert_share) ** rows
    num_bytes = (shard.matmul_items - unread) * shard.item_bytes - shard.saved_bytes
    return 1e3 * num_bytes / _bandwidth(hardware)


def row_ms(shard: ModelShard, hardware: Hardware) -> float:
    """Predict the arithmetic of one row."""
    items = shard.matmul_items - (1 - shard.expert_share) * shard.expert_items
    return 1e3 * 2 * items / _flops(hardware)


def kv_token_ms(shard: ModelShard, hardware: Hardware) -> float:
    """Predict the time to read one cached token."""
    return 1e3 * shard.token_bytes / _bandwidth(hardware)


def _bandwidth(hardware: Hardware) -> float:
    """Bytes per second."""
    return 1e9 * hardware.bandwidth_gbs * hardware.bandwidth_share


def _flops(hardware: Hardware) -> float:
    return 1e12 * hardware.tflops * hardware.flops_share
