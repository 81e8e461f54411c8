"""What a service counts: HTTP responses, the phases and lengths of requests, its own process."""

from __future__ import annotations

import os
from collections.abc import Callable

import httpx2
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from cluster.http import middleware
from tests.support.fake_engine import StandingClock
from tests.support.fake_service import FakeService, wait_for

BODY = {"prompt": "a", "max_tokens": 5}


def samples(http: httpx2.Client, name: str) -> list[Sample]:
    families = text_string_to_metric_families(http.get("/metrics").text)
    return [sample for family in families for sample in family.samples if sample.name == name]


def responses(http: httpx2.Client) -> dict[tuple[str, str, str], float]:
    return {
        (sample.labels["method"], sample.labels["handler"], sample.labels["status"]): sample.value
        for sample in samples(http, "secateur_http_requests_total")
    }


def value(http: httpx2.Client, name: str) -> float:
    [only] = samples(http, name)
    return only.value


def test_every_response_is_counted_by_route_and_status(own: Callable[..., FakeService]) -> None:
    with own(api_key="sesame", root_path="/llm").http() as http:
        key = {"Authorization": "Bearer sesame"}
        http.post("/v1/completions", json=BODY)
        for path in ("/v1/completions", "/llm/v1/completions/"):
            http.post(path, json=BODY, headers=key)
        http.post("/v1/completions", json={"prompt": 1}, headers=key)
        http.get("/v1/models/other", headers=key)
        http.head("/health")
        http.get("/nowhere")
        http.request("PUT", "/health")
        assert responses(http) == {
            ("POST", "/v1/completions", "401"): 1,
            ("POST", "/v1/completions", "200"): 2,
            ("POST", "/v1/completions", "400"): 1,
            ("GET", "/v1/models/{model:path}", "404"): 1,
            ("GET", "/health", "200"): 1,
            ("GET", "none", "404"): 1,
            ("other", "/health", "405"): 1,
        }


def test_clients_cannot_add_series(service: FakeService) -> None:
    with service.http() as http:
        for number in range(20):
            http.get(f"/nowhere/{number}")
            http.get(f"/v1/models/{number}")
            http.request("PUT" if number % 2 else "PATCH", "/health")
        names = {(method, handler) for method, handler, _ in responses(http)}
    assert {handler for _, handler in names} <= {"none", "/v1/models/{model:path}", "/health", "/metrics"}
    assert {method for method, _ in names} <= {"GET", "other"}


def test_a_streamed_response_lasts_until_its_end(
    own: Callable[..., FakeService], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that shows a second more with every step."""
    monkeypatch.setattr(middleware, "time", clock := StandingClock())

    def tick() -> None:
        clock.now += 1

    running = own(script=lambda submit: [[5]] * 4, engine={"before_step": tick})
    with running.http() as http:
        http.post("/v1/completions", json=BODY | {"stream": True})
        assert value(http, "secateur_http_request_duration_seconds_sum") == 4


def test_an_exception_counts_as_a_500(own: Callable[..., FakeService], monkeypatch: pytest.MonkeyPatch) -> None:
    running = own()
    monkeypatch.setattr(running.service.tokenizer_pool, "encode", None)
    with running.http() as http:
        assert http.post("/v1/completions", json=BODY).status_code == 500
        assert responses(http) == {("POST", "/v1/completions", "500"): 1}


def test_the_phases_of_a_request_add_up(own: Callable[..., FakeService]) -> None:
    running = own(script=lambda submit: [[5, 6], [7], [8]], engine={"step_s": 0.05})
    with running.http() as http:
        http.post("/v1/completions", json=BODY | {"max_tokens": 4})
        phases = {
            name: value(http, f"secateur_request_{name}_time_seconds_sum")
            for name in ("prefill", "decode", "inference")
        }
        assert phases["prefill"] + phases["decode"] == pytest.approx(phases["inference"])
        assert phases["inference"] > phases["decode"] > 0
        assert value(http, "secateur_inter_token_latency_seconds_count") == 2
        assert value(http, "secateur_inter_token_latency_seconds_sum") == pytest.approx(phases["decode"])
        assert value(http, "secateur_request_time_per_output_token_seconds_sum") == pytest.approx(phases["decode"] / 3)
        assert phases["inference"] <= value(http, "secateur_e2e_request_latency_seconds_sum")
        assert value(http, "secateur_request_queue_time_seconds_count") == 1
        assert [value(http, f"secateur_request_{name}_sum") for name in
                ("prompt_tokens", "generation_tokens", "params_max_tokens")] == [1, 4, 4]  # fmt: skip


def test_a_request_without_tokens_has_no_phases(own: Callable[..., FakeService]) -> None:
    running = own()
    running.engine.hold.set()
    running.leave("/v1/completions", BODY)
    wait_for(lambda: running.client.num_pending == 0)
    running.engine.hold.clear()
    with running.http() as http:
        assert samples(http, "secateur_request_prefill_time_seconds_count") == []


def test_the_process_is_this_one(service: FakeService) -> None:
    with service.http() as http:
        memory = value(http, "process_resident_memory_bytes")
        [cpu] = samples(http, "process_cpu_seconds_total")
    assert memory == pytest.approx(psutil.Process(os.getpid()).memory_info().rss, rel=0.2)
    assert cpu.labels == {"model_name": "fake-model", "replica": "fake-replica"}
