"""Block heads, DSpark and DFlash: one pass drafts every depth, and a tree grows without another.

Legend: M packed rows, G growing requests, S slots of a block, D depths, F nodes, H hidden width, W a vocabulary shard.

    context row i  g_i = feature of token i, from the verifier (`workers.models.block_format`)
    slot 0         h = embed(anchor), which has no feature yet;  slots 1 .. S - 1:  h = embed(mask token)
    layer          x = input_layernorm(h); keys and values of the rows [g; x], queries of x; h += attention; h += mlp
    base_d         lm_head(norm(h)) of the slot that predicts depth d
    logits_d       base_d + W2 e, where e = W1[the token before], for gated heads times sigmoid(gate([h; e]))

So the logits of a child are known for every token before it, whether that token is in a tree or not. A head without
W1 and W2 has one distribution per depth, that of its most likely path.
Sources: DFlash (z-lab), DSpark (arXiv 2607.05147) and vLLM's code. The alignment is that of other heads: the row of
token j, which brings the feature of j - 1, is entry j with rotary position j - 1. Only context entries are kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.proposers.feature_head import load_embedding, load_target_ids, load_vocab_head
from drafter.proposers.one_pass import CONTEXT, Block, OnePassHead, causal
from workers.kernels.linear import Linear
from workers.kernels.select import AttentionPlan
from workers.kv_cache import KVPool
from workers.models.block_format import canonical_name
from workers.models.checkpoint import Weights
from workers.models.decoder import DecoderLayer
from workers.models.fusion import BLOCK_TENSORS
from workers.models.layers import RankWeights, VocabHead, check_shape, gather_vocab, shard_vocab
from workers.models.specs import BlockSpec
from workers.types import AttentionMetadata


class MarkovHead(NamedTuple):
    """The bias that a token puts on the logits of its child; this rank's columns of it."""

    w1_Vr: Tensor  # by target ids, on every rank
    w2_Wr: Tensor
    w2: VocabHead  # the same, as it multiplies
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
        start, end, width = shard_vocab(spec.draft_vocab_size, weights.tp)
        w2_Wr = weights.get_range(f"{prefix}markov_w2.weight", 0, start, end)
        return MarkovHead(weights.get(f"{prefix}markov_w1.weight"), w2_Wr, VocabHead(w2_Wr, start, width), gate)

    def bias(self, token_F: Tensor, block: Block, request_F: Tensor, depth: int | Tensor) -> Tensor:
        """Return the biases float32 [F, W] of the children of these tokens."""
        e_Fr = F.embedding(token_F, self.w1_Vr)
        if self.gate is not None:
            hidden_FH = block.hidden_GDH[request_F, depth]
            e_Fr = torch.sigmoid(self.gate(torch.cat((hidden_FH, e_Fr), dim=-1))) * e_Fr
        return self.w2(e_Fr)


class BlockHead(OnePassHead):
    """One rank's shard of a head."""

    canonical_name = staticmethod(canonical_name)
    is_context = True

    def __init__(self, spec: BlockSpec, weights: RankWeights, target: Weights) -> None:
        layers, target_ids = spec.layers, None
        if spec.draft_vocab_size < layers.vocab_size or weights.has("d2t"):
            target_ids = load_target_ids(weights, spec.draft_vocab_size, layers.vocab_size)
        super().__init__(weights, layers, load_embedding(weights, target, layers), target_ids)
        self.spec, self.mask_token_id = spec, spec.mask_token_id
        self.depth, self.num_behind = spec.max_depth, spec.block_size
        self._layers = tuple(
            DecoderLayer(weights, f"layers.{index}.", layers, window=window)
            for index, window in enumerate(layers.windows)
        )
        self._final_norm_H = weights.get("norm.weight")
        self._head = head = load_vocab_head(weights, target, layers, spec.draft_vocab_size, target_ids)
        self._markov = MarkovHead.load(weights, spec)
        if self._markov is not None:
            self.factors, self.is_bilinear = (self._markov.w1_Vr, self._markov.w2_Wr), self._markov.gate is None
        column_of_V = self.vocab.columns.column_of_V
        mask = spec.mask_token_id if column_of_V is None else int(column_of_V[spec.mask_token_id])
        self.feature_1H = self._embedding_VH.new_zeros(1, layers.hidden_size)
        self._mask_column = mask - head.start if head.start <= mask < head.end else None  # never drafted

    def is_foreign(self, name: str) -> bool:
        """See `DraftHead`.

        The target-to-draft mask is redundant given d2t. Confidence is not read: survival is calibrated on what is
        accepted.
        """
        return name in (*BLOCK_TENSORS, "t2d", "confidence_head.proj.weight", "confidence_head.proj.bias")

    def plan(  # type: ignore[override]
        self, metadata: AttentionMetadata, page_size: int, into: Any = None
    ) -> dict[bool, AttentionPlan]:
        """Plan the attention of layers in which a slot sees all of its block, and of causal ones."""
        plans, windows = {}, self.spec.layers.windows
        for is_causal in dict.fromkeys(self.spec.is_causal):
            own = [window for window, other in zip(windows, self.spec.is_causal, strict=True) if other == is_causal]
            seen = causal(metadata) if is_causal else metadata
            plans[is_causal] = super().plan(seen, page_size, None if into is None else into[is_causal], windows=own)
        return plans

    @torch.inference_mode()
    def write(self, features_MH: Tensor, position_M: Tensor, slot_M: Tensor, kv: KVPool) -> None:
        """See `OnePassHead`."""
        rotation, context_MH = self._rope(position_M), features_MH.to(self.dtype)
        for index, layer in enumerate(self._layers):
            layer.attention.write(context_MH, rotation, slot_M, kv, index)

    @torch.inference_mode()
    def forward(
        self, tokens_M: Tensor, features_MH: Tensor, positions_M: Tensor, plan: dict[bool, AttentionPlan], kv: KVPool
    ) -> Tensor:
        """See `DraftHead`. A row of the token CONTEXT is a context row, whose output means nothing."""
        eps, context_MH = self.spec.layers.rms_norm_eps, features_MH.to(self.dtype)
        is_context_M1 = (tokens_M == CONTEXT)[:, None]
        x_MH, rotation = F.embedding(tokens_M.clamp(min=0), self._embedding_VH), self._rope(positions_M)
        for index, (layer, is_causal) in enumerate(zip(self._layers, self.spec.is_causal, strict=True)):
            assert layer.input_norm_D is not None
            rows_MH = torch.where(is_context_M1, context_MH, self.kernels.rms_norm(x_MH, layer.input_norm_D, eps))
            delta_MH = layer.attention(rows_MH, rotation, plan[is_causal], kv, index)
            x_MH, normed_MH = self.kernels.add_rms_norm(x_MH, delta_MH, layer.post_norm_D, eps)
            x_MH = x_MH + layer.mlp(normed_MH)
        return self.kernels.rms_norm(x_MH, self._final_norm_H, eps)

    @torch.inference_mode()
    def block(self, hidden_GDH: Tensor) -> Block:
        """See `OnePassHead`."""
        base_NW = self._head(hidden_GDH.flatten(0, 1))
        if self._mask_column is not None:
            base_NW[:, self._mask_column] = float("-inf")
        return Block(hidden_GDH, base_NW.unflatten(0, hidden_GDH.shape[:2]))

    @torch.inference_mode()
    def children(self, block: Block, request_F: Tensor, depth: int | Tensor, token_F: Tensor) -> Tensor:
        """See `OnePassHead`."""
        logits_FW = block.base_GDW[request_F, depth]
        if self._markov is not None:
            logits_FW = logits_FW + self._markov.bias(token_F, block, request_F, depth)
        return gather_vocab(logits_FW, self.tp, self.spec.draft_vocab_size)
