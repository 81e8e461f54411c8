"""A service under load that loses its engine or its clients; its health, metrics and logs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

import secateur
from cluster.text.detokenizer import IncrementalDetokenizer
from cluster.text.tokenizer import Tokenizer
from tests.support.fake_service import ANSWER, CONFIG, FakeService, error_of, fake_service, wait_for

MODEL = Path(secateur.__file__).parent / "bundled" / "target"

# Load, loss, leaving


def test_too_many_requests_get_a_429_with_retry_after(own: Callable[..., FakeService]) -> None:
    running = own(max_pending=1)
    running.engine.hold.set()
    with running.http() as http, running.http() as other:
        body = {"prompt": "a", "stream": True}
        request = http.build_request("POST", "/v1/completions", json=body)
        first: list[httpx2.Response] = []
        waiting = threading.Thread(target=lambda: first.append(http.send(request)))
        waiting.start()
        wait_for(lambda: running.client.num_pending == 1)
        response = other.post("/v1/completions", json={"prompt": "b"})
        assert response.status_code == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert error_of(response)["type"] == "rate_limit_error"
        running.engine.hold.clear()
        waiting.join()
        assert first[0].status_code == 200
        assert other.post("/v1/completions", json={"prompt": "b"}).status_code == 200
        assert "secateur_requests_rejected_total" in other.get("/metrics").text


def test_requests_tokenized_concurrently_do_not_exceed_the_limit(
    own: Callable[..., FakeService], tokenizer: Tokenizer
) -> None:
    """All are admitted on arrival, but there is room only for the first one that is tokenized."""
    running = own(max_pending=16)
    running.engine.hold.set()
    prompts = ["x = 1\n" * 300] * 16
    codes: list[int] = []

    def post() -> None:
        with running.http() as http:
            codes.append(http.post("/v1/completions", json={"prompt": prompts, "max_tokens": 1}).status_code)

    threads = [threading.Thread(target=post) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(codes) == 3)
    assert running.client.num_pending == 16
    running.engine.hold.clear()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [200, 429, 429, 429]


def test_a_request_that_fails_or_leaves_gives_its_places_back(own: Callable[..., FakeService]) -> None:
    """Places are reserved before the engine has the request; none may stay reserved for ever."""
    running = own(max_pending=4, script=lambda submit: [[1]] * 400, engine={"step_s": 0.05})
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 400, "stream": True}
    with running.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        wait_for(lambda: running.client.num_pending == 4)
    wait_for(lambda: running.client.num_pending == 0)
    running.engine.die()
    wait_for(lambda: running.client.dead is not None)
    with running.http() as http:
        assert http.post("/v1/completions", json=body).status_code == 503
    assert running.client.num_pending == 0


def test_a_dead_engine_is_a_503(own: Callable[..., FakeService]) -> None:
    running = own()
    running.engine.die()
    wait_for(lambda: running.client.dead is not None)
    with running.http() as http:
        response = http.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == 503
        assert "Retry-After" in response.headers
        assert error_of(response)["type"] == "service_unavailable_error"
        assert http.get("/health").status_code == 503


def test_an_engine_that_dies_ends_a_stream_with_an_error(own: Callable[..., FakeService], tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(ANSWER)
    running = own(script=lambda submit: [ids[:3]] + [[ids[3]]] * 500, engine={"step_s": 0.05})
    with running.http() as http:
        body = {"prompt": "a", "max_tokens": 500, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            running.engine.die()
            running.fail("drafter 0 died")
            payloads = [line.removeprefix("data: ") for line in lines if line]
    assert payloads[-1] == "[DONE]"
    assert json.loads(payloads[-2])["error"]["message"] == "the engine is not available: drafter 0 died"


@pytest.mark.parametrize("body", [{"stream": True}, {"stream": False}, {"n": 2}, {"stream": True, "n": 2}])
def test_a_503_names_the_rank_that_died(own: Callable[..., FakeService], body: dict[str, Any]) -> None:
    """As when a rank is killed: the socket closes, and then the watcher names the rank."""
    running = own()
    running.engine.hold.set()
    with running.http() as http:

        def die() -> None:
            wait_for(lambda: running.engine.submitted)
            running.engine.die()
            wait_for(lambda: running.client._loss is not None)
            running.fail("verifier 1 died: the actor died unexpectedly")

        dying = threading.Thread(target=die)
        dying.start()
        response = http.post("/v1/completions", json={"prompt": "a", **body})
        dying.join()
    assert response.status_code == 503
    assert int(response.headers["Retry-After"]) >= 1
    error = error_of(response)
    assert (error["type"], error["code"]) == ("service_unavailable_error", "engine_unavailable")
    assert error["message"] == "the engine is not available: verifier 1 died: the actor died unexpectedly"


def test_a_request_that_fails_in_the_service_counts_as_an_error(
    own: Callable[..., FakeService], monkeypatch: pytest.MonkeyPatch
) -> None:
    def feed(*args: Any) -> str:
        raise RuntimeError("a bug")

    monkeypatch.setattr(IncrementalDetokenizer, "feed", feed)
    with own().http() as http:
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 500
        metrics = http.get("/metrics").text
    ended = {line.partition("finished_reason=")[2].split(",")[0]: line.split()[-1] for line in metrics.splitlines()
             if line.startswith("secateur_request_success_total")}  # fmt: skip
    assert ended == {'"stop"': "0.0", '"length"': "0.0", '"abort"': "0.0", '"error"': "1.0"}


@pytest.mark.parametrize("streamed", [True, False])
def test_a_disconnect_aborts_requests_in_the_engine(
    own: Callable[..., FakeService], tokenizer: Tokenizer, streamed: bool
) -> None:
    running = own(script=lambda submit: [[5]] * 1000, engine={"step_s": 0.02})
    body = {"prompt": ["a", "b"], "max_tokens": 1000, "stream": streamed}
    if streamed:
        with running.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
    else:
        running.leave("/v1/completions", body)
    wait_for(lambda: sorted(running.engine.aborted) == sorted(submit.id for submit in running.engine.submitted))
    assert len(running.engine.aborted) == 2
    assert running.client.num_pending == 0


def test_a_disconnect_while_waiting_removes_the_request(own: Callable[..., FakeService]) -> None:
    running = own()
    running.engine.hold.set()
    running.leave("/v1/completions", {"prompt": "a", "stream": True})
    wait_for(lambda: len(running.engine.aborted) == 1)


# What tells


def test_health_metrics_version_and_info(http: httpx2.Client) -> None:
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 64})
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/version").json()["version"]
    info = http.get("/server_info").json()
    assert info["topology"][0]["role"] == "verifier 0"
    assert info["config"]["draft"]["tree"]["num_speculative_tokens"] == CONFIG.draft.tree.num_speculative_tokens


def test_the_metrics_have_vllms_names(own: Callable[..., FakeService]) -> None:
    running = own(engine={"drafts": True}, script=lambda submit: [[5, 6, 7], [8, 9], [10]])
    with running.http() as http:
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 64})
        text = http.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for stem in (
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_pruned_tokens",
        "spec_decode_num_verified_tokens",
        "spec_decode_num_accepted_tokens",
        "num_preemptions",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "time_to_first_token_seconds",
        "request_time_per_output_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_max_tokens",
        "request_success",
        "prompt_tokens",
        "generation_tokens",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
    ):
        assert f"secateur_{stem}" in families, stem
    assert families["secateur_spec_decode_num_drafts"].samples[0].value == 3
    assert families["secateur_spec_decode_num_pruned_tokens"].samples[0].value == 7
    assert families["secateur_num_preemptions"].samples[0].value == 5
    assert families["secateur_prefix_cache_queries"].samples[0].value == 40
    assert families["secateur_prefix_cache_hits"].samples[0].value == 16
    for kind, expected in (
        ("draft", [10, 5, 1]),
        ("pruned", [4, 2, 1]),
        ("verified", [6, 3]),
        ("accepted", [2, 1]),  # of the answer; the others are the engine's
    ):
        samples = families[f"secateur_spec_decode_num_{kind}_tokens_per_pos"].samples
        assert [(sample.labels["position"], sample.value) for sample in samples] == [
            (str(position), value) for position, value in enumerate(expected)
        ]


def test_every_sample_has_model_and_replica_labels(own: Callable[..., FakeService]) -> None:
    running = own()
    with running.http() as http:
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 64})
        text = http.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.name.split("_")[0] for sample in samples} == {"secateur", "process"}
    assert {(s.labels["model_name"], s.labels["replica"]) for s in samples} == {("fake-model", "fake-replica")}
    # One metric observed here, one read from the engine, as Prometheus reads them.
    assert 'secateur_prompt_tokens_total{model_name="fake-model",replica="fake-replica"} ' in text
    assert 'secateur_engine_steps_total{model_name="fake-model",replica="fake-replica"} ' in text


def test_prompts_are_not_logged(service: FakeService, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with service.http() as http:
        http.post("/v1/completions", json={"prompt": "a very secret prompt", "max_tokens": 3, "temperatur": 1})
    assert "secret" not in caplog.text
    assert "temperatur" in caplog.text


def test_tokenize_renders_chats_too(http: httpx2.Client, tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "return_token_strs": True}
    answer = http.post("/tokenize", json=body).json()
    assert answer["tokens"] == tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048


def test_tokenize_counts_the_tokens_of_a_chat_request(http: httpx2.Client, service: FakeService) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, wor"}]
    for asked in ({}, {"continue_final_message": True}, {"add_generation_prompt": False}, {"add_special_tokens": True}):
        told = http.post("/tokenize", json={"messages": messages, **asked}).json()
        http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1, **asked})
        assert told["tokens"] == service.engine.submitted[-1].prompt
        assert told["token_strs"] is None


def test_tokenize_passes_tools_and_variables_to_the_template(script: Any, tmp_path: Path) -> None:
    folder = copytree(MODEL, tmp_path / "model", ignore=lambda _, names: [n for n in names if "safetensors" in n])
    tools = "{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{{ mood }}" + tools)
    asked = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"mood": "!"}}
    asked["tools"] = [{"type": "function", "function": {"name": "f"}}]
    tokenizer = Tokenizer(str(folder))
    with fake_service(tokenizer, tmp_path, script) as running, running.http() as http:
        assert tokenizer.decode(http.post("/tokenize", json=asked).json()["tokens"]) == "Hi!f"


def test_tokenize_names_ignored_and_unsupported_fields(http: httpx2.Client) -> None:
    for path, body, named in (
        ("/tokenize", {"prompt": "a", "zeta": 1, "continue_final_message": True}, "continue_final_message, zeta"),
        ("/detokenize", {"tokens": [5], "zeta": 1}, "zeta"),
    ):
        response = http.post(path, json=body)
        assert (response.status_code, response.headers["x-secateur-ignored"]) == (200, named)
    response = http.post("/tokenize", json={"prompt": "a", "chat_template": "x"})
    assert (response.status_code, error_of(response)["param"]) == (400, "chat_template")


def test_the_tokenizers_configuration_is_told_on_request_alone(
    own: Callable[..., FakeService], tokenizer: Tokenizer, http: httpx2.Client
) -> None:
    refused = http.get("/tokenizer_info")
    assert (refused.status_code, error_of(refused)["type"]) == (404, "not_found_error")
    assert "/tokenizer_info" not in http.get("/openapi.json").json()["paths"]
    with own(has_tokenizer_info=True, api_key="sesame").http() as allowed:
        assert allowed.get("/tokenizer_info").status_code == 401
        response = allowed.get("/tokenizer_info", headers={"Authorization": "Bearer sesame"})
    info = response.json()
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    assert {key: info[key] for key in config.keys() - {"tokenizer_class"}} == {
        key: value for key, value in config.items() if key != "tokenizer_class"
    }
    assert info["chat_template"] == (MODEL / "chat_template.jinja").read_text()
    assert info["tokenizer_class"] == type(tokenizer._tokenizer).__name__
    end = {"content": "<|endoftext|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    assert info["added_tokens_decoder"]["0"] == end | {"special": True}
    assert str(MODEL) not in response.text and "name_or_path" not in info


def test_detokenizing_an_unknown_id_is_a_400(http: httpx2.Client) -> None:
    assert http.post("/detokenize", json={"tokens": [99999]}).status_code == 400


def test_openapi_json_has_every_route(http: httpx2.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= paths.keys()
