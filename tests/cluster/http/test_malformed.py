"""Malformed and ambiguous HTTP over raw sockets: a clear refusal at once, and never a second, smuggled request."""

from __future__ import annotations

import gzip
import json
import re
import socket
import zlib
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.support.fake_service import FakeService, error_of

PATIENCE_S = 10.0
"""Shorter than every time limit on requests: what is wrong from the start must not wait for one."""
BODY = b'{"prompt": "a"}'
AS_JSON = {"Content-Type": "application/json"}
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


def post(*headers: bytes, body: bytes = BODY) -> bytes:
    """Return a completion request whose framing is in `headers`."""
    head = [b"POST /v1/completions HTTP/1.1", b"Host: a", b"Content-Type: application/json", *headers]
    return b"\r\n".join([*head, b"", body])


AMBIGUOUS = {
    "length and chunks": post(b"Content-Length: 15", b"Transfer-Encoding: chunked", body=CHUNKS),
    "chunks and length": post(b"Transfer-Encoding: chunked", b"Content-Length: 15", body=CHUNKS),
    "two lengths": post(b"Content-Length: 15", b"Content-Length: 3"),
    "lengths in one": post(b"Content-Length: 15, 3"),
    "a signed length": post(b"Content-Length: +15"),
    "a negative length": post(b"Content-Length: -1"),
    "a length in hex": post(b"Content-Length: 0xf"),
    "an endless length": post(b"Content-Length: " + b"9" * 40),
    "a space before the colon": post(b"Content-Length : 15"),
    "a folded header": post(b"Content-Length:\r\n 15"),
    "chunks that are not last": post(b"Transfer-Encoding: chunked, identity", body=CHUNKS),
    "an unknown encoding": post(b"Transfer-Encoding: xchunked", body=CHUNKS),
    "a disguised encoding": post(b"Transfer-Encoding: \x0bchunked", body=CHUNKS),
    "a chunk without a size": post(b"Transfer-Encoding: chunked", body=b"\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "a chunk of a signed size": post(b"Transfer-Encoding: chunked", body=b"-1\r\n" + BODY),
    "a chunk that is longer than its size": post(b"Transfer-Encoding: chunked", body=b"2\r\n" + CHUNKS),
    "lines without returns": post(b"Content-Length: 15").replace(b"\r\n", b"\n"),
    "a zero byte": post(b"X-A: a\x00b", b"Content-Length: 15"),
    "a line break in the path": b"GET /a\rb HTTP/1.1\r\nHost: a\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /version\r\n\r\n",
    "TLS": bytes.fromhex("16030100c6010000c20303") + b"\x00" * 180,
}  # fmt: skip


def answers(service: FakeService, request: bytes) -> bytes:
    """Send a request and return all that comes until the server closes; fail if it does not."""
    host, _, port = service.url.removeprefix("http://").partition(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as sock:
        sock.sendall(request)
        sock.shutdown(socket.SHUT_WR)
        while part := sock.recv(1 << 16):
            received += part
    return received


@pytest.mark.parametrize("request_", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_an_ambiguous_request_is_refused_with_all_that_follows(service: FakeService, request_: bytes) -> None:
    num_before = len(service.engine.submitted)
    received = answers(service, request_ + SMUGGLED)
    assert len(re.findall(rb"HTTP/1\.[01] \d", received)) == 1, received
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"smuggled" not in received
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert len(service.engine.submitted) == num_before


@pytest.fixture
def http(service: FakeService) -> Iterator[httpx2.Client]:
    with service.http(headers={"Content-Type": "application/json"}) as client:
        yield client


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("gzip", gzip.compress(BODY)),
        ("gzip", gzip.compress(b" " * (64 << 20))),
        ("deflate", zlib.compress(BODY)),
        ("zstd", b"\x28\xb5\x2f\xfd\x00"),
        ("br, gzip", gzip.compress(BODY)),
    ],
    ids=["gzip", "a bomb", "deflate", "zstd", "twice"],
)
def test_a_compressed_body_is_refused_by_name(http: httpx2.Client, encoding: str, content: bytes) -> None:
    response = http.post("/v1/completions", content=content, headers={"Content-Encoding": encoding})
    assert response.status_code == 400
    error = error_of(response)
    assert "without Content-Encoding" in error["message"] and error["code"] == "unsupported_encoding"


def test_the_identity_encoding_is_none(http: httpx2.Client) -> None:
    assert http.post("/v1/completions", content=BODY, headers={"Content-Encoding": "identity"}).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        '{"prompt": "é"}'.encode("latin-1"),
        b'{"prompt": "a\x00"}',
        b"\x00" * 64,
        b'{"prompt": "a"} {"prompt": "b"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"max_tokens": ' + b"9" * 100_000 + b', "prompt": "a"}',
        b'{"temperature": NaN, "prompt": "a"}',
        b'{"temperature": 1e999, "prompt": "a"}',
    ],
    ids=["invalid", "surrogate", "latin-1", "control", "zeros", "two", "deep", "digits", "NaN", "infinite"],
)
def test_a_body_that_is_not_json_in_utf_8_is_a_400(http: httpx2.Client, content: bytes) -> None:
    response = http.post("/v1/completions", content=content)
    assert response.status_code == 400
    assert len(error_of(response)["message"]) < 1000


TOOL = {"type": "function", "name": "f"}
MESSAGES = [{"role": "user", "content": "a"}]
BATCH = {"input_file_id": "file-a", "endpoint": "/v1/completions", "completion_window": "24h"}
HALVES: list[tuple[str, dict[str, Any], str | None]] = [
    ("/v1/responses", {"input": "a", "metadata": {"a": "?"}}, "metadata"),
    ("/v1/responses", {"input": "a", "metadata": {"?": "a"}, "stream": True}, "metadata"),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "text", "name": "?"}}}, "text"),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "text"}, "x": ["?"]}, "stream": True}, "text"),
    ("/v1/responses", {"input": "a", "tools": [TOOL | {"parameters": {"?": 1}}]}, "tools"),
    ("/v1/responses", {"input": "a", "tools": [TOOL], "tool_choice": TOOL | {"x": "?"}}, "tool_choice"),
    ("/v1/responses", {"input": [{"type": "reasoning", "x": "?"}, *MESSAGES]}, "input"),
    ("/v1/responses", {"input": "?"}, "input"),
    ("/v1/responses", {"input": "a", "?": 1}, None),
    ("/v1/responses/input_tokens", {"input": "?"}, "input"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "?"}]}, "messages"),
    ("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"x": "?"}}, "chat_template_kwargs"),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1, "system": "?"}, None),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "?"}]}, None),
    ("/v1/completions", {"prompt": ["a", "b?"]}, "prompt"),
    ("/tokenize", {"prompt": "?"}, "prompt"),
    ("/detokenize", {"tokens": [1], "x": "?"}, "x"),
    ("/v1/batches", BATCH | {"input_file_id": "?"}, "input_file_id"),
    ("/v1/batches", BATCH | {"metadata": {"a": "?"}}, "metadata"),
    ("/admin/drafter", {"model": "?"}, "model"),
]


@pytest.mark.parametrize(("path", "body", "param"), HALVES)
def test_half_a_character_is_a_400_that_names_its_field(
    http: httpx2.Client, path: str, body: dict[str, Any], param: str | None
) -> None:
    text = json.dumps(body)
    for half in (rb"\ud800", rb"\uDFFF", b"\xed\xa0\x80", rb"\ud83c\ud83c\udf33"):
        response = http.post(path, content=text.encode().replace(b"?", half), headers=AS_JSON)
        error = error_of(response)
        assert (response.status_code, error.get("param")) == (400, param), response.text
        assert "half a character" in error["message"]
    odd = {"content-type": "Application/JSON"}
    assert http.post(path, content=text.encode().replace(b"?", rb"\ud800"), headers=odd).status_code == 400
    response = http.post(path, content=text.replace("?", "\\ud83c").encode("utf-16"), headers=AS_JSON)
    assert response.status_code == 400
    whole = http.post(path, content=text.encode().replace(b"?", rb"\ud83c\udf33"), headers=AS_JSON)
    assert "half a character" not in whole.text


def test_every_route_with_a_json_body_refuses_half_a_character(http: httpx2.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    routes = {
        path
        for path, methods in paths.items()
        if "application/json" in methods.get("post", {}).get("requestBody", {}).get("content", {})
    }
    assert routes == {path for path, *_ in HALVES}
    for path in routes:
        response = http.post(path, content=rb'{"x": "\ud800"}', headers=AS_JSON)
        assert "half a character" in error_of(response)["message"], path


def test_a_name_with_half_a_character_is_told_before_the_depth_of_its_value(http: httpx2.Client) -> None:
    response = http.post("/tokenize", content=rb'{"\ud800": ' + b"[" * 250 + b"]" * 250 + b"}", headers=AS_JSON)
    assert response.status_code == 400 and error_of(response)["param"] is None


DEEP: list[tuple[str, str, str]] = [
    ("/v1/responses", '{"input": "a", "text": {"x": ?}}', "text"),
    ("/v1/responses", '{"input": "a", "tools": [{"type": "function", "name": "f", "parameters": {"a": ?}}]}', "tools"),
    ("/v1/responses", '{"input": "a", "structured_outputs": {"json": {"const": ?}}}', "structured_outputs"),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a", "x": ?}]}', "messages"),
    (
        "/v1/chat/completions",
        '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": ?}}',
        "chat_template_kwargs",
    ),
    ("/tokenize", '{"prompt": "a", "x": ?}', "x"),
]


@pytest.mark.parametrize(("path", "body", "param"), DEEP)
def test_a_body_may_be_nested_so_deep_and_no_deeper(http: httpx2.Client, path: str, body: str, param: str) -> None:
    def nested(levels: int) -> httpx2.Response:
        return http.post(path, content=body.replace("?", '{"a":' * levels + "[]" + "}" * levels), headers=AS_JSON)

    assert nested(190).status_code == 200 or "nested" not in nested(190).text
    for levels in (200, 255, 300, 500, 800, 950):
        response = nested(levels)
        assert (response.status_code, error_of(response)["param"]) == (400, param)
        assert "more than 200 levels" in error_of(response)["message"]
