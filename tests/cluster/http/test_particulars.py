"""Details of responses and errors that clients read: codes, names, headers."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import httpx2
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from cluster.engine.engine_client import DeadlyRequest, Health
from cluster.errors import BadRequest
from cluster.http import error_handlers, middleware
from cluster.http.service import Service, batch_share
from cluster.observe.answer_record import AnswerRecord
from cluster.openai.deltas import GenerationFailed, deltas_of
from cluster.openai.failures import to_http_error
from cluster.openai.openai_format import total_stats
from cluster.openai.output_processor import Generation, TextDelta
from cluster.openai.streaming import cancel_on_disconnect
from cluster.text.tokenizer import Tokenizer, text_size
from secateur.errors import Problem
from tests.support.fake_service import FakeService, error_of, fake_service, stream, wait_for
from tests.support.tokenizer_kinds import llama, load
from workers.comm.ipc import EngineStats, RequestStats, Submit, TokenChunk
from workers.settings import Constraints, SamplingSettings

PROMPT = {"prompt": "def", "max_tokens": 64}


# ---- what requests become


def test_a_chat_may_continue_its_last_message(http: httpx2.Client, service: FakeService, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, wor"}]
    body = {"messages": messages, "max_tokens": 1, "continue_final_message": True}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    whole = tokenizer.encode_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert service.engine.submitted[-1].prompt == whole != tokenizer.encode_chat(messages)


def test_the_log_has_the_request_id_of_the_header(service: FakeService, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "cluster"), service.http() as http:
        http.post("/v1/completions", json=PROMPT, headers={"X-Request-ID": "from-the-header"})
        http.post("/v1/completions", json=PROMPT | {"request_id": "from-the-body"})
        wait_for(lambda: caplog.text.count("prompt and") == 2)
    assert "request from-the-header/" in caplog.text and "request from-the-body/" in caplog.text


# ---- what answers say


def test_an_answer_continues_the_prompts_text(tmp_path: Path) -> None:
    """SentencePiece drops the space of a text's first word, which an answer's first word is not."""
    tokenizer = load(llama, tmp_path)
    [word] = tokenizer.encode("a", add_special_tokens=False)
    with fake_service(tokenizer, tmp_path, lambda submit: [[word]]) as running, running.http() as http:
        answer = http.post("/v1/completions", json={"prompt": [word], "max_tokens": 1}).json()
    assert answer["choices"][0]["text"] == " a"


@pytest.mark.parametrize(("include", "text"), [(True, "def f(x):"), (False, "def f(x)")])
def test_a_stop_string_is_shown_on_request(http: httpx2.Client, include: bool, text: str) -> None:
    body = PROMPT | {"stop": ":", "include_stop_str_in_output": include}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == text


def test_streamed_log_probabilities_name_their_tokens(http: httpx2.Client, tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "logprobs": True}
    events = stream(http, "/v1/chat/completions", **body)
    told = [
        entry
        for event in events[:-1]
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {}).get("content", [])
    ]
    assert [entry["token"] for entry in told] == [
        tokenizer.token_text(id).text for id in tokenizer.encode("def f(x):")[:4]
    ]


def test_a_stream_must_not_be_cached(http: httpx2.Client) -> None:
    with http.stream("POST", "/v1/completions", json=PROMPT | {"stream": True}) as response:
        assert response.headers["cache-control"] == "no-cache"


def test_ignored_fields_are_named_beside_log_probabilities_too(http: httpx2.Client) -> None:
    response = http.post("/v1/completions", json=PROMPT | {"logprobs": 1, "zeta": 1})
    assert response.headers["x-secateur-ignored"] == "zeta"


def test_copied_tokens_are_counted_separately(tokenizer: Tokenizer) -> None:
    stats = RequestStats(num_drafts=1, verified_per_depth=[3], num_copied_tokens=3, num_accepted_copied_tokens=2)
    finished = generation(tokenizer)
    finished.last = TextDelta(stats=stats)
    total = total_stats([finished] * 2)
    assert (total.num_copied_tokens, total.num_accepted_copied_tokens) == (6, 4)


def test_accepted_copies_are_counted_when_they_are_returned(service: FakeService) -> None:
    metrics = service.service.metrics
    before = metrics._with_returned(EngineStats()).num_accepted_copied_tokens
    for is_copied in (False, True):
        metrics.observe_tokens(3, 2, is_copied=is_copied)
    assert metrics._with_returned(EngineStats()).num_accepted_copied_tokens == before + 2


@pytest.mark.parametrize("wants_ids", [False, True])
def test_prompt_ids_come_once_and_on_request(wants_ids: bool, http: httpx2.Client, tokenizer: Tokenizer) -> None:
    prompt_ids = tokenizer.encode(PROMPT["prompt"]) if wants_ids else None
    body = PROMPT | {"return_token_ids": wants_ids}
    assert http.post("/v1/completions", json=body).json()["choices"][0].get("prompt_token_ids") == prompt_ids
    events = stream(http, "/v1/completions", **body)[:-1]
    told = [choice.get("prompt_token_ids") for event in events for choice in event["choices"]]
    assert len(told) > 2 and told[0] == prompt_ids and not any(told[1:])


def test_a_stream_tells_the_ids_of_tokens_whose_text_is_held_back(
    own: Callable[..., FakeService], tokenizer: Tokenizer
) -> None:
    """Half a character has an id and no text yet."""
    ids = [*tokenizer.encode("a🌳"), 0]
    with own(script=lambda submit: [[id] for id in ids]).http() as http:
        events = stream(http, "/v1/completions", **PROMPT, return_token_ids=True)[:-1]
    choices = [choice for event in events for choice in event["choices"]]
    assert [id for choice in choices for id in choice["token_ids"]] == ids
    assert any(choice["token_ids"] and not choice["text"] for choice in choices[:-1])


def test_a_chat_without_log_probabilities_has_none(http: httpx2.Client) -> None:
    events = stream(http, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=4)[:-1]
    assert all(choice.get("logprobs") is None for event in events for choice in event["choices"])


def generation(tokenizer: Tokenizer) -> Generation:
    submit = Submit(id=1, prompt=[1], max_tokens=9)
    return Generation(submit=submit, tokenizer=tokenizer)


def test_a_delta_says_whether_its_draft_was_copied(tokenizer: Tokenizer) -> None:
    running = generation(tokenizer)
    for is_copied in (False, True):
        delta = running.process(TokenChunk(id=1, tokens=[300], num_accepted=1, is_copied=is_copied))
        assert delta.is_copied == is_copied


@pytest.mark.parametrize(("min_tokens", "ends"), [(1, ("stop", "\ufffd")), (2, ("length", None))])
def test_a_stop_string_may_be_complete_with_the_answer_s_last_bytes(
    min_tokens: int, ends: tuple[str, str | None], tmp_path: Path
) -> None:
    """Incomplete bytes of a character are returned at the end of the answer."""
    tokenizer = load(llama, tmp_path)
    [a, half] = (
        tokenizer.encode("a", add_special_tokens=False) + tokenizer.encode("世", add_special_tokens=False)[-3:-2]
    )
    sampling = SamplingSettings(constraints=Constraints(min_tokens=min_tokens))
    submit = Submit(id=1, prompt=[a], max_tokens=2, sampling=sampling)
    running = Generation(submit=submit, tokenizer=tokenizer, stop=("\ufffd",))
    delta = running.process(TokenChunk(id=1, tokens=[a, half], finish_reason="length"))
    assert (delta.finish_reason, delta.stop_reason) == ends


class OneAnswer:
    """An engine that answers every request with the same chunks."""

    def __init__(self, *chunks: TokenChunk) -> None:
        self._chunks = chunks

    async def arrivals(self, submit: Submit, direct: object = None) -> AsyncGenerator[list[TokenChunk]]:
        for chunk in self._chunks:
            yield [chunk]

    def abort(self, id: int) -> None: ...


async def read(tokenizer: Tokenizer, metrics: Any, *chunks: TokenChunk) -> list[TextDelta]:
    submit = Submit(id=1, prompt=[1], max_tokens=9)
    running = Generation(submit=submit, tokenizer=tokenizer)
    record = AnswerRecord(submit, "r", time.perf_counter(), metrics)
    engine: Any = OneAnswer(*chunks)
    return [delta async for _, delta in deltas_of(engine, [running], [record])]


@pytest.mark.parametrize(
    ("error", "message"), [("rank 1 is lost", "rank 1 is lost"), (None, "the engine failed on this request")]
)
async def test_an_engine_error_is_returned_with_its_reason(
    error: str | None, message: str, tokenizer: Tokenizer, service: FakeService
) -> None:
    with pytest.raises(GenerationFailed, match=message):
        await read(tokenizer, service.service.metrics, TokenChunk(id=1, tokens=[], finish_reason="error", error=error))


async def test_an_error_that_lies_in_the_request_is_a_400_with_its_code(
    tokenizer: Tokenizer, service: FakeService
) -> None:
    chunk = TokenChunk(id=1, tokens=[], finish_reason="error", error="no token may follow", error_code="grammar_failed")
    with pytest.raises(BadRequest, match="no token may follow") as refused:
        await read(tokenizer, service.service.metrics, chunk)
    assert refused.value.code == "grammar_failed" and to_http_error(refused.value).status == 400


async def test_the_times_of_the_first_and_the_last_token_are_observed(tokenizer: Tokenizer) -> None:
    metrics = MagicMock()
    chunks = [
        TokenChunk(id=1, tokens=[], prompt_logprobs=[]),
        TokenChunk(id=1, tokens=[300], queued_s=1e-6),
        TokenChunk(id=1, tokens=[301], queued_s=1e-6, finish_reason="length"),
    ]
    await read(tokenizer, metrics, *chunks)
    reason, times = metrics.observe_finished.call_args.args
    assert reason == "length" and 0 < times.scheduled < times.first_token < times.last_token < times.end
    assert [call.args for call in metrics.observe_queued.call_args_list] == [(1e-6,)]
    first, second = (call.kwargs["gap_s"] for call in metrics.observe_tokens.call_args_list)
    assert first is None and second == pytest.approx(times.last_token - times.first_token)


def test_the_model_card_has_its_creation_time(
    http: httpx2.Client, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.service, "created", 1_700_000_000)
    [card] = http.get("/v1/models").json()["data"]
    assert card["created"] == 1_700_000_000


def test_the_model_card_names_the_model_as_the_configuration_does(own: Callable[..., FakeService]) -> None:
    """As in vLLM, whose benchmarks load the tokenizer of this name; not the place of its files here."""
    with own(model_root="org/model").http() as http:
        assert http.get("/v1/models").json()["data"][0]["root"] == "org/model"
        assert http.get("/v1/models/fake-model").json()["root"] == "org/model"


# ---- what refusals say


def test_a_429_reports_the_number_of_pending_requests(own: Callable[..., FakeService]) -> None:
    running = own(max_pending=1)
    running.engine.hold.set()
    with running.http() as http, running.http() as other:
        waiting = threading.Thread(target=lambda: other.post("/v1/completions", json=PROMPT))
        waiting.start()
        wait_for(lambda: running.client.num_pending == 1)
        error = error_of(http.post("/v1/completions", json=PROMPT))
        metrics = http.get("/metrics").text
        running.engine.hold.clear()
        waiting.join(20)
    assert re.search(r"^secateur_requests_rejected_total\{.*\} 1\.0$", metrics, re.MULTILINE)
    assert error["message"] == "1 of at most 1 requests are pending; try later"
    assert (error["type"], error["code"]) == ("rate_limit_error", "too_many_requests")


def test_an_engine_s_failure_is_a_server_error_that_says_which() -> None:
    error = to_http_error(GenerationFailed("a page was lost\nat line 3"))
    assert error.body.error.message == "the engine failed: a page was lost"
    assert (error.status, error.body.error.type, error.body.error.code) == (500, "server_error", "engine_error")
    assert to_http_error(GenerationFailed()).body.error.message == "the engine failed: GenerationFailed"
    error = to_http_error(DeadlyRequest("three engines died with it\nat line 3"))
    assert (error.status, error.body.error.message) == (500, "the engine failed: three engines died with it")


def test_a_batch_job_may_always_have_a_request_in_the_engine() -> None:
    assert [batch_share(num_seats) for num_seats in (1, 2, 16)] == [1, 1, 12]


@pytest.mark.parametrize(
    ("status", "kind"), [(405, "invalid_request_error"), (500, "server_error"), (503, "server_error")]
)
async def test_starlette_s_errors_are_the_client_s_below_500(status: int, kind: str) -> None:
    response = await error_handlers._starlette_error(Receiving(), HTTPException(status))
    assert response.status_code == status and json.loads(response.body)["error"]["type"] == kind


def test_a_body_without_a_content_type_is_told_so(http: httpx2.Client) -> None:
    message = error_of(http.post("/v1/completions", content=b"hello"))["message"]
    assert message == "send the body as JSON, with Content-Type: application/json (got 'none')"


def test_the_header_of_ignored_fields_has_at_most_1024_characters(http: httpx2.Client) -> None:
    response = http.post("/v1/completions", json=PROMPT | {"z" * 2000: 1})
    assert response.headers["x-secateur-ignored"] == "z" * 1024


def test_a_list_index_is_not_reported_as_the_parameter() -> None:
    assert error_handlers._without_body(Problem("body.3", "Value error, is empty")) == Problem("", "is empty")
    assert error_handlers._without_body(Problem("body.stop", "Value error, is empty")) == Problem("stop", "is empty")


async def test_other_protocols_pass_the_middleware_unchanged() -> None:
    seen: list[Any] = []

    async def app(*given: Any) -> None:
        seen.extend(given)

    async def receive() -> Any: ...

    async def send(_: Any) -> None: ...

    scope = {"type": "lifespan"}
    await middleware.Observer(app, MagicMock(), echoes_id=True)(scope, receive, send)
    assert seen == [scope, receive, send]


def test_text_size_counts_the_strings_of_a_request() -> None:
    assert (text_size("abc"), text_size({"ab": ["c", 7, None]}), text_size([])) == (3, 5, 0)


# ---- streams


class Receiving(Request):
    """A request whose client sends these messages and then nothing."""

    def __init__(self, *kinds: str) -> None:
        super().__init__({"type": "http", "path": "/"})
        self._kinds = list(kinds)

    @property
    def receive(self) -> Receive:
        return self._receive_next

    async def _receive_next(self) -> Message:
        if not self._kinds:
            await asyncio.sleep(60)
        return {"type": self._kinds.pop(0)}


async def test_further_data_does_not_cancel_a_request() -> None:
    @cancel_on_disconnect
    async def work(request: Request) -> Response:
        await asyncio.sleep(0.05)
        return Response("done")

    assert (await work(request=Receiving("http.request"))).body == b"done"


async def test_a_disconnect_is_reported_after_the_work_has_ended() -> None:
    ended: list[bool] = []

    @cancel_on_disconnect
    async def work(request: Request) -> Response:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            ended.append(True)
        return Response()

    assert (await work(request=Receiving("http.disconnect"))).status_code == 499
    assert ended == [True]


DEGRADED = Health(True, "requests are answered without drafts")
DEAD = Health(False, "the engine died")
STUCK = Health(False, "the tokenizing workers are stuck")
FINE = Health(True, "")


@pytest.mark.parametrize(
    ("engine", "tokenizing", "whole"),
    [(FINE, FINE, FINE), (DEGRADED, FINE, DEGRADED), (DEGRADED, STUCK, STUCK), (DEAD, FINE, DEAD), (DEAD, STUCK, DEAD)],
)
def test_health_is_that_of_what_fails_and_of_the_engine_first(engine, tokenizing, whole) -> None:
    parts = {"engine": engine, "tokenizer_pool": tokenizing}
    service = SimpleNamespace(**{name: SimpleNamespace(health=lambda own=own: own) for name, own in parts.items()})
    assert Service.health(service) == whole  # type: ignore[arg-type]  # only these two parts are asked


def test_a_header_keeps_a_request_from_being_learnt_from(service: FakeService) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    with service.http() as http:
        for headers, may_learn in (
            ({}, True),
            ({"X-Secateur-Learn": "off"}, False),
            ({"X-Secateur-Learn": "on"}, True),
        ):
            assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
            assert service.engine.submitted[-1].may_learn is may_learn
        for wrong in ("false", "0", ""):
            refused = http.post("/v1/completions", json=body, headers={"X-Secateur-Learn": wrong})
            assert refused.status_code == 400 and "neither on nor off" in refused.json()["error"]["message"]
        assert http.post("/v1/responses", json={"input": "a", "store": False}).status_code == 200
        assert not service.engine.submitted[-1].may_learn
