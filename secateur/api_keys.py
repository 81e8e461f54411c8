"""The file of `--api-key-file`, which holds the keys that a service accepts, one per line."""

from __future__ import annotations

from pathlib import Path

from secateur.config import read_text
from secateur.errors import ConfigError, Problem

FIELD = "api_key_file"


def read_api_keys(path: str | Path) -> tuple[str, ...]:
    """Return the keys, skipping blank lines. Raises ConfigError if the file cannot be read or a line is not a key."""
    lines = [line.strip() for line in read_text(path, FIELD).splitlines()]
    for number, line in enumerate(lines, start=1):
        if len(line.split()) > 1:
            raise ConfigError(Problem(FIELD, f"line {number} of {path} has spaces; write one key per line"))
    return tuple(dict.fromkeys(filter(None, lines)))


def check_api_keys(path: str | Path) -> None:
    """Raise ConfigError if the file holds no key, because the service would then reject every request."""
    if not read_api_keys(path):
        raise ConfigError(Problem(FIELD, f"{path} holds no key; write one per line, or leave the file out"))
