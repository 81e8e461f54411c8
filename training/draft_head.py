"""Has what all trained heads have in common: their parts, what they draft, the loss and the checkpoint.

    head.draft(batch, num_depths, generator)        yields what the head drafts, one `Drafted` per depth
    acceptance_loss(drafts, batch, draft_ids)       the loss, and agreement and acceptance by depth
    save_head(head, folder)                         config.json and model.safetensors

Legend: B rows of a batch, N tokens of a row, A drafted answer tokens, D draft vocabulary, H hidden.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from training.batches import Batch

DEPTH_DISCOUNT = 0.9
"""Weight of depth d in the loss is DEPTH_DISCOUNT ** d."""
LEAST_ACCEPTANCE = 1e-4
"""A position with less, where the target's probable tokens are not in the draft vocabulary, has no gradient."""


class Drafted(NamedTuple):
    """Holds what a head drafts at one depth, behind true tokens."""

    logits_AD: Tensor
    index_A: Tensor  # which of the batch's answer tokens each row drafts


class RMSNorm(nn.Module):
    """Root-mean-square normalization."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x.to(self.weight.dtype), (x.shape[-1],), self.weight, self.eps)


class MLP(nn.Module):
    """The gated MLP of a Llama layer."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the gated feed-forward network."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Apply rotary embeddings in rotate-half style. x: [B, heads, T, head_dim], positions: [T] or [B, 1, T]."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, device=x.device) / half)
    angles = torch.cat([positions[..., None] * frequencies] * 2, -1)
    return x * angles.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angles.sin()


class TrainableHead(nn.Module):
    """A head with a draft vocabulary. The state's names are the keys of the checkpoint."""

    num_depths: int
    """Tokens that it learns to draft."""
    first_depths: int
    """Those in the first half of the training."""

    def __init__(self, config: LlamaConfig, draft_ids: Tensor):
        """`config`: the target's; `draft_ids`: the target ids of the draft vocabulary, ascending [D]."""
        super().__init__()
        self.config = config
        in_draft = torch.zeros(config.vocab_size, dtype=torch.bool, device=draft_ids.device)
        self.d2t: Tensor
        self.t2d: Tensor
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids), device=draft_ids.device))
        self.register_buffer("t2d", in_draft.index_fill(0, draft_ids, True))

    @property
    def draft_ids(self) -> Tensor:
        """Return the target ids of the draft vocabulary [D]."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @classmethod
    @abstractmethod
    def of_target(cls, target: LlamaForCausalLM, draft_ids: Tensor, intermediate_size: int | None) -> Self:
        """Initialise a head from the target. intermediate_size: of its MLP, None for the target's."""

    @abstractmethod
    def draft(self, batch: Batch, num_depths: int, generator: torch.Generator) -> Iterator[Drafted]:
        """Draft answer tokens of the batch. generator: of the CPU, draws what is random."""

    @abstractmethod
    def to_json(self) -> dict:
        """Return the checkpoint's config.json."""


def copy_layer(own: nn.Module, last: nn.Module) -> None:
    """Copy a target's layer to the names that a head's layer shares with it, as far as the shapes go.

    A narrower MLP takes the first neurons of the target's. Wider inputs of the attention are fed from behind.
    """
    given = dict(last.named_parameters())
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            source = given.get(name)
            if source is None:
                continue
            if parameter.ndim == 1:
                parameter.copy_(source)
            else:
                part = source[: parameter.shape[0], : parameter.shape[1]]
                parameter[:, parameter.shape[1] - part.shape[1] :].copy_(part)


def acceptance_loss(drafts: Iterable[Drafted], batch: Batch, draft_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss, and each depth's agreement and acceptance [2, depths].

    Agreement is the share of answer tokens for which the most likely tokens are equal. Acceptance is the probability
    that a token drafted at temperature 1 is accepted: the sum of the smaller of both probabilities of each token. The
    loss is its negative logarithm (Samarin et al., "LK losses", 2026).
    """
    losses, seen = [], []
    for depth, (logits_AD, index_A) in enumerate(drafts):
        accepted_A = torch.minimum(logits_AD.float().softmax(-1), batch.law_AD[index_A]).sum(-1)
        agrees_A = draft_ids[logits_AD.argmax(-1)] == batch.favourite_A[index_A]
        loss_A = -accepted_A.clamp(min=LEAST_ACCEPTANCE).log()
        count = max(len(index_A), 1)  # short answers have no deep drafts
        losses.append(DEPTH_DISCOUNT**depth * loss_A.sum() / count)
        seen.append(torch.stack([agrees_A.sum() / count, accepted_A.sum() / count]))
    return torch.stack(losses).sum(), torch.stack(seen, dim=1).detach()


def save_head(head: TrainableHead, folder: Path) -> None:
    """Write config.json and, atomically, model.safetensors: bf16 weights, d2t int64 (differences), t2d bool."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in head.state_dict().items()
    }
    save_file(tensors, folder / "new.safetensors", metadata={"format": "pt"})
    (folder / "new.safetensors").chmod(0o644)
    (folder / "new.safetensors").replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(head.to_json(), indent=2) + "\n")
