"""Channels between ranks: drafter 0 <-> verifier 0 (`link`), and a side's first rank -> its peers (`fan_out`).

A frame starts on the CPU, over gloo: the header [kind, step, meta bytes, bulk bytes] and, on CPU devices, the first
bytes of the body, so that most messages take one send. On CUDA the header announces the body, which goes over NCCL from
one device buffer that holds meta and bulk. A channel may be on the CPU although the model is not; features are then
copied to the host. Nothing is pickled. Buffers are reused and never shrink.

If a peer dies, or is silent for longer than this process's timeout for the group, the channel raises PeerLost, which
names the peer (see "Lost ranks" in `workers/README.md`). An idle sender sends heartbeats, so silence means a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from workers.comm import wire
from workers.comm.wire import EMPTY, Kind, Message, Packed

_HEADER_BYTES = 32  # 4 int64
_INLINE_BYTES = 8192


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


class Received(NamedTuple):
    """A received frame."""

    kind: Kind
    step: int
    message: Message | None  # None for STOP and HEARTBEAT


class Channel:
    """Sends and receives messages; see `link` and `fan_out` for the ranks that may do so.

    `put` sends one tensor, and `take` receives one. A received message's bulk tensor is a view of this channel's buffer
    and is valid until the next `receive`.
    """

    def __init__(
        self, *, me: str, peer: str, device: torch.device, put: Callable[[Tensor], None], take: Callable[[Tensor], None]
    ) -> None:
        self._me, self._peer, self._device = me, peer, device
        self._put, self._take = put, take
        self._on_cuda = device.type == "cuda"
        self._frame_bytes = _HEADER_BYTES + (0 if self._on_cuda else _INLINE_BYTES)
        self._step = -1  # of the last frame sent or received, for errors
        self._host = torch.zeros(self._frame_bytes, dtype=torch.uint8)
        self._body = torch.zeros(0, dtype=torch.uint8, device=device)  # CUDA only

    def send(self, message: Message, step: int) -> None:
        """Send a message. Raises PeerLost."""
        self._send(wire.pack(message), step)

    def heartbeat(self, step: int) -> None:
        """Tell the peer that this rank is alive. Raises PeerLost."""
        self._send(Packed(Kind.HEARTBEAT, EMPTY, EMPTY), step)

    def stop(self, step: int) -> None:
        """Tell the peer to shut down. Raises PeerLost."""
        self._send(Packed(Kind.STOP, EMPTY, EMPTY), step)

    def receive(self) -> Received:
        """Wait for the next frame. Raises PeerLost."""
        self._move(self._take, self._host[: self._frame_bytes])
        kind, step, meta_bytes, bulk_bytes = self._host[:_HEADER_BYTES].view(torch.int64).tolist()
        self._step = step
        size = meta_bytes + bulk_bytes
        if size == 0:
            return Received(Kind(kind), step, None)
        if self._on_cuda:
            body = self._device_body(size)
            self._move(self._take, body)
            meta, bulk = body[:meta_bytes].cpu(), body[meta_bytes:]
        else:
            self._reserve_host(_HEADER_BYTES + size)
            if _HEADER_BYTES + size > self._frame_bytes:
                self._move(self._take, self._host[self._frame_bytes : _HEADER_BYTES + size])
            body = self._host[_HEADER_BYTES : _HEADER_BYTES + size]
            meta, bulk = body[:meta_bytes], body[meta_bytes:]
        return Received(Kind(kind), step, wire.unpack(Kind(kind), meta, bulk))

    def _send(self, packed: Packed, step: int) -> None:
        self._step = step
        meta_bytes, bulk_bytes = packed.meta.numel(), packed.bulk.numel()
        size = meta_bytes + bulk_bytes
        header = torch.tensor([packed.kind, step, meta_bytes, bulk_bytes], dtype=torch.int64)
        self._reserve_host(_HEADER_BYTES if self._on_cuda else _HEADER_BYTES + size)
        self._host[:_HEADER_BYTES] = header.view(torch.uint8)
        body = self._device_body(size) if self._on_cuda else self._host[_HEADER_BYTES : _HEADER_BYTES + size]
        # Copies to a device need not complete here, see `workers.transfer`; copies from a device must.
        body[:meta_bytes].copy_(packed.meta, non_blocking=self._on_cuda)
        body[meta_bytes:].copy_(packed.bulk, non_blocking=self._on_cuda)
        self._move(self._put, self._host[: self._frame_bytes])
        if self._on_cuda and size:
            self._move(self._put, body)
        elif not self._on_cuda and _HEADER_BYTES + size > self._frame_bytes:
            self._move(self._put, self._host[self._frame_bytes : _HEADER_BYTES + size])

    def _move(self, operation: Callable[[Tensor], None], tensor: Tensor) -> None:
        try:
            operation(tensor)
        except RuntimeError as error:  # gloo and NCCL raise it for a lost peer and for a timeout
            when = f"at step {self._step}" if self._step >= 0 else "before the first step"
            raise PeerLost(f"{self._me} lost {self._peer} {when}: {error}") from error

    def _reserve_host(self, size: int) -> None:
        if self._host.numel() < size:
            grown = torch.zeros(2 * size, dtype=torch.uint8)
            grown[: self._host.numel()] = self._host
            self._host = grown

    def _device_body(self, size: int) -> Tensor:
        if self._body.numel() < size:
            self._body = torch.zeros(2 * size, dtype=torch.uint8, device=self._device)
        return self._body[:size]


def link(group: dist.ProcessGroup, peer_rank: int, *, me: str, peer: str, device: torch.device) -> Channel:
    """Open a point-to-point channel in both directions; the protocol defines whose turn it is.

    gloo's send and recv sleep while they wait (a rank that only echoes uses 5 % of its core). On two CPU cores a round
    trip takes 0.2 ms back to back, and 0.35 to 0.5 ms if both sides slept for a few ms before it (2026-11).
    """
    return Channel(
        me=me,
        peer=peer,
        device=device,
        put=lambda tensor: dist.send(tensor, dst=peer_rank, group=group),
        take=lambda tensor: _ignore(dist.recv(tensor, src=peer_rank, group=group)),
    )


def fan_out(group: dist.ProcessGroup, source_rank: int, *, me: str, peer: str, device: torch.device) -> Channel:
    """Open a broadcast channel from one rank to all others of the group."""

    def broadcast(tensor: Tensor) -> None:
        dist.broadcast(tensor, src=source_rank, group=group)

    return Channel(me=me, peer=peer, device=device, put=broadcast, take=broadcast)


def _ignore(_: object) -> None:
    return None
