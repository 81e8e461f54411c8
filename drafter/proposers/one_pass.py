"""Heads that draft every depth in one pass: rows of a block stand behind the fed rows, and predict one depth each.

    extend   runs fed rows and blocks together, and keeps what the pass says of every depth
    expand   looks it up: no level of a tree runs a layer

A block's rows lie behind the root, in the request's last page and in scratch pages behind the pool's own. Their keys
and values are dropped: the next step's rows overwrite them.
Legend: B requests of the message, G of them growing, M fed rows, S rows of a block, N rows of a pass, D depths,
F nodes, H hidden width, W a vocabulary shard.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafter.proposers.base import HeadProposer, fed_attention, fed_slots
from drafter.proposers.feature_head import DraftHead
from drafter.tree.block_growth import CANDIDATES, BlockGrowth
from drafter.tree.frontier import Frontier, TreeRoots
from drafter.tree.tree_graphs import BlockTreeGraphs
from drafter.workspace import scratch_pages
from workers.config import EngineConfig, TreeConfig
from workers.cuda_graphs import MAX_ROWS, Graphs
from workers.kv_cache import KVPool
from workers.transfer import all_to_device, to_device
from workers.types import AttentionMetadata, DraftRequest

CONTEXT = -1
"""The token of a fed row of which a head reads the feature alone."""


class Block(NamedTuple):
    """Holds what one pass says of every depth."""

    hidden_GDH: Tensor
    base_GDW: Tensor  # float32; what is the same below every parent


class OnePassHead(DraftHead):
    """One rank's shard of a head.

    depth: tokens that a pass drafts, D. num_behind: rows of a block, S. mask_token_id, feature_1H: what they read.
    is_context: of a fed row only keys and values are kept, so that a block begins with a row of the newest token.
    factors: W1 [target vocabulary, r] and W2 [this rank's columns, r] of what `children` adds for a token.
    is_bilinear: it adds nothing else.
    """

    depth: int
    num_behind: int
    mask_token_id: int
    feature_1H: Tensor
    is_context: bool = False
    factors: tuple[Tensor, Tensor] | None = None
    is_bilinear: bool = True

    @abstractmethod
    def block(self, hidden_GDH: Tensor) -> Block:
        """Return what the pass says, from its outputs at the rows that predict."""

    def children(self, block: Block, request_F: Tensor, depth: int | Tensor, token_F: Tensor) -> Tensor:
        """Return float32 [F, draft_vocab] of the children of nodes `depth` (or [F]) below their roots. A collective."""
        return block.base_GDW[request_F, depth]

    def write(self, features_MH: Tensor, position_M: Tensor, slot_M: Tensor, kv: KVPool) -> None:
        """Write the keys and values of context rows alone. slot_M: int64, physical."""
        raise NotImplementedError


def causal(metadata: AttentionMetadata) -> AttentionMetadata:
    """Return the attention of blocks in which no row sees later ones."""
    place_N = (metadata.slot_N + 1 - metadata.visible_N).astype(np.uint64)  # 1 for the first row, 0 for fed rows
    mask_N = (np.uint64(1) << place_N) - np.uint64(1)
    return replace(metadata, ancestors_N=mask_N.view(np.int64))


class ScratchPages:
    """Pages behind the pool's own ones, where blocks lie that reach beyond their requests' pages."""

    def __init__(self, first: int, page_size: int, num_rows: int) -> None:
        self._first, self._page_size = first, page_size
        self.per_request = scratch_pages(num_rows, page_size)

    def behind(self, root_slot_B: np.ndarray, page_table_BP: np.ndarray) -> np.ndarray:
        """Return page tables [B, P'] with scratch pages behind the page of each root's slot."""
        num_requests, width = page_table_BP.shape
        table = np.zeros((num_requests, width + self.per_request), dtype=np.int32)
        table[:, :width] = page_table_BP
        column_BS = root_slot_B[:, None] // self._page_size + 1 + np.arange(self.per_request)
        scratch = self._first + np.arange(num_requests * self.per_request, dtype=np.int32)
        np.put_along_axis(table, column_BS, scratch.reshape(column_BS.shape), axis=1)
        return table


class OnePassProposer(HeadProposer[OnePassHead]):
    """Drafts with such a head."""

    def __init__(
        self,
        head: OnePassHead,
        kv: KVPool,
        page_size: int,
        scratch: ScratchPages,
        graphs: Graphs | None = None,
        tree_graphs: BlockTreeGraphs | BlockGrowth | None = None,
    ) -> None:
        super().__init__(head, kv, page_size, graphs)
        self.tree_graphs: BlockTreeGraphs | BlockGrowth | None = tree_graphs
        self._scratch = scratch
        self._read_feature()
        self._block: Block

    def take(self, head: OnePassHead) -> None:
        """See `HeadProposer`."""
        super().take(head)
        self._read_feature()

    def _read_feature(self) -> None:
        feature_1H = self._head.feature_1H
        self._feature_1H = {"cpu": feature_1H.cpu(), feature_1H.device.type: feature_1H}  # where the link ends

    def extend(self, request: DraftRequest) -> Tensor | Callable[[], Tensor]:
        """See `Proposer`."""
        features_MH, slot_M = request.features_MH, fed_slots(request)
        assert features_MH is not None, "such a head is fed features"
        offsets, grows_B = request.offsets.numpy(), request.num_nodes_B.numpy() > 0
        anchor_G = request.token_M.numpy()[offsets[1:][grows_B] - 1]
        # A graph has context rows run through the layers, too, which is cheaper than to launch what writes them alone.
        is_written = self._head.is_context and (self.graphs is None or not len(anchor_G) or len(slot_M) > MAX_ROWS)
        if is_written:
            self._write(request, features_MH, slot_M)
        if len(anchor_G) or not is_written:
            ends_B, hidden_NH = self._pass(request, features_MH, anchor_G, 0 if is_written else np.diff(offsets))
        if not len(anchor_G):  # zero rows would make compiled kernels compile once more
            return torch.zeros(0, self.vocab.size, device=self._head.device)
        row_GD = ends_B[grows_B, None] - self._head.depth + np.arange(self._head.depth)
        sent = [row_GD, np.arange(len(anchor_G)), anchor_G.astype(np.int64)]
        row, every_G, parent_G = all_to_device(sent, self._head.device)
        self._block = self._head.block(hidden_NH[row])
        roots = partial(self._head.children, self._block, every_G, 0, parent_G)
        if self.tree_graphs is None:
            return roots()
        self.tree_graphs.set_block(TreeRoots.of(request), *self._block)
        return roots

    def expand(self, frontier: Frontier) -> Tensor:
        """See `Proposer`; no layer runs."""
        rows = [frontier.request_F.astype(np.int64), frontier.token_F.astype(np.int64)]
        request_F, token_F = all_to_device(rows, self._head.device)
        return self._head.children(self._block, request_F, frontier.depth, token_F)

    def _write(self, request: DraftRequest, features_MH: Tensor, slot_M: np.ndarray) -> None:
        fed = fed_attention(request, slot_M)
        physical_M = fed.physical(fed.owner_N, slot_M, self._page_size)
        host = (features_MH, torch.from_numpy(slot_M - np.int32(1)), torch.from_numpy(physical_M))
        features_MH, position_M, slots_M = (to_device(given, self._head.device) for given in host)
        self._head.write(features_MH, position_M, slots_M, self._kv)

    def _pass(
        self, request: DraftRequest, features_MH: Tensor, anchor_G: np.ndarray, num_fed_B: np.ndarray | int
    ) -> tuple[np.ndarray, Tensor]:
        """Run these fed rows and the blocks. Return the row behind each request's last, and the outputs [N, H]."""
        head, offsets = self._head, request.offsets.numpy()
        num_behind_B = (request.num_nodes_B.numpy() > 0) * head.num_behind
        base_B = request.start_B.numpy() + np.diff(offsets)
        num_rows_B = num_fed_B + num_behind_B
        ends_B = num_rows_B.cumsum()
        owner_N = np.arange(len(base_B)).repeat(num_rows_B)
        place_N = np.arange(len(owner_N)) - (ends_B - num_behind_B)[owner_N]  # from the first row of the block
        slot_N, is_behind_N = (base_B[owner_N] + place_N).astype(np.int32), place_N >= 0
        token_N = np.where(is_behind_N, np.int32(head.mask_token_id), np.int32(CONTEXT))
        if head.is_context:
            token_N[place_N == 0] = anchor_G
        else:
            token_N[~is_behind_N] = request.token_M.numpy()
        source_N = np.full(len(slot_N), offsets[-1], dtype=np.int64)
        source_N[~is_behind_N] = np.arange(np.count_nonzero(~is_behind_N))
        features_LH = torch.cat((features_MH, self._feature_1H[features_MH.device.type].to(features_MH.dtype)))
        attention = AttentionMetadata(
            query_offsets=np.insert(ends_B, 0, 0).astype(np.int32),
            page_table_BP=self._scratch.behind(base_B - 1, request.page_table_BP.numpy()),
            base_B=base_B,
            slot_N=slot_N,
            visible_N=np.where(is_behind_N, base_B[owner_N], slot_N + 1).astype(np.int32),
            ancestors_N=np.where(is_behind_N, np.uint64((1 << head.num_behind) - 1), np.uint64(0)).view(np.int64),
        )
        features_NH = features_LH[to_device(source_N, features_LH.device)]
        position_N = torch.from_numpy(slot_N - np.int32(1))
        return ends_B, self._run(torch.from_numpy(token_N), features_NH, position_N, attention)


def block_growth(
    head: OnePassHead, tree: TreeConfig, *, has_leaf_siblings: bool, num_candidates: int = CANDIDATES
) -> BlockGrowth:
    """Return the growth of whole trees on the host from a head's pass; its bias must be bilinear."""
    return BlockGrowth(
        _children_of(head),
        lambda: head.factors,
        head.vocab,
        tree,
        has_leaf_siblings=has_leaf_siblings,
        num_candidates=num_candidates,
    )


def _children_of(head: OnePassHead) -> Callable[[Tensor, Tensor, Tensor, Any, Tensor], Tensor]:
    def children(
        hidden_BDH: Tensor, base_BDV: Tensor, request_F: Tensor, depth: int | Tensor, token_F: Tensor
    ) -> Tensor:
        return head.children(Block(hidden_BDH, base_BDV), request_F, depth, token_F)

    return children


def block_tree_graphs(
    head: OnePassHead, config: EngineConfig, *, has_leaf_siblings: bool, is_captured: bool = True
) -> BlockTreeGraphs:
    """Capture the growth of whole trees from a head's pass."""
    hidden_1H = torch.zeros(1, head.width, dtype=head.dtype, device=head.device)
    return BlockTreeGraphs(
        _children_of(head),
        hidden_1H,
        head.vocab,
        head.kernels,
        config,
        head.depth,
        has_leaf_siblings=has_leaf_siblings,
        is_captured=is_captured,
    )
