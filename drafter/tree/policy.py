"""Tree policies: how a node's budget is split among its children.

A node's *budget* is the number of descendants it may have. A policy gives each chosen child one node for itself and
some for its descendants. It looks only at the node's own path, so nothing refills what pruning empties, and a pruned
tree is the unpruned one without the descendants of the nodes that failed.

Legend: F frontier nodes, K children, J nodes of a typical tree.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple, Protocol

import numpy as np

from workers.config import MAX_TREE_NODES, TreeConfig

TYPICAL_CHILDREN = (0.62, 0.13, 0.06, 0.03, 0.02, 0.015, 0.01, 0.01)
"""Survival of a node's best, second best, ... child: the assumption about subtrees that are not drafted yet."""


class ChildBudgets(NamedTuple):
    """The size of each child's subtree, itself included (0 = not in the tree), and the child's label."""

    size_FK: np.ndarray
    label_FK: np.ndarray


class TreePolicy(Protocol):
    """Splits budgets. `label` is the policy's own note on a node (root 0)."""

    max_children: int
    expected_J: np.ndarray
    """Survival of a typical tree's nodes, the root excluded; a smaller budget keeps a prefix of them."""

    def root_budget(self, num_nodes_B: np.ndarray) -> np.ndarray:
        """Return the budget of each root, given the number of nodes its request allows."""
        ...

    def split(
        self, budget_F: np.ndarray, label_F: np.ndarray, num_levels_F: np.ndarray, weight_FK: np.ndarray
    ) -> ChildBudgets:
        """Split the budgets of nodes below which `num_levels` levels fit and whose candidates have these weights."""
        ...


class DynamicTreePolicy:
    """Best-first over the expected tree: children at their draft weights, their descendants at typical ones.

    A child of weight w is expected to carry a subtree of weights w * h_0 >= w * h_1 >= ... (h_0 = 1 is the child
    itself). The node's budget goes to the largest of all these products, whichever child they belong to.

    has_leaf_siblings: only a node's best child has children, for draft models that know one distribution per depth.
    """

    def __init__(
        self,
        max_children: int,
        max_depth: int,
        typical: tuple[float, ...] = TYPICAL_CHILDREN,
        *,
        has_leaf_siblings: bool = False,
    ) -> None:
        self.max_children = max_children
        self.has_leaf_siblings = has_leaf_siblings
        self._max_depth = max_depth
        typical = typical[:max_children]
        self.subtrees = np.array([_typical_subtree(num_levels, typical) for num_levels in range(max_depth)])
        self.expected_J = np.array(_typical_subtree(max_depth, typical)[1:], dtype=np.float32)

    def root_budget(self, num_nodes_B: np.ndarray) -> np.ndarray:
        """See `TreePolicy`."""
        return num_nodes_B

    def split(
        self, budget_F: np.ndarray, label_F: np.ndarray, num_levels_F: np.ndarray, weight_FK: np.ndarray
    ) -> ChildBudgets:
        """See `TreePolicy`."""
        max_budget = int(budget_F.max(initial=0))
        subtree_FJ = self.subtrees[np.minimum(num_levels_F, self._max_depth) - 1, :max_budget]
        value_FKJ = weight_FK[:, :, None] * subtree_FJ[:, None, :]
        if self.has_leaf_siblings:
            value_FKJ[:, 1:, 1:] = 0
        flat = value_FKJ.reshape(len(budget_F), -1)
        best_first = (-flat).argsort(axis=1, kind="stable")[:, :max_budget]
        f, rank = (np.arange(best_first.shape[1]) < budget_F[:, None]).nonzero()
        is_taken = np.zeros(flat.shape, dtype=bool)
        is_taken[f, best_first[f, rank]] = True
        is_taken &= flat > 0
        size_FK = is_taken.reshape(value_FKJ.shape).sum(-1)
        return ChildBudgets(size_FK, np.zeros(size_FK.shape, dtype=np.int64))


class StaticTreePolicy:
    """A fixed tree (`speculative_token_tree`, or a chain), truncated to a request's budget in breadth-first order.

    The label of a node is its index in that order, root 0, plus 2^8 times the request's budget.
    """

    def __init__(self, paths: tuple[tuple[int, ...], ...]) -> None:
        self.max_children = 1 + max(path[-1] for path in paths)
        self._num_nodes = len(paths)
        survival = (*TYPICAL_CHILDREN, *(0.0,) * self.max_children)
        self.expected_J = np.array([np.prod([survival[rank] for rank in path]) for path in paths], dtype=np.float32)
        index_of = {(): 0} | {path: 1 + i for i, path in enumerate(paths)}
        num_rows = 1 + len(paths)
        self._child = np.zeros((num_rows, self.max_children), dtype=np.int64)
        # subtree_size[n, v]: nodes of v's subtree, itself included, that are among the first n below the root.
        self._subtree_size = np.zeros((num_rows, num_rows), dtype=np.int64)
        for path in paths:
            self._child[index_of[path[:-1]], path[-1]] = index_of[path]
            for length in range(len(path) + 1):
                self._subtree_size[index_of[path] :, index_of[path[:length]]] += 1

    def root_budget(self, num_nodes_B: np.ndarray) -> np.ndarray:
        """See `TreePolicy`."""
        return np.minimum(num_nodes_B, self._num_nodes)

    def split(
        self, budget_F: np.ndarray, label_F: np.ndarray, num_levels_F: np.ndarray, weight_FK: np.ndarray
    ) -> ChildBudgets:
        """See `TreePolicy`."""
        root_budget_F = np.where(label_F == 0, budget_F, label_F >> 8)
        child_FK = self._child[label_F & 0xFF, : weight_FK.shape[1]]  # a tiny vocabulary has fewer children
        size_FK = self._subtree_size[root_budget_F[:, None], child_FK] * (child_FK > 0)
        is_taken = (weight_FK > 0) & (budget_F[:, None] > 0)
        return ChildBudgets(np.where(is_taken, size_FK, 0), child_FK | root_budget_F[:, None] << 8)


def make_tree_policy(config: TreeConfig, *, has_leaf_siblings: bool = False) -> TreePolicy:
    """Build the policy of a TreeConfig. A chain of N nodes is the static tree (0,), (0, 0), ..."""
    if config.kind == "dynamic":
        return DynamicTreePolicy(config.max_children, config.max_depth, has_leaf_siblings=has_leaf_siblings)
    return StaticTreePolicy(config.paths)


def _typical_subtree(num_levels: int, typical: tuple[float, ...]) -> list[float]:
    """Return the weights, largest first and zero-padded, of a root of weight 1 and `num_levels` levels below it."""
    weights: list[float] = []
    heap = [(-1.0, num_levels)]
    while heap and len(weights) < MAX_TREE_NODES:
        negative, levels_left = heapq.heappop(heap)
        weights.append(-negative)
        if levels_left:
            for survival in typical:
                heapq.heappush(heap, (negative * survival, levels_left - 1))
    return weights + [0.0] * (MAX_TREE_NODES - len(weights))
