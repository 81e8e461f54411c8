"""The masks of grammars on rows of logits: planned on the host, one bit per token, and expanded on the logits' device.

A grammar comes before all other masks. Those of the same request (allowed ids, bad words, min_tokens) are applied
within it, one after the other, and each only if a token remains. They are computed over the whole vocabulary, so all
shards and a reduced draft vocabulary agree with the target.

Legend: R rows, Q rows with a grammar, W columns, Y bytes of a row's mask, V target vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.sampling.grammar import Grammars, unpacked
from workers.sampling.logits_edits import Columns, ConstrainedRow, completed_by
from workers.transfer import to_device


class GrammarMasks(NamedTuple):
    """The tokens that each of Q rows may have."""

    row_Q: np.ndarray  # int64
    packed_QY: np.ndarray  # uint8, one bit per column, lowest first
    is_dead_Q: np.ndarray  # bool: none of these columns may follow, or the text has ended; the row is not masked

    def allowed(self, width: int) -> np.ndarray:
        """Return the masks as bool [Q, W], all false on dead rows."""
        allowed_QW = unpacked(self.packed_QY, width)
        return allowed_QW & ~self.is_dead_Q[:, None]


def grammar_masks(rows: Sequence[ConstrainedRow], columns: Columns, grammars: Grammars | None) -> GrammarMasks | None:
    """Return the masks of the rows whose request has a grammar."""
    of_request: dict[int, list[ConstrainedRow]] = defaultdict(list)
    for row in rows:
        if row.logits_state.constraints.grammar:
            of_request[id(row.logits_state)].append(row)
    if not of_request:
        return None
    assert grammars is not None, "this process has no grammars"
    packed, is_over = [], []
    for some in of_request.values():
        masks = grammars.masks(some[0].logits_state, [list(row.path) for row in some])
        packed.append(_narrowed(masks.packed_QY, some, grammars.table.vocab_size))
        is_over.append(masks.is_over_Q)
    whole_QY = np.concatenate(packed)
    packed_QY = _of_columns(whole_QY, columns, grammars.table.vocab_size)
    row_Q = np.array([row.row for some in of_request.values() for row in some], dtype=np.int64)
    # A shard may have none of the allowed tokens; all shards agree on what is dead.
    seen_QY = whole_QY if columns.column_of_V is None else packed_QY
    return GrammarMasks(row_Q, packed_QY, np.concatenate(is_over) | (seen_QY.max(axis=1, initial=0) == 0))


def apply_masks(x_RW: Tensor, masks: GrammarMasks) -> None:
    """Set forbidden tokens to -inf, in place. Dead rows keep their logits, so that no row is masked completely."""
    alive = np.flatnonzero(~masks.is_dead_Q)
    if not len(alive):
        return
    row_Q, width = to_device(masks.row_Q[alive], x_RW.device), x_RW.shape[1]
    x_RW.index_copy_(
        0, row_Q, x_RW[row_Q].masked_fill_(_forbidden(masks.packed_QY[alive], width, x_RW.device), -torch.inf)
    )


def _forbidden(packed_QY: np.ndarray, width: int, device: torch.device) -> Tensor:
    """Return bool [Q, W] on the device, to which the bits are copied."""
    if device.type == "cpu":  # faster than shifting bits
        return torch.from_numpy(~unpacked(packed_QY, width))
    bit_8 = torch.arange(8, dtype=torch.uint8, device=device)
    return ((to_device(packed_QY, device)[:, :, None] >> bit_8 & 1) == 0).view(len(packed_QY), -1)[:, :width]


def _narrowed(packed_QY: np.ndarray, rows: Sequence[ConstrainedRow], vocab_size: int) -> np.ndarray:
    """Apply the request's other masks, each unless it would leave no token."""
    state = rows[0].logits_state
    constraints = state.constraints
    is_too_short = state.num_output < constraints.min_tokens
    if constraints.allowed_token_ids is None and not constraints.bad_words and not is_too_short:
        return packed_QY
    allowed_QV = unpacked(packed_QY, vocab_size).copy()
    for allowed_V, row in zip(allowed_QV, rows, strict=True):
        if constraints.allowed_token_ids is not None:
            _keep(allowed_V, ~_members(constraints.allowed_token_ids, vocab_size))
        _keep(allowed_V, _members(completed_by(state, row.path), vocab_size))
        if state.num_output + len(row.path) < constraints.min_tokens:
            _keep(allowed_V, _members(state.end_token_ids, vocab_size))
    return np.packbits(allowed_QV, axis=1, bitorder="little")


def _keep(allowed_V: np.ndarray, forbidden_V: np.ndarray) -> None:
    if (allowed_V & ~forbidden_V).any():
        allowed_V &= ~forbidden_V


def _members(ids: Sequence[int] | set[int], vocab_size: int) -> np.ndarray:
    is_member_V = np.zeros(vocab_size, dtype=bool)
    is_member_V[[id for id in ids if id < vocab_size]] = True
    return is_member_V


def _of_columns(packed_QY: np.ndarray, columns: Columns, vocab_size: int) -> np.ndarray:
    """Return the bits of some columns of the whole vocabulary's masks."""
    start, width = columns.start, columns.width
    if columns.column_of_V is not None:
        column_of_V = columns.column_of_V.cpu().numpy()
        known = np.flatnonzero(column_of_V >= 0)
        known = known[known < vocab_size]
        allowed_QW = np.zeros((len(packed_QY), width), dtype=bool)
        allowed_QW[:, column_of_V[known]] = unpacked(packed_QY, vocab_size)[:, known]
        return np.packbits(allowed_QW, axis=1, bitorder="little")
    if start % 8 == 0 and width % 8 == 0:
        return packed_QY[:, start // 8 : (start + width) // 8]
    return np.packbits(unpacked(packed_QY, vocab_size)[:, start : start + width], axis=1, bitorder="little")
