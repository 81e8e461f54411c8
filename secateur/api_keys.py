"""The file of `--api-key-file`: the keys that a service accepts, one per line, with names and limits.

# a comment
5c1f0d9e
77ab12ce name=team-a requests-per-minute=60 tokens-per-minute=20000
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from secateur.config import read_text
from secateur.errors import ConfigError, Problem

FIELD = "api_key_file"
UNNAMED = "unnamed"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")
_SETTINGS = ("name", "requests-per-minute", "tokens-per-minute")
_FORM = "write KEY, then settings such as name=team-a requests-per-minute=60 tokens-per-minute=20000"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key and what its holder may do.

    Example: ApiKey(key="77ab12ce", name="team-a", requests_per_minute=60)
    """

    key: str = field(repr=False)
    name: str = UNNAMED
    """Labels its metrics. Several keys may share a name, for instance while one replaces another."""
    requests_per_minute: int | None = None
    """None = no limit, as for the next one."""
    tokens_per_minute: int | None = None
    """Prompt and output tokens."""


def parse_api_keys(text: str, path: str | Path) -> tuple[ApiKey, ...]:
    """Return the keys of a file's text. Raises ConfigError, which names the line and never a key."""
    found: dict[str, ApiKey] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0] == "#":
            continue
        try:
            key = ApiKey(key=words[0], **_settings(words[1:]))
        except ValueError as error:
            raise ConfigError(Problem(FIELD, f"line {number} of {path} {error}")) from None
        if found.setdefault(key.key, key) != key:
            told = f"line {number} of {path} repeats an earlier key with other settings; keep one of the two"
            raise ConfigError(Problem(FIELD, told))
    return tuple(found.values())


def _settings(words: list[str]) -> dict[str, Any]:
    # Words that are no setting are not quoted: they may be part of a key.
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"has spaces within a key, or a setting without '='; {_FORM}")
        if name not in _SETTINGS:
            raise ValueError(f"has an unknown setting (valid: {', '.join(_SETTINGS)}); {_FORM}")
        if name in found:
            raise ValueError(f"has {name} twice")
        found[name] = _name(value) if name == "name" else _limit(name, value)
    return {name.replace("-", "_"): value for name, value in found.items()}


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("has a wrong name; write 1 to 32 of a-z, 0-9, '.', '_' and '-', the first a letter or digit")
    return value


def _limit(name: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", value) or not int(value):
        raise ValueError(f"has a wrong {name}; write a whole number of at least 1, or leave it out for no limit")
    return int(value)


def read_api_keys(path: str | Path) -> tuple[ApiKey, ...]:
    """Return the keys of a file. Raises ConfigError if it cannot be read or a line is wrong."""
    return parse_api_keys(read_text(path, FIELD), path)


def check_api_keys(path: str | Path) -> None:
    """Raise ConfigError if the file holds no key, because the service would then reject every request."""
    if not read_api_keys(path):
        raise ConfigError(Problem(FIELD, f"{path} holds no key; write one per line, or leave the file out"))
