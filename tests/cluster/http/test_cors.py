"""Scripts of other origins: preflight requests without a key, headers on every answer, none by default."""

from __future__ import annotations

import threading
from collections.abc import Callable

import httpx2
import pytest

from cluster.http.middleware import Cors
from tests.support.fake_service import FakeService, wait_for

HERE, ELSEWHERE = "https://app.example", "https://other.example"
PREFLIGHT = {"Origin": HERE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


def allowed(response: httpx2.Response) -> str | None:
    return response.headers.get("access-control-allow-origin")


def test_without_origins_no_answer_has_a_cors_header(http: httpx2.Client) -> None:
    answers = [
        http.options("/v1/completions", headers=PREFLIGHT),
        http.get("/v1/models", headers={"Origin": HERE}),
        http.get("/", headers={"Origin": HERE}),
    ]
    assert answers[0].status_code == 405
    names = {name for answer in answers for name in answer.headers}
    assert not [name for name in names if name.startswith("access-control") or name == "vary"]


def test_a_preflight_request_needs_no_key(own: Callable[..., FakeService]) -> None:
    with own(api_key="sesame", cors=Cors(origins=[HERE])).http() as http:
        answer = http.options("/v1/completions", headers=PREFLIGHT)
        assert (answer.status_code, allowed(answer)) == (200, HERE)
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == "authorization"
        assert "access-control-allow-credentials" not in answer.headers
        assert http.options("/v1/completions", headers={"Origin": HERE}).status_code == 401  # not a preflight request
        foreign = http.options("/v1/completions", headers=PREFLIGHT | {"Origin": ELSEWHERE})
        assert (foreign.status_code, allowed(foreign)) == (400, None)


def test_answers_errors_and_streams_name_the_origin(own: Callable[..., FakeService]) -> None:
    running = own(api_key="sesame", max_pending=1, cors=Cors(origins=[HERE, "https://second.example"]))
    key = {"Authorization": "Bearer sesame"}
    with running.http(headers={"Origin": HERE}) as http:
        answers = {
            401: http.post("/v1/completions", json={"prompt": "a"}),
            400: http.post("/v1/completions", json={"prompt": "a", "temperature": -1}, headers=key),
            404: http.get("/nowhere", headers=key),
            200: http.post("/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 3}, headers=key),
        }
        running.engine.hold.set()
        waiting = threading.Thread(
            target=lambda: http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}, headers=key)
        )
        waiting.start()
        wait_for(lambda: running.client.num_pending == 1)
        answers[429] = http.post("/v1/completions", json={"prompt": "b"}, headers=key)
        running.engine.hold.clear()
        waiting.join()
        foreign = http.get("/v1/models", headers=key | {"Origin": ELSEWHERE})
    for status, answer in answers.items():
        assert (answer.status_code, allowed(answer), answer.headers["vary"]) == (status, HERE, "Origin")
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "x-secateur-ignored", "retry-after"} == set(exposed)
    assert (foreign.status_code, allowed(foreign)) == (200, None)


def test_an_internal_error_has_the_headers_too(
    own: Callable[..., FakeService], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = own(cors=Cors(origins=[HERE]))
    monkeypatch.setattr(running.service, "card", lambda: 1 / 0)
    with running.http(headers={"Origin": HERE}) as http:
        answer = http.get("/v1/models")
    assert (answer.status_code, allowed(answer)) == (500, HERE)


def test_methods_headers_and_credentials_are_those_allowed(own: Callable[..., FakeService]) -> None:
    cors = Cors(origins=[HERE], methods=["GET"], headers=["X-Mine"], credentials=True)
    with own(cors=cors).http() as http:
        assert http.options("/v1/models", headers=PREFLIGHT).status_code == 400
        mine = {"Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "x-mine"}
        answer = http.options("/v1/models", headers=PREFLIGHT | mine)
        assert answer.status_code == 200 and answer.headers["access-control-allow-credentials"] == "true"


def test_all_origins_leave_the_policy_of_the_inspector_alone(own: Callable[..., FakeService]) -> None:
    with own().http() as plain, own(cors=Cors(origins=["*"])).http(headers={"Origin": HERE}) as http:
        page = http.get("/")
        assert allowed(page) == "*"
        assert page.headers["content-security-policy"] == plain.get("/").headers["content-security-policy"]
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
