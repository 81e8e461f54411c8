"""Rendezvous and process groups of an engine's ranks.

Rank 0 opens a TCPStore on a free port at each engine start, so a restarted engine never meets a stale rank. All ranks
then create the same groups in the same order: verifier tensor parallelism, drafter tensor parallelism, and the link
between verifier 0 and drafter 0. The ranks that replace a lost drafter are a world of their own, and their link to
verifier 0 is a host link.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from workers.comm.channel import (
    Channel,
    ChannelOffer,
    DevicePart,
    abort_nccl,
    fan_out,
    faster_link,
    link_between_devices,
    link_through_host,
)
from workers.comm.host_link import SPIN_BESIDE_GPU_S, SPIN_S, HostLink, LinkOffer, connect
from workers.config import EngineConfig
from workers.models.layers import TensorParallel

logger = logging.getLogger(__name__)

CONNECT_S = 60.0
"""How long the first exchange over NCCL may take once all ranks are there."""
_ABORT_S = 45.0
"""The same for the link, if messages may take the host instead."""
_LINK_KEY = "host_link"
"""Where the store has the address of the host link."""
_ADVICE = (
    "set NCCL_DEBUG=INFO to see why, NCCL_P2P_DISABLE=1 if GPUs cannot reach each other's memory, NCCL_SOCKET_IFNAME "
    "to the interface between nodes, or draft_link to host to do without NCCL between drafter and verifier"
)


class NotConnected(RuntimeError):
    """NCCL does not connect ranks that have met."""


class Waiting(Protocol):
    """A process group or a link, on which a rank waits for another rank."""

    def set_timeout(self, timeout: timedelta, /) -> None:
        """Set how long its operations may wait from now on."""
        ...


class StepTimeout(NamedTuple):
    """How long a rank waits on a connection once steps run."""

    connection: Waiting
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A rank's view of the engine: its role, device and channels."""

    config: EngineConfig
    rank: int
    role: str
    device: torch.device
    tp: TensorParallel  # of this rank's side, verifier or drafter
    peers: Channel | None  # rank 0 of this side -> its other ranks; None when the side has one rank
    link: Channel | None  # verifier 0 <-> drafter 0, on those two ranks only
    host: str = ""  # verifier 0's address, on the ranks that have joined it
    step_timeouts: tuple[StepTimeout, ...] = ()

    @property
    def leads(self) -> bool:
        """True on the first rank of each side."""
        return self.tp.rank == 0

    def end_start_up(self) -> None:
        """Let the timeouts of steps apply. Until then every wait has the start-up's, whatever ranks load or compile.

        Rank 0 calls it before it sends its first heartbeat, the others when that arrives. From then on a rank of a GPU
        has one thread: what it computes on the host is small, and threads that wait for more would spin.
        """
        if self.device.type == "cuda":
            torch.set_num_threads(1)
        for connection, seconds in self.step_timeouts:
            connection.set_timeout(timedelta(seconds=seconds))

    def gather_topology(self, report: dict[str, str | int]) -> list[dict[str, str | int]]:
        """Gather every rank's identity and `report`, on every rank.

        This start-up collective also verifies that all ranks are connected.
        """
        side, _ = self.role.split()
        entry: dict[str, str | int] = {
            "role": side, "tp_rank": self.tp.rank, "rank": self.rank, "pid": os.getpid(), "device": str(self.device)
        }  # fmt: skip
        entries: list[dict[str, str | int]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(entries, entry | report)
        return entries

    def gather_number(self, value: int) -> list[int]:
        """Gather every rank's value, on every rank. Collective."""
        every = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(every, torch.tensor([value], dtype=torch.int64))
        return [int(number) for number in every]

    def agree_on_minimum(self, value: int) -> int:
        """Return the minimum of all ranks' values. Collective."""
        tensor = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
        return int(tensor)

    def offer_link(self) -> ChannelOffer:
        """Offer a link to the successor of a lost drafter. On verifier 0."""
        offer = LinkOffer(self.host, self.config.reply_timeout_s, spin_s=_spin_s(self.config))
        peer, shared = self.config.role_of(self.config.tensor_parallel_size), _shared(self.config, self.device)
        return ChannelOffer(offer, me=self.role, peer=peer, shared=shared)

    def connected(self, address: str) -> World:
        """Return this world with a link to verifier 0, which offers it at `address`. On a drafter's first rank."""
        link = connect(address, self.config.idle_timeout_s, spin_s=_spin_s(self.config))
        shared = _shared(self.config, self.device)
        return replace(self, link=link_through_host(link, me=self.role, peer=self.config.role_of(0), shared=shared))


class RendezvousStore(dist.TCPStore):
    """The store through which ranks find each other. Rank 0 opens it and keeps it alive.

    It listens on one address only, and only until `stop_listening`: the store has no authentication, and during
    start-up ranks unpickle what they read from it. A plain TCPStore listens on every interface for as long as it lives;
    only its older backend accepts a listening socket instead.
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
        """Refuse new connections and keep the existing ones. Rank 0 calls it when every rank has joined.

        The store's thread ends the process if its listener is closed, so an idle pipe takes the listener's place.
        """
        silent, self._never_written = os.pipe()
        os.dup2(silent, self._descriptor, inheritable=False)
        os.close(silent)
        # The thread's poll holds the listener open. The answer shows that this poll has returned.
        self.add("closed", 1)


def open_store(host: str = "127.0.0.1") -> tuple[RendezvousStore, str]:
    """Open a rendezvous store on a free port of `host`: (the store to keep alive, its "host:port"). Rank 0 calls it."""
    store = RendezvousStore(host)
    return store, f"{host}:{store.port}"


def join(config: EngineConfig, rank: int, store_address: str) -> World:
    """Connect this rank to the engine's other ranks. Blocks until every rank has joined."""
    store = _join(config, rank, config.world_size, store_address)
    host, device, size = store_address.rpartition(":")[0], _device(config), config.tensor_parallel_size
    if device.type == "cuda":
        _check_devices(config, rank, _device_name(device))
    sides = [list(range(size)), list(range(size, config.world_size))]
    # Every rank creates every group, in this order.
    side_groups = [_new_group(config, ranks) for ranks in sides]
    link_group = None
    if sides[1] and not config.has_host_link:
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # its watchdog would end a process that has aborted it
        link_group = _new_group(config, [0, size])

    side = 0 if rank < size else 1
    own = rank - sides[side][0]
    peers = _peers(config, rank, side_groups[side], own, device)
    to_peer, timeouts = None, _step_timeouts(config, side_groups[side], leads=own == 0)
    if sides[1] and rank in (0, size):
        through_host = _host_link(config, rank, store, host)
        timeouts += _step_timeouts(config, through_host, link_group, leads=rank == 0)
        peer_rank = size if rank == 0 else 0
        if link_group is None:
            me, peer = config.role_of(rank), config.role_of(peer_rank)
            to_peer = link_through_host(through_host, me=me, peer=peer, shared=_shared(config, device))
        else:
            to_peer = _device_link(config, rank, peer_rank, through_host, link_group, device)
    return World(
        config=config,
        rank=rank,
        role=config.role_of(rank),
        device=device,
        tp=TensorParallel(own, len(sides[side]), side_groups[side], config.batch_invariant),
        peers=peers,
        link=to_peer,
        host=host,
        step_timeouts=timeouts,
    )


def join_successors(config: EngineConfig, rank: int, store_address: str) -> World:
    """Connect this rank to the others that replace a lost drafter, without a link yet (see `World.connected`)."""
    own, size, device = rank - config.tensor_parallel_size, config.draft_ranks, _device(config)
    _join(config, own, size, store_address)
    group = _new_group(config, list(range(size)))
    return World(
        config=config,
        rank=rank,
        role=config.role_of(rank),
        device=device,
        tp=TensorParallel(own, size, group),
        peers=_peers(config, rank, group, own, device),
        link=None,
        step_timeouts=_step_timeouts(config, group, leads=own == 0),
    )


def _device(config: EngineConfig) -> torch.device:
    return torch.device(config.device, 0) if config.device == "cuda" else torch.device("cpu")


def _device_name(device: torch.device) -> str:
    """Return what tells a rank's device from others: its UUID, its slice, and the host that NCCL is told to see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    parts = (torch.cuda.get_device_properties(device).uuid, visible * visible.startswith("MIG"))
    return " ".join(map(str, filter(None, (*parts, os.environ.get("NCCL_HOSTID")))))


def _check_devices(config: EngineConfig, rank: int, name: str) -> None:
    """Raise ValueError if two ranks that need a device each have the same one. Collective; name: of this rank's."""
    every = [""] * config.world_size
    dist.all_gather_object(every, name)
    for other, its in enumerate(every):
        if its == name and other not in config.ranks_on_device_of(rank):
            raise ValueError(
                f"{config.role_of(rank)} and {config.role_of(other)} have the same GPU, {name}: give each rank one of "
                "its own (name more GPUs in CUDA_VISIBLE_DEVICES, or unset it), lower tensor_parallel_size, or write "
                "draft_placement=colocated"
            )


def _join(config: EngineConfig, rank: int, world_size: int, store_address: str) -> dist.Store:
    """Join the ranks that share a store."""
    host, _, port = store_address.rpartition(":")
    if config.device == "cuda":
        torch.cuda.set_device(_device(config))
    timeout = _startup_timeout(config)
    store = dist.TCPStore(host_name=host, port=int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    backend = "cpu:gloo,cuda:nccl" if config.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return store


def _peers(
    config: EngineConfig, rank: int, group: dist.ProcessGroup | None, own: int, device: torch.device
) -> Channel | None:
    """Open the channel from a side's first rank to its others; None for one rank. own: this rank within its side."""
    if group is None:
        return None
    if device.type == "cuda":  # NCCL allocates memory when it connects: before the KV cache is sized
        _connect(lambda: _sum(group, device), group, f"{config.role_of(rank)} and its tensor-parallel peers")
    source = dist.get_process_group_ranks(group)[0]
    others = "its tensor-parallel peers" if own == 0 else config.role_of(rank - own)
    return fan_out(group, source, me=config.role_of(rank), peer=others, device=device)


def _host_link(config: EngineConfig, rank: int, store: dist.Store, host: str) -> HostLink:
    """Open this rank's end of the host link. Verifier 0 listens at the store's address, which is its own."""
    timeout_s, spin_s = config.startup_timeout_s, _spin_s(config)
    if rank == 0:
        offer = LinkOffer(host, timeout_s, timeout_s, spin_s=spin_s)
        store.set(_LINK_KEY, offer.address)
        return offer.wait()
    return connect(store.get(_LINK_KEY).decode(), timeout_s, spin_s=spin_s)


def _shared(config: EngineConfig, device: torch.device) -> torch.device | None:
    """Return the GPU that verifier 0 and drafter 0 share, within which features travel unless the host is asked for."""
    if config.draft is None or config.draft.link == "host" or device.type != "cuda":
        return None
    return device if config.tensor_parallel_size in config.ranks_on_device_of(0) else None


def _spin_s(config: EngineConfig) -> float:
    return SPIN_S if config.device == "cpu" else SPIN_BESIDE_GPU_S


def _device_link(
    config: EngineConfig,
    rank: int,
    peer_rank: int,
    through_host: HostLink,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Channel:
    """Open the NCCL link to the other side's first rank, for whole messages or, as measured, for features alone.

    Under `auto` it is a link through host memory where NCCL does not connect the two.
    """
    assert config.draft is not None
    me, peer, is_connected = config.role_of(rank), config.role_of(peer_rank), True
    may_use_host = config.draft.link == "auto"
    try:
        _connect(
            lambda: _exchange(group, rank, peer_rank, device),
            group,
            f"{me} and its peer over the link",
            abort=partial(abort_nccl, group) if may_use_host else None,
        )
    except NotConnected as error:
        if not may_use_host:
            raise
        logger.warning("%s; messages and features take host memory instead", error)
        is_connected = False
    if not _all_agree(is_connected, group):
        abort_nccl(group)
        return link_through_host(through_host, me=me, peer=peer)
    may_lose = rank == 0 and config.draft.fallback
    links = {
        part: link_between_devices(
            through_host, group, peer_rank, me=me, peer=peer, device_part=part, where=device, may_lose=may_lose
        )
        for part in (DevicePart.BODY, DevicePart.BULK)
    }
    if config.draft.link == "nccl":
        return links[DevicePart.BODY]
    return links[faster_link(links, through_host, leads=rank == 0)]


def _new_group(config: EngineConfig, ranks: list[int]) -> dist.ProcessGroup | None:
    """Create a group, or return None for fewer than two ranks."""
    return None if len(ranks) < 2 else dist.new_group(ranks, timeout=_startup_timeout(config))


def _step_timeouts(config: EngineConfig, *connections: Waiting | None, leads: bool) -> tuple[StepTimeout, ...]:
    """Return this rank's timeouts on connections: the first rank waits for replies only, others also for messages."""
    seconds = config.reply_timeout_s if leads else max(config.idle_timeout_s, config.reply_timeout_s)
    return tuple(StepTimeout(connection, seconds) for connection in connections if connection is not None)


def _startup_timeout(config: EngineConfig) -> timedelta:
    return timedelta(seconds=config.startup_timeout_s)


def _connect(
    exchange: Callable[[], bool], group: dist.ProcessGroup, who: str, abort: Callable[[], None] | None = None
) -> None:
    """Make NCCL connect the ranks of a group by a first exchange, which returns whether the right bytes arrived.

    NCCL connects at the first exchange, which takes up to seconds. In the first step, `auto` would count that time as
    the cost of a draft. Where GPUs or nodes cannot reach each other, it waits forever, and after CONNECT_S the process
    ends; or it delivers other bytes, for which this raises NotConnected. abort: tried before that, to end the exchange.
    """
    _all_agree(True, group)  # so that all are here when the time begins
    what = f"{who}: the first exchange over NCCL"
    timers = [threading.Timer(CONNECT_S, _give_up, [f"{what} took more than {CONNECT_S:.0f} s; {_ADVICE}"])]
    if abort is not None:
        timers.append(threading.Timer(_ABORT_S, abort))
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        is_right = exchange()
    except RuntimeError as error:
        raise NotConnected(f"{what} failed: {error}; {_ADVICE}") from error
    finally:
        for timer in timers:
            timer.cancel()
    if not is_right:
        raise NotConnected(f"{what} did not deliver what was sent; {_ADVICE}")


def _all_agree(value: bool, group: dist.ProcessGroup) -> bool:
    """Return whether `value` is true on every rank of a group. Collective, over gloo."""
    least = torch.tensor([value], dtype=torch.int32)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return bool(least)


def _give_up(why: str) -> None:
    """End the process with an error. Nothing interrupts NCCL, in which its thread waits."""
    print(f"NotConnected: {why}", file=sys.stderr, flush=True)
    os._exit(1)


def _exchange(group: dist.ProcessGroup, rank: int, other: int, device: torch.device) -> bool:
    """Send a pattern each way between two ranks, and return whether this rank got the other's."""
    is_right = True
    for source in sorted((rank, other)):
        pattern = _pattern(source, device)
        if rank == source:
            dist.send(pattern, dst=other, group=group)
        else:
            got = torch.zeros_like(pattern)
            dist.recv(got, src=other, group=group)
            is_right = torch.equal(got, pattern)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return is_right


def _sum(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Sum the patterns of a group's ranks, and return whether the sum is right."""
    total = _pattern(dist.get_rank(), device)
    dist.all_reduce(total, group=group)
    every = [_pattern(rank, device) for rank in dist.get_process_group_ranks(group)]
    return torch.equal(total, torch.stack(every).sum(0, dtype=total.dtype))


def _pattern(rank: int, device: torch.device) -> Tensor:
    """Return 1 MiB that differ from rank to rank: enough for each protocol of NCCL."""
    return (torch.arange(1 << 18, dtype=torch.int32, device=device) * 7919 + rank * 104729) % 65521


def leave() -> None:
    """Destroy the groups after a clean stop, when CUDA graphs are released.

    Never call it after an error, because the teardown of a collective can hang.
    """
    dist.destroy_process_group()
