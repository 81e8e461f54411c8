"""Places ranks: one placement per world rank, for plain processes and for a Ray placement group alike.

Imports no torch: a worker actor reads its environment from here before torch may be imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.config import EngineConfig

COLOCATED_GPUS = 0.5
"""Two processes on one device: equal halves are exact in Ray's arithmetic and fit one {"GPU": 1} bundle. Ray does not
enforce memory either; the engine divides it."""

HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""torch asks Linux for 2 MiB pages under tensors as large: forwards of 300 M parameters on CPU take 3 to 10 % less, and
it matters less where the 4 KiB pages of a process happen to lie. glibc (2.35) asks for them under all it hands out:
products with small weights take 5 to 10 % less. Read at the first allocation, and when a process starts."""

KEPT_BYTES, KEPT_BLOCK_BYTES = 1 << 30, 32 << 20
"""What glibc may keep of freed memory, and the largest blocks it does so with (it allows no more). Left to itself it
gives blocks aligned for huge pages back at once, and each layer's gathered keys fault their pages in anew: with 32
requests of 100 tokens a forward of the bundled target took 18 ms instead of 6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """Where one rank lives.

    Example: drafter 0 beside verifier 0 on one GPU, T = 2:
    RankPlacement(rank=2, role="drafter 0", bundle=0, num_gpus=0.5, is_shared=True)
    """

    rank: int
    role: str
    bundle: int
    """Index of the Ray bundle, and of the device among the engine's devices."""
    num_gpus: float
    is_shared: bool
    """Another rank has the same device."""


def rank_placements(config: EngineConfig) -> list[RankPlacement]:
    """One placement per world rank, in rank order."""
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
    """Devices (CUDA) or slots (CPU) the engine takes."""
    return max(placement.bundle for placement in rank_placements(config)) + 1


def worker_env(config: EngineConfig) -> dict[str, str]:
    """Environment every worker process needs, however it is started. Devices are the starter's matter.

    On CPU each worker gets one thread: two busy multi-threaded processes on two cores fall to a tenth of their speed.
    """
    env = {"TOKENIZERS_PARALLELISM": "false"}
    if config.device == "cpu":
        env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **HUGE_PAGES}
        env |= {"MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES), "MALLOC_MMAP_THRESHOLD_": str(KEPT_BLOCK_BYTES)}
    return env


def interface_env(address: str) -> dict[str, str]:
    """Environment that lets gloo and NCCL talk through the interface of this node's address, unless somebody chose
    another: set it only where it is not set.

    Left to itself gloo listens on the address of the machine's name: one that others can reach though all ranks are on
    this machine, or 127.0.1.1, which ranks on other nodes cannot reach. {} for an address that no interface has.
    """
    if (name := interface_of(address)) is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # with =, or it would be a prefix


def interface_of(address: str) -> str | None:
    """The name of this machine's network interface that has the address."""
    import psutil  # type: ignore[import-untyped, unused-ignore]  # it brings no types

    interfaces = psutil.net_if_addrs().items()
    return next((name for name, held in interfaces if any(one.address == address for one in held)), None)
