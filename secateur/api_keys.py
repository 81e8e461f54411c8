"""The file of `--api-key-file`: the keys that a service accepts, one a line."""

from __future__ import annotations

from pathlib import Path

from secateur.config import read_text
from secateur.errors import ConfigError, Problem

FIELD = "api_key_file"


def read_api_keys(path: str | Path) -> tuple[str, ...]:
    """The keys in the file; empty lines are none. Raises ConfigError if it cannot be read or a line is no key."""
    lines = [line.strip() for line in read_text(path, FIELD).splitlines()]
    for number, line in enumerate(lines, start=1):
        if len(line.split()) > 1:
            raise ConfigError(Problem(FIELD, f"line {number} of {path} has spaces; write one key a line, nothing else"))
    return tuple(dict.fromkeys(filter(None, lines)))


def check_api_keys(path: str | Path) -> None:
    """For a service that starts. Raises ConfigError if there is not one key, which would keep everybody out."""
    if not read_api_keys(path):
        raise ConfigError(Problem(FIELD, f"{path} holds no key; write one a line, or leave the file out"))
