"""Which requests join the queue, what refusing costs, and when a refused request should come again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from cluster.engine import engine_client
from cluster.http import service
from cluster.http.admission import MAX_RETRY_AFTER_S
from cluster.http.service import RequestHead, Service
from secateur.requests import CompletionRequest
from tests.support.fake_engine import StandingClock
from tests.support.fake_service import CONFIG, FakeService, error_of, wait_for

Own = Callable[..., FakeService]
COMPLETIONS = "/v1/completions"
BODIES = {COMPLETIONS: {"prompt": "a"}, "/v1/responses": {"input": "a"}}


@contextmanager
def waiting(running: FakeService, num: int, **fields: Any) -> Iterator[list[int]]:
    """Let so many requests wait for an engine that does nothing; yield their statuses, which come when it goes on."""
    running.engine.hold.set()
    statuses: list[int] = []
    before, submitted = running.client.num_pending, len(running.engine.submitted)
    threads = [
        threading.Thread(target=lambda: statuses.append(post(running, **fields).status_code)) for _ in range(num)
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: running.client.num_pending == before + num)
    wait_for(lambda: len(running.engine.submitted) == submitted + num)
    try:
        yield statuses
    finally:
        running.engine.hold.clear()
        for thread in threads:
            thread.join()


def post(running: FakeService, path: str = COMPLETIONS, **fields: Any) -> httpx2.Response:
    with running.http() as http:
        return http.post(path, json=BODIES[path] | fields)


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions/", "/v1/responses", "/v1/messages", "/tokenize"])
def test_a_full_queue_refuses_before_the_body_has_come(own: Own, path: str) -> None:
    running = own(max_pending=1)
    host, _, port = running.url.removeprefix("http://").partition(":")
    with waiting(running, 1), socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 5000000\r\n\r\n{{".encode())
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 429")
    counts = [line for line in httpx2.get(f"{running.url}/metrics").text.splitlines() if "http_requests_total{" in line]
    assert any(f'"{path.rstrip("/")}"' in line and '"429"' in line for line in counts), "under its path"


def test_other_paths_are_answered_by_a_full_service(own: Own) -> None:
    running = own(max_pending=1)
    with waiting(running, 1), running.http() as http:
        assert http.post("/detokenize", json={"tokens": [5]}).status_code == 200
        assert [http.get(path).status_code for path in ("/v1/models", "/health", "/metrics")] == [200] * 3
        assert http.get(COMPLETIONS).status_code == 405


def test_retry_after_is_how_long_the_queue_takes(own: Own) -> None:
    running = own(max_pending=12)
    with waiting(running, 12) as statuses:
        assert post(running).headers["Retry-After"] == "1", "nothing is known yet"
        running.client.service_s = 3.0
        # Four run, eight wait; every 3/4 s one ends: the ninth would begin after 6.75 s.
        assert post(running).headers["Retry-After"] == "7"
        running.client.service_s = 300.0
        assert post(running).headers["Retry-After"] == str(MAX_RETRY_AFTER_S)
    assert statuses == [200] * 12


def test_the_average_time_of_requests_is_measured(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that shows a second more with every step."""
    monkeypatch.setattr(engine_client, "time", clock := StandingClock())

    def tick() -> None:
        clock.now += 1

    running = own(script=lambda submit: [[5]] * 4, engine={"before_step": tick})
    assert running.client.service_s == 0
    assert post(running, max_tokens=4).status_code == 200
    assert running.client.service_s == 4
    assert post(running, max_tokens=1).status_code == 200
    assert running.client.service_s == 4 - 3 * engine_client.SERVICE_WEIGHT


def test_fewer_may_wait_while_pages_are_short(own: Own) -> None:
    running = own(max_pending=8)
    with waiting(running, 4):
        running.client.stats.lacks_pages, running.client.stats.num_running = True, 2
        refused = post(running)
        assert refused.status_code == 429 and "4 of at most 4" in error_of(refused)["message"]
        running.client.stats.lacks_pages = False
        with waiting(running, 4) as statuses:
            assert "8 of at most 8" in error_of(post(running))["message"]
        assert statuses == [200] * 4
    running.client.stats.lacks_pages, running.client.stats.num_running = True, 1
    assert post(running, n=8).status_code == 200, "with nobody before it, the pages are free"


# ---- deadlines


def test_a_request_that_would_begin_too_late_is_refused_at_once(own: Own) -> None:
    running = own()
    with waiting(running, 5):
        num_submitted = len(running.engine.submitted)
        running.client.service_s = 4.0
        refused = post(running, first_token_timeout_s=1.9)  # two must end, one a second
        assert refused.status_code == 429 and refused.headers["Retry-After"] == "2"
        assert "first_token_timeout_s" in error_of(refused)["message"]
        assert len(running.engine.submitted) == num_submitted
        with waiting(running, 1, first_token_timeout_s=20) as statuses:
            pass
        assert statuses == [200]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_has_waited_too_long_is_refused_and_never_run(own: Own, path: str, stream: bool) -> None:
    running = own()
    running.engine.hold.set()
    refused = post(running, path, stream=stream, first_token_timeout_s=1)
    assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
    assert error_of(refused)["type"] == "rate_limit_error"
    assert running.client.num_pending == 0
    running.engine.hold.clear()
    wait_for(lambda: running.engine.aborted == [submit.id for submit in running.engine.submitted] != [])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_has_begun_is_finished_however_long_it_takes(own: Own, path: str, stream: bool) -> None:
    """The service's clock is set forward behind each token that has come."""
    seconds = [0.0]

    def pass_time() -> None:
        labels = {"model_name": "fake-model", "replica": "fake-replica"}

        def num_tokens() -> float | None:
            running.service.metrics.render()  # which counts what has come
            return running.service.metrics.registry.get_sample_value("secateur_generation_tokens_total", labels)

        wait_for(lambda: num_tokens() == len(seconds) - 1)
        seconds.append(100.0 * (len(seconds) > 1))

    running = own(script=lambda submit: [[5]] * 4, engine={"before_step": pass_time})
    now = running.loop.time
    running.loop.time = lambda: now() + sum(seconds)  # type: ignore[method-assign]  # it ends with the service
    answer = post(running, path, first_token_timeout_s=50, stream=stream)
    assert answer.status_code == 200 and '"error":{' not in answer.text.replace(" ", "")
    assert sum(seconds) == 300


def test_a_request_whose_time_passed_while_it_was_tokenized_waits_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "time", clock := StandingClock())
    head = RequestHead(request_id="late", arrival=clock.now - 10)
    assert head.wait_s(CompletionRequest(prompt="a", first_token_timeout_s=0.5)) == 0.0
    assert head.wait_s(CompletionRequest(prompt="a", first_token_timeout_s=30.0)) == 20
    assert head.wait_s(CompletionRequest(prompt="a")) is None


def test_a_request_holds_its_places_while_it_is_tokenized(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is admitted once: others are refused in its place meanwhile. A wrong prompt gives the places back."""
    running, tokenize, pending = own(max_pending=8), Service.tokenize, list[int]()

    async def observed(*own: Any) -> list[list[int]]:
        pending.append(running.client.num_pending)
        assert running.service.admission.refusal(8 - pending[-1]) is None
        assert running.service.admission.refusal(9 - pending[-1]) is not None
        return await tokenize(*own)

    monkeypatch.setattr(Service, "tokenize", observed)
    assert post(running, prompt=["a", "b"], n=3).status_code == 200
    assert post(running, prompt=[[99999]]).status_code == 400
    assert pending == [6, 1] and running.client.num_pending == 0


@pytest.mark.parametrize("wrong", [0, -1, 1e9, "5"])
def test_a_wrong_timeout_is_named(http: httpx2.Client, wrong: object) -> None:
    refused = http.post(COMPLETIONS, json={"prompt": "a", "first_token_timeout_s": wrong})
    assert refused.status_code == 400 and error_of(refused)["param"] == "first_token_timeout_s"


# ---- priorities


def test_an_urgent_request_waits_only_for_those_before_it(own: Own) -> None:
    running = own(config=replace(CONFIG, scheduling_policy="priority"))
    with waiting(running, 6, priority=5):
        running.client.service_s = 40.0
        assert post(running, priority=5, first_token_timeout_s=20).status_code == 429
        with waiting(running, 1, priority=4, first_token_timeout_s=20) as statuses:
            pass
        assert statuses == [200]
    assert sorted(submit.priority for submit in running.engine.submitted) == [4, 5, 5, 5, 5, 5, 5]


def test_a_flood_of_less_urgent_requests_does_not_refuse_an_urgent_one(own: Own) -> None:
    running = own(config=replace(CONFIG, scheduling_policy="priority"), max_pending=4)
    with waiting(running, 4, priority=5):
        refused = post(running, priority=5)
        assert refused.status_code == 429 and "4 of at most 4 requests come before" in error_of(refused)["message"]
        with waiting(running, 4, priority=1) as urgent:
            refused = post(running, priority=-9)
            assert refused.status_code == 429 and "8 of at most 8 requests are pending" in error_of(refused)["message"]
        assert urgent == [200] * 4


@pytest.mark.parametrize("path", BODIES)
def test_a_priority_is_refused_where_arrival_decides(http: httpx2.Client, path: str) -> None:
    body = BODIES[path]
    refused = http.post(path, json=body | {"priority": 1})
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "priority" and "--scheduling-policy priority" in refused.text
    assert http.post(path, json=body | {"priority": 2**63}).status_code == 400
    assert http.post(path, json=body | {"priority": 0}).status_code == 200
