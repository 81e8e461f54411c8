"""The memory that a drafter rank needs beside weights and KV pages (`workers.workspace`)."""

from __future__ import annotations

from collections import Counter

from drafter.tree.device import requests_at_once
from drafter.tree.tree_graphs import STATE_ROW_BYTES, TABLE_ROW_BYTES, block_shapes, shapes
from workers.config import EngineConfig, TreeConfig
from workers.cuda_graphs import MOST_ROWS, sizes
from workers.models.draft_methods import method_of
from workers.models.specs import BlockSpec, DraftSpec
from workers.sampling.gumbel_cache import MAX_BYTES as NOISE_BYTES
from workers.workspace import (
    LIBRARY_BYTES,
    PassShape,
    Workspace,
    chunk_bytes,
    cut_bytes,
    graph_bytes,
    kept_quantization,
    max_message_rows,
    may_capture,
    pass_bytes,
    plan_bytes,
)

_LEVEL_COPIES = 5
"""Float32 copies of a level's logits that exist at once: as constrained, log q, noise, their sum, and a masked one."""
_BLOCK = 2048
"""Columns of which `drafter.tree.triton_growth` keeps the best children."""


def draft_workspace(config: EngineConfig, spec: DraftSpec | None) -> Workspace:
    """Count a rank's workspace; n-gram lookup needs none.

    buffers    as the target's, with a feature for each row; for whole trees the roots' rows and token counts, and the
               nodes, inputs and features of all rows; the noise cache
    captured   a pass of the most rows, and apart from it the widest level of the most trees: a pass, and the logits
               that exist at once
    eager      every node's feature; the larger of a pass without a graph and of a level that is grown without one; of a
               head that drafts in one pass every depth's logits and hidden states, and its blocks' keys and values
    """
    if spec is None:
        return Workspace()
    assert config.draft is not None
    tree, item, ranks = config.draft.tree, config.item_bytes, config.draft_ranks
    layers, V, method = spec.layers, spec.draft_vocab_size, method_of(config.draft)
    is_head = method.reads_features
    folder = config.draft.model_path or config.model_path
    dequantizes = kept_quantization(config, folder, spec) is not None
    shape = PassShape.of(layers, ranks, is_head=is_head, dequantizes=dequantizes)
    H = layers.hidden_size * is_head  # of a feature
    own = sizes(config) if may_capture(config) and layers.can_be_captured else []
    most = max((size.rows for size in own), default=0)
    buffers = graph_bytes(shape, config, own, input_bytes=2 * 4 + H * item, widths=layers.hidden_size) + NOISE_BYTES
    captured = pass_bytes(shape, config, most)

    logits = V * (item + 4 + 8 * (ranks > 1))  # of a row: as multiplied, in float32, and gathered
    block_size = 0  # of heads that draft in one pass
    if isinstance(spec, BlockSpec):
        block_size = spec.block_size
    elif spec.has_marginals:
        block_size = pass_depth(spec, tree)
    depth = spec.max_depth if isinstance(spec, BlockSpec) else block_size  # that a pass drafts
    trees = block_shapes(config, depth, V) if block_size else shapes(config)
    if own and ranks == 1 and trees:
        B, most_rows = max(shape.requests for shape in trees), trees[0].requests * trees[0].nodes
        buffers += (
            B * (4 * V + TABLE_ROW_BYTES)
            + 8 * tree.longest_path
            + most_rows * 4 * 8
            + (most_rows + B) * STATE_ROW_BYTES
        )
        best = 16 * tree.num_children * -(-V // _BLOCK)
        scored = max(min(b, requests_at_once(n, V)) * n for b, n in trees)
        captured += scored * (logits + 4 * V + best + cut_bytes(V))
        if block_size:
            buffers += B * (depth * (layers.hidden_size * item + 4 * V) + 8)
            captured += scored * 2 * 4 * V  # what the pass says of the rows' depths, and its sum with their biases
        else:
            buffers += B * layers.hidden_size * item + most_rows * H * item
            buffers += sum(plan_bytes(shape, config, b * n, b) for b, n in trees)
            captured += pass_bytes(shape, config, most_rows)
    rows, kept = max_message_rows(config), config.max_num_seqs * config.tree_rows * H * item
    if block_size:
        buffers += sum(4 * scratch_pages(block_size, config.page_size) * (size.requests + 1) for size in own)
        num_slots = config.max_num_seqs * block_size
        rows += num_slots
        pages = config.max_num_seqs * scratch_pages(block_size, config.page_size)
        entry = 2 * layers.num_layers * max(1, layers.num_kv_heads // ranks) * layers.head_dim * config.kv_item_bytes
        kept = num_slots * (4 * -(-V // ranks) + H * item) + pages * config.page_size * entry
    of_chunks = chunk_bytes(shape, config, rows)
    eager_pass = pass_bytes(shape, config, rows) + of_chunks if of_chunks or rows > min(most, MOST_ROWS) else 0
    frontier = config.max_num_seqs * widest_level(tree)
    level = frontier * (V * (item + 4 * _LEVEL_COPIES) + cut_bytes(V) + 8 * V * (ranks > 1))
    return Workspace(
        buffers=buffers,
        captured=captured,
        eager=kept + max(eager_pass, level),
        libraries=LIBRARY_BYTES if config.device == "cuda" else 0,
    )


def pass_depth(spec: DraftSpec, tree: TreeConfig) -> int:
    """Return the tokens that a pass of a P-EAGLE head drafts for trees of this shape."""
    return min(spec.max_depth or tree.longest_path, tree.longest_path)


def scratch_pages(block_size: int, page_size: int) -> int:
    """Return the pages that a request's block may need behind the request's own."""
    return -(-block_size // page_size)


def widest_level(tree: TreeConfig) -> int:
    """Return the most nodes of a tree that are run through the draft model at once."""
    if tree.kind == "dynamic":
        return tree.num_speculative_tokens
    return max(Counter(map(len, tree.paths)).values())
