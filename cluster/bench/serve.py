"""`secateur bench serve`: a service under load, as its clients see it. Metrics are defined as in vLLM.

TTFT is the time from sending a request to its first token, TPOT the time per output token after the first, and E2E the
time to the last token. ITL is the time between two chunks of a stream; with speculation a chunk holds more tokens.
Goodput is the number of requests per second within the given latency limits.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import platform
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cluster.bench.report import Say, reporting
from secateur.bench import ServePlan
from secateur.client import AsyncClient, Client
from secateur.config import EngineArgs
from secateur.errors import NotFoundError, SecateurError
from secateur.prompts import BenchPrompt

PERCENTILES = (50, 90, 99)
WARM_REQUESTS = 2
SPECULATION, PLAIN = "speculation", "no speculation"
SERVED = "as served"
"""The mode of a service that was already running; whether it speculates is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """One request. Seconds count from sending it."""

    num_prompt: int = 0
    num_tokens: int = 0
    first_seconds: float = 0.0
    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)
    """Seconds between chunks."""
    error: str | None = None

    @property
    def seconds_per_token(self) -> float:
        """TPOT of this request."""
        return (self.seconds - self.first_seconds) / max(1, self.num_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRow:
    """One load. Each latency is {"mean": ..., "p50": ..., "p90": ..., "p99": ...} in milliseconds."""

    mode: str
    load: str
    num_requests: int
    num_failed: int
    seconds: float
    requests_per_second: float
    goodput: float | None
    input_tokens: int
    output_tokens: int
    tokens_per_second: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2e_ms: dict[str, float]


def run(
    args: EngineArgs | None,
    plan: ServePlan,
    prompts: Sequence[BenchPrompt],
    output: Path,
    say: Say,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    model: str | None = None,
    as_json: bool = False,
) -> str:
    """Measure, write DATE-serve.json and .md, and return the Markdown, or the JSON.

    Measures the service at `base_url`, or else starts one from `args`. Raises ConfigError and EngineDead.
    """
    about = _about(args, plan, base_url, model or _served_names(base_url, api_key))
    with reporting(output, "serve", about, say) as report, _service(args, base_url, say) as url:
        settings = {"max_tokens": plan.max_tokens, "temperature": plan.temperature, "seed": plan.seed}
        client = _Client(url, api_key, settings | ({"model": model} if model else {}))
        for row in _measure(client, plan, prompts, _modes(args, plan), say):
            report.add("rows", row)
    return report.json if as_json else report.markdown


def _about(args: EngineArgs | None, plan: ServePlan, base_url: str | None, model: str) -> dict[str, object]:
    """Return the header. For a service that was already running, only its model names are known."""
    machine = f"{os.cpu_count()} CPU cores, {platform.machine()}"
    if args is None:
        about: dict[str, object] = {
            "hardware": f"{machine}: the client's; the service's is not known",
            "service": base_url,
            "model": model,
        }
    else:
        spec = args.speculative_config
        about = {
            "hardware": f"{machine}; the client runs on them too",
            "service": "started for this, without Ray",
            "model": args.model,
            "speculative_config": spec.model_dump(exclude_unset=True) if spec else None,
        }
    notes = [
        "TPOT: per output token after the first; ITL: between two chunks, which may hold several tokens",
        "all loads answer the same prompts with the same number of tokens; no prompt is found in a prefix cache"
        + ("" if args else " (if the service knows `ignore_eos` and `cache_salt`)"),
    ]
    return {**about, **plan.model_dump(), "notes": notes}


def _served_names(base_url: str | None, api_key: str | None) -> str:
    """Return the model names of a running service. Raises SecateurError if it does not answer."""
    if base_url is None:
        return ""
    with Client(base_url, api_key=api_key) as client, suppress(NotFoundError):
        if names := [card.id for card in client.models().data]:
            return ", ".join(names)
    return "the service names none"


def _modes(args: EngineArgs | None, plan: ServePlan) -> tuple[str, ...]:
    """Return the modes to measure: as configured and, for comparison, without speculation."""
    if args is not None and args.speculative_config is None:
        return (PLAIN,)
    as_configured = SERVED if args is None else SPECULATION
    return (as_configured, PLAIN) if plan.compare else (as_configured,)


@contextmanager
def _service(args: EngineArgs | None, base_url: str | None, say: Say) -> Iterator[str]:
    if base_url is not None:
        yield base_url
        return
    assert args is not None
    # Imported here because measuring a running service needs only the client's packages.
    from cluster.local_service import local_service

    say("starting the service")
    with local_service(args) as url:
        yield url


# -- requests --------------------------------------------------------------------------------------------------------


class _Client(NamedTuple):
    """The service's address and the parameters that all requests share."""

    url: str
    api_key: str | None
    settings: dict[str, Any]


def _measure(
    client: _Client, plan: ServePlan, prompts: Sequence[BenchPrompt], modes: Sequence[str], say: Say
) -> Iterator[LoadRow]:
    asyncio.run(
        _closed_loop(client._replace(settings=client.settings | {"cache_salt": "warm"}), prompts[:WARM_REQUESTS], 1)
    )
    chosen = [prompts[i % len(prompts)] for i in range(plan.num_requests)]
    for load in plan.request_rates or plan.concurrency:
        for mode in modes:
            name = f"{load:g} requests/s" if plan.request_rates else f"{load:g} clients"
            settings = client.settings | {"cache_salt": f"{name}, {mode}"}
            if mode == PLAIN:
                settings["speculative"] = {"enabled": False}
            mode_client = client._replace(settings=settings)
            began = time.perf_counter()
            if plan.request_rates:
                results = asyncio.run(_open_loop(mode_client, chosen, load, plan.seed))
            else:
                results = asyncio.run(_closed_loop(mode_client, chosen, int(load)))
            row = row_of(mode, name, results, time.perf_counter() - began, plan)
            yield row  # what is told is kept, even if the run is interrupted
            say(f"{name}, {mode}: {row.tokens_per_second:.0f} tokens/s, TPOT {row.tpot_ms['p50']:.1f} ms")


async def _closed_loop(client: _Client, prompts: Sequence[BenchPrompt], concurrency: int) -> list[RequestResult]:
    """Run a closed loop: `concurrency` clients, each with one request at a time."""
    slots = asyncio.Semaphore(concurrency)

    async def one(http: AsyncClient, index: int, prompt: BenchPrompt) -> RequestResult:
        async with slots:
            return await _ask(http, client, index, prompt)

    async with AsyncClient(client.url, api_key=client.api_key, retries=0) as http:
        return await asyncio.gather(*(one(http, i, prompt) for i, prompt in enumerate(prompts)))


async def _open_loop(client: _Client, prompts: Sequence[BenchPrompt], rate: float, seed: int) -> list[RequestResult]:
    """Run an open loop: requests arrive as a Poisson process, whether or not earlier ones are finished."""
    gaps = random.Random(seed)
    async with AsyncClient(client.url, api_key=client.api_key, retries=0) as http:
        under_way = []
        for i, prompt in enumerate(prompts):
            under_way.append(asyncio.create_task(_ask(http, client, i, prompt)))
            await asyncio.sleep(gaps.expovariate(rate))
        return await asyncio.gather(*under_way)


async def _ask(http: AsyncClient, client: _Client, index: int, prompt: BenchPrompt) -> RequestResult:
    params = client.settings | {
        "seed": client.settings["seed"] + index,
        "cache_salt": f"{client.settings['cache_salt']}, {index}",
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    began, at, usage = time.perf_counter(), [], None
    try:
        chunks: AsyncIterator[Any] = (
            http.stream_chat(prompt.messages, **params)
            if prompt.messages
            else http.stream_complete(prompt.text or "", **params)
        )
        async for chunk in chunks:
            usage = chunk.usage or usage
            if chunk.text:
                at.append(time.perf_counter() - began)
    except SecateurError as error:
        return RequestResult(error=str(error))
    if usage is None or not at:
        return RequestResult(error="the service streamed no text, or no usage at the end")
    return RequestResult(
        num_prompt=usage.prompt_tokens,
        num_tokens=usage.completion_tokens,
        first_seconds=at[0],
        seconds=at[-1],
        gaps=[late - early for early, late in itertools.pairwise(at)],
    )


# -- figures ---------------------------------------------------------------------------------------------------------


def row_of(mode: str, load: str, results: Sequence[RequestResult], seconds: float, plan: ServePlan) -> LoadRow:
    """Summarise one load. Raises SecateurError if no request succeeded."""
    answered = [result for result in results if result.error is None]
    if not answered:
        raise SecateurError(f"none of {len(results)} requests was answered: {results[0].error}")
    output_tokens = sum(result.num_tokens for result in answered)
    return LoadRow(
        mode=mode,
        load=load,
        num_requests=len(answered),
        num_failed=len(results) - len(answered),
        seconds=round(seconds, 3),
        requests_per_second=round(len(answered) / seconds, 3),
        goodput=_goodput(answered, seconds, plan),
        input_tokens=sum(result.num_prompt for result in answered),
        output_tokens=output_tokens,
        tokens_per_second=round(output_tokens / seconds, 2),
        ttft_ms=_summary_ms([result.first_seconds for result in answered]),
        tpot_ms=_summary_ms([result.seconds_per_token for result in answered]),
        itl_ms=_summary_ms([gap for result in answered for gap in result.gaps]),
        e2e_ms=_summary_ms([result.seconds for result in answered]),
    )


def _goodput(answered: Sequence[RequestResult], seconds: float, plan: ServePlan) -> float | None:
    if plan.goodput_ttft_ms is None and plan.goodput_tpot_ms is None:
        return None
    first, each = plan.goodput_ttft_ms or math.inf, plan.goodput_tpot_ms or math.inf
    good = [o for o in answered if 1e3 * o.first_seconds <= first and 1e3 * o.seconds_per_token <= each]
    return round(len(good) / seconds, 3)


def _summary_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return mean and percentiles in milliseconds, interpolated linearly as in numpy."""
    if not seconds:
        return dict.fromkeys(("mean", *(f"p{p}" for p in PERCENTILES)), 0.0)
    more = [*seconds, *seconds] if len(seconds) == 1 else seconds  # of one value there are no quantiles
    percentiles = statistics.quantiles(more, n=100, method="inclusive")
    values = {"mean": statistics.mean(seconds), **{f"p{p}": percentiles[p - 1] for p in PERCENTILES}}
    return {name: round(1e3 * value, 3) for name, value in values.items()}
