"""Refusals that Serve's proxy repeats, with the replica's own middleware and without Ray."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from cluster.http.paths import ADMITTED, REFUSES_ALL
from cluster.serve import refusals
from cluster.serve.refusals import FORGET_S, HOLD_S, TRY_S, RepeatedRefusals, ReplicaMark
from secateur.responses import REQUEST_ID_HEADER


class NoCounter:
    """In place of Ray's, which needs a cluster."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.count = 0

    def inc(self) -> None:
        self.count += 1


class Cluster:
    """Replicas behind a proxy, which goes from one to the next, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_replicas: int = 1) -> None:
        monkeypatch.setattr(refusals, "Counter", NoCounter)
        self.full, self.now, self.num_forwarded = [True] * num_replicas, 1000.0, 0
        self.answering = asyncio.Event()
        """Answers wait for it; refusals do not."""
        self.answering.set()
        marks = [
            ReplicaMark(self._replica(number), replica=f"replica#{number}", max_pending=5)
            for number in range(num_replicas)
        ]

        async def forward(scope: Scope, receive: Receive, send: Send) -> None:
            self.num_forwarded += 1
            await marks[self.num_forwarded % num_replicas](scope, receive, send)

        self.proxy = RepeatedRefusals(forward, now=lambda: self.now)

    def _replica(self, number: int) -> Any:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            name = f"{number} {self.num_forwarded}"
            id = Request(scope).headers[REQUEST_ID_HEADER]
            if self.full[number]:
                scope.setdefault("state", {})[REFUSES_ALL] = True
                response: Response = JSONResponse(
                    {"error": name}, status_code=429, headers={"Retry-After": "7", REQUEST_ID_HEADER: id}
                )
            else:
                await self.answering.wait()
                response = JSONResponse({"text": name}, headers={REQUEST_ID_HEADER: id})
            await response({**scope}, receive, send)

        return answer

    async def ask(self, path: str = ADMITTED[0], method: str = "POST", id: str = "mine", **headers: str) -> Response:
        raw = [(name.encode(), value.encode()) for name, value in {REQUEST_ID_HEADER: id, **headers}.items()]
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"{}"}

        await self.proxy({"type": "http", "method": method, "path": path, "headers": raw}, receive, send)
        start, body = sent
        response = Response(body["body"], status_code=start["status"])
        response.raw_headers = start["headers"]
        return response


async def test_a_full_service_s_refusal_is_repeated_with_the_request_s_own_id(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Cluster(monkeypatch)
    first = await service.ask(id="first")
    again = [await service.ask(path, id="again") for path in (*ADMITTED, f"/prefix{ADMITTED[0]}/")]
    assert service.num_forwarded == 1 and service.proxy._repeated.count == len(again)
    for each, id in ((first, "first"), *((each, "again") for each in again)):
        assert (each.status_code, each.body) == (429, first.body)
        assert each.headers["retry-after"] == "7" and each.headers.getlist(REQUEST_ID_HEADER) == [id]
        assert not [name for name in each.headers if "replica" in name]


async def test_what_is_no_plain_generation_request_is_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Cluster(monkeypatch)
    await service.ask()
    await service.ask(origin="https://app.example")  # the refusal's CORS headers are for one origin
    await service.ask("/health")
    await service.ask(method="OPTIONS")
    assert service.num_forwarded == 4


async def test_a_full_service_is_tried_again_soon_and_opens_as_answers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Cluster(monkeypatch)
    await service.ask()
    service.now += TRY_S - 0.01
    assert (await service.ask()).status_code == 429 and service.num_forwarded == 1
    service.now += 0.02
    assert [(await service.ask()).status_code for _ in range(3)] == [429] * 3 and service.num_forwarded == 2
    service.full = [False]
    service.now += TRY_S + 0.01
    assert [(await service.ask()).status_code for _ in range(3)] == [200] * 3, "each lets in the next"


async def test_one_request_goes_in_for_each_that_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Cluster(monkeypatch)
    service.answering = asyncio.Event()
    service.full = [False]
    running = [asyncio.create_task(service.ask()) for _ in range(3)]
    await asyncio.sleep(0)
    service.full = [True]
    assert (await service.ask()).status_code == 429 and service.num_forwarded == 4
    service.answering.set()
    assert [each.status_code for each in await asyncio.gather(*running)] == [200] * 3
    service.full = [False]
    service.answering = asyncio.Event()
    more = [asyncio.create_task(service.ask()) for _ in range(5)]
    await asyncio.sleep(0)
    assert service.num_forwarded == 7
    service.answering.set()
    assert sorted(each.status_code for each in await asyncio.gather(*more)) == [200, 200, 200, 429, 429]


async def test_a_service_that_is_no_longer_full_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Cluster(monkeypatch)
    await service.ask()
    service.full = [False]
    service.answering = asyncio.Event()
    service.now += HOLD_S + 0.01
    running = [asyncio.create_task(service.ask()) for _ in range(4)]
    await asyncio.sleep(0)
    service.answering.set()
    assert [each.status_code for each in await asyncio.gather(*running)] == [200] * 4


async def test_one_replica_with_room_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Cluster(monkeypatch, num_replicas=2)
    service.full = [True, False]
    assert sorted([(await service.ask()).status_code for _ in range(4)]) == [200, 200, 429, 429]
    service.full = [True, True]
    statuses = [(await service.ask()).status_code for _ in range(4)]
    assert statuses == [429] * 4 and service.num_forwarded == 5  # then both have refused


async def test_a_replica_that_has_ended_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Cluster(monkeypatch, num_replicas=2)
    service.full = [False, False]
    await service.ask()
    await service.ask()
    service.now += FORGET_S + 1
    service.full = [True, True]
    await service.ask()
    assert service.num_forwarded == 3 and (await service.ask()).status_code == 429 and service.num_forwarded == 3


async def test_a_refusal_that_another_request_might_not_get_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one beyond the limits of an API key, which the admission does not mark."""
    service = Cluster(monkeypatch)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        service.num_forwarded += 1
        await JSONResponse({}, status_code=429)(scope, receive, send)

    service.proxy = RepeatedRefusals(ReplicaMark(answer, replica="r", max_pending=5), now=lambda: service.now)
    assert [(await service.ask()).status_code for _ in range(3)] == [429] * 3
    assert service.num_forwarded == 3


async def test_no_more_are_let_in_than_the_replicas_hold_before_their_first_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Cluster(monkeypatch, num_replicas=2)
    service.full = [False, False]
    first = [await service.ask(), await service.ask()]
    assert [each.status_code for each in first] == [200, 200]
    service.answering.clear()
    asked = [asyncio.create_task(service.ask(id=f"{number}")) for number in range(13)]
    await asyncio.sleep(0)
    assert service.num_forwarded == 2 + 10
    service.answering.set()
    answers = await asyncio.gather(*asked)
    assert [each.status_code for each in answers] == [200] * 10 + [429] * 3
    assert answers[-1].headers["retry-after"] == "1" and answers[-1].headers[REQUEST_ID_HEADER] == "12"
    assert json.loads(answers[-1].body)["error"]["code"] == "too_many_requests"
    assert int(answers[-1].headers["content-length"]) == len(answers[-1].body)
    assert (await service.ask()).status_code == 200
