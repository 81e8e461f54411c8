"""Grow the trees of a head that drafts every depth in one pass, best first and on the host: no level runs a layer.

    BlockGrowth(children, factors, vocab, tree, has_leaf_siblings=...)
        .set_block(roots, hidden_GDH, base_GDV)      what the pass says of every depth
        (trees) -> UnprunedTrees | None              None = trees that only growth by levels serves

The logits below a token are base + W2 W1[token]. The first node that is read at a depth, which is the most likely one,
is read over the whole vocabulary. It chooses the CANDIDATES of that depth: later nodes read exact logits of these, and
count all others as the first node did. So their weights are close to those that growth by levels gives, and equal where
all tokens are candidates. A node takes microseconds, and a level of any number of nodes takes a millisecond.

Legend: G requests, D depths, H hidden width, V draft vocabulary, C candidates, K children, N nodes, r rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
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
        self._tree = tree
        self.hidden_GDH: Tensor
        self.base_GDV: Tensor

    def set_block(self, roots: TreeRoots, hidden_GDH: Tensor, base_GDV: Tensor) -> None:
        """Set what the pass says of this step's trees."""
        self.hidden_GDH, self.base_GDV = hidden_GDH, base_GDV

    def learn(self, kept: TreeNodes, cost_model: TreeCostModel) -> None:
        """Do nothing: a deeper tree costs no more."""

    def __call__(self, trees: TreeRequests) -> UnprunedTrees | None:
        """Grow the trees; None if there are none, or one of them is static, sampled, traced or constrained."""
        limits, rules = trees.limits, trees.limits.rules
        has_rules_B = (rules.min_prob > 0) | (rules.path_prob > 0)
        if (
            self._tree.kind != "dynamic"
            or not len(limits.num_nodes_B)
            or trees.logits_states
            or trees.traced_B is not None
            or trees.sampling.needs.truncates
            or limits.is_sampled_B.any()
            or (has_rules_B & ~limits.is_auto_B).any()  # these grow unpruned first, see `thresholds`
        ):
            return None
        grown = [_Tree(self, trees, g).grow(self._tree.max_children) for g in range(len(limits.num_nodes_B))]
        return UnprunedTrees(
            nodes=TreeNodes.concatenate(grown),
            sampled=[],
            pruned_BD=np.zeros((len(grown), int(limits.max_depth_B.max(initial=0))), dtype=np.int32),
            num_levels=1,
            num_run=0,
            pruned=[],
        )


class _Depth(NamedTuple):
    """The candidates that may follow the nodes of a depth; logits are divided by the temperature."""

    token_C: np.ndarray  # target ids
    base_C: np.ndarray
    noise_C: np.ndarray
    others: float  # log of the sum of the exponentials of all other tokens' logits
    scored_others: float  # the same of (logits + noise) / tau
    w2_Cr: np.ndarray | None


class _Tree:
    """A request's tree."""

    def __init__(self, growth: BlockGrowth, trees: TreeRequests, g: int) -> None:
        limits, sampling = trees.limits, trees.sampling
        temperature = float(sampling.temperature_B[g])
        is_hot, rule_1 = np.array([temperature > 0]), limits.rule_B[g : g + 1]
        self._growth, self._number = growth, g
        self._kind = int(child_kinds(rule_1, is_hot)[0])
        self._seed, self._index = int(sampling.seed_B[g]), int(trees.root_index_B[g])
        self._temperature = temperature if temperature > 0 else 1.0
        self._tau = float(confidence_tau(np.array([temperature]), rule_1 == Rule.COUPLED.value)[0])
        self._root, self._num_nodes = int(trees.root_token_B[g]), int(limits.num_nodes_B[g])
        self._max_depth = min(growth.base_GDV.shape[1], int(limits.max_depth_B[g]))
        self._min_prob, self._path_prob = (float(rule[g]) for rule in (limits.rules.min_prob, limits.rules.path_prob))
        is_calibrated = trees.costs is not None and limits.is_auto_B[g]
        self._odds = trees.costs.log_odds_D.tolist() if is_calibrated and trees.costs is not None else [0.0]
        self._depths: list[_Depth] = []

    def grow(self, max_children: int) -> TreeNodes:
        """Grow it: the best candidate becomes a node, and its children become candidates."""
        heap: list[_Node] = []
        nodes: list[_Node] = [(-1.0, 0, 0, self._root, -1, 1.0, True)]
        while True:
            weight, _, depth, token, _, path, is_open = nodes[-1]
            if is_open and depth < self._max_depth and path >= self._path_prob:
                tokens, weights, probs, top_prob = self._children(token, depth, max_children)
                columns = (tokens.tolist(), (weight * weights).tolist(), (path * probs).tolist())
                for rank, (child, child_weight, child_path) in enumerate(zip(*columns, strict=True)):
                    if top_prob >= self._min_prob and child_weight < 0:
                        order, is_spine = (len(nodes) << 16) + rank, rank == 0 or not self._growth.has_leaf_siblings
                        candidate = (child_weight, order, depth + 1, child, len(nodes) - 1, child_path, is_spine)
                        heapq.heappush(heap, candidate)
            if len(nodes) > self._num_nodes or not heap:
                return self._table(nodes)
            nodes.append(heapq.heappop(heap))

    def _children(self, token: int, depth: int, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """Return the tokens, weights and draft probabilities of the best children, and the largest probability.

        depth: of the token, 0 = the root.
        """
        if depth == len(self._depths):  # a node's parent was read before
            self._depths.append(self._read(token, depth))
        own, factors = self._depths[depth], self._growth.factors()
        logit_C = own.base_C
        if factors is not None and own.w2_Cr is not None:
            logit_C = logit_C + own.w2_Cr @ factors[0][token].float().numpy()
        prob_C = np.exp(logit_C - np.logaddexp(_logsumexp(logit_C), own.others))
        scored_C = (logit_C + own.noise_C) / self._tau
        best_K = (-scored_C).argsort(kind="stable")[:most]
        weight_K = np.exp(scored_C[best_K] - np.logaddexp(_logsumexp(scored_C), own.scored_others))
        if log_odds := self._odds[min(depth, len(self._odds) - 1)]:
            held_K = weight_K.clip(_LEAST, _MOST)
            weight_K = np.where(weight_K > 0, held_K / (held_K + (1 - held_K) * np.exp(-log_odds)), 0)
        return own.token_C[best_K], weight_K, prob_C[best_K], float(prob_C.max())

    def _read(self, token: int, depth: int) -> _Depth:
        """Read the first node of a depth over the whole vocabulary."""
        growth = self._growth
        request_1, token_1 = torch.tensor([self._number]), torch.tensor([token])
        (logit_V,) = growth.children(growth.hidden_GDH, growth.base_GDV, request_1, depth, token_1) / self._temperature
        scored_V = logit_V
        if self._kind == NodeKind.COUPLED.value:
            scored_V = logit_V + growth.vocab.noise.rows([self._seed], [self._index + depth], "cpu")[0]
        scored_C, column_C = scored_V.topk(growth.num_candidates)
        factors = growth.factors()
        return _Depth(
            token_C=(column_C if growth.vocab.target_ids is None else growth.vocab.target_ids[column_C]).numpy(),
            base_C=growth.base_GDV[self._number, depth, column_C].numpy() / np.float32(self._temperature),
            noise_C=(scored_C - logit_V[column_C]).nan_to_num(0).numpy(),  # 0 at a token that is never drafted
            others=_others(logit_V, column_C),
            scored_others=_others(scored_V / self._tau, column_C),
            w2_Cr=None if factors is None else factors[1][column_C].float().numpy() / np.float32(self._temperature),
        )

    def _table(self, nodes: list[_Node]) -> TreeNodes:
        """Return the nodes breadth-first."""
        weight_N, _, depth_N, token_N, parent_N, path_N, _ = (np.array(column) for column in zip(*nodes, strict=True))
        by_depth = depth_N.argsort(kind="stable")
        row_N = np.empty_like(by_depth)
        row_N[by_depth] = np.arange(len(nodes))
        kind_N = np.full(len(nodes), self._kind, dtype=np.uint8)
        kind_N[0] = NodeKind.ROOT.value
        return TreeNodes(
            request_N=np.full(len(nodes), self._number),
            row_N=np.arange(len(nodes)),
            parent_row_N=np.where(parent_N < 0, -1, row_N[parent_N])[by_depth],
            depth_N=depth_N[by_depth],
            token_N=token_N[by_depth],
            weight_N=-weight_N[by_depth].astype(np.float32),
            kind_N=kind_N,
            path_prob_N=path_N[by_depth],
        )


def _others(all_V: Tensor, some_C: Tensor) -> float:
    """Return the logarithm of the sum of exponentials over all tokens but those of these columns."""
    return float(all_V.index_fill(0, some_C, -torch.inf).logsumexp(0))


def _logsumexp(x_C: np.ndarray) -> np.floating:
    top = x_C.max()
    found: np.floating = np.log(np.exp(x_C - top).sum()) + top
    return found
