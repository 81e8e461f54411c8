"""Constrained requests where their next trees begin: what each asks for, and which tokens its text has how often.

    TokenCounter(constraints, prompt)                  kept from token to token
        .add(tokens)
        .counts() -> TokenCounts
    LogitsState                                    the constraints with these counts, at the root of a tree
    pack_logits_states(logits_states) -> packed_U       what a message carries, and back
    unpack_logits_states(packed_U) -> logits_states

Of a request's text only `TokenCounts` travel: some 8 bytes for each token that it ever had, for drafter and verifier in
every step. What they do to logits is in `workers.sampling.logits_processors`.

Legend: C distinct tokens of a request, U bytes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import msgpack
import numpy as np
import torch
from torch import Tensor

from workers.types import Constraints


class TokenCounts(NamedTuple):
    """A request's distinct tokens and how often each is in the output: int32 arrays as the bytes that travel."""

    ids: bytes  # ascending
    counts: bytes  # 0 = in the prompt only

    @property
    def id_C(self) -> np.ndarray:
        return np.frombuffer(self.ids, np.int32)

    @property
    def count_C(self) -> np.ndarray:
        return np.frombuffer(self.counts, np.int32)


class TokenCounter:
    """Counts the tokens of a request's output, if it has penalties; a repetition penalty also needs the prompt's."""

    def __init__(self, constraints: Constraints, prompt: Iterable[int]) -> None:
        self._is_kept = constraints.has_penalties
        self._ids = array("i", sorted(set(prompt)) if constraints.repetition_penalty != 1 else ())
        self._counts = array("i", bytes(self._ids.itemsize * len(self._ids)))

    def add(self, tokens: Iterable[int]) -> None:
        """Output tokens."""
        for token in tokens if self._is_kept else ():
            at = bisect_left(self._ids, token)
            if at == len(self._ids) or self._ids[at] != token:
                self._ids.insert(at, token)
                self._counts.insert(at, 0)
            self._counts[at] += 1

    def counts(self) -> TokenCounts:
        """As they are now."""
        return TokenCounts(self._ids.tobytes(), self._counts.tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsState:
    """One constrained request as it stands at the root of its next tree (the root being its last token)."""

    constraints: Constraints
    end_token_ids: list[int]  # what min_tokens keeps away
    counts: TokenCounts
    tail: list[int]  # the last output tokens, the root included, as far back as bad words look
    num_output: int

    @property
    def has_masks(self) -> bool:
        """Whether tokens may be forbidden here or further on."""
        own = self.constraints
        return bool(own.bad_words) or own.allowed_token_ids is not None or self.num_output < own.min_tokens

    @property
    def has_only_penalties(self) -> bool:
        return not (self.has_masks or self.constraints.logit_bias)


def pack_logits_states(logits_states: Sequence[LogitsState | None]) -> Tensor:
    """uint8 bytes for a message; empty if nobody is constrained. Position = index of the request in the message."""
    constrained = {index: _fields(state) for index, state in enumerate(logits_states) if state is not None}
    if not constrained:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(msgpack.packb(constrained, default=_fields)), dtype=torch.uint8)


def unpack_logits_states(packed_U: Tensor) -> dict[int, LogitsState]:
    """The constrained requests by their index in the message."""
    if not len(packed_U):
        return {}
    raw = msgpack.unpackb(packed_U.numpy().tobytes(), strict_map_key=False)
    return {
        index: LogitsState(
            **state | {"constraints": Constraints(**state["constraints"]), "counts": TokenCounts(*state["counts"])}
        )
        for index, state in raw.items()
    }


def _fields(value: object) -> dict[str, object]:
    return {spec.name: getattr(value, spec.name) for spec in fields(value)}  # type: ignore[arg-type]
