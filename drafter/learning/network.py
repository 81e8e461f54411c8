"""An EAGLE-3 layer that can be trained, its training-time test, and the loss. `training` and the drafter share them.

Legend: B rows, N tokens of a row, T starts, H hidden, A drafted tokens, D draft vocabulary.
At start i, step s reads token i + 1 + s with rotary position i + s, and predicts token i + 2 + s. Its feature is that
of token i for s = 0 and the layer's own output of step s - 1 otherwise.
Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of LLMs via Training-Time Test" (2025).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEPTH_DISCOUNT = 0.9
"""Weight of depth d in the loss is DEPTH_DISCOUNT ** d."""
LEAST_ACCEPTANCE = 1e-4
"""A position with less, where the target's probable tokens are not in the draft vocabulary, has no gradient."""


class LayerSizes(Protocol):
    """The sizes of a model that a layer must know; transformers' configurations have these names."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float


class RMSNorm(nn.Module):
    """Root-mean-square normalization."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x.to(self.weight.dtype), (x.shape[-1],), self.weight, self.eps)


class MLP(nn.Module):
    """The gated MLP of a Llama layer."""

    def __init__(self, config: LayerSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the gated feed-forward network."""
        gated: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return gated


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor | None = None, *, base: float = 10000.0) -> Tensor:
    """Apply rotary embeddings in rotate-half style. x: [B, heads, T, head_dim], positions: [T] or [B, 1, T].

    frequencies: [head_dim / 2]; None = Llama's, of `base`.
    """
    half = x.shape[-1] // 2
    if frequencies is None:
        frequencies = base ** (-torch.arange(half, device=x.device) / half)
    angles = torch.cat([positions[..., None] * frequencies] * 2, -1)
    return x * angles.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angles.sin()


class HeadAttention(nn.Module):
    """Projections only: the training-time test mixes keys of several steps, see `MidLayer.step`."""

    def __init__(self, config: LayerSizes) -> None:
        super().__init__()
        width, dim = 2 * config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, config.hidden_size, bias=False)


class KeyValue(NamedTuple):
    """Rotated keys and values of one step, repeated to all query heads: each [B, heads, T, head_dim]."""

    keys: Tensor
    values: Tensor


class MidLayer(nn.Module):
    """The decoder layer of the head. frequencies: see `rotate`."""

    def __init__(self, config: LayerSizes, frequencies: Tensor | None = None) -> None:
        super().__init__()
        self.self_attn, self.mlp = HeadAttention(config), MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._head_dim, self._frequencies = config.head_dim, frequencies
        self._repeats = config.num_attention_heads // config.num_key_value_heads

    def unroll(self, embeds_BNH: Tensor, features_BTH: Tensor, num_steps: int, first: int = 0) -> Iterator[Tensor]:
        """Yield the pre-norm output [B, T - first, H] of each step; N = T + 1 + num_steps. See `step` for `first`."""
        cache: list[KeyValue] = []
        hidden, num_starts = features_BTH, features_BTH.shape[1]
        for s in range(num_steps):
            begin = 1 + s if s == 0 else 1 + s + first
            hidden = self.step(embeds_BNH[:, begin : 1 + s + num_starts], hidden, cache, first)
            yield hidden

    def key_value_query(self, x: Tensor, positions: Tensor) -> tuple[KeyValue, Tensor]:
        """Project x [B, T, 2H] and rotate it to positions [T] or [B, 1, T]."""

        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self._head_dim)).transpose(1, 2)

        def placed(y: Tensor) -> Tensor:
            return rotate(heads(y), positions, self._frequencies)

        attention = self.self_attn
        keys = placed(attention.k_proj(x)).repeat_interleave(self._repeats, 1)
        values = heads(attention.v_proj(x)).repeat_interleave(self._repeats, 1)
        return KeyValue(keys, values), placed(attention.q_proj(x))

    def step(self, embeds_BTH: Tensor, features_BTH: Tensor, cache: list[KeyValue], first: int = 0) -> Tensor:
        """Run one step: append its keys to `cache` and return the pre-norm output [B, T - first, H].

        Start i attends to step 0 of starts 0..i and to its own later steps, exactly as when drafting from i. Only
        starts from `first` on are drafted from. Step 0 takes all T starts, later steps those T - first.
        """
        is_first_step = not cache
        x = torch.cat([self.input_layernorm(embeds_BTH), self.hidden_norm(features_BTH)], -1)
        offset = 0 if is_first_step else len(cache) + first
        key_value, queries = self.key_value_query(x, torch.arange(x.shape[1], device=x.device) + offset)
        cache.append(key_value)
        if is_first_step:
            queries, features_BTH = queries[:, :, first:], features_BTH[:, first:]
        num_starts = cache[0].keys.shape[2]
        scale = 1 / math.sqrt(self._head_dim)
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
        residual = features_BTH + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        closed: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return closed


class Drafted(NamedTuple):
    """Holds what a head drafts at one depth, behind true tokens."""

    logits_AD: Tensor
    index_A: Tensor  # which of the batch's answer tokens each row drafts


def acceptance_loss(
    drafts: Iterable[Drafted], law_AD: Tensor, favourite_A: Tensor, draft_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss, and each depth's agreement and acceptance [2, depths].

    law_AD: the target's probabilities of the draft vocabulary where each answer token comes next; favourite_A: its most
    likely token there. Agreement is the share of answer tokens for which the most likely tokens are equal. Acceptance
    is the probability that a token drafted at temperature 1 is accepted: the sum of the smaller of both probabilities
    of each token. The loss is its negative logarithm (Samarin et al., "LK losses", 2026).
    """
    losses, seen = [], []
    for depth, (logits_AD, index_A) in enumerate(drafts):
        accepted_A = torch.minimum(logits_AD.float().softmax(-1), law_AD[index_A]).sum(-1)
        agrees_A = draft_ids[logits_AD.argmax(-1)] == favourite_A[index_A]
        loss_A = -accepted_A.clamp(min=LEAST_ACCEPTANCE).log()
        count = max(len(index_A), 1)  # short answers have no deep drafts
        losses.append(DEPTH_DISCOUNT**depth * loss_A.sum() / count)
        seen.append(torch.stack([agrees_A.sum() / count, accepted_A.sum() / count]))
    return torch.stack(losses).sum(), torch.stack(seen, dim=1).detach()
