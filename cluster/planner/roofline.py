"""Step times from the roofline model (Williams et al. 2009), for hardware where nothing was measured.

`secateur.plan.Hardware` assumes the fraction of peak bandwidth and arithmetic that kernels reach, and the fixed times.
The matrices of a forward with n rows take the longer of reading and multiplying:

    max(weight bytes / bandwidth, 2 n weights / flops)

In a mixture of experts a row uses the share s of the experts' weights. It multiplies with that share. If rows choose
experts uniformly and independently, 1 - (1 - s)^n of the experts' weights are read.

These are added, because kernels run one after the other: reading keys and values once per request; four operations per
row, cached token and attention width; reading a hybrid's recurrent states for the trees, and reading and writing them
for what was accepted; a fixed time per layer; and with T ranks two all-reduces per layer, each of
2 (T - 1) / T times n rows. Adding attention's reads and arithmetic is pessimistic by at most a factor of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.planner.memory import ModelShard
from secateur.plan import Hardware
from workers.config import EngineConfig

_STATE_PASSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The parts of a step in milliseconds; they follow one another, as in the engine."""

    verify_ms: float
    draft_ms: float
    transfer_ms: float
    host_ms: float

    @property
    def ms(self) -> float:
        """The whole step."""
        return self.verify_ms + self.draft_ms + self.transfer_ms + self.host_ms


def step_time(
    config: EngineConfig, shards: Sequence[ModelShard], hardware: Hardware, batch: int, nodes: int, context: float
) -> StepTime:
    """Predict a step of `batch` requests, each with a tree of `nodes` and `context` cached tokens.

    shards: one rank of the target and, if there is a drafter, one of the drafter.
    """
    target, rows = shards[0], batch * (1 + nodes)
    attention_ms = 1e3 * 4 * target.attention_width / _flops(hardware)
    return StepTime(
        verify_ms=forward_ms(target, rows, config.tensor_parallel_size, hardware)
        + batch * context * (kv_token_ms(target, hardware) + (1 + nodes) * attention_ms)
        + batch * _STATE_PASSES * 1e3 * target.seat_bytes / _bandwidth(hardware),
        draft_ms=_draft_ms(config, shards[1], hardware, batch, nodes, context) if nodes else 0.0,
        transfer_ms=hardware.transfer_ms if nodes else 0.0,
        host_ms=hardware.host_ms + hardware.host_request_ms * (batch - 1),
    )


def _draft_ms(
    config: EngineConfig, shard: ModelShard, hardware: Hardware, batch: int, nodes: int, context: float
) -> float:
    """Predict drafting.

    A block head runs once, over the tokens that the last step committed, about two rows per request, and its slots.
    Elsewhere a tree of n nodes counts as deep as allowed, as best-first trees nearly are. Its first level reads those
    tokens; the other levels share the nodes evenly.
    """
    assert config.draft is not None
    if shard.pass_depth is not None:
        rows = batch * (2 + shard.pass_depth)
        return forward_ms(shard, rows, config.draft_ranks, hardware) + batch * context * kv_token_ms(shard, hardware)
    depth = min(nodes, config.draft.tree.max_depth)
    first = forward_ms(shard, 2 * batch, config.draft_ranks, hardware)
    level = forward_ms(shard, batch * nodes / depth, config.draft_ranks, hardware)
    return first + (depth - 1) * level + depth * batch * context * kv_token_ms(shard, hardware)


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
