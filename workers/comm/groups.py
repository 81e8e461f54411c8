"""Rendezvous and process groups: who is in the engine and over which group they talk.

Rank 0 opens a TCPStore on a free port for each engine start, so a restarted engine can never meet a stale rank. All
ranks then create the same groups in the same order: verifier tensor parallelism, drafter tensor parallelism, and the
link between verifier 0 and drafter 0.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from workers.comm.channel import Channel, fan_out, link
from workers.config import START_TIMEOUT_S, EngineConfig
from workers.models.layers import TensorParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process's place in the engine."""

    config: EngineConfig
    rank: int
    role: str
    device: torch.device
    tp: TensorParallel  # of this rank's own side
    peers: Channel | None  # rank 0 of this side -> its other ranks; None when the side has one rank
    link: Channel | None  # verifier 0 <-> drafter 0, on those two ranks only

    @property
    def leads(self) -> bool:
        """True on the first rank of each side."""
        return self.tp.rank == 0

    def gather_topology(self, report: dict[str, str | int]) -> list[dict[str, str | int]]:
        """Who every rank is, and what it reports beyond that, on every rank; a start-up collective that also proves all
        are connected."""
        side, _ = self.role.split()
        entry: dict[str, str | int] = {
            "role": side, "tp_rank": self.tp.rank, "rank": self.rank, "pid": os.getpid(), "device": str(self.device)
        }  # fmt: skip
        entries: list[dict[str, str | int]] = [{} for _ in range(self.config.world_size)]
        dist.all_gather_object(entries, entry | report)
        return entries

    def gather_number(self, value: int) -> list[int]:
        """Every rank's value, on every rank."""
        every = [torch.zeros(1, dtype=torch.int64) for _ in range(self.config.world_size)]
        dist.all_gather(every, torch.tensor([value], dtype=torch.int64))
        return [int(number) for number in every]

    def agree_on_minimum(self, value: int) -> int:
        """The smallest of every rank's values."""
        tensor = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
        return int(tensor)


class RendezvousStore(dist.TCPStore):
    """The store by which ranks find each other. Rank 0 opens it and keeps it alive.

    It listens on one address alone, and only until `stop_listening`: the store asks nobody for a key, and what ranks
    read from it during start-up they unpickle. By itself TCPStore listens on every interface for as long as it lives;
    only its older backend takes a socket of ours instead.
    """

    def __init__(self, host: str) -> None:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._descriptor = listener.fileno()
        super().__init__(
            host_name=host,
            port=listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            use_libuv=False,
        )

    def stop_listening(self) -> None:
        """Lets nobody connect any more; who has connected keeps its connection. Called when every rank has joined.

        The store's thread ends the process if its listener is closed under it, so a pipe to which nobody writes takes
        its place.
        """
        silent, self._never_written = os.pipe()
        os.dup2(silent, self._descriptor, inheritable=False)
        os.close(silent)
        self.set("closed", "")  # wakes the thread, which waits on the listener until something happens


def open_store(host: str = "127.0.0.1") -> tuple[RendezvousStore, str]:
    """A rendezvous store on a free port of `host`: (the store to keep alive, its "host:port"). Called by rank 0."""
    store = RendezvousStore(host)
    return store, f"{host}:{store.port}"


def join(config: EngineConfig, rank: int, store_address: str) -> World:
    """Connects this rank to the engine's world. Blocks until every rank has joined."""
    host, _, port = store_address.rpartition(":")
    device = torch.device(config.device, 0) if config.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore(host_name=host, port=int(port), is_master=False, wait_for_workers=False)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=START_TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=config.world_size, timeout=timeout)
    size = config.tensor_parallel_size
    sides = [list(range(size)), list(range(size, config.world_size))]
    # Every rank creates every group, in this order.
    side_groups = [_new_group(config, rank, ranks) for ranks in sides]
    link_group = _new_group(config, rank, [0, size]) if sides[1] else None

    side = 0 if rank < size else 1
    ranks, group = sides[side], side_groups[side]
    role = config.role_of(rank)
    peers = None
    if group is not None:
        if device.type == "cuda":  # NCCL takes memory as it connects: before pages are given what is free
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        others = "its tensor-parallel peers" if rank == ranks[0] else config.role_of(ranks[0])
        peers = fan_out(group, ranks[0], me=role, peer=others, device=device)
    to_peer = None
    if link_group is not None and rank in (0, size):
        other = size if rank == 0 else 0
        where = torch.device("cpu") if config.has_host_link else device
        if where.type == "cuda":
            _connect(link_group, rank, other, device)
        to_peer = link(link_group, other, me=role, peer=config.role_of(other), device=where)
    return World(
        config=config,
        rank=rank,
        role=role,
        device=device,
        tp=TensorParallel(rank=rank - ranks[0], size=len(ranks), group=group),
        peers=peers,
        link=to_peer,
    )


def _new_group(config: EngineConfig, rank: int, ranks: list[int]) -> dist.ProcessGroup | None:
    """None for fewer than two ranks. A timeout is each process's own: the first rank waits for answers only, the others
    also for their next message."""
    if len(ranks) < 2:
        return None
    seconds = config.step_timeout_s if rank == ranks[0] else config.idle_timeout_s
    return dist.new_group(ranks, timeout=timedelta(seconds=seconds))


def _connect(group: dist.ProcessGroup, rank: int, other: int, device: torch.device) -> None:
    """NCCL connects two ranks, each way, when they first exchange something. That takes up to seconds, which `auto`
    would take for the price of a draft if the first step paid them."""
    nothing = torch.zeros(1, dtype=torch.uint8, device=device)
    for source in sorted((rank, other)):
        if rank == source:
            dist.send(nothing, dst=other, group=group)
        else:
            dist.recv(nothing, src=other, group=group)
    torch.cuda.synchronize(device)


def leave() -> None:
    """Closes the groups after a clean stop, when graphs are released. Never call it after an error: a collective's
    teardown can hang."""
    dist.destroy_process_group()
