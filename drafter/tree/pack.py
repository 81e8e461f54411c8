"""From grown nodes to the message: pruning, the final cut, and the packing of trees and draft probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from drafter.tree.cost_model import TreeCostModel
from drafter.tree.frontier import GrowLimits, PrunedNodes, SampledNodes, TreeNodes
from drafter.tree.thresholds import passes_path
from workers.settings import PruneReason
from workers.types import DraftProbs, TreeBatch


def prune(nodes: TreeNodes, limits: GrowLimits) -> tuple[TreeNodes, TreeNodes, PrunedNodes]:
    """Remove the descendants of nodes that failed a threshold, which best-first growth has kept.

    nodes: sorted by request, then row. Returns the others, those that are removed, and the children of nodes that
    failed.
    """
    is_pruned_N = nodes.path_prob_N < 0
    if not is_pruned_N.any():
        return nodes, nodes.rows(is_pruned_N), PrunedNodes.undrafted(*(np.zeros(0, dtype=np.int64),) * 3)
    first_B = nodes.request_N.searchsorted(np.arange(len(limits.num_nodes_B)))
    parent_N = first_B[nodes.request_N] + nodes.parent_row_N  # a node's row is its index among those of its request
    child_C = (is_pruned_N & ~is_pruned_N[parent_N]).nonzero()[0]
    request_C, parent_prob_C = nodes.request_N[child_C], nodes.path_prob_N[parent_N[child_C]]
    fails_path_C = ~passes_path(parent_prob_C, limits.rules.path_prob[request_C])
    children = PrunedNodes(
        request_P=request_C,
        parent_row_P=nodes.parent_row_N[child_C],
        token_P=nodes.token_N[child_C],
        weight_P=nodes.weight_N[child_C],
        prob_P=-nodes.path_prob_N[child_C] / parent_prob_C,
        reason_P=np.where(fails_path_C, PruneReason.PATH_PROB, PruneReason.MIN_PROB).astype(np.uint8),
    )
    return nodes.rows(~is_pruned_N), nodes.rows(is_pruned_N), children


def cut(nodes: TreeNodes, limits: GrowLimits, cost_model: TreeCostModel, draft_ms: float) -> np.ndarray:
    """Return bool [N]: the nodes worth verifying. The best node of each request stays, so that none starves.

    nodes: sorted by request, then row.
    """
    may_cut_B = limits.is_auto_B & ~limits.is_sampled_B
    may_cut_N = may_cut_B[nodes.request_N]
    is_candidate_N = may_cut_N & (nodes.row_N > 0)
    is_kept_N = ~is_candidate_N
    (at,) = is_candidate_N.nonzero()
    if len(at):
        ranked = at[(-nodes.weight_N[at]).argsort(kind="stable")]  # in their order among equals
        fixed = nodes.weight_N[(nodes.row_N > 0) & ~may_cut_N]  # other requests' trees stay in any case
        is_kept_N[ranked[: cost_model.best_count(nodes.weight_N[ranked], draft_ms, fixed)]] = True
        best_B = np.full(len(may_cut_B), -1)
        best_B[nodes.request_N[ranked[::-1]]] = ranked[::-1]  # of several, the last one stays
        is_kept_N[best_B[best_B >= 0]] = True
    return is_kept_N


def pack_trees(nodes: TreeNodes, num_requests: int) -> TreeBatch:
    """Pack nodes, which are sorted by request, then row; rows are renumbered without gaps."""
    count_B = np.bincount(nodes.request_N, minlength=num_requests)
    offsets = np.concatenate([[0], count_B.cumsum()])
    begin_N = offsets[nodes.request_N]
    row_N = np.arange(len(begin_N)) - begin_N
    new_row = np.full((num_requests, int(nodes.row_N.max(initial=0)) + 1), -1, dtype=np.int64)
    new_row[nodes.request_N, nodes.row_N] = row_N
    parent_N = np.where(nodes.parent_row_N < 0, -1, new_row[nodes.request_N, nodes.parent_row_N])
    ancestors_N = np.uint64(1) << row_N.astype(np.uint64)
    up_N = begin_N + np.maximum(parent_N, 0)
    for _ in range(int(nodes.depth_N.max(initial=0)).bit_length()):  # each time, twice as many ancestors are known
        ancestors_N |= ancestors_N[up_N]
        up_N = up_N[up_N]
    return TreeBatch(
        offsets=torch.from_numpy(offsets.astype(np.int32)),
        token_N=torch.from_numpy(nodes.token_N.astype(np.int32)),
        parent_N=torch.from_numpy(parent_N.astype(np.int32)),
        depth_N=torch.from_numpy(nodes.depth_N.astype(np.int32)),
        ancestors_N=torch.from_numpy(ancestors_N.view(np.int64)),
        kind_N=torch.from_numpy(nodes.kind_N),
        weight_N=torch.from_numpy(nodes.weight_N.astype(np.float32)),
    )


def pack_probs(sampled: Sequence[SampledNodes], trees: TreeBatch) -> DraftProbs | None:
    """Pack the distributions of nodes with sampled children, in the order of `trees`, whose rows have not moved."""
    if not sampled:
        return None
    at_F = np.concatenate([trees.offsets.numpy()[nodes.request_F] + nodes.row_F for nodes in sampled])
    is_sent_FS = [nodes.weight_FS > 0 for nodes in sampled]
    size_F = np.concatenate([is_sent.sum(1) for is_sent in is_sent_FS])
    id_S = np.concatenate([nodes.id_FS[is_sent] for nodes, is_sent in zip(sampled, is_sent_FS, strict=True)])
    weight_S = np.concatenate([nodes.weight_FS[is_sent] for nodes, is_sent in zip(sampled, is_sent_FS, strict=True)])
    if (at_F[1:] < at_F[:-1]).any():  # several requests were sampled level by level
        order = np.argsort(np.repeat(at_F, size_F), kind="stable")
        id_S, weight_S = id_S[order], weight_S[order]
    offsets = np.zeros(len(trees.token_N) + 1, dtype=np.int32)
    offsets[at_F + 1] = size_F
    return DraftProbs(
        offsets=torch.from_numpy(offsets.cumsum(dtype=np.int32)),
        id_S=torch.from_numpy(id_S.astype(np.int32)),
        weight_S=torch.from_numpy(weight_S.astype(np.int32)),
    )
