"""The DSpark head: its network, its blocks behind sampled anchors, and its checkpoint (the layout of deepseek-ai).

A block stands behind an anchor at position p and has S slots, the anchor's and S - 1 of the mask token. Slot j has
rotary position p + j and predicts token p + 1 + j, with a bias that the token before it, in training the true one,
puts on the logits. Its layers see the features of the tokens before the anchor, and all slots of their own block.

The head reads the target's embeddings and its rows of the draft vocabulary, which are not in its checkpoint.

Letters: B rows, N tokens of a row, A anchors of a row, S slots, K keys, H hidden, D draft vocabulary, r rank.
Source: DSpark (arXiv 2607.05147).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from drafter.learning.network import MLP, Drafted, RMSNorm, rotate
from training.batches import Batch, feature_layers, send
from training.draft_head import TrainableHead, copy_layer

BLOCK_SIZE = 7
MARKOV_RANK = 32
"""Of the bias that a token puts on the logits behind it."""
NUM_ANCHORS = 96
"""At most so many of each row, drawn again each time."""
MASK_TOKEN_ID = 3
"""A token that no answer contains: padding of the bundled target, a marker of repositories for SmolLM2."""


class BlockAttention(nn.Module):
    """Attention of the slots to features and slots."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.dim, self.base = dim, config.rope_parameters["rope_theta"]
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, hidden, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(dim, config.rms_norm_eps) for _ in range(2))

    def forward(self, slots_BQH: Tensor, rows_BKH: Tensor, positions_BK: Tensor, sees_BQK: Tensor) -> Tensor:
        """Attend from the slots, which are the last of the rows."""
        keys, values = (proj(rows_BKH).unflatten(-1, (-1, self.dim)) for proj in (self.k_proj, self.v_proj))
        queries = self.q_norm(self.q_proj(slots_BQH).unflatten(-1, (-1, self.dim)))
        positions_B1K = positions_BK[:, None]
        keys = rotate(self.k_norm(keys).transpose(1, 2), positions_B1K, base=self.base)
        queries = rotate(queries.transpose(1, 2), positions_B1K[..., -slots_BQH.shape[1] :], base=self.base)
        keys, values = (x.repeat_interleave(queries.shape[1] // x.shape[1], 1) for x in (keys, values.transpose(1, 2)))
        mixed = F.scaled_dot_product_attention(queries, keys, values.to(keys.dtype), sees_BQK[:, None])
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class BlockLayer(nn.Module):
    """A decoder layer of the slots; the features enter its attention as they are."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.self_attn, self.mlp = BlockAttention(config), MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, h_BQH: Tensor, context_BNH: Tensor, positions_BK: Tensor, sees_BQK: Tensor) -> Tensor:
        """Return the slots' next hidden states."""
        x = self.input_layernorm(h_BQH)
        h_BQH = h_BQH + self.self_attn(x, torch.cat([context_BNH, x], 1), positions_BK, sees_BQK)
        return h_BQH + self.mlp(self.post_attention_layernorm(h_BQH))


class MarkovHead(nn.Module):
    """The bias that a token puts on the logits of its child."""

    def __init__(self, vocab_size: int, draft_vocab_size: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, MARKOV_RANK)
        self.markov_w2 = nn.Linear(MARKOV_RANK, draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.1)
        nn.init.zeros_(self.markov_w2.weight)


class TrainableDSparkHead(TrainableHead):
    """One layer, without a confidence head."""

    num_depths = first_depths = BLOCK_SIZE
    mask_embed_H: Tensor
    lm_rows_DH: Tensor

    def __init__(self, config: LlamaConfig, draft_ids: Tensor):
        """See `TrainableHead`."""
        super().__init__(config, draft_ids)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(feature_layers(config.num_hidden_layers)) * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = (RMSNorm(hidden, eps) for _ in range(2))
        self.layers = nn.ModuleList([BlockLayer(config)])
        self.markov_head = MarkovHead(config.vocab_size, len(draft_ids))
        self.register_buffer("mask_embed_H", torch.zeros(hidden), persistent=False)
        self.register_buffer("lm_rows_DH", torch.zeros(len(draft_ids), hidden), persistent=False)

    @classmethod
    def of_target(cls, target: LlamaForCausalLM, draft_ids: Tensor, intermediate_size: int | None) -> Self:
        """Initialise a head from the target's last layer; `fc` selects the highest feature."""
        config = copy.deepcopy(target.config)
        config.intermediate_size = intermediate_size or config.intermediate_size
        head, hidden, last = cls(config, draft_ids).to(draft_ids.device), config.hidden_size, target.model.layers[-1]
        copy_layer(head.layers[0], last)
        with torch.no_grad():
            head.fc.weight.zero_()[:, -hidden:] += torch.eye(hidden, device=draft_ids.device)
            head.hidden_norm.weight.copy_(last.input_layernorm.weight)
            head.norm.weight.copy_(target.model.norm.weight)
            head.mask_embed_H.copy_(target.model.embed_tokens.weight[MASK_TOKEN_ID])
            head.lm_rows_DH.copy_(target.lm_head.weight[draft_ids])
        return head

    def draft(self, batch: Batch, num_depths: int, generator: torch.Generator) -> Iterator[Drafted]:
        """Draft a block behind each of the sampled anchors; a depth is learned while it lies within the answer."""
        device, last = self.fc.weight.device, batch.tokens_BN.shape[1] - 1
        anchors_BA, is_drawn_BA = sample_anchors(batch.is_answer_BN, generator)
        hidden_BASH = self.block_hidden(batch, anchors_BA)
        row_B1 = torch.arange(len(anchors_BA))[:, None]
        for depth in range(num_depths):
            position_BA = (anchors_BA + depth).clamp(max=last)
            is_learned = is_drawn_BA & (anchors_BA + depth <= last) & batch.is_answer_BN[row_B1, position_BA]
            chosen, parents = is_learned.nonzero(as_tuple=True), batch.tokens_BN[row_B1, position_BA][is_learned].long()
            row, anchor = (send(index, device) for index in chosen)
            bias_AD = self.markov_head.markov_w2(self.markov_head.markov_w1(send(parents, device)))
            logits_AD = F.linear(hidden_BASH[row, anchor, depth], self.lm_rows_DH) + bias_AD
            yield Drafted(logits_AD, send(batch.index_BN[row_B1, position_BA][is_learned], device))

    def block_hidden(self, batch: Batch, anchors_BA: Tensor) -> Tensor:
        """Run one block per anchor: the normed output [B, A, S, H] of its slots."""
        device, num_tokens = self.fc.weight.device, batch.tokens_BN.shape[1]
        slot_S, token_N = torch.arange(BLOCK_SIZE, device=device), torch.arange(num_tokens, device=device)
        row_B1 = torch.arange(len(anchors_BA), device=device)[:, None]
        anchors_BA = send(anchors_BA, device)
        shape = (*anchors_BA.shape, BLOCK_SIZE)
        h_BASH = self.mask_embed_H.repeat(*shape, 1)
        h_BASH[:, :, 0] = batch.embeds_BNH[row_B1, anchors_BA]
        h_BQH = h_BASH.flatten(1, 2)
        positions_BK = torch.cat([token_N.expand(len(row_B1), -1), (anchors_BA[..., None] + slot_S).flatten(1)], 1)
        owner_Q = torch.arange(shape[1], device=device).repeat_interleave(BLOCK_SIZE)
        is_before_BQN = token_N < anchors_BA[:, owner_Q, None]
        is_own_BQQ = (owner_Q[:, None] == owner_Q).expand(len(row_B1), -1, -1)
        sees_BQK = torch.cat([is_before_BQN, is_own_BQQ], 2)
        context_BNH = self.hidden_norm(self.fc(batch.features_BNF))
        for layer in self.layers:
            h_BQH = layer(h_BQH, context_BNH, positions_BK, sees_BQK)
        return self.norm(h_BQH).unflatten(1, shape[1:])

    def to_json(self) -> dict:
        """Return the Qwen3 fields of the layer and those of the block, at the top as DeepSpec has them."""
        config = self.config
        return {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "block_size": BLOCK_SIZE,
            "mask_token_id": MASK_TOKEN_ID,
            "target_layer_ids": [layer - 1 for layer in feature_layers(config.num_hidden_layers)],
            "markov_rank": MARKOV_RANK,
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
            "draft_vocab_size": len(self.d2t),
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": len(self.layers),
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope_parameters["rope_theta"],
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }


def sample_anchors(is_answer_BN: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw at most `NUM_ANCHORS` anchors of each row without replacement: positions [B, A], and which were drawn.

    An anchor and the token behind it belong to the answer, because the first token of an answer is never drafted.
    """
    is_anchor_BN = is_answer_BN.clone()
    is_anchor_BN[:, 1:] &= is_answer_BN[:, :-1]
    is_anchor_BN[:, 0] = False
    drawn_BN = torch.rand(is_anchor_BN.shape, generator=generator) * is_anchor_BN
    most = min(NUM_ANCHORS, int(is_anchor_BN.sum(1).max()))
    anchors_BA = drawn_BN.topk(max(most, 1), dim=1).indices
    return anchors_BA, is_anchor_BN.gather(1, anchors_BA)
