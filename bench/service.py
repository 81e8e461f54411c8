"""Measures a whole service from its clients: tokens a second of all requests together, and processor time by process.

    python -m bench.service [MODEL] [--requests 1 8 32 128] [--tokens 64] [--rounds 3] [--http none ray haproxy]
        [--before FOLDER] [--args JSON] [--body JSON] [--output DIR]

The services run side by side and take turns, each asked for the same streams, and the texts must be equal: one without
Ray, through Ray Serve's proxy, or through its HAProxy, and the same of another checkout (`--before`). Clients are in
this process. `front` is the process that makes the events, `proxy` whatever Ray Serve has between it and the client,
`engine` the ranks, and `rest` Ray's own processes; a stream ends at `--tokens`.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from bench.harness import command, parser
from cluster.bench.report import reporting
from secateur.cli.bench import say

ROOT = Path(__file__).parents[1]
WITHOUT_RAY = """
import json, signal, sys
from cluster.local_service import local_service
from secateur.config import EngineArgs
with local_service(EngineArgs.load(json.loads(sys.argv[1]))) as url:
    print(url, flush=True)
    signal.sigwait([signal.SIGTERM])
"""
HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
ROLES = {
    "front": r"ray::ServeReplica",
    "proxy": r"ray::ProxyActor|ray::HAProxyManager|haproxy",
    "engine": r"cluster\.system\.child|cluster\.system\.fork_server|ray::Worker",
    "rest": r"ray|ServeController",
}
"""A process has the first role whose pattern is in its command line; without Ray the service's own is the front."""


class ServiceProcesses(NamedTuple):
    """A running service: its URL and the first of its processes."""

    url: str
    first: psutil.Process

    def cpu_s(self) -> dict[str, float]:
        """Return the processor time that its processes have used, by role."""
        used = dict.fromkeys(ROLES, 0.0)
        for process in (self.first, *self.first.children(recursive=True)):
            try:
                line, pid = " ".join(process.cmdline()), process.pid
                role = next((role for role, found in ROLES.items() if re.search(found, line)), "front")
                used[role] += time.clock_gettime((~pid << 3) | 2)  # the clock of clock_getcpuclockid(3)
            except (OSError, psutil.Error):
                continue  # it has ended
        return used


@contextmanager
def service(root: Path, args: Mapping[str, Any], http: str = "ray") -> Iterator[ServiceProcesses]:
    """Start a service of a checkout in processes of its own; http: none, ray or haproxy."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in args.items()}
    flags = [f"--{name.replace('_', '-')}={text}" for name, text in texts.items()]
    made = ["-c", WITHOUT_RAY, json.dumps(args)] if http == "none" else ["-m", "secateur", "serve", *flags]
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="s", ignore_cleanup_errors=True) as folder:
        env = os.environ | {"PYTHONPATH": str(root), "TMPDIR": folder} | (HAPROXY if http == "haproxy" else {})
        process = subprocess.Popen([sys.executable, *made], env=env, cwd=folder, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            url = next((found for line in process.stdout if (found := re.search(r"http://[\w.]+:\d+", line))), None)
            if url is None:
                raise SystemExit("the service did not start")
            yield ServiceProcesses(url[0], psutil.Process(process.pid))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)


class Answers(NamedTuple):
    """The streams of one turn, which took so many seconds from the first byte asked to the last one read."""

    seconds: float
    tokens: int
    events: int
    texts: list[str]


def ask(url: str, num: int, tokens: int, name: str, more: Mapping[str, Any]) -> Answers:
    """Read `num` greedy streams of that many tokens side by side. more: fields of their requests."""
    host, port = url.removeprefix("http://").split(":")
    reading, got = selectors.DefaultSelector(), dict[socket.socket, bytearray]()
    began = time.monotonic()
    for number in range(num):
        prompt = f"# {name}.{number}: count the words of a file.\ndef count_{number}(path):\n"
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        data = json.dumps({**body, **more, "stream": True, "stream_options": {"include_usage": True}}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        sock = socket.create_connection((host, int(port)))
        sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        reading.register(sock, selectors.EVENT_READ)
        got[sock] = bytearray()
    while reading.get_map():
        for key, _ in reading.select():
            sock = key.fileobj  # type: ignore[assignment]
            read = sock.recv(1 << 16)
            got[sock] += read
            if not read or got[sock].endswith(b"0\r\n\r\n"):
                reading.unregister(sock)
                sock.close()
    seconds = time.monotonic() - began
    streams = [
        [json.loads(line[6:]) for line in whole.splitlines() if line.startswith(b"data: {")] for whole in got.values()
    ]
    if wrong := [bytes(whole[:300]) for whole in got.values() if b"[DONE]" not in whole]:
        raise SystemExit(f"a stream broke off: {wrong[0]!r}")
    texts = ["".join(event["choices"][0]["text"] for event in stream if event["choices"]) for stream in streams]
    made = sum(stream[-1]["usage"]["completion_tokens"] for stream in streams)
    return Answers(seconds, made, sum(map(len, streams)), texts)


def turn(
    served: ServiceProcesses, num: int, tokens: int, name: str, more: Mapping[str, Any]
) -> tuple[dict[str, float], list[str]]:
    """Ask one service once; return the row's figures, processor time in microseconds a token, and the texts."""
    before = served.cpu_s()
    answers = ask(served.url, num, tokens, name, more)
    costs = {f"{role}_us": 1e6 * (used - before[role]) / answers.tokens for role, used in served.cpu_s().items()}
    rate = {"tokens_per_s": answers.tokens / answers.seconds, "events_per_token": answers.events / answers.tokens}
    return rate | costs, answers.texts


def main() -> None:
    made = parser(__doc__)
    made.add_argument("model", nargs="?", help="of all services")
    made.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 128])
    made.add_argument("--tokens", type=int, default=64, help="of each answer")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--http", nargs="+", choices=("none", "ray", "haproxy"), default=["none"])
    made.add_argument("--before", type=Path, help="another checkout")
    made.add_argument("--args", type=json.loads, default={}, help="engine arguments of all services, as JSON")
    made.add_argument("--body", type=json.loads, default={}, help="fields of every request, as JSON")
    args: Namespace = made.parse_args()
    fixed = {"device": "cpu", "host": "127.0.0.1", "port": 0, "max_num_seqs": max(args.requests)}
    if args.model is not None:
        fixed["model"] = args.model
    roots = {"before": args.before.resolve()} if args.before else {}
    with ExitStack() as stack, reporting(args.output, "service", {"command": command()}, say) as report:
        running = {
            (which, http): stack.enter_context(service(root, fixed | args.args, http))
            for (which, root), http in product((roots | {"now": ROOT}).items(), args.http)
        }
        for served in running.values():
            ask(served.url, 2, 16, "warm", args.body)
        for num in args.requests:
            rows: dict[tuple[str, str], list[dict[str, float]]] = {who: [] for who in running}
            for number in range(args.rounds):
                seen = []
                for who, served in list(running.items())[:: 1 if number % 2 else -1]:
                    row, texts = turn(served, num, args.tokens, f"{num}.{number}", args.body)
                    rows[who].append(row)
                    seen.append(texts)
                if any(texts != seen[0] for texts in seen):
                    raise SystemExit("two services answered the same prompts differently")
            for (which, http), found in rows.items():
                middle = {name: median(row[name] for row in found) for name in found[0]}
                report.add("service", {"requests": num, "code": which, "http": http} | middle)
    print(report.markdown)


if __name__ == "__main__":
    main()
