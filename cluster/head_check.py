"""Checks a draft head that is to take the place of the serving one: it has the same method, shape and tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import torch

from cluster.convert import model_folder
from cluster.door import check_drafter, unheard
from drafter.learning.learner import why_not_learnable
from secateur.errors import ConfigError
from workers.config import DraftConfig, EngineConfig
from workers.models.checkpoint import Weights
from workers.models.draft_methods import METHODS, check_kinds, has_swappable_head, read_draft_spec
from workers.models.hub import fetch_weights
from workers.models.readers import read_spec
from workers.models.specs import ModelSpec


def checked_head(config: EngineConfig, name: str, scored_beside: str | None = None) -> str:
    """Return the folder of a head that can take the place of the serving one, once its weights are here.

    name: a folder, or a Hugging Face id. scored_beside: the folder of the serving head if it is to be scored.
    Raises ConfigError, which says what differs.
    """
    serving = config.draft
    if serving is None or not has_swappable_head(serving):
        names = ", ".join(name for name, method in METHODS.items() if method.reads_features and method.weights == "own")
        raise ConfigError(f"only a head with weights of its own can be swapped ({names}); restart with another drafter")
    try:
        draft = replace(serving, model_path=str(model_folder(name)))
        check_kinds(Path(config.model_path), draft)
        fetch_weights(name, Path(draft.model_path))
        target = read_spec(config.model_path)
        old, new = (read_draft_spec(own, target) for own in (serving, draft))
        assert new is not None
        if differences := list(_differences(old, new)):
            raise ConfigError(f"{name} is not of the serving head's shape: {'; '.join(differences)}")
        with unheard(logging.getLogger("workers.models")):
            target_path = Path(config.model_path)
            check_drafter(new, Path(draft.model_path), target_path, draft.tensor_parallel_size, config)
        if not torch.equal(*(_draft_tokens(own.model_path) for own in (serving, draft))):
            raise ConfigError(f"{name} drafts other tokens (d2t) than the serving head; restart the service with it")
        if scored_beside is not None:
            _check_scorable(serving, target, (scored_beside, draft.model_path), config.device)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    return draft.model_path


def _check_scorable(serving: DraftConfig, target: ModelSpec, folders: tuple[str, str], device: str) -> None:
    """Check that a head can be scored beside the serving one. Raises ValueError. folders: of both."""
    if serving.learning_path:
        raise ValueError("with online_learning a copy is scored already; leave canary_steps out, or restart without it")
    for folder in folders:
        spec, ranks = read_draft_spec(replace(serving, model_path=folder), target), serving.tensor_parallel_size
        if why := why_not_learnable(spec, Path(folder), device=device, ranks=ranks):
            raise ValueError(f"canary_steps {why}")


def _differences(old: object, new: object, prefix: str = "") -> Iterator[str]:
    """Yield what differs between two descriptions of heads."""
    if type(old) is not type(new) or not is_dataclass(old):
        if old != new:
            yield f"{prefix.rstrip('.') or 'the kind'} is {new}, and the serving head's is {old}"
        return
    for spec in fields(old):
        yield from _differences(getattr(old, spec.name), getattr(new, spec.name), f"{prefix}{spec.name}.")


def _draft_tokens(path: str) -> torch.Tensor:
    weights = Weights(path)
    return weights.get("d2t") if weights.has("d2t") else torch.zeros(0)
