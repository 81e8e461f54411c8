"""The EAGLE-3 head: its network, its training-time test and its checkpoint (SafeAILab layout).

Letters: B rows, T starts, S unrolled steps, H hidden, D draft vocabulary, V target vocabulary.
At start i, step s reads token i + 1 + s with rotary position i + s, and predicts token i + 2 + s. Its feature is
fc(target features at i) for s = 0 and the head's own pre-norm output of step s - 1 otherwise.
Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of LLMs via Training-Time Test" (2025).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from training.batches import Batch, feature_layers, send
from training.data import Corpus
from training.draft_head import MLP, Drafted, RMSNorm, TrainableHead, copy_layer, rotate
from training.language_model import BatchShape, Shapes, Trained, mixed_batch, mixed_precision
from training.schedule import Optimisers, TimeBudget

DRAFT_VOCAB_SIZE = 1536
ALWAYS_DRAFTED = (0, 2)
STEP_DISCOUNT = 0.8
"""Weight of step s in the loss is STEP_DISCOUNT ** s."""
NUM_STEPS = 5
"""Unrolled steps of the training-time test, of a head for another target."""
FIRST_STEPS = 2
"""Unrolled steps in the first half of the training, which sees more tokens then."""


class HeadAttention(nn.Module):
    """Projections only: the training-time test mixes keys of several steps, see `TrainableEagle3Head.step`."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        width, dim = 2 * config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, config.hidden_size, bias=False)


class MidLayer(nn.Module):
    """The decoder layer of the head."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.self_attn, self.mlp = HeadAttention(config), MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class KeyValue(NamedTuple):
    """Rotated keys and values of one step, repeated to all query heads: each [B, heads, T, head_dim]."""

    keys: Tensor
    values: Tensor


class UnrolledStep(NamedTuple):
    """The draft logits of one unrolled step and the target logits it learns from."""

    logits_BTD: Tensor
    target_logits_BTV: Tensor


class TrainableEagle3Head(TrainableHead):
    """The head in SafeAILab's layout."""

    num_depths = NUM_STEPS
    first_depths = FIRST_STEPS

    def __init__(self, config: LlamaConfig, draft_ids: Tensor):
        """See `TrainableHead`."""
        super().__init__(config, draft_ids)
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(draft_ids), bias=False)

    @classmethod
    def of_target(cls, target: LlamaForCausalLM, draft_ids: Tensor, intermediate_size: int | None) -> Self:
        """Initialise a head from the target's last layer and output layer; `fc` selects the highest feature."""
        config = copy.deepcopy(target.config)
        config.intermediate_size = intermediate_size or config.intermediate_size
        head, hidden, last = cls(config, draft_ids).to(draft_ids.device), config.hidden_size, target.model.layers[-1]
        copy_layer(head.midlayer, last)
        with torch.no_grad():
            head.fc.weight.zero_()[:, 2 * hidden :] += torch.eye(hidden, device=draft_ids.device)
            head.midlayer.input_layernorm.weight.fill_(1.0)
            head.midlayer.hidden_norm.weight.copy_(last.input_layernorm.weight)
            head.norm.weight.copy_(target.model.norm.weight)
            head.lm_head.weight.copy_(target.lm_head.weight[draft_ids])
        return head

    def draft(self, batch: Batch, num_depths: int, generator: torch.Generator) -> Iterator[Drafted]:
        """Draft from every start that reaches the answers; nothing is random."""
        first = max(int(batch.is_answer_BN.any(0).nonzero()[0]) - num_depths, 0)
        num_starts = batch.embeds_BNH.shape[1] - 1 - num_depths
        hidden = self.fc(batch.features_BNF[:, :num_starts])
        cache: list[KeyValue] = []
        for s in range(num_depths):
            begin = 1 + s if s == 0 else 1 + s + first
            hidden = self.step(batch.embeds_BNH[:, begin : 1 + s + num_starts], hidden, cache, first)
            window = slice(1 + s + first, 1 + s + num_starts)
            is_answer = batch.is_answer_BN[:, window]
            answers = send(is_answer.flatten().nonzero()[:, 0], hidden.device)
            logits_AD = self.lm_head(self.norm(hidden.flatten(0, 1)[answers]))
            yield Drafted(logits_AD, send(batch.index_BN[:, window][is_answer], hidden.device))

    def key_value_query(self, x: Tensor, positions: Tensor) -> tuple[KeyValue, Tensor]:
        """Project x [B, T, 2H] and rotate it to positions [T] or [B, 1, T]."""
        attention, repeats = self.midlayer.self_attn, self.config.num_attention_heads // self.config.num_key_value_heads

        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

        keys = rotate(heads(attention.k_proj(x)), positions).repeat_interleave(repeats, 1)
        values = heads(attention.v_proj(x)).repeat_interleave(repeats, 1)
        return KeyValue(keys, values), rotate(heads(attention.q_proj(x)), positions)

    def step(self, embeds_BTH: Tensor, features_BTH: Tensor, cache: list[KeyValue], first: int = 0) -> Tensor:
        """Run one step: append its keys to `cache` and return the pre-norm output [B, T - first, H].

        Start i attends to step 0 of starts 0..i and to its own later steps, exactly as when drafting from i. Only
        starts from `first` on are drafted from. Step 0 takes all T starts, later steps those T - first.
        """
        layer, is_first_step = self.midlayer, not cache
        x = torch.cat([layer.input_layernorm(embeds_BTH), layer.hidden_norm(features_BTH)], -1)
        offset = 0 if is_first_step else len(cache) + first
        key_value, queries = self.key_value_query(x, torch.arange(x.shape[1], device=x.device) + offset)
        cache.append(key_value)
        if is_first_step:
            queries, features_BTH = queries[:, :, first:], features_BTH[:, first:]
        num_starts = cache[0].keys.shape[2]
        scale = 1 / math.sqrt(self.config.head_dim)
        future = torch.ones(queries.shape[2], num_starts, dtype=torch.bool, device=x.device).triu(1 + first)
        scores = [(queries @ cache[0].keys.transpose(2, 3) * scale).masked_fill(future, -torch.inf)]
        scores += [(queries * own.keys).sum(-1, keepdim=True) * scale for own in cache[1:]]
        weights = torch.cat(scores, -1).softmax(-1)
        mixed = weights[..., :num_starts] @ cache[0].values
        for n, own in enumerate(cache[1:]):
            mixed = mixed + weights[..., num_starts + n, None] * own.values
        return self.close(features_BTH, mixed)

    def close(self, features_BTH: Tensor, mixed: Tensor) -> Tensor:
        """Return the layer's output from its residual [B, T, H] and what its heads read [B, heads, T, head_dim]."""
        residual = features_BTH + self.midlayer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        return residual + self.midlayer.mlp(self.midlayer.post_attention_layernorm(residual))

    def unroll(
        self, features_BTF: Tensor, embeds_BTH: Tensor, target_logits: Tensor, num_steps: int
    ) -> list[UnrolledStep]:
        """Draft `num_steps` tokens from every start of rows of N tokens; T = N - 1 - num_steps.

        features_BTF: [B, N, 3H], embeds_BTH: [B, N, H], target_logits: [B, N, V].
        """
        num_starts = features_BTF.shape[1] - 1 - num_steps
        hidden, outputs = self.fc(features_BTF[:, :num_starts]), []
        cache: list[KeyValue] = []
        for s in range(num_steps):
            window = slice(1 + s, 1 + s + num_starts)
            hidden = self.step(embeds_BTH[:, window], hidden, cache)
            outputs.append(UnrolledStep(self.lm_head(self.norm(hidden)), target_logits[:, window]))
        return outputs

    def to_json(self) -> dict:
        """Return the Llama fields of the layer, and the size of the draft vocabulary."""
        config = self.config
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "bos_token_id": config.bos_token_id,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.eos_token_id if config.pad_token_id is None else config.pad_token_id,
            "draft_vocab_size": len(self.d2t),
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }


class TargetView(NamedTuple):
    """The target's outputs that the head is trained on, for rows of tokens."""

    features_BTF: Tensor
    embeds_BTH: Tensor
    logits_BTV: Tensor


@torch.no_grad()
def view_target(target: LlamaForCausalLM, tokens_BT: Tensor) -> TargetView:
    """Return the target's features, embeddings and logits in fp32."""
    output = target(input_ids=tokens_BT, output_hidden_states=True, use_cache=False)
    layers = feature_layers(target.config.num_hidden_layers)
    features = torch.cat([output.hidden_states[layer] for layer in layers], -1)
    return TargetView(features, target.model.embed_tokens(tokens_BT), output.logits)


def unrolled_loss(outputs: list[UnrolledStep], t2d: Tensor, draft_ids: Tensor) -> Tensor:
    """Return the cross-entropy against the target's distribution over the draft vocabulary.

    Positions whose most likely target token is outside that vocabulary do not count.
    """
    total = outputs[0].logits_BTD.new_zeros(())
    for s, (logits, target_logits) in enumerate(outputs):
        is_counted = t2d[target_logits.argmax(-1)]
        law = target_logits[..., draft_ids].softmax(-1)
        entropy = F.cross_entropy(logits.flatten(0, 1).float(), law.flatten(0, 1), reduction="none")
        total = total + STEP_DISCOUNT**s * (entropy * is_counted.flatten()).sum() / is_counted.sum().clamp(min=1)
    return total


def most_frequent_ids(corpus: Corpus, own_text: Tensor, vocab_size: int) -> Tensor:
    """Return the most frequent target ids of the mixture, including the ends of text, ascending [D]."""
    counts = torch.bincount(corpus.code.tokens, minlength=vocab_size).float()
    counts += torch.bincount(corpus.chat.tokens, minlength=vocab_size)
    counts /= counts.sum()
    counts += torch.bincount(own_text.flatten(), minlength=vocab_size) / own_text.numel()
    counts[list(ALWAYS_DRAFTED)] = torch.inf
    return counts.topk(DRAFT_VOCAB_SIZE).indices.sort().values


def train_head(
    target: LlamaForCausalLM, corpus: Corpus, own_text: Tensor, shapes: Shapes, budget: TimeBudget
) -> Trained:
    """Train against the saved bf16 target, alternately on the corpus and on its own text [num_texts, length]."""
    torch.manual_seed(2)
    draft_ids = most_frequent_ids(corpus, own_text, target.config.vocab_size)
    head = TrainableEagle3Head(target.config, draft_ids).to(own_text.device)
    head.lm_head.weight.data.copy_(target.lm_head.weight[draft_ids])
    optimisers = Optimisers(head, budget.fraction, "eagle3")
    shape = BatchShape(num_rows=shapes.head.num_rows, length=min(shapes.head.length, own_text.shape[1]))
    while budget.fraction() < 1:
        tokens = mixed_batch(corpus, own_text, shape, optimisers.num_steps, own_every=2)
        view = view_target(target, tokens)
        with mixed_precision(tokens.device):
            outputs = head.unroll(*view, num_steps=shapes.num_unrolled)
        optimisers.step(unrolled_loss(outputs, head.t2d, head.draft_ids), tokens.numel())
    return Trained(head, optimisers.num_steps, optimisers.num_tokens)
