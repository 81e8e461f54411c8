"""Several services as one: the least busy one is asked, and those that fail rest."""

import asyncio
import json
from collections import Counter
from functools import partial

import httpx2
import pytest

from secateur import endpoints
from secateur.client_http import complete_call
from secateur.endpoints import EndpointPool
from secateur.errors import (
    APIConnectionError,
    AuthenticationError,
    BadRequestError,
    ConfigError,
    ServiceUnavailableError,
)
from secateur.responses import CompletionChoice, CompletionResponse, ModelList
from secateur.retries import Retry

ANSWER = CompletionResponse(model="m", choices=[CompletionChoice(text="x")]).model_dump_json()


class Services:
    """In-process services by host. `status` maps a host to what it answers, 0 = nothing; `held` holds its answers."""

    def __init__(self, status: dict[str, int] | None = None, held: dict[str, asyncio.Event] | None = None) -> None:
        self.status, self.held = status or {}, held or {}
        self.asked: list[str] = []
        self.pending: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        host = request.url.host
        status = self.status.get(host, 200)
        if request.url.path == "/v1/models" and status == 200:
            return httpx2.Response(200, text=ModelList().model_dump_json())
        self.asked.append(host)
        self.pending[host] += 1
        self.most[host] = max(self.most[host], self.pending[host])
        await (self.held[host].wait() if host in self.held else asyncio.sleep(0.001))
        self.pending[host] -= 1
        if status == 0:
            raise httpx2.ConnectError("refused")
        if status == 200:
            return httpx2.Response(200, text=ANSWER)
        headers = {"retry-after": "30"} if status == 503 else {}
        return httpx2.Response(status, headers=headers, json={"error": {"message": f"from {host}", "code": "c"}})

    def pool(self, *hosts: str, retries: int = 2, outage_timeout: float = 0.0) -> EndpointPool:
        urls = [f"http://{host}" for host in hosts]
        return EndpointPool(urls, retries=retries, outage_timeout=outage_timeout, transport=httpx2.MockTransport(self))


@pytest.fixture(autouse=True)
def short_rests(monkeypatch):
    monkeypatch.setattr(
        endpoints, "Retry", lambda retries, outage_s: Retry(retries, outage_s, first_s=0.02, longest_s=0.1)
    )


async def ask(pool: EndpointPool, number: int, concurrency: int = 8) -> list[object]:
    turns = asyncio.Semaphore(concurrency)

    async def one() -> object:
        async with turns:
            return await pool.call(complete_call("p", {}))

    return await asyncio.gather(*(one() for _ in range(number)), return_exceptions=True)


async def test_equal_services_share_equally():
    services = Services()
    async with services.pool("a", "b") as pool:
        await ask(pool, 40)
    assert Counter(services.asked) == {"a": 20, "b": 20} and services.most == {"a": 4, "b": 4}


async def test_a_slow_service_gets_less():
    held = asyncio.Event()
    services = Services(held={"slow": held})
    async with services.pool("slow", "fast") as pool:
        asking = asyncio.create_task(ask(pool, 60, concurrency=4))
        async with asyncio.timeout(30):
            while services.asked.count("fast") < 58:
                await asyncio.sleep(0.001)
        assert services.asked.count("slow") == services.most["slow"] == 2
        held.set()
        assert all(isinstance(answer, CompletionResponse) for answer in await asking)


@pytest.mark.parametrize("status", [0, 500, 503])
async def test_a_service_that_fails_rests_and_its_requests_go_elsewhere(status, monkeypatch):
    monkeypatch.setattr(endpoints, "Retry", partial(Retry, first_s=30.0))
    services = Services(status={"bad": status})
    async with services.pool("bad", "good") as pool:
        answers = await ask(pool, 60, concurrency=4)
    assert all(isinstance(answer, CompletionResponse) for answer in answers)
    count = Counter(services.asked)
    assert count["good"] == 60 and 1 <= count["bad"] <= 4, "no more than were in flight when it failed first"


async def test_a_service_that_comes_back_is_asked_again():
    services = Services(status={"bad": 0})
    async with services.pool("bad", "good") as pool:
        await ask(pool, 8)
        services.status.clear()
        services.asked.clear()
        await asyncio.sleep(0.15)
        await ask(pool, 40)
    assert Counter(services.asked)["bad"] >= 15


async def test_without_any_service_the_last_failure_is_raised_after_the_retries():
    services = Services(status={"a": 0, "b": 0})
    async with services.pool("a", "b", retries=2) as pool:
        (failure,) = await ask(pool, 1)
    assert isinstance(failure, APIConnectionError) and 5 <= len(services.asked) <= 6


@pytest.mark.parametrize(("outage_timeout", "is_answered"), [(20.0, True), (0.1, False)])
async def test_services_that_were_there_are_waited_for(outage_timeout, is_answered):
    services = Services()
    async with services.pool("a", "b", retries=0, outage_timeout=outage_timeout) as pool:
        await ask(pool, 2)
        services.status = {"a": 0, "b": 503}
        if is_answered:
            asyncio.get_running_loop().call_later(0.6, services.status.clear)
        (answer,) = await ask(pool, 1)
    assert isinstance(answer, CompletionResponse) == is_answered


async def test_a_wrong_request_is_not_repeated():
    services = Services(status={"a": 400, "b": 400})
    async with services.pool("a", "b") as pool:
        (failure,) = await ask(pool, 1)
    assert isinstance(failure, BadRequestError) and services.asked == ["a"]


async def test_models_lets_those_rest_that_do_not_answer():
    services = Services(status={"bad": 0})
    async with services.pool("bad", "good") as pool:
        assert isinstance(await pool.models(), ModelList)
        services.asked.clear()
        await pool.call(complete_call("p", {}))
    assert services.asked == ["good"]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ({"a": 0, "b": 0}, APIConnectionError),
        ({"a": 401}, AuthenticationError),
        ({"a": 503, "b": 503}, ServiceUnavailableError),
    ],
)
async def test_models_raises_if_no_service_can_be_used(status, error):
    async with Services(status=status).pool("a", "b") as pool:
        with pytest.raises(error):
            await pool.models()


def test_addresses_must_differ_and_be_given():
    with pytest.raises(ConfigError, match="http://a is given twice"):
        EndpointPool(["http://a", "http://b", "http://a/v1"])
    with pytest.raises(ConfigError, match="at least one"):
        EndpointPool([])
    with pytest.raises(ConfigError, match="must begin with http"):
        EndpointPool(["a"])


async def test_the_body_arrives_unchanged():
    bodies = []

    async def answer(request):
        bodies.append(json.loads(request.content))
        return httpx2.Response(200, text=ANSWER)

    async with EndpointPool(["http://a"], transport=httpx2.MockTransport(answer)) as pool:
        await pool.call(complete_call("p", {"max_tokens": 3}))
    assert bodies == [{"prompt": "p", "max_tokens": 3, "stream": False}]
