"""The host link: bytes arrive in order over Unix sockets and TCP, and a lost or silent peer is an error."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from workers.comm.host_link import HostLink, LinkOffer, connect

SIZES = [1, 32, 4096, 200_001, 3_000_000, 7]
"""Around and far above what a socket buffers."""


Ends = tuple[HostLink, HostLink]


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connected(opened: ExitStack, change: Callable[[dict], dict]) -> Ends:
    """Connect to an offer whose address `change` changes on the way."""
    offer = LinkOffer("127.0.0.1", 5.0, 5.0)
    there = connect(json.dumps(change(json.loads(offer.address))), 5.0)
    return closed_later(opened, (there, offer.wait()))


def pair(opened: ExitStack, timeout_s: float = 5.0, spin_s: float = 0.0) -> Ends:
    a, b = socket.socketpair()
    return closed_later(opened, (HostLink(a, timeout_s, spin_s), HostLink(b, timeout_s, spin_s)))


def closed_later(opened: ExitStack, ends: Ends) -> Ends:
    for end in ends:
        opened.callback(end.close)
    return ends


def without_name(address: dict) -> dict:
    return address | {"name": ""}


def of_another_node(address: dict) -> dict:
    return address | {"name": "nobody-listens-here"}


@pytest.mark.parametrize("change", [lambda address: address, without_name, of_another_node])
def test_bytes_arrive_in_order_in_both_directions(opened: ExitStack, change: Callable[[dict], dict]) -> None:
    for source, target in (ends := connected(opened, change), ends[::-1]):
        sent = [torch.randint(256, (size,), dtype=torch.uint8) for size in SIZES]
        with ThreadPoolExecutor() as pool:
            sending = pool.submit(lambda: [source.put(tensor) for tensor in sent])  # noqa: B023
            got = torch.zeros(sum(SIZES), dtype=torch.uint8)
            for part in got.split(123_457):
                target.take(part)
            sending.result(10)
        assert torch.equal(got, torch.cat(sent))


@pytest.mark.parametrize(("change", "family"), [(lambda a: a, socket.AF_UNIX), (of_another_node, socket.AF_INET)])
def test_a_node_of_its_own_needs_tcp(
    opened: ExitStack, change: Callable[[dict], dict], family: socket.AddressFamily
) -> None:
    assert {end._socket.family for end in connected(opened, change)} == {family}


def test_nobody_without_the_token_becomes_the_peer(opened: ExitStack) -> None:
    """A stranger sends something else, and the listeners are closed as soon as the peer is there."""
    offer = LinkOffer("127.0.0.1", 5.0, 5.0)
    address = json.loads(offer.address)
    with socket.create_connection((address["host"], address["port"])) as stranger:
        stranger.sendall(b"x" * len(address["token"]))
        assert stranger.recv(1) == b""
    there = connect(offer.address, 5.0)
    end, other = closed_later(opened, (there, offer.wait()))
    other.put(torch.tensor([7], dtype=torch.uint8))
    got = torch.zeros(1, dtype=torch.uint8)
    end.take(got)
    assert got.item() == 7
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address["host"], address["port"]))


def test_a_drafter_that_never_connects_is_an_error() -> None:
    with pytest.raises(TimeoutError, match=r"did not connect within 0\.1 s"):
        LinkOffer("127.0.0.1", 5.0, 0.1).wait()


def test_an_offer_is_open_until_a_peer_connects_or_it_is_withdrawn(opened: ExitStack) -> None:
    offer = LinkOffer("127.0.0.1", 5.0)
    assert offer.accepted() is None
    there = connect(offer.address, 5.0)
    here, there = closed_later(opened, (offer.wait(), there))
    there.put(torch.tensor([7], dtype=torch.uint8))
    got = torch.zeros(1, dtype=torch.uint8)
    here.take(got)
    assert got.item() == 7
    withdrawn = LinkOffer("127.0.0.1", 5.0)
    withdrawn.close()
    assert withdrawn.accepted() is None
    for address in (offer.address, withdrawn.address):
        with pytest.raises(ConnectionRefusedError):
            connect(address, 5.0)


@pytest.mark.parametrize("spin_s", [0.0, 0.05])
def test_a_silent_peer_is_an_error_after_the_timeout(opened: ExitStack, spin_s: float) -> None:
    here, _there = pair(opened, 0.2, spin_s)
    with pytest.raises(TimeoutError, match=r"silent for 0\.2 s"):
        here.take(torch.zeros(1, dtype=torch.uint8))


def test_a_peer_that_reads_nothing_is_an_error_too(opened: ExitStack) -> None:
    here, _there = pair(opened, 0.2)
    with pytest.raises(TimeoutError, match=r"silent for 0\.2 s"):
        here.put(torch.zeros(10_000_000, dtype=torch.uint8))


def test_a_closed_peer_is_not_taken_for_a_silent_one(opened: ExitStack) -> None:
    here, there = pair(opened, 60.0)
    threading.Timer(0.1, there.close).start()
    with pytest.raises(ConnectionError, match="closed the link"):
        here.take(torch.zeros(1, dtype=torch.uint8))
    with pytest.raises(ConnectionError):
        here.put(torch.zeros(1, dtype=torch.uint8))


def test_a_late_answer_arrives_whether_the_receiver_spins_or_sleeps(opened: ExitStack) -> None:
    for delay in (0.0, 0.02, 0.3):
        here, there = pair(opened, 5.0, spin_s=0.05)
        threading.Timer(delay, there.put, [torch.arange(5, dtype=torch.uint8)]).start()
        got = torch.zeros(5, dtype=torch.uint8)
        here.take(got)
        assert got.tolist() == [0, 1, 2, 3, 4]
