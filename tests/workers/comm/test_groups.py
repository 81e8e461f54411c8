"""The rendezvous store listens on one address, and only until all ranks have joined."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.fakes import in_processes
from workers.comm import groups
from workers.comm.groups import World, open_store
from workers.comm.host_link import LinkOffer
from workers.comm.host_link import connect as connect_host
from workers.config import DraftConfig, EngineConfig
from workers.models.layers import TensorParallel

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


def connect(world: World, exchange: Callable[..., bool], breaks: Callable[..., Any] | None, told: Path) -> str:
    """Connect the two ranks of a world by an exchange over gloo, of which rank 1 breaks an operation."""
    group, device = dist.new_group([0, 1]), torch.device("cpu")
    groups.CONNECT_S = 2.0
    sys.stderr = told.open("a")
    if breaks is not None and world.rank == 1:
        dist.send = dist.all_reduce = breaks
    ranks = (world.rank, 1 - world.rank) if exchange is groups._exchange else ()
    try:
        groups._connect(lambda: exchange(group, *ranks, device), group, world.role)
    except groups.NotConnected as error:
        return str(error)
    return "connected"


def flip(
    tensor: torch.Tensor, *args: Any, send: Any = dist.send, all_reduce: Any = dist.all_reduce, **kwargs: Any
) -> None:
    """Do what was asked for with one wrong bit, as broken hardware does."""
    if len(tensor) > 1:
        tensor[-1] += 1
    (send if "dst" in kwargs else all_reduce)(tensor, *args, **kwargs)


def hang(tensor: torch.Tensor, *args: Any, all_reduce: Any = dist.all_reduce, **kwargs: Any) -> None:
    if len(tensor) == 1:
        all_reduce(tensor, *args, **kwargs)
    else:
        time.sleep(30)


@pytest.mark.parametrize("exchange", [groups._exchange, groups._sum])
def test_a_connection_is_checked_by_what_arrives_and_does_not_wait_forever(
    exchange: Callable[..., bool], tmp_path: Path
) -> None:
    """NCCL itself would wait for the whole start-up, and hand on what broken links between GPUs deliver."""
    engine = EngineConfig(model_path="", tensor_parallel_size=2)

    def said(breaks: Callable[..., Any] | None) -> str:
        told = tmp_path / "stderr"
        found = dict(in_processes(partial(connect, exchange=exchange, breaks=breaks, told=told), engine))
        return found.get(0) or told.read_text()

    assert said(None) == "connected"
    assert "verifier 0: the first exchange over NCCL did not deliver what was sent; set NCCL_DEBUG=INFO" in said(flip)
    told = said(hang)
    assert "verifier 0: the first exchange over NCCL took more than 2 s" in told
    assert "NCCL_P2P_DISABLE=1" in told and "NCCL_SOCKET_IFNAME" in told and "draft_link" in told


def link(world: World, draft_link: Any, breaks: Callable[..., Any] | None) -> str:
    """Open the link of a dedicated drafter over gloo, of which an operation is broken, and use it."""
    group, device, store = dist.new_group([0, 1]), torch.device("cpu"), dist.distributed_c10d._get_default_store()
    if world.rank == 0:
        offer = LinkOffer("127.0.0.1", 20.0, 20.0)
        store.set("a link", offer.address)
    host = offer.wait() if world.rank == 0 else connect_host(store.get("a link").decode(), 20.0)
    groups.CONNECT_S, groups._ABORT_S = 30.0, 1.0
    aborted = threading.Event()
    groups.abort_nccl = lambda group: aborted.set()
    if breaks is flip and world.rank == 1:
        dist.send = flip
    elif breaks in (refuse, hang_until_aborted):
        dist.send = dist.recv = partial(breaks, aborted=aborted)
    config = replace(world.config, draft=DraftConfig(method="eagle3", model_path="", link=draft_link, fallback=False))
    try:
        channel = groups._device_link(config, world.rank, 1 - world.rank, host, group, device)
    except groups.NotConnected as error:
        return str(error)
    if world.rank == 0:
        channel.heartbeat(5)
    else:
        assert channel.receive().step == 5
    return "through the host" if channel._device_transport is None else f"over NCCL, aborted {aborted.is_set()}"


def refuse(*args: Any, aborted: threading.Event, **kwargs: Any) -> None:
    raise RuntimeError("ncclInvalidUsage: Duplicate GPU detected")


def hang_until_aborted(*args: Any, aborted: threading.Event, **kwargs: Any) -> None:
    assert aborted.wait(20)
    raise RuntimeError("NCCL communicator was aborted")


@pytest.mark.parametrize("breaks", [flip, refuse, hang_until_aborted])
def test_a_link_that_does_not_connect_takes_the_host_unless_nccl_was_asked_for(breaks: Callable[..., Any]) -> None:
    engine = EngineConfig(model_path="", tensor_parallel_size=2)

    def said(draft_link: str, breaks: Callable[..., Any] | None) -> dict[int, str]:
        return dict(in_processes(partial(link, draft_link=draft_link, breaks=breaks), engine))

    assert said("auto", breaks) == dict.fromkeys([0, 1], "through the host")
    if breaks is refuse:
        assert said("auto", None) == dict.fromkeys([0, 1], "over NCCL, aborted False")
        assert "Duplicate GPU detected; set NCCL_DEBUG=INFO" in said("nccl", breaks)[1]


@pytest.mark.parametrize(
    ("placement", "second", "said"),
    [
        ("dedicated", "GPU-b", "started"),
        ("dedicated", "GPU-a", "have the same GPU, GPU-a: give each rank one of its own"),
        ("colocated", "GPU-a", "started"),
    ],
)
def test_two_ranks_on_one_device_are_refused_unless_they_share_it(
    placement: Any, second: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks would take the first GPU where an environment hides the assignment."""
    draft = DraftConfig(method="eagle3", model_path="", placement=placement)
    config, names = EngineConfig(model_path="", device="cuda", draft=draft), ["GPU-a", second]
    monkeypatch.setattr(dist, "all_gather_object", lambda every, name: every.__setitem__(slice(None), names))
    for rank, name in enumerate(names):
        with nullcontext() if said == "started" else pytest.raises(ValueError, match=said):
            groups._check_devices(config, rank, name)


@pytest.mark.parametrize(
    ("placement", "link", "tp", "is_shared"),
    [
        ("colocated", "auto", 1, True),
        ("colocated", "auto", 2, True),
        ("colocated", "host", 1, False),
        ("dedicated", "auto", 1, False),
    ],
)
def test_features_stay_on_a_gpu_that_both_ends_share(placement: Any, link: Any, tp: int, is_shared: bool) -> None:
    draft = DraftConfig(method="eagle3", model_path="", placement=placement, link=link)
    gpu = torch.device("cuda", 0)
    config = EngineConfig(model_path="", device="cuda", tensor_parallel_size=tp, draft=draft)
    assert groups._shared(config, gpu) == (gpu if is_shared else None)
    assert groups._shared(replace(config, device="cpu"), torch.device("cpu")) is None


def test_a_device_is_named_by_its_slice_and_the_host_that_nccl_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-a"))
    for variable, value, name in [
        ("CUDA_VISIBLE_DEVICES", "1", "GPU-a"),
        ("CUDA_VISIBLE_DEVICES", "MIG-b", "GPU-a MIG-b"),
        ("NCCL_HOSTID", "c", "GPU-a MIG-b c"),
    ]:
        monkeypatch.setenv(variable, value)
        assert groups._device_name(torch.device("cuda", 0)) == name


@pytest.mark.parametrize(("device", "threads"), [("cpu", 2), ("cuda", 1)])
def test_ranks_of_gpus_serve_with_one_thread(device: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    tp = TensorParallel(rank=0, size=1)
    world = World(
        config=EngineConfig(model_path=""), rank=0, role="", device=torch.device(device), tp=tp, peers=None, link=None
    )
    world.end_start_up()
    assert torch.get_num_threads() == threads
    torch.set_num_threads(before)


def test_ranks_meet_in_the_store() -> None:
    store, address = open_store()
    host, _, port = address.rpartition(":")
    peer = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
    peer.set("rank 1", "here")
    assert store.get("rank 1") == b"here"
