"""Has what all trained heads have in common: what they draft, and the checkpoint.

    head.draft(batch, num_depths, generator)        yields what the head drafts, one `Drafted` per depth
    save_head(head, folder)                         config.json and model.safetensors

Their parts and the loss are in `drafter.learning.network`, which a drafter that learns shares.
Legend: D draft vocabulary.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from drafter.learning.network import Drafted
from training.batches import Batch


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
