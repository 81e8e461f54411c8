"""The state of logits processors: a request's constraints and token counts at the root of its next tree.

Instead of a request's text, only its `TokenCounts` travel to drafter and verifier in every step: 8 bytes per distinct
token. A grammar travels with all of the output, 4 bytes per token, so that its matcher can be built again anywhere.
`workers.sampling.logits_processors` applies them to logits.

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

from workers.settings import Constraints


class TokenCounts(NamedTuple):
    """A request's distinct tokens and their counts in the output, as the bytes of int32 arrays."""

    ids: bytes  # ascending
    counts: bytes  # 0 = only in the prompt

    @property
    def id_C(self) -> np.ndarray:
        """Distinct token ids, ascending."""
        return np.frombuffer(self.ids, np.int32)

    @property
    def count_C(self) -> np.ndarray:
        """Number of occurrences of each in the output."""
        return np.frombuffer(self.counts, np.int32)


class TokenCounter:
    """Counts the tokens of a request's output, if it has penalties; a repetition penalty also needs the prompt's."""

    def __init__(self, constraints: Constraints, prompt: Iterable[int]) -> None:
        self._is_kept = constraints.has_penalties
        self._ids = array("i", sorted(set(prompt)) if constraints.repetition_penalty != 1 else ())
        self._counts = array("i", bytes(self._ids.itemsize * len(self._ids)))

    def add(self, tokens: Iterable[int]) -> None:
        """Count output tokens."""
        for token in tokens if self._is_kept else ():
            at = bisect_left(self._ids, token)
            if at == len(self._ids) or self._ids[at] != token:
                self._ids.insert(at, token)
                self._counts.insert(at, 0)
            self._counts[at] += 1

    def counts(self) -> TokenCounts:
        """Return a snapshot."""
        return TokenCounts(self._ids.tobytes(), self._counts.tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsState:
    """The logits-processor state of one request at the root of its next tree (its last token)."""

    constraints: Constraints
    end_token_ids: list[int]  # masked by min_tokens
    counts: TokenCounts
    tail: list[int]  # last output tokens, the root included, as many as bad words need
    num_output: int
    id: int = 0  # of the request, for its grammar's matcher
    output: bytes = b""  # int32, all output tokens, the root included; empty without a grammar

    @property
    def has_masks(self) -> bool:
        """True if tokens may be masked here or deeper in the tree."""
        own = self.constraints
        return (
            bool(own.bad_words or own.grammar) or own.allowed_token_ids is not None or self.num_output < own.min_tokens
        )

    @property
    def has_only_penalties(self) -> bool:
        """True without masks and biases."""
        return not (self.has_masks or self.constraints.logit_bias)


def pack_logits_states(logits_states: Sequence[LogitsState | None]) -> Tensor:
    """Serialize the states of a message's requests as uint8; the result is empty if no request is constrained."""
    constrained = {index: _fields(state) for index, state in enumerate(logits_states) if state is not None}
    if not constrained:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(msgpack.packb(constrained, default=_fields)), dtype=torch.uint8)


def unpack_logits_states(packed_U: Tensor) -> dict[int, LogitsState]:
    """Return the constrained requests by their index in the message."""
    if not packed_U.numel():
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
