"""The front's end of an engine: requests, losses and health, with an engine that follows a script."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cluster.engine import engine_client
from cluster.engine.engine_client import DeadlyRequest, EngineClient, SlowReader
from cluster.engine.rank_exits import EngineDead
from tests.support.fake_engine import STATS, FakeEngine, StandingClock
from workers.comm.ipc import (
    Abort,
    DrafterLost,
    EngineStats,
    FrameSocket,
    FrontGone,
    Ready,
    Resumption,
    StepOutput,
    Submit,
    TokenChunk,
    connect,
)

pytestmark = pytest.mark.timeout(20)
"""A request that no engine ends waits forever. That fails here, as each test takes a part of a second."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StandingClock:
    clock = StandingClock()
    monkeypatch.setattr(engine_client, "time", clock)
    return clock


async def collect(client: EngineClient, submit: Submit) -> list[TokenChunk]:
    return [chunk async for chunk in client.submit(submit)]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def with_fake(folder: Path, body: Callable[[EngineClient, FakeEngine], Awaitable[None]], **client: float) -> None:
    async def main() -> None:
        front = EngineClient(**client)
        fake = FakeEngine(await front.listen(f"unix:{folder}/socket"), lambda submit: [[1, 2], [3], [4, 5, 6]])
        await front.wait_ready(60)
        try:
            await body(front, fake)
        finally:
            await front.close()
            fake.die()

    asyncio.run(main())


def test_each_step_is_one_chunk(tmp_path: Path) -> None:
    async def body(client: EngineClient, fake: FakeEngine) -> None:
        chunks = await collect(client, Submit(id=client.new_id(), prompt=[1], max_tokens=10))
        assert [chunk.tokens for chunk in chunks] == [[1, 2], [3], [4, 5, 6]]
        assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]
        assert client.num_pending == 0

    with_fake(tmp_path, body)


def test_start_up_objects_are_frozen_once_the_engine_is_ready(tmp_path: Path) -> None:
    async def body(client: EngineClient, fake: FakeEngine) -> None:
        assert gc.get_freeze_count() > 10_000

    gc.unfreeze()
    assert gc.get_freeze_count() == 0
    with_fake(tmp_path, body)


def test_an_iterator_left_early_aborts_its_request(tmp_path: Path) -> None:
    step = threading.Semaphore(1)

    async def body(client: EngineClient, fake: FakeEngine) -> None:
        fake.before_step = step.acquire
        chunks = client.submit(Submit(id=7, prompt=[1], max_tokens=10))
        await anext(chunks)
        await chunks.aclose()
        assert client.num_pending == 0
        step.release(9)
        await until(lambda: fake.aborted == [7])

    with_fake(tmp_path, body)


def test_requests_that_are_submitted_together_end_together_and_one_may_be_aborted(tmp_path: Path) -> None:
    """The engine runs a step with the request that was aborted, whose abort it reads after that."""
    step = threading.Semaphore(1)

    async def body(client: EngineClient, fake: FakeEngine) -> None:
        fake.before_step = step.acquire
        with client.places(3) as ids:
            assert client.num_pending == 3
            chunks = client.submit(*(Submit(id=id, prompt=[1], max_tokens=10) for id in ids))
            first = await anext(chunks)
        assert client.num_pending == 3
        client.abort(ids[1])
        assert client.num_pending == 2
        step.release(9)
        seen = [first, *[chunk async for chunk in chunks]]
        for id in (ids[0], ids[2]):
            assert [chunk.tokens for chunk in seen if chunk.id == id] == [[1, 2], [3], [4, 5, 6]]
        assert client.num_pending == 0
        await until(lambda: fake.aborted == [ids[1]])

    with_fake(tmp_path, body)


def test_places_that_were_not_used_are_given_back(tmp_path: Path) -> None:
    async def body(client: EngineClient, fake: FakeEngine) -> None:
        with client.places(2) as ids, client.places(1) as others:
            assert client.num_pending == 3 and len({*ids, *others}) == 3
            await collect(client, Submit(id=ids[0], prompt=[1], max_tokens=10))
            assert client.num_pending == 2
        assert client.num_pending == 0

    with_fake(tmp_path, body)


def test_a_finished_request_is_not_pending_even_if_unread(tmp_path: Path) -> None:
    async def body(client: EngineClient, fake: FakeEngine) -> None:
        chunks = client.submit(Submit(id=7, prompt=[1], max_tokens=10))
        seen = [await anext(chunks)]
        await until(lambda: not client.num_pending)
        seen += [chunk async for chunk in chunks]
        assert [chunk.tokens for chunk in seen] == [[1, 2], [3], [4, 5, 6]]
        assert not fake.aborted

    with_fake(tmp_path, body)


def test_requests_go_on_in_the_next_engine(tmp_path: Path) -> None:
    """Of two running requests one has gained tokens; a third one arrives while there is no engine."""
    script = {1: [[1, 2], [3], [4, 5]], 2: [[7], [8]], 3: [[9]]}

    def rest(submit: Submit) -> list[list[int]]:
        done = len(submit.resumption.output) if submit.resumption else 0
        tokens = [token for step in script[submit.id] for token in step]
        return [[token] for token in tokens[done:]]

    two_steps = threading.Semaphore(2)

    async def body(client: EngineClient, fake: FakeEngine) -> None:
        fake.script, fake.before_step = lambda submit: list(script[submit.id]), two_steps.acquire
        first = client.submit(Submit(id=1, prompt=[7, 8, 9, 5], max_tokens=10, num_prompt_logprobs=0))
        tokens = [token for _ in range(4) for token in (await anext(first)).tokens]
        second = asyncio.create_task(collect(client, Submit(id=2, prompt=[1], max_tokens=10)))
        await asyncio.sleep(0)
        client.interrupt("verifier 0 was killed")
        two_steps.release(9)
        fake.die()
        third = asyncio.create_task(collect(client, Submit(id=3, prompt=[1], max_tokens=10)))
        await asyncio.sleep(0)
        assert client.health() == (True, "requests wait for a new engine: verifier 0 was killed")
        assert client.num_pending == 3
        other = FakeEngine(await client.listen(f"unix:{tmp_path}/other"), rest)
        await client.wait_ready(60)
        tokens += [token for chunk in [chunk async for chunk in first] for token in chunk.tokens]
        assert tokens == [1, 2, 3, 4, 5]
        assert [chunk.tokens for chunk in await second] == [[7], [8]]
        assert [chunk.tokens for chunk in await third] == [[9]]
        told = {submit.id: submit.resumption for submit in other.submitted}
        assert told == {1: Resumption(output=[1, 2, 3], num_prompt_logprobs=3, stats=STATS), 2: None, 3: None}
        assert client.health() == (True, "") and client.num_pending == 0
        other.die()

    with_fake(tmp_path, body)


def test_a_request_with_which_engine_after_engine_dies_fails_alone(tmp_path: Path) -> None:
    async def body(client: EngineClient, fake: FakeEngine) -> None:
        fake.hold.set()
        waiting = asyncio.create_task(collect(client, Submit(id=1, prompt=[1], max_tokens=10)))
        await asyncio.sleep(0)
        for number in range(3):
            assert client.num_pending == 1
            client.interrupt("verifier 0 was killed")
            fake.die()
            fake = FakeEngine(await client.listen(f"unix:{tmp_path}/{number}"), lambda submit: [[1]])
            fake.hold.set()
            await client.wait_ready(60)
        assert client.num_pending == 0
        with pytest.raises(DeadlyRequest, match="3 engines have died with this request: verifier 0 was killed"):
            await waiting
        fake.hold.clear()
        assert len(await collect(client, Submit(id=9, prompt=[1], max_tokens=10))) == 1
        fake.die()

    with_fake(tmp_path, body)


def test_an_engine_that_dies_while_it_replaces_another_fails_its_start(tmp_path: Path) -> None:
    async def body(client: EngineClient, fake: FakeEngine) -> None:
        client.interrupt("verifier 0 was killed")
        fake.die()
        await client.listen(f"unix:{tmp_path}/other")
        asyncio.get_running_loop().call_later(0.05, client.interrupt, "verifier 1 ran out of memory")
        with pytest.raises(EngineDead, match="out of memory"):
            await client.wait_ready(60)
        client.fail("no engine starts")
        with pytest.raises(EngineDead, match="no engine starts"):
            await collect(client, Submit(id=1, prompt=[1], max_tokens=10))

    with_fake(tmp_path, body)


def test_a_dead_engine_fails_pending_and_later_requests(tmp_path: Path) -> None:
    async def body(client: EngineClient, fake: FakeEngine) -> None:
        fake.hold.set()
        waiting = asyncio.create_task(collect(client, Submit(id=1, prompt=[1], max_tokens=10)))
        await asyncio.sleep(0)
        await asyncio.to_thread(fake.die)
        with pytest.raises(EngineDead, match="closed its connection"):
            await waiting
        assert not client.health().ok
        with pytest.raises(EngineDead, match="closed its connection"):
            await collect(client, Submit(id=2, prompt=[1], max_tokens=10))

    with_fake(tmp_path, body, cause_wait_s=0.0)


def test_the_report_of_the_dead_rank_is_waited_for(tmp_path: Path) -> None:
    """The socket closes first; requests from before and after it get the watcher's reason."""

    async def body(client: EngineClient, fake: FakeEngine) -> None:
        fake.hold.set()
        before = asyncio.create_task(collect(client, Submit(id=1, prompt=[1], max_tokens=10)))
        await asyncio.sleep(0)
        await asyncio.to_thread(fake.die)
        await until(lambda: client._loss is not None)
        after = asyncio.create_task(collect(client, Submit(id=2, prompt=[1], max_tokens=10)))
        await asyncio.sleep(0)
        assert not before.done() and not after.done()
        client.fail("verifier 1 died")
        for waiting in (before, after):
            with pytest.raises(EngineDead, match="verifier 1 died"):
                await waiting
        assert client.dead == "verifier 1 died"

    with_fake(tmp_path, body, cause_wait_s=30.0)


def test_the_average_time_of_requests_moves_by_a_part_of_what_the_last_one_took(
    tmp_path: Path, clock: StandingClock
) -> None:
    """On a clock that shows a second more with every step."""

    async def body(client: EngineClient, fake: FakeEngine) -> None:
        def tick() -> None:
            clock.now += 1

        fake.before_step = tick
        await collect(client, Submit(id=1, prompt=[1], max_tokens=10))
        assert client.service_s == 3
        fake.script = lambda submit: [[1]]
        await collect(client, Submit(id=2, prompt=[1], max_tokens=10))
        assert client.service_s == 3 - 2 * engine_client.SERVICE_WEIGHT

    with_fake(tmp_path, body)


async def connected(client: EngineClient, address: str) -> FrameSocket:
    """Open the client's socket and return the engine's end of it."""
    told = await client.listen(address)
    return FrameSocket(await asyncio.to_thread(connect, told))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_an_engine_on_another_node_connects_over_tcp(host: str) -> None:
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    client = EngineClient()
    fake = FakeEngine(await client.listen(f"tcp:{host}:0"), lambda submit: [[1, 2]])
    told, _, port = client.address.rpartition(":")
    assert told == f"tcp:{host}" and int(port) > 0
    with pytest.raises(OSError, match="in use"):
        await EngineClient().listen(client.address)
    await client.wait_ready(60)
    assert [chunk.tokens for chunk in await collect(client, Submit(id=1, prompt=[1], max_tokens=2))] == [[1, 2]]
    await client.close()
    fake.die()


async def test_an_engine_that_sends_what_only_a_service_may_send_is_lost(tmp_path: Path) -> None:
    client, reasons = EngineClient(cause_wait_s=0.0), list[str]()
    client.on_loss = reasons.append
    engine = await connected(client, f"unix:{tmp_path}/socket")
    engine.send(Abort(id=1))
    await until(lambda: bool(reasons))
    assert reasons == ["the engine's connection broke: the engine sent Abort, which only the service may send"]
    engine.close()
    await client.close()


async def test_a_lost_drafter_is_told_with_its_reason(tmp_path: Path) -> None:
    client, told = EngineClient(), list[DrafterLost]()
    client.on_drafter_lost = told.append
    engine = await connected(client, f"unix:{tmp_path}/socket")
    lost = DrafterLost(reason="drafter 0 was killed", link="tcp:127.0.0.1:1")
    engine.send(lost)
    await until(lambda: bool(told))
    assert told == [lost] and client.drafter_lost == lost and not client.stats.has_drafter
    engine.close()
    await client.close()


async def test_a_request_that_fails_is_not_in_the_average_time(tmp_path: Path, clock: StandingClock) -> None:
    client = EngineClient()
    engine = await connected(client, f"unix:{tmp_path}/socket")
    engine.send(Ready(topology=[], max_model_len=9, vocab_size=9, num_pages=9))
    await client.wait_ready(60)
    waiting = asyncio.create_task(collect(client, Submit(id=1, prompt=[1], max_tokens=10)))
    await asyncio.sleep(0)
    clock.now += 5
    failed = TokenChunk(id=1, tokens=[], finish_reason="error", error="no page is left")
    engine.send(StepOutput(chunks=[failed], stats=EngineStats()))
    assert [chunk.error for chunk in await waiting] == ["no page is left"]
    assert client.service_s == 0
    engine.close()
    await client.close()


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("udp:127.0.0.1:0", "engine address 'udp:127.0.0.1:0': write unix:/path or tcp:host:port"),
        (f"unix:/{'a' * 107}", "is longer than 107 bytes; use a shorter temporary folder"),
    ],
)
async def test_an_address_that_no_engine_can_connect_to_is_refused(address: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        await EngineClient().listen(address)


READY = Ready(topology=[], max_model_len=9, vocab_size=9, num_pages=9)


async def test_a_second_engine_is_turned_away(tmp_path: Path) -> None:
    client = EngineClient(cause_wait_s=0.0)
    engine = await connected(client, f"unix:{tmp_path}/socket")
    second = FrameSocket(await asyncio.to_thread(connect, client.address))
    with pytest.raises(FrontGone):
        await asyncio.to_thread(second.poll, 60.0)
    engine.send(READY)
    assert await client.wait_ready(60) == READY
    assert client.health() == (True, "")
    engine.close()
    second.close()
    await client.close()


async def test_health_names_what_is_amiss_in_one_line(tmp_path: Path) -> None:
    client = EngineClient()
    assert client.health() == (False, "the engine is starting")
    with pytest.raises(EngineDead, match="not connected yet"):
        await collect(client, Submit(id=1, prompt=[1], max_tokens=10))
    with pytest.raises(TimeoutError, match=r"not ready after 0\.01 s; raise startup_timeout"):
        await client.wait_ready(0.01)
    engine = await connected(client, f"unix:{tmp_path}/socket")
    engine.send(READY)
    await client.wait_ready(60)
    engine.send(DrafterLost(reason="drafter 0 was killed\nat line 3", link="tcp:127.0.0.1:1"))
    await until(lambda: client.drafter_lost is not None)
    assert client.health() == (True, "drafter 0 was killed; requests are answered without drafts")
    engine.send(StepOutput(chunks=[], stats=EngineStats(has_drafter=True)))
    await until(lambda: client.drafter_lost is None)
    assert client.health() == (True, "")
    waiting = asyncio.create_task(collect(client, Submit(id=1, prompt=[1], max_tokens=10)))
    await asyncio.sleep(0)
    client.interrupt("verifier 0 was killed\nat line 3")
    assert client.health() == (True, "requests wait for a new engine: verifier 0 was killed")
    for reason in ("no engine starts", "the second reason is not told"):
        client.fail(reason)
        client.interrupt(reason)
    assert client.health() == (False, "no engine starts") and client.dead == "no engine starts"
    with pytest.raises(EngineDead, match="no engine starts"):
        await waiting
    engine.close()
    await client.close()
    assert client.dead == "no engine starts"


def test_requests_of_the_same_priority_or_a_lower_number_come_first(tmp_path: Path) -> None:
    async def body(client: EngineClient, fake: FakeEngine) -> None:
        fake.hold.set()
        waiting = [
            asyncio.create_task(collect(client, Submit(id=id, prompt=[1], max_tokens=10, priority=priority)))
            for id, priority in ((1, 0), (2, 5))
        ]
        await asyncio.sleep(0)
        with client.places(1):
            assert [client.num_before(priority) for priority in (-1, 0, 4, 5)] == [1, 2, 2, 3]
        await client.close()
        for request in waiting:
            with pytest.raises(EngineDead, match="the service is shutting down"):
                await request

    with_fake(tmp_path, body)


def test_the_reader_for_whom_most_waits_loses_its_stream_when_all_have_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "MAX_UNREAD", 100)

    async def body(client: EngineClient, fake: FakeEngine) -> None:
        fake.script = lambda submit: [[1]] * submit.max_tokens
        streams = [client.arrivals(Submit(id=id, prompt=[1], max_tokens=num)) for id, num in ((1, 30), (2, 500))]
        seen = [await anext(stream) for stream in streams]
        await until(lambda: fake.aborted == [2])
        with pytest.raises(SlowReader):
            await anext(streams[1])
        await until(lambda: not client.num_pending)
        assert len(seen[0]) + len(await anext(streams[0])) == 30, "the other one has all that came"
        assert client._inboxes.size == 0 and not client._inboxes._inboxes

    with_fake(tmp_path, body)
