"""Strikes a service on Ray while it answers, and checks every token of every answer: `make chaos`.

Rules. Over plain HTTP no request fails when a drafter, a rank or Serve's controller is lost or hangs: the connection
goes on. When the replica or the proxy is lost, a plain client is told by an error event or a broken connection, never
by a silent end, and the same tokens come when it asks again. Our own clients and batch jobs never fail. No token is
wrong, repeated or missing. A replica outlives the loss of any other process. Afterwards nothing is left behind.

Exit status: 0 if all rules hold, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import httpx2

from cluster.system.processes import descendants, wait_gone
from secateur import AsyncClient, Client
from secateur.config import AppArgs, EngineArgs
from tests.chaos.faults import FAULTS, REPLICA, Fault, processes
from tests.chaos.traffic import (
    BROKEN,
    DONE,
    ERROR_EVENT,
    TIMEOUT_S,
    Body,
    Record,
    batch,
    blocking,
    bodies,
    ours,
    plain,
    until,
    whole,
)

NUM_BATCH_LINES = 4
NUM_THREADS = 4
"""Streams of the blocking client; of the others one half is plain, one of the asynchronous client."""
SMALL_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Round:
    """The outcome of one fault."""

    fault: str
    num_running: int
    """Streams that were running when it struck."""
    pauses_s: list[float]
    """Their times to the next token, those of clients that do not see the fault."""
    problems: list[str]

    def __str__(self) -> str:
        longest = f"{max(self.pauses_s):.1f} s" if self.pauses_s else "-"
        median = f"{statistics.median(self.pauses_s):.1f} s" if self.pauses_s else "-"
        return f"{self.fault:15} {self.num_running:3} running, next token {median} (median), {longest} (longest)"


class Chaos:
    """A service under faults. url: its base URL. others: descendants of this process that do not belong to it."""

    def __init__(self, url: str, *, num_streams: int, max_tokens: int, others: Collection[int] = ()) -> None:
        self._url, self._others = url, others
        self._bodies = bodies(num_streams, max_tokens)
        self._wanted: dict[int, list[int]] = {}  # by seed

    async def learn(self) -> None:
        """Ask for all answers while nothing is wrong."""
        async with self._http() as http:
            records = [Record(body) for body in self._bodies]
            await asyncio.gather(*(whole(http, record) for record in records))
        for record in records:
            assert record.end == DONE, record.end
            self._wanted[record.body["seed"]] = record.tokens

    async def calm(self) -> list[str]:
        """Ask for all answers; return what is wrong with them."""
        async with self._http() as http:
            records = [Record(body) for body in self._bodies]
            await asyncio.gather(*(plain(http, record) for record in records))
        return [problem for record in records if (problem := self._problem_of(record))]

    async def strike(self, fault: Fault) -> Round:
        """Let all streams and a batch job run, strike, and wait until they and the service have recovered."""
        records = [Record(body) for body in self._bodies]
        in_threads = records[: min(NUM_THREADS, len(records) // 4)]
        rest = records[len(in_threads) :]
        plainly, clients = rest[::2], rest[1::2]
        lines = [Record(body) for body in self._bodies[:NUM_BATCH_LINES]]
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(self._http())
            client = await stack.enter_async_context(AsyncClient(self._url))
            client_here = stack.enter_context(Client(self._url))
            await client.models()
            client_here.models()
            pool = stack.enter_context(ThreadPoolExecutor(max(1, len(in_threads))))
            loop = asyncio.get_running_loop()
            tasks = [
                *(asyncio.create_task(plain(http, record)) for record in plainly),
                *(asyncio.create_task(ours(client, record)) for record in clients),
                *(loop.run_in_executor(pool, blocking, client_here, record) for record in in_threads),
                asyncio.create_task(batch(self._url, lines)),
            ]
            await until(lambda: all(record.arrivals or record.end for record in records), "a token of every stream")
            num_running = sum(not record.end for record in records)
            replicas = processes(REPLICA, self._others)
            struck = time.monotonic()
            pid = fault.strike(self._others)
            await asyncio.wait_for(asyncio.gather(*tasks), TIMEOUT_S)
            broken = [record for record in plainly if record.end != DONE]
            again = [Record(record.body) for record in broken]
            await asyncio.gather(*(whole(http, record) for record in again))
            await until(lambda: self._is_whole(http), "the recovery of the service")
        problems = [f"its process {pid} is still there" for pid in wait_gone([pid], timeout_s=5)]
        problems += [] if num_running else ["no stream was running"]
        if fault.process != REPLICA and processes(REPLICA, self._others) != replicas:
            problems.append("the replica was replaced, too")
        answered = [record for record in records if record not in broken]
        problems += [problem for record in answered + lines + again if (problem := self._problem_of(record))]
        problems += [
            f"seed {record.body['seed']}: a plain client has seen {record.end}"
            for record in broken
            if not fault.is_seen or record.end not in (ERROR_EVENT, BROKEN)
        ]
        problems += [problem for record in broken if (problem := self._problem_of(record, is_partial=True))]
        pauses = [pause for record in answered if (pause := record.pause_after(struck)) is not None]
        return Round(fault.name, num_running, pauses, problems)

    def _problem_of(self, record: Record, *, is_partial: bool = False) -> str | None:
        wanted, seed = self._wanted[record.body["seed"]], record.body["seed"]
        if is_partial:
            return None if record.tokens == wanted[: len(record.tokens)] else f"seed {seed}: wrong tokens at first"
        if record.end != DONE:
            return f"seed {seed}: {record.end}"
        if record.tokens != wanted:
            same = len(os.path.commonprefix([record.tokens, wanted]))
            return f"seed {seed}: {len(record.tokens)} tokens instead of {len(wanted)}, of which {same} are right"
        return None

    async def _is_whole(self, http: httpx2.AsyncClient) -> bool:
        try:
            health = await http.get("/health")
            metrics = await http.get("/metrics")
        except httpx2.TransportError:
            return False
        connected = [line for line in metrics.text.splitlines() if line.startswith("secateur_drafter_connected{")]
        return health.json() == {"status": "ok"} and all(line.endswith(" 1.0") for line in connected)

    def _http(self) -> httpx2.AsyncClient:
        limits = httpx2.Limits(max_connections=None)
        return httpx2.AsyncClient(base_url=self._url, timeout=TIMEOUT_S, limits=limits, trust_env=False)


async def upgrade(
    url: str, args: EngineArgs, *, num_requests: int, concurrency: int, pause_s: float = 0.0
) -> Counter[str]:
    """Deploy anew with two replicas and again with one, meanwhile answer small requests; return how they ended.

    At least `num_requests` are sent, and as many more as the deployments take. An answer that is not the expected one
    counts as "wrong". pause_s: between an answer and its client's next request.
    """
    from ray import serve as ray_serve

    from cluster.serve.app import build
    from cluster.serve.controller import APP_NAME

    limits = httpx2.Limits(max_connections=None)
    ends: Counter[str] = Counter()
    wanted: dict[int, list[int]] = {}
    is_over = False

    async def ask(http: httpx2.AsyncClient, body: Body) -> None:
        response = await http.post("/v1/completions", json=body)
        if response.status_code != 200:
            ends[f"status {response.status_code}"] += 1
            return
        tokens = response.json()["choices"][0]["token_ids"]
        ends["done" if wanted.setdefault(body["seed"], tokens) == tokens else "wrong"] += 1

    async def ask_on(http: httpx2.AsyncClient, own: Sequence[Body]) -> None:
        for body in cycle(own):
            if is_over and ends.total() >= num_requests:
                return
            try:
                await ask(http, body)
            except httpx2.TransportError as error:
                ends[repr(error)] += 1
            await asyncio.sleep(pause_s)

    def deploy(num_replicas: int) -> None:
        options = {"num_replicas": num_replicas, "graceful_shutdown_timeout_s": 60.0}
        app = AppArgs.from_engine_args(args).model_copy(update={"deployment_config": options})
        ray_serve.run(build(app), name=APP_NAME, route_prefix="/")

    async with httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as http:
        given = bodies(concurrency, SMALL_TOKENS)
        asking = [asyncio.create_task(ask_on(http, [body])) for body in given]
        for num_replicas in (2, 1):
            await asyncio.to_thread(deploy, num_replicas)
        is_over = True
        await asyncio.gather(*asking)
    return ends


def drain(num_requests: int, max_tokens: int) -> list[str]:
    """Send SIGTERM twice to a service that answers, and return what was wrong."""
    command = [sys.executable, "-m", "secateur", "serve", "--device", "cpu", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.partition(" at ")[2].partition("/v1")[0]
        if not url:
            return [f"the service did not start: {line}"]
        problems = asyncio.run(_drained(url, process, bodies(num_requests, max_tokens)))
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            problems.append("the service did not end")
    return problems


async def _drained(url: str, process: subprocess.Popen[str], given: Sequence[Body]) -> list[str]:
    records = [Record(body) for body in given]
    async with httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as http:
        tasks = [asyncio.create_task(plain(http, record)) for record in records]
        await until(lambda: all(record.arrivals or record.end for record in records), "a token of every stream")
        num_running = sum(not record.end for record in records)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        await asyncio.gather(*tasks)
    problems = [] if num_running else ["no stream was running at SIGTERM"]
    for record in records:
        if record.end != DONE or len(record.tokens) != record.body["max_tokens"]:
            problems.append(f"seed {record.body['seed']}: {record.end} after {len(record.tokens)} tokens")
    return problems


class Leftovers:
    """Records what is there before a run: processes below this one, shared memory, temporary folders and sockets."""

    def __init__(self) -> None:
        self.processes = set(descendants())
        self._files = _files()

    def found(self) -> list[str]:
        """Return what is there now in addition."""
        ours = set(descendants()) - self.processes
        left = [f"process {pid}" for pid in wait_gone(ours, timeout_s=30)]
        return left + [f"{path}" for path in sorted(_files() - self._files) if not _is_used(path)]


def _files() -> set[Path]:
    folders = Path(tempfile.gettempdir()).glob("*secateur-*")
    return {*Path("/dev/shm").iterdir(), *folders} if Path("/dev/shm").is_dir() else set(folders)


def _is_used(path: Path) -> bool:
    """Return whether a process has the file open or mapped, or a file of the folder: it belongs to another service."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(path) in (process / "maps").read_text():
                return True
            if any(os.readlink(entry).startswith(str(path)) for entry in (process / "fd").iterdir()):
                return True
        except OSError:  # it has just ended, or is another user's
            continue
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [fault.name for fault in FAULTS]
    parser.add_argument("only", nargs="*", help=f"faults, all if there are none: {', '.join(names)}")
    parser.add_argument("--streams", type=int, default=40, help="streams per fault [%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=200, help="tokens of each [%(default)s]")
    parser.add_argument("--requests", type=int, default=1000, help="small ones during the upgrade; 0 = none [1000]")
    parser.add_argument("--no-standby", action="store_true", help="start lost ranks from nothing, to compare")
    asked = parser.parse_args()
    if unknown := set(asked.only) - set(names):
        parser.error(f"there is no fault {', '.join(sorted(unknown))}; choose from {', '.join(names)}")
    settings = {"tensor_parallel_size": 2, "device": "cpu", "port": 0, "standby": not asked.no_standby}
    args = EngineArgs.load(settings | {"max_num_seqs": 64, "max_model_len": 1024})
    from cluster.serve.launch import running

    before, problems = Leftovers(), []
    with running(args) as url:
        chaos = Chaos(url, num_streams=asked.streams, max_tokens=asked.max_tokens, others=before.processes)
        asyncio.run(chaos.learn())
        for fault in FAULTS:
            if fault.name in (asked.only or names):
                done = asyncio.run(chaos.strike(fault))
                print(done, flush=True)
                problems += [f"{fault.name}: {problem}" for problem in done.problems]
        if asked.requests:
            ends = asyncio.run(upgrade(url, args, num_requests=asked.requests, concurrency=16))
            print(f"upgrade to two replicas and back: {dict(ends)}", flush=True)
            problems += [f"upgrade: {number} times {end}" for end, number in ends.items() if end != "done"]
    if asked.requests:
        problems += [f"drain: {problem}" for problem in drain(16, asked.max_tokens)]
    problems += [f"left behind: {each}" for each in before.found()]
    print("\n".join(problems) or "every token came, once, and nothing is left")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
