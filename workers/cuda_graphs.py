"""CUDA graphs: a forward pass is captured once per bucket of sizes and replayed with one launch.

A step is padded to its bucket: its inputs are copied into static buffers, and its plan is filled in place
(`Kernels.plan(into=...)`). The padding rows belong to an additional request whose only page is the null page, where
they write and which is all they attend to. Rows of different requests never attend to each other, so padding does not
change the results. A step runs in the smallest bucket that holds its rows and its requests: up to MAX_ROWS rows there
are buckets for few and for many requests, for larger prompt chunks only for as many as there may be. A step with a
chunk that flash attention takes (`workers.kernels.prompt_attention`) runs without a graph, because its keys' number is
part of that kernel's launch; it takes longer than its launches do.

Legend: N packed rows, B requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from workers.config import EngineConfig
from workers.kernels.select import AttentionPlan, DeltaPlan, Kernels
from workers.kernels.torch_delta import chains
from workers.kv_cache import KVPool
from workers.models.base import BaseDecoder
from workers.transfer import to_device
from workers.types import AttentionMetadata, Folds

MAX_ROWS = 512
"""Up to here buckets grow by a third; above, where padding costs more than launches, by `_LARGE_STEP` rows."""
_LARGE_STEP = 256
MOST_ROWS = 2048
"""A larger step keeps any GPU busy for longer than it takes to launch its kernels."""

Run = Callable[..., tuple[Tensor, ...]]
"""(plan, *inputs [N, ...]) -> outputs [N, ...] on the device, without synchronizing with the host."""


Outputs = TypeVar("Outputs")


class Planner(Protocol):
    """A model's `plan`, or its kernels' `delta_plan`."""

    def __call__(self, metadata: AttentionMetadata, *, into: Any = None) -> AttentionPlan | DeltaPlan:
        """Plan one step."""
        ...


class Size(NamedTuple):
    """The numbers of rows and requests for which a graph is captured."""

    rows: int
    requests: int

    @staticmethod
    def of(num_rows: int, num_requests: int) -> Size:
        """Return the smallest bucket for these numbers. It has at least as many rows as requests."""
        return Size(bucket(max(1, num_rows, num_requests)), 1 << max(0, num_requests - 1).bit_length())


def bucket(n: int) -> int:
    """Round n >= 1 up to one of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... 512, 768, 1024, 1280, ...

    At most a third of the rows are padding.
    """
    if n > MAX_ROWS:
        return -(-n // _LARGE_STEP) * _LARGE_STEP
    power = 1 << (n - 1).bit_length()
    return power // 4 * 3 if n <= power // 4 * 3 else power


def sizes(config: EngineConfig) -> list[Size]:
    """Return all buckets of an engine's steps, the largest first, so that smaller graphs reuse their memory.

    Each number of requests has buckets for as many rows as that many trees have; the largest also has those of prompt
    chunks, which a step of few requests then shares.
    """
    top = Size.of(1, config.max_num_seqs).requests
    most = bucket(min(MOST_ROWS, max(config.max_num_seqs * config.tree_rows, config.max_num_batched_tokens)))
    steps = [rows for rows in range(most, 0, -1) if bucket(rows) == rows]
    return [
        Size(rows, requests)
        for requests in (top >> i for i in range(top.bit_length()))
        for rows in steps
        if requests // 2 < rows and (requests == top or rows <= min(MAX_ROWS, bucket(requests * config.tree_rows)))
    ]


def fitting(size: Size, buckets: Container[Size], most_requests: int) -> Size | None:
    """Return the bucket of these rows with the fewest requests that holds a step; None if it has too many rows."""
    while size.requests <= most_requests:
        if size in buckets:
            return size
        size = Size(size.rows, 2 * size.requests)
    return None


def padded(metadata: AttentionMetadata, size: Size) -> AttentionMetadata:
    """Pad a step to size.rows rows and size.requests + 1 requests; the last request owns the padding rows."""
    num_rows, requests = len(metadata.slot_N), size.requests + 1
    offsets = _resized(metadata.query_offsets, requests + 1, num_rows)
    offsets[-1] = size.rows
    return AttentionMetadata(
        query_offsets=offsets,
        page_table_BP=_resized(metadata.page_table_BP, requests),
        base_B=_resized(metadata.base_B, requests),
        slot_N=_resized(metadata.slot_N, size.rows),
        visible_N=_resized(metadata.visible_N, size.rows, 1),
        ancestors_N=_resized(metadata.ancestors_N, size.rows),
        read_seat_B=_resized(metadata.read_seat_B, requests),
        write_seat_B=_resized(metadata.write_seat_B, requests),
        keep_row_K=metadata.keep_row_K,
        keep_seat_K=metadata.keep_seat_K,
    )


def _resized(array: np.ndarray, length: int, fill: int = 0) -> np.ndarray:
    """Return a longer copy."""
    out = np.empty((length, *array.shape[1:]), dtype=array.dtype)
    out[: len(array)], out[len(array) :] = array, fill
    return out


@dataclass(slots=True, kw_only=True)
class _Bucket:
    """One size: views of the static buffers, and the graph that runs over them."""

    inputs: tuple[Tensor, ...]
    plan: AttentionPlan | DeltaPlan
    replay: Callable[[], tuple[Tensor, ...]] | None = None


class Recorder:
    """Captures graphs that share one memory pool, because they never run at the same time.

    A graph keeps what it returns alive, so that the pool does not reuse its memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._side: torch.cuda.Stream | None = None  # a single one, because cuBLAS keeps 32 MB per stream
        self._seconds, self._num_bytes = 0.0, 0

    @torch.inference_mode()
    def record(self, run: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """Capture `run` and return a function that replays it; every call returns the same tensors."""
        began, free = time.perf_counter(), _free_bytes(self._device)
        side = self._side = self._side or torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):  # compile kernels and initialize libraries before the capture
            run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local, because NCCL's watchdog thread may query its events meanwhile.
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
        """Destroy the graphs, which must not be replayed afterwards.

        NCCL waits forever to destroy a communicator whose collectives are part of a live graph.
        """
        if self._graphs:
            torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()

    @property
    def report(self) -> dict[str, str | int]:
        """Number, capture time and memory of the graphs."""
        return {
            "graphs": len(self._graphs), "graph_ms": round(1e3 * self._seconds), "graph_bytes": self._num_bytes
        }  # fmt: skip


class Graphs:
    """A captured forward pass. All ranks of a tensor-parallel group construct and call it together.

    run, plan: the forward pass and its attention planner. example: one row of each input on the device, for dtype and
    width. size_of: the smallest bucket for numbers of rows and requests. table_width: pages of the longest request.
    is_captured: False runs the padded steps without graphs, so that tests can show on a CPU that padding changes
    nothing. recorder: that of graphs which never run at the same time. is_eager: tells steps that run without a graph.

    folds: those of a hybrid's accepted rows, for `fold`.
    """

    folds: Graphs | None = None

    def __init__(
        self,
        run: Run,
        plan: Planner,
        example: tuple[Tensor, ...],
        *,
        buckets: list[Size],
        size_of: Callable[[int, int], Size] = Size.of,
        table_width: int,
        is_captured: bool = True,
        recorder: Recorder | None = None,
        is_eager: Callable[[AttentionMetadata], bool] = lambda metadata: False,
    ) -> None:
        self._run, self._plan, self._size_of, self._is_eager = run, plan, size_of, is_eager
        self._device = example[0].device
        most, self._most_requests = (max(column) for column in zip(*buckets, strict=True))
        self._buffers = [one.new_zeros(most, *one.shape[1:]) for one in example]
        self._outputs: list[Tensor] = []  # of every graph: 76 of them would each keep their own
        self.recorder = recorder or Recorder(self._device)
        self._buckets: dict[Size, _Bucket] = {}
        for size in buckets:
            made = self._buckets[size] = self._bucket(size, table_width)
            if is_captured:
                made.replay = self.recorder.record(partial(self._run_bucket, made))

    @property
    def report(self) -> dict[str, str | int]:
        """Number, capture time and memory of the graphs, for the topology report."""
        return self.recorder.report

    def release(self) -> None:
        """See `Recorder.release`."""
        self.recorder.release()

    def __call__(self, metadata: AttentionMetadata, *inputs_N: Tensor) -> tuple[Tensor, ...]:
        """Run one forward pass. Inputs [N, ...] may be on any device. The next call overwrites the outputs.

        The caller is in inference mode, which takes longer to enter than most operations here take.
        """
        num_rows, num_requests = len(metadata.slot_N), len(metadata.base_B)
        size = fitting(self._size_of(num_rows, num_requests), self._buckets, self._most_requests)
        if size is None or self._is_eager(metadata):
            return self._run(self._plan(metadata), *(to_device(given, self._device) for given in inputs_N))
        chosen = self._buckets[size]
        # Padding rows keep the inputs of an earlier step, which are valid tokens.
        for static, given in zip(chosen.inputs, inputs_N, strict=True):
            static[:num_rows].copy_(given, non_blocking=True)
        plan = self._plan(padded(metadata, size), into=chosen.plan)
        outputs = self._run(plan, *chosen.inputs) if chosen.replay is None else chosen.replay()
        return tuple(output[:num_rows] for output in outputs)

    def fold(self, folds: Folds) -> None:
        """Move recurrent states on by the accepted rows of the last pass."""
        assert self.folds is not None
        self.folds(chains(folds), folds.row_A)

    def _run_bucket(self, bucket: _Bucket) -> tuple[Tensor, ...]:
        """Run a bucket's pass and copy its outputs to those that all graphs share."""
        outputs = self._run(bucket.plan, *bucket.inputs)
        if not self._outputs:  # of the first bucket, which has the most rows, before it is captured
            self._outputs = [torch.empty_like(output) for output in outputs]
        shared = tuple(static[: len(output)] for static, output in zip(self._outputs, outputs, strict=True))
        for static, output in zip(shared, outputs, strict=True):
            static.copy_(output)
        return shared

    def _bucket(self, size: Size, table_width: int) -> _Bucket:
        none = np.zeros(0, dtype=np.int32)
        empty = AttentionMetadata(
            query_offsets=np.zeros(1, dtype=np.int32),
            page_table_BP=np.zeros((0, table_width), dtype=np.int32),
            base_B=none,
            slot_N=none,
            visible_N=none,
            ancestors_N=none.astype(np.int64),
        )
        inputs = tuple(static[: size.rows] for static in self._buffers)
        return _Bucket(inputs=inputs, plan=self._plan(padded(empty, size)))


def decoder_graphs(decoder: BaseDecoder, kv: KVPool, config: EngineConfig, *, is_captured: bool = True) -> Graphs:
    """Capture a model's forward pass: (tokens_N, positions_N) -> the fields of `Hidden` that are not None."""

    def run(plan: AttentionPlan, tokens_N: Tensor, positions_N: Tensor) -> tuple[Tensor, ...]:
        return tuple(rows for rows in decoder.forward(tokens_N, positions_N, plan, kv) if rows is not None)

    one = torch.zeros(1, dtype=torch.int32, device=decoder.device)
    plan = partial(decoder.plan, page_size=config.page_size)
    graphs = Graphs(
        run,
        plan,
        (one, one),
        buckets=sizes(config),
        table_width=config.pages_for(config.max_model_len),
        is_captured=is_captured,
        is_eager=decoder.has_long_chunks,
    )
    if kv.states is not None:
        graphs.folds = _fold_graphs(decoder, kv, config, graphs.recorder, is_captured=is_captured)
    return graphs


def fold_size(config: EngineConfig, num_requests: int) -> Size:
    """Return the bucket of folds: for the longest paths, since rows that are not there cost little."""
    requests = Size.of(1, num_requests).requests
    return Size(bucket(requests * (1 + (config.draft.tree.longest_path if config.draft else 0))), requests)


def fold_sizes(config: EngineConfig) -> list[Size]:
    """Return all buckets of folds, the largest first."""
    top = Size.of(1, config.max_num_seqs).requests
    return [fold_size(config, top >> i) for i in range(top.bit_length())]


def _fold_graphs(
    decoder: BaseDecoder, kv: KVPool, config: EngineConfig, recorder: Recorder, *, is_captured: bool
) -> Graphs:
    """Capture a hybrid's folds: (stashed rows) -> nothing."""

    def run(plan: DeltaPlan, row_A: Tensor) -> tuple[Tensor, ...]:
        decoder.fold_rows(row_A, plan, kv)
        return ()

    return Graphs(
        run,
        partial(decoder.kernels.delta_plan, device=decoder.device),
        (torch.zeros(1, dtype=torch.int32, device=decoder.device),),
        buckets=fold_sizes(config),
        size_of=lambda num_rows, num_requests: max(Size.of(num_rows, num_requests), fold_size(config, num_requests)),
        table_width=1,
        is_captured=is_captured,
        recorder=recorder,
    )


def can_capture(kernels: Kernels, device: torch.device, enforce_eager: bool) -> bool:
    """Return True on CUDA with Triton kernels, whose plans can be filled in place."""
    return device.type == "cuda" and kernels.NAME == "triton" and not enforce_eager


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]
