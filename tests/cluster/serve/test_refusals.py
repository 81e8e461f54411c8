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
from cluster.serve.refusals import FULL_S, GONE_S, SILENT_S, TRY_S, RepeatedRefusals, ReplicaMark
from secateur.responses import REQUEST_ID_HEADER


class NoCounter:
    """In place of Ray's, which needs a cluster."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.count = 0

    def inc(self) -> None:
        self.count += 1


class Cluster:
    """Replicas behind a proxy, which goes from one to the next, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_replicas: int = 1, root_path: str = "") -> None:
        monkeypatch.setattr(refusals, "Counter", NoCounter)
        self.full, self.now, self.num_forwarded = [True] * num_replicas, 1000.0, 0
        self.status, self.alive = 200, list(range(num_replicas))
        self.answering = asyncio.Event()
        """Answers wait for it; refusals do not."""
        self.answering.set()
        marks = [
            ReplicaMark(self._replica(number), replica=f"replica#{number}", most_pending=5, root_path=root_path)
            for number in range(num_replicas)
        ]

        async def forward(scope: Scope, receive: Receive, send: Send) -> None:
            self.num_forwarded += 1
            await marks[self.alive[self.num_forwarded % len(self.alive)]](scope, receive, send)

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
                response = JSONResponse({"text": name}, self.status, headers={REQUEST_ID_HEADER: id})
            await response({**scope}, receive, send)

        return answer

    async def ask(
        self, path: str = ADMITTED[0], method: str = "POST", id: str = "mine", root: str = "", **headers: str
    ) -> Response:
        raw = [(name.encode(), value.encode()) for name, value in {REQUEST_ID_HEADER: id, **headers}.items()]
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"{}"}

        scope = {"type": "http", "method": method, "path": root + path, "root_path": root, "headers": raw}
        await self.proxy(scope, receive, send)
        start, body = sent
        response = Response(body["body"], status_code=start["status"])
        response.raw_headers = start["headers"]
        return response


async def test_a_full_service_s_refusal_is_repeated_with_the_request_s_own_id(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Cluster(monkeypatch)
    first = await service.ask(id="first")
    again = [await service.ask(path, id="again") for path in (*ADMITTED, f"{ADMITTED[0]}/")]
    assert service.num_forwarded == 1 and service.proxy._repeated.count == len(again)
    for each, id in ((first, "first"), *((each, "again") for each in again)):
        assert (each.status_code, each.body) == (429, first.body)
        assert each.headers["retry-after"] == "7" and each.headers.getlist(REQUEST_ID_HEADER) == [id]
        assert not [name for name in each.headers if "replica" in name]


async def test_what_is_no_plain_generation_request_is_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Cluster(monkeypatch)
    await service.ask()
    others = [await service.ask(origin="https://app.example"), await service.ask("/health", method="GET")]
    others += [await service.ask(method="OPTIONS"), await service.ask("/v1/batches")]
    assert service.num_forwarded == 5
    assert not any("x-secateur-replica" in each.headers for each in others)


async def test_the_refusal_of_a_script_of_another_origin_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its CORS headers name that origin."""
    service = Cluster(monkeypatch)
    refused = await service.ask(origin="https://app.example")
    assert (refused.status_code, json.loads(refused.body)["error"]) == (429, "0 1")
    common = [json.loads((await service.ask()).body)["error"] for _ in range(3)]
    assert service.num_forwarded == 2 and common == ["0 2"] * 3, "the first was a try"


async def test_other_applications_behind_the_proxy_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Cluster(monkeypatch)
    assert [(await service.ask(root="/ours")).status_code for _ in range(3)] == [429] * 3 and service.num_forwarded == 1
    service.full = [False]
    assert [(await service.ask(root=root)).status_code for root in ("/other", "", "/ours/too")] == [200] * 3


@pytest.mark.parametrize("path", [ADMITTED[0], f"/llm{ADMITTED[0]}"])
async def test_a_prefix_of_the_service_may_be_kept_or_removed_in_front(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    service = Cluster(monkeypatch, root_path="/llm")
    assert [(await service.ask(path)).status_code for _ in range(3)] == [429] * 3 and service.num_forwarded == 1


@pytest.mark.parametrize("ending", ["cancelled", "401"])
async def test_a_request_gives_its_place_back_however_it_ends(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    service = Cluster(monkeypatch)
    service.full = [False]
    await service.ask()
    service.answering.clear()
    running = asyncio.create_task(service.ask())
    await asyncio.sleep(0)
    service.full = [True]
    assert (await service.ask()).status_code == 429 and service.num_forwarded == 3
    service.full, service.status = [False], 401 if ending == "401" else 200
    running.cancel() if ending == "cancelled" else service.answering.set()
    await asyncio.gather(running, return_exceptions=True)
    service.answering.set()
    assert [(await service.ask()).status_code for _ in range(4)] == [service.status] * 4 and service.num_forwarded == 7


async def test_scripts_of_other_origins_take_places_and_are_no_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Cluster(monkeypatch)
    await service.ask()
    for _ in range(10):
        service.now += TRY_S / 4
        await service.ask(origin="https://app.example")
    assert (await service.ask()).status_code == 429 and service.num_forwarded == 12, "a try is due"
    service.full = [False]
    await service.ask(origin="https://app.example")
    assert [(await service.ask()).status_code for _ in range(2)] == [200] * 2, "one place came back"


async def test_replicas_are_known_after_an_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Cluster(monkeypatch, num_replicas=2)
    service.full = [False, False]
    await service.ask()
    await service.ask()
    service.now += 2 * GONE_S
    await service.ask()
    service.answering.clear()
    asked = [asyncio.create_task(service.ask()) for _ in range(10)]
    await asyncio.sleep(0)
    assert service.num_forwarded == 3 + 10, "as many as both hold"
    service.answering.set()
    await asyncio.gather(*asked)


async def test_a_client_that_leaves_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Cluster(monkeypatch)
    service.full = [False]
    await service.ask()
    service.answering.clear()
    for _ in range(3):  # 15 in all, of which 5 may wait at a time
        asked = [asyncio.create_task(service.ask()) for _ in range(5)]
        await asyncio.sleep(0)
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    service.answering.set()
    assert (await service.ask()).status_code == 200 and service.num_forwarded == 17


async def test_a_stale_refusal_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Cluster(monkeypatch)
    await service.ask()
    service.full = [False]
    service.now += FULL_S + 1
    service.answering.clear()
    asked = [asyncio.create_task(service.ask()) for _ in range(5)]
    await asyncio.sleep(0)
    refused = await service.ask()
    assert refused.headers["retry-after"] == "1"
    service.answering.set()
    await asyncio.gather(*asked)


async def test_each_of_many_full_replicas_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Cluster(monkeypatch, num_replicas=8)
    for _ in range(8):
        await service.ask()
    for _ in range(400):  # 10 s, 40 requests a second
        service.now += 0.025
        await service.ask()
    assert service.num_forwarded <= 8 + 10 / TRY_S * 8
    service.full = [False] * 8
    service.now += TRY_S
    assert (await service.ask()).status_code == 200


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
    service.full = [False]
    await service.ask()  # until then nothing is known of the replica
    service.answering.clear()
    running = [asyncio.create_task(service.ask()) for _ in range(3)]
    await asyncio.sleep(0)
    service.full = [True]
    assert (await service.ask()).status_code == 429 and service.num_forwarded == 5
    service.answering.set()
    assert [each.status_code for each in await asyncio.gather(*running)] == [200] * 3
    service.full = [False]
    service.answering = asyncio.Event()
    more = [asyncio.create_task(service.ask()) for _ in range(5)]
    await asyncio.sleep(0)
    assert service.num_forwarded == 8
    service.answering.set()
    assert sorted(each.status_code for each in await asyncio.gather(*more)) == [200, 200, 200, 429, 429]


async def test_a_service_that_is_no_longer_full_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Cluster(monkeypatch)
    await service.ask()
    service.full = [False]
    service.answering = asyncio.Event()
    service.now += FULL_S + 0.01
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
    service.full = [False, True]
    await service.ask()
    await service.ask()
    service.alive = [1]
    for _ in range(4):  # until the other has been silent for long enough
        assert (await service.ask()).status_code == 429
        service.now += SILENT_S / 3
    num_forwarded = service.num_forwarded
    assert [(await service.ask()).status_code for _ in range(3)] == [429] * 3
    assert service.num_forwarded == num_forwarded + 1


async def test_a_refusal_that_another_request_might_not_get_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one beyond the limits of an API key, which the admission does not mark."""
    service = Cluster(monkeypatch)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        service.num_forwarded += 1
        await JSONResponse({}, status_code=429)(scope, receive, send)

    service.proxy = RepeatedRefusals(ReplicaMark(answer, replica="r", most_pending=5), now=lambda: service.now)
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
