"""Proposers: a draft model that can be fed committed tokens and asked for the logits of tree nodes.

    extend   runs the newly committed rows of every request (causal, KV kept) and returns the logits at each new root
    expand   runs one tree level; a node's KV goes to slot base + row behind the prefix and is simply overwritten by
             the next extend, so nothing has to be cleaned up

A request's row 0 is its root, whose own KV extend has just written at slot `base`. A feature head's entry for token j
sits in slot j with rotary position j - 1 (slot 0 stays empty); a draft model's with position j.
`drafter.proposers.ngram` is a proposer too: its memory holds the tokens themselves, and it knows a few candidates
instead of logits.
Legend: B requests of the message, G of them growing, M fed rows, F frontier nodes, R rows of a tree, H hidden width.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from drafter.proposers.feature_head import FeatureHead
from drafter.tree.frontier import Candidates, DraftVocabulary, Frontier
from drafter.tree.tree_graphs import Start, TreeGraphs
from workers.config import EngineConfig
from workers.cuda_graphs import Graphs, sizes
from workers.kernels.select import AttentionPlan
from workers.kv_cache import KVPool
from workers.models.base import BaseDecoder
from workers.transfer import to_device
from workers.types import AttentionMetadata, DraftRequest


class Proposer(Protocol):
    """One draft model on one rank, between the DraftRequest it is given and `grow`."""

    vocab: DraftVocabulary

    @property
    def tree_graphs(self) -> TreeGraphs | None:
        """Grows all levels of the trees rooted by the last extend; None = they are expanded one by one."""
        ...

    def extend(self, request: DraftRequest) -> Tensor | Candidates:
        """Feeds all rows; returns the root logits [G, V] of the requests that want a tree, in order."""
        ...

    def expand(self, level: Frontier) -> Tensor | Candidates:
        """Logits [F, V] of one level of the trees rooted by the last extend."""
        ...


class _Prefix:
    """Where the growing requests' trees start in the KV pool; lives for one step."""

    def __init__(self, request: DraftRequest) -> None:
        growing = request.num_nodes_B > 0
        last_slot_B = request.start_B + request.offsets.diff() - 1
        self.base_G = last_slot_B[growing]
        self.page_table_GP = request.page_table_BP[growing]
        self.last_row_G = (request.offsets[1:] - 1)[growing].long()

    def attention(self, level: Frontier) -> AttentionMetadata:
        request_F = torch.from_numpy(level.request_F)
        base_F = self.base_G[request_F]
        counts = np.bincount(level.request_F, minlength=len(self.base_G))
        return AttentionMetadata(
            query_offsets=torch.from_numpy(np.concatenate([[0], counts.cumsum()]).astype(np.int32)),
            page_table_BP=self.page_table_GP,
            base_B=self.base_G,
            slot_N=base_F + torch.from_numpy(level.row_F.astype(np.int32)),
            visible_N=base_F,
            ancestors_N=torch.from_numpy(level.ancestors_F),
        )

    def position_F(self, level: Frontier) -> Tensor:
        """Positions of the level's tokens: root position + depth."""
        return self.base_G[torch.from_numpy(level.request_F)] + level.depth


def fed_slots(request: DraftRequest) -> Tensor:
    """[M] int32: the slot of every fed row."""
    rows_B = request.offsets.diff()
    first_M = (request.start_B - request.offsets[:-1]).repeat_interleave(rows_B)
    return first_M + torch.arange(len(request.token_M), dtype=torch.int32)


def _fed_attention(request: DraftRequest, slot_M: Tensor) -> AttentionMetadata:
    return AttentionMetadata(
        query_offsets=request.offsets,
        page_table_BP=request.page_table_BP,
        base_B=torch.zeros_like(request.start_B),
        slot_N=slot_M,
        visible_N=slot_M + 1,
        ancestors_N=torch.zeros(len(slot_M), dtype=torch.int64),
    )


class FeatureProposer:
    """EAGLE and MTP heads: a committed token's feature comes from the target, a tree node's from its parent.

    graphs: see `head_graphs`; None = every kernel is launched by itself. tree_graphs: see `head_tree_graphs`.
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
        self.vocab = head.vocab
        self.width = head.width  # the features'
        self.graphs, self.tree_graphs = graphs, tree_graphs
        self._head, self._kv, self._page_size, self._tree_rows = head, kv, page_size, tree_rows
        self._prefix: _Prefix
        self._hidden_GRH: Tensor  # features that a node hands to its children

    def extend(self, request: DraftRequest) -> Tensor:
        assert request.features_MH is not None, "a feature head is fed features"
        slot_M = fed_slots(request)
        hidden_MH = self._run(request.token_M, request.features_MH, slot_M - 1, _fed_attention(request, slot_M))
        self._prefix = _Prefix(request)
        root_GH = hidden_MH[to_device(self._prefix.last_row_G, hidden_MH.device)]
        self._hidden_GRH = root_GH.new_empty(len(root_GH), self._tree_rows, root_GH.shape[-1])
        self._hidden_GRH[:, 0] = root_GH
        if self.tree_graphs is not None:
            self.tree_graphs.start = Start(self._prefix.base_G, self._prefix.page_table_GP, root_GH)
        # What is compiled would be compiled once more for no rows.
        return self._head.logits(root_GH) if len(root_GH) else root_GH.new_zeros(0, self.vocab.size).float()

    def expand(self, level: Frontier) -> Tensor:
        device = self._hidden_GRH.device
        places = (level.request_F, level.parent_row_F, level.row_F)
        g, parent, row = (to_device(rows.astype(np.int64), device) for rows in places)
        position_F, attention = self._prefix.position_F(level) - 1, self._prefix.attention(level)
        hidden_FH = self._run(torch.from_numpy(level.token_F), self._hidden_GRH[g, parent], position_F, attention)
        self._hidden_GRH[g, row] = hidden_FH
        return self._head.logits(hidden_FH)

    def _run(self, tokens: Tensor, features: Tensor, positions: Tensor, attention: AttentionMetadata) -> Tensor:
        if self.graphs is not None:
            return self.graphs(attention, tokens, features, positions)[0]
        device = self._head.device
        plan = self._head.plan(attention, self._page_size)
        tokens, features, positions = (to_device(given, device) for given in (tokens, features, positions))
        return self._head.forward(tokens, features, positions, plan, self._kv)


def head_graphs(head: FeatureHead, kv: KVPool, config: EngineConfig, *, is_captured: bool = True) -> Graphs:
    """A head's forward pass, (tokens_M, features_MH, positions_M) -> (hidden_MH,), for fed rows and levels alike."""

    def run(plan: AttentionPlan, tokens_M: Tensor, features_MH: Tensor, positions_M: Tensor) -> tuple[Tensor]:
        return (head.forward(tokens_M, features_MH, positions_M, plan, kv),)

    one = torch.zeros(1, dtype=torch.int32, device=head.device)
    return Graphs(
        run,
        partial(head.plan, page_size=config.page_size),
        (one, torch.zeros(1, head.width, dtype=head.dtype, device=head.device), one),
        buckets=sizes(config.max_num_seqs, config.tree_rows),
        table_width=config.pages_for(config.max_model_len),
        is_captured=is_captured,
    )


def head_tree_graphs(head: FeatureHead, kv: KVPool, config: EngineConfig, *, is_captured: bool = True) -> TreeGraphs:
    """Whole trees of a head; its kernels' plans stay in place."""

    def run(plan: AttentionPlan, tokens_N: Tensor, features_NH: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        hidden_NH = head.forward(tokens_N, features_NH, positions_N - 1, plan, kv)
        return hidden_NH, head.logits(hidden_NH)

    return TreeGraphs(
        run,
        partial(head.plan, page_size=config.page_size),
        torch.zeros(1, head.width, dtype=head.dtype, device=head.device),
        head.vocab,
        head.kernels,
        config,
        is_captured=is_captured,
    )


class DraftModelProposer:
    """A small language model of its own; it needs nothing of the target but the tokens."""

    def __init__(
        self,
        model: BaseDecoder,
        kv: KVPool,
        page_size: int,
        graphs: Graphs | None = None,
        tree_graphs: TreeGraphs | None = None,
    ) -> None:
        self.graphs, self.tree_graphs = graphs, tree_graphs
        self.vocab = DraftVocabulary(target_size=model.spec.vocab_size, kernels=model.kernels)
        self.width = 0  # it is fed no features
        self._model, self._kv, self._page_size = model, kv, page_size
        self._prefix: _Prefix

    def extend(self, request: DraftRequest) -> Tensor:
        slot_M = fed_slots(request)
        self._prefix = _Prefix(request)
        hidden_MD = self._run(request.token_M, slot_M, _fed_attention(request, slot_M))
        root_GD = hidden_MD[to_device(self._prefix.last_row_G, hidden_MD.device)]
        if self.tree_graphs is not None:
            self.tree_graphs.start = Start(self._prefix.base_G, self._prefix.page_table_GP, root_GD[:, :0])
        return self._model.full_logits(root_GD)

    def expand(self, level: Frontier) -> Tensor:
        position_F = self._prefix.position_F(level)
        tokens_F = torch.from_numpy(level.token_F)
        return self._model.full_logits(self._run(tokens_F, position_F, self._prefix.attention(level)))

    def _run(self, tokens: Tensor, positions: Tensor, attention: AttentionMetadata) -> Tensor:
        if self.graphs is not None:
            return self.graphs(attention, tokens, positions)[0]
        device = self._model.device
        plan = self._model.plan(attention, self._page_size)
        return self._model.forward(to_device(tokens, device), to_device(positions, device), plan, self._kv).final_ND


def decoder_tree_graphs(
    model: BaseDecoder, kv: KVPool, config: EngineConfig, *, is_captured: bool = True
) -> TreeGraphs:
    """Whole trees of a draft model. A node hands nothing to its children: features have no width."""

    def run(plan: AttentionPlan, tokens_N: Tensor, features_N0: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        return features_N0, model.full_logits(model.forward(tokens_N, positions_N, plan, kv).final_ND)

    return TreeGraphs(
        run,
        partial(model.plan, page_size=config.page_size),
        torch.zeros(1, 0, device=model.device),
        DraftVocabulary(target_size=model.spec.vocab_size, kernels=model.kernels),
        model.kernels,
        config,
        is_captured=is_captured,
    )
