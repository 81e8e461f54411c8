"""Prompts of every size and kind: limits of tokenizing, template variables, and waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

import cluster.text.tokenizer_pool
from cluster.system.processes import is_running
from cluster.text.tokenizer import Tokenizer
from cluster.text.tokenizer_pool import TokenizerPool
from tests.support.fake_service import FakeService, error_of, wait_for
from tests.support.looping import FOREVER, looping_model

CHAT = "/v1/chat/completions"
HI = {"role": "user", "content": "hi"}
MOST = 2048 * 32
"""Characters: the context times the longest token."""


@pytest.fixture(scope="module")
def looping(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(str(looping_model(tmp_path_factory.mktemp("looping"))))


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the methods called in the tokenizer workers."""
    asked: list[str] = []
    work = TokenizerPool._do

    async def noted(self: TokenizerPool, method: str, *args: Any, **options: Any) -> Any:
        asked.append(method)
        return await work(self, method, *args, **options)

    monkeypatch.setattr(TokenizerPool, "_do", noted)
    return asked


# Templates


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("chat_template", "X {{ 7*7 }}", "the model's own chat template is used; it cannot be replaced per request"),
        ("add_generation_prompt", True, "write it as a field of the request"),
        ("continue_final_message", True, "write it as a field of the request"),
        ("messages", [HI], "write it as a field of the request"),
        ("conversation", [HI], "write messages as a field of the request"),
        ("conversations", [[HI]], "write messages as a field of the request"),
        ("tools", [], "write it as a field of the request"),
        ("documents", [], "write it as a field of the request"),
        ("tokenize", True, "remove it"),
        ("return_dict", True, "remove it"),
        ("return_tensors", "pt", "remove it"),
        ("tokenizer_kwargs", {}, "remove it"),
        ("sanitize_control_tokens", True, "remove it"),
        ("padding", True, "remove it"),
        ("truncation", True, "remove it"),
        ("max_length", 1, "remove it"),
        ("return_assistant_tokens_mask", True, "remove it"),
        ("eos_token", "X", "remove it"),
        ("self", 1, "remove it"),
    ],
)
def test_template_variables_cannot_replace_arguments(
    http: httpx2.Client, jobs: list[str], name: str, value: Any, instead: str
) -> None:
    body = {"messages": [HI], "max_tokens": 1, "chat_template_kwargs": {"thinking": False, name: value}}
    response = http.post(CHAT, json=body)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, "chat_template_kwargs")
    assert error["message"].startswith(f"chat_template_kwargs.{name}: ") and instead in error["message"]
    assert not jobs


def test_every_rendering_argument_is_reserved(http: httpx2.Client, tokenizer: Tokenizer) -> None:
    for name in tokenizer.template_arguments:
        response = http.post(CHAT, json={"messages": [HI], "chat_template_kwargs": {name: 1}})
        assert response.status_code == 400
        assert error_of(response)["message"].startswith(f"chat_template_kwargs.{name}: ")


def test_template_variables_reach_the_template(own: Callable[..., FakeService], looping: Tokenizer) -> None:
    template = looping.path + "/chat_template.jinja"
    before = Path(template).read_text()
    Path(template).write_text("{{ greeting }} {{ messages[0].content }}")
    try:
        running = own(tokenizer=Tokenizer(looping.path), parent=None)
    finally:
        Path(template).write_text(before)
    with running.http() as http:
        body = {
            "messages": [HI],
            "max_tokens": 1,
            "return_token_ids": True,
            "chat_template_kwargs": {"greeting": "Oh,"},
        }
        ids = http.post(CHAT, json=body).json()["prompt_token_ids"]
    assert looping.decode(ids, skip_special_tokens=False) == "Oh, hi"


def test_a_template_that_loops_is_stopped(own: Callable[..., FakeService], looping: Tokenizer) -> None:
    running = own(tokenizer=looping)
    with running.http() as http:
        for path in (CHAT, "/tokenize"):
            response = http.post(path, json={"messages": [FOREVER]})
            assert (response.status_code, error_of(response)["code"]) == (400, "prompt_too_costly")
            assert "took more than 2 s to render" in error_of(response)["message"]
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert http.get("/health").status_code == 200


# Lengths


@pytest.mark.parametrize(
    ("path", "body", "num_chars"),
    [
        ("/v1/completions", {"prompt": "a" * (MOST + 1)}, MOST + 1),
        ("/v1/completions", {"prompt": ["a", "a" * (MOST + 1)]}, MOST + 1),
        ("/tokenize", {"prompt": "a" * (MOST + 1)}, MOST + 1),
        *(
            (path, {"messages": [HI, message]}, MOST + 31)
            for path in (CHAT, "/tokenize")
            for message in (
                {"role": "user", "content": "a" * (MOST - 1)},
                {"role": "a" * (MOST + 1), "content": "hi"},
                {"role": "user", "content": [{"type": "text", "text": "a" * (MOST - 1)}]},
                {"role": "user", "content": "hi", "name": "a" * (MOST - 7)},
                {"role": "user", "content": "hi", "tool_calls": [{"function": {"arguments": "a" * (MOST - 30)}}]},
                {"role": "user", "content": "hi", "a" * (MOST - 4): 0},
            )
        ),
        (CHAT, {"messages": [HI], "chat_template_kwargs": {"note": "a" * (MOST - 17)}}, MOST + 1),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    http: httpx2.Client, jobs: list[str], path: str, body: Any, num_chars: int
) -> None:
    response = http.post(path, json=body)
    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == ("prompt" if "prompt" in body else "messages")
    assert f"{MOST} characters fit into at the most, and the prompt has " in error["message"]
    assert abs(int(error["message"].split("the prompt has ")[1].split(";")[0]) - num_chars) < 64
    assert not jobs


@pytest.mark.parametrize(
    ("path", "field", "given"),
    [
        ("/v1/completions", "prompt", '"{}"'),
        (CHAT, "messages", '[{{"role": "user", "content": "{}"}}]'),
        ("/v1/responses", "input", '"{}"'),
        ("/v1/responses", "input", '[{{"role": "user", "content": "{}"}}]'),
    ],
)
@pytest.mark.parametrize(
    ("text", "words"),
    [(r"\ud800", "half a character"), ("a b c d " * 999, "maximum context length is 2048 tokens and")],
)
def test_what_is_wrong_with_a_text_names_the_field_that_has_it(
    http: httpx2.Client, path: str, field: str, given: str, text: str, words: str
) -> None:
    response = http.post(
        path, content=f'{{"{field}": {given.format(text)}}}', headers={"Content-Type": "application/json"}
    )
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, field) and words in error["message"]


def test_a_text_that_just_fits_is_tokenized(http: httpx2.Client, jobs: list[str]) -> None:
    assert http.post("/tokenize", json={"prompt": "a" * MOST}).json()["count"] > 2048
    response = http.post("/v1/completions", json={"prompt": "a" * MOST})
    assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 2048 tokens and the prompt has" in error_of(response)["message"]
    assert jobs == ["encode"] * 2


def test_the_rendered_text_is_limited_too(own: Callable[..., FakeService], looping: Tokenizer) -> None:
    running = own(tokenizer=looping)
    with running.http() as http:
        for path in (CHAT, "/tokenize"):
            response = http.post(path, json={"messages": [{**HI, "times": MOST}]})
            assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")
            assert f"the prompt has {MOST + 9};" in error_of(response)["message"]


def test_prompts_of_ids_need_no_tokenizer(http: httpx2.Client, jobs: list[str]) -> None:
    assert http.post("/v1/completions", json={"prompt": [[5], [6, 7]], "max_tokens": 1}).status_code == 200
    response = http.post("/v1/completions", json={"prompt": [5] * 100_000})
    assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")
    assert not jobs


# Who waits, who leaves


def test_tokenizing_needs_admission_like_generation(own: Callable[..., FakeService], jobs: list[str]) -> None:
    running = own(max_pending=1)
    running.engine.hold.set()
    with running.http() as http, running.http() as other:
        waiting = threading.Thread(target=lambda: http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}))
        waiting.start()
        wait_for(lambda: running.client.num_pending == 1)
        del jobs[:]
        for body in ({"prompt": "b"}, {"messages": [HI]}):
            response = other.post("/tokenize", json=body)
            assert (response.status_code, error_of(response)["type"]) == (429, "rate_limit_error")
        running.engine.hold.clear()
        waiting.join()
        assert not jobs
        assert other.post("/tokenize", json={"prompt": "b"}).status_code == 200
        running.engine.die()
        wait_for(lambda: running.client.dead is not None)
        assert other.post("/tokenize", json={"prompt": "b"}).status_code == 503


def test_too_many_waiting_texts_get_a_429(
    own: Callable[..., FakeService], looping: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.text.tokenizer_pool, "MAX_WAITING", 1)
    running = own(tokenizer=looping)
    statuses: list[int] = []

    def ask() -> None:
        with running.http() as http:
            statuses.append(http.post(CHAT, json={"messages": [FOREVER]}).status_code)

    asking = [threading.Thread(target=ask) for _ in range(6)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert sorted(statuses) == [400, 400, 400, 429, 429, 429]
    with running.http() as http:
        assert "secateur_requests_rejected_total" in http.get("/metrics").text
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "def f(x):\n" * 300_000}),
        ("/tokenize", {"prompt": "def f(x):\n" * 300_000}),
        ("/tokenize", {"messages": [FOREVER]}),
        (CHAT, {"messages": [FOREVER]}),
        (CHAT, {"messages": [FOREVER], "stream": True}),
        ("/detokenize", {"tokens": [5] * 4_000_000}),
    ],
)
def test_a_disconnect_stops_tokenizing(
    own: Callable[..., FakeService],
    looping: Tokenizer,
    path: str,
    body: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = own(tokenizer=looping, engine={"max_model_len": 1 << 20})
    with running.http() as http:
        tokenizer_pool, begun = running.service.tokenizer_pool, threading.Event()
        ends: list[type[BaseException]] = []
        do = tokenizer_pool._do

        async def noted(*args: Any, **arguments: Any) -> Any:
            begun.set()
            try:
                return await do(*args, **arguments)
            except BaseException as error:
                ends.append(type(error))
                raise

        monkeypatch.setattr(tokenizer_pool, "_do", noted)
        running.leave(path, body, when=begun.is_set)
        wait_for(lambda: ends == [asyncio.CancelledError] and not busy(tokenizer_pool))
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
    assert all(submit.prompt == looping.encode("a") for submit in running.engine.submitted)


def busy(tokenizer_pool: TokenizerPool) -> bool:
    return tokenizer_pool._num_unfinished > 0


def test_a_service_that_cannot_tokenize_is_unhealthy(own: Callable[..., FakeService]) -> None:
    running = own(parent=None)
    (pid,) = running.service.tokenizer_pool.pids
    with running.http() as http:
        assert http.get("/health").status_code == 200
        running.service.tokenizer_pool._parent._process.kill()
        wait_for(lambda: not is_running(pid))
        response = http.get("/health")
        assert response.status_code == 503
        assert "the tokenizing workers do not run" in error_of(response)["message"]
        response = http.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == 503
        assert "Retry-After" in response.headers
        wait_for(lambda: http.get("/health").status_code == 200, 60)  # it helps itself
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_every_route_keeps_a_prompts_last_tokens(http: httpx2.Client, service: FakeService) -> None:
    text, messages = "one two three four five six", [{"role": "user", "content": "one two three four five six"}]
    for path, body in (("/v1/completions", {"prompt": text}), ("/v1/chat/completions", {"messages": messages})):
        whole = http.post("/tokenize", json=body).json()["tokens"]
        for keep in (3, -1, 1000):
            answer = http.post(path, json={**body, "max_tokens": 1, "truncate_prompt_tokens": keep})
            assert service.engine.submitted[-1].prompt == (whole[-3:] if keep == 3 else whole)
            assert answer.json()["usage"]["prompt_tokens"] == len(service.engine.submitted[-1].prompt)
            told = http.post("/tokenize", json={**body, "truncate_prompt_tokens": keep, "return_token_strs": True})
            assert told.json()["tokens"] == service.engine.submitted[-1].prompt
            assert len(told.json()["token_strs"]) == told.json()["count"] == len(told.json()["tokens"])
    for path in ("/v1/completions", "/tokenize"):
        refused = http.post(path, json={"prompt": text, "truncate_prompt_tokens": 2049})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "truncate_prompt_tokens")
        assert "truncate_prompt_tokens=2049 is more than this model's maximum" in error_of(refused)["message"]
