"""Channels between ranks: verifier 0 <-> drafter 0 (the link), and a side's first rank -> its peers (the fan-out).

A frame is the header [kind, step, meta bytes, bulk bytes] and a body of meta and bulk bytes. What starts on the CPU
travels over the host link, or over gloo between the ranks of a side; what is for the device travels over NCCL from one
device buffer (see `DevicePart`), or within a device that both ends share (`workers.comm.lent_memory`). Nothing is
pickled. Each direction has buffers of its own, which are reused and never shrink.

If a peer dies, or is silent for longer than this process's timeout, the channel raises PeerLost, which names the peer
(see "Lost ranks" in `workers/README.md`). An idle sender sends heartbeats, so silence means a failure.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from workers.comm import wire
from workers.comm.host_link import HostLink, LinkOffer
from workers.comm.lent_memory import LentMemory
from workers.comm.wire import EMPTY, Kind, Message, Packed
from workers.pulse import PULSE

logger = logging.getLogger(__name__)

_HEADER_BYTES = 32  # 4 int64
_BROADCAST_BYTES = 8192
"""How much of a body is broadcast with its header, so that most messages take one collective."""
_LARGE = 1 << 18
"""Bytes of a bulk that is worth a wait for its receiver: 32 rows of 4,096 features in 16 bits."""
_NUM_PROBES = 32
_REQUEST_BYTES, _REPLY_BYTES = (2048, 65536), (4096, 0)
"""(meta, bulk) bytes of a probe: eight rows of 4096 features in 16 bits, and a tree of 16 nodes with probabilities."""


class DevicePart(Enum):
    """The part of a body that travels from device to device."""

    NONE = "none"
    LARGE = "a large bulk"
    BULK = "bulk"
    BODY = "body"


class PeerLost(ConnectionError):
    """A rank died or hangs. The engine cannot continue and must be replaced as a whole."""


@contextmanager
def naming_lost_peers(me: str, step: int) -> Iterator[None]:
    """Turn a failed collective of a model into PeerLost, which names the rank that noticed it and the step."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise PeerLost(f"{me} lost a tensor-parallel peer at step {step}: {error}") from error
        raise


def _nothing() -> None:
    pass


class Transport(NamedTuple):
    """How the bytes of one tensor are sent, and received into another.

    abort: ends what waits on the device for a peer that is lost. Otherwise its kernel would wait on, and with it
    whatever is launched later.
    """

    put: Callable[[Tensor], None]
    take: Callable[[Tensor], None]
    abort: Callable[[], None] = _nothing
    wait: Callable[[float], bool] = lambda _: True
    """Waits so many seconds for bytes to receive, and returns whether there are some; True also if unknown."""


class _Buffers:
    """The bytes of one direction's last frame: header and host part on the host, the rest on the device."""

    def __init__(self, first_bytes: int, where: torch.device | None) -> None:
        self.host = torch.zeros(first_bytes, dtype=torch.uint8)
        self.device = torch.zeros(0, dtype=torch.uint8, device=where)

    def reserve(self, in_host: int, in_device: int) -> None:
        """Grow to hold these bytes. The host's bytes stay."""
        if self.host.numel() < in_host:
            grown = torch.zeros(2 * in_host, dtype=torch.uint8)
            grown[: self.host.numel()] = self.host
            self.host = grown
        if self.device.numel() < in_device:
            self.device = torch.zeros(2 * in_device, dtype=torch.uint8, device=self.device.device)


class Received(NamedTuple):
    """A received frame."""

    kind: Kind
    step: int
    message: Message | None  # None for STOP, HEARTBEAT and PROBE


class Channel:
    """Sends and receives messages; see the functions below for the ranks that may do so.

    host and device: put and take one tensor's bytes. first_bytes: what every frame begins with, which the receiver
    takes before it knows the frame's size; None = a stream, where it takes as much as it wants. A received message's
    bulk tensor is a view of this channel's buffer and is valid until the next `receive`, whatever is sent meanwhile.
    """

    def __init__(
        self,
        *,
        me: str,
        peer: str,
        host: Transport,
        first_bytes: int | None,
        device_part: DevicePart = DevicePart.NONE,
        device: Transport | None = None,
        where: torch.device | None = None,
    ) -> None:
        assert (device_part == DevicePart.NONE) == (device is None) == (where is None)
        self._me, self._peer = me, peer
        self._host_transport, self._device_transport = host, device
        self._device_part = device_part
        self._first_bytes = first_bytes
        self._step = -1  # of the last frame sent or received, for errors
        self._sent, self._received = (_Buffers(first_bytes or _HEADER_BYTES, where) for _ in range(2))

    def send(self, message: Message, step: int) -> None:
        """Send a message. Raises PeerLost."""
        self._send(wire.pack(message), step)

    def heartbeat(self, step: int) -> None:
        """Tell the peer that this rank is alive. Raises PeerLost."""
        self._send(Packed(Kind.HEARTBEAT, EMPTY, EMPTY), step)

    def probe(self, meta_bytes: int, bulk_bytes: int) -> None:
        """Send a frame of this size without content, to time the link. Raises PeerLost."""
        meta = torch.zeros(meta_bytes, dtype=torch.uint8)
        bulk = torch.zeros(bulk_bytes, dtype=torch.uint8, device=self._sent.device.device)
        self._send(Packed(Kind.PROBE, meta, bulk), -1)

    def stop(self, step: int) -> None:
        """Tell the peer to shut down. Raises PeerLost."""
        self._send(Packed(Kind.STOP, EMPTY, EMPTY), step)

    def has_frame(self, wait_s: float) -> bool:
        """Return whether `receive` need not wait, after waiting for so many seconds at most."""
        with PULSE.waiting():
            return self._host_transport.wait(wait_s)

    def receive(self) -> Received:
        """Wait for the next frame. Raises PeerLost."""
        first, buffers = self._first_bytes or _HEADER_BYTES, self._received
        self._move(self._host_transport.take, buffers.host[:first])
        kind, step, meta_bytes, bulk_bytes = buffers.host[:_HEADER_BYTES].view(torch.int64).tolist()
        self._step = step
        if meta_bytes + bulk_bytes == 0:
            return Received(Kind(kind), step, None)
        in_host, in_device = self._split(meta_bytes, bulk_bytes)
        buffers.reserve(_HEADER_BYTES + in_host, in_device)
        if _HEADER_BYTES + in_host > first:
            self._move(self._host_transport.take, buffers.host[first : _HEADER_BYTES + in_host])
        on_host, on_device = buffers.host[_HEADER_BYTES : _HEADER_BYTES + in_host], buffers.device[:in_device]
        if in_device:
            assert self._device_transport is not None
            self._move(self._device_transport.take, on_device)
        if in_host:
            meta = on_host[:meta_bytes]
        else:
            with PULSE.on_device():
                meta = on_device[:meta_bytes].cpu()
        bulk = on_device[in_device - bulk_bytes :] if in_device else on_host[meta_bytes:]
        if kind == Kind.PROBE:
            return Received(Kind(kind), step, None)
        return Received(Kind(kind), step, wire.unpack(Kind(kind), meta, bulk))

    def _send(self, packed: Packed, step: int) -> None:
        self._step = step
        meta_bytes, bulk_bytes = packed.meta.numel(), packed.bulk.numel()
        in_host, in_device = self._split(meta_bytes, bulk_bytes)
        size, buffers = _HEADER_BYTES + in_host, self._sent
        buffers.reserve(size, 0)
        header = torch.tensor([packed.kind, step, meta_bytes, bulk_bytes], dtype=torch.int64)
        buffers.host[:_HEADER_BYTES] = header.view(torch.uint8)
        body = buffers.host[_HEADER_BYTES:size]
        if in_host:
            body[:meta_bytes] = packed.meta
        if in_host > meta_bytes:
            with PULSE.on_device():  # where the features are
                body[meta_bytes:] = packed.bulk
        # One write of a stream wakes the peer once.
        first = size if self._first_bytes is None else self._first_bytes
        self._move(self._host_transport.put, buffers.host[:first])
        if size > first:
            self._move(self._host_transport.put, buffers.host[first:size])
        if in_device:
            assert self._device_transport is not None
            on_device = packed.bulk
            if in_device > bulk_bytes:
                buffers.reserve(0, in_device)
                on_device = buffers.device[:in_device]
                # Copies to a device need not complete here, see `workers.transfer`; copies from a device must.
                on_device[:meta_bytes].copy_(packed.meta, non_blocking=True)
                on_device[meta_bytes:].copy_(packed.bulk, non_blocking=True)
            self._move(self._device_transport.put, on_device)

    def _split(self, meta_bytes: int, bulk_bytes: int) -> tuple[int, int]:
        """Return how many bytes of a body travel through host memory, and how many between devices."""
        match self._device_part:
            case DevicePart.NONE:
                return meta_bytes + bulk_bytes, 0
            case DevicePart.LARGE:
                return (meta_bytes, bulk_bytes) if bulk_bytes >= _LARGE else (meta_bytes + bulk_bytes, 0)
            case DevicePart.BULK:
                return meta_bytes, bulk_bytes
            case DevicePart.BODY:
                return 0, meta_bytes + bulk_bytes

    def _move(self, operation: Callable[[Tensor], None], tensor: Tensor) -> None:
        try:
            with PULSE.waiting():
                operation(tensor)
        except (RuntimeError, OSError) as error:  # gloo and NCCL raise the former for a lost peer and for a timeout
            if self._device_transport is not None:
                self._device_transport.abort()
            when = f"at step {self._step}" if self._step >= 0 else "before the first step"
            raise PeerLost(f"{self._me} lost {self._peer} {when}: {error}") from error


def link_through_host(host: HostLink, *, me: str, peer: str, shared: torch.device | None = None) -> Channel:
    """Open a channel in both directions through host memory; the protocol defines whose turn it is.

    shared: the device of both ends, within which features of prompts travel; None = there is none.
    """
    through_host = Transport(host.put, host.take, wait=host.has_bytes)
    if shared is None:
        return Channel(me=me, peer=peer, host=through_host, first_bytes=None)
    lent = LentMemory(host, shared)
    return Channel(
        me=me, peer=peer, host=through_host, first_bytes=None,
        device_part=DevicePart.LARGE, device=Transport(lent.put, lent.take), where=shared,
    )  # fmt: skip


class ChannelOffer:
    """A link offered to a peer, as a channel once the peer has connected. shared: see `link_through_host`."""

    def __init__(self, offer: LinkOffer, *, me: str, peer: str, shared: torch.device | None = None) -> None:
        self.address = offer.address
        self._offer, self._open = offer, partial(link_through_host, me=me, peer=peer, shared=shared)

    def accepted(self) -> Channel | None:
        """Return the channel if the peer has connected; None if it has not. Never waits. Call it until it does."""
        link = self._offer.accepted()
        return None if link is None else self._open(link)

    def close(self) -> None:
        """Withdraw the offer."""
        self._offer.close()


def link_between_devices(
    host: HostLink,
    group: dist.ProcessGroup,
    peer_rank: int,
    *,
    me: str,
    peer: str,
    device_part: DevicePart,
    where: torch.device,
    may_lose: bool = False,
) -> Channel:
    """Open a channel in both directions whose `device_part` travels from device to device over NCCL.

    may_lose: this rank may lose the peer and go on, so it waits on the host; on the device it would wait forever.
    """

    def take(tensor: Tensor) -> None:
        work = dist.irecv(tensor, src=peer_rank, group=group)
        assert work is not None
        while may_lose and not work.is_completed():
            host.check()
        work.wait()

    over_nccl = Transport(
        put=lambda tensor: dist.send(tensor, dst=peer_rank, group=group),
        take=take,
        abort=partial(abort_nccl, group),
    )
    through_host = Transport(host.put, host.take, wait=host.has_bytes)
    return Channel(
        me=me, peer=peer, host=through_host, first_bytes=None, device_part=device_part, device=over_nccl, where=where
    )


def faster_link(links: Mapping[DevicePart, Channel], host: HostLink, *, leads: bool) -> DevicePart:
    """Time a step's two messages on each channel, and return the faster one's device part on both ends.

    leads: True on verifier 0, whose clock decides. Call it on both ends.
    """
    seconds = {}
    for part, channel in links.items():
        rounds = []
        for _ in range(_NUM_PROBES):
            began = time.perf_counter()
            if leads:
                channel.probe(*_REQUEST_BYTES)
            channel.receive()
            if not leads:
                channel.probe(*_REPLY_BYTES)
            rounds.append(time.perf_counter() - began)
        seconds[part] = statistics.median(rounds)
    parts = list(links)
    choice = torch.tensor([parts.index(min(parts, key=seconds.__getitem__))], dtype=torch.uint8)
    (host.put if leads else host.take)(choice)
    chosen = parts[int(choice)]
    if leads:
        times = ", ".join(f"{part.value} {1e6 * value:.0f} us" for part, value in seconds.items())
        logger.info("from device to device: %s of a message (round trips: %s)", chosen.value, times)
    return chosen


def fan_out(group: dist.ProcessGroup, source_rank: int, *, me: str, peer: str, device: torch.device) -> Channel:
    """Open a broadcast channel from one rank to all others of the group."""

    def broadcast(tensor: Tensor) -> None:
        dist.broadcast(tensor, src=source_rank, group=group)

    transport = Transport(put=broadcast, take=broadcast)
    if device.type == "cuda":
        return Channel(
            me=me, peer=peer, host=transport, first_bytes=_HEADER_BYTES,
            device_part=DevicePart.BODY, device=transport, where=device,
        )  # fmt: skip
    return Channel(me=me, peer=peer, host=transport, first_bytes=_HEADER_BYTES + _BROADCAST_BYTES)


def abort_nccl(group: dist.ProcessGroup) -> None:
    """Free the device of what waits for a group's peer. The group is of no use afterwards."""
    if "nccl" in dist.get_backend_config(group):
        group._get_backend(torch.device("cuda")).abort()
