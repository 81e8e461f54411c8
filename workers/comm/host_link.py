"""A duplex byte stream between verifier 0 and drafter 0: a Unix socket on one node, TCP between nodes.

Verifier 0 offers the link and drafter 0 connects to it, at start-up and after a drafter was lost. A receiver polls for
a bounded time before it sleeps, because waking a process costs more than a short message. A peer that dies closes its
socket, so the other side notices at once.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
import sys
import threading
import time
from contextlib import ExitStack
from datetime import timedelta

from torch import Tensor

SPIN_S = 200e-6
"""How long a receiver polls before it sleeps. A reply that takes longer costs a wake-up, some 50 us."""
SPIN_BESIDE_GPU_S = 30e-3
"""The same where models run on GPUs: a step is short there, and the core would be idle."""
_TOKEN_BYTES = 32


class HostLink:
    """One end of the stream. `put` and `take` move the bytes of a CPU tensor.

    timeout_s: how long an operation may wait. Raises TimeoutError after that, and ConnectionError if the peer is gone.
    """

    def __init__(self, connection: socket.socket, timeout_s: float, spin_s: float = SPIN_S) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._timeout_s, self._spin_s = connection, timeout_s, spin_s

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long an operation may wait from now on."""
        self._timeout_s = timeout.total_seconds()

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

    def check(self) -> None:
        """Raise ConnectionResetError if the peer is gone."""
        if self._poll(select.POLLRDHUP, 0.0):
            raise ConnectionResetError("it closed the link")

    def has_bytes(self, wait_s: float) -> bool:
        """Return whether there is something to take, or the peer has gone, waiting for so many seconds at most."""
        return bool(self._poll(select.POLLIN, wait_s))

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


class LinkOffer:
    """A link to which one peer may connect. A thread waits for it, so the caller never does.

    host: address to listen on for a peer on another node. timeout_s: of the link's operations. connect_timeout_s: how
    long to wait for the peer; None = forever. spin_s: see `SPIN_S`. `address` tells the peer where to connect, and
    holds a secret.
    """

    def __init__(
        self, host: str, timeout_s: float, connect_timeout_s: float | None = None, *, spin_s: float = SPIN_S
    ) -> None:
        self._spin_s = spin_s
        token = secrets.token_hex(_TOKEN_BYTES)
        self._timeout_s, self._connect_timeout_s = timeout_s, connect_timeout_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._stack, name = ExitStack(), ""
        self._listeners = [self._stack.enter_context(socket.create_server((host, 0), family=family))]
        if sys.platform == "linux":  # an abstract address: no file to leave behind
            name = f"secateur-{secrets.token_hex(8)}"
            self._listeners.append(self._stack.enter_context(socket.socket(socket.AF_UNIX)))
            self._listeners[-1].bind(f"\0{name}")
            self._listeners[-1].listen()
        self._waker, woken = socket.socketpair()
        self._stack.enter_context(self._waker)
        self._woken = self._stack.enter_context(woken)
        place = {"host": host, "port": self._listeners[0].getsockname()[1], "name": name, "token": token}
        self.address = json.dumps(place)
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._accept, args=(token.encode(),), name="link-offer", daemon=True)
        self._thread.start()

    def accepted(self) -> HostLink | None:
        """Return the link if the peer has connected; None if it has not. Never waits."""
        return None if self._connection is None else HostLink(self._connection, self._timeout_s, self._spin_s)

    def wait(self) -> HostLink:
        """Wait for the peer. Raises TimeoutError."""
        self._thread.join()
        if (link := self.accepted()) is None:
            raise TimeoutError(f"the peer did not connect within {self._connect_timeout_s:g} s")
        return link

    def close(self) -> None:
        """Stop listening, if no peer has connected."""
        self._waker.close()
        self._thread.join()

    def _accept(self, token: bytes) -> None:
        """Take the first connection that opens with the token, and turn away whoever else connects."""
        deadline = None if self._connect_timeout_s is None else time.monotonic() + self._connect_timeout_s
        poller, by_descriptor = select.poll(), {listener.fileno(): listener for listener in self._listeners}
        for descriptor in (*by_descriptor, self._woken.fileno()):
            poller.register(descriptor, select.POLLIN)
        with self._stack:
            while ready := poller.poll(None if deadline is None else 1e3 * max(0.0, deadline - time.monotonic())):
                for descriptor, _ in ready:
                    if descriptor not in by_descriptor:
                        return
                    connection, _ = by_descriptor[descriptor].accept()
                    connection.settimeout(5.0)
                    try:
                        if hmac.compare_digest(connection.recv(len(token), socket.MSG_WAITALL), token):
                            self._connection = connection
                            return
                    except OSError:
                        pass
                    connection.close()


def connect(address: str, timeout_s: float, *, spin_s: float = SPIN_S) -> HostLink:
    """Connect to the `address` of a LinkOffer, on the same node if it is there."""
    place = json.loads(address)
    connection = _connected(place)
    connection.sendall(place["token"].encode())
    return HostLink(connection, timeout_s, spin_s)


def _connected(place: dict) -> socket.socket:
    if place["name"]:
        here = socket.socket(socket.AF_UNIX)
        try:
            here.connect(f"\0{place['name']}")
        except OSError:  # another node, or another network namespace
            here.close()
        else:
            return here
    return socket.create_connection((place["host"], place["port"]))
