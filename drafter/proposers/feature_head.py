"""The base classes of heads that read the target's features.

An entry is a pair, (token j, feature of token j - 1). It is stored in KV slot j with rotary position j - 1. Token 0 has
no feature before it, so slot 0 stays empty and masked.
Legend: M packed rows, V vocabulary, H draft hidden width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from drafter.tree.frontier import DraftVocabulary
from workers.kv_cache import KVPool
from workers.models.base import PagedModel
from workers.models.checkpoint import Weights, text_name
from workers.models.decoder import is_legacy
from workers.models.layers import ON_CPU, HeadSplit, RankWeights, Runtime, TensorParallel, VocabHead
from workers.models.rope import Rope
from workers.models.specs import ModelSpec, check_parallel


class DraftHead(PagedModel, ABC):
    """One rank's share of a head. layers: the shapes of its decoder layers. target_ids: of a reduced vocabulary."""

    first_slot: ClassVar[int] = 1

    def __init__(
        self, weights: RankWeights, layers: ModelSpec, embedding_VH: Tensor, target_ids: Tensor | None = None
    ) -> None:
        super().__init__(weights, layers, HeadSplit.of(layers.num_heads, layers.num_kv_heads, weights.tp))
        self.width = layers.hidden_size  # of the features, H
        self.vocab = DraftVocabulary(target_size=layers.vocab_size, target_ids=target_ids, kernels=self.kernels)
        self._embedding_VH = embedding_VH
        self._rope = Rope(layers.rope, self.dtype, self.device, self.kernels.rotation)

    @classmethod
    @torch.inference_mode()
    def load(cls, spec: Any, path: Path | str, target_path: Path | str, runtime: Runtime = ON_CPU) -> Self:
        """Load this rank's share of the head that `spec` describes.

        A head without its own embedding or vocabulary head uses the target's.

        Raises:
            ValueError: the ranks cannot split the head, or a tensor is missing, of another shape, or unknown.
        """
        check_parallel(spec, runtime.tp.size)
        weights = RankWeights(path, runtime, cls.canonical_name)
        head = cls(spec, weights, Weights(target_path, runtime.dtype, runtime.device))  # type: ignore[arg-type]  # subclasses take a spec
        weights.finish(allowed=lambda name: is_legacy(name) or head.is_foreign(name))
        return head

    def embed(self, token_N: Tensor) -> Tensor:
        """Return the input embeddings of target tokens [N, H]."""
        return self._embedding_VH[token_N]

    @staticmethod
    def canonical_name(stored: str) -> str:
        """Convert a stored tensor name to the one that is read here."""
        return stored

    def is_foreign(self, name: str) -> bool:
        """Return True for a tensor that may be in the checkpoint and that the drafter does not read."""
        return False

    @abstractmethod
    def forward(self, tokens_M: Tensor, features_MH: Tensor, positions_M: Tensor, plan: Any, kv: KVPool) -> Tensor:
        """Run one packed forward pass and write every row's key and value into `kv`.

        Args:
            tokens_M: int32 or int64 target token ids.
            features_MH: the target's feature of the token before each row, or the parent's output; any float dtype.
            positions_M: rotary positions, one less than the tokens' own.
            plan: the result of `plan` for these rows.

        Returns:
            [M, H] what the logits are computed from, and the features for the rows' children where a head drafts the
            next token alone; equal on every rank.
        """


class FeatureHead(DraftHead):
    """A head that drafts the next token alone: EAGLE and MTP."""

    @abstractmethod
    def logits(self, hidden_MH: Tensor) -> Tensor:
        """Return float32 [M, draft_vocab] for rows of `forward`'s output, equal on every rank. A collective."""


def name_in_target(target: Weights, name: str) -> str:
    """Return the name under which a target stores a tensor of its text model.

    Beside vision or audio towers (Gemma-3, Mistral-Small-3.x) the text model has a prefix. A tensor that is not stored
    keeps its name, and loading it raises the error.
    """
    return next((stored for stored in target.names() if text_name(stored) == name), name)


def load_embedding(weights: Weights, target: Weights, layers: ModelSpec) -> Tensor:
    """Load the head's input embedding [V, H], or the target's if it has none. Raises ValueError for another shape."""
    if weights.has("embed_tokens.weight"):
        embedding_VH = weights.get("embed_tokens.weight")
    else:
        embedding_VH = target.get(name_in_target(target, "model.embed_tokens.weight"))
    if embedding_VH.shape != (layers.vocab_size, layers.hidden_size):
        raise ValueError(
            f"{weights.path}: the embedding is {tuple(embedding_VH.shape)}, "
            f"the head needs {(layers.vocab_size, layers.hidden_size)}"
        )
    return embedding_VH


def load_vocab_head(
    weights: RankWeights, target: Weights, layers: ModelSpec, draft_vocab_size: int, target_ids: Tensor | None = None
) -> VocabHead:
    """Load the head's own lm_head, else share the target's (tied or not).

    target_ids: of a reduced vocabulary, whose rows are then copied; without them such a head needs its own lm_head.
    """
    source: Weights = weights
    num_rows = draft_vocab_size
    if weights.has("lm_head.weight") or (draft_vocab_size != layers.vocab_size and target_ids is None):
        name = "lm_head.weight"
    else:
        source, name, num_rows = target, name_in_target(target, "lm_head.weight"), layers.vocab_size
        if not target.has(name):
            name = name_in_target(target, "model.embed_tokens.weight")
    rows = source.shape(name)
    if rows != (num_rows, layers.hidden_size):
        raise ValueError(f"{weights.path}: {name} is {rows}, not {(num_rows, layers.hidden_size)}")
    if source is target and target_ids is not None:
        return VocabHead.tied(source.get(name)[target_ids], weights.tp)
    return VocabHead.load(source, name, draft_vocab_size, weights.tp)


def load_target_ids(weights: Weights, draft_vocab_size: int, vocab_size: int) -> Tensor:
    """Return the target token of each draft token, int64 [draft_vocab]. The file's `d2t` holds the differences.

    Raises:
        ValueError: `d2t` is missing although the vocabulary is reduced, or points outside the target's vocabulary.
    """
    ids = torch.arange(draft_vocab_size, device=weights.device)
    if draft_vocab_size < vocab_size or weights.has("d2t"):
        ids = ids + weights.get("d2t").to(torch.int64)
    if ids.is_meta:
        return ids
    if ids.unique().numel() != draft_vocab_size or ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"{weights.path}: d2t does not map to distinct tokens of a vocabulary of {vocab_size}")
    return ids


def replace_weights(old: DraftHead, new: DraftHead, *, in_place: bool) -> None:
    """Give a head the weights of another one of its shape; the new one is used up.

    in_place: keep the addresses, which CUDA graphs have captured. Raises ValueError if the layout differs, before
    anything is changed.
    """
    if not in_place:
        vars(old).update(vars(new) | {"vocab": old.vocab})
        return
    own, others = list(_tensors(old)), list(_tensors(new))
    if [(each.shape, each.dtype) for each in own] != [(each.shape, each.dtype) for each in others]:
        raise ValueError("its weights are stored in another layout; take a head that is stored as the serving one is")
    with torch.inference_mode():
        for weight, other in zip(own, others, strict=True):
            weight.copy_(other)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the weights below an object, always in the same order. A vocabulary is the same for both heads."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value) and not isinstance(value, TensorParallel | DraftVocabulary):
        for spec in fields(value):
            yield from _tensors(getattr(value, spec.name))
    elif hasattr(value, "__dict__") and not isinstance(value, ModuleType | type | DraftVocabulary):
        for part in vars(value).values():
            yield from _tensors(part)
