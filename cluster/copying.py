"""Copies settings between classes by the names of their fields: none is written again at each border."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from pydantic import BaseModel

Made = TypeVar("Made")


def copied(made: type[Made], source: BaseModel, prefix: str = "", /, **own: Any) -> Made:
    """Return a dataclass with the values that `source` has under the fields' names behind `prefix`.

    own: fields that have another value, or that the source does not have.
    """
    shared = {
        spec.name: getattr(source, prefix + spec.name)
        for spec in fields(made)  # type: ignore[arg-type]  # it is a dataclass
        if spec.name not in own and _declares(type(source), prefix + spec.name)
    }
    return made(**shared, **own)


def _declares(model: type[BaseModel], name: str) -> bool:
    # A request may have more attributes: unknown fields that its client made up.
    return name in model.model_fields or isinstance(getattr(model, name, None), property)
