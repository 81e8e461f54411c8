"""The draft trees of one step: the drafter's reply, completed to one tree per decoding request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from verifier.tree import bare_roots, chains, with_chains
from workers.types import DraftProbs, DraftReply, TreeBatch, TreeTrace


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """One tree per decoding request. Requests without a drafted tree have a lookup chain or a bare root.

    verified, pruned: node counts by depth for each request, from depth 1.
    """

    trees: TreeBatch
    probs: DraftProbs | None
    verified: Sequence[Sequence[int]]
    pruned: Sequence[Sequence[int]]
    copied: list[bool]
    """Whether the request has a lookup draft."""
    trace: TreeTrace | None = None
    """Of the reply's trees; `drafted` says whose they are."""
    drafted: list[bool] = field(default_factory=list)

    @property
    def num_nodes(self) -> int:
        """Return the draft nodes of all trees, without roots."""
        return len(self.trees.token_N) - len(self.verified)

    @property
    def num_trees(self) -> int:
        """Return the number of trees with at least one draft node."""
        return sum(map(any, self.verified))

    @staticmethod
    def bare(roots: list[int]) -> DraftBatch:
        """Return trees that consist of a root only."""
        count = len(roots)
        return DraftBatch(bare_roots(roots), None, [()] * count, [()] * count, [False] * count)

    @staticmethod
    def of(reply: DraftReply | None, drafted: list[bool], tokens: list[list[int]]) -> DraftBatch:
        """Combine the reply's trees with chains.

        If drafted[i], request i has the reply's next tree, otherwise the chain tokens[i], root first.
        """
        if reply is None:
            verified = [[1] * (len(own) - 1) for own in tokens]
            return DraftBatch(
                chains(tokens), None, verified, pruned=[[] for _ in tokens], copied=list(map(any, verified))
            )
        trees, probs = with_chains(reply.trees, reply.probs, drafted, tokens)
        depth_N = trees.depth_N.numpy()
        num_depths = 1 + int(depth_N.max(initial=0))
        tree_N = np.arange(len(drafted)).repeat(np.diff(trees.offsets.numpy()))
        nodes_BD = np.bincount(num_depths * tree_N + depth_N, minlength=num_depths * len(drafted))
        cut = map(_without_padding, reply.pruned_GD.tolist())
        return DraftBatch(
            trees=trees,
            probs=probs,
            verified=list(map(_without_padding, nodes_BD.reshape(-1, num_depths)[:, 1:].tolist())),
            pruned=[next(cut) if is_drafted else [] for is_drafted in drafted],
            copied=[len(own) > 1 and not is_drafted for own, is_drafted in zip(tokens, drafted, strict=True)],
            trace=reply.trace,
            drafted=drafted,
        )


def _without_padding(counts: list[int]) -> list[int]:
    """Remove the padding to the deepest tree of the batch."""
    while counts and not counts[-1]:
        counts.pop()
    return counts
