"""The nouns of a growing tree: what passes between draft model, scoring and growth, level by level.

Legend: B requests, N nodes, F frontier nodes, K candidates, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.kernels.select import TORCH, Kernels
from workers.sampling.gumbel_cache import GumbelCache
from workers.sampling.logits_edits import Columns


class Frontier(NamedTuple):
    """Nodes to run through the draft model, sorted by request, then row. Host arrays [F]."""

    depth: int
    request_F: np.ndarray
    row_F: np.ndarray
    parent_row_F: np.ndarray
    token_F: np.ndarray
    ancestors_F: np.ndarray  # int64 bitmask

    def rows(self, at: np.ndarray) -> Frontier:
        """Some of the nodes, by mask or index."""
        return Frontier(self.depth, *(array[at] for array in self[1:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowLimits:
    """What each request allows its tree, as host arrays [B]."""

    num_nodes_B: np.ndarray
    max_depth_B: np.ndarray
    min_prob_B: np.ndarray
    path_prob_B: np.ndarray
    rule_B: np.ndarray  # workers.types.Rule
    auto_B: np.ndarray  # > 0: budgets follow costs
    is_hybrid: bool = False  # all children of a sampled node but the last are its most likely tokens


class Nodes(NamedTuple):
    """Nodes of any number of trees, parents before children; row 0 is a request's root. Host arrays [N]."""

    request_N: np.ndarray
    row_N: np.ndarray  # breadth-first within the request; gaps are allowed
    parent_row_N: np.ndarray  # -1 at the root
    depth_N: np.ndarray
    token_N: np.ndarray
    weight_N: np.ndarray
    kind_N: np.ndarray  # uint8 NodeKind

    def rows(self, at: np.ndarray) -> Nodes:
        """Some of the nodes, by mask or index."""
        return Nodes(*(array[at] for array in self))

    @staticmethod
    def concatenate(parts: list[Nodes]) -> Nodes:
        return parts[0] if len(parts) == 1 else Nodes(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


class Uncut(NamedTuple):
    """Trees before the cut, and what growing them took."""

    nodes: Nodes
    num_levels: int  # levels read, the roots' included
    num_run: int  # rows run through the draft model, with a node or without; not the roots


class SampledNodes(NamedTuple):
    """Nodes of one level whose children were sampled, and what they were drawn from."""

    request_F: np.ndarray
    row_F: np.ndarray
    id_FS: np.ndarray  # target ids
    weight_FS: np.ndarray  # int64; q = weight / sum of the row; 0 = not drawable, and not told to the verifier


@dataclass(frozen=True, kw_only=True)
class DraftVocabulary:
    """What the draft's logits mean: `target_ids` [V] int64, or None when draft and target ids are the same."""

    target_size: int
    target_ids: Tensor | None = None
    kernels: Kernels = TORCH

    @property
    def size(self) -> int:
        """V, columns of the logits."""
        return self.target_size if self.target_ids is None else len(self.target_ids)

    @cached_property
    def columns(self) -> Columns:
        """Where each target token is in the logits."""
        if self.target_ids is None:
            return Columns(0, self.target_size)
        column_of_V = torch.full((self.target_size,), -1, dtype=torch.int64)
        column_of_V[self.target_ids.cpu()] = torch.arange(len(self.target_ids))
        return Columns(0, len(self.target_ids), column_of_V)

    @cached_property
    def noise(self) -> GumbelCache:
        """The target's noise for the draft's tokens."""
        return GumbelCache(0, self.target_size, self.target_ids, self.kernels.gumbel)


class Candidates(NamedTuple):
    """A draft that knows only a few tokens per node, as n-gram lookup does: host arrays [F, K], best first."""

    token_FK: np.ndarray  # int64 target ids; anything where log_q is -inf
    log_q_FK: np.ndarray  # float32, log of the tokens' draft probabilities; -inf = no such candidate
