"""API keys from the command line or a file, and headers with arbitrary bytes."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from cluster.http.api_keys import KeyFile
from tests.support.fake_service import FakeService, error_of


def status(http: httpx2.Client, authorization: str | None) -> int:
    headers = {} if authorization is None else {"Authorization": authorization}
    return http.get("/v1/models", headers=headers).status_code


def test_generation_models_and_server_info_need_a_key(own: Callable[..., FakeService]) -> None:
    running = own(api_key="sesame")
    with running.http() as http:
        for path in ("/v1/models", "/server_info", "/v1/models/fake-model"):
            assert http.get(path).status_code == 401
            assert http.get(path, headers={"Authorization": "Bearer sesam"}).status_code == 401
            assert http.get(path, headers={"Authorization": "Bearer sesame"}).status_code == 200
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            response = http.post(path, json={"prompt": "a"})
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
            assert response.headers["WWW-Authenticate"] == "Bearer"
        assert http.get("/health").status_code == 200
        assert http.get("/metrics").status_code == 200


def test_a_key_may_come_as_anthropics_clients_send_it(own: Callable[..., FakeService]) -> None:
    with own(api_key="sesame").http() as http:
        for path in ("/v1/models", "/v1/messages"):
            response = http.get(path, headers={"x-api-key": "sesam"})
            assert response.status_code == 401 and error_of(response)["type"] == "authentication_error"
            assert http.get(path, headers={"x-api-key": "sesame"}).status_code != 401
        refused = http.post("/v1/messages", json={})
        assert refused.json().keys() == {"type", "error"} and refused.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("authorization", "expected"),
    [
        ("Bearer sesame", 200),
        ("bearer sesame", 200),
        ("BEARER sesame", 200),
        ("bEaReR   sesame", 200),
        ("Bearer Sesame", 401),
        ("Bearer sesame2", 401),
        ("Bearersesame", 401),
        ("Basic sesame", 401),
        ("sesame", 401),
        ("Bearer", 401),
        ("", 401),
        (None, 401),
    ],
)
def test_the_scheme_is_case_insensitive_and_the_key_is_not(
    own: Callable[..., FakeService], authorization: str | None, expected: int
) -> None:
    with own(api_key="sesame").http() as http:
        assert status(http, authorization) == expected


def test_a_key_file_is_reread_at_every_request(
    own: Callable[..., FakeService], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("first\n\n  second  \r\n")
    with own(api_keys=KeyFile(file)).http() as http:

        def valid() -> list[str]:
            return [key for key in ("first", "second", "third") if status(http, f"Bearer {key}") == 200]

        assert valid() == ["first", "second"]
        file.write_text("third\nsecond\n")  # the same size in the same moment
        assert valid() == ["second", "third"]
        (tmp_path / "new").write_text("first")
        os.replace(tmp_path / "new", file)
        assert valid() == ["first"]
        file.unlink()
        assert valid() == ["first"]  # one that cannot be read says nothing about its keys
        assert caplog.text.count("cannot read") == 1 and "the keys read last are kept" in caplog.text
        file.write_text("one key\n")
        assert valid() == ["first"]
        file.write_text("\n")
        assert valid() == []  # one without any does
        file.write_text("second")
        assert valid() == ["second"]
    assert not {"first", "second", "third"} & set(caplog.text.split())


def raw(running: FakeService, *headers: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send a completion with these raw headers; return status, headers and body."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: here", b"Connection: close", *headers]
    lines += [b"Content-Length: %d" % len(body), b"", body]
    with socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1])), timeout=20) as connection:
        connection.sendall(b"\r\n".join(lines))
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in rest), content


JSON = b"Content-Type: application/json"
BEYOND_ASCII = (b"\xe9", b"\xc3\xa9", b"\xff\xfe", b"mine-\x80")


@pytest.mark.parametrize("given", [*BEYOND_ASCII, b"a b", b"\t", b"x" * 513, b""])
def test_an_invalid_request_id_is_replaced(service: FakeService, given: bytes) -> None:
    code, headers, content = raw(service, JSON, b"X-Request-ID: " + given)
    assert (code, json.loads(content)["object"]) == (200, "text_completion")
    assert headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("value", BEYOND_ASCII)
@pytest.mark.parametrize("name", [b"Authorization", b"Accept", b"User-Agent", b"Cookie", b"traceparent", b"Origin"])
def test_an_unrelated_non_ascii_header_has_no_effect(service: FakeService, name: bytes, value: bytes) -> None:
    code, headers, content = raw(service, JSON, name + b": " + value)
    assert (code, headers["content-type"], json.loads(content)["object"]) == (
        200,
        "application/json",
        "text_completion",
    )


@pytest.mark.parametrize("value", BEYOND_ASCII)
def test_a_non_ascii_key_gets_an_openai_error(
    own: Callable[..., FakeService], service: FakeService, value: bytes
) -> None:
    code, _, content = raw(service, b"Content-Type: text/" + value)
    assert (code, json.loads(content)["error"]["type"]) == (400, "invalid_request_error")
    code, _, content = raw(own(api_key="sesame"), JSON, b"Authorization: Bearer " + value)
    assert (code, json.loads(content)["error"]["code"]) == (401, "invalid_api_key")


def test_a_non_ascii_key_is_sent_as_utf_8(own: Callable[..., FakeService]) -> None:
    assert raw(own(api_key="clé"), JSON, "Authorization: Bearer clé".encode())[0] == 200
