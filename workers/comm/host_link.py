"""A duplex byte stream between verifier 0 and drafter 0: a Unix socket on one node, TCP between nodes.

A receiver polls for a bounded time before it sleeps, because waking a process costs more than a short message. A peer
that dies closes its socket, so the other side notices at once.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
import sys
import time
from contextlib import ExitStack
from typing import Protocol

from torch import Tensor

SPIN_S = 200e-6
"""How long a receiver polls before it sleeps. A reply that takes longer costs a wake-up, some 50 us."""
_TOKEN_BYTES = 32
_STORE_KEY = "host_link"


class Store(Protocol):
    """What the two ranks need of `torch.distributed.Store`. `get` waits until the key is set."""

    def set(self, key: str, value: str, /) -> None: ...  # noqa: D102

    def get(self, key: str, /) -> bytes: ...  # noqa: D102


class HostLink:
    """One end of the stream. `put` and `take` move the bytes of a CPU tensor.

    timeout_s: how long an operation may wait. Raises TimeoutError after that, and ConnectionError if the peer is gone.
    """

    def __init__(self, connection: socket.socket, timeout_s: float, spin_s: float = SPIN_S) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._timeout_s, self._spin_s = connection, timeout_s, spin_s

    def put(self, tensor: Tensor) -> None:
        """Send all bytes of a contiguous uint8 tensor."""
        rest = tensor.numpy().data
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)

    def take(self, tensor: Tensor) -> None:
        """Fill a contiguous uint8 tensor."""
        rest = tensor.numpy().data
        spin_until = time.perf_counter() + self._spin_s
        while rest:
            try:
                received = self._socket.recv_into(rest)
            except BlockingIOError:
                if time.perf_counter() >= spin_until:
                    self._wait(select.POLLIN)
                continue
            if received == 0:
                raise ConnectionResetError("it closed the link")
            rest = rest[received:]

    def has_bytes(self) -> bool:
        """Return whether something has arrived, or the peer is gone."""
        return bool(self._poll(select.POLLIN, 0.0))

    def close(self) -> None:
        """Close this end; the peer's next operation fails."""
        self._socket.close()

    def _wait(self, event: int) -> None:
        if not self._poll(event, self._timeout_s):
            raise TimeoutError(f"it was silent for {self._timeout_s:g} s")

    def _poll(self, event: int, timeout_s: float) -> list[tuple[int, int]]:
        poller = select.poll()
        poller.register(self._socket, event)
        return poller.poll(1e3 * timeout_s)


def listen(store: Store, host: str, timeout_s: float, connect_timeout_s: float) -> HostLink:
    """Publish this end's addresses in the store and wait for the other one. Verifier 0 calls it.

    host: address to listen on for a drafter on another node.
    """
    token = secrets.token_hex(_TOKEN_BYTES)
    with ExitStack() as stack:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listeners = [stack.enter_context(socket.create_server((host, 0), family=family))]
        name = ""
        if sys.platform == "linux":  # an abstract address: no file to leave behind
            name = f"secateur-{secrets.token_hex(8)}"
            listeners.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
            listeners[-1].bind(f"\0{name}")
            listeners[-1].listen()
        address = {"host": host, "port": listeners[0].getsockname()[1], "name": name, "token": token}
        store.set(_STORE_KEY, json.dumps(address))
        return HostLink(_accept(listeners, token.encode(), connect_timeout_s), timeout_s)


def connect(store: Store, timeout_s: float) -> HostLink:
    """Connect to the end that the store names, on the same node if it is there. Drafter 0 calls it."""
    address = json.loads(store.get(_STORE_KEY))
    connection = _connected(address)
    connection.sendall(address["token"].encode())
    return HostLink(connection, timeout_s)


def _connected(address: dict) -> socket.socket:
    if address["name"]:
        here = socket.socket(socket.AF_UNIX)
        try:
            here.connect(f"\0{address['name']}")
        except OSError:  # another node, or another network namespace
            here.close()
        else:
            return here
    return socket.create_connection((address["host"], address["port"]))


def _accept(listeners: list[socket.socket], token: bytes, timeout_s: float) -> socket.socket:
    """Return the first connection that opens with the token; whoever else connects is turned away."""
    deadline = time.monotonic() + timeout_s
    poller = select.poll()
    for listener in listeners:
        poller.register(listener, select.POLLIN)
    by_descriptor = {listener.fileno(): listener for listener in listeners}
    while ready := poller.poll(1e3 * max(0.0, deadline - time.monotonic())):
        for descriptor, _ in ready:
            connection, _ = by_descriptor[descriptor].accept()
            connection.settimeout(5.0)
            try:
                if hmac.compare_digest(connection.recv(len(token), socket.MSG_WAITALL), token):
                    return connection
            except OSError:
                pass
            connection.close()
    raise TimeoutError(f"the drafter did not connect within {timeout_s:g} s")
