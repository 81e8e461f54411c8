"""A service that limits its API keys and counts under their names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.http import middleware
from cluster.http.api_keys import KeyFile
from cluster.observe.rate_limits import Callers
from tests.support.fake_engine import StandingClock
from tests.support.fake_service import FakeService, error_of

BODY = {"prompt": "a b c", "max_tokens": 6}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> StandingClock:
    """Limits come back on this clock alone."""
    clock = StandingClock()
    monkeypatch.setattr(middleware, "Callers", partial(Callers, clock=clock.monotonic))
    return clock


def post(http: httpx2.Client, key: str, path: str = "/v1/completions", **more: object) -> httpx2.Response:
    return http.post(path, json=BODY | more, headers={"Authorization": f"Bearer {key}"})


def by_key(http: httpx2.Client, metric: str) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        (sample.labels["key"], sample.labels.get("outcome") or sample.labels["type"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"secateur_{metric}_total"
    }


def test_each_key_has_its_own_limits_and_name(
    own: Callable[..., FakeService], tmp_path: Path, clock: StandingClock
) -> None:
    file = tmp_path / "keys"
    file.write_text("s3cret-a name=team-a requests-per-minute=2\ns3cret-b name=team-b\ns3cret-c\n")
    with own(api_keys=KeyFile(file)).http() as http:
        assert [post(http, "s3cret-a").status_code for _ in range(3)] == [200, 200, 429]
        refused = post(http, "s3cret-a", stream=True)
        assert refused.headers["Retry-After"] == "30"
        error = error_of(refused)
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "this API key may use 2 requests per minute; try again in" in error["message"]
        models = http.get("/v1/models", headers={"Authorization": "Bearer s3cret-a"})
        assert models.status_code == 200, "only POST counts"
        assert [post(http, key).status_code for key in ("s3cret-b", "s3cret-c", "wrong")] == [200, 200, 401]
        assert by_key(http, "key_requests") == {
            ("team-a", "accepted"): 2,
            ("team-a", "requests_limited"): 2,
            ("team-b", "accepted"): 1,
            ("unnamed", "accepted"): 1,
        }
        text = http.get("/metrics").text
        assert "s3cret" not in text
        assert 'requests_rejected_total{model_name="fake-model",replica="fake-replica"} 0.0' in text

        file.write_text("s3cret-a name=team-a requests-per-minute=30\n")
        assert post(http, "s3cret-a").status_code == 429, "what was used stays used"
        clock.now += 2
        assert post(http, "s3cret-a").status_code == 200


def test_prompts_and_answers_are_charged(own: Callable[..., FakeService], tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("s3cret name=team tokens-per-minute=40\n")
    with own(api_keys=KeyFile(file)).http() as http:
        usage = post(http, "s3cret", n=2).json()["usage"]
        assert usage["completion_tokens"] == 12
        expected = {("team", "prompt"): usage["prompt_tokens"], ("team", "generation"): 12}
        assert by_key(http, "key_tokens") == expected
        streamed = post(http, "s3cret", stream=True, n=5)
        assert streamed.status_code == 200
        refused = post(http, "s3cret")
        assert refused.status_code == 429 and "40 tokens per minute" in error_of(refused)["message"]
        assert int(refused.headers["Retry-After"]) > 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 6}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 6}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 6}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
def test_every_route_that_computes_counts(
    own: Callable[..., FakeService], tmp_path: Path, path: str, body: dict[str, object]
) -> None:
    file = tmp_path / "keys"
    file.write_text("s3cret name=team requests-per-minute=1\n")
    key = {"Authorization": "Bearer s3cret"}
    with own(api_keys=KeyFile(file)).http() as http:
        assert [http.post(path, json=body, headers=key).status_code for _ in range(2)] == [200, 429]
        charged = by_key(http, "key_tokens")
        assert charged.get(("team", "generation"), 0) == (0 if path.endswith(("/tokenize", "/count_tokens")) else 6)


def test_the_engine_is_told_whose_a_request_is(own: Callable[..., FakeService], tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("s3cret-a\ns3cret-b\n")
    service = own(api_keys=KeyFile(file))
    with service.http() as http:
        assert [post(http, f"s3cret-{key}").status_code for key in "aba"] == [200] * 3
        first, other, again = (submit.tenant for submit in service.engine.submitted)
    assert first == again != other and 0 < min(first, other) and max(first, other) < 1 << 31


def test_the_only_key_of_a_service_has_no_limit(own: Callable[..., FakeService]) -> None:
    with own(api_key="s3cret").http() as http:
        assert {post(http, "s3cret").status_code for _ in range(20)} == {200}
        assert by_key(http, "key_requests") == {("unnamed", "accepted"): 20}
