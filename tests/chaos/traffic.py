"""Requests of a chaos run: streams over plain HTTP and through our clients, and a batch, with the times of tokens."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from secateur import AsyncClient, Client
from secateur.batch import run_batch_async
from secateur.errors import SecateurError

TIMEOUT_S = 600.0
DONE, ERROR_EVENT, BROKEN, SILENT = "done", "an error event", "a broken connection", "a silent end"
Body = dict[str, Any]


@dataclass(slots=True)
class Record:
    """What a client has seen of one answer."""

    body: Body
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    """Monotonic times, one per event that brought tokens."""
    end: str = ""

    def take(self, tokens: Sequence[int] | None) -> None:
        """Note an event."""
        if tokens:
            self.tokens += tokens
            self.arrivals.append(time.monotonic())

    def pause_after(self, moment: float) -> float | None:
        """Return the longest time without a token from `moment` on, in seconds; None if the answer was over then."""
        times = [max(moment, at) for at in self.arrivals]
        if not times or times[-1] == moment:
            return None
        return max(later - sooner for sooner, later in zip([moment, *times[:-1]], times, strict=True))


def bodies(num: int, max_tokens: int) -> list[Body]:
    """Return `num` different requests, greedy and seeded ones in turn."""
    settings: list[Body] = [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.95}]
    return [
        {
            "prompt": f"def function_{number}(path):\n    with open(path) as",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "seed": number,
            **settings[number % 2],
        }
        for number in range(num)
    ]


async def plain(http: httpx2.AsyncClient, record: Record) -> None:
    """Stream an answer as a client that knows neither event ids nor retries."""
    try:
        async with http.stream("POST", "/v1/completions", json=record.body | {"stream": True}) as response:
            if response.status_code != 200:
                record.end = f"status {response.status_code}"
                return
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data == line:
                    continue
                if data == "[DONE]":
                    record.end = record.end or DONE
                    return
                event = json.loads(data)
                if "error" in event:
                    record.end = ERROR_EVENT
                else:
                    record.take(event["choices"][0].get("token_ids"))
        record.end = record.end or SILENT
    except httpx2.TransportError:
        record.end = BROKEN


async def whole(http: httpx2.AsyncClient, record: Record) -> None:
    """Ask for an answer that is not streamed, again and again while there is no service."""
    while True:
        try:
            response = await http.post("/v1/completions", json=record.body)
        except httpx2.TransportError:
            pass
        else:
            if response.status_code == 200:
                record.take(response.json()["choices"][0]["token_ids"])
                record.end = DONE
                return
            if response.status_code != 503:
                record.end = f"status {response.status_code}"
                return
        await asyncio.sleep(0.5)


async def ours(client: AsyncClient, record: Record) -> None:
    """Stream an answer with the asynchronous client."""
    try:
        async for chunk in client.stream_complete(**record.body):
            for choice in chunk.choices:
                record.take(choice.token_ids)
        record.end = DONE
    except SecateurError as error:
        record.end = repr(error)


def blocking(client: Client, record: Record) -> None:
    """Stream an answer with the blocking client."""
    try:
        for chunk in client.stream_complete(**record.body):
            for choice in chunk.choices:
                record.take(choice.token_ids)
        record.end = DONE
    except SecateurError as error:
        record.end = repr(error)


async def batch(url: str, records: Sequence[Record]) -> None:
    """Answer the requests as one batch job."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        lines = [
            {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": record.body}
            for number, record in enumerate(records)
        ]
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        await run_batch_async(source, output, base_url=url, progress=False)
        for line in map(json.loads, output.read_text().splitlines()):
            record = records[int(line["custom_id"])]
            if line["error"] is None:
                record.take(line["response"]["body"]["choices"][0]["token_ids"])
            record.end = DONE if line["error"] is None else str(line["error"])


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Wait for a condition. Raises TimeoutError that says what was waited for."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                holds = condition()
                if holds if isinstance(holds, bool) else await holds:
                    return
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise TimeoutError(f"{what} did not come within {timeout_s:.0f} s") from None
