"""Coupled acceptance: which path of a draft tree the target would have drawn itself.

The walk, for coupled and for deterministic drafts (Daliri et al. 2408.07978 for one draft; here the whole tree shares
the noise). At every node v the target draws its own next token
    y(v) = argmax_x [ log p(x | v) + G(seed, index of the token, x) ]        (temperature 0: G = 0)
Walk from the root: if y(v) is a child of v, descend to it; else emit y(v) and stop.

Losslessness: y depends on the prefix and G alone, and G is independent between indices, so the emitted tokens follow
the target's law whatever the tree is, even if the drafter used G. A deterministic tree under a sampling target is the
same walk (target-only acceptance: draw y ~ p, descend if it is a child). Sampled drafts:
`verifier.acceptance.rejection`.
Legend: B requests, N packed rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, repeat

import numpy as np
from torch import Tensor

from verifier.acceptance.rejection import accept_rejection
from verifier.tree import select
from workers.kv_sizing import SCORED_ROWS
from workers.settings import Rule
from workers.types import DraftProbs, SamplingBatch, TreeBatch, Verdict


def verify(
    trees: TreeBatch,
    probs: DraftProbs | None,
    drawn_N: list[int],
    *,
    rules: Sequence[Rule],
    params: Callable[[list[int]], SamplingBatch],
    root_position_B: Sequence[int],
    processed: Callable[[Tensor], Tensor],
) -> list[Verdict]:
    """Return each request's verdict by its own rule.

    drawn_N: the target's own token at every row; empty if all drafts are sampled. params(requests): their sampling
    parameters. processed(rows): log p at these rows up to a constant, float32 [rows, V]. Both functions are called only
    for requests with sampled drafts.
    """
    sampled = [i for i, rule in enumerate(rules) if rule.is_sampled]
    if not sampled:
        return walk(trees, drawn_N)
    found: dict[int, Verdict] = {}
    for own in _blocks(sampled, trees.offsets.tolist()):
        own_trees, own_probs, rows = select(trees, probs, own)
        root_position = np.array([root_position_B[i] for i in own])
        own_rules = [rules[i] for i in own]
        verdicts = accept_rejection(own_trees, processed(rows), params(own), root_position, own_probs, own_rules)
        found |= zip(own, verdicts, strict=True)
    walked = walk(trees, drawn_N) if len(found) < len(rules) else []
    return [found[i] if i in found else walked[i] for i in range(len(rules))]


def _blocks(requests: Sequence[int], offsets: Sequence[int]) -> Iterator[list[int]]:
    """Yield the requests in runs of at most SCORED_ROWS tree rows, since a row takes several rows of a vocabulary."""
    block: list[int] = []
    num_rows = 0
    for request in requests:
        own = offsets[request + 1] - offsets[request]
        if block and num_rows + own > SCORED_ROWS:
            yield block
            block, num_rows = [], 0
        block.append(request)
        num_rows += own
    yield block


def walk(trees: TreeBatch, winner_N: list[int]) -> list[Verdict]:
    """Return the verdicts of the walk, given the target's own token at every row."""
    if len(winner_N) == len(trees.offsets) - 1:  # bare roots
        return list(map(Verdict, repeat(()), zip(winner_N, strict=True), repeat(0), repeat(0)))
    offsets, tokens, parents = trees.offsets.tolist(), trees.token_N.tolist(), trees.parent_N.tolist()
    verdicts = []
    for begin, end in pairwise(offsets):
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
