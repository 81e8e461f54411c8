"""Turns trees and prompt chunks into the metadata of one packed forward: positions, KV slots and visibility.

The root keeps its position P, and a node at depth d has position P + d, which siblings share. KV slots are distinct:
row r of a tree uses slot P + r until its path is accepted and compacted.
Legend: B requests, N packed rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.types import DraftProbs, NodeKind, TreeBatch


class TreeMetadata(NamedTuple):
    """Metadata of packed rows, with fields as in `AttentionMetadata`.

    It uses numpy, whose small operations take a third of torch's time; every step waits for them.
    """

    position_N: np.ndarray  # int32
    slot_N: np.ndarray  # int32
    visible_N: np.ndarray  # int32
    ancestors_N: np.ndarray  # int64


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Prompt positions [start, stop) of one request, computed in one step."""

    start: int
    stop: int


def tree_metadata(trees: TreeBatch, root_position_B: np.ndarray) -> TreeMetadata:
    """Return the metadata of every tree row. root_position_B: int32, the number of tokens before the root."""
    if len(trees.token_N) == len(root_position_B):  # bare roots
        return _causal(root_position_B)
    offsets = trees.offsets.numpy()
    rows_B = offsets[1:] - offsets[:-1]
    root_N = root_position_B.repeat(rows_B)
    # Each tree's slot offset minus its row offset, so that adding the packed row index gives the slot.
    slot_N = (root_position_B - offsets[:-1]).repeat(rows_B) + np.arange(len(root_N), dtype=np.int32)
    return TreeMetadata(
        position_N=root_N + trees.depth_N.numpy(),
        slot_N=slot_N,
        visible_N=root_N,
        ancestors_N=trees.ancestors_N.numpy(),
    )


def chunk_metadata(chunks: list[PromptChunk]) -> TreeMetadata:
    """Return the metadata of prompt chunks."""
    return _causal(np.array([position for c in chunks for position in range(c.start, c.stop)], dtype=np.int32))


def _causal(position_N: np.ndarray) -> TreeMetadata:
    """Return metadata of rows at position p that write slot p and see [0, p].

    Without ancestor bits the attention plan takes half the time.
    """
    return TreeMetadata(
        position_N=position_N,
        slot_N=position_N,
        visible_N=position_N + 1,
        ancestors_N=np.zeros(len(position_N), dtype=np.int64),
    )


_ROW_FIELDS = [field for field in TreeBatch.__slots__ if field.endswith("_N")]


def bare_roots(tokens: list[int]) -> TreeBatch:
    """Return trees that consist of a root only, for plain decoding."""
    return TreeBatch(token_N=torch.from_numpy(np.array(tokens, dtype=np.int32)), **_bare_roots(len(tokens)))


@cache
def _bare_roots(count: int) -> dict[str, Tensor]:
    """Return the fields of `count` bare roots other than tokens. They can be shared, because trees are immutable."""
    return dict(
        offsets=torch.arange(count + 1, dtype=torch.int32),
        parent_N=torch.full((count,), -1, dtype=torch.int32),
        depth_N=torch.zeros(count, dtype=torch.int32),
        ancestors_N=torch.ones(count, dtype=torch.int64),
        kind_N=torch.full((count,), int(NodeKind.ROOT), dtype=torch.uint8),
        weight_N=torch.ones(count),
    )


def chains(tokens: Sequence[Sequence[int]]) -> TreeBatch:
    """Return one unbranched tree per request, root first. Weights are 1, because there is no confidence."""
    if all(len(own) == 1 for own in tokens):
        return bare_roots([root for (root,) in tokens])
    row_N = np.concatenate([np.arange(len(own), dtype=np.int32) for own in tokens])
    kind_N = np.where(row_N > 0, np.uint8(NodeKind.DETERMINISTIC), np.uint8(NodeKind.ROOT))
    return TreeBatch(
        offsets=torch.from_numpy(np.array([0, *accumulate(map(len, tokens))], dtype=np.int32)),
        token_N=torch.from_numpy(np.array(list(chain.from_iterable(tokens)), dtype=np.int32)),
        parent_N=torch.from_numpy(row_N - 1),
        depth_N=torch.from_numpy(row_N),
        ancestors_N=torch.from_numpy((np.int64(2) << row_N.astype(np.int64)) - 1),
        kind_N=torch.from_numpy(kind_N),
        weight_N=torch.ones(len(row_N)),
    )


def with_chains(
    trees: TreeBatch, probs: DraftProbs | None, drafted: list[bool], tokens: Sequence[Sequence[int]]
) -> tuple[TreeBatch, DraftProbs | None]:
    """Return the trees of a whole batch.

    If drafted[i], request i has the next of `trees`, otherwise the chain of its tokens, root first.
    """
    if all(drafted):
        return trees, probs
    others = chains(tokens)
    # Row indices refer to the concatenation of the drafted trees and the chains.
    own, theirs = pairwise(trees.offsets.tolist()), pairwise((len(trees.token_N) + others.offsets).tolist())
    spans = [next(own) if is_drafted else span for is_drafted, span in zip(drafted, theirs, strict=True)]
    rows = torch.cat([torch.arange(begin, end) for begin, end in spans])
    counts = torch.tensor([end - begin for begin, end in spans])
    every = replace(trees, **{name: torch.cat((getattr(trees, name), getattr(others, name))) for name in _ROW_FIELDS})
    merged = _rows(every, counts, rows)
    if probs is None:
        return merged, None
    sizes = F.pad(probs.offsets.diff(), (0, len(others.token_N)))[rows]
    return merged, replace(probs, offsets=_offsets(sizes))


def select(
    trees: TreeBatch, probs: DraftProbs | None, requests: list[int]
) -> tuple[TreeBatch, DraftProbs | None, Tensor]:
    """Return the trees of some requests, their draft probabilities, and their row indices [int64] in `trees`."""
    offsets = trees.offsets.tolist()
    if len(requests) == len(offsets) - 1:
        return trees, probs, torch.arange(offsets[-1])
    rows = torch.cat([torch.arange(0), *(torch.arange(offsets[i], offsets[i + 1]) for i in requests)])
    kept = _rows(trees, trees.offsets.diff()[requests], rows)
    if probs is None:
        return kept, None, rows
    sizes = probs.offsets.diff()[rows]
    begins = probs.offsets[:-1][rows]
    entries = torch.cat(
        [torch.arange(0), *(torch.arange(b, b + n) for b, n in zip(begins.tolist(), sizes.tolist(), strict=True))]
    )
    return kept, DraftProbs(offsets=_offsets(sizes), id_S=probs.id_S[entries], weight_S=probs.weight_S[entries]), rows


def _rows(trees: TreeBatch, counts: Tensor, rows: Tensor) -> TreeBatch:
    """Return trees of `counts` rows each, gathered from these rows."""
    return TreeBatch(offsets=_offsets(counts), **{name: getattr(trees, name)[rows] for name in _ROW_FIELDS})


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)])
