"""Grow the trees of a head that drafts every depth in one pass, best first and on the host: no level runs a layer.

    BlockGrowth(children, factors, vocab, tree, has_leaf_siblings=...)
        .set_block(roots, hidden_GDH, base_GDV)      what the pass says of every depth
        (trees) -> UnprunedTrees | None              None = trees that only growth by levels serves

The logits below a token are base + W2 W1[token]. One node of each depth, the best child of the best child and so on, is
read over the whole vocabulary, for all requests at once. It chooses the CANDIDATES of that depth: other nodes read the
logits of these, and count all other tokens as that node did. So their weights are close to those that growth by levels
gives, and equal where all tokens are candidates. Such a node takes microseconds; a level takes a millisecond.

Legend: G requests, A of them, D depths, H hidden width, V draft vocabulary, C candidates, K children, N nodes, r rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafter.tree.cost_model import TreeCostModel
from drafter.tree.frontier import DraftVocabulary, TreeNodes, TreeRequests, TreeRoots, UnprunedTrees
from drafter.tree.score import child_kinds, confidence_tau
from workers.config import TreeConfig
from workers.settings import Rule
from workers.types import NodeKind

CANDIDATES = 64

_LEAST, _MOST = 1e-12, 1 - 1e-6
"""See `drafter.tree.cost_model.calibrate`."""

Children = Callable[[Tensor, Tensor, Tensor, int, Tensor], Tensor]
"""(hidden [G, D, H], base [G, D, V], request_F, depth, token_F) -> logits [F, V]; see `OnePassHead.children`."""

_Node = tuple[float, int, int, int, int, float, bool]
"""(-weight, order of coming, depth, token, parent, path probability, whether it may have children).

Weights never grow downwards, so the best candidate is better than all that will come.
"""


class BlockGrowth:
    """Grows trees on the host.

    factors: return W1 [target vocabulary, r] and W2 [V, r], or None if `children` does not depend on the token.
    has_leaf_siblings: see `drafter.tree.policy.DynamicTreePolicy`.
    """

    def __init__(
        self,
        children: Children,
        factors: Callable[[], tuple[Tensor, Tensor] | None],
        vocab: DraftVocabulary,
        tree: TreeConfig,
        *,
        has_leaf_siblings: bool,
        num_candidates: int = CANDIDATES,
    ) -> None:
        self.children, self.factors, self.vocab = children, factors, vocab
        self.has_leaf_siblings, self.num_candidates = has_leaf_siblings, min(num_candidates, vocab.size)
        self._is_dynamic, self.max_children = tree.kind == "dynamic", tree.max_children
        self.hidden_GDH: Tensor
        self.base_GDV: Tensor

    def set_block(self, roots: TreeRoots, hidden_GDH: Tensor, base_GDV: Tensor) -> None:
        """Set what the pass says of this step's trees."""
        self.hidden_GDH, self.base_GDV = hidden_GDH, base_GDV

    def learn(self, kept: TreeNodes, cost_model: TreeCostModel) -> None:
        """Do nothing: a deeper tree costs no more."""

    def __call__(self, trees: TreeRequests) -> UnprunedTrees | None:
        """Grow the trees; None where growth by levels serves better or alone.

        So it is for as many trees as they have nodes, and if one of them is static, sampled, traced or constrained.
        """
        limits, rules = trees.limits, trees.limits.rules
        has_rules_B = (rules.min_prob > 0) | (rules.path_prob > 0)
        if (
            not self._is_dynamic
            or not 0 < len(limits.num_nodes_B) < limits.num_nodes_B.max()
            or trees.logits_states
            or trees.traced_B is not None
            or trees.sampling.needs.truncates
            or limits.is_sampled_B.any()
            or (has_rules_B & ~limits.is_auto_B).any()  # these grow unpruned first, see `thresholds`
        ):
            return None
        grown = [_GrowingTree(self, trees, g) for g in range(len(limits.num_nodes_B))]
        active = grown
        for depth in range(self.base_GDV.shape[1]):
            active = [tree for tree in active if tree.may_reach(depth)]
            if not active:
                break
            self.read(active, [tree.best_path[depth] for tree in active], depth)
        return UnprunedTrees(
            nodes=TreeNodes.concatenate([tree.grow() for tree in grown]),
            sampled=[],
            pruned_BD=np.zeros((len(grown), int(limits.max_depth_B.max(initial=0))), dtype=np.int32),
            num_levels=1,
            num_run=0,
            pruned=[],
        )

    def read(self, trees: Sequence[_GrowingTree], tokens: Sequence[int], depth: int) -> None:
        """Read one node of each of these trees over the whole vocabulary, and tell each tree what it chose."""
        request_A, token_A = (torch.tensor(column) for column in ([tree.number for tree in trees], tokens))
        temperature_A1 = torch.tensor([[tree.temperature] for tree in trees])
        logits_AV = self.children(self.hidden_GDH, self.base_GDV, request_A, depth, token_A)
        scored_AV = logits_AV = logits_AV if (temperature_A1 == 1).all() else logits_AV / temperature_A1
        noisy = [i for i, tree in enumerate(trees) if tree.kind == NodeKind.COUPLED.value]
        if noisy:
            seeds, indices = zip(*((trees[i].seed, trees[i].index + depth) for i in noisy), strict=True)
            noise_QV = self.vocab.noise.rows(seeds, indices, "cpu")
            scored_AV = logits_AV.index_add(0, torch.tensor(noisy), noise_QV.expand(len(noisy), -1))
        scored_AC, column_AC = scored_AV.topk(self.num_candidates)
        base_AC = self.base_GDV[request_A[:, None], depth, column_AC] / temperature_A1
        tau_A1 = torch.tensor([[tree.tau] for tree in trees])
        found = [
            column_AC if self.vocab.target_ids is None else self.vocab.target_ids[column_AC],
            base_AC,
            (scored_AC - logits_AV.gather(1, column_AC)).nan_to_num(0),  # 0 at a token that is never drafted
            logits_AV.scatter(1, column_AC, -torch.inf).logsumexp(1),
            (scored_AV / tau_A1).scatter_(1, column_AC, -torch.inf).logsumexp(1),
        ]
        factors = self.factors()
        if factors is not None:
            found.append(factors[1][column_AC].float() / temperature_A1[:, None])
        for tree, *own in zip(trees, *(values.numpy() for values in found), strict=True):
            tree.take(_Depth(*own))


class _Depth(NamedTuple):
    """The candidates that may follow the nodes of a depth; logits are divided by the temperature."""

    token_C: np.ndarray  # target ids
    base_C: np.ndarray
    noise_C: np.ndarray
    others: np.floating  # log of the sum of the exponentials of all other tokens' logits
    scored_others: np.floating  # the same of (logits + noise) / tau
    w2_Cr: np.ndarray | None = None


class _BestChildren(NamedTuple):
    """The best children of a node, and the probability of its most likely one."""

    token_K: np.ndarray
    weight_K: np.ndarray  # chance to survive if the node does
    prob_K: np.ndarray
    top_prob: float


class _GrowingTree:
    """A request's tree. best_path: its root, the root's best child, that one's, and so on, as far as they were read."""

    def __init__(self, growth: BlockGrowth, trees: TreeRequests, g: int) -> None:
        limits, sampling = trees.limits, trees.sampling
        temperature = float(sampling.temperature_B[g])
        is_hot, rule_1 = np.array([temperature > 0]), limits.rule_B[g : g + 1]
        self.number, self.temperature = g, temperature if temperature > 0 else 1.0
        self.kind = int(child_kinds(rule_1, is_hot)[0])
        self.seed, self.index = int(sampling.seed_B[g]), int(trees.root_index_B[g])
        self.tau = float(confidence_tau(np.array([temperature]), rule_1 == Rule.COUPLED.value)[0])
        self.best_path = [int(trees.root_token_B[g])]
        self._growth, self._num_nodes = growth, int(limits.num_nodes_B[g])
        self._max_depth = min(growth.base_GDV.shape[1], int(limits.max_depth_B[g]))
        self._min_prob, self._path_prob = (float(rule[g]) for rule in (limits.rules.min_prob, limits.rules.path_prob))
        is_calibrated = trees.costs is not None and limits.is_auto_B[g]
        self._odds = trees.costs.log_odds_D.tolist() if is_calibrated and trees.costs is not None else [0.0]
        self._depths: list[_Depth] = []
        self._best_children: list[_BestChildren] = []  # of the best path
        self._weights: list[float] = []  # of the best path's children
        self._best_weight = 1.0  # of its last node

    def may_reach(self, depth: int) -> bool:
        """Return whether the tree has room for a child of the best path's node of this depth."""
        num_better = sum(weight >= self._best_weight for weight in self._weights)
        return depth < self._max_depth and num_better <= self._num_nodes and self._best_weight > 0

    def take(self, chosen: _Depth) -> None:
        """Take the candidates of the next depth, chosen by the last node of the best path or by another one."""
        depth = len(self._depths)
        self._depths.append(chosen)
        if depth == len(self._best_children) < len(self.best_path):
            children = self._children(self.best_path[depth], depth)
            self._best_children.append(children)
            self._weights += (self._best_weight * children.weight_K).tolist()
            self._best_weight *= float(children.weight_K[0])
            self.best_path.append(int(children.token_K[0]))

    def grow(self) -> TreeNodes:
        """Grow it: the best candidate becomes a node, and its children become candidates."""
        heap: list[_Node] = []
        nodes: list[_Node] = [(-1.0, 0, 0, self.best_path[0], -1, 1.0, True)]
        while True:
            weight, _, depth, token, _, path, is_open = nodes[-1]
            if is_open and depth < self._max_depth and path >= self._path_prob:
                own = self._children_of(token, depth)
                columns = (own.token_K.tolist(), (weight * own.weight_K).tolist(), (path * own.prob_K).tolist())
                for rank, (child, child_weight, child_path) in enumerate(zip(*columns, strict=True)):
                    if own.top_prob >= self._min_prob and child_weight < 0:
                        order, is_spine = (len(nodes) << 16) + rank, rank == 0 or not self._growth.has_leaf_siblings
                        candidate = (child_weight, order, depth + 1, child, len(nodes) - 1, child_path, is_spine)
                        heapq.heappush(heap, candidate)
            if len(nodes) > self._num_nodes or not heap:
                return self._table(nodes)
            nodes.append(heapq.heappop(heap))

    def _children_of(self, token: int, depth: int) -> _BestChildren:
        if depth < len(self._best_children) and token == self.best_path[depth]:
            return self._best_children[depth]
        if depth == len(self._depths):  # the best path ended above; a node's parent was read before
            self._growth.read([self], [token], depth)
        return self._children(token, depth)

    def _children(self, token: int, depth: int) -> _BestChildren:
        """Return a node's children from the candidates of its depth, 0 = the root's."""
        own, factors = self._depths[depth], self._growth.factors()
        logit_C = own.base_C
        if factors is not None and own.w2_Cr is not None:
            logit_C = logit_C + own.w2_Cr @ factors[0][token].float().numpy()
        prob_C = np.exp(logit_C - np.logaddexp(_logsumexp(logit_C), own.others))
        scored_C = (logit_C + own.noise_C) / self.tau
        best_K = (-scored_C).argsort(kind="stable")[: self._growth.max_children]
        weight_K = np.exp(scored_C[best_K] - np.logaddexp(_logsumexp(scored_C), own.scored_others))
        if log_odds := self._odds[min(depth, len(self._odds) - 1)]:
            held_K = weight_K.clip(_LEAST, _MOST)
            weight_K = np.where(weight_K > 0, held_K / (held_K + (1 - held_K) * np.exp(-log_odds)), 0)
        return _BestChildren(own.token_C[best_K], weight_K, prob_C[best_K], float(prob_C.max()))

    def _table(self, nodes: list[_Node]) -> TreeNodes:
        """Return the nodes breadth-first."""
        weight_N, _, depth_N, token_N, parent_N, path_N, _ = (np.array(column) for column in zip(*nodes, strict=True))
        by_depth = depth_N.argsort(kind="stable")
        row_N = np.empty_like(by_depth)
        row_N[by_depth] = np.arange(len(nodes))
        kind_N = np.full(len(nodes), self.kind, dtype=np.uint8)
        kind_N[0] = NodeKind.ROOT.value
        return TreeNodes(
            request_N=np.full(len(nodes), self.number),
            row_N=np.arange(len(nodes)),
            parent_row_N=np.where(parent_N < 0, -1, row_N[parent_N])[by_depth],
            depth_N=depth_N[by_depth],
            token_N=token_N[by_depth],
            weight_N=-weight_N[by_depth].astype(np.float32),
            kind_N=kind_N,
            path_prob_N=path_N[by_depth],
        )


def _logsumexp(x_C: np.ndarray) -> np.floating:
    top = x_C.max()
    found: np.floating = np.log(np.exp(x_C - top).sum()) + top
    return found
