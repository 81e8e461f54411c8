"""Measures what a chunk costs the HTTP front, from the engine's frame to the client's socket.

    python -m bench.front [--streams 1 16 64 256] [--chunks 200] [--per-second 640] [--output DIR]
    python -m bench.front --fronts 1 2 [--streams 256] [--chunks 900] [--steps-per-second 150] [--waves 4]

The front is a process of its own, and the engine is played by this one: each of its frames has a token of every stream.
A third process reads the streams, which are chats. Two loads for each number of streams:

- paced: `--per-second` chunks, and at most 50 frames, a second;
- full: the next frame as soon as the socket takes it.

With `--fronts`, the fronts are those of `--api-server-count`. Of the clients none, and then a tenth, reads one byte a
second; the others' texts must be the answer, and each of their events what the first one is around its text. Memory is
that of the fronts after each wave of streams.

The processor time is the front's. A gap is the time between two reads of one stream, the latency that from a frame to
its event at the client, where the load is paced and there is one stream. As in a replica, the event loop is uvloop.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from statistics import quantiles
from typing import Any

import uvicorn
import uvloop

from bench.harness import command, parser
from cluster.bench.report import reporting
from cluster.convert import read_engine, with_tokenizer
from cluster.engine.engine_client import EngineClient
from cluster.fronts import Fronts
from cluster.http.limits import LimitedProtocol
from cluster.http.server import create_app
from cluster.local_service import build_service
from cluster.system.listening import listening_socket, listening_sockets
from cluster.text.tokenizer_pool import TokenizerPool
from secateur.cli.bench import say
from secateur.config import EngineArgs
from workers.comm.ipc import (
    EngineStats,
    FrameDecoder,
    FrontSockets,
    Ready,
    RequestStats,
    StepOutput,
    Submit,
    TokenChunk,
    connect,
    encode,
)

MAX_FRAMES_PER_S = 50.0
TEXT = "def read_lines(path):\n    with open(path) as file:\n        return [line.rstrip() for line in file]\n"
"""Its tokens are the answers."""
READY = Ready(topology=[], max_model_len=2048, vocab_size=2048, num_pages=8)
STATS = RequestStats(num_drafts=40, pruned_per_depth=[9, 8, 7], verified_per_depth=[40, 30], accepted_per_depth=[20, 9])


async def front(engine_address: str) -> None:
    """Serve the bundled model until SIGTERM; print the port and the answers' tokens."""
    args = EngineArgs.load({"device": "cpu", "max_num_seqs": 512})
    config, tokenizer = with_tokenizer(args, read_engine(args, num_gpus=0)[0])
    client, pool = EngineClient(), TokenizerPool(tokenizer)
    pool.begin()
    await client.listen(engine_address)
    await pool.ready()
    app = create_app(build_service(args, config, client, tokenizer, pool, replica="bench"))
    server = uvicorn.Server(uvicorn.Config(app, http=LimitedProtocol, log_level="warning", access_log=False))
    with listening_socket("127.0.0.1", 0) as sock:
        ids = tokenizer.encode(TEXT, add_special_tokens=False)
        print(json.dumps({"port": sock.getsockname()[1], "tokens": ids}), flush=True)
        await server.serve(sockets=[sock])
    await pool.close()
    await client.close()


async def readers(port: int, num: int, max_tokens: int, num_slow: int = 0) -> None:
    """Read `num` streams to their ends; print a line when all have begun, and, by stream, when how many events came.

    Beside them `num_slow` read one byte a second. Fails if another gets anything but the answer in events like others.
    """
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens, "stream": True}
    data = json.dumps(body | {"ignore_eos": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: "

    waiting = set(range(num))

    async def slow() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(f"{head}{len(data)}\r\n\r\n".encode() + data)
        while await reader.read(1):
            await asyncio.sleep(1)

    texts = set[str]()

    async def one(number: int) -> list[tuple[float, int]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}{len(data)}\r\n\r\n".encode() + data)
        reads, tail, everything = [], b"", b""
        while not tail.endswith(b"0\r\n\r\n"):
            got = await reader.read(1 << 16)
            if not got:
                raise SystemExit(f"the stream ended with {tail!r}")
            whole, everything = tail + got, everything + got
            events = whole.count(b"\ndata: {") - tail.count(b"\ndata: {")
            reads += [(time.monotonic(), events)] * bool(events)
            if b'"content":"def' in whole and number in waiting:
                waiting.remove(number)
                if not waiting:
                    print(flush=True)
            tail = whole[-16:]
        writer.close()
        deltas = [json.loads(line[6:]) for line in everything.splitlines() if line.startswith(b"data: {")]
        texts.add("".join(delta["choices"][0]["delta"].pop("content", "") for delta in deltas))
        if any(delta != deltas[1] for delta in deltas[2:-1]):  # the first one opens the answer, the last one ends it
            raise SystemExit("events of one stream differ by more than their text")
        return reads

    others = [asyncio.create_task(slow()) for _ in range(num_slow)]
    reads = await asyncio.gather(*map(one, range(num)))
    if len(texts) != 1 or not (TEXT * max_tokens).startswith(texts.pop()):
        raise SystemExit("a stream has another text than the answer")
    for other in others:
        other.cancel()
    print(json.dumps(reads))


@contextmanager
def child(*args: object) -> Iterator[subprocess.Popen[str]]:
    """Run this module in another process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.front", *map(str, args)],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


class FrameFeed:
    """The engine's end of the socket. It writes whole frames, and waits while the front does not read."""

    def __init__(self, address: str, tokens: list[int]) -> None:
        self._sock, self._tokens, self._decoder = connect(address), tokens, FrameDecoder()
        self._sock.sendall(encode(READY))

    def submitted(self, num: int) -> list[int]:
        """Wait for that many requests and return their ids."""
        ids: list[int] = []
        while len(ids) < num:
            ids += [each.id for each in self._decoder.feed(self._sock.recv(1 << 20)) if isinstance(each, Submit)]
        return ids

    def step(self, ids: list[int], number: int, *, is_last: bool) -> None:
        """Send one frame with a token of each request."""
        tokens, reason = [self._tokens[number % len(self._tokens)]], "length" if is_last else None
        chunks = [TokenChunk(id=id, tokens=tokens, stats=STATS, finish_reason=reason) for id in ids]
        self._sock.sendall(encode(StepOutput(chunks=chunks, stats=EngineStats(num_running=len(ids)))))


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used: the clock of clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


def measure(engine: FrameFeed, served: subprocess.Popen[str], port: int, num: int, period_s: float, chunks: int) -> Any:
    """Run `num` streams of that many chunks; period_s: between two frames."""
    with child("--readers", port, num, chunks) as clients:
        ids = engine.submitted(num)
        engine.step(ids, 0, is_last=False)
        assert clients.stdout is not None
        clients.stdout.readline()
        used_s, began, sent = cpu_s(served.pid), time.monotonic(), []
        for number in range(1, chunks):
            time.sleep(max(0.0, began + number * period_s - time.monotonic()))
            sent.append(time.monotonic())
            engine.step(ids, number, is_last=number == chunks - 1)
        streams = json.loads(clients.stdout.read())
        used_s = cpu_s(served.pid) - used_s
    reads = [[(at, events) for at, events in stream if at > began] for stream in streams]
    gaps = [1e3 * (after[0] - before[0]) for stream in reads for before, after in pairwise(stream)] or [0.0, 0.0]
    total, events = num * (chunks - 1), sum(count for stream in reads for _, count in stream)
    row = {
        "streams": num,
        "load": "paced" if period_s else "full",
        "cpu_us_per_chunk": 1e6 * used_s / total,
        "cpu_us_per_event": 1e6 * used_s / events,
        "chunks_per_s": total / (max(stream[-1][0] for stream in reads) - began),
        "events_per_chunk": events / total,
        **{f"gap_p{share}_ms": quantiles(gaps, n=100)[share - 1] for share in (50, 99)},
    }
    if num == 1 and period_s and events == len(sent):
        arrived = [at for at, events in reads[0] for _ in range(events)]
        late = [1e3 * (at - since) for at, since in zip(arrived, sent, strict=True)]
        row |= {f"latency_p{share}_ms": quantiles(late, n=100)[share - 1] for share in (50, 99)}
    return row


async def several(num_fronts: int, streams: int, num_slow: int, asked: Namespace) -> dict[str, Any]:
    """Run `streams` streams, slow ones included, through that many fronts at one pace, and return the row."""
    chunks, per_second, waves = asked.chunks, asked.steps_per_second, asked.waves
    args = EngineArgs.load({"device": "cpu", "max_num_seqs": 512, "api_server_count": num_fronts})
    config, tokenizer = with_tokenizer(args, read_engine(args, num_gpus=0)[0])
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    socks, client, up = listening_sockets("127.0.0.1", 0, num_fronts), EngineClient(), asyncio.Event()
    port = socks[0].getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="f", dir="/tmp") as folder:
        address = await client.listen(f"unix:{folder}/e")
        engine = await asyncio.to_thread(FrontSockets, await asyncio.to_thread(connect, address), READY)
        playing = threading.Event()

        def wave() -> list[list[tuple[float, int]]]:
            """Play the engine until the clients have begun, and then at the given pace; return what they read."""
            ids: list[int] = []
            with child("--readers", port, streams - num_slow, chunks, num_slow) as clients:
                while len(ids) < streams:
                    ids += [message.id for message in engine.poll(0.1) if isinstance(message, Submit)]
                began = time.monotonic()
                for number in range(chunks):
                    time.sleep(max(0.0, began + number / per_second - time.monotonic()))
                    reason = "length" if number == chunks - 1 else None
                    token = [tokens[number % len(tokens)]]
                    made = [TokenChunk(id=id, tokens=token, stats=STATS, finish_reason=reason) for id in ids]
                    engine.send(StepOutput(chunks=made, stats=EngineStats(num_running=len(ids))))
                    engine.poll()
                steps_per_s.append(chunks / (time.monotonic() - began))
                while engine._unsent or any(other._unsent for other in engine._others.values()):
                    engine.poll(0.1)
                assert clients.stdout is not None
                clients.stdout.readline()
                reads: list[list[tuple[float, int]]] = json.loads(clients.stdout.read())
                return reads

        steps_per_s: list[float] = []

        def play() -> dict[str, Any]:
            """Play that many waves, one behind the other, and return the row."""
            pids = [process.pid for process in fronts._running.values()]
            used_s, reads, memory = sum(map(cpu_s, pids)), [], []
            for _ in range(waves):
                reads += wave()
                memory.append(round(sum(map(memory_mb, pids))))
            used_s = sum(map(cpu_s, pids)) - used_s
            gaps = [1e3 * (after[0] - before[0]) for stream in reads for before, after in pairwise(stream)]
            return {
                "fronts": num_fronts,
                "streams": streams,
                "slow": num_slow,
                "steps_per_s": min(steps_per_s),
                "cpu_us_per_chunk": 1e6 * used_s / streams / chunks / waves,
                "events_per_chunk": sum(count for stream in reads for _, count in stream) / len(reads) / chunks,
                **{f"gap_p{share}_ms": quantiles(gaps, n=100)[share - 1] for share in (50, 99)},
                "memory_mb": " ".join(map(str, memory)),
            }

        def idle() -> None:
            while not playing.is_set():
                engine.poll(0.1)

        waiting = asyncio.create_task(asyncio.to_thread(idle))
        fronts = Fronts(args, config, client, socks)
        serving = asyncio.create_task(fronts.serve(up.set))
        await up.wait()
        playing.set()
        await waiting
        row = await asyncio.to_thread(play)
        fronts.should_exit = True
        await serving
        await client.close()
        engine.close()
        return row


def memory_mb(pid: int) -> float:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


def run(args: Namespace) -> None:
    """Measure, and print the table."""
    if args.fronts:
        with reporting(args.output, "fronts", {"command": command()}, say) as report:
            for streams, num, share in product(args.streams, args.fronts, (0.0, 0.1)):
                row = asyncio.run(several(num, streams, int(share * streams), args))
                say(str(row))
                report.add("fronts", row)
        print(report.markdown)
        return
    with (
        tempfile.TemporaryDirectory(prefix="f", dir="/tmp") as folder,
        child("--front", f"unix:{folder}/e") as served,
        reporting(args.output, "front", {"command": command()}, say) as report,
    ):
        assert served.stdout is not None
        found = json.loads(served.stdout.readline())
        engine = FrameFeed(f"unix:{folder}/e", found["tokens"])
        for num in args.streams:
            period_s = max(num / args.per_second, 1 / MAX_FRAMES_PER_S)
            for each in (period_s, 0.0):
                row = measure(engine, served, found["port"], num, each, args.chunks)
                say(str(row))
                report.add("front", row)
    print(report.markdown)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    made.add_argument("--chunks", type=int, default=200, help="of each stream")
    made.add_argument("--per-second", type=float, default=640.0, help="chunks, of a paced load")
    made.add_argument("--fronts", type=int, nargs="+", help="measure so many fronts before one engine instead")
    made.add_argument("--steps-per-second", type=float, default=150.0, help="of that engine")
    made.add_argument("--waves", type=int, default=1, help="so often all streams, one set behind the other")
    made.add_argument("--front", help="be the front, for the engine at this address")
    made.add_argument("--readers", type=int, nargs="+", help="be the clients: port, streams, chunks, slow ones")
    args = made.parse_args()
    if args.front:
        uvloop.run(front(args.front))
    elif args.readers:
        asyncio.run(readers(*args.readers))
    else:
        run(args)


if __name__ == "__main__":
    main()
