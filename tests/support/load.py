"""Load on a service from one event loop: clients that leave, clients that read slowly.

It speaks HTTP over plain sockets, because a client library would need more time than the service.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Body = Mapping[str, Any]
PATH = "/v1/completions"
HURRY_B = 1 << 16
"""How much a client reads at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one request ended."""

    status: int
    """0: the connection broke."""
    retry_after: str | None = None

    @property
    def is_sane(self) -> bool:
        """Return whether a client knows what to do: it has an answer, or is told when to come again."""
        waits = self.retry_after or ""
        return self.status == 200 or (self.status == 429 and waits.isdecimal() and 1 <= int(waits) <= 60)


async def connect(url: str, body: Body, *, buffer_bytes: int | None = None) -> tuple[Any, asyncio.StreamWriter]:
    """Send a request and return the ends of its connection."""
    parts = urlsplit(url)
    sock = socket.socket()
    if buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=buffer_bytes or HURRY_B)
    except BaseException:  # a client may leave before it is connected
        sock.close()
        raise
    content = json.dumps(body).encode()
    head = f"POST {parts.path}{PATH} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    return reader, writer


async def ask(url: str, body: Body) -> Outcome:
    """Send one request and read its answer to the end."""
    answer = bytearray()
    with suppress(OSError):
        reader, writer = await connect(url, body)
        try:
            while data := await reader.read(HURRY_B):
                answer += data
        finally:
            writer.close()
    head = answer.partition(b"\r\n\r\n")[0].decode("latin-1").lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:])
    status = int(head[0].split()[1]) if head[0] else 0
    return Outcome(status=status, retry_after=headers.get("retry-after"))


async def leavers(url: str, body: Body, *, num: int, per_second: float, patience_s: float) -> None:
    """Let clients arrive at random and disconnect after up to `patience_s`, half of them with a stream."""
    rng = random.Random(5)

    async def leave(number: int) -> None:
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(rng.uniform(0, patience_s)):
                await ask(url, {**body, "stream": number % 2 == 0})

    at, tasks = 0.0, list[asyncio.Task[None]]()
    began = time.perf_counter()
    for number in range(num):
        at += rng.expovariate(per_second)
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        tasks.append(asyncio.create_task(leave(number)))
    await asyncio.gather(*tasks)


async def slow_readers(url: str, body: Body, *, num: int, leave: asyncio.Event) -> list[int]:
    """Let clients read their streams at a byte a second; return how much each has read when all `leave`."""

    async def read() -> int:
        reader, writer = await connect(url, {**body, "stream": True}, buffer_bytes=2048)
        num_read = 0
        try:
            while not leave.is_set() and await reader.read(1):
                num_read += 1
                await asyncio.sleep(1)
        finally:
            writer.transport.abort()
        return num_read

    return list(await asyncio.gather(*(read() for _ in range(num))))


def statuses(outcomes: Sequence[Outcome]) -> Counter[int]:
    """Count the outcomes by status."""
    return Counter(outcome.status for outcome in outcomes)
