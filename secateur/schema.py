"""Base of the configuration models: unknown keys are errors, and one ConfigError lists every problem."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from secateur.errors import ConfigError, Problem

_MOST_PROBLEMS, _MOST_SHOWN = 20, 200  # every entry of a long list may be wrong


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the nearest valid word, or the list of all valid words."""
    choices = sorted(valid)
    if near := difflib.get_close_matches(word.lower(), choices, n=1, cutoff=0.5):
        return f" (did you mean {near[0]!r}?)"
    return f" (valid: {', '.join(choices)})"


def unknown_key(key: str, valid: Iterable[str]) -> str:
    """Return the error message for an unknown key."""
    return f"unknown key {key!r}{did_you_mean(key, valid)}"


def problems_of(error: ValidationError, known: Iterable[str]) -> list[Problem]:
    """Return pydantic's first errors as Problems; `known` are the field names of the model."""
    return [problem for item in error.errors()[:_MOST_PROBLEMS] for problem in _problems_of_item(item, known)]


def _problems_of_item(item: Any, known: Iterable[str]) -> list[Problem]:
    field = ".".join(str(part) for part in item["loc"])
    match item["type"]:
        case "extra_forbidden":
            *parents, key = item["loc"]
            return [Problem(".".join(map(str, parents)), unknown_key(str(key), known))]
        case "value_error":
            cause = item["ctx"]["error"]
            if isinstance(cause, ConfigError):
                return list(cause.under(field).problems)
            return [Problem(field, str(cause))]
        case "missing":
            return [Problem(field, "is required")]
        case "model_type" | "model_attributes_type" | "dict_type":
            return [Problem(field, f"must be an object, {{...}} (got {_short(item['input'])})")]
        case _:
            # "Input should be greater than 0" -> "must be greater than 0 (got -1)", "List should have" -> "must have"
            message = re.sub("^(Input|List|Dictionary|String) should ", "must ", item["msg"])
            message = message.replace(" after validation", "").partition(", unable to parse")[0]
            value = item["input"]
            shown = "" if isinstance(value, dict | BaseModel) else f" (got {_short(value)})"
            return [Problem(field, message + shown)]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


class Strict(BaseModel):
    """Base of the configuration models.

    Frozen; '-' in keys reads as '_'; null means "not given"; wrong types are refused, not converted.
    Constructing, `model_validate` and `load` all raise ConfigError.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(*problems_of(error, type(self).model_fields)) from None

    @classmethod
    def model_validate(cls, obj: Any, **kwargs: Any) -> Self:
        """Validate an object. Raises ConfigError with a line per problem."""
        try:
            return super().model_validate(obj, **kwargs)
        except ValidationError as error:
            raise ConfigError(*problems_of(error, cls.model_fields)) from None

    @classmethod
    def load(cls, mapping: Mapping[str, Any]) -> Self:
        """Validate a mapping. Raises ConfigError with a line per problem."""
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"expected a mapping of settings, got {mapping!r}")
        return cls.model_validate(dict(mapping))

    @model_validator(mode="before")
    @classmethod
    def _normalise_keys(cls, data: Any) -> Any:
        return normalise_keys(data) if isinstance(data, Mapping) else data

    def _settle(self, **derived: Any) -> None:
        """Set derived values without adding them to `model_fields_set`."""
        self.__dict__.update(derived)


def normalise_keys(data: Mapping[str, Any]) -> dict[str, Any]:
    """Replace '-' by '_' in keys and drop nulls. Raises ConfigError if a key is given in both spellings."""
    result: dict[str, Any] = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name in result:
            raise ConfigError(Problem(name, f"given twice, as {name!r} and {key!r}; keep one"))
        if value is not None:
            result[name] = value
    return result
