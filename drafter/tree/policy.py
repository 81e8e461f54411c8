"""How a node's slots are dealt to its children: the shape of a tree before any pruning.

A node holds *slots*, the number of descendants it may have. Dealing gives each chosen child one slot for itself and
some for its own descendants, looking only at the node's own lineage; so whatever pruning empties is not refilled, and
a pruned tree is the unpruned one without the descendants of the nodes that failed.

Legend: F frontier nodes, K children, J slots.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple, Protocol

import numpy as np

from workers.config import MAX_TREE_NODES, TreeConfig

TYPICAL_CHILDREN = (0.62, 0.13, 0.06, 0.03, 0.02, 0.015, 0.01, 0.01)
"""Survival of a node's best, second best, ... child: what a subtree not yet seen is taken to hold."""


class Dealt(NamedTuple):
    """Each child's slots, itself included (0 = not in the tree), and its label."""

    slots_FK: np.ndarray
    label_FK: np.ndarray


class TreePolicy(Protocol):
    """A policy that deals slots. `label` is the shape's own note on a node (root 0); `room` levels may follow it."""

    max_children: int
    expected_J: np.ndarray
    """Survival of a typical tree's nodes, the root excluded, in the order in which a smaller budget drops them last."""

    def root_slots(self, num_nodes_B: np.ndarray) -> np.ndarray: ...

    def deal(self, slots_F: np.ndarray, label_F: np.ndarray, room_F: np.ndarray, weight_FK: np.ndarray) -> Dealt: ...


class DynamicTreePolicy:
    """Best-first over the expected tree: children at their draft weights, all below them at typical ones.

    Child k of weight w is expected to carry a subtree of weights w * h_0 >= w * h_1 >= ... (h_0 = 1 is the child
    itself); the node's slots go to the largest of all these products, whichever child they fall under.
    """

    def __init__(self, max_children: int, max_depth: int, typical: tuple[float, ...] = TYPICAL_CHILDREN) -> None:
        self.max_children = max_children
        self._max_depth = max_depth
        self._profile = np.array([_typical_subtree(room, typical[:max_children]) for room in range(max_depth)])
        self.expected_J = np.array(_typical_subtree(max_depth, typical[:max_children])[1:], dtype=np.float32)

    def root_slots(self, num_nodes_B: np.ndarray) -> np.ndarray:
        return num_nodes_B

    def deal(self, slots_F: np.ndarray, label_F: np.ndarray, room_F: np.ndarray, weight_FK: np.ndarray) -> Dealt:
        most = int(slots_F.max(initial=0))
        below_FJ = self._profile[np.minimum(room_F, self._max_depth) - 1, :most]
        value_FKJ = weight_FK[:, :, None] * below_FJ[:, None, :]
        flat = value_FKJ.reshape(len(slots_F), -1)
        best_first = (-flat).argsort(axis=1, kind="stable")[:, :most]
        f, place = (np.arange(best_first.shape[1]) < slots_F[:, None]).nonzero()
        taken = np.zeros(flat.shape, dtype=bool)
        taken[f, best_first[f, place]] = True
        taken &= flat > 0
        slots_FK = taken.reshape(value_FKJ.shape).sum(-1)
        return Dealt(slots_FK, np.zeros(slots_FK.shape, dtype=np.int64))


class StaticTreePolicy:
    """A fixed tree (`speculative_token_tree`, or a chain), cut to a request's budget in breadth-first order.

    The label of a node is its place in that order, root 0.
    """

    def __init__(self, paths: tuple[tuple[int, ...], ...]) -> None:
        self.max_children = 1 + max(path[-1] for path in paths)
        self._num_nodes = len(paths)
        survival = (*TYPICAL_CHILDREN, *(0.0,) * self.max_children)
        self.expected_J = np.array([np.prod([survival[rank] for rank in path]) for path in paths], dtype=np.float32)
        place = {(): 0} | {path: 1 + i for i, path in enumerate(paths)}
        size = 1 + len(paths)
        self._child = np.zeros((size, self.max_children), dtype=np.int64)
        # subtree[n, v]: nodes of v's subtree, itself included, that are among the first n below the root.
        self._subtree = np.zeros((size, size), dtype=np.int64)
        for path in paths:
            self._child[place[path[:-1]], path[-1]] = place[path]
            for length in range(len(path) + 1):
                self._subtree[place[path] :, place[path[:length]]] += 1

    def root_slots(self, num_nodes_B: np.ndarray) -> np.ndarray:
        return np.minimum(num_nodes_B, self._num_nodes)

    def deal(self, slots_F: np.ndarray, label_F: np.ndarray, room_F: np.ndarray, weight_FK: np.ndarray) -> Dealt:
        # A label says where in the static tree a node is and, above 2^8, the request's budget.
        budget_F = np.where(label_F == 0, slots_F, label_F >> 8)
        child_FK = self._child[label_F & 0xFF, : weight_FK.shape[1]]  # a tiny vocabulary has fewer children
        slots_FK = self._subtree[budget_F[:, None], child_FK] * (child_FK > 0)
        dealt = (weight_FK > 0) & (slots_F[:, None] > 0)
        return Dealt(np.where(dealt, slots_FK, 0), child_FK | budget_F[:, None] << 8)


def make_tree_policy(config: TreeConfig) -> TreePolicy:
    """The shape a TreeConfig asks for. A chain of N is the static tree (0,), (0, 0), ... of N nodes."""
    match config.kind:
        case "dynamic":
            return DynamicTreePolicy(config.max_children, config.max_depth)
        case "chain":
            return StaticTreePolicy(tuple((0,) * (i + 1) for i in range(config.num_speculative_tokens)))
        case "static":
            return StaticTreePolicy(config.static_paths)


def _typical_subtree(room: int, typical: tuple[float, ...]) -> list[float]:
    """Weights, largest first, of a subtree whose root has weight 1 and below which `room` levels fit; zero-padded."""
    weights: list[float] = []
    heap = [(-1.0, room)]
    while heap and len(weights) < MAX_TREE_NODES:
        negative, levels = heapq.heappop(heap)
        weights.append(-negative)
        if levels:
            for survival in typical:
                heapq.heappush(heap, (negative * survival, levels - 1))
    return weights + [0.0] * (MAX_TREE_NODES - len(weights))
