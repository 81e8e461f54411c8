"""Trees of sampled drafts, drawn by the real `draw_children`, as verification receives them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from drafter.tree.sample import DrawBits, Support, draw_children, mask_fixed
from tests.support import oracles
from workers.types import DraftProbs, NodeKind, TreeBatch

CHAIN = [[(1, 0)]] * 4
TREE = [[(3, 1)], [(2, 0), (2, 2), (1, 0)], [(1, 0), (2, 1), (0, 0), (1, 1)]]
FIXED = [[(2, 2)], [(2, 2), (1, 1)], [(1, 1)]]
"""[d][i]: (children, fixed ones among them) of the i-th node of depth d."""


class Drafted(NamedTuple):
    """One request's tree, drawn by the real `draw_children`, with every row's q as weights over the vocabulary."""

    parents: list[int]
    tokens: list[int]
    kinds: list[int]
    weights: list[np.ndarray]  # distribution of the sampled children; zeros without any


def draft(
    rng: np.random.Generator, vocab: int, counts: list[list[tuple[int, int]]], seed: int, root_position: int
) -> Drafted:
    """Draw a tree with random peaked q. counts[d][i]: (children, fixed ones among them) of the i-th node of depth d."""
    tree = Drafted([-1], [0], [NodeKind.ROOT], [np.zeros(vocab, dtype=np.int64)])
    level = [0]
    for of_level in counts:
        rows, level = level, []
        for row, (count, num_fixed) in zip(rows, of_level, strict=False):
            q = rng.dirichlet(np.full(vocab, 0.3))
            weight = np.rint(q / q.max() * 65535).astype(np.int64)
            order = np.lexsort((np.arange(vocab), -weight))
            support = Support(order[None], weight[order][None])
            counts, keys = (count, num_fixed), (seed, root_position, row)
            bits = DrawBits.of(*(np.array([key]) for key in keys), count)
            children = draw_children(support, *(np.array([number]) for number in counts), bits)
            if num_fixed < count:
                tree.weights[row][order] = mask_fixed(support, np.array([num_fixed]))[0]
            for place, kind in zip(children.column_FK[0].tolist(), children.kind_FK[0].tolist(), strict=True):
                if place >= 0:
                    level.append(len(tree.parents))
                    tree.parents.append(row)
                    tree.tokens.append(int(order[place]))
                    tree.kinds.append(kind)
                    tree.weights.append(np.zeros(vocab, dtype=np.int64))
    return tree


def pack(each: list[Drafted]) -> tuple[TreeBatch, DraftProbs]:
    trees = oracles.trees([(tree.parents, tree.tokens) for tree in each])
    trees.kind_N[:] = torch.tensor([kind for tree in each for kind in tree.kinds], dtype=torch.uint8)
    rows = [weight for tree in each for weight in tree.weights]
    ids = [np.flatnonzero(weight) for weight in rows]
    probs = DraftProbs(
        offsets=torch.tensor(np.cumsum([0, *map(len, ids)]), dtype=torch.int32),
        id_S=torch.tensor(np.concatenate(ids), dtype=torch.int32),
        weight_S=torch.tensor(np.concatenate([w[i] for w, i in zip(rows, ids, strict=True)]), dtype=torch.int32),
    )
    return trees, probs
