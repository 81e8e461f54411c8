"""From grown nodes to the trace: every node of a request that asks to see its tree, and why pruned ones are not in it.

Only the few requests that ask come here, so that plain lists are fast enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from drafter.tree.frontier import PrunedNodes, TreeNodes
from workers.config import MAX_TREE_NODES
from workers.settings import PruneReason
from workers.types import TreeTrace


class _Row(NamedTuple):
    token: int
    parent: int
    depth: int
    prob: float
    weight: float
    reason: int


def trace_trees(
    nodes: TreeNodes, is_kept_N: np.ndarray | None, pruned: Sequence[PrunedNodes], traced_B: np.ndarray
) -> TreeTrace:
    """Return the trace of the requests traced_B.

    nodes: before the final cut, of which is_kept_N are left (None = all). pruned: those that growing kept out.
    """
    if is_kept_N is None:
        is_kept_N = np.ones(len(nodes.request_N), dtype=bool)
    rows: list[_Row] = []
    offsets = [0]
    for b, is_traced in enumerate(traced_B.tolist()):
        if is_traced:
            rows += _rows(nodes, is_kept_N, pruned, b)
        offsets.append(len(rows))
    columns = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in _Row._fields]
    token, parent, depth, prob, weight, reason = columns
    return TreeTrace(
        offsets=torch.tensor(offsets, dtype=torch.int32),
        token_T=torch.tensor(token, dtype=torch.int32),
        parent_T=torch.tensor(parent, dtype=torch.int32),
        depth_T=torch.tensor(depth, dtype=torch.int32),
        prob_T=torch.tensor(prob, dtype=torch.float32),
        weight_T=torch.tensor(weight, dtype=torch.float32),
        reason_T=torch.tensor(reason, dtype=torch.uint8),
    )


def _rows(nodes: TreeNodes, is_kept_N: np.ndarray, pruned: Sequence[PrunedNodes], b: int) -> list[_Row]:
    """Return one request's rows: its tree as `pack_trees` orders it, what the cut removed, what growing kept out."""
    (own,) = (nodes.request_N == b).nonzero()
    own = own[np.lexsort((nodes.row_N[own], ~is_kept_N[own]))]
    tree = nodes.rows(own)
    # Under `auto`, the cut never keeps a node without its parent, so parents come before their children here, too.
    index_of = {row: index for index, row in enumerate(tree.row_N.tolist())}
    parent_N = [index_of.get(row, -1) for row in tree.parent_row_N.tolist()]
    path_prob_N = tree.path_prob_N.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        prob_N = np.where(tree.depth_N > 0, path_prob_N / path_prob_N[parent_N], 1.0)
    reason_N = np.where(is_kept_N[own], PruneReason.KEPT, PruneReason.COST)
    rows = [
        _Row(*fields)
        for fields in zip(
            tree.token_N.tolist(),
            parent_N,
            tree.depth_N.tolist(),
            prob_N.tolist(),
            tree.weight_N.tolist(),
            reason_N.tolist(),
            strict=True,
        )
    ]
    kept_out = [
        _Row(token, index_of[row], 1 + rows[index_of[row]].depth, prob, weight, reason)
        for part in pruned
        for request, row, token, weight, prob, reason in zip(*(column.tolist() for column in part), strict=True)
        if request == b
    ]
    # Best first, and unknown weights last.
    kept_out.sort(key=lambda row: row.weight if row.weight == row.weight else -1.0, reverse=True)
    num_cut = int((~is_kept_N[own]).sum())
    return rows + kept_out[: MAX_TREE_NODES - num_cut]
