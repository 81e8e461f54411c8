"""One step's exchange between two processes: the host link, with and without polling, and gloo.

    python -m bench.link

The figures are half of a round trip in microseconds, median and 90th percentile, for messages of three sizes and for a
sender that computes between two messages. Pins nothing: what else runs on the machine counts.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bench.harness import command, parser
from cluster.bench.report import Row, reporting
from secateur.cli.bench import say
from workers.comm.groups import open_store
from workers.comm.host_link import HostLink

SIZES = {"a tree for 1 request": (1500, 600), "for 8": (8000, 4000), "for 8, with features": (60_000, 8000)}
PAUSES_MS = (0.0, 1.0, 5.0, 20.0)
LINKS = {"gloo": None, "socket": 0.0, "socket, polls for 0.2 ms": 200e-6, "socket, polls for 30 ms": 30e-3}
NUM_ROUNDS, NUM_WARM_UP = 300, 50


class Case(NamedTuple):
    """One cell: bytes of request and reply, computing time of the sender, seconds of polling (None = gloo)."""

    sizes: tuple[int, int]
    pause_ms: float
    spin_s: float | None


def operations(
    case: Case, rank: int, end: socket.socket, store: str
) -> tuple[Callable[[Tensor], object], Callable[[Tensor], object]]:
    """Return how this side sends and receives."""
    if case.spin_s is not None:
        link = HostLink(end, 60.0, case.spin_s)
        return link.put, link.take
    dist.init_process_group("gloo", init_method=f"tcp://{store}", rank=rank, world_size=2)
    return lambda tensor: dist.send(tensor, 1 - rank), lambda tensor: dist.recv(tensor, 1 - rank)


def side(rank: int, case: Case, end: socket.socket, store: str, results: Any) -> None:
    """Exchange messages; rank 0 measures."""
    torch.set_num_threads(1)
    put, take = operations(case, rank, end, store)
    request, reply = (torch.zeros(size, dtype=torch.uint8) for size in case.sizes)
    rounds = []
    for _ in range(NUM_WARM_UP + NUM_ROUNDS):
        if rank == 1:
            take(request)
            put(reply)
            continue
        busy_until = time.perf_counter() + 1e-3 * case.pause_ms
        while time.perf_counter() < busy_until:
            pass
        began = time.perf_counter()
        put(request)
        take(reply)
        rounds.append(0.5e6 * (time.perf_counter() - began))
    if rank == 0:
        results.put(rounds[NUM_WARM_UP:])


def measure(case: Case) -> list[float]:
    """Return the microseconds each way of every round."""
    context = multiprocessing.get_context("fork")
    ends, results = socket.socketpair(), context.Queue()
    store, address = open_store()
    port = store.port
    del store
    processes = [
        context.Process(target=side, args=(rank, case, ends[rank], f"{address.split(':')[0]}:{port}", results))
        for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    rounds: list[float] = results.get(timeout=120)
    for process in processes:
        process.join()
    for end in ends:
        end.close()
    return rounds


def main() -> None:
    options = parser(__doc__).parse_args()
    with reporting(options.output, "link", {"command": command()}, say) as report:
        for name, sizes in SIZES.items():
            for pause_ms in PAUSES_MS:
                row: Row = {"message": name, "sender_computes_ms": pause_ms}
                for link, spin_s in LINKS.items():
                    rounds = measure(Case(sizes, pause_ms, spin_s))
                    row[link] = {"median": median(rounds), "p90": quantiles(rounds, n=10)[-1]}
                say(str(report.add("microseconds", row)))
    print(report.markdown)


if __name__ == "__main__":
    main()
