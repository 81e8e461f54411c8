"""Outages: how long the client waits for a service that was there, and streams that go on behind their last event."""

import logging
from collections.abc import Iterator

import httpx2
import pytest

from secateur import errors
from secateur.client import AsyncClient, Client
from secateur.responses import SSE_DONE, CompletionChoice, CompletionChunk, CompletionResponse, ErrorResponse, ModelList
from secateur.retries import Attempts, Retry

TEXTS = ["naïve", " 🌳", "\u2028", " end"]
ANSWER = CompletionResponse(model="m", choices=[CompletionChoice(text="hello")]).model_dump_json()
GONE = httpx2.ConnectError("refused")


def event_id(number: int) -> str:
    return f"1:{'0' * 16}:{number}"


def event(text: str, id: str | None) -> str:
    data = CompletionChunk(model="m", choices=[CompletionChoice(text=text)]).sse()
    return data if id is None else f"{data[:-1]}id: {id}\n\n"


EVENTS = [event(text, event_id(number)) for number, text in enumerate(TEXTS)]
SIZES = [len(event.encode()) for event in EVENTS]
WIRE = ("".join(EVENTS) + SSE_DONE).encode()


class Broken(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """A body whose connection breaks at its end."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __iter__(self) -> Iterator[bytes]:
        yield self.data
        raise httpx2.ReadError("reset")

    async def __aiter__(self):
        yield self.data
        raise httpx2.ReadError("reset")


class Service:
    """A service whose first answers are `failures`: responses, exceptions, or after how many bytes a stream breaks."""

    def __init__(self, *failures) -> None:
        self.failures = list(failures)
        self.requests: list[httpx2.Request] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        if request.url.path == "/v1/models":
            return httpx2.Response(200, text=ModelList().model_dump_json())
        rest = self.rest(request.headers.get("last-event-id"))
        match self.failures.pop(0) if self.failures else None:
            case int() as cut:
                return httpx2.Response(200, stream=Broken(rest[:cut]))
            case Exception() as error:
                raise error
            case httpx2.Response() as response:
                return response
        return httpx2.Response(200, content=rest if b'"stream":true' in request.content else ANSWER.encode())

    def rest(self, last: str | None) -> bytes:
        done = 0 if last is None else 1 + int(last.rpartition(":")[2])
        return ("".join(EVENTS[done:]) + SSE_DONE).encode()

    def client(self, **settings) -> Client:
        return Client(transport=httpx2.MockTransport(self), **settings)

    @property
    def last_ids(self) -> list[str | None]:
        return [request.headers.get("last-event-id") for request in self.requests]


@pytest.fixture(autouse=True)
def waits(monkeypatch) -> list[float]:
    """Record delays, which the clock shows as if they had passed."""
    delays: list[float] = []
    monkeypatch.setattr("secateur.client.time.sleep", delays.append)

    async def sleep(seconds: float) -> None:
        delays.append(seconds)

    monkeypatch.setattr("secateur.client.asyncio.sleep", sleep)
    monkeypatch.setattr(Attempts.__init__, "__defaults__", (False, lambda: sum(delays)))
    return delays


def texts(client: Client) -> list[str]:
    return [chunk.text for chunk in client.stream_complete("x")]


def test_a_stream_cut_behind_any_byte_is_yielded_once():
    for cut in range(len(WIRE) - 1):
        service = Service(cut)
        assert texts(service.client()) == TEXTS
        whole = WIRE[:cut].count(b"\n\n")  # an event counts once its blank line is there
        assert service.last_ids == [None, event_id(whole - 1) if whole else None]


async def test_the_async_client_goes_on_too():
    for cut in range(0, len(WIRE) - 1, 7):
        service = Service(cut, GONE, httpx2.Response(502))
        async with AsyncClient(transport=httpx2.MockTransport(service)) as client:
            assert [chunk.text async for chunk in client.stream_complete("x")] == TEXTS
        assert len(service.requests) == 4


def test_a_stream_may_be_cut_again_and_again():
    one = SIZES[0]
    service = Service(one, 0, GONE, one // 2, httpx2.Response(503), SIZES[1] + 3, one)
    assert texts(service.client(retries=0)) == TEXTS
    assert service.last_ids == [None, *[event_id(0)] * 5, event_id(1), event_id(2)]
    sent = {(request.content, request.headers["idempotency-key"]) for request in service.requests}
    assert len(sent) == 1


def test_a_clean_end_without_the_last_event_is_no_end():
    for body in ("", EVENTS[0]):
        service = Service(httpx2.Response(200, text=body))
        assert texts(service.client()) == TEXTS


def test_a_service_that_goes_away_in_a_stream_is_waited_for():
    """Its last event is an error then, if its front is still there."""
    gone = ErrorResponse.of("the engine is not available", type="service_unavailable_error", code="engine_unavailable")
    service = Service(httpx2.Response(200, text=EVENTS[0] + gone.sse() + SSE_DONE))
    assert texts(service.client()) == TEXTS


@pytest.mark.parametrize("code", ["engine_error", "answer_changed", None])
def test_other_errors_in_a_stream_are_raised(code):
    failed = ErrorResponse.of("no", type="server_error", code=code)
    service = Service(httpx2.Response(200, text=EVENTS[0] + failed.sse() + SSE_DONE))
    chunks = service.client().stream_complete("x")
    assert next(chunks).text == TEXTS[0]
    with pytest.raises(errors.APIError, match="no"):
        next(chunks)
    assert len(service.requests) == 1


@pytest.mark.parametrize("id", [None, "7", "1:xyz:3"])
def test_a_stream_without_our_ids_is_not_begun_again(id):
    """Other services may ignore the header and begin the answer again."""
    chunks = Service(httpx2.Response(200, text=event("a", id))).client().stream_complete("x")
    assert next(chunks).text == "a"
    with pytest.raises(errors.APIConnectionError, match="ended before"):
        next(chunks)


def test_a_refusal_to_go_on_is_raised():
    service = Service(SIZES[0], httpx2.Response(409, text=ErrorResponse.of("changed").model_dump_json()))
    chunks = service.client().stream_complete("x")
    assert next(chunks).text == TEXTS[0]
    with pytest.raises(errors.BadRequestError, match="changed"):
        next(chunks)


def test_an_outage_ends_after_its_time(waits):
    service = Service(SIZES[0], *[GONE] * 100)
    chunks = service.client(outage_timeout=60).stream_complete("x")
    assert next(chunks).text == TEXTS[0]
    with pytest.raises(errors.APIConnectionError, match="refused"):
        next(chunks)
    assert sum(waits) == pytest.approx(60)
    assert all(0.25 <= wait <= 5 for wait in waits[:-1]) and max(waits) > 2.5


def test_progress_ends_an_outage(waits):
    cuts = [failure for number in range(3) for failure in (SIZES[number], *[GONE] * 10)]
    service = Service(*cuts)
    assert texts(service.client(outage_timeout=60)) == TEXTS
    assert sum(waits) > 70


@pytest.mark.parametrize("lost", [httpx2.ReadError("reset"), httpx2.RemoteProtocolError("closed")])
def test_a_whole_answer_that_is_lost_is_asked_for_again_with_the_same_key(lost):
    service = Service(lost, *[GONE] * 9, httpx2.ConnectTimeout("no route"), httpx2.Response(429), httpx2.Response(500))
    assert service.client(retries=0).complete("x").text == "hello"
    assert len({request.headers["idempotency-key"] for request in service.requests}) == 1


@pytest.mark.parametrize("failure", [GONE, *[httpx2.Response(status) for status in (502, 503, 504)]])
def test_a_service_that_was_never_there_is_not_waited_for(failure):
    service = Service(*[failure] * 20)
    client = service.client(retries=2)
    with pytest.raises(errors.SecateurError):
        client.complete("x")
    assert len(service.requests) == 3
    client.models()
    assert client.complete("x").text == "hello"
    assert not service.failures


def test_the_wait_can_be_switched_off(waits):
    service = Service(SIZES[0])
    chunks = service.client(outage_timeout=0, retries=0).stream_complete("x")
    assert next(chunks).text == TEXTS[0]
    with pytest.raises(errors.APIConnectionError, match="reset"):
        next(chunks)
    assert waits == []
    with pytest.raises(errors.ConfigError, match="outage_timeout: must be 0 seconds or more"):
        Client(outage_timeout=-1)


def test_retry_after_counts_in_an_outage_too(waits):
    wait = httpx2.Response(503, headers={"retry-after": "10"})
    service = Service(httpx2.ReadError("reset"), *[wait] * 9)
    with pytest.raises(errors.ServiceUnavailableError):
        service.client(outage_timeout=35).complete("x")
    assert waits[1:4] == [10, 10, 10] and sum(waits) == pytest.approx(35)


def test_a_timeout_means_overload_even_behind_the_beginning():
    service = Service(SIZES[0], httpx2.ReadTimeout("slow"))
    chunks = service.client().stream_complete("x")
    assert next(chunks).text == TEXTS[0]
    with pytest.raises(errors.APITimeoutError):
        next(chunks)


def test_an_outage_is_told_once(caplog):
    with caplog.at_level(logging.WARNING, "secateur.client"):
        assert texts(Service(SIZES[0], GONE, GONE, GONE).client()) == TEXTS
    [record] = caplog.records
    assert record.getMessage().endswith("reset; trying again for up to 300 s")


def test_keys_differ_between_calls():
    service = Service()
    client = service.client()
    client.complete("x"), texts(client), client.complete("x")
    assert len({request.headers["idempotency-key"] for request in service.requests}) == 3


def test_backoff_grows_and_stays_bounded():
    retry, error = Retry(retries=20), errors.APIConnectionError("gone")
    for attempt in range(20):
        assert 0.25 * 2**attempt <= (retry.delay(attempt, error) or 0) * (1 if attempt < 6 else 2**attempt)
        assert (retry.delay(attempt, error) or 0) <= 30
        assert (retry.delay_in_outage(attempt, error, 0) or 0) <= 5
