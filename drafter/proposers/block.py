"""Block heads, DSpark and DFlash: one pass drafts every depth, and a tree grows without another.

Legend: M fed rows, G growing requests, S slots of a block, D depths, F nodes, H hidden width, W a vocabulary shard.

    context row i  g_i = feature of token i, from the verifier (`workers.models.block_format`)
    slot 0         h = embed(anchor), which has no feature yet;  slots 1 .. S - 1:  h = embed(mask token)
    layer          x = input_layernorm(h); keys and values of the rows [g; x], queries of x; h += attention; h += mlp
    base_d         lm_head(norm(h)) of the slot that predicts depth d
    logits_d       base_d + W2 e, where e = W1[the token before], for gated heads times sigmoid(gate([h; e]))

So the logits of a child are known for every token before it, whether that token is in a tree or not. A head without
W1 and W2 has one distribution per depth, that of its most likely path.
Sources: DFlash (z-lab), DSpark (arXiv 2607.05147) and vLLM's code. The alignment is that of other heads: the row of
token j, which brings the feature of j - 1, is entry j with rotary position j - 1. Only context entries are kept: the
block's own lie behind them, and the next step's context overwrites those.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.proposers.base import fed_attention, fed_slots, root_rows
from drafter.proposers.feature_head import DraftHead, load_embedding, load_target_ids, load_vocab_head
from drafter.tree.frontier import Frontier, TreeRoots
from drafter.tree.tree_graphs import TreeGraphs
from drafter.workspace import scratch_pages
from workers.cuda_graphs import Graphs
from workers.kernels.linear import Linear
from workers.kernels.select import AttentionPlan
from workers.kv_cache import KVPool
from workers.models.block_format import canonical_name
from workers.models.checkpoint import Weights
from workers.models.decoder import DecoderLayer
from workers.models.fusion import BLOCK_TENSORS
from workers.models.layers import RankWeights, VocabHead, check_shape, gather_vocab
from workers.models.specs import BlockSpec
from workers.transfer import all_to_device, to_device
from workers.types import AttentionMetadata, DraftRequest


class Block(NamedTuple):
    """Holds what one pass says of every depth."""

    hidden_GDH: Tensor  # of the slots that predict; read by gated heads alone
    base_GDW: Tensor  # float32, this rank's columns


class MarkovHead(NamedTuple):
    """The bias that a token puts on the logits of its child; this rank's columns of it."""

    w1_Vr: Tensor  # by target ids, on every rank
    w2: VocabHead
    gate: Linear | None  # H + r -> r

    @staticmethod
    def load(weights: RankWeights, spec: BlockSpec) -> MarkovHead | None:
        """Load it; None if the head has none. Raises ValueError for a tensor that is missing or has another shape."""
        if not spec.markov_rank:
            return None
        prefix, shapes = "markov_head.", spec.matrix_shapes()
        for name in ("markov_w1", "markov_w2", *(["gate_proj"] if spec.is_gated else [])):
            check_shape(weights, f"{prefix}{name}.weight", shapes[f"{prefix}{name}.weight"], "markov_rank")
        gate = None
        if spec.is_gated:
            gate = Linear(weights.get(f"{prefix}gate_proj.weight"), weights.get(f"{prefix}gate_proj.bias"))
        w2 = VocabHead.load(weights, f"{prefix}markov_w2.weight", spec.draft_vocab_size, weights.tp)
        return MarkovHead(weights.get(f"{prefix}markov_w1.weight"), w2, gate)

    def bias(self, token_F: Tensor, hidden_FH: Tensor) -> Tensor:
        """Return the biases float32 [F, W] of the children of these tokens."""
        e_Fr = F.embedding(token_F, self.w1_Vr)
        if self.gate is not None:
            e_Fr = torch.sigmoid(self.gate(torch.cat((hidden_FH, e_Fr), dim=-1))) * e_Fr
        return self.w2(e_Fr)


class BlockHead(DraftHead):
    """One rank's shard of a head."""

    canonical_name = staticmethod(canonical_name)

    def __init__(self, spec: BlockSpec, weights: RankWeights, target: Weights) -> None:
        layers, target_ids = spec.layers, None
        if spec.draft_vocab_size < layers.vocab_size or weights.has("d2t"):
            target_ids = load_target_ids(weights, spec.draft_vocab_size, layers.vocab_size)
        super().__init__(weights, layers, load_embedding(weights, target, layers), target_ids)
        self.spec = spec
        self._layers = tuple(
            DecoderLayer(weights, f"layers.{index}.", layers, window=window)
            for index, window in enumerate(layers.windows)
        )
        self._final_norm_H = weights.get("norm.weight")
        self._head = head = load_vocab_head(weights, target, layers, spec.draft_vocab_size, target_ids)
        self._markov = MarkovHead.load(weights, spec)
        column_of_V = self.vocab.columns.column_of_V
        mask = spec.mask_token_id if column_of_V is None else int(column_of_V[spec.mask_token_id])
        self._mask_column = mask - head.start if head.start <= mask < head.end else None  # never drafted

    def is_foreign(self, name: str) -> bool:
        """See `DraftHead`.

        The target-to-draft mask is redundant given d2t. Confidence is not read: survival is calibrated on what is
        accepted.
        """
        return name in (*BLOCK_TENSORS, "t2d", "confidence_head.proj.weight", "confidence_head.proj.bias")

    @torch.inference_mode()
    def forward(
        self,
        anchor_G: Tensor,
        features_MH: Tensor,
        position_M: Tensor,
        slot_M: Tensor,
        blocks: AttentionMetadata,
        page_size: int,
        kv: KVPool,
    ) -> Block | None:
        """Write the context's keys and values and run one block per anchor; None without anchors.

        Args:
            anchor_G: int64 target ids of the newest tokens.
            features_MH: of the tokens before the fed ones.
            position_M: rotary positions of these features. slot_M: int64, their physical slots.
            blocks: the blocks' attention, see `block_attention`; an anchor's position is one below its slot.
        """
        eps, num_context, num_blocks = self.spec.layers.rms_norm_eps, len(features_MH), len(anchor_G)
        context_MH = features_MH.to(self.dtype)
        if not num_blocks:
            rotation = self._rope(position_M)
            for index, layer in enumerate(self._layers):
                layer.attention.write(context_MH, rotation, slot_M, kv, index)
            return None
        token_GS = anchor_G.new_full((num_blocks, self.spec.block_size), self.spec.mask_token_id)
        token_GS[:, 0] = anchor_G
        x_NH = F.embedding(token_GS.flatten(), self._embedding_VH)
        rotation = self._rope(torch.cat((position_M, to_device(blocks.slot_N - np.int32(1), self.device))))
        plans = self._plans(blocks, page_size)
        for index, (layer, is_causal) in enumerate(zip(self._layers, self.spec.is_causal, strict=True)):
            assert layer.input_norm_D is not None
            plan = plans[is_causal]
            rows_KH = torch.cat((context_MH, self.kernels.rms_norm(x_NH, layer.input_norm_D, eps)))
            q_KHd = layer.attention.write(rows_KH, rotation, torch.cat((slot_M, plan.write_slots_N)), kv, index)
            delta_NH = layer.attention.attend(q_KHd[num_context:], plan, kv, index)
            x_NH, normed_NH = self.kernels.add_rms_norm(x_NH, delta_NH, layer.post_norm_D, eps)
            x_NH = x_NH + layer.mlp(normed_NH)
        hidden_GSH = self.kernels.rms_norm(x_NH, self._final_norm_H, eps).view(*token_GS.shape, -1)
        hidden_GDH = hidden_GSH[:, self.spec.block_size - self.spec.max_depth :]
        base_NW = self._head(hidden_GDH.flatten(0, 1))
        if self._mask_column is not None:
            base_NW[:, self._mask_column] = float("-inf")
        return Block(hidden_GDH, base_NW.view(num_blocks, self.spec.max_depth, -1))

    def _plans(self, blocks: AttentionMetadata, page_size: int) -> dict[bool, AttentionPlan]:
        """Return the attention of layers in which a slot sees all of its block, and of causal ones."""
        plans, windows = {}, self.spec.layers.windows
        for is_causal in dict.fromkeys(self.spec.is_causal):
            metadata = causal(blocks, self.spec.block_size) if is_causal else blocks
            own = [window for window, other in zip(windows, self.spec.is_causal, strict=True) if other == is_causal]
            plans[is_causal] = self.plan(metadata, page_size, windows=own)
        return plans

    @torch.inference_mode()
    def logits(self, block: Block, request_F: Tensor, depth: int, token_F: Tensor) -> Tensor:
        """Return float32 [F, draft_vocab] of the children of nodes `depth` below their roots. A collective."""
        logits_FW = block.base_GDW[request_F, depth]
        if self._markov is not None:
            logits_FW = logits_FW + self._markov.bias(token_F, block.hidden_GDH[request_F, depth])
        return gather_vocab(logits_FW, self.tp, self.spec.draft_vocab_size)


def block_attention(base_G: np.ndarray, page_table_GP: np.ndarray, block_size: int) -> AttentionMetadata:
    """Return the attention of blocks whose first slots are `base_G`: each row sees the context and all of its block."""
    num_blocks = len(base_G)
    base_N = base_G.repeat(block_size)
    return AttentionMetadata(
        query_offsets=np.arange(0, (num_blocks + 1) * block_size, block_size, dtype=np.int32),
        page_table_BP=page_table_GP,
        base_B=base_G,
        slot_N=base_N + np.tile(np.arange(block_size, dtype=np.int32), num_blocks),
        visible_N=base_N,
        ancestors_N=np.full(len(base_N), (1 << block_size) - 1, dtype=np.uint64).view(np.int64),
    )


def causal(blocks: AttentionMetadata, block_size: int) -> AttentionMetadata:
    """Return the attention of blocks in which no row sees later ones."""
    mask_S = (np.uint64(2) << np.arange(block_size, dtype=np.uint64)) - np.uint64(1)
    return AttentionMetadata(
        query_offsets=blocks.query_offsets,
        page_table_BP=blocks.page_table_BP,
        base_B=blocks.base_B,
        slot_N=blocks.slot_N,
        visible_N=blocks.visible_N,
        ancestors_N=np.tile(mask_S, blocks.num_requests).view(np.int64),
    )


class ScratchPages:
    """Pages behind the pool's own ones, where blocks lie that reach beyond their requests' pages."""

    def __init__(self, first: int, page_size: int, block_size: int) -> None:
        self._first, self._page_size = first, page_size
        self.per_request = scratch_pages(block_size, page_size)

    def behind(self, root_slot_G: np.ndarray, page_table_GP: np.ndarray) -> np.ndarray:
        """Return page tables [G, P'] with scratch pages behind the page of each root's slot."""
        num_requests, width = page_table_GP.shape
        table = np.zeros((num_requests, width + self.per_request), dtype=np.int32)
        table[:, :width] = page_table_GP
        column_GS = root_slot_G[:, None] // self._page_size + 1 + np.arange(self.per_request)
        scratch = self._first + np.arange(num_requests * self.per_request, dtype=np.int32)
        np.put_along_axis(table, column_GS, scratch.reshape(column_GS.shape), axis=1)
        return table


class BlockProposer:
    """Drafts with a block head: `extend` runs the one pass, `expand` looks up what it says."""

    graphs: Graphs | None = None
    tree_graphs: TreeGraphs | None = None

    def __init__(self, head: BlockHead, kv: KVPool, page_size: int, scratch: ScratchPages) -> None:
        self.vocab = head.vocab
        self.width = head.width  # of the features
        self._head, self._kv, self._page_size, self._scratch = head, kv, page_size, scratch
        self._block: Block | None = None  # None: no request grows a tree

    def extend(self, request: DraftRequest) -> Tensor:
        """See `Proposer`."""
        assert request.features_MH is not None, "a block head is fed features"
        slot_M, roots = fed_slots(request), TreeRoots.of(request)
        fed = fed_attention(request, slot_M)
        table_GP = self._scratch.behind(roots.base_G, roots.page_table_GP)
        host = (
            request.token_M[root_rows(request)].to(torch.int64),
            request.features_MH,
            torch.from_numpy(slot_M - np.int32(1)),
            torch.from_numpy(fed.physical(fed.owner_N, slot_M, self._page_size)),
        )
        anchor_G, features_MH, position_M, physical_M = (to_device(given, self._head.device) for given in host)
        blocks = block_attention(roots.base_G + np.int32(1), table_GP, self._head.spec.block_size)
        self._block = self._head.forward(
            anchor_G, features_MH, position_M, physical_M, blocks, self._page_size, self._kv
        )
        if self._block is None:
            return torch.zeros(0, self.vocab.size, device=anchor_G.device)
        every_G = torch.arange(len(anchor_G), device=anchor_G.device)
        return self._head.logits(self._block, every_G, 0, anchor_G)

    def expand(self, frontier: Frontier) -> Tensor:
        """See `Proposer`; no layer runs."""
        rows = [frontier.request_F.astype(np.int64), frontier.token_F.astype(np.int64)]
        request_F, token_F = all_to_device(rows, self._head.device)
        assert self._block is not None
        return self._head.logits(self._block, request_F, frontier.depth, token_F)
