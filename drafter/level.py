"""What passes between a growing tree and the draft model that reads it, level by level.

Legend: F frontier nodes, K candidates, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor


class Level(NamedTuple):
    """Nodes to run through the draft model, sorted by request, then row. Host arrays [F]."""

    depth: int
    request_F: np.ndarray
    row_F: np.ndarray
    parent_row_F: np.ndarray
    token_F: np.ndarray
    ancestors_F: np.ndarray  # int64 bitmask


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftVocabulary:
    """What the draft's logits mean: `target_ids` [V] int64, or None when draft and target ids are the same."""

    target_size: int
    target_ids: Tensor | None = None


class Candidates(NamedTuple):
    """A draft that knows only a few tokens per node, as n-gram lookup does: host arrays [F, K], best first."""

    token_FK: np.ndarray  # int64 target ids; anything where log_q is -inf
    log_q_FK: np.ndarray  # float32, log of the tokens' draft probabilities; -inf = no such candidate
