"""Frames between real processes: messages arrive, and a lost peer soon raises an error that names it."""

from __future__ import annotations

import dataclasses
import os
import socket
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.fakes import in_processes
from tests.support.simulated_cuda import simulated_cuda
from workers.comm import channel, lent_memory
from workers.comm.channel import Channel, DevicePart, PeerLost, faster_link, link_between_devices, link_through_host
from workers.comm.groups import World
from workers.comm.host_link import HostLink, LinkOffer, connect
from workers.comm.wire import Kind
from workers.config import DraftConfig, EngineConfig, TreeRules
from workers.settings import SamplingSettings
from workers.types import AttentionMetadata, DraftReply, DraftRequest, SamplingBatch, TargetStep, TreeBatch

SIZES = [(0, None), (1, 4), (60, 16), (63, 16), (400, 64), (5000, None), (3, 8), (20000, 32)]
"""(input rows, feature width): bodies below, around and far above the 8 KiB that travel with a header."""
NEVER_S = 3600.0
"""Longer than every timeout; a rank that sleeps so long is killed."""


def config(
    tensor_parallel_size: int = 1,
    step_timeout_s: float = 20.0,
    draft_tensor_parallel_size: int = 1,
    startup_timeout_s: float = 60.0,
) -> EngineConfig:
    draft = DraftConfig(method="eagle3", model_path="", tensor_parallel_size=draft_tensor_parallel_size)
    return EngineConfig(
        model_path="",
        tensor_parallel_size=tensor_parallel_size,
        step_timeout_s=step_timeout_s,
        startup_timeout_s=startup_timeout_s,
        draft=draft,
    )


def draft_request(rows: int, width: int | None) -> DraftRequest:
    rng = np.random.default_rng(rows)
    sampling = SamplingBatch.stack([SamplingSettings(seed=2**64 - 1 - rows)])
    one, none = torch.ones(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    return DraftRequest(
        offsets=torch.tensor([0, rows], dtype=torch.int32),
        start_B=one, rule_B=one, auto_B=one, num_nodes_B=one, max_depth_B=one,
        token_M=torch.from_numpy(rng.integers(0, 2**31, size=rows).astype(np.int32)),
        page_table_BP=torch.zeros(1, 3, dtype=torch.int32),
        rules=TreeRules().each(lambda _: torch.zeros(1)),
        constraints_U=none.byte(), sampling=sampling, costs=None,
        features_MH=None if width is None else torch.from_numpy(rng.normal(size=(rows, width)).astype(np.float32)),
    )  # fmt: skip


def draft_reply(seconds: float) -> DraftReply:
    """Return a reply that is longer than most of the requests."""
    ones = torch.ones(64, dtype=torch.int32)
    trees = TreeBatch(
        offsets=torch.tensor([0, 64], dtype=torch.int32), token_N=ones, parent_N=ones, depth_N=ones,
        ancestors_N=ones.long(), kind_N=ones.byte(), weight_N=ones.float(),
    )  # fmt: skip
    none = torch.zeros(1, 0, dtype=torch.int32)
    return DraftReply(trees=trees, probs=None, pruned_GD=none, num_levels=0, num_run=0, seconds=seconds)


def target_step(rows: int) -> TargetStep:
    request = draft_request(rows, None)
    ints, sampling = torch.arange(rows, dtype=torch.int32), SamplingBatch.stack([SamplingSettings()] * rows)
    attention = AttentionMetadata(
        query_offsets=request.offsets.numpy(), page_table_BP=request.page_table_BP.numpy(),
        base_B=request.start_B.numpy(), slot_N=ints.numpy(), visible_N=ints.numpy(),
        ancestors_N=np.full(rows, -(2**63)),
    )  # fmt: skip
    return TargetStep(
        copy_source=ints[:0], copy_target=ints[:0], token_N=request.token_M, position_N=ints,
        sample_row_R=ints, request_R=ints, draw_index_R=ints, constraints_U=ints[:0].byte(),
        attention=attention, sampling=sampling, has_logprobs=True, has_sampled=False, has_draws=True,
    )  # fmt: skip


def assert_same(got: object, expected: object) -> None:
    assert type(got) is type(expected)
    for field in dataclasses.fields(expected):  # type: ignore[arg-type]
        a, b = getattr(got, field.name), getattr(expected, field.name)
        if dataclasses.is_dataclass(b):
            assert_same(a, b)
        else:
            is_same = torch.equal(a, b) if isinstance(b, torch.Tensor) else np.array_equal(a, b)
            assert is_same, field.name


# ---- what each rank does, in its own process


def exchange(world: World) -> str:
    """Verifier 0 sends; drafter 0 replies with the number of rows it received and forwards the bytes to its peer."""
    for step, (rows, width) in enumerate(SIZES):
        if world.rank == 0:
            world.link.send(draft_request(rows, width), step)
            answer = world.link.receive()
            assert (answer.kind, answer.step) == (Kind.DRAFT_REPLY, step)
            assert answer.message.seconds == pytest.approx(rows / 1000)
            world.peers.send(target_step(rows), step)
        elif world.role == "drafter 0":
            asked = world.link.receive()
            assert (asked.kind, asked.step) == (Kind.DRAFT_REQUEST, step)
            world.link.send(draft_reply(rows / 1000), step)
            assert_same(asked.message, draft_request(rows, width))  # the reply did not overwrite it
        else:
            told = world.peers.receive()
            assert (told.kind, told.step) == (Kind.TARGET_STEP, step)
            assert_same(told.message, target_step(rows))
    if world.rank == 0:
        for channel in (world.link, world.peers):
            channel.heartbeat(77)
            channel.stop(78)
    else:
        channel = world.link or world.peers
        assert channel.receive() == (Kind.HEARTBEAT, 77, None)
        assert channel.receive() == (Kind.STOP, 78, None)
    return f"{world.role} saw all"


def exchange_between_devices(world: World) -> str:
    """As `exchange`, with gloo in NCCL's place, by every way that a message can be split."""
    host, me, peer = host_link(world), world.role, world.config.role_of(1 - world.rank)
    links = {
        part: link_between_devices(
            host, dist.group.WORLD, 1 - world.rank, me=me, peer=peer, device_part=part, where=torch.device("cpu")
        )
        for part in (DevicePart.BODY, DevicePart.BULK)
    }
    for link in links.values():
        for step, (rows, width) in enumerate(SIZES):
            if world.rank == 0:
                link.send(draft_request(rows, width), step)
                assert link.receive().message.seconds == pytest.approx(rows / 1000)
            else:
                asked = link.receive().message
                link.send(draft_reply(rows / 1000), step)
                assert_same(asked, draft_request(rows, width))
    return faster_link(links, host, leads=world.rank == 0).value


def host_link(world: World) -> HostLink:
    """Connect the two ranks by a link of their own."""
    store = dist.distributed_c10d._get_default_store()
    if world.rank == 1:
        return connect(store.get("a link").decode(), 20.0)
    offer = LinkOffer("127.0.0.1", 20.0, 20.0)
    store.set("a link", offer.address)
    return offer.wait()


def shared_link(world: World, host: HostLink) -> Channel:
    channel._LARGE = 1  # or few rows would take the host
    me, peer = world.role, world.config.role_of(1 - world.rank)
    return link_through_host(host, me=me, peer=peer, shared=torch.device("cuda", 0))


def exchange_features(link: Channel, rank: int) -> None:
    """Verifier 0 sends features that are on a device; some need more memory than those before them."""
    for step, (rows, width) in enumerate(((3, 8), (3, None), (20000, 32), (63, 16), (150000, 32))):
        request = draft_request(rows, width)
        if rank == 0:
            features = None if width is None else request.features_MH.cuda()
            link.send(dataclasses.replace(request, features_MH=features), step)
            assert link.receive().message.seconds == pytest.approx(rows / 1000)
            continue
        asked = link.receive().message
        if width is not None:
            assert asked.features_MH.is_cuda
            asked = dataclasses.replace(asked, features_MH=asked.features_MH.cpu())
        link.send(draft_reply(rows / 1000), step)
        assert_same(asked, request)


def share_a_device(world: World) -> str:
    with simulated_cuda() as cuda:
        link = shared_link(world, host_link(world))
        exchange_features(link, world.rank)
        from_host = sum(4 * rows * width for rows, width in ((3, 8), (20000, 32), (63, 16), (150000, 32)))
        assert set(cuda.untold) <= {"tests.workers.comm.test_channel.exchange_features"}
        sent = cuda.num_bytes_sent - from_host * (world.rank == 0)
        return f"{sent} bytes from the host"


def refuse_a_device(world: World) -> str:
    """The drafter cannot open the verifier's memory, as in a container of its own."""

    def cannot(*_: object) -> None:
        raise RuntimeError("invalid device context")

    with simulated_cuda() as cuda, pytest.MonkeyPatch.context() as patch:
        link = shared_link(world, host_link(world))
        patch.setattr(lent_memory, "borrow", cannot)
        exchange_features(link, world.rank)
        return f"{cuda.num_bytes_sent} bytes from the host"


def lose_a_drafter_that_borrows(world: World) -> str:
    """Drafter 0 dies when it has been told of features and has not copied them; it has copied others before."""
    with simulated_cuda():
        host = host_link(world)
        link = shared_link(world, host)
        for step in (40, 41):
            if world.rank == 1 and step == 41:
                host.take(torch.empty(32, dtype=torch.uint8))
                os._exit(9)
            request = draft_request(3, 8)
            if world.rank == 1:
                link.receive()
                continue
            try:
                link.send(dataclasses.replace(request, features_MH=request.features_MH.cuda()), step)
            except PeerLost as error:
                return str(error)
        return "nothing"


def test_few_features_take_the_host() -> None:
    """To wait until the receiver has copied them would take longer."""
    left, right = socket.socketpair()
    with simulated_cuda(), left, right:
        link = link_through_host(HostLink(left, 20.0), me="a", peer="b", shared=torch.device("cuda", 0))
    assert [link._split(100, size) for size in (0, 8192, 1 << 24)] == [(100, 0), (8292, 0), (100, 1 << 24)]


def lose_the_drafter(world: World) -> str:
    """Drafter 0 dies in step 41."""
    if world.rank == 1:
        world.link.receive()
        os._exit(9)
    world.link.send(draft_request(3, 8), 41)
    return what_is_said(world)


def come_late(world: World) -> str:
    """Verifier 1 comes three step timeouts late to a collective of the start-up, and never to one of a step."""
    if world.tp.group is None:
        return "the drafter is not concerned"
    for is_step in (False, True):
        if world.rank == 1:
            time.sleep(NEVER_S if is_step else 3)
        try:
            dist.all_reduce(torch.ones(1), group=world.tp.group)
        except RuntimeError:
            return "in a step" if is_step else "in the start-up"
        world.end_start_up()
    return "nothing"


def wait_in_the_start_up(world: World) -> str:
    if world.rank == 1:
        time.sleep(NEVER_S)
        return "awake"
    return what_is_said(world)


def wait_for_a_silent_drafter(world: World) -> str:
    world.end_start_up()
    if world.rank == 1:
        world.link.receive()
        time.sleep(NEVER_S)
        return "awake"
    world.link.send(draft_request(3, 8), 42)
    return what_is_said(world)


def wait_for_a_busy_verifier(world: World) -> str:
    """Verifier 0 works for three step timeouts before it sends a message; drafter 0 forwards it."""
    world.end_start_up()
    if world.rank == 0:
        time.sleep(3)
        world.peers.send(target_step(2), 44)
        world.link.send(draft_request(3, 8), 44)
        return f"answered with {world.link.receive().kind.name}"
    received = (world.link or world.peers).receive()
    if world.role == "drafter 0":
        world.peers.send(received.message, received.step)
        world.link.send(draft_reply(1.0), received.step)
    return f"got {received.kind.name}"


def wait_for_a_silent_verifier(world: World) -> str:
    world.end_start_up()
    if world.rank == 0:
        time.sleep(NEVER_S)
        return "awake"
    return what_is_said(world)


def lose_the_source(world: World) -> str:
    """Verifier 0 dies between two steps: its peer must notice."""
    if world.rank == 0:
        world.peers.send(target_step(2), 43)
        time.sleep(0.2)
        os._exit(9)
    if world.rank == 2:
        return "the drafter is not concerned"
    world.peers.receive()
    try:
        world.peers.receive()
    except PeerLost as error:
        return str(error)
    return "nothing"


def what_is_said(world: World) -> str:
    try:
        world.link.receive()
    except PeerLost as error:
        return str(error)
    return "nothing"


# ---- the tests


def test_messages_of_every_size_arrive_on_the_link_and_at_the_peers():
    said = dict(in_processes(exchange, config(tensor_parallel_size=2)))
    assert said == {0: "verifier 0 saw all", 1: "verifier 1 saw all", 2: "drafter 0 saw all"}


def test_messages_arrive_however_they_are_split_and_both_ends_choose_one_way():
    said = dict(in_processes(exchange_between_devices, config()))
    assert said[0] == said[1] in ("body", "bulk"), said


def test_features_stay_on_a_device_that_both_ends_share():
    said = dict(in_processes(share_a_device, config()))
    assert said == {0: "0 bytes from the host", 1: "0 bytes from the host"}


def test_features_take_the_host_where_the_device_cannot_be_shared():
    said = dict(in_processes(refuse_a_device, config()))
    sizes = 4 * (3 * 8 + 20000 * 32 + 63 * 16 + 150000 * 32)
    assert said == {0: f"{sizes} bytes from the host", 1: f"{sizes} bytes from the host"}


def test_a_drafter_that_dies_before_it_copies_features_is_lost_at_once():
    said = dict(in_processes(lose_a_drafter_that_borrows, config()))
    assert said[0].startswith("verifier 0 lost drafter 0 at step 41:"), said[0]


def test_a_killed_drafter_is_named_with_the_step_at_once():
    said = dict(in_processes(lose_the_drafter, config()))
    assert said[0].startswith("verifier 0 lost drafter 0 at step 41:"), said[0]


class NeverDone:
    """A receive over NCCL whose peer has died."""

    def is_completed(self) -> bool:
        return False


@pytest.mark.parametrize("dies_before_its_body", [True, False])
def test_the_device_is_freed_of_what_waits_for_a_lost_peer(dies_before_its_body, monkeypatch):
    """Its kernel would spin on, and every later forward pass behind it."""
    ours, theirs = socket.socketpair()
    group, aborted = dist.group.WORLD, []
    monkeypatch.setattr(dist, "send", lambda *args, **options: None)
    monkeypatch.setattr(dist, "irecv", lambda *args, **options: NeverDone())
    monkeypatch.setattr("workers.comm.channel.abort_nccl", aborted.append)
    channel = link_between_devices(
        HostLink(ours, 20.0), group, 1, me="verifier 0", peer="drafter 0", device_part=DevicePart.BODY,
        where=torch.device("cpu"), may_lose=True,
    )  # fmt: skip
    channel.send(draft_request(3, 8), 41)
    if dies_before_its_body:
        theirs.sendall(np.array([Kind.DRAFT_REPLY, 41, 100, 0], dtype=np.int64).tobytes())
    theirs.close()
    with pytest.raises(PeerLost, match="verifier 0 lost drafter 0 at step 41"):
        channel.receive()
    ours.close()
    assert aborted == [group]


def test_a_silent_drafter_is_lost_after_the_step_timeout():
    said = next(in_processes(wait_for_a_silent_drafter, config(step_timeout_s=1.0)))
    assert said[0] == 0
    assert said[1].startswith("verifier 0 lost drafter 0 at step 42: it was silent for 1 s"), said[1]


def test_waiting_for_the_next_message_may_exceed_the_step_timeout():
    asked = config(tensor_parallel_size=2, draft_tensor_parallel_size=2, step_timeout_s=1.0)
    said = dict(in_processes(wait_for_a_busy_verifier, asked))
    assert said == {
        0: "answered with DRAFT_REPLY",
        1: "got TARGET_STEP",
        2: "got DRAFT_REQUEST",
        3: "got DRAFT_REQUEST",
    }


def test_a_slow_start_is_allowed_more_time_than_a_step():
    ranks = in_processes(come_late, config(tensor_parallel_size=2, step_timeout_s=1.0))
    assert next(said for rank, said in ranks if rank == 0) == "in a step"


def test_a_start_up_has_a_timeout_of_its_own():
    said = next(in_processes(wait_in_the_start_up, config(startup_timeout_s=3.0)))
    assert said[0] == 0
    assert said[1].startswith("verifier 0 lost drafter 0 before the first step: it was silent for 3 s"), said[1]


@pytest.mark.slow
def test_a_silent_verifier_is_lost_after_the_idle_timeout():
    said = next(in_processes(wait_for_a_silent_verifier, config(step_timeout_s=0.4)))
    assert said[0] == 1
    assert said[1].startswith("drafter 0 lost verifier 0 before the first step: it was silent for 4 s"), said[1]


def test_a_killed_verifier_is_noticed_by_its_peer():
    said = dict(in_processes(lose_the_source, config(tensor_parallel_size=2)))
    assert said[1].startswith("verifier 1 lost verifier 0 at step 43:"), said[1]


def test_a_link_says_whether_a_frame_waits() -> None:
    """A drafter learns until one does, and sees then that the verifier has gone."""
    ends = socket.socketpair()
    verifier, drafter = (
        link_through_host(HostLink(end, 5.0), me=me, peer=peer)
        for end, me, peer in zip(ends, ("verifier 0", "drafter 0"), ("drafter 0", "verifier 0"), strict=True)
    )
    assert not drafter.has_frame(0.0) and not drafter.has_frame(0.01)
    verifier.heartbeat(3)
    assert drafter.has_frame(5.0) and drafter.receive().kind == Kind.HEARTBEAT
    assert not drafter.has_frame(0.0)
    ends[0].close()
    with pytest.raises(PeerLost, match="drafter 0 lost verifier 0"):
        assert drafter.has_frame(5.0) and drafter.receive()
    ends[1].close()
