"""What the clients of a chaos run call a fault: each kind of end, and answers that differ."""

from __future__ import annotations

import asyncio

import httpx2
import pytest

from tests.chaos.run import Chaos
from tests.chaos.traffic import BROKEN, DONE, ERROR_EVENT, SILENT, Record, bodies, plain

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
TOKEN = b'data: {"choices": [{"token_ids": [7]}]}\n\n'


async def ended(answer: bytes) -> Record:
    """Return the record of a plain client whose service sends these bytes and closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            await plain(http, record := Record(bodies(1, 2)[0]))
    return record


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (HEAD + b"\r\n" + TOKEN + b"data: [DONE]\n\n", DONE),
        (HEAD + b"\r\n" + TOKEN, SILENT),
        (HEAD + b"Content-Length: 999\r\n\r\n" + TOKEN, BROKEN),
        (HEAD + b"\r\n" + TOKEN + b'data: {"error": {"message": "lost"}}\n\ndata: [DONE]\n\n', ERROR_EVENT),
        (b"HTTP/1.1 503 Gone\r\nContent-Length: 0\r\n\r\n", "status 503"),
    ],
)
async def test_each_end_of_a_stream_has_its_name(answer: bytes, end: str) -> None:
    record = await ended(answer)
    assert (record.end, record.tokens) == (end, [] if "503" in end else [7])


def test_a_pause_is_the_longest_time_without_a_token_after_the_fault() -> None:
    record = Record({}, arrivals=[1.0, 2.0, 2.5, 9.0, 9.1])
    assert record.pause_after(2.2) == 6.5
    assert record.pause_after(4.0) == 5.0
    assert record.pause_after(9.1) is None and record.pause_after(10.0) is None


@pytest.mark.parametrize(
    ("tokens", "end", "says"),
    [
        ([1, 2, 3], DONE, None),
        ([1, 2], DONE, "seed 0: 2 tokens instead of 3, of which 2 are right"),
        ([1, 2, 2, 3], DONE, "seed 0: 4 tokens instead of 3, of which 2 are right"),
        ([1, 2, 3], SILENT, "seed 0: a silent end"),
    ],
)
def test_missing_and_repeated_tokens_and_failures_are_problems(tokens: list[int], end: str, says: str | None) -> None:
    chaos = Chaos("http://127.0.0.1:1", num_streams=1, max_tokens=3)
    chaos._wanted[0] = [1, 2, 3]
    assert chaos._problem_of(Record(bodies(1, 3)[0], tokens=tokens, end=end)) == says
