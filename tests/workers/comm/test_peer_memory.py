"""Sums through peer memory, by Triton's interpreter in a process per rank that map the same files."""

import random
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from workers.comm import peer_memory
from workers.comm.peer_memory import open_peer_all_reduce
from workers.kernels.triton_all_reduce import MOST_BYTES, PeerAllReduce, num_bytes
from workers.models.layers import TensorParallel

SHAPES = ((1, 24), (17, 4096), (1, 4096), (150, 2000), (0, 64))
CPU = torch.device("cpu")


def map_files(folder: Path, size: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, list[int]]:
    """Map a zeroed file of each rank; the tensors stay mapped as long as the process lives."""
    dist.barrier(group)
    every = [torch.from_file(str(folder / f"memory-{rank}"), True, size, dtype=torch.uint8) for rank in range(
        dist.get_world_size(group))]  # fmt: skip
    MAPPED.append(every)
    return every[dist.get_rank(group)], [memory.data_ptr() for memory in every]


MAPPED: list[list[Tensor]] = []


def values(shape: tuple[int, int], seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sum_of(shape: tuple[int, int], seeds: list[int], dtype: torch.dtype) -> Tensor:
    """Add in float32 in the order of the ranks, and round once."""
    total = torch.zeros(shape)
    for seed in seeds:
        total += values(shape, seed, dtype).float()
    return total.to(dtype)


def in_ranks(size: int, folder: Path, job: Any, *args: Any) -> None:
    """Run job(rank, group, map_memory, *args), which asserts, to its end in a process per rank."""
    mp.spawn(rank_main, args=(size, folder, job, args), nprocs=size)
    assert [(folder / f"ended-{rank}").exists() for rank in range(size)] == [True] * size


def rank_main(rank: int, size: int, folder: Path, job: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    job(rank, dist.group.WORLD, partial(map_files, folder), *args)
    (folder / f"ended-{rank}").touch()
    dist.barrier()
    dist.destroy_process_group()


def check_sums(rank: int, group: dist.ProcessGroup, map_memory: Any, dtype: torch.dtype) -> None:
    opened = open_peer_all_reduce(group, dtype, CPU, map_memory)
    assert opened is not None
    size, delay = dist.get_world_size(), random.Random(rank)
    for step in range(2):
        for shape in SHAPES:
            seeds = [100 * step + other for other in range(size)]
            x = values(shape, seeds[rank], dtype)
            time.sleep(delay.uniform(0, 0.005))  # so that ranks overtake each other
            assert opened.sum_(x) is (x.numel() > 0)
            expected = sum_of(shape, seeds, dtype)
            if dtype is torch.bfloat16:  # to which the interpreter truncates
                torch.testing.assert_close(x, expected, rtol=2**-7, atol=0)
            else:
                assert torch.equal(x, expected), (shape, step)
    rows = values((150, 2000), rank, dtype)
    few = rows[7:10].clone()
    assert opened.sum_(rows) and opened.sum_(few)
    assert torch.equal(rows[7:10], few), "a row's sum depends on the rows beside it"

    tp = TensorParallel(rank, size, group, through_peers=opened)
    whole = torch.ones(MOST_BYTES // dtype.itemsize + 8, dtype=dtype)
    strided = torch.ones(4, 6, dtype=dtype)[:, ::2]
    assert not any(opened.sum_(other) for other in (whole, strided, whole[:5], whole[:8].double()))
    assert (tp.all_reduce_(whole) == size).all() and (tp.all_reduce_(whole[:16]) == size * size).all()


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, torch.float16), (3, torch.float32), (2, torch.bfloat16)], ids=["2", "3", "2-bfloat16"]
)
def test_every_rank_gets_the_sum_in_the_order_of_the_ranks(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    in_ranks(size, tmp_path, check_sums, dtype)


def check_wrapping(rank: int, group: dist.ProcessGroup, map_memory: Any) -> None:
    own, addresses = map_memory(num_bytes(2), group, CPU)
    opened = PeerAllReduce(own, addresses, rank, torch.float32)
    opened._runs += 2**31 - 2
    own[: 2 * 32 * 2 * 4].view(torch.int32).fill_(2**31 - 2)
    dist.barrier(group)
    for step in range(4):
        x = torch.full((40, 4096), float(rank + step))
        assert opened.sum_(x) and (x == 1 + 2 * step).all()
    assert int(opened._runs[0]) == -(2**31) + 2


def test_the_count_of_runs_may_wrap_around(tmp_path: Path) -> None:
    in_ranks(2, tmp_path, check_wrapping)


def check_refusal(rank: int, group: dist.ProcessGroup, map_memory: Any, fault: str) -> None:
    peer_memory._MOST_LOOKS = 20

    def faulty(size: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, list[int]]:
        own, addresses = map_memory(size, group, device)
        if fault == "cannot map" and rank == 1:
            raise RuntimeError("peer access is not supported between these two devices\nand more")
        if fault == "own copies":
            copies = [torch.zeros(size, dtype=torch.uint8) for _ in addresses]
            MAPPED.append(copies)
            addresses = [memory.data_ptr() for memory in copies]
        return own, addresses

    if fault == "two machines":
        socket.gethostname = lambda: f"machine-{rank}"
    assert open_peer_all_reduce(group, torch.float32, CPU, faulty) is None


@pytest.mark.parametrize("fault", ["cannot map", "own copies", "two machines"])
def test_all_ranks_refuse_if_one_cannot(fault: str, tmp_path: Path) -> None:
    in_ranks(2, tmp_path, check_refusal, fault)
