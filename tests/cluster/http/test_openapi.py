"""The OpenAPI document declares exactly the errors that routes send, and describes every field of a request."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import jsonschema
import pytest

import secateur
from cluster.http.limits import MAX_BODY_BYTES
from cluster.text.tokenizer_pool import TokenizerPoolDown, TokenizerPoolFull
from secateur.batches_api import CreateBatchRequest
from secateur.messages_api import CountTokensRequest, MessagesError, MessagesRequest
from secateur.requests import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from secateur.responses import ErrorResponse
from secateur.responses_api import ResponsesRequest
from tests.support.fake_service import FakeService, wait_for

KEY = {"Authorization": "Bearer sesame"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 99},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
MODELS = (
    CompletionRequest,
    ChatCompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
    CreateBatchRequest,
)


def document_of(http: httpx2.Client) -> dict[str, Any]:
    return http.get("/openapi.json").raise_for_status().json()


def errors_of(document: dict[str, Any], path: str, method: str) -> set[int]:
    return {int(status) for status in document["paths"][path][method]["responses"]} - {200}


@contextmanager
def full(running: FakeService) -> Iterator[None]:
    """Let one request be pending."""
    running.engine.hold.set()
    with running.http() as http:
        waiting = threading.Thread(target=lambda: http.post("/v1/completions", json={"prompt": "a"}, headers=KEY))
        waiting.start()
        wait_for(lambda: running.client.num_pending == 1)
        yield
        running.engine.hold.clear()
        waiting.join()


def error_of(path: str) -> type[ErrorResponse | MessagesError]:
    return MessagesError if path.startswith("/v1/messages") else ErrorResponse


def a_bug(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a bug")


def test_the_document_names_the_service_and_its_version(http: httpx2.Client) -> None:
    assert document_of(http)["info"] == {"title": "Secateur", "version": secateur.__version__}


def test_routes_with_a_body_send_the_errors_that_the_document_declares(
    own: Callable[..., FakeService], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = own(api_key="sesame", max_pending=1)
    service, sent = running.service, {path: set[int]() for path in BODIES}
    admitted = BODIES.keys() - {"/detokenize"}
    with running.http(headers=KEY) as http:
        document = document_of(http)

        def send(path: str, expected: int, *, headers: dict[str, str] | None = None, **body: Any) -> None:
            response = http.post(path, json=BODIES[path] | body, headers=headers or {})
            assert response.status_code == expected, (path, response.text)
            error_of(path).model_validate(response.json())
            declared = document["paths"][path]["post"]["responses"][str(expected)]
            assert {name.lower() for name in declared.get("headers", {})} <= response.headers.keys()
            sent[path].add(expected)

        for path in BODIES:
            send(path, 400, prompt=5, messages=5, tokens=5, input=5)
            send(path, 401, headers={"Authorization": "Bearer wrong"})
            send(path, 404, model="another")
            response = http.post(path, content=b" " * (MAX_BODY_BYTES + 1))
            assert error_of(path).model_validate(response.json()) and response.status_code == 413
            sent[path].add(413)
            with monkeypatch.context() as broken:
                broken.setattr(service, "check_body", a_bug)
                send(path, 500)
        for path in ("/v1/completions", "/v1/chat/completions"):
            stream = http.post(path, json=BODIES[path] | {"stream": True}).text
            ids = [line.removeprefix("id: ") for line in stream.splitlines() if line.startswith("id: ")]
            first = next(id for id in ids if ":0~" not in id)  # behind the first tokens
            other = re.sub("~[0-9a-f]{8}", "~00000000", first)
            send(path, 409, headers={"Last-Event-ID": other}, stream=True)
        with full(running):
            for path in admitted:
                send(path, 429)
        for error, status in ((TokenizerPoolFull("full"), 429), (TokenizerPoolDown("down"), 503)):
            with monkeypatch.context() as broken:

                async def decode(ids: Any, error: Exception = error) -> str:
                    raise error

                broken.setattr(service.tokenizer_pool, "decode", decode)
                send("/detokenize", status)
        running.engine.die()
        wait_for(lambda: running.client.dead is not None)
        for path in admitted:
            send(path, 503)
    assert sent == {path: errors_of(document, path, "post") for path in BODIES}


def test_routes_without_a_body_declare_their_errors(own: Callable[..., FakeService]) -> None:
    running = own(api_key="sesame", admin_api_key="boss", has_tokenizer_info=True)
    with running.http() as http:
        document = document_of(http)
        declared = {
            (path, method): errors_of(document, path, method)
            for path, operations in document["paths"].items()
            for method in operations
            if path not in BODIES
        }
        assert declared == {
            ("/v1/models", "get"): {401},
            ("/v1/models/{model}", "get"): {401, 404},
            ("/v1/responses/{id}", "get"): {401, 404},
            ("/v1/responses/{id}", "delete"): {401, 404},
            ("/v1/responses/{id}/cancel", "post"): {400, 401, 404},
            ("/v1/responses/{id}/input_items", "get"): {400, 401, 404},
            ("/v1/files", "post"): {400, 401, 404, 413},
            ("/v1/files", "get"): {400, 401, 404},
            ("/v1/files/{id}", "get"): {401, 404},
            ("/v1/files/{id}", "delete"): {401, 404, 409},
            ("/v1/files/{id}/content", "get"): {401, 404},
            ("/v1/batches", "post"): {400, 401, 404, 413},
            ("/v1/batches", "get"): {400, 401, 404},
            ("/v1/batches/{id}", "get"): {401, 404},
            ("/v1/batches/{id}/cancel", "post"): {401, 404, 409},
            ("/tokenizer_info", "get"): {401},
            ("/server_info", "get"): {401},
            ("/health", "get"): {503},
            ("/ping", "get"): {503},
            ("/ping", "post"): {503},
            ("/admin/drafter", "post"): {400, 401, 404, 503},
            ("/admin/drafter", "get"): {401, 404, 503},
            ("/load", "get"): set(),
            ("/metrics", "get"): set(),
            ("/version", "get"): set(),
        }
        assert http.get("/v1/models/another", headers=KEY).status_code == 404
        running.engine.die()
        wait_for(lambda: running.client.dead is not None)
        for (path, method), errors in declared.items():
            response = http.request(method, path.replace("{model}", "fake-model"))
            expected = {401} & errors or {503} & errors or {200}
            assert {response.status_code} == expected, path
            if response.status_code != 200:
                ErrorResponse.model_validate(response.json())


@pytest.mark.parametrize("key", [None, "sesame"])
def test_api_keys_are_declared_where_they_are_needed(own: Callable[..., FakeService], key: str | None) -> None:
    with own(api_key=key).http() as http:
        document = document_of(http)
    secured = {path for path, own in document["paths"].items() if any("security" in op for op in own.values())}
    stored = ("/v1/responses/{id}", "/v1/responses/{id}/cancel", "/v1/responses/{id}/input_items")
    batches = (
        "/v1/files",
        "/v1/files/{id}",
        "/v1/files/{id}/content",
        "/v1/batches",
        "/v1/batches/{id}",
        "/v1/batches/{id}/cancel",
    )
    assert secured == (
        {*BODIES, *stored, *batches, "/v1/models", "/v1/models/{model}", "/server_info"} if key else set()
    )
    assert ("securitySchemes" in document["components"]) == bool(key)
    assert (401 in errors_of(document, "/v1/completions", "post")) == bool(key)


def test_the_document_declares_no_status_that_is_never_sent(http: httpx2.Client) -> None:
    document = document_of(http)
    assert not [path for path, own in document["paths"].items() if any("422" in op["responses"] for op in own.values())]
    assert not {"HTTPValidationError", "ValidationError"} & document["components"]["schemas"].keys()
    assert document == document_of(http)


def test_every_field_of_a_request_is_described(http: httpx2.Client) -> None:
    document = document_of(http)
    pending, seen = [model.__name__ for model in MODELS], set[str]()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        for field, schema in document["components"]["schemas"][name].get("properties", {}).items():
            assert len(schema.get("description", "")) > 8, f"{name}.{field}"
            pending += references(schema)
    assert {"Speculative", "StreamOptions", "ChatMessage", "ContentPart"} <= seen


def references(schema: Any) -> Iterator[str]:
    match schema:
        case {"$ref": str(name)}:
            yield name.rpartition("/")[2]
        case dict():
            for value in schema.values():
                yield from references(value)
        case list():
            for value in schema:
                yield from references(value)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_every_event_of_a_stream_is_declared(http: httpx2.Client, path: str) -> None:
    declared = document_of(http)["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    text = http.post(path, json=BODIES[path] | {"stream": True}, headers=KEY).raise_for_status().text
    events = [dict(line.split(": ", 1) for line in event.splitlines()) for event in text.strip().split("\n\n")]
    assert len(events) > 2
    for event in events:
        jsonschema.validate(event, declared["itemSchema"])
    assert {name for event in events for name in event} == {"data", "id" if path.endswith("completions") else "event"}


def test_answers_and_streams_are_declared(http: httpx2.Client) -> None:
    paths = document_of(http)["paths"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        declared = paths[path]["post"]["responses"]["200"]["content"]
        assert declared.keys() == {"application/json", "text/event-stream"}
    assert paths["/metrics"]["get"]["responses"]["200"]["content"].keys() == {"text/plain"}
    assert http.get("/metrics").headers["content-type"].startswith("text/plain")
