"""Measures how requests spread over two replicas: prompt tokens found in a cache, balance, and seconds.

    python -m tests.bench.routing [--conversations 48] [--at-once 12] [--out FILE]

Starts Ray with two replicas of the bundled target on CPU, and applies one router after the other:

- Serve's own: the less busy of two replicas at random;
- sessions: `cluster.serve.routing`, as shipped;
- sessions, unbounded: the same, but a preferred replica is never passed over.

Two loads each: conversations of four turns, and as many requests that all have one long prefix. The replica of an
answer is that of its response id. Prints Markdown; --out writes it to a file too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx2

from tests.support.deployments import START_S, answers, deploying, free_port, wait_for

ROUTERS: dict[str, dict[str, Any]] = {
    "Serve's own": {"request_router_class": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter"},
    "sessions": {},
    "sessions, unbounded": {
        "request_router_class": "cluster.serve.routing.SessionRouter",
        "request_router_kwargs": {"slack": 1 << 30},
    },
}
TURNS = 4
SOURCE = json.__doc__ + Path(argparse.__file__).read_text()
CHARACTERS = 1200
"""A conversation's first message has so many, which are some 400 tokens."""


class Answer(NamedTuple):
    """Tells which replica answered a request, and what that took."""

    replica: str
    num_prompt: int
    num_cached: int
    seconds: float
    text: str


def configuration(router: dict[str, Any], port: int) -> dict[str, Any]:
    """Return a Serve configuration with two replicas behind this router; {} is the shipped one."""
    deployment: dict[str, Any] = {"num_replicas": 2}
    if router:
        deployment["request_router_config"] = router
    args = {
        "model_loading_config": {"model_source": "bundled:target"},
        "engine_kwargs": {"device": "cpu", "no_speculation": True, "max_num_seqs": 16},
        "deployment_config": deployment,
    }
    application = {"name": "llm", "route_prefix": "/", "import_path": "cluster.app:build", "args": args}
    return {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}


async def ask(http: httpx2.AsyncClient, messages: list[dict[str, str]]) -> Answer:
    """Send one request."""
    began = time.perf_counter()
    body = {"input": messages, "max_output_tokens": 24, "temperature": 0}
    answer = (await http.post("/v1/responses", json=body)).raise_for_status().json()
    usage = answer["usage"]
    return Answer(
        replica=answer["id"].rpartition("-")[2],
        num_prompt=usage["input_tokens"],
        num_cached=usage["input_tokens_details"]["cached_tokens"],
        seconds=time.perf_counter() - began,
        text=answer["output"][0]["content"][0]["text"],
    )


async def wait_for_both(url: str) -> None:
    """Ask until both replicas have answered."""
    async with httpx2.AsyncClient(base_url=url, timeout=300) as http:
        seen: set[str] = set()
        while len(seen) < 2:
            answer = await ask(http, [{"role": "user", "content": f"Warm-up {time.time()}"}])
            seen.add(answer.replica)


async def conversation(http: httpx2.AsyncClient, first: str) -> list[Answer]:
    """Hold a conversation."""
    messages, found = [{"role": "user", "content": first}], []
    for turn in range(TURNS):
        found.append(answer := await ask(http, messages))
        messages.append({"role": "assistant", "content": answer.text})
        messages.append({"role": "user", "content": f"And now number {turn}?"})
    return found


async def common_prefix(http: httpx2.AsyncClient, first: str, number: int) -> list[Answer]:
    """Ask for another continuation of the text that everybody sends."""
    return [await ask(http, [{"role": "user", "content": first}, {"role": "user", "content": f"Part {number}."}])]


async def at_once(limit: int, work: Iterable[Awaitable[list[Answer]]]) -> list[Answer]:
    """Run everything, so many at a time."""
    free = asyncio.Semaphore(limit)

    async def one(own: Awaitable[list[Answer]]) -> list[Answer]:
        async with free:
            return await own

    return [answer for found in await asyncio.gather(*map(one, work)) for answer in found]


async def measure(url: str, args: argparse.Namespace) -> list[str]:
    """Return a row of the table for each load."""
    texts = [str(n) + SOURCE[n * 700 : n * 700 + CHARACTERS] for n in range(args.conversations + 1)]
    rows = []
    async with httpx2.AsyncClient(base_url=url, timeout=300) as http:
        loads = {
            "conversations": [conversation(http, text) for text in texts[1:]],
            "one prefix": [common_prefix(http, texts[0], n) for n in range(TURNS * args.conversations)],
        }
        for name, work in loads.items():
            began = time.perf_counter()
            found = await at_once(args.at_once, work)
            seconds = time.perf_counter() - began
            share = sum(answer.num_cached for answer in found) / sum(answer.num_prompt for answer in found)
            busiest = Counter(answer.replica for answer in found).most_common(1)[0][1] / len(found)
            slow_ms = 1e3 * statistics.quantiles([answer.seconds for answer in found], n=20)[-1]
            rows.append(f"{name} | {len(found)} | {share:.0%} | {busiest:.0%} | {slow_ms:.0f} | {seconds:.1f}")
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=48)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = [
        "router | load | requests | prompt tokens cached | of the busier replica | p95 ms | seconds",
        "--- | --- | ---: | ---: | ---: | ---: | ---:",
    ]
    for name, router in ROUTERS.items():
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        with TemporaryDirectory(prefix="m") as folder, deploying(Path(folder)) as apply:
            apply(configuration(router, port))
            wait_for(lambda url=url: answers(url), START_S)
            asyncio.run(wait_for_both(url))
            lines += [f"{name} | {row}" for row in asyncio.run(measure(url, args))]
            print(*lines[-2:], sep="\n", flush=True)
    print(table := "\n".join(f"| {line} |" for line in lines))
    if args.out:
        args.out.write_text(f"{table}\n")


if __name__ == "__main__":
    main()
