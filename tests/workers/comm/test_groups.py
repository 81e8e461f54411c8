"""The rendezvous store listens on one address, and only until all ranks have joined."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from workers.comm.groups import open_store

PROC_NET = Path("/proc/net/tcp")
LISTENING = "0A"


def listening_on(port: int) -> set[str]:
    """Return the addresses that listen on the port, in the kernel's hexadecimal form."""
    tables = [PROC_NET, PROC_NET.with_name("tcp6")]
    lines = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    places = [fields[1].split(":") for fields in lines if fields[3] == LISTENING]
    return {address for address, number in places if int(number, 16) == port}


@pytest.mark.skipif(not PROC_NET.exists(), reason="the kernel does not tell who listens")
def test_the_store_listens_on_its_host_s_address_alone() -> None:
    store, address = open_store("127.0.0.1")
    assert listening_on(store.port) == {"0100007F"}
    host, _, port = address.rpartition(":")
    assert (host, int(port)) == ("127.0.0.1", store.port)


def test_a_store_that_stopped_listening_keeps_its_connections_and_refuses_new_ones() -> None:
    """The store has no authentication: any client may set and delete what ranks read."""
    store, address = open_store()
    host, _, port = address.rpartition(":")
    peer = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
    peer.set("rank 1", "here")
    store.stop_listening()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)
    assert not PROC_NET.exists() or listening_on(int(port)) == set()
    peer.set("rank 1", "still here")
    assert store.get("rank 1") == peer.get("rank 1") == b"still here"
    assert store.add("count", 1) + peer.add("count", 1) == 3


def test_ranks_meet_in_the_store() -> None:
    store, address = open_store()
    host, _, port = address.rpartition(":")
    peer = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
    peer.set("rank 1", "here")
    assert store.get("rank 1") == b"here"
