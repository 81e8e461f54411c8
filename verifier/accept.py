"""Acceptance: which path of a draft tree the target would have said itself.

The coupled rule (default; Daliri et al. 2408.07978 for one draft, here one noise for a whole tree). At every node v the
target draws its own next token
    y(v) = argmax_x [ log p(x | v) + G(seed, index of the token, x) ]        (temperature 0: G = 0)
Walk from the root: if y(v) is a child of v, descend to it; else emit y(v) and stop.

Losslessness: y depends on the prefix and G alone, and G is independent between indices, so the emitted tokens follow
the target's law whatever the tree is, also when the drafter saw G. A deterministic tree under a sampling target is the
same walk (target-only acceptance: draw y ~ p, descend if it is a child).
Legend: B requests, N packed rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.sampling import draw
from workers.types import DraftProbs, SamplingBatch, TreeBatch, Verdict


def accept(
    trees: TreeBatch,
    logits_NV: Tensor,
    params: SamplingBatch,
    root_position_B: Tensor,
    probs: DraftProbs | None = None,
) -> list[Verdict]:
    """Verdicts of B trees from the target's raw logits at every row, root included.

    params: one entry per request. root_position_B: int64, position of each root. Raises ValueError for draft
    probabilities: neither coupled nor deterministic trees have any.
    """
    if probs is not None:
        raise ValueError("coupled acceptance takes no draft probabilities; they belong to sampled drafts")
    assert logits_NV.shape[0] == len(trees.token_N), "one row of logits per tree row, no more and no fewer"
    request_N = torch.arange(len(root_position_B)).repeat_interleave(trees.offsets.diff())
    index_N = root_position_B[request_N] + trees.depth_N + 1
    return walk(trees, draw(logits_NV, params.rows(request_N), index_N).tolist())


def walk(trees: TreeBatch, winner_N: list[int]) -> list[Verdict]:
    """Verdicts from the target's own token at every row."""
    offsets, tokens, parents = trees.offsets.tolist(), trees.token_N.tolist(), trees.parent_N.tolist()
    verdicts = []
    for begin, end in zip(offsets, offsets[1:], strict=False):
        path: list[int] = []
        emitted = [winner_N[begin]]
        row = 0
        for child in range(1, end - begin):  # breadth-first rows: a child comes after its parent
            if parents[begin + child] == row and tokens[begin + child] == emitted[-1]:
                row = child
                path.append(row)
                emitted.append(winner_N[begin + row])
        count = end - begin - 1
        verdicts.append(Verdict(tuple(path), tuple(emitted), num_drafted=count, num_verified=count))
    return verdicts
