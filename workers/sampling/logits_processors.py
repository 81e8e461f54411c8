"""Logits processors: penalties, logit bias, bad words, allowed token ids and minimum length.

Drafter and verifier share this definition. It is exact along each path of a tree: the tokens between the root and a row
count as output for that row. The processors run before temperature, in the order of vLLM's v1 sampler (x is a row of
logits):

    0. grammar         x[t] = -inf for every t that the text's grammar forbids
    1. allowed ids     x[t] = -inf for every other t
    2. bad words       x[t] = -inf if t would complete one
    3. min_tokens      x[t] = -inf for end tokens while there are fewer output tokens
    4. logit bias      x[t] += bias[t]
    5. repetition      x[t] = x[t] / r if x[t] > 0 else x[t] * r, for every t in prompt or output
    6. frequency       x[t] -= f * (occurrences of t in the output)
    7. presence        x[t] -= p, for every t in the output

A mask (1, 2, 3) that would exclude the whole vocabulary is not applied to that row, so every row has a token. For a
reduced draft vocabulary this means that allowed ids outside it leave the draft's logits unchanged; the verifier then
rejects the draft. A grammar always holds, and the other masks apply within it (`workers.sampling.grammar_masks`).

`workers.sampling.logits_edits` plans the edits.

Legend: B requests, R rows, W columns, C distinct tokens of requests, E entries of rows that are edited, X values per
entry, P tokens on paths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from workers.sampling.grammar_masks import GrammarMasks, apply_masks
from workers.sampling.logits_edits import UNSEEN, Columns, ConstrainedRow, EditEntries, Vocabulary, plan_edits
from workers.sampling.logits_state import LogitsState
from workers.transfer import to_device


def constrain(
    logits_RW: Tensor,
    rows: Sequence[ConstrainedRow],
    columns: Columns,
    masks: GrammarMasks | None = None,
    *,
    in_place: bool = False,
) -> Tensor:
    """Return float32 logits with the edits of `rows` applied, or the argument itself without rows.

    Each row may occur once. Rows with the same LogitsState object share its planning. The edits are planned on the host
    and copied to the logits' device at once, without synchronizing. masks: those of the rows with a grammar. in_place:
    the argument, contiguous and float32, may be edited instead of a copy.
    """
    if not rows:
        return logits_RW
    allowed, forbidden, biased, penalized, on_path_P = plan_edits(rows, columns, logits_RW.device)
    x_RW = logits_RW.to(torch.float32, copy=not in_place, memory_format=torch.contiguous_format)
    flat, width = x_RW.view(-1), x_RW.shape[1]
    if masks is not None:
        apply_masks(x_RW, masks)
    if allowed is not None:
        place_E = allowed.place_E(width)
        kept_E = flat.index_select(0, place_E)
        x_RW.index_fill_(0, allowed.row_Q, -torch.inf)
        flat.index_copy_(0, place_E, kept_E)
    if forbidden is not None:
        flat.index_fill_(0, forbidden.place_E(width), -torch.inf)
    if biased is not None:
        place_E = biased.place_E(width)
        flat.index_copy_(0, place_E, flat.index_select(0, place_E) + biased.value_XE[0])
    if penalized is not None:
        place_E = penalized.place_E(width)
        flat.index_copy_(0, place_E, _penalize(flat.index_select(0, place_E), penalized, on_path_P))
    return x_RW


def write_token_counts(count_BW: Tensor, logits_states: Mapping[int, LogitsState], columns: Columns) -> None:
    """Write each request's token counts at the root of its tree, for every column, as `penalize` reads them."""
    count_BW.fill_(UNSEEN)
    vocabulary, places, counts = Vocabulary(columns), [], []
    for b, logits_state in logits_states.items():
        found = vocabulary.columns_of(logits_state.counts.id_C)
        places.append(b * count_BW.shape[1] + found.column_L.astype(np.int64))
        counts.append(logits_state.counts.count_C[found.is_here_I])
    if places:
        both = torch.from_numpy(np.stack([np.concatenate(places), np.concatenate(counts)]))
        place_C, count_C = to_device(both, count_BW.device)
        count_BW.view(-1).index_copy_(0, place_C, count_C.to(count_BW.dtype))


def penalize(
    x: Tensor, count: Tensor, on_path: Tensor | None, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Apply the penalties to logits.

    count: of each token at the root; 0 = only in the prompt, -1 = absent. on_path: each token's count on the path to
    its row; None = all are 0, and no token is absent.
    """
    repeated = torch.where(x > 0, x / repetition, x * repetition)
    if on_path is not None:
        repeated = torch.where((count != UNSEEN) | (on_path > 0), repeated, x)
        count = count.clamp(min=0) + on_path
    return repeated - frequency * count - presence * (count > 0)


def _penalize(x_E: Tensor, entries: EditEntries, on_path_P: Tensor) -> Tensor:
    """on_path_P: for each token of each row's path, the index of its entry."""
    path_E = None
    if len(on_path_P):
        path_E = torch.zeros_like(x_E).index_add_(0, on_path_P, torch.ones_like(on_path_P, dtype=x_E.dtype))
    return penalize(x_E, entries.value_XE[0], path_E, *entries.setting_XE)
