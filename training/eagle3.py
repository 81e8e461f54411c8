"""The EAGLE-3 head: its network, its training-time test and its checkpoint (SafeAILab layout).

Letters: B rows, T starts, S unrolled steps, H hidden, D draft vocabulary, V target vocabulary.
At start i, step s reads token i + 1 + s with rotary position i + s, and predicts token i + 2 + s. Its feature is
fc(target features at i) for s = 0 and the head's own pre-norm output of step s - 1 otherwise.
Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of LLMs via Training-Time Test" (2025).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from drafter.learning.network import Drafted, MidLayer, RMSNorm
from training.batches import Batch, feature_layers, send
from training.data import Corpus
from training.draft_head import TrainableHead, copy_layer
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
        for s, hidden_BTH in enumerate(self.midlayer.unroll(batch.embeds_BNH, hidden, num_depths, first)):
            window = slice(1 + s + first, 1 + s + num_starts)
            is_answer = batch.is_answer_BN[:, window]
            answers = send(is_answer.flatten().nonzero()[:, 0], hidden_BTH.device)
            logits_AD = self.lm_head(self.norm(hidden_BTH.flatten(0, 1)[answers]))
            yield Drafted(logits_AD, send(batch.index_BN[:, window][is_answer], hidden_BTH.device))

    def unroll(
        self, features_BTF: Tensor, embeds_BTH: Tensor, target_logits: Tensor, num_steps: int
    ) -> list[UnrolledStep]:
        """Draft `num_steps` tokens from every start of rows of N tokens; T = N - 1 - num_steps.

        features_BTF: [B, N, 3H], embeds_BTH: [B, N, H], target_logits: [B, N, V].
        """
        num_starts = features_BTF.shape[1] - 1 - num_steps
        hidden = self.fc(features_BTF[:, :num_starts])
        return [
            UnrolledStep(self.lm_head(self.norm(hidden_BTH)), target_logits[:, 1 + s : 1 + s + num_starts])
            for s, hidden_BTH in enumerate(self.midlayer.unroll(embeds_BTH, hidden, num_steps))
        ]

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
