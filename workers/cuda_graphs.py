"""CUDA graphs: a forward pass captured once per bucket of sizes and replayed by one launch.

    bucket(n) -> int                                    the rows that a forward of n rows really runs
    sizes(max_requests, rows_each) -> list[Size]        the buckets of an engine
    Graphs(run, plan, example, buckets, table_width)    captures at start-up
        (metadata, *inputs_N) -> tuple of outputs       [N, ...] each, until the next call
    Recorder(device)                                    what captures
        .record(run) -> run                             over buffers of the caller's
        .release()                                      before the process groups are left

A step is rounded up to its bucket: its inputs are copied into the same static buffers every time, its plan is filled
in place (`Kernels.plan(into=...)`), and the rows added are those of one more request, whose only page is the null page:
they write there and see nothing but what they wrote. Rows never look at each other across requests, so what the real
rows say does not change. A step that is larger than every bucket, such as a long prompt chunk, runs as it is.

Legend: N packed rows, B requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.config import EngineConfig
from workers.kernels.select import AttentionPlan, Kernels
from workers.kv_cache import KVPool
from workers.models.load import AnyDecoder
from workers.transfer import to_device
from workers.types import AttentionMetadata

MAX_ROWS = 512
"""Larger steps keep a GPU busy for longer than their kernels take to launch."""

Run = Callable[..., tuple[Tensor, ...]]
"""(plan, *inputs [N, ...]) -> outputs [N, ...], on the device, without looking at a value on the host."""


Outputs = TypeVar("Outputs")


class Planner(Protocol):
    """A model's `plan` for its own pages."""

    def __call__(self, metadata: AttentionMetadata, *, into: Any = None) -> AttentionPlan: ...


class Size(NamedTuple):
    """What one graph is captured for: rows, and requests that may have some."""

    rows: int
    requests: int

    @staticmethod
    def of(num_rows: int, num_requests: int) -> Size:
        """The smallest bucket that holds them. Requests without a row count too, so rows are at least as many."""
        return Size(bucket(max(1, num_rows, num_requests)), 1 << max(0, num_requests - 1).bit_length())


def bucket(n: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is not below n >= 1: at most a third is padding."""
    power = 1 << (n - 1).bit_length()
    return power // 4 * 3 if n <= power // 4 * 3 else power


def sizes(max_requests: int, rows_each: int) -> list[Size]:
    """Every bucket that steps of up to max_requests with up to rows_each rows each may need, up to MAX_ROWS; the
    largest first, so that the others find room in its memory."""
    top = Size.of(1, max_requests).requests
    steps = [rows for rows in range(MAX_ROWS, 0, -1) if bucket(rows) == rows]
    return [
        Size(rows, requests)
        for requests in (top >> i for i in range(top.bit_length()))
        for rows in steps
        if requests // 2 < rows <= bucket(requests * rows_each)
    ]


def padded(metadata: AttentionMetadata, size: Size) -> AttentionMetadata:
    """The same step with size.rows rows and size.requests + 1 requests, the last of which owns the rows added."""
    num_rows, num_requests = len(metadata.slot_N), len(metadata.base_B)
    rows, requests = size.rows - num_rows, size.requests + 1 - num_requests
    offsets = F.pad(metadata.query_offsets, (0, requests), value=num_rows)
    offsets[-1] = size.rows
    return AttentionMetadata(
        query_offsets=offsets,
        page_table_BP=F.pad(metadata.page_table_BP, (0, 0, 0, requests)),
        base_B=F.pad(metadata.base_B, (0, requests)),
        slot_N=F.pad(metadata.slot_N, (0, rows)),
        visible_N=F.pad(metadata.visible_N, (0, rows), value=1),
        ancestors_N=F.pad(metadata.ancestors_N, (0, rows)),
    )


@dataclass(slots=True, kw_only=True)
class _Bucket:
    """One size: views of the static buffers, and what is replayed over them."""

    inputs: tuple[Tensor, ...]
    plan: AttentionPlan
    replay: Callable[[], tuple[Tensor, ...]] | None = None


class Recorder:
    """Captures graphs that share one memory pool: they never run at the same time, and what they return is kept apart
    by being held."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._side: torch.cuda.Stream | None = None  # one for all: cuBLAS keeps 32 MB for every stream it has met
        self._seconds, self._num_bytes = 0.0, 0

    @torch.inference_mode()
    def record(self, run: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """`run` as a graph: the same call, which always returns the same tensors."""
        began, free = time.perf_counter(), _free_bytes(self._device)
        side = self._side = self._side or torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):  # kernels are compiled and libraries initialised before anything is recorded
            run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog thread may ask the device about its own events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = run()
        self._pool = graph.pool()
        self._graphs.append(graph)
        self._num_bytes += free - _free_bytes(self._device)
        self._seconds += time.perf_counter() - began

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay

    def release(self) -> None:
        """Destroys the graphs; nothing is replayed any more. NCCL waits for that, for ever, before it lets go of a
        communicator whose collectives they hold."""
        if self._graphs:
            torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()

    @property
    def report(self) -> dict[str, str | int]:
        """What capturing took."""
        return {
            "graphs": len(self._graphs), "graph_ms": round(1e3 * self._seconds), "graph_bytes": self._num_bytes
        }  # fmt: skip


class Graphs:
    """A forward pass that is replayed. All ranks of a tensor-parallel group make theirs together and use it together.

    run, plan: the pass, and how its attention is planned. example: inputs of one row each, on the device; only their
    types and widths count. table_width: pages of the longest request. is_captured: False runs the same padded steps
    over the same buffers without graphs, which shows on a CPU that padding changes nothing.
    """

    def __init__(
        self,
        run: Run,
        plan: Planner,
        example: tuple[Tensor, ...],
        *,
        buckets: list[Size],
        table_width: int,
        is_captured: bool = True,
    ) -> None:
        self._run, self._plan = run, plan
        self._device = example[0].device
        most = max(size.rows for size in buckets)
        self._buffers = [one.new_zeros(most, *one.shape[1:]) for one in example]
        self._recorder = Recorder(self._device)
        self._buckets: dict[Size, _Bucket] = {}
        for size in buckets:
            made = self._buckets[size] = self._bucket(size, table_width)
            if is_captured:
                made.replay = self._recorder.record(partial(run, made.plan, *made.inputs))

    @property
    def report(self) -> dict[str, str | int]:
        """What capturing took, for the topology that a rank tells."""
        return self._recorder.report

    def release(self) -> None:
        """See `Recorder.release`."""
        self._recorder.release()

    @torch.inference_mode()
    def __call__(self, metadata: AttentionMetadata, *inputs_N: Tensor) -> tuple[Tensor, ...]:
        """One forward pass. Inputs [N, ...] on any device. What it returns is overwritten by the next call."""
        num_rows, num_requests = len(metadata.slot_N), len(metadata.base_B)
        size = Size.of(num_rows, num_requests)
        chosen = self._buckets.get(size)
        if chosen is None:
            return self._run(self._plan(metadata), *(to_device(given, self._device) for given in inputs_N))
        # Rows beyond the step's keep what an earlier step left: valid tokens of nobody.
        for static, given in zip(chosen.inputs, inputs_N, strict=True):
            static[:num_rows].copy_(given, non_blocking=True)
        plan = self._plan(padded(metadata, size), into=chosen.plan)
        outputs = self._run(plan, *chosen.inputs) if chosen.replay is None else chosen.replay()
        return tuple(output[:num_rows] for output in outputs)

    def _bucket(self, size: Size, table_width: int) -> _Bucket:
        nobody = torch.zeros(0, dtype=torch.int32)
        empty = AttentionMetadata(
            query_offsets=torch.zeros(1, dtype=torch.int32),
            page_table_BP=torch.zeros(0, table_width, dtype=torch.int32),
            base_B=nobody,
            slot_N=nobody,
            visible_N=nobody,
            ancestors_N=nobody.long(),
        )
        inputs = tuple(static[: size.rows] for static in self._buffers)
        return _Bucket(inputs=inputs, plan=self._plan(padded(empty, size)))


def decoder_graphs(decoder: AnyDecoder, kv: KVPool, config: EngineConfig, *, is_captured: bool = True) -> Graphs:
    """The forward pass of a whole model, (tokens_N, positions_N) -> the fields of `Hidden` that there are."""

    def run(plan: AttentionPlan, tokens_N: Tensor, positions_N: Tensor) -> tuple[Tensor, ...]:
        return tuple(rows for rows in decoder.forward(tokens_N, positions_N, plan, kv) if rows is not None)

    one = torch.zeros(1, dtype=torch.int32, device=decoder.device)
    plan = partial(decoder.plan, page_size=config.page_size)
    return Graphs(
        run,
        plan,
        (one, one),
        buckets=sizes(config.max_num_seqs, config.tree_rows),
        table_width=config.pages_for(config.max_model_len),
        is_captured=is_captured,
    )


def can_capture(kernels: Kernels, device: torch.device, enforce_eager: bool) -> bool:
    """Only Triton's plans stay in one place, and only CUDA has graphs."""
    return device.type == "cuda" and kernels.NAME == "triton" and not enforce_eager


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]
