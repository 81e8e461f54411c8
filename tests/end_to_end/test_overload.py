"""A real service under more load than it can serve, with clients that leave and clients that hardly read.

What must hold however fast the machine is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import httpx2
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.http.admission import PENDING_PER_PLACE
from cluster.local_service import local_service
from secateur.config import EngineArgs
from tests.support import load

PLACES = 2
LIMIT = PLACES * PENDING_PER_PLACE
BODY = {"prompt": "def f(", "max_tokens": 8, "ignore_eos": True}
LONG = BODY | {"max_tokens": 200}
PATIENCE_S = 120


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    args = {"device": "cpu", "port": 0, "max_num_seqs": PLACES, "max_model_len": 256, "no_speculation": True}
    with local_service(EngineArgs.load(args)) as url:
        yield url


def gauges(url: str) -> dict[str, float]:
    families = text_string_to_metric_families(httpx2.get(f"{url}/metrics", timeout=60).text)
    return {sample.name.removeprefix("secateur_"): sample.value for family in families for sample in family.samples}


def is_idle(url: str) -> bool:
    """Return whether nothing runs or waits, and no KV page is held."""
    now = gauges(url)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return httpx2.get(f"{url}/load", timeout=60).json() == {"server_load": 0} and not any(now[name] for name in names)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


async def crowd(url: str, num: int) -> tuple[list[load.Outcome], int]:
    """Let all arrive at once; return their outcomes and the longest queue meanwhile."""
    longest, clients = 0, [asyncio.create_task(load.ask(url, BODY)) for _ in range(num)]
    while not all(client.done() for client in clients):
        reply = await asyncio.to_thread(httpx2.get, f"{url}/load", timeout=60)
        longest = max(longest, reply.json()["server_load"])
    return [client.result() for client in clients], longest


def test_ten_times_too_many_requests_are_answered_or_told_when_to_come_again(url: str) -> None:
    asyncio.run(crowd(url, 10 * LIMIT))  # the first ones allocate what stays
    before = psutil.Process().memory_info().rss
    for _ in range(3):
        outcomes, longest = asyncio.run(crowd(url, 10 * LIMIT))
        assert all(outcome.is_sane for outcome in outcomes), load.statuses(outcomes)
        assert load.statuses(outcomes)[200] >= LIMIT and load.statuses(outcomes)[429] > 0
        assert longest <= LIMIT
    assert psutil.Process().memory_info().rss - before < 64 << 20
    wait_for(lambda: is_idle(url))


def test_clients_that_leave_leave_nothing_behind(url: str) -> None:
    asyncio.run(load.leavers(url, LONG, num=150, per_second=50, patience_s=1.0))
    wait_for(lambda: is_idle(url))
    assert asyncio.run(load.ask(url, BODY)).status == 200


def test_clients_that_hardly_read_keep_nobody_waiting(url: str) -> None:
    async def beside_slow_readers() -> tuple[list[load.Outcome], list[int]]:
        leave = asyncio.Event()
        slow = asyncio.create_task(load.slow_readers(url, LONG | {"logprobs": 20}, num=2 * PLACES, leave=leave))
        await asyncio.to_thread(wait_for, lambda: gauges(url)["num_requests_running"] > 0)
        await asyncio.to_thread(wait_for, lambda: gauges(url)["num_requests_running"] == 0)
        others = [await load.ask(url, BODY) for _ in range(5)]
        assert not slow.done()
        leave.set()
        return others, await slow

    others, bytes_read = asyncio.run(beside_slow_readers())
    assert [other.status for other in others] == [200] * 5
    assert max(bytes_read) < 10_000, "they never came near the end of their answers"
    wait_for(lambda: is_idle(url))
