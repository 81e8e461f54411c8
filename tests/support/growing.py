"""`drafter.tree.grow.grow` with a draft model that is made of functions."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

import drafter.tree.grow
from drafter.tree.frontier import DraftVocabulary, Frontier, NgramCandidates, TreeRequests
from drafter.tree.grow import GrownTrees
from drafter.tree.policy import TreePolicy
from drafter.tree.tree_graphs import TreeGraphs
from workers.sampling.grammar import Grammars


def grow(
    roots: Tensor | NgramCandidates,
    root_token_B: np.ndarray,
    root_index_B: np.ndarray,
    *,
    policy: TreePolicy,
    expand: Callable[[Frontier], Tensor | NgramCandidates],
    vocab: DraftVocabulary,
    tree_graphs: TreeGraphs | None = None,
    grammars: Grammars | None = None,
    **asked: Any,
) -> GrownTrees:
    """Grow one tree per request. asked: the other fields of `TreeRequests`."""
    model = SimpleNamespace(expand=expand, vocab=vocab, tree_graphs=tree_graphs)
    trees = TreeRequests(root_token_B=root_token_B, root_index_B=root_index_B, **asked)
    return drafter.tree.grow.grow(trees, roots, model, policy, grammars=grammars)
