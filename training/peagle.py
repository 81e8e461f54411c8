"""The P-EAGLE head: an EAGLE-3 head that drafts every depth in one pass, and its checkpoint (speculators' layout).

Row i of N - 1 reads token i + 1 and the target's features at i, with rotary position i, and predicts token i + 2, as
EAGLE-3's first step. Behind an anchor at position p, which row p - 1 has read, stand rows of the mask token with a
learned feature, `mask_hidden`: row m has rotary position p + m and predicts token p + 2 + m. It sees rows up to p - 1,
and the rows of its own block up to itself.

The head may start as an EAGLE-3 head of the same shape, whose first step it has.

Letters: B rows, N tokens of a row, T = N - 1, A anchors of a row, M mask rows of an anchor, Q all of them, H hidden.
Source: P-EAGLE (AWS), and vllm-project/speculators.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from drafter.learning.network import Drafted
from training.batches import Batch, feature_layers, send
from training.dspark import MASK_TOKEN_ID, sample_anchors
from training.eagle3 import TrainableEagle3Head


class TrainablePEagleHead(TrainableEagle3Head):
    """One layer, EAGLE-3's."""

    num_depths = first_depths = 5
    mask_embed_H: Tensor

    def __init__(self, config: LlamaConfig, draft_ids: Tensor):
        """See `TrainableHead`."""
        super().__init__(config, draft_ids)
        self.mask_hidden = nn.Parameter(0.1 * torch.randn(1, 1, self.fc.in_features))
        self.register_buffer("mask_embed_H", torch.zeros(config.hidden_size), persistent=False)

    @classmethod
    def of_target(cls, target: LlamaForCausalLM, draft_ids: Tensor, intermediate_size: int | None) -> Self:
        """See `TrainableEagle3Head`."""
        head = super().of_target(target, draft_ids, intermediate_size)
        head.mask_embed_H.copy_(target.model.embed_tokens.weight[MASK_TOKEN_ID])
        return head

    def draft(self, batch: Batch, num_depths: int, generator: torch.Generator) -> Iterator[Drafted]:
        """Draft the next token everywhere, and those behind it from sampled anchors, as long as the answer lasts."""
        device, last = self.fc.weight.device, batch.tokens_BN.shape[1] - 1
        anchors_BA, is_drawn_BA = sample_anchors(batch.is_answer_BN, generator)
        row_B1 = torch.arange(len(anchors_BA))[:, None]
        first = max(int(batch.is_answer_BN.any(0).nonzero()[0]) - 1, 0)
        next_BTH, hidden_BAMH = self.hidden(batch, anchors_BA, num_depths - 1, first)
        is_answer_BT = batch.is_answer_BN[:, 1 + first :]
        for depth in range(num_depths):
            if depth == 0:
                chosen, index_BA = is_answer_BT.nonzero(as_tuple=True), batch.index_BN[:, 1 + first :]
                hidden_AH, index_A = next_BTH[send(chosen[0], device), send(chosen[1], device)], index_BA[is_answer_BT]
            else:
                position_BA = (anchors_BA + depth).clamp(max=last)
                is_learned = is_drawn_BA & (anchors_BA + depth <= last) & batch.is_answer_BN[row_B1, position_BA]
                row, anchor = (send(index, device) for index in is_learned.nonzero(as_tuple=True))
                hidden_AH, index_A = (
                    hidden_BAMH[row, anchor, depth - 1],
                    batch.index_BN[row_B1, position_BA][is_learned],
                )
            yield Drafted(self.lm_head(self.norm(hidden_AH)), send(index_A, device))

    def hidden(self, batch: Batch, anchors_BA: Tensor, num_masks: int, first: int) -> tuple[Tensor, Tensor]:
        """Return the pre-norm outputs of the tokens' rows from `first` on, and of the mask rows [B, A, M, H]."""
        device, layer, num_rows = self.fc.weight.device, self.midlayer, batch.tokens_BN.shape[1] - 1
        features_BTH, mask_11H = self.fc(batch.features_BNF[:, :-1]), self.fc(self.mask_hidden)
        row_T = torch.arange(num_rows, device=device)
        x = torch.cat([layer.input_layernorm(batch.embeds_BNH[:, 1:]), layer.hidden_norm(features_BTH)], -1)
        mask_x = torch.cat(
            [layer.input_layernorm(self.mask_embed_H).expand_as(mask_11H), layer.hidden_norm(mask_11H)], -1
        )
        anchors_BA = send(anchors_BA, device)
        positions_BQ = (anchors_BA[..., None] + torch.arange(num_masks, device=device)).flatten(1)
        tokens, queries = layer.key_value_query(x, row_T)
        masks, mask_queries = layer.key_value_query(mask_x, positions_BQ[:, None])
        keys = torch.cat([tokens.keys, masks.keys], 2)
        values = torch.cat([tokens.values, masks.values.expand_as(masks.keys)], 2).to(keys.dtype)
        owner_Q = torch.arange(anchors_BA.shape[1], device=device).repeat_interleave(num_masks)
        is_before_BQT = row_T < anchors_BA[:, owner_Q, None]
        is_own_BQQ = (owner_Q[:, None] == owner_Q) & (positions_BQ[:, None] <= positions_BQ[..., None])
        sees_BQK = torch.cat([is_before_BQT, is_own_BQQ], 2)
        mixed = F.scaled_dot_product_attention(mask_queries, keys, values, sees_BQK[:, None])
        hidden_BQH = layer.close(mask_11H.expand(*positions_BQ.shape, -1), mixed)
        sees_TT = (row_T <= row_T[:, None])[first:]
        mixed = F.scaled_dot_product_attention(
            queries[:, :, first:], keys[:, :, :num_rows], values[:, :, :num_rows], sees_TT
        )
        next_BTH = layer.close(features_BTH[:, first:], mixed)
        return next_BTH, hidden_BQH.unflatten(1, (-1, num_masks))

    def to_json(self) -> dict:
        """Return the fields of the block, and those of the layer inside."""
        layer = super().to_json()
        proposal = {"proposal_type": "greedy", "speculative_tokens": self.num_depths}
        return {
            "architectures": ["PEagleDraftModel"],
            "speculators_model_type": "peagle",
            "draft_vocab_size": layer.pop("draft_vocab_size"),
            "eagle_aux_hidden_state_layer_ids": list(feature_layers(self.config.num_hidden_layers)),
            "mask_token_id": MASK_TOKEN_ID,
            "norm_before_residual": False,
            "num_depths": self.num_depths,
            "speculators_config": {"algorithm": "peagle", "proposal_methods": [proposal]},
            "torch_dtype": "bfloat16",
            "transformer_layer_config": layer,
        }
