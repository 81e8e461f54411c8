"""Measures a service under more load than it can serve: what refusals cost, and what happens to everyone else.

    python -m bench.overload [--seconds 20] [--factor 10] [--without-ray] [--root FOLDER] [--output DIR]

Starts `secateur serve` with the bundled model on CPU (or the same HTTP service without Ray) in processes of its own,
and loads it from this one:

- capacity: as many clients as the running batch has places, each asking again at once;
- overload: arrivals at random, `--factor` times as many as it can serve;
- leavers: 500 clients that disconnect within two seconds, and whether queue and KV pages are free afterwards;
- slow readers: 20 clients that read a byte a second, and, when their answers have been computed, how long others wait
  beside them.

Memory (its growth in a phase) and processor time are those of the front and of Serve's proxy. `--root` measures another
checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import httpx2
import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench.harness import command, parser
from bench.service import ROOT, ServiceProcesses, service
from cluster.bench.report import reporting
from secateur.cli.bench import say
from tests.support import load

BODY = {"prompt": "def read_lines(path):\n    with open(path) as", "max_tokens": 32, "ignore_eos": True}
LONG = BODY | {"max_tokens": 1500}
LARGE = BODY | {"max_tokens": 256, "logprobs": 20}
"""Half a megabyte, more than fits the sockets' buffers."""


def fronts(served: ServiceProcesses) -> dict[str, psutil.Process]:
    """Return the processes that every request passes through."""
    pid = httpx2.get(f"{served.url}/server_info", timeout=20).raise_for_status().json()["front"]["pid"]
    proxies = [each for each in served.first.children(recursive=True) if each.name().startswith("ray::ProxyAct")]
    return {"front": psutil.Process(pid)} | ({"proxy": proxies[0]} if proxies else {})


def usage(process: psutil.Process) -> dict[str, float]:
    """Return the memory that a process has, and the processor time that it has used so far."""
    with process.oneshot():
        times = process.cpu_times()
        return {"mib": process.memory_info().rss / 2**20, "cpu_s": times.user + times.system}


def gauges(url: str) -> dict[str, float]:
    """Return what waits and what is held."""
    families = text_string_to_metric_families(httpx2.get(f"{url}/metrics", timeout=60).text)
    found = {family.name.removeprefix("secateur_"): family.samples[0].value for family in families if family.samples}
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return {name: found[name] for name in names} | {"load": httpx2.get(f"{url}/load", timeout=60).json()["server_load"]}


async def idle(url: str, *, limit_s: float, also: str = "kv_cache_usage_perc") -> tuple[float, dict[str, float]]:
    """Wait until nothing runs, waits or holds pages; return after how long, and what is left."""
    began, left = time.perf_counter(), gauges(url)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", also)
    while any(left[name] for name in names) and time.perf_counter() - began < limit_s:
        await asyncio.sleep(0.2)
        left = gauges(url)
    return time.perf_counter() - began, left


def row(phase: str, outcomes: list[load.Outcome]) -> dict[str, Any]:
    """Return what clients saw in a phase, in milliseconds."""
    return {
        "phase": phase,
        "statuses": {str(status): count for status, count in sorted(load.statuses(outcomes).items())},
        "not_sane": sum(not outcome.is_sane for outcome in outcomes),
        **{f"p{100 * share:g}_{status}_ms": load.quantile_ms(outcomes, status, share)
           for status in (200, 429) for share in (0.5, 0.99)},
    }  # fmt: skip


async def measure(url: str, watched: dict[str, psutil.Process], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the phases and return their rows."""
    rows: list[dict[str, Any]] = []

    async def phase(name: str, work: Any, **more: Any) -> list[load.Outcome]:
        before = {who: usage(process) for who, process in watched.items()}
        outcomes: list[load.Outcome] = await work
        used = {f"{who}_{what}": now - before[who][what]
                for who, process in watched.items() for what, now in usage(process).items()}  # fmt: skip
        rows.append(row(name, outcomes) | used | more)
        say(str(rows[-1]))
        return outcomes

    await load.closed_loop(url, BODY, num_clients=args.places, seconds=3)
    served = await phase("capacity", load.closed_loop(url, BODY, num_clients=args.places, seconds=args.seconds / 2))
    rate = max(1.0, len(served) / (args.seconds / 2))
    for _ in range(2):  # the second shows whether memory keeps growing
        work = load.open_loop(url, BODY, per_second=args.factor * rate, seconds=args.seconds)
        await phase(f"overload {args.factor:g} x {rate:.1f}/s", work, per_second=args.factor * rate)

    await load.leavers(url, LONG, num=500, per_second=50, patience_s=2)
    free_after_s, left = await idle(url, limit_s=60, also="load")
    rows.append({"phase": "500 leavers", "free_after_s": free_after_s} | left)

    few = {"num_clients": max(1, args.places // 2), "seconds": args.seconds / 2}
    await phase("half full", load.closed_loop(url, BODY, **few))
    leave = asyncio.Event()
    slow = asyncio.create_task(load.slow_readers(url, LARGE, num=20, leave=leave))
    await asyncio.sleep(2)
    computed_after_s, _ = await idle(url, limit_s=180)
    await phase("half full, beside 20 slow readers", load.closed_loop(url, BODY, **few))
    leave.set()
    rows.append({"phase": "slow readers", "bytes_read": sorted(await slow), "computed_after_s": computed_after_s})
    return rows


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=20.0)
    made.add_argument("--factor", type=float, default=10.0)
    made.add_argument("--places", type=int, default=8, help="max_num_seqs of the service")
    made.add_argument("--without-ray", action="store_true")
    made.add_argument("--root", type=Path, default=ROOT)
    args = made.parse_args()
    options = {"device": "cpu", "port": 0, "max_num_seqs": args.places}
    with (
        service(args.root, options, "none" if args.without_ray else "ray") as served,
        reporting(args.output, "overload", {"command": command()}, say) as report,
    ):
        for each in asyncio.run(measure(served.url, fronts(served), args)):
            report.add("phases", each)
    print(report.markdown)


if __name__ == "__main__":
    main()
