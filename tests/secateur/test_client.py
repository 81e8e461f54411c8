"""The client: requests, responses, retries, and closed connections."""

import asyncio
import http.server
import json
import random
import threading
import time
from email.utils import formatdate

import httpx2
import pytest

from secateur import client_http, errors, retries
from secateur.client import AsyncClient, Client
from secateur.responses import (
    SSE_DONE,
    AssistantMessage,
    ChatChoice,
    ChatCompletionResponse,
    CompletionChoice,
    CompletionChunk,
    CompletionResponse,
    ErrorResponse,
    ModelCard,
    ModelList,
)
from secateur.speculative import Speculative

ANSWER = CompletionResponse(model="m", choices=[CompletionChoice(text="hello", finish_reason="stop")])
CHAT_ANSWER = ChatCompletionResponse(
    model="m", choices=[ChatChoice(message=AssistantMessage(content="hi"), finish_reason="stop")]
)


def ok(answer) -> httpx2.Response:
    return httpx2.Response(200, text=answer.model_dump_json())


def stream_of(*texts: str, end: str = SSE_DONE) -> httpx2.Response:
    chunks = [CompletionChunk(model="m", choices=[CompletionChoice(text=text)]).sse() for text in texts]
    return httpx2.Response(200, text=": ping\n\n" + "".join(chunks) + end)


class Service:
    """Answers in order and records the requests. An answer may be an exception to raise."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.requests: list[httpx2.Request] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def client(self, **settings) -> Client:
        return Client(transport=httpx2.MockTransport(self), **settings)

    def async_client(self, **settings) -> AsyncClient:
        return AsyncClient(transport=httpx2.MockTransport(self), **settings)

    def body(self) -> dict:
        return json.loads(self.requests[-1].content)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Record delays instead of sleeping."""
    delays: list[float] = []
    monkeypatch.setattr("secateur.client.time.sleep", delays.append)

    async def sleep(seconds: float) -> None:
        delays.append(seconds)

    monkeypatch.setattr("secateur.client.asyncio.sleep", sleep)
    monkeypatch.delenv("SECATEUR_API_KEY", raising=False)
    return delays


# -- requests and answers --------------------------------------------------------------------------------------------


def test_complete_sends_the_parameters_and_reads_the_answer():
    service = Service(ok(ANSWER))
    answer = service.client().complete("abc", max_tokens=5, seed=None, speculative=Speculative(enabled=False))
    assert answer.text == "hello"
    assert service.requests[0].url == "http://127.0.0.1:8000/v1/completions"
    assert service.body() == {"prompt": "abc", "max_tokens": 5, "speculative": {"enabled": False}, "stream": False}


def test_chat_takes_a_text_or_messages():
    service = Service(ok(CHAT_ANSWER), ok(CHAT_ANSWER))
    assert service.client().chat("hello").text == "hi"
    assert service.body()["messages"] == [{"role": "user", "content": "hello"}]
    service.client().chat([{"role": "system", "content": "x"}])
    assert service.body() == {"messages": [{"role": "system", "content": "x"}], "stream": False}


def test_a_request_id_is_a_header_too():
    service = Service(ok(ANSWER))
    service.client().complete("a", request_id="r-1")
    assert service.requests[0].headers["x-request-id"] == "r-1"


def test_the_key_comes_from_the_argument_or_the_environment(monkeypatch):
    monkeypatch.setenv("SECATEUR_API_KEY", "from-env")
    service = Service(ok(ANSWER), ok(ANSWER))
    service.client().complete("a")
    assert service.requests[-1].headers["authorization"] == "Bearer from-env"
    service.client(api_key="given").complete("a")
    assert service.requests[-1].headers["authorization"] == "Bearer given"


def test_a_base_url_with_v1_is_the_same_service():
    assert Client("http://h:1/v1/").base_url == Client("http://h:1").base_url == "http://h:1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_url": "localhost:8000"}, "base_url: must begin with http:// or https:// (got 'localhost:8000')"),
        ({"timeout": -1}, "timeout: must be more than 0 seconds (got -1)"),
    ],
)
def test_invalid_settings_are_reported_before_anything_is_sent(settings, message):
    with pytest.raises(errors.ConfigError) as raised:
        Client(**settings)
    assert str(raised.value) == message


def test_ignored_fields_cause_a_warning():
    answer, chunks = ok(ANSWER), stream_of("a")
    for response in (answer, chunks):
        response.headers["x-secateur-ignored"] = "temprature"
    client = Service(answer, chunks).client()
    with pytest.warns(UserWarning, match="ignored temprature"):
        client.complete("a", temprature=0)
    with pytest.warns(UserWarning, match="ignored temprature"):
        list(client.stream_complete("a", temprature=0))


async def test_ignored_fields_of_an_async_stream_cause_a_warning():
    chunks = stream_of("a")
    chunks.headers["x-secateur-ignored"] = "temprature"
    with pytest.warns(UserWarning, match="ignored temprature"):
        assert [chunk.text async for chunk in Service(chunks).async_client().stream_complete("a")] == ["a"]


def test_the_method_sets_stream():
    with pytest.raises(TypeError, match="stream_complete"):
        Service().client().complete("a", stream=True)


def test_models_tokenize_and_health():
    tokens = httpx2.Response(200, json={"tokens": [1, 2], "count": 2})
    service = Service(ok(ModelList(data=[ModelCard(id="m")])), tokens, httpx2.Response(200), httpx2.Response(503))
    client = service.client()
    assert [card.id for card in client.models().data] == ["m"]
    assert client.tokenize("ab").tokens == [1, 2]
    assert client.health() is True
    assert client.health() is False
    service.answers.append(httpx2.ConnectError("refused"))
    assert client.health() is False


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.BadRequestError),
        (422, errors.BadRequestError),
        (431, errors.BadRequestError),
        (401, errors.AuthenticationError),
        (403, errors.AuthenticationError),
        (404, errors.NotFoundError),
        (429, errors.RateLimitError),
        (500, errors.ServerError),
        (502, errors.ServerError),
        (503, errors.ServiceUnavailableError),
        (418, errors.APIError),
    ],
)
def test_every_status_is_its_error(status, kind):
    body = ErrorResponse.of("because", param="n", code="c").model_dump_json()
    service = Service(httpx2.Response(status, text=body, headers={"retry-after": "3"}))
    with pytest.raises(errors.APIError) as caught:
        service.client(retries=0).complete("a")
    error = caught.value
    assert type(error) is kind
    assert (error.status, error.code, error.param, error.type) == (status, "c", "n", "invalid_request_error")
    assert "because" in str(error)
    if isinstance(error, errors.RateLimitError | errors.ServiceUnavailableError):
        assert error.retry_after == 3.0


@pytest.mark.parametrize("text", ["Request dropped due to backpressure", "", '{"detail": "Not Found"}', "[1]"])
def test_an_error_in_another_format_is_still_reported(text):
    with pytest.raises(errors.ServiceUnavailableError):
        Service(httpx2.Response(503, text=text)).client(retries=0).complete("a")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("busy", "503: busy"),
        ("", "503: Service Unavailable"),
        ('{"detail": "x"}', "503: x"),
        ("{}", "503: Service Una"),
    ],
)
def test_an_error_has_the_services_message_or_that_of_its_status(text, says):
    response = httpx2.Response(503, text=text, request=httpx2.Request("GET", "http://h"))
    with pytest.raises(errors.ServiceUnavailableError, match=says):
        client_http.read(client_http.models_call(), response)


def test_an_invalid_response_is_an_error():
    with pytest.raises(errors.APIError, match="no CompletionResponse"):
        Service(httpx2.Response(200, text="<html>")).client().complete("a")


def test_connection_and_timeout_errors_are_builtin_errors_too():
    with pytest.raises(ConnectionError):
        Service(httpx2.ConnectError("refused")).client(retries=0).complete("a")
    with pytest.raises(TimeoutError):
        Service(httpx2.ReadTimeout("slow")).client().complete("a")


def test_the_docstring_tree_names_every_error():
    names = [name for name, item in vars(errors).items() if isinstance(item, type) and issubclass(item, Exception)]
    assert [name for name in names if name not in (errors.__doc__ or "")] == []


# -- retries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params"), [("half a \ud83c tree", {}), ("x", {"temperature": float("nan")}), ("x", {"request_id": "ü"})]
)
async def test_an_unserializable_body_is_a_bad_request(prompt, params):
    with pytest.raises(errors.BadRequestError, match="cannot be encoded"), Client() as client:
        client.complete(prompt, **params)
    async with AsyncClient() as client:
        with pytest.raises(errors.BadRequestError, match="cannot be encoded"):
            await client.complete(prompt, **params)


@pytest.mark.parametrize(
    "failure", [httpx2.Response(status) for status in (408, 429, 500, 502, 503)] + [httpx2.ConnectError("refused")]
)
def test_temporary_errors_are_retried(failure, no_waiting):
    service = Service(failure, ok(ANSWER))
    assert service.client().complete("a").text == "hello"
    assert len(no_waiting) == 1 and 0.25 <= no_waiting[0] <= 0.5


@pytest.mark.parametrize("status", [400, 401, 404, 501])
def test_permanent_errors_are_not_retried(status):
    service = Service(httpx2.Response(status), ok(ANSWER))
    with pytest.raises(errors.APIError):
        service.client().complete("a")
    assert len(service.requests) == 1


def test_the_wait_doubles_and_ends(no_waiting):
    service = Service(*[httpx2.Response(500) for _ in range(4)])
    with pytest.raises(errors.ServerError):
        service.client(retries=3).complete("a")
    assert len(service.requests) == 4
    assert [0.5 * 2**n / delay <= 2 and delay <= 0.5 * 2**n for n, delay in enumerate(no_waiting)] == [True] * 3


def test_retry_after_is_honoured(no_waiting):
    service = Service(httpx2.Response(429, headers={"retry-after": "7"}), ok(ANSWER))
    service.client().complete("a")
    assert no_waiting == [7.0]


def test_a_long_retry_after_is_left_to_the_caller():
    error = errors.RateLimitError("busy", status=429, retry_after=3600.0)
    assert retries.Retry(retries=5).delay(0, error) is None


def test_a_retry_after_may_be_a_date(monkeypatch):
    now = 1_800_000_000.25
    monkeypatch.setattr(time, "time", lambda: now)
    assert retries.retry_after({"retry-after": formatdate(now + 30, usegmt=True)}) == 29.75
    assert retries.retry_after({"retry-after": formatdate(now - 30, usegmt=True)}) == 0.0
    assert retries.retry_after({"retry-after": "-5"}) == 0.0
    assert retries.retry_after({"retry-after": "soon"}) is None
    assert retries.retry_after({}) is None


# -- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_yields_chunks_until_done():
    service = Service(stream_of("a", "b", end=SSE_DONE + "data: junk\n\n"))
    assert [chunk.text for chunk in service.client().stream_complete("x")] == ["a", "b"]
    assert service.body()["stream"] is True


def test_a_stream_is_retried_only_before_its_first_event():
    service = Service(httpx2.Response(503), stream_of("a", end=""))
    chunks = service.client().stream_complete("x")
    assert next(chunks).text == "a"
    with pytest.raises(errors.APIConnectionError, match="ended before"):
        next(chunks)
    assert len(service.requests) == 2


def test_an_error_inside_a_stream_is_raised():
    error = "data: " + ErrorResponse.of("engine died", code=503).model_dump_json() + "\n\n"
    chunks = Service(stream_of("a", end=error)).client().stream_complete("x")
    assert next(chunks).text == "a"
    with pytest.raises(errors.ServiceUnavailableError, match="engine died"):
        next(chunks)


@pytest.mark.parametrize("text", ["a\u2028b", "a\x85b", "a\r\nb\x0cc", "é😀"])
def test_any_character_survives_a_stream_cut_anywhere(text):
    events = client_http.Events(client_http.stream_complete_call("x", {}))
    wire = (CompletionChunk(model="m", choices=[CompletionChoice(text=text)]).sse() + SSE_DONE).encode()
    chunks = [chunk for at in range(len(wire)) for chunk in events.feed(wire[at : at + 1])]
    assert [chunk.text for chunk in chunks] == [text] and events.done
    assert [chunk.text for chunk in Service(stream_of(text)).client().stream_complete("x")] == [text]


LINE_ENDS = [b"\n", b"\r\n", b"\r"]
WIRE = (
    "".join(
        CompletionChunk(model="m", choices=[CompletionChoice(text=text)]).sse() for text in ("a\u2028b", "c\r\nd", "e")
    ).replace("data:", ": ping\nevent: chunk\ndata:")
    + SSE_DONE
).encode()
WIRE_TEXTS = ["a\u2028b", "c\r\nd", "e"]


def read_events(*reads: bytes) -> list[str]:
    events = client_http.Events(client_http.stream_complete_call("x", {}))
    texts = [chunk.text for data in reads for chunk in events.feed(data)]
    events.end()
    return texts


@pytest.mark.parametrize("end", LINE_ENDS)
def test_a_streams_lines_may_end_in_three_ways_and_be_cut_anywhere(end):
    wire = WIRE.replace(b"\n", end)
    assert read_events(*[wire[at : at + 1] for at in range(len(wire))]) == WIRE_TEXTS
    for cut in range(len(wire)):
        assert read_events(wire[:cut], b"", wire[cut:]) == WIRE_TEXTS
    service = Service(httpx2.Response(200, content=wire))
    assert [chunk.text for chunk in service.client().stream_complete("x")] == WIRE_TEXTS


def test_a_streams_lines_may_end_differently():
    rng = random.Random(0)
    for _ in range(200):
        wire, end = b"", b""
        for line in WIRE.split(b"\n")[:-1]:
            after_cr = not line and end == b"\r"  # where \n would be the second half of \r\n
            end = rng.choice(LINE_ENDS[1:] if after_cr else LINE_ENDS)
            wire += line + end
        cuts = sorted(rng.sample(range(len(wire)), 6))
        assert read_events(*[wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]) == WIRE_TEXTS


def test_an_event_that_ends_with_a_lone_cr_is_yielded_at_once():
    events = client_http.Events(client_http.stream_complete_call("x", {}))
    first = WIRE[: WIRE.index(b"\n\n")]
    assert [chunk.text for chunk in events.feed(first + b"\r\r")] == WIRE_TEXTS[:1]
    assert [chunk.text for chunk in events.feed(b"\n" + first + b"\r\n\r")] == WIRE_TEXTS[:1]
    assert list(events.feed(b"\n")) == []


def test_several_data_lines_are_one_event_with_any_line_ending():
    wire = WIRE.replace(b'"choices"', b'\ndata: "choices"')
    for end in LINE_ENDS:
        assert read_events(wire.replace(b"\n", end)) == WIRE_TEXTS


def test_a_byte_order_mark_before_a_stream_is_skipped():
    for wire in (WIRE, WIRE.replace(b": ping\n", b"").replace(b"event: chunk\n", b"")):
        assert read_events(b"\xef", b"\xbb\xbf" + wire) == WIRE_TEXTS


def test_text_that_contains_the_word_error_is_not_an_error():
    chunks = Service(stream_of('{"error": 1}')).client().stream_complete("x")
    assert [chunk.text for chunk in chunks] == ['{"error": 1}']


# -- async -----------------------------------------------------------------------------------------------------------


async def test_the_async_client_behaves_alike(no_waiting):
    service = Service(httpx2.Response(500), ok(ANSWER), ok(CHAT_ANSWER), stream_of("a", "b"), httpx2.Response(200))
    async with service.async_client() as client:
        assert (await client.complete("a")).text == "hello"
        assert (await client.chat("a")).text == "hi"
        assert [chunk.text async for chunk in client.stream_complete("a")] == ["a", "b"]
        assert await client.health()
    assert len(no_waiting) == 1


# -- the real wire ---------------------------------------------------------------------------------------------------


class Wire(http.server.BaseHTTPRequestHandler):
    """An endless stream that records when it is closed."""

    protocol_version = "HTTP/1.1"
    reader_left: threading.Event

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        event = CompletionChunk(model="m", choices=[CompletionChoice(text="é")]).sse().encode()
        try:
            for _ in range(2000):
                self.wfile.write(event)
                self.wfile.flush()
                time.sleep(0.005)
        except OSError:
            type(self).reader_left.set()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def wire():
    reader_left = threading.Event()
    handler = type("Handler", (Wire,), {"reader_left": reader_left})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", reader_left
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def real_time(monkeypatch):
    monkeypatch.undo()


def test_closing_a_stream_closes_the_connection(real_time, wire):
    url, reader_left = wire
    with Client(url) as client:
        chunks = client.stream_complete("a")
        assert next(chunks).text == "é"
        chunks.close()
        assert reader_left.wait(10)


async def test_closing_an_async_stream_closes_the_connection(real_time, wire):
    url, reader_left = wire
    async with AsyncClient(url) as client:
        chunks = client.stream_complete("a")
        assert (await anext(chunks)).text == "é"
        await chunks.aclose()
        assert await asyncio.to_thread(reader_left.wait, 10)


def test_an_unused_port_is_a_connection_error(real_time):
    with Client("http://127.0.0.1:9", retries=0) as client, pytest.raises(errors.APIConnectionError):
        client.models()
