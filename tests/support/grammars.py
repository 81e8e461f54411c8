"""Grammars over a few tokens whose language is finite, so that what they allow can be listed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import llguidance

from workers.sampling.grammar import TokenTable
from workers.sampling.logits_state import LogitsState, TokenCounter
from workers.settings import Constraints


class _Wrapped:
    bos_token_id = None

    def __init__(self, texts: Sequence[str], ends: Sequence[int]) -> None:
        self.eos_token_id = ends[0]
        self.tokens = [text.encode() for text in texts]
        self.special_token_ids = list(ends)

    def __call__(self, text: bytes) -> list[int]:
        return [self.tokens.index(bytes([byte])) for byte in text if bytes([byte]) in self.tokens]


class TinyTable(TokenTable):
    """A table of these texts; `ends` are the ids of end tokens, whose texts are names."""

    def __init__(self, texts: Sequence[str], ends: Sequence[int]) -> None:
        super().__init__("nowhere", len(texts), ends)
        self._texts = texts

    def load(self) -> Any:
        if self._tokenizer is None:
            wrapped = llguidance.TokenizerWrapper(_Wrapped(self._texts, self.end_token_ids))
            self._tokenizer = llguidance.LLTokenizer(wrapped, eos_token=self.end_token_ids)
        return self._tokenizer


def allowed_by(texts: Sequence[str], ends: Sequence[int], language: Sequence[str], path: Sequence[int]) -> set[int]:
    """Return the tokens that may follow a path, given all texts of the language; after an end token, only that one."""
    if path and path[-1] in ends:
        return {path[-1]}
    said = "".join(texts[token] for token in path)
    going_on = {
        token
        for token, text in enumerate(texts)
        if token not in ends and text and any(whole.startswith(said + text) for whole in language)
    }
    return going_on | (set(ends) if said in language else set())


def state_of(constraints: Constraints, output: Sequence[int], ends: Sequence[int] = (), id: int = 0) -> LogitsState:
    """Return the state of a request behind its output."""
    counter = TokenCounter(constraints, ())
    counter.add(output)
    longest = max(map(len, constraints.bad_words), default=1)
    return LogitsState(
        constraints=constraints,
        end_token_ids=list(ends),
        counts=counter.counts(),
        tail=list(output[max(0, len(output) - longest + 1) :]),
        num_output=len(output),
        id=id,
        output=array("i", output).tobytes(),
    )
