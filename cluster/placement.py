"""Who sits where: one seat per world rank, on plain processes and in a Ray placement group alike. Touches no GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass

from workers.config import EngineConfig

REPLICA_CPUS = 0.1
CPU_WORKER_CPUS = 0.1
"""Logical CPUs a process asks Ray for. Small on purpose: Ray counts them, it does not enforce them, and a laptop with
two cores shall hold a replica, a proxy, two verifier ranks and a drafter."""

COLOCATED_GPUS = 0.5
"""Two processes on one device: equal halves are exact in Ray's arithmetic and fit one {"GPU": 1} bundle. Ray does not
enforce memory either; the engine divides it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where one rank lives.

    Example: drafter 0 beside verifier 0 on one GPU, T = 2:
    Seat(rank=2, role="drafter 0", bundle=0, num_gpus=0.5, is_shared=True)
    """

    rank: int
    role: str
    bundle: int
    """Index of the Ray bundle, and of the device among the engine's devices."""
    num_gpus: float
    is_shared: bool
    """Another rank has the same device."""


def seats(config: EngineConfig) -> list[Seat]:
    """One seat per world rank, in rank order."""
    on_cuda = config.device == "cuda"
    colocated = config.draft is not None and config.draft.placement == "colocated"
    tp = config.tensor_parallel_size
    result = []
    for rank in range(config.world_size):
        is_shared = colocated and (rank >= tp or rank < config.draft_ranks)
        result.append(
            Seat(
                rank=rank,
                role=config.role_of(rank),
                bundle=rank - tp if colocated and rank >= tp else rank,
                num_gpus=(COLOCATED_GPUS if is_shared else 1.0) if on_cuda else 0.0,
                is_shared=is_shared,
            )
        )
    return result


def num_bundles(config: EngineConfig) -> int:
    """Devices (CUDA) or slots (CPU) the engine takes."""
    return max(seat.bundle for seat in seats(config)) + 1


def bundles(config: EngineConfig, *, accelerator_type: str | None = None) -> list[dict[str, float]]:
    """The placement group of one replica: a bundle per device; the replica's own CPU is part of bundle 0."""
    if config.device == "cuda":
        worker = {"GPU": 1.0, "CPU": 1.0}
        if accelerator_type:
            worker[f"accelerator_type:{accelerator_type}"] = 0.001
    else:
        worker = {"CPU": CPU_WORKER_CPUS * max(1, -(-config.world_size // num_bundles(config)))}
    result = [dict(worker) for _ in range(num_bundles(config))]
    result[0]["CPU"] = round(result[0].get("CPU", 0.0) + REPLICA_CPUS, 4)
    return result


def worker_env(config: EngineConfig, rank: int) -> dict[str, str]:
    """Environment every worker process of this rank needs, however it is started. Devices are the starter's matter.

    On CPU each worker gets one thread: two busy multi-threaded processes on two cores fall to a tenth of their speed.
    Two NCCL ranks on one device would be refused as duplicates: NCCL compares host id + bus id, so each gets a host id
    of its own and talks over loopback sockets.
    """
    seat = seats(config)[rank]
    env = {"TOKENIZERS_PARALLELISM": "false"}
    if config.device == "cpu":
        env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    elif seat.is_shared:
        env |= {
            "NCCL_HOSTID": f"secateur-{os.getpid()}-{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
        }
    return env
