"""Prompt files for benchmarks, and the bundled file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from secateur.errors import ConfigError, Problem
from secateur.jsonl import lines_of, value_of

BUNDLED_PROMPTS = Path(__file__).parent / "bundled" / "prompts.jsonl"
"""Held-out texts and chats from the distribution that the bundled models were trained on."""


class BenchPrompt(NamedTuple):
    """A text to continue, or a conversation to answer."""

    text: str | None
    messages: list[dict[str, Any]] | None


def read_prompts(path: Path, most: int) -> list[BenchPrompt]:
    """Read at most `most` prompts, evenly spaced, from a JSONL file of {"text": ...} and {"messages": [...]}.

    Raises ConfigError, also for a file without prompts.
    """
    from secateur.config import read_text  # it imports pydantic, and --help reads BUNDLED_PROMPTS alone

    lines = lines_of(read_text(path, "--prompts"))
    prompts = [_parse(line, f"{path}, line {number}") for number, line in lines]
    if not prompts:
        raise ConfigError(Problem("--prompts", f"{path} holds no prompts"))
    return prompts[:: max(1, len(prompts) // most)][:most]


def _parse(line: str, place: str) -> BenchPrompt:
    try:
        row = value_of(line)
    except ValueError as error:
        raise ConfigError(Problem("--prompts", f"{place}: not JSON: {error}")) from None
    match row:
        case {"text": str(text)} if text:
            return BenchPrompt(text, None)
        case {"messages": [*messages]} if messages:
            return BenchPrompt(None, messages)
    raise ConfigError(Problem("--prompts", f'{place}: must be {{"text": "..."}} or {{"messages": [...]}}'))
