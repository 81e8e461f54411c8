"""The memory that a rank needs beside weights, KV pages and hidden states, counted before any of it is allocated.

    PassShape.of(spec, ranks, num_taps)               how wide one rank's rows are in a forward pass
    pass_bytes(shape, config, num_rows)                                   the most that a pass holds at once
    graph_bytes(shape, config, sizes)                                     the buffers of its CUDA graphs

`verifier.workspace` and `drafter.workspace` add these up for a rank; `workers.kv_sizing` leaves that much free, and
`secateur plan` prints it. A pass of N rows holds, in elements a row,

    K + max(5 or 9 D, 4 D + 3 I, 2 D + X + Q + 2 C + max(R, W, Q + D), 5 or 7 D + T D) + 2 d     and attention's parts

that is what lives through all layers (K), and the widest of four moments: a norm, which torch computes in float32; the
MLP, with the residual stream before and behind attention, its norm, attention's output, the fused gate and up, and
their product; attention, with the residual stream, the input, queries, keys and values, R to rotate them, and W for
keys and values that are clamped and then converted to 8 bits; and the end, where the taps are copied side by side.
Hybrids have a fifth: a gated delta net, which computes in float32 from its convolution on.
Attention's parts are float32 results for pieces of the keys; the splits of products with 8-bit weights are counted
whether weights are in 8 bits or not, a few MB. Where they are, a pass of many rows holds the largest one dequantized.
Transformers' classes are counted as if they were ours, mixtures of experts by their intermediate_size.

Legend: D hidden width, I intermediate width, Q and C the widths of queries and of keys, d head width, T taps, X width
of the first attention's input. I, Q and C are one rank's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workers.config import EngineConfig
from workers.cuda_graphs import Size, fold_sizes
from workers.kernels.block_scaled import SPLIT_ROWS, num_splits
from workers.kernels.host import PlanShape, invariant_keys_per_piece
from workers.kernels.prompt_attention import FEWEST_PAIRS, FEWEST_ROWS
from workers.models.quantization import Quantization, read_quantization
from workers.models.specs import DeltaSpec, DraftSpec, ModelSpec, TransformersSpec

LIBRARY_BYTES = 2 * (32 << 20)
"""cuBLAS keeps 32 MB for each stream; graphs are captured on one of their own."""
_LISTED, _GROUP = 8192, 32
"""Values and columns of `workers.kernels.triton_truncation`: of a row's list, and of a group."""

_MAX_BACKLOG, _MAX_WAITING = 256, 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Bytes that a rank needs beside weights, KV pages and hidden states."""

    buffers: int = 0
    """Inputs, outputs and plans of CUDA graphs, and the noise cache."""
    captured: int = 0
    """Memory that passes hold while they are captured; their graphs keep it."""
    eager: int = 0
    """The most that everything else holds at once: larger passes, logits, sampling."""
    libraries: int = 0
    seats: int = 0
    """Recurrent states of running requests and cached prefixes, and the rows of trees that wait for a verdict."""

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.buffers + self.captured + self.eager + self.libraries + self.seats


def seat_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Return what a rank's `StatePool` takes for each running request; 0 for models without recurrent states."""
    if spec.delta is None:
        return 0
    stash_items = config.tree_rows * spec.delta.stash_items(config.tensor_parallel_size)
    return _state_bytes(config, spec.delta) + config.item_bytes * stash_items


def states_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Return what a rank's `StatePool` takes in all; 0 for models without recurrent states."""
    if spec.delta is None:
        return 0
    of_requests = (1 + config.max_num_seqs) * seat_bytes(config, spec)
    return of_requests + config.num_state_checkpoints * _state_bytes(config, spec.delta)


def _state_bytes(config: EngineConfig, delta: DeltaSpec) -> int:
    ranks = config.tensor_parallel_size
    return 4 * delta.state_items(ranks) + config.item_bytes * delta.input_items(ranks)


def max_backlog(config: EngineConfig) -> int:
    """Return the most rows that may wait to be fed for a request without drafts.

    Feeding later costs no more, and often the request finishes first. With many requests the limit is lower, because
    each waiting row needs a buffered hidden state.
    """
    return min(_MAX_BACKLOG, _MAX_WAITING // config.max_num_seqs)


def max_message_rows(config: EngineConfig) -> int:
    """Return the most rows of one message to the drafter.

    A message holds a whole step with one more row for each new request, and at least one request's backlog with its
    tree. So no prompt waits for another, and a request over its backlog is fed as fast as it gains tokens.
    """
    step = config.max_num_batched_tokens + config.max_num_seqs
    trees = config.max_num_seqs * config.tree_rows + config.page_size
    return max(step, trees, max_backlog(config) + 2 * config.tree_rows)


def max_step_rows(config: EngineConfig) -> int:
    """Return the most rows of one step of the target: prompts advance by a page however many trees there are."""
    return max(config.max_num_batched_tokens, config.max_num_seqs * config.tree_rows + config.page_size)


def cut_bytes(num_columns: int) -> int:
    """Return the bytes that the search of a row's truncation threshold holds: its list, and two numbers a group."""
    return 4 * (min(_LISTED, 1 << max(0, num_columns - 1).bit_length()) + 2 * -(-num_columns // _GROUP))


def may_capture(config: EngineConfig) -> bool:
    """Return whether ranks capture CUDA graphs, as far as the configuration tells."""
    return config.device == "cuda" and config.kernels != "torch" and not config.enforce_eager


def kept_quantization(config: EngineConfig, folder: Path | str, spec: DraftSpec) -> Quantization | None:
    """Return how a model's weights are quantized if ranks keep them in their bits, as far as config.json tells."""
    is_multiplied = config.device == "cuda" and config.kernels != "torch" and config.item_bytes == 2
    if not is_multiplied or isinstance(spec, TransformersSpec):
        return None
    how = read_quantization(Path(folder))
    return None if how is None or "FP4" in how.method or how.bits == 2 else how


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """Widths of one rank's rows in a forward pass, in elements; see the module."""

    hidden: int
    inner: int
    queries: int
    keys: int
    head: int
    first_input: int
    kept: int
    taps: int = 0
    has_qk_norm: bool = False
    has_gate: bool = False
    num_windows: int = 1
    channels: int = 0
    """Of a gated delta net, and the part of them that are values."""
    values: int = 0
    dequantizes: bool = False
    """True if weights are kept in few bits, and dequantized for many rows."""

    @staticmethod
    def of(
        spec: ModelSpec, ranks: int, num_taps: int = 0, *, is_head: bool = False, dequantizes: bool = False
    ) -> PassShape:
        """Return the shape of a model whose residual stream is captured `num_taps` times, or of a head's layers.

        A head reads features: the features, both side by side, and their sum are kept.
        """
        width = spec.hidden_size
        return PassShape(
            hidden=width,
            inner=-(-spec.intermediate_size // ranks),
            queries=spec.num_heads * spec.head_dim // ranks,
            keys=-(-spec.num_kv_heads // ranks) * spec.head_dim,
            head=spec.head_dim,
            first_input=2 * width if is_head else width,
            kept=(4 if is_head else num_taps) * width,
            taps=num_taps,
            has_qk_norm=spec.qk_norm,
            has_gate=spec.attention_gate or spec.latent is not None,  # queries before they meet W_uk, and a copy
            num_windows=len(set(spec.windows)),
            channels=spec.delta.num_channels // ranks if spec.delta else 0,
            values=spec.delta.num_value_heads * spec.delta.value_dim // ranks if spec.delta else 0,
            dequantizes=dequantizes,
        )

    def row_items(self, item_bytes: int, *, is_fp8_kv: bool = False, is_triton: bool = False) -> int:
        """Return the elements that a pass holds for each row, without attention's parts."""
        D, Q, C = self.hidden, self.queries, self.keys
        wide = 4 // item_bytes  # of a float32 copy
        written = is_fp8_kv * (2 * C + -(-2 * C // item_bytes))
        rotated = (Q + C) * (2 + 2 * wide if self.has_qk_norm else 1)
        moments = (
            (3 + 2 * wide + 2 * (wide > 1)) * D,
            4 * D + 3 * self.inner,
            2 * D + self.first_input + Q + 2 * C + max(rotated, written, Q + D) + self.has_gate * 2 * Q,
            2 * D
            + 2 * self.channels
            + self.values
            + wide * ((1 if is_triton else 4) * self.channels + 3 * self.values),
            (3 + 2 * wide + self.taps) * D,
        )
        return self.kept + max(moments) + 2 * self.head

    @property
    def weights(self) -> list[tuple[int, int]]:
        """The outputs and inputs of the products of a layer."""
        D, Q = self.hidden, self.queries
        attention = [((1 + self.has_gate) * Q + 2 * self.keys, self.first_input), (D, Q)]
        delta = [(self.channels + self.values, D), (D, self.values)] if self.channels else []
        return [*attention, *delta, (2 * self.inner, D), (D, self.inner)]

    @property
    def most_split_sums(self) -> int:
        """The most sums of a row that a product with 8-bit weights splits: outputs times splits."""
        splits = [(num_outputs, num_splits(num_outputs, num_inputs)) for num_outputs, num_inputs in self.weights]
        return max((num_outputs * count for num_outputs, count in splits if count > 1), default=0)


def pass_bytes(shape: PassShape, config: EngineConfig, num_rows: int) -> int:
    """Return the most bytes that a forward pass of these rows holds at once, its outputs included."""
    plans = [_plan_shape(shape, config, num_rows, requests) for requests in range(1, config.max_num_seqs + 2)]
    parts = max(plan.num_parts * plan.part_pairs for plan in plans) * (shape.keys + shape.keys // shape.head)
    sums = min(num_rows, SPLIT_ROWS) * shape.most_split_sums
    dequantized = max(map(math.prod, shape.weights)) if shape.dequantizes and num_rows > SPLIT_ROWS else 0
    is_fp8_kv, is_triton = config.kv_cache_dtype == "fp8", may_capture(config)
    items = shape.row_items(config.item_bytes, is_fp8_kv=is_fp8_kv, is_triton=is_triton)
    return (num_rows * items + dequantized) * config.item_bytes + 4 * (parts + sums)


def chunk_bytes(shape: PassShape, config: EngineConfig, num_rows: int) -> int:
    """Return what flash attention takes for long chunks of prompts, 0 = a pass of these rows has none.

    That is the keys and values of a request side by side, and queries and results of all rows once more.
    """
    if config.device != "cuda" or config.kernels == "torch" or config.item_bytes != 2 or config.batch_invariant:
        return 0
    if num_rows < FEWEST_ROWS or num_rows * config.max_model_len < FEWEST_PAIRS:
        return 0
    num_bytes = config.item_bytes + (1 if config.kv_cache_dtype == "fp8" else 0)
    return 2 * config.max_model_len * shape.keys * num_bytes + 2 * num_rows * shape.queries * config.item_bytes


def graph_bytes(shape: PassShape, config: EngineConfig, sizes: Sequence[Size], *, input_bytes: int, widths: int) -> int:
    """Return the bytes of the buffers of a pass's graphs: inputs and outputs of the most rows, and a plan each.

    input_bytes: of a row. widths: elements of a row of all outputs.
    """
    if not sizes:
        return 0
    rows = max(size.rows for size in sizes)
    plans = sum(plan_bytes(shape, config, size.rows, size.requests + 1) for size in sizes)
    return rows * (input_bytes + widths * config.item_bytes) + plans


def plan_bytes(shape: PassShape, config: EngineConfig, num_rows: int, num_requests: int) -> int:
    """Return the bytes of one step's attention plan, with page tables as long as the longest request's."""
    plan = _plan_shape(shape, config, num_rows, num_requests)
    delta = _tables_bytes(num_rows, num_requests) if shape.channels else 0
    return 8 * sum(plan.sizes.values()) + 4 * num_requests * plan.table_width + delta


def fold_bytes(config: EngineConfig) -> int:
    """Return the bytes of the buffers of a hybrid's fold graphs."""
    own = fold_sizes(config)
    return 4 * own[0].rows + sum(_tables_bytes(size.rows, size.requests + 1) for size in own)


def _tables_bytes(num_rows: int, num_requests: int) -> int:
    """Return the bytes of a `workers.kernels.triton_delta.DeltaTables`."""
    return 4 * (10 * (num_rows + num_rows % 2) + 3 * (num_requests + 1))


def _plan_shape(shape: PassShape, config: EngineConfig, num_rows: int, num_requests: int) -> PlanShape:
    return PlanShape(
        num_rows=num_rows,
        num_requests=num_requests,
        table_width=config.pages_for(config.max_model_len),
        page_size=config.page_size,
        group_size=shape.queries // shape.keys,
        kv_heads=shape.keys // shape.head,
        windows=(None,) * shape.num_windows,
        is_float32=config.item_bytes == 4,
        keys_per_piece=invariant_keys_per_piece(config.max_model_len) if config.batch_invariant else None,
    )
