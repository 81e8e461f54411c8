"""The placement and the environment of every rank, for plain processes and for a Ray placement group.

Imports no torch, because a worker actor sets its environment from here before it imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.config import EngineConfig

COLOCATED_GPUS = 0.5
"""The share of each of two processes on one device: two halves are exact in Ray's arithmetic and fit one {"GPU": 1}
bundle. Ray does not enforce the memory; the engine divides it."""

HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""The first makes torch use 2 MiB pages for tensors of that size: a forward of 300 M parameters on CPU takes 3 to 10 %
less time, and the time varies less between processes. The second makes glibc (2.35) use them for all allocations:
products with small weights take 5 to 10 % less. torch reads it at the first allocation, glibc at process start."""

KEPT_BYTES, KEPT_BLOCK_BYTES = 1 << 30, 32 << 20
"""How much freed memory glibc keeps, and the largest blocks that it keeps (its maximum). By default it returns blocks
aligned for huge pages at once, and every layer's gathered keys fault their pages in again: with 32 requests of 100
tokens a forward of the bundled target took 18 ms instead of 6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """The bundle and the GPU share that one rank gets.

    Example: drafter 0 beside verifier 0 on one GPU, T = 2:
    RankPlacement(rank=2, role="drafter 0", bundle=0, num_gpus=0.5, is_shared=True)
    """

    rank: int
    role: str
    bundle: int
    """Index of the Ray bundle, and of the device among the engine's devices."""
    num_gpus: float
    is_shared: bool
    """True if another rank uses the same device."""


def rank_placements(config: EngineConfig) -> list[RankPlacement]:
    """Return one placement per world rank, in rank order."""
    on_cuda = config.device == "cuda"
    colocated = config.draft is not None and config.draft.placement == "colocated"
    tp = config.tensor_parallel_size
    result = []
    for rank in range(config.world_size):
        is_shared = colocated and (rank >= tp or rank < config.draft_ranks)
        result.append(
            RankPlacement(
                rank=rank,
                role=config.role_of(rank),
                bundle=rank - tp if colocated and rank >= tp else rank,
                num_gpus=(COLOCATED_GPUS if is_shared else 1.0) if on_cuda else 0.0,
                is_shared=is_shared,
            )
        )
    return result


def num_bundles(config: EngineConfig) -> int:
    """Return the number of devices (CUDA) or slots (CPU) that the engine takes."""
    return max(placement.bundle for placement in rank_placements(config)) + 1


def worker_env(config: EngineConfig) -> dict[str, str]:
    """Return the environment of every worker process, without its devices.

    On CPU each worker begins with one thread, and sets `EngineConfig.threads` itself: two busy multi-threaded processes
    on two cores drop to a tenth of their speed.
    """
    env = {"TOKENIZERS_PARALLELISM": "false"}
    if config.device == "cpu":
        env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **HUGE_PAGES}
        env |= {"MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES), "MALLOC_MMAP_THRESHOLD_": str(KEPT_BLOCK_BYTES)}
    return env


def interface_env(address: str) -> dict[str, str]:
    """Return the environment that makes gloo and NCCL use the interface with this node's address.

    It must not replace variables that the user has set. {} if no interface has the address. By default gloo listens on
    the address of the host name: a public one even if all ranks are on this machine, or 127.0.1.1, which other nodes
    cannot reach.
    """
    if (name := interface_of(address)) is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # without =, NCCL matches a prefix


def interface_of(address: str) -> str | None:
    """Return the name of this machine's network interface that has the address; None if there is none."""
    import psutil  # type: ignore[import-untyped, unused-ignore]  # it brings no types

    interfaces = psutil.net_if_addrs().items()
    return next((name for name, entries in interfaces if any(entry.address == address for entry in entries)), None)
