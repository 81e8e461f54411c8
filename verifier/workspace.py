"""The memory that a verifier rank needs beside weights, KV pages and the hidden-state buffer (`workers.workspace`)."""

from __future__ import annotations

from verifier.hidden_states import max_unsorted_states
from workers.config import EngineConfig
from workers.cuda_graphs import MOST_ROWS, sizes
from workers.kernels.torch_delta import MOST_PIECES, PIECE_ROWS
from workers.kv_sizing import logits_bytes
from workers.models.specs import DeltaSpec, ModelSpec
from workers.workspace import (
    LIBRARY_BYTES,
    PassShape,
    Workspace,
    chunk_bytes,
    fold_bytes,
    graph_bytes,
    kept_quantization,
    max_message_rows,
    max_step_rows,
    may_capture,
    pass_bytes,
    states_bytes,
)


def _pieces_bytes(delta: DeltaSpec, ranks: int) -> int:
    """Return what a gated delta net holds of the pieces that run at once: three states, and products of row pairs."""
    heads = delta.num_value_heads // ranks
    of_rows = 6 * PIECE_ROWS**2 * heads + 8 * PIECE_ROWS * delta.num_channels // ranks
    return 4 * MOST_PIECES * (3 * heads * delta.key_dim * delta.value_dim + of_rows)


def target_workspace(config: EngineConfig, spec: ModelSpec, *, num_taps: int = 0, state_width: int = 0) -> Workspace:
    """Count a rank's workspace. Only rank 0 has taps and keeps states, whose width is that of all taps together.

    buffers    a row of tokens, positions and outputs for the most rows of a graph, and the plans of all graphs
    captured   a pass of that many rows
    eager      states that are not in their buffer yet, those of a message to the drafter with their features, a step's
               outputs, the states of a hybrid's trees that run at once, and the larger of a pass without a graph and of
               the logits
    """
    dequantizes = not config.batch_invariant and kept_quantization(config, config.model_path, spec) is not None
    shape = PassShape.of(spec, config.tensor_parallel_size, num_taps, dequantizes=dequantizes)
    item = config.item_bytes
    rows, outputs = max_step_rows(config), (1 + num_taps) * spec.hidden_size
    own = sizes(config) if may_capture(config) and spec.can_be_captured else []
    most = max((size.rows for size in own), default=0)
    of_chunks = chunk_bytes(shape, config, rows)
    eager_rows = rows if of_chunks or rows > min(most, MOST_ROWS) else 0
    features = 2 * spec.hidden_size if state_width else 0
    states = (max_unsorted_states(config) * state_width + max_message_rows(config) * (state_width + features)) * item
    if spec.delta is not None and not may_capture(config):  # Triton's programs have their states in registers
        states += _pieces_bytes(spec.delta, config.tensor_parallel_size)
    return Workspace(
        buffers=graph_bytes(shape, config, own, input_bytes=2 * 4, widths=outputs)
        + (fold_bytes(config) if own and spec.delta else 0),
        captured=pass_bytes(shape, config, most),
        eager=states
        + rows * outputs * item
        + max(logits_bytes(config, spec), pass_bytes(shape, config, eager_rows) + of_chunks),
        libraries=LIBRARY_BYTES if config.device == "cuda" else 0,
        seats=states_bytes(config, spec),
    )
