"""Benchmark prompts as token ids."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.http.errors import PromptError
from cluster.http.tokenizer import Tokenizer
from secateur.errors import ConfigError, Problem
from secateur.prompts import BenchPrompt


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[BenchPrompt]) -> list[list[int]]:
    """Tokenize prompts; conversations use the chat template. Raises ConfigError for invalid prompts."""
    try:
        return [
            tokenizer.encode_chat(prompt.messages) if prompt.messages else tokenizer.encode(prompt.text or "")
            for prompt in prompts
        ]
    except PromptError as error:
        raise ConfigError(Problem("--prompts", str(error))) from error
