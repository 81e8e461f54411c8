"""From trees and prompt chunks to one packed forward: positions, KV slots and who sees whom.

The position rule: the root keeps its own position P, a node at depth d has P + d (siblings share it), while KV slots
are distinct: row r of a tree lives in slot P + r until its path is accepted and compacted.
Legend: B requests, N packed rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.types import DraftProbs, NodeKind, TreeBatch


class TreeMetadata(NamedTuple):
    """What the target needs to know of packed trees; fields as in `AttentionMetadata`."""

    position_N: Tensor  # int32
    slot_N: Tensor  # int32
    visible_N: Tensor  # int32
    ancestors_N: Tensor  # int64


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt positions [start, stop) of one request, computed in one step."""

    start: int
    stop: int


def tree_metadata(trees: TreeBatch, root_position_B: Tensor) -> TreeMetadata:
    """Positions and visibility of every tree row. root_position_B: int32, = tokens committed before the root."""
    rows_B = trees.offsets.diff()
    root_N = root_position_B.repeat_interleave(rows_B)
    row_N = torch.arange(len(root_N), dtype=torch.int32) - trees.offsets[:-1].repeat_interleave(rows_B)
    return TreeMetadata(
        position_N=root_N + trees.depth_N,
        slot_N=root_N + row_N,
        visible_N=root_N,
        ancestors_N=trees.ancestors_N,
    )


def chunk_metadata(chunks: list[Chunk]) -> TreeMetadata:
    """The same for prompt chunks: row at position p writes slot p and sees [0, p]."""
    position_N = torch.cat([torch.arange(c.start, c.stop, dtype=torch.int32) for c in chunks] or [_NONE])
    return TreeMetadata(
        position_N=position_N,
        slot_N=position_N,
        visible_N=position_N + 1,
        ancestors_N=torch.zeros(len(position_N), dtype=torch.int64),
    )


_NONE = torch.zeros(0, dtype=torch.int32)


def with_bare_roots(
    trees: TreeBatch | None, probs: DraftProbs | None, drafted: list[bool], root_tokens: list[int]
) -> tuple[TreeBatch, DraftProbs | None]:
    """The trees of a whole batch: request i has the next of `trees` if drafted[i], else only its root."""
    if trees is not None and all(drafted):
        return trees, probs
    spans, next_tree = [], 0
    offsets = trees.offsets.tolist() if trees is not None else [0]
    for is_drafted in drafted:
        spans.append((offsets[next_tree], offsets[next_tree + 1]) if is_drafted else None)
        next_tree += is_drafted

    def merge(name: str, root_values: Sequence[float], dtype: type) -> Tensor:
        source = getattr(trees, name).numpy() if trees is not None else None
        pieces = [
            np.array([value], dtype=dtype) if span is None else source[span[0] : span[1]]  # type: ignore[index]
            for span, value in zip(spans, root_values, strict=True)
        ]
        return torch.from_numpy(np.concatenate(pieces) if pieces else np.zeros(0, dtype=dtype))

    count = len(drafted)
    rows = [1 if span is None else span[1] - span[0] for span in spans]
    merged = TreeBatch(
        offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)),
        token_N=merge("token_N", root_tokens, np.int32),
        parent_N=merge("parent_N", [-1] * count, np.int32),
        depth_N=merge("depth_N", [0] * count, np.int32),
        ancestors_N=merge("ancestors_N", [1] * count, np.int64),
        kind_N=merge("kind_N", [NodeKind.ROOT] * count, np.uint8),
        weight_N=merge("weight_N", [1.0] * count, np.float32),
    )
    if probs is None:
        return merged, None
    sizes = probs.offsets.diff().tolist()
    sizes_N = [size for span in spans for size in ([0] if span is None else sizes[span[0] : span[1]])]
    return merged, replace(probs, offsets=_offsets(torch.tensor(sizes_N, dtype=torch.int32)))


def select(
    trees: TreeBatch, probs: DraftProbs | None, requests: list[int]
) -> tuple[TreeBatch, DraftProbs | None, Tensor]:
    """The trees of some requests with their draft probabilities, and the rows [int64] they had."""
    offsets = trees.offsets.tolist()
    rows = torch.cat([torch.arange(offsets[i], offsets[i + 1]) for i in requests])
    counts = trees.offsets.diff()[torch.tensor(requests)]
    kept = TreeBatch(
        offsets=_offsets(counts),
        token_N=trees.token_N[rows],
        parent_N=trees.parent_N[rows],
        depth_N=trees.depth_N[rows],
        ancestors_N=trees.ancestors_N[rows],
        kind_N=trees.kind_N[rows],
        weight_N=trees.weight_N[rows],
    )
    if probs is None:
        return kept, None, rows
    sizes = probs.offsets.diff()[rows]
    begins = probs.offsets[:-1][rows]
    entries = torch.cat([torch.arange(b, b + n) for b, n in zip(begins.tolist(), sizes.tolist(), strict=True)])
    return kept, DraftProbs(offsets=_offsets(sizes), id_S=probs.id_S[entries], weight_S=probs.weight_S[entries]), rows


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)])
