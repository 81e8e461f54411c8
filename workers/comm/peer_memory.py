"""Memory of GPUs that the ranks of a side map for one another, and the all-reduce through it, checked at start-up.

    open_peer_all_reduce(group, dtype, device) -> PeerAllReduce | None

PyTorch's symmetric memory maps it where the GPUs of one machine reach each other's memory.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from workers.kernels.triton_all_reduce import MOST_RANKS, ONE_SHOT_BYTES, PeerAllReduce, num_bytes

logger = logging.getLogger(__name__)

MapMemory = Callable[[int, dist.ProcessGroup, torch.device], tuple[Tensor, list[int]]]
"""(bytes, group, device) -> this rank's zeroed memory uint8 [bytes], and the address of every rank's in this process.
Collective. Raises RuntimeError or OSError."""

_MOST_LOOKS = 1 << 20
"""How often a checked sum looks for another rank, about a second on a GPU."""


def map_symmetric(size: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, list[int]]:
    """Map memory with PyTorch's symmetric memory; see `MapMemory`."""
    import torch.distributed._symmetric_memory as symm_mem

    # To each rank its own GPU is device 0, which PyTorch would take for one GPU that all ranks share.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    own, error = None, ""
    try:
        own = symm_mem.empty(size, dtype=torch.uint8, device=device).zero_()
        torch.cuda.synchronize(device)
    except RuntimeError as failure:
        error = str(failure)
    if not _all_agree(own is not None, group):  # or the others would wait for this rank
        raise RuntimeError(error or "another rank could not allocate the memory")
    assert own is not None
    return own, list(symm_mem.rendezvous(own, group).buffer_ptrs)


def open_peer_all_reduce(
    group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device, map_memory: MapMemory = map_symmetric
) -> PeerAllReduce | None:
    """Open the all-reduce of a group for sums of one dtype, or log why it cannot be and return None. Collective.

    All ranks return alike: they must be on one machine, map each other's memory, and get the sums that gloo gets.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    hosts: list[str] = [""] * size
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    if len(set(hosts)) > 1 or size > MOST_RANKS:
        where = ", ".join(sorted(set(hosts)))
        return _none(rank, f"it connects at most {MOST_RANKS} ranks of one machine, and these are {size} on {where}")
    opened, error = None, ""
    try:
        own, addresses = map_memory(num_bytes(size), group, device)
        opened = PeerAllReduce(own, addresses, rank, dtype)
    except (RuntimeError, OSError) as failure:
        error = str(failure).partition("\n")[0]
    if not _all_agree(opened is not None, group):
        return _none(rank, error or "another rank could not map the memory")
    assert opened is not None
    one_shot = ONE_SHOT_BYTES // (size * dtype.itemsize) // 8 * 8
    is_right = [_is_right(opened, count, dtype, group, device) for count in (1000, one_shot, 3 * one_shot)]
    if not _all_agree(all(is_right), group):
        return _none(rank, "a sum at start-up was wrong, or a rank waited for too long")
    if rank == 0:
        logger.info("sums over %d ranks go through peer memory", size)
    return opened


def _is_right(
    opened: PeerAllReduce, count: int, dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device
) -> bool:
    """Compare a sum of so many values with gloo's in float32; it may be rounded once more, to `dtype`."""
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    x = torch.randn(count, generator=generator).to(dtype)
    expected = x.to(torch.float32, copy=True)
    opened.sum_(x.to(device, copy=True), most_looks=_MOST_LOOKS)  # compiles, for which ranks take unequally long
    dist.all_reduce(expected, group=group)
    found = x.to(device, copy=True)
    was_summed = opened.sum_(found, most_looks=_MOST_LOOKS)
    return was_summed and torch.allclose(found.cpu().float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def _all_agree(is_so: bool, group: dist.ProcessGroup) -> bool:
    flag = torch.tensor([int(is_so)])
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag)


def _none(rank: int, why: str) -> PeerAllReduce | None:
    """Log on rank 0 why there is no all-reduce through peer memory."""
    if rank == 0:
        logger.warning("sums over ranks go through NCCL, because peer memory is not used: %s", why)
    return None
