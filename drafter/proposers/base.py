"""Proposers: draft models that read committed tokens and return the logits of tree nodes.

    extend   runs the newly committed rows of every request (causal, KV kept) and returns the logits at each new root,
             or what computes them, where a graph that grows whole trees does so itself
    expand   runs one tree level; a node's KV goes to slot base + row behind the prefix, and the next extend simply
             overwrites it

A request's row 0 is its root, whose own KV extend has just written at slot `base`. A feature head's entry for token j
is in slot j with rotary position j - 1 (slot 0 stays empty); a draft model's with position j.
`drafter.proposers.ngram` is a proposer too: its pool holds the tokens themselves, and it returns a few candidates
instead of logits.
Legend: B requests of the message, G of them growing, M fed rows, F frontier nodes, R rows of a tree, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from drafter.proposers.feature_head import DraftHead, FeatureHead, replace_weights
from drafter.tree.frontier import DraftVocabulary, Frontier, RootLogits, TreeRoots
from drafter.tree.grow import DraftDistributions
from drafter.tree.tree_graphs import TreeGraphs
from workers.config import EngineConfig
from workers.cuda_graphs import Graphs, sizes
from workers.kernels.select import AttentionPlan
from workers.kv_cache import KVPool
from workers.models.base import BaseDecoder
from workers.transfer import all_to_device, to_device
from workers.types import AttentionMetadata, DraftRequest


class Proposer(DraftDistributions, Protocol):
    """One draft model on one rank, between a DraftRequest and `grow`.

    width: of the features that it reads, 0 = none. graphs: of its passes; None = eager execution.
    """

    width: int
    graphs: Graphs | None

    def extend(self, request: DraftRequest) -> RootLogits:
        """Feed all rows; return the root logits [G, V] of the requests that want a tree, in order."""
        ...


def fed_slots(request: DraftRequest) -> np.ndarray:
    """Return the slot of every fed row, int32 [M]."""
    offsets, start_B = request.offsets.numpy(), request.start_B.numpy()
    first_M = (start_B - offsets[:-1]).repeat(offsets[1:] - offsets[:-1])
    return first_M + np.arange(len(first_M), dtype=np.int32)


def root_rows(request: DraftRequest) -> Tensor:
    """Return the fed row of each growing request's root, int64 [G]: its last one."""
    last_B = request.offsets.numpy()[1:] - np.int64(1)
    return torch.from_numpy(last_B[request.num_nodes_B.numpy() > 0])


def fed_attention(request: DraftRequest, slot_M: np.ndarray) -> AttentionMetadata:
    """Return the attention of the fed rows: each sees the slots up to its own."""
    return AttentionMetadata(
        query_offsets=request.offsets.numpy(),
        page_table_BP=request.page_table_BP.numpy(),
        base_B=np.zeros_like(request.start_B.numpy()),
        slot_N=slot_M,
        visible_N=slot_M + np.int32(1),
        ancestors_N=np.zeros(len(slot_M), dtype=np.int64),
    )


Head = TypeVar("Head", bound=DraftHead)


class HeadProposer(Generic[Head]):
    """A head that reads the target's features, and its passes. graphs: see `head_graphs`; None = eager execution."""

    def __init__(self, head: Head, kv: KVPool, page_size: int, graphs: Graphs | None) -> None:
        self.vocab = head.vocab
        self.width = head.width  # of the features
        self.graphs = graphs
        self._head, self._kv, self._page_size = head, kv, page_size

    def take(self, head: Head) -> None:
        """Draft with the weights of another head of the same shape; see `replace_weights`. The KV pool stays as it is.

        Raises ValueError.
        """
        replace_weights(self._head, head, in_place=self.graphs is not None)

    def embed(self, token_N: Tensor) -> Tensor:
        """Return the head's input embeddings of target tokens [N, H]."""
        return self._head.embed(token_N)

    def _run(self, tokens: Tensor, features: Tensor, positions: Tensor, attention: AttentionMetadata) -> Tensor:
        if self.graphs is not None:
            return self.graphs(attention, tokens, features, positions)[0]
        device = self._head.device
        plan = self._head.plan(attention, self._page_size)
        tokens, features, positions = (to_device(given, device) for given in (tokens, features, positions))
        return self._head.forward(tokens, features, positions, plan, self._kv)


class FeatureProposer(HeadProposer[FeatureHead]):
    """EAGLE and MTP heads: a committed token's feature comes from the target, a tree node's from its parent.

    tree_graphs: see `head_tree_graphs`.
    """

    def __init__(
        self,
        head: FeatureHead,
        kv: KVPool,
        page_size: int,
        tree_rows: int,
        graphs: Graphs | None = None,
        tree_graphs: TreeGraphs | None = None,
    ) -> None:
        super().__init__(head, kv, page_size, graphs)
        self.tree_graphs, self._tree_rows = tree_graphs, tree_rows
        self._roots: TreeRoots
        self._root_GH: Tensor
        self._hidden_GRH: Tensor | None = None  # each node's feature for its children; None = not read yet

    def extend(self, request: DraftRequest) -> Tensor | Callable[[], Tensor]:
        """See `Proposer`."""
        assert request.features_MH is not None, "a feature head is fed features"
        slot_M = fed_slots(request)
        position_M, attention = torch.from_numpy(slot_M - np.int32(1)), fed_attention(request, slot_M)
        hidden_MH = self._run(request.token_M, request.features_MH, position_M, attention)
        self._roots, self._hidden_GRH = TreeRoots.of(request), None
        row_G = to_device(root_rows(request), hidden_MH.device)
        if self.tree_graphs is not None:
            self._root_GH = self.tree_graphs.set_roots(self._roots, hidden_MH, row_G)
            return self._root_logits
        self._root_GH = hidden_MH[row_G]
        return self._root_logits()

    def expand(self, frontier: Frontier) -> Tensor:
        """See `Proposer`."""
        device = self._root_GH.device
        index = (frontier.request_F, frontier.parent_row_F, frontier.row_F)
        g, parent, row = all_to_device([rows.astype("int64") for rows in index], device)
        position_F, attention = self._roots.position_F(frontier) - 1, self._roots.attention(frontier)
        hidden_GRH = self._node_features()
        hidden_FH = self._run(torch.from_numpy(frontier.token_F), hidden_GRH[g, parent], position_F, attention)
        hidden_GRH[g, row] = hidden_FH
        return self._head.logits(hidden_FH)

    def _node_features(self) -> Tensor:
        if self._hidden_GRH is None:
            num_requests, width = self._root_GH.shape
            self._hidden_GRH = self._root_GH.new_empty(num_requests, self._tree_rows, width)
            self._hidden_GRH[:, 0] = self._root_GH
        return self._hidden_GRH

    def _root_logits(self) -> Tensor:
        # Zero rows would make compiled kernels compile once more.
        if not len(self._root_GH):
            return self._root_GH.new_zeros(0, self.vocab.size).float()
        return self._head.logits(self._root_GH)


def head_graphs(
    head: DraftHead, kv: KVPool, config: EngineConfig, num_more_pages: int = 0, *, is_captured: bool = True
) -> Graphs:
    """Capture a head's forward pass, (tokens_M, features_MH, positions_M) -> (hidden_MH,), for fed rows and levels.

    num_more_pages: behind those of the longest request.
    """

    def run(plan: AttentionPlan, tokens_M: Tensor, features_MH: Tensor, positions_M: Tensor) -> tuple[Tensor]:
        return (head.forward(tokens_M, features_MH, positions_M, plan, kv),)

    one = torch.zeros(1, dtype=torch.int32, device=head.device)
    return Graphs(
        run,
        partial(head.plan, page_size=config.page_size),
        (one, torch.zeros(1, head.width, dtype=head.dtype, device=head.device), one),
        buckets=sizes(config),
        table_width=config.pages_for(config.max_model_len) + num_more_pages,
        is_captured=is_captured,
        is_eager=head.has_long_chunks,
    )


def head_tree_graphs(head: FeatureHead, kv: KVPool, config: EngineConfig, *, is_captured: bool = True) -> TreeGraphs:
    """Capture the growth of whole trees by a head."""

    def run(plan: AttentionPlan, tokens_N: Tensor, features_NH: Tensor, positions_N: Tensor) -> Tensor:
        return head.forward(tokens_N, features_NH, positions_N, plan, kv)

    return TreeGraphs(
        run,
        head.logits,
        partial(head.plan, page_size=config.page_size),
        torch.zeros(1, head.width, dtype=head.dtype, device=head.device),
        head.vocab,
        head.kernels,
        config,
        root_position=-1,
        is_captured=is_captured,
    )


def shared_vocabulary(model: BaseDecoder, target_size: int) -> DraftVocabulary:
    """Return the tokens that a draft model shares with a target of `target_size` tokens: the first of the larger."""
    size = model.spec.vocab_size
    target_ids = torch.arange(size, device=model.device) if size < target_size else None
    return DraftVocabulary(target_size=target_size, target_ids=target_ids, kernels=model.kernels)


class DraftModelProposer:
    """A small language model; it reads tokens alone, no features of the target. vocab: see `shared_vocabulary`.

    A committed token that it does not know is fed as its last one, which can only make drafts worse.
    """

    def __init__(
        self,
        model: BaseDecoder,
        vocab: DraftVocabulary,
        kv: KVPool,
        page_size: int,
        graphs: Graphs | None = None,
        tree_graphs: TreeGraphs | None = None,
    ) -> None:
        self.vocab = vocab
        self.width = 0  # it reads no features
        self.graphs, self.tree_graphs = graphs, tree_graphs
        self._model, self._kv, self._page_size = model, kv, page_size
        self._roots: TreeRoots

    def extend(self, request: DraftRequest) -> Tensor | Callable[[], Tensor]:
        """See `Proposer`."""
        slot_M, token_M = fed_slots(request), request.token_M.clamp(max=self._model.spec.vocab_size - 1)
        hidden_MD = self._run(token_M, torch.from_numpy(slot_M), fed_attention(request, slot_M))
        self._roots = TreeRoots.of(request)
        row_G = to_device(root_rows(request), hidden_MD.device)
        if self.tree_graphs is not None:
            root_GD = self.tree_graphs.set_roots(self._roots, hidden_MD, row_G)
            return partial(shared_logits, self._model, self.vocab, root_GD)
        return shared_logits(self._model, self.vocab, hidden_MD[row_G])

    def expand(self, frontier: Frontier) -> Tensor:
        """See `Proposer`."""
        position_F, attention = self._roots.position_F(frontier), self._roots.attention(frontier)
        hidden_FD = self._run(torch.from_numpy(frontier.token_F), position_F, attention)
        return shared_logits(self._model, self.vocab, hidden_FD)

    def _run(self, tokens: Tensor, positions: Tensor, attention: AttentionMetadata) -> Tensor:
        if self.graphs is not None:
            return self.graphs(attention, tokens, positions)[0]
        device = self._model.device
        plan = self._model.plan(attention, self._page_size)
        return self._model.forward(to_device(tokens, device), to_device(positions, device), plan, self._kv).final_ND


def shared_logits(model: BaseDecoder, vocab: DraftVocabulary, hidden_ND: Tensor) -> Tensor:
    """Return float32 [N, V] logits of the shared tokens on every rank. A collective."""
    return model.full_logits(hidden_ND)[:, : vocab.size].contiguous()


def decoder_tree_graphs(
    model: BaseDecoder, vocab: DraftVocabulary, kv: KVPool, config: EngineConfig, *, is_captured: bool = True
) -> TreeGraphs:
    """Capture the growth of whole trees by a draft model, which reads no features."""

    def run(plan: AttentionPlan, tokens_N: Tensor, features_N0: Tensor, positions_N: Tensor) -> Tensor:
        return model.forward(tokens_N, positions_N, plan, kv).final_ND

    return TreeGraphs(
        run,
        partial(shared_logits, model, vocab),
        partial(model.plan, page_size=config.page_size),
        torch.zeros(1, model.spec.hidden_size, dtype=model.dtype, device=model.device),
        vocab,
        model.kernels,
        config,
        reads_features=False,
        is_captured=is_captured,
    )
