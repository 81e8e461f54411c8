"""Streams of server-sent events, read by OpenAI's clients and ours."""

from __future__ import annotations

import itertools
import json
import pickle
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx2
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

from cluster.openai.direct import EXTENSION, DirectWriter, direct_writer
from cluster.openai.streaming import EventStream
from cluster.text.tokenizer import Tokenizer
from secateur import AsyncClient, Client
from tests.support.fake_service import ANSWER, FakeService, stream

# Streams


def test_all_chunks_of_a_stream_have_the_same_created_time(
    own: Callable[..., FakeService], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = itertools.count(1_800_000_000)
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    with own().http() as http:
        *chunks, _ = stream(http, "/v1/completions", prompt="a", max_tokens=64)
    assert len(chunks) >= 3
    assert len({chunk["created"] for chunk in chunks}) == 1


def test_a_chat_stream_has_openais_format(http: httpx2.Client) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    *chunks, usage, done = stream(
        http, "/v1/chat/completions", messages=messages, stream_options={"include_usage": True}
    )
    assert done == "[DONE]"
    parsed = [ChatCompletionChunk.model_validate(chunk) for chunk in chunks]
    assert parsed[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in parsed[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in parsed) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in parsed] == [None] * (len(parsed) - 1) + ["stop"]
    assert len({chunk.id for chunk in parsed}) == 1
    assert usage["choices"] == []
    assert ChatCompletionChunk.model_validate(usage).usage.completion_tokens > 0


def test_a_completion_stream_has_every_choice(http: httpx2.Client) -> None:
    *chunks, done = stream(http, "/v1/completions", prompt=["a", "b"], max_tokens=64)
    texts = ["", ""]
    for chunk in chunks:
        assert chunk["object"] == "text_completion"
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [ANSWER, ANSWER]
    assert done == "[DONE]"


def test_a_step_is_one_event_that_does_not_wait_for_the_next(
    own: Callable[..., FakeService], tokenizer: Tokenizer
) -> None:
    """The engine runs a step when its client has the event of the step before."""
    ids, is_read = tokenizer.encode("one two three four five six"), threading.Semaphore(1)
    steps = [ids[:2], ids[2:4], ids[4:]]
    running = own(engine={"before_step": lambda: is_read.acquire(timeout=60)}, script=lambda submit: list(steps))
    texts = []
    with running.http() as http:
        body = {"prompt": "x", "max_tokens": 64, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                    is_read.release()
    assert texts == [tokenizer.decode(step) for step in steps]


def test_every_chunk_may_report_its_choices_usage(http: httpx2.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, totals, _ = stream(
        http, "/v1/completions", prompt=["a", "b c"], n=2, temperature=1, max_tokens=12, stream_options=options
    )
    for index, num_prompt in enumerate([1, 1, 2, 2]):
        usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in usages] == [3, 6, 9, 12]
        assert {usage["prompt_tokens"] for usage in usages} == {num_prompt}
    assert totals["usage"]["completion_tokens"] == 48
    assert totals["usage"]["prompt_tokens"] == 3


def test_every_chunk_of_a_chat_may_report_usage(http: httpx2.Client) -> None:
    """The opening chunk too: clients read `chunk.usage.prompt_tokens` of every chunk."""
    asked = {"messages": [{"role": "user", "content": "Hi"}], "n": 2, "max_tokens": 6}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, totals, _ = stream(http, "/v1/chat/completions", **asked, stream_options=options)
    prompt = totals["usage"]["prompt_tokens"]
    for index in (0, 1):
        usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in usages] == [0, 3, 6]
        assert {usage["prompt_tokens"] for usage in usages} == {prompt}
        assert [usage["total_tokens"] for usage in usages] == [prompt, prompt + 3, prompt + 6]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_is_streamed_on_request_only(service: FakeService, path: str) -> None:
    asked = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    options = {"include_usage": False, "continuous_usage_stats": True}
    with service.http() as http:
        with http.stream("POST", path, json={**asked, "stream": True, "stream_options": options}) as response:
            assert response.headers["x-secateur-ignored"] == "stream_options.continuous_usage_stats"
            assert "usage" not in response.read().decode()
        *chunks, totals, _ = stream(http, path, **asked, stream_options={"continuous_usage_stats": True})
    assert all("usage" in chunk for chunk in chunks) and totals["choices"] == [] and totals["usage"]
    assert "speculative" not in totals, "statistics were not asked for"


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False, "zeta": 1}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_service_may_stream_usage_unasked(own: Callable[..., FakeService], path: str, options: Any) -> None:
    asked = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = {**asked, "max_tokens": 6, "stream_options": options}
    with own(forces_usage=True).http() as http:
        *chunks, totals, _ = stream(http, path, **body)
        with http.stream("POST", path, json={**body, "stream": True}) as response:
            ignored = response.headers.get("x-secateur-ignored")
            ids = [line.removeprefix("id: ") for line in response.iter_lines() if line.startswith("id: ")]
        again = {"Last-Event-ID": ids[-1]}
        with http.stream("POST", path, json={**body, "stream": True}, headers=again) as response:
            assert response.status_code == 200 and "usage" not in response.read().decode(), "the client has it"
        whole = http.post(path, json={**asked, "max_tokens": 6}).json()
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-2:] == [3, 6]
    assert totals["choices"] == [] and totals["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 6
    assert ignored == ("stream_options.zeta" if options else None)


def test_a_stream_and_the_whole_answer_agree(http: httpx2.Client) -> None:
    whole = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 64, "stop": "x +"}).json()
    chunks = stream(http, "/v1/completions", prompt="a", max_tokens=64, stop="x +")[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]


def test_statistics_end_a_stream(http: httpx2.Client) -> None:
    *_, last, done = stream(http, "/v1/completions", prompt="a", return_speculative_stats=True)
    assert last["speculative"]["num_drafts"] == 2
    assert done == "[DONE]"


def test_serves_proxy_can_send_a_scope_to_its_replica() -> None:
    writer: Any = DirectWriter(object(), object())  # type: ignore[arg-type]
    scope = pickle.loads(pickle.dumps({"extensions": {EXTENSION: writer}}))
    assert scope == {"extensions": {EXTENSION: None}} and direct_writer(scope) is None


# Clients


def test_openais_client_reads_our_streams(service: FakeService) -> None:
    client = OpenAI(base_url=f"{service.url}/v1", api_key="unused")
    assert client.models.list().data[0].id == "fake-model"
    chunks = client.chat.completions.create(
        model="fake-model",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        extra_body={"min_p": 0.1, "speculative": {"enabled": False}},
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER


def test_our_client_reads_our_streams(service: FakeService) -> None:
    with Client(service.url) as client:
        assert client.health()
        assert client.complete("def", max_tokens=64).text == ANSWER
        assert "".join(chunk.text for chunk in client.stream_chat("Hi")) == ANSWER
        assert client.detokenize(client.tokenize("def f").tokens).prompt == "def f"
        answer = client.chat("Hi", n=2, logprobs=True, top_logprobs=1)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.choices[1].logprobs.content[0].top_logprobs[0].logprob == -0.5
        chunks = client.stream_complete("def", max_tokens=64, logprobs=0)
        assert sum(len(chunk.choices[0].logprobs.tokens) for chunk in chunks if chunk.choices[0].logprobs) > 0


async def test_many_clients_at_once_get_their_own_answers(service: FakeService) -> None:
    import asyncio

    async with AsyncClient(service.url) as client:
        answers = await asyncio.gather(*(client.complete("def", max_tokens=64) for _ in range(24)))
    assert all(answer.text == ANSWER for answer in answers)


async def test_a_broken_stream_closes_its_sources_at_once() -> None:
    """It does not wait until the last reference is dropped, which a traceback may hold."""
    closed = []

    async def endless(name: str, source: AsyncGenerator[str] | None = None) -> AsyncGenerator[str]:
        try:
            while True:
                yield name if source is None else await anext(source)
        finally:
            closed.append(name)

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.body":
            raise OSError("the client has left")

    pieces = endless("pieces")
    events = endless("events", pieces)
    with pytest.raises(OSError, match="has left"):
        await EventStream(events, pieces, {}).stream_response(send)
    assert closed == ["events", "pieces"]
