"""Invalid requests get OpenAI's error with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from cluster.http.limits import HttpLimits
from tests.support.fake_service import FakeService, error_of, wait_for
from workers.config import EngineConfig


def test_a_parameter_that_contradicts_the_models_defaults_is_a_400(own: Callable[..., FakeService]) -> None:
    running = own(sampling_defaults={"temperature": 0.0})
    with running.http() as http:
        response = http.post("/v1/completions", json={"prompt": "a", "n": 2})
        assert (response.status_code, error_of(response)["param"]) == (400, "n")
        assert "n: must be 1 when using greedy sampling" in error_of(response)["message"]
        assert http.post("/v1/completions", json={"prompt": "a", "n": 2, "temperature": 1}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "n": 2, "temperature": 0}, "n"),
        ({"prompt": "a", "n": 33}, "n"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "top_logprobs": 2}, "top_logprobs"),
        ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"five": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"2048": 1}}, "logit_bias"),
        ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
        ({"prompt": "a", "allowed_token_ids": [2048]}, "allowed_token_ids"),
        ({"prompt": "a", "allowed_token_ids": [0, 2], "min_tokens": 1}, "allowed_token_ids"),
        ({"prompt": "a", "bad_words": [""]}, "bad_words"),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
        ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
        ({"prompt": "a", "guided_json": {}}, "guided_json"),
        ({"prompt": "a", "max_tokens": 2048}, "max_tokens"),
        ({"prompt": [5] * 2048}, "prompt"),
        ({"prompt": "a", "speculative": {"num_speculative_tokens": 17}}, "speculative"),
        ({"prompt": "a", "speculative": {"acceptance": "exact"}}, "speculative"),
        ({"prompt": "a", "speculative": {"enabeld": True}}, "speculative"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "request_id": "mine\nsomebody else's line"}, "request_id"),
        ({"prompt": ["a"] * 33}, "prompt"),
    ],
)
def test_a_wrong_request_is_a_400_that_names_the_parameter(http: httpx2.Client, body: Any, param: str) -> None:
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "wizard", "content": "a"}, "messages.0.role: 'wizard' is unknown"),
        ({"role": "user"}, "messages.0.content: a message of the role 'user' needs"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages.0.content: must be a text"),
    ],
)
def test_a_message_invalid_for_openai_is_a_400(
    http: httpx2.Client, path: str, message: dict[str, Any], told: str
) -> None:
    response = http.post(path, json={"messages": [message]})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "messages" and told in error["message"]


def test_a_number_written_as_a_string_is_a_400(http: httpx2.Client) -> None:
    error = error_of(http.post("/v1/completions", json={"prompt": "a", "temperature": "0.5"}))
    assert (error["param"], error["message"]) == ("temperature", "temperature: must be a valid number (got '0.5')")


def test_all_ids_outside_the_vocabulary_are_named(http: httpx2.Client) -> None:
    for param, value in (("logit_bias", {"5000": 1, "7": 1, "6000": 1}), ("stop_token_ids", [5000, 7, 6000])):
        error = error_of(http.post("/v1/completions", json={"prompt": "a", param: value}))
        assert error["param"] == param and "5000, 6000" in error["message"]


def test_too_long_a_request_is_a_400_with_the_numbers(http: httpx2.Client) -> None:
    message = error_of(http.post("/v1/completions", json={"prompt": [5] * 2000, "max_tokens": 100}))["message"]
    assert "2048" in message
    assert "2000" in message
    assert "2100" in message
    assert "at most 48" in message


@pytest.mark.parametrize("content", [b"{", b"[1]", b"null", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 3000])
def test_an_invalid_body_is_a_400(http: httpx2.Client, content: bytes) -> None:
    response = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error_of(response)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body is empty; send a JSON object"),
        (b"[]", "the body must be a JSON object, {...}"),
        (b'{"prompt":}', "the body is not JSON: Expecting value at character 10"),
    ],
)
def test_a_body_that_is_not_an_object_is_a_400_with_advice(http: httpx2.Client, content: bytes, message: str) -> None:
    response = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["message"] == message


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"stop": 5}, "stop: must be a text or a list of texts, at most 64 of up to 1,024 characters"),
        ("completions", {"stop": ["a"] * 65}, "stop: must be a text or a list of texts, at most 64 of"),
        ("completions", {"logit_bias": [1]}, "logit_bias: must be an object, {...} (got [1])"),
        ("completions", {"speculative": 8}, "speculative: must be an object, {...} (got 8)"),
        (
            "completions",
            {"speculative": {"speculative_tree_prune": "off"}},
            "speculative.speculative_tree_prune: is written 'tree_prune' in a request",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            'messages.0.content.0 (image_url): nothing but text is understood; write {"type": "text", "text": ...}, or',
        ),
    ],
)
def test_a_value_of_the_wrong_type_is_a_400_with_the_right_one(
    http: httpx2.Client, path: str, body: dict[str, Any], message: str
) -> None:
    response = http.post(f"/v1/{path}", json={"prompt": "a"} | body)
    assert response.status_code == 400
    assert error_of(response)["message"].startswith(message)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": ["a"] * 16_385}, "prompt: must be a text, a list of texts"),
        ("/v1/completions", {"prompt": [[5]] * 16_385}, "prompt: must be a text, a list of texts"),
        (
            "/v1/completions",
            {"prompt": "a", "logit_bias": {str(id): 500 for id in range(200_000)}},
            "logit_bias: must have at most 1024 entries, not 200000",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 16_385}]},
            'messages.0.content: must be a text or a list of {"type": "text", "text": ...}; nothing but text is '
            "understood, in at most 16,384 parts",
        ),
        *(
            (path, {"messages": [{"role": "user"}] * 16_385}, "messages: must have at most 16384 items, not 16385")
            for path in ("/v1/chat/completions", "/tokenize")
        ),
        ("/detokenize", {"tokens": ["a"] * 200_000}, "tokens.0: must be a valid integer"),
    ],
)
def test_a_list_is_validated_only_up_to_its_bound(
    http: httpx2.Client, path: str, body: dict[str, Any], message: str
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400
    assert error_of(response)["message"].startswith(message)
    assert len(response.content) < 1000


def test_another_content_type_is_a_400_with_the_right_one(http: httpx2.Client) -> None:
    response = http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert response.status_code == 400
    assert "application/json" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("GET", "/v1/models/gpt", 404)],
)
def test_an_unknown_path_gets_an_openai_error(http: httpx2.Client, method: str, path: str, status: int) -> None:
    response = http.request(method, path)
    assert response.status_code == status
    error_of(response)


def test_another_model_is_a_404_that_names_ours(http: httpx2.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "a", "model": "gpt-4"})
    assert response.status_code == 404
    error = error_of(response)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "fake-model" in error["message"]


def test_a_model_may_have_several_names_of_which_answers_have_the_first(
    own: Callable[..., FakeService], tmp_path: Path
) -> None:
    with own(model_ids=("first", "second"), batch_dir=tmp_path).http() as http:
        for name in ("first", "second"):
            assert http.post("/v1/completions", json={"prompt": "a", "model": name}).json()["model"] == "first"
            assert http.get(f"/v1/models/{name}").json()["id"] == name
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["first", "second"]
        error = error_of(http.post("/v1/completions", json={"prompt": "a", "model": "third"}))
        assert "this service has 'first' and 'second'" in error["message"]
        body = {"prompt": "a", "model": "second"}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
        file = {"file": ("in.jsonl", json.dumps(line).encode())}
        id = http.post("/v1/files", data={"purpose": "batch"}, files=file).json()["id"]
        asked = {"input_file_id": id, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = http.post("/v1/batches", json=asked).json()["id"]
        wait_for(lambda: http.get(f"/v1/batches/{batch}").json()["status"] in ("completed", "failed"))
        assert http.get(f"/v1/batches/{batch}").json()["request_counts"]["completed"] == 1


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/embeddings", "need a service for embedding models"),
        ("/v1/embeddings2", "see /openapi.json"),
        ("/v1/responses/compact", "let /v1/responses write a summary, and begin a new conversation with it"),
    ],
)
def test_a_path_of_other_services_says_what_to_do(http: httpx2.Client, path: str, told: str) -> None:
    response = http.post(path, json={"model": "fake-model", "messages": []})
    assert response.status_code == 404
    error = error_of(response)
    assert error["type"] == "not_found_error" and told in error["message"]


def test_an_endless_body_is_a_413(http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.http.middleware.HttpLimits", lambda: HttpLimits(body_bytes=1 << 20))
    response = http.post("/v1/completions", json={"prompt": "a" * (1 << 20)})
    assert response.status_code == 413
    assert error_of(response)["message"] == "the body is larger than 1 MiB; send less at once"
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_body_of_just_the_limit_is_read(http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"prompt": "a", "max_tokens": 1}'
    for limit, status in ((len(body), 200), (len(body) - 1, 413)):
        limits = HttpLimits(body_bytes=limit)
        monkeypatch.setattr("cluster.http.middleware.HttpLimits", lambda own=limits: own)
        headers = {"Content-Type": "application/json"}
        # In pieces, so that the body's size is not announced.
        response = http.post("/v1/completions", content=iter([body[:9], body[9:]]), headers=headers)
        assert response.status_code == status


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("max_tokens", "9" * 4300),
        ("top_logprobs", r'"\ud800"'),
        ("stop_token_ids", f"[{', '.join(100 * ['-1'])}]"),
        ("stop_token_ids", f'["{10_000 * "a"}"]'),
    ],
)
def test_quotes_of_an_invalid_request_are_short_and_encodable(http: httpx2.Client, field: str, text: str) -> None:
    headers = {"Content-Type": "application/json"}
    response = http.post("/v1/completions", content=f'{{"prompt": "a", "{field}": {text}}}', headers=headers)
    assert response.status_code == 400
    assert error_of(response)["param"] == field
    assert len(response.content) < 4000


def test_unknown_fields_are_accepted_and_named(http: httpx2.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "a", "zeta": 1, "alpha\r\nx: y": 2})
    assert response.status_code == 200
    assert "zeta" in response.headers["x-secateur-ignored"]


@pytest.mark.parametrize(("acceptance", "is_named"), [(None, True), ("coupled", True), ("rejection", False)])
def test_draft_probabilities_are_named_as_ineffective_under_coupled(http, acceptance, is_named) -> None:
    speculative = {"enable_draft_probs": False} | ({"acceptance": acceptance} if acceptance else {})
    response = http.post("/v1/completions", json={"prompt": "a", "speculative": speculative})
    assert response.status_code == 200
    assert response.headers.get("x-secateur-ignored") == ("speculative.enable_draft_probs" if is_named else None)


def test_speculative_settings_without_a_drafter_are_a_400(own: Callable[..., FakeService]) -> None:
    running = own(config=EngineConfig(model_path="model", max_num_seqs=4))
    with running.http() as http:
        assert http.post("/v1/completions", json={"prompt": "a", "speculative": {"enabled": False}}).status_code == 200
        response = http.post("/v1/completions", json={"prompt": "a", "speculative": {"enabled": True}})
    assert error_of(response)["param"] == "speculative"


# Keys and ids


def test_the_request_id_comes_back(http: httpx2.Client) -> None:
    assert http.get("/health", headers={"X-Request-ID": "mine-1"}).headers["x-request-id"] == "mine-1"
    drawn = {http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(drawn) == 3
    assert http.get("/nowhere", headers={"X-Request-ID": "mine-2"}).headers["x-request-id"] == "mine-2"
