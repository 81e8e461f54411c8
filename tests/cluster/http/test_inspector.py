"""The page at / needs no key, comes as one file, and its policy lets it talk to its own host alone."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable

import httpx2

from cluster.http.inspector import _PAGE
from secateur.requests import CompletionRequest
from secateur.speculative import Speculative
from tests.support.fake_service import FakeService


def test_the_page_needs_no_key_and_its_requests_do(own: Callable[..., FakeService]) -> None:
    with own(api_key="secret").http() as http:
        page = http.get("/")
        assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        assert http.get("/server_info").status_code == http.post("/v1/completions", json={}).status_code == 401


def test_only_the_page_s_own_script_and_style_run(http: httpx2.Client) -> None:
    page = http.get("/")
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        [content] = re.findall(f"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert page.headers["x-request-id"] != http.get("/").headers["x-request-id"]


def test_the_page_brings_everything_and_writes_no_markup() -> None:
    html = _PAGE.read_text()
    assert not re.findall(r"(?:src|href)=\"(?!data:)|https?://|@import|url\(", html)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bon\w+=\"|style=\"", html)


def test_the_page_names_parameters_as_the_interface_does() -> None:
    named = set(re.findall(r"<code>(\w+)</code>", _PAGE.read_text()))
    assert len(named) > 6 and named <= CompletionRequest.model_fields.keys() | Speculative.model_fields.keys()
