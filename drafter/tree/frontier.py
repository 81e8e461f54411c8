"""The types that pass between draft model, scoring and growth.

    TreeRequests   the trees that a message asks for
    TreeRoots      where the trees of one step begin in the KV pool
    Frontier       nodes to run through the draft model next
    TreeNodes      nodes of finished trees
    PrunedNodes    nodes that were kept out of them, for requests that ask to see them
    UnprunedTrees  all trees of a step before the final cut

Legend: B requests, G of them that grow a tree, N nodes, P pruned nodes, F frontier nodes, K candidates,
V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.config import TreeRules
from workers.kernels.select import TORCH, Kernels
from workers.sampling.gumbel_cache import GumbelCache
from workers.sampling.logits_edits import Columns
from workers.sampling.logits_state import LogitsState, unpack_logits_states
from workers.settings import Rule
from workers.types import AttentionMetadata, DraftCosts, DraftRequest, SamplingBatch


class Frontier(NamedTuple):
    """Nodes to run through the draft model, sorted by request, then row. Host arrays [F]."""

    depth: int
    request_F: np.ndarray
    row_F: np.ndarray
    parent_row_F: np.ndarray
    token_F: np.ndarray
    ancestors_F: np.ndarray  # int64 bitmask

    def rows(self, at: np.ndarray) -> Frontier:
        """Select nodes by mask or index."""
        return Frontier(self.depth, *(array[at] for array in self[1:]))


class TreeRoots(NamedTuple):
    """The KV slots behind which the trees of one step grow; int32 arrays."""

    base_G: np.ndarray  # each root's slot and position
    page_table_GP: np.ndarray

    @staticmethod
    def of(request: DraftRequest) -> TreeRoots:
        """Return the roots of the requests that want a tree: their last fed rows."""
        is_growing_B = request.num_nodes_B.numpy() > 0
        offsets = request.offsets.numpy()
        last_slot_B = request.start_B.numpy() + (offsets[1:] - offsets[:-1]) - 1
        table_BP = request.page_table_BP.numpy()
        if is_growing_B.all():
            return TreeRoots(last_slot_B, table_BP)
        return TreeRoots(last_slot_B[is_growing_B], table_BP[is_growing_B])

    def attention(self, frontier: Frontier) -> AttentionMetadata:
        """Return the attention of a frontier: each node sees its prefix and its own ancestors."""
        base_F = self.base_G[frontier.request_F]
        counts = np.bincount(frontier.request_F, minlength=len(self.base_G))
        return AttentionMetadata(
            query_offsets=np.concatenate([[0], counts.cumsum()]).astype(np.int32),
            page_table_BP=self.page_table_GP,
            base_B=self.base_G,
            slot_N=base_F + frontier.row_F.astype(np.int32),
            visible_N=base_F,
            ancestors_N=frontier.ancestors_F,
        )

    def position_F(self, frontier: Frontier) -> Tensor:
        """Return the positions of a frontier's tokens: root position + depth."""
        return torch.from_numpy(self.base_G[frontier.request_F] + np.int32(frontier.depth))


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowLimits:
    """The limits that each request sets for its tree, as host arrays [B]."""

    num_nodes_B: np.ndarray
    max_depth_B: np.ndarray
    rules: TreeRules[np.ndarray]
    rule_B: np.ndarray  # workers.settings.Rule
    auto_B: np.ndarray  # > 0: the tree's size follows the cost model
    is_hybrid: bool = False  # all children of a sampled node but the last are its most likely tokens

    @property
    def is_sampled_B(self) -> np.ndarray:
        """Which requests' children are sampled, and therefore cannot be cut once drawn."""
        return self.rule_B >= Rule.TRAVERSAL.value

    @property
    def is_auto_B(self) -> np.ndarray:
        """Which requests leave the size of their tree to the cost model."""
        return self.auto_B > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRequests:
    """The trees that a message asks for, one for each of B requests."""

    root_token_B: np.ndarray
    root_index_B: np.ndarray  # index of the token drawn at the root: the root's position + 1
    limits: GrowLimits
    sampling: SamplingBatch  # on the host
    logits_states: Mapping[int, LogitsState] = field(default_factory=dict)  # of the constrained requests
    costs: DraftCosts | None = None  # required by `limits.auto_B`
    traced_B: np.ndarray | None = None  # bool: report all nodes, pruned ones included; None = of no request

    @staticmethod
    def of(message: DraftRequest, *, is_hybrid: bool = False, max_depth: int | None = None) -> TreeRequests:
        """Return what a message asks for; some of its requests may only be fed. max_depth: the draft model's own."""
        is_growing_B = message.num_nodes_B.numpy() > 0
        own: Callable[[Tensor], np.ndarray]
        if is_growing_B.all():  # nearly always
            own, sampling = Tensor.numpy, message.sampling
        else:
            own, sampling = (
                lambda column: column.numpy()[is_growing_B],
                message.sampling.rows(torch.from_numpy(is_growing_B)),
            )
        offsets, index_B = message.offsets.numpy(), is_growing_B.cumsum() - 1
        states = unpack_logits_states(message.constraints_U)
        depth_B = own(message.max_depth_B)
        return TreeRequests(
            root_token_B=message.token_M.numpy()[offsets[1:][is_growing_B] - 1],
            root_index_B=own(message.start_B).astype(np.int64) + (offsets[1:] - offsets[:-1])[is_growing_B],
            limits=GrowLimits(
                num_nodes_B=own(message.num_nodes_B),
                max_depth_B=depth_B if max_depth is None else np.minimum(depth_B, np.int32(max_depth)),
                rules=message.rules.each(own),
                rule_B=own(message.rule_B),
                auto_B=own(message.auto_B),
                is_hybrid=is_hybrid,
            ),
            sampling=sampling,
            logits_states={int(index_B[b]): state for b, state in states.items() if is_growing_B[b]},
            costs=message.costs,
            traced_B=None if message.traced_B is None else own(message.traced_B).astype(bool),
        )


class TreeNodes(NamedTuple):
    """Nodes of any number of trees, parents before children; row 0 is a request's root. Host arrays [N]."""

    request_N: np.ndarray
    row_N: np.ndarray  # breadth-first within the request; gaps are allowed
    parent_row_N: np.ndarray  # -1 at the root
    depth_N: np.ndarray
    token_N: np.ndarray
    weight_N: np.ndarray
    kind_N: np.ndarray  # uint8 NodeKind
    path_prob_N: np.ndarray  # product of draft probabilities from the root, which has 1

    def rows(self, at: np.ndarray) -> TreeNodes:
        """Select nodes by mask or index."""
        return TreeNodes(*(array[at] for array in self))

    @staticmethod
    def concatenate(parts: list[TreeNodes]) -> TreeNodes:
        """Join the nodes of several growths."""
        return TreeNodes(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


class PrunedNodes(NamedTuple):
    """Nodes that thresholds or the cost model kept out of a growing tree. Host arrays [P], recorded only if asked for.

    A token of -1 stands for children that were not drafted; their weight and probability are NaN.
    """

    request_P: np.ndarray
    parent_row_P: np.ndarray
    token_P: np.ndarray
    weight_P: np.ndarray
    prob_P: np.ndarray  # q(token | parent)
    reason_P: np.ndarray  # uint8 PruneReason

    @staticmethod
    def undrafted(request_P: np.ndarray, parent_row_P: np.ndarray, reason_P: np.ndarray) -> PrunedNodes:
        """Return the stand-ins for the children of nodes that were not run through the draft model."""
        unknown_P = np.full(len(request_P), np.nan)
        return PrunedNodes(
            request_P, parent_row_P, np.full(len(request_P), -1), unknown_P, unknown_P, reason_P.astype(np.uint8)
        )

    def below(self, row_of: np.ndarray) -> PrunedNodes:
        """Return the nodes after their parents have moved to `row_of`; those whose parent is gone (-1) are left out."""
        parent_row_P = row_of[self.parent_row_P]
        return PrunedNodes(*(array[parent_row_P >= 0] for array in self._replace(parent_row_P=parent_row_P)))


class SampledNodes(NamedTuple):
    """Nodes of one level whose children were sampled, and the distributions they were drawn from."""

    request_F: np.ndarray
    row_F: np.ndarray
    id_FS: np.ndarray  # target ids
    weight_FS: np.ndarray  # int64; q = weight / sum of the row; tokens of weight 0 are not sent to the verifier


class UnprunedTrees(NamedTuple):
    """Trees before the final cut, and the work that growing them took."""

    nodes: TreeNodes  # by request, then row
    sampled: list[SampledNodes]
    pruned_BD: np.ndarray  # int32: nodes of depth 1 .. D that thresholds and the cost model kept out so far
    num_levels: int  # levels run, the roots' included
    num_run: int  # rows run through the draft model, whether they held a node or not; roots not counted
    pruned: Sequence[PrunedNodes] = ()  # of traced requests, from growing; the final cut's are not among them


@dataclass(frozen=True, kw_only=True)
class DraftVocabulary:
    """The mapping from logit columns to target ids: `target_ids` [V] int64, or None if the ids are the same."""

    target_size: int
    target_ids: Tensor | None = None
    kernels: Kernels = TORCH

    @property
    def size(self) -> int:
        """V, the number of logit columns."""
        return self.target_size if self.target_ids is None else len(self.target_ids)

    @cached_property
    def columns(self) -> Columns:
        """The logit column of each target token."""
        if self.target_ids is None or self.target_ids.is_meta:  # only the sizes are asked for
            return Columns(0, self.size)
        column_of_V = torch.full((self.target_size,), -1, dtype=torch.int64)
        column_of_V[self.target_ids.cpu()] = torch.arange(len(self.target_ids))
        return Columns(0, len(self.target_ids), column_of_V)

    @cached_property
    def noise(self) -> GumbelCache:
        """The target's Gumbel noise for the draft's tokens."""
        return GumbelCache(0, self.target_size, self.target_ids, self.kernels.gumbel)


class NgramCandidates(NamedTuple):
    """The draft distributions of n-gram lookup, which knows a few tokens per node: host arrays [F, K], best first."""

    token_FK: np.ndarray  # int64 target ids; arbitrary where log_q is -inf
    log_q_FK: np.ndarray  # float32, log of the tokens' draft probabilities; -inf = no such candidate

    def rows(self, at: np.ndarray) -> NgramCandidates:
        """Select nodes by mask or index."""
        return NgramCandidates(self.token_FK[at], self.log_q_FK[at])


RootLogits = Tensor | NgramCandidates | Callable[[], Tensor]
"""The draft distributions at the roots of a step's trees, logits [G, V], or what computes them before the next step."""
