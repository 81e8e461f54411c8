"""Planning of logits edits: which entries of a batch of logits change, computed on the host and copied at once.

A list of columns applies to several rows of a request, so it is computed once and expanded to rows on the device.
`workers.sampling.logits_processors` defines the edits and their order.

Legend: R rows, W columns, V target vocabulary, C distinct tokens of a request, I token ids, L columns in lists, Q pairs
of a list and a row, E entries that they cover, X values per item, P tokens on paths, N tokens that occur only on paths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.sampling.logits_state import LogitsState
from workers.transfer import to_device

UNSEEN = -1
"""Count of a token that occurs neither in a request's prompt nor in its output at the root."""


class ConstrainedRow(NamedTuple):
    """A row of logits to edit."""

    row: int
    logits_state: LogitsState
    path: Sequence[int]  # tokens between the root and this row


class Columns(NamedTuple):
    """The target tokens of the logits' columns: ids [start, start + width), or a reduced draft vocabulary.

    A range is a shard of a vocabulary that no request can mask completely. Keep `column_of_V` on the host, where the
    edits are planned; otherwise every call copies it.
    """

    start: int
    width: int
    column_of_V: Tensor | None = None  # int64 [target vocabulary], -1 = not in the draft vocabulary


class EditEntries(NamedTuple):
    """The edits of one kind on the logits' device; each entry (row, column) occurs once."""

    row_Q: Tensor  # int64
    row_E: Tensor  # int64
    column_E: Tensor  # int64
    value_XE: Tensor  # float32, of the column in its list
    setting_XE: Tensor  # float32, of the list

    def place_E(self, width: int) -> Tensor:
        """Return each entry's index into the flattened logits of `width` columns."""
        return self.row_E * width + self.column_E


class LogitsEditPlan(NamedTuple):
    """All edits of a batch, on the logits' device; None for kinds without edits."""

    allowed: EditEntries | None  # every other entry of their rows is masked
    forbidden: EditEntries | None
    biased: EditEntries | None  # values: the bias
    penalized: EditEntries | None  # values: counts at the root; settings: the penalties
    on_path_P: Tensor  # int64: for each token of each row's path, its entry of `penalized`


def plan_edits(rows: Sequence[ConstrainedRow], columns: Columns, device: torch.device) -> LogitsEditPlan:
    """Plan the edits of `rows`. Rows with the same LogitsState object share its planning. Does not synchronize."""
    plan = _PlanBuilder(_EditLists(), _EditLists(), _EditLists(), _EditLists(), [])
    vocabulary = Vocabulary(columns)
    of_request: dict[int, list[ConstrainedRow]] = defaultdict(list)
    for row in rows:
        of_request[id(row.logits_state)].append(row)
    for some in of_request.values():
        _plan_masks(plan, some, vocabulary)
        _plan_biases(plan, some, vocabulary)
        _plan_penalties(plan, some, vocabulary)
    return plan.to(device)


class _EditLists:
    """Edits of one kind: lists of columns with values, each applied to several rows."""

    def __init__(self) -> None:
        self.num_entries = 0
        self._num_listed = 0
        self._lists: list[np.ndarray] = []  # [1 + X, l]: column, values
        self._pairs: list[
            np.ndarray
        ] = []  # [3 + X, q]: row, length of its list, offset from entries to list items, settings

    @property
    def is_empty(self) -> bool:
        return not self._pairs

    def add(self, rows: Sequence[int], list_XL: np.ndarray, settings: Sequence[float] = ()) -> np.ndarray:
        """Apply one list of (column, values ...) to `rows`; return the index of each row's first entry [rows]."""
        length = list_XL.shape[1]
        first = self.num_entries + length * np.arange(len(rows))
        pairs = np.empty((3 + len(settings), len(rows)))
        pairs[0], pairs[1], pairs[2] = rows, length, self._num_listed - first
        pairs[3:] = np.array(settings)[:, None]
        self._lists.append(list_XL)
        self._pairs.append(pairs)
        self._num_listed += length
        self.num_entries += length * len(rows)
        return first

    def arrays(self) -> list[np.ndarray]:
        """Return all pairs [3 + X, Q] and lists [1 + X, L]."""
        return [np.concatenate(self._pairs, 1), np.concatenate(self._lists, 1)]


class _PlanBuilder(NamedTuple):
    allowed: _EditLists
    forbidden: _EditLists
    biased: _EditLists
    penalized: _EditLists
    on_path: list[np.ndarray]  # entries of `penalized`, one per token of a path

    def to(self, device: torch.device) -> LogitsEditPlan:
        # A list is sent even if none of its tokens has a column here.
        kinds = [edits for edits in self[:4] if not edits.is_empty]
        arrays = [np.concatenate([np.empty(0), *self.on_path])]
        for edits in kinds:
            arrays += edits.arrays()
        # One buffer, one copy. Columns, rows and counts are exact in float64.
        flat = to_device(np.concatenate([array.reshape(-1) for array in arrays]), device)
        on_path_P, *parts = (
            part.view(array.shape) for part, array in zip(flat.split([a.size for a in arrays]), arrays, strict=True)
        )
        expanded = (
            _expand(pairs_XQ, list_XL, edits.num_entries)
            for edits, pairs_XQ, list_XL in zip(kinds, parts[::2], parts[1::2], strict=True)
        )
        allowed, forbidden, biased, penalized = (None if edits.is_empty else next(expanded) for edits in self[:4])
        return LogitsEditPlan(allowed, forbidden, biased, penalized, on_path_P.long())


def _expand(pairs_XQ: Tensor, list_XL: Tensor, num_entries: int) -> EditEntries:
    row_Q, length_Q, shift_Q = pairs_XQ[:3].long()
    pair_E = torch.repeat_interleave(length_Q, output_size=num_entries)
    item_E = torch.arange(num_entries, device=pair_E.device) + shift_Q[pair_E]
    return EditEntries(
        row_Q=row_Q,
        row_E=row_Q[pair_E],
        column_E=list_XL[0].long()[item_E],
        value_XE=list_XL[1:].float()[:, item_E],
        setting_XE=pairs_XQ[3:].float()[:, pair_E],
    )


def _plan_masks(plan: _PlanBuilder, rows: list[ConstrainedRow], vocabulary: Vocabulary) -> None:
    """Plan the allowed ids, then the masked ids, computed once for all rows whose paths end alike."""
    logits_state = rows[0].logits_state
    constraints = logits_state.constraints
    if not logits_state.has_masks or constraints.grammar:  # a grammar's masks include these
        return
    allowed: set[int] | None = None
    if constraints.allowed_token_ids is not None:
        allowed = vocabulary.known(constraints.allowed_token_ids) or None
    if allowed is not None:
        plan.allowed.add([row.row for row in rows], vocabulary.columns_of(_ids(allowed)).column_L[None])
    rows_of: dict[tuple[frozenset[int], bool], list[int]] = defaultdict(list)
    for row in rows:
        completing = frozenset(completed_by(logits_state, row.path))
        rows_of[completing, logits_state.num_output + len(row.path) < constraints.min_tokens].append(row.row)
    for (completing, is_too_short), numbers in rows_of.items():
        forbidden: set[int] = set()
        for mask in (completing, logits_state.end_token_ids if is_too_short else ()):
            more = forbidden | vocabulary.known(mask)
            if vocabulary.has_more_than(more, allowed):
                forbidden = more
        if forbidden:
            plan.forbidden.add(numbers, vocabulary.columns_of(_ids(forbidden)).column_L[None])


def completed_by(logits_state: LogitsState, path: Sequence[int]) -> set[int]:
    """Return the tokens that would complete a bad word behind a path below the root."""
    past = [*logits_state.tail, *path]
    words = logits_state.constraints.bad_words
    return {word[-1] for word in words if len(word) == 1 or past[1 - len(word) :] == word[:-1]}


def _plan_biases(plan: _PlanBuilder, rows: list[ConstrainedRow], vocabulary: Vocabulary) -> None:
    bias = rows[0].logits_state.constraints.logit_bias
    if bias:
        column_L, is_here_I = vocabulary.columns_of(_ids(bias))
        value_L = np.fromiter(bias.values(), np.float64, len(bias))[is_here_I]
        plan.biased.add([row.row for row in rows], np.stack([column_L, value_L]))


def _plan_penalties(plan: _PlanBuilder, rows: list[ConstrainedRow], vocabulary: Vocabulary) -> None:
    """Plan one list per request: the columns of its tokens with their counts at the root, then those of tokens that
    occur only on its paths."""
    constraints = rows[0].logits_state.constraints
    if not constraints.has_penalties:
        return
    counts = rows[0].logits_state.counts
    known = vocabulary.columns_of(counts.id_C)
    columns, count_C = [known.column_L], counts.count_C[known.is_here_I]
    id_I = _ids([token for row in rows for token in row.path])
    if len(id_I):
        on_path = vocabulary.columns_of(id_I)
        seen_C, id_I = counts.id_C[known.is_here_I], id_I[on_path.is_here_I]
        item_I = seen_C.searchsorted(id_I)
        is_new_I = np.append(seen_C, -1)[item_I] != id_I
        new_N, number_I = np.unique(id_I[is_new_I], return_inverse=True)
        item_I[is_new_I] = len(seen_C) + number_I
        columns.append(vocabulary.columns_of(new_N).column_L)
    column_L = np.concatenate(columns)
    count_L = np.full(len(column_L), UNSEEN)
    count_L[: len(count_C)] = count_C
    first_Q = plan.penalized.add([row.row for row in rows], np.stack([column_L, count_L]), constraints.penalties)
    if len(id_I):
        first_I = first_Q.repeat([len(row.path) for row in rows])
        plan.on_path.append(first_I[on_path.is_here_I] + item_I)


class ColumnLookup(NamedTuple):
    """The columns of some token ids."""

    column_L: np.ndarray  # int64, of the ids that have a column here
    is_here_I: np.ndarray  # bool, True for the ids that have a column


class Vocabulary:
    """Maps tokens to `Columns`, on the host."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._column_of_V = None if columns.column_of_V is None else columns.column_of_V.cpu().numpy()

    def columns_of(self, id_I: np.ndarray) -> ColumnLookup:
        """Look up columns. Ids of other shards, and ids outside a reduced vocabulary, have none."""
        if self._column_of_V is None:
            column_I = id_I - self._columns.start
            is_here_I = (column_I >= 0) & (column_I < self._columns.width)
        else:
            is_id_I = id_I < len(self._column_of_V)  # a checkpoint may name end tokens beyond its vocabulary
            column_I = np.where(is_id_I, self._column_of_V[np.where(is_id_I, id_I, 0)], -1)
            is_here_I = column_I >= 0
        return ColumnLookup(column_I[is_here_I], is_here_I)

    def known(self, ids: Collection[int]) -> set[int]:
        """Return the ids that the vocabulary has in any shard."""
        if self._column_of_V is None:
            return set(ids)
        id_I = _ids(ids)
        return set(id_I[self.columns_of(id_I).is_here_I].tolist())

    def has_more_than(self, forbidden: set[int], allowed: set[int] | None) -> bool:
        """Return True if a token remains. The result is the same on every shard."""
        if allowed is not None:
            return not allowed <= forbidden
        return self._column_of_V is None or len(forbidden) < self._columns.width


def _ids(ids: Collection[int]) -> np.ndarray:
    return np.fromiter(ids, np.int64, len(ids))
