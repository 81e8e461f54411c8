"""Sample children without replacement, from exactly the distribution that travels with the tree.

The `rejection` rule tests a sampled child against the distribution it was drawn from, so both sides must know it
exactly. `quantize` turns q into sparse integer weights; `draw_children` draws from these integers and nothing else.
Everything that decides whether a child exists (`num_children`, `expected_survival`) looks at q and the temperature,
never at the tokens drawn.

At a hybrid node (Hu et al. 2502.18779) the first children are fixed: they are the most likely tokens, and q is zeroed
on them before the others are drawn. Legend: F frontier nodes, V draft vocabulary, S support columns, K children.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafter.tree.frontier import DraftVocabulary
from workers.sampling.philox import Stream, below, words64
from workers.transfer import to_host
from workers.types import NodeKind

SUPPORT = 512
"""Maximum number of tokens in a draft distribution: acceptance loses at most the draft's mass beyond them. Tokens whose
weight rounds to 0 are dropped too, so a peaked distribution is short (80 tokens at temperature 0.5). On the bundled
head the first child survives with 0.80, 0.68, 0.48, 0.31 at temperatures 0.5, 1, 1.5, 2 if 64 tokens are kept, with
0.80, 0.71, 0.61, 0.58 if 512 are, and with 0.80, 0.71, 0.65, 0.69 if all 2048 are."""

MAX_WEIGHT = 65535  # 16 bits on the wire
MAX_LOG_RATIO = math.log(2 * MAX_WEIGHT)  # further below the likeliest token, a probability rounds to weight 0

FIRST_FLOOR, SURPRISE, SECOND_FLOOR, SECOND_SLOPE, DECAY = 0.58, 0.85, 0.12, 0.5, 0.72
WARM, COLDEST = 0.7, 0.4
"""See `expected_survival`."""


class Support(NamedTuple):
    """F draft distributions: q = weight / sum of the row's weights, exactly.

    Example: id 9 three times as likely as id 4, id 7 kept but impossible: id [9, 4, 7], weight [65535, 21845, 0].
    """

    id_FS: np.ndarray  # int64 target ids
    weight_FS: np.ndarray  # int64, 0 .. MAX_WEIGHT; descending, ties by lower id; 0 = not in the support


class DrawnChildren(NamedTuple):
    """Children of F nodes, in the order in which verification tests them."""

    column_FK: np.ndarray  # int64, column of the child in Support; -1 = no such child
    kind_FK: np.ndarray  # uint8 NodeKind: DETERMINISTIC first, then SAMPLED


def quantize(log_q_FV: Tensor, vocab: DraftVocabulary, size: int = SUPPORT) -> Support:
    """Keep the `size` most likely tokens of each row; the likeliest has weight MAX_WEIGHT.

    log_q_FV: log-probabilities up to a constant per row, -inf where masked. A row that is masked everywhere, or NaN,
    has no support. Equal input gives equal output, so tensor-parallel drafter ranks agree.
    """
    if log_q_FV.device.type == "cpu":
        token = torch.arange(vocab.size) if vocab.target_ids is None else vocab.target_ids
        log_q_FS, id_FS = log_q_FV.numpy(), np.broadcast_to(token.numpy(), log_q_FV.shape)
    else:  # copy no more than can be needed
        best = log_q_FV.topk(min(size, log_q_FV.shape[-1]), dim=-1)
        token = best.indices if vocab.target_ids is None else vocab.target_ids[best.indices]
        log_q_FS, id_FS = to_host(best.values, token)
    # Peaked distributions keep few tokens: the rest rounds to 0 and is neither sorted, drawn from nor sent.
    most_F1 = log_q_FS.max(-1, keepdims=True)
    entry = (log_q_FS > most_F1 - MAX_LOG_RATIO).nonzero()
    ratio = np.exp(log_q_FS[entry].astype(np.float64) - most_F1[entry[0], 0])
    # One sort of integers that hold both orders the tokens by weight, then id.
    key = (MAX_WEIGHT - np.rint(ratio * MAX_WEIGHT).astype(np.int64) << 32) + id_FS[entry]
    count_F = np.bincount(entry[0], minlength=len(log_q_FS))
    key_FS = np.full((len(count_F), count_F.max(initial=1)), MAX_WEIGHT << 32)
    key_FS[np.arange(key_FS.shape[1]) < count_F[:, None]] = key
    key_FS.sort(axis=-1)
    key_FS = key_FS[:, :size]
    return Support(key_FS & 0xFFFFFFFF, MAX_WEIGHT - (key_FS >> 32))


def num_children(support: Support) -> np.ndarray:
    """Return the number of children that each node can have, fixed and drawn together, int64 [F]."""
    return (support.weight_FS > 0).sum(-1)


def mask_fixed(support: Support, num_fixed_F: np.ndarray) -> np.ndarray:
    """Return the weights that children are drawn from, int64 [F, S]: zero on the fixed ones. These go on the wire."""
    return np.where(np.arange(support.weight_FS.shape[-1]) < num_fixed_F[:, None], 0, support.weight_FS)


class DrawBits(NamedTuple):
    """64 random bits per child, keyed on (seed, position of this step's root, row of the node, child index).

    Adding children to a node therefore does not change the earlier ones.
    """

    high_FK: np.ndarray  # int64 in [0, 2^32)
    low_FK: np.ndarray

    @staticmethod
    def of(seed: np.ndarray, root_position: np.ndarray, row: np.ndarray, max_children: int) -> DrawBits:
        """Compute the bits from int64 arrays whose shapes broadcast; children become the last axis."""
        child_K = np.arange(max_children)
        high, low = words64(seed[..., None], root_position[..., None], row[..., None], child_K, Stream.DRAFT)
        return DrawBits(high, low)


def draw_children(support: Support, count_F: np.ndarray, num_fixed_F: np.ndarray, bits: DrawBits) -> DrawnChildren:
    """Draw `count` children per node: the `num_fixed` most likely, then draws without replacement from the rest.

    A node gets fewer if its weight runs out. Counts are int64 [F] and at most K, the number of children with bits.
    """
    row_F, ordinal = np.arange(len(count_F)), np.arange(bits.high_FK.shape[1])
    left_FS = mask_fixed(support, num_fixed_F)
    total_F = left_FS.sum(-1)
    column_FK = np.where(ordinal < num_fixed_F[:, None], ordinal, -1)
    for k in range(int(count_F.max(initial=0))):
        drawn_F = below(total_F, bits.high_FK[:, k], bits.low_FK[:, k])
        column_F = (left_FS.cumsum(-1) > drawn_F[:, None]).argmax(-1)
        # The weight is 0 where child k is fixed, or no weight is left.
        weight_F = np.where(k < num_fixed_F, 0, left_FS[row_F, column_F])
        total_F = total_F - weight_F
        left_FS[row_F, column_F] -= weight_F
        column_FK[:, k] = np.where(weight_F > 0, column_F, column_FK[:, k])
    exists_FK = ordinal < np.minimum(count_F, num_children(support))[:, None]
    kind_FK = np.full(column_FK.shape, NodeKind.SAMPLED.value, dtype=np.uint8)
    kind_FK[ordinal < num_fixed_F[:, None]] = NodeKind.DETERMINISTIC.value
    return DrawnChildren(np.where(exists_FK, column_FK, -1), kind_FK)


def expected_survival(support: Support, temperature_F: np.ndarray, max_children: int) -> np.ndarray:
    """Return the chance, float32 [F, K], that each drawn child is the accepted one, before any is drawn.

    It never rises with k.

    The first child survives with f + (1 - f) exp(-0.85 H / c), H the entropy of q in nats and f = 0.58 sqrt(c), where
    c = T / 0.7, clamped to 0.4 .. 1: at a low temperature draft and target are both sharp, but so is the draft's error,
    and the same entropy promises less. The k-th child after it takes (0.12 + 0.5 m) 0.72^(k-1) of the remaining chance,
    where m is q's largest probability.

    The formula is fitted on the bundled EAGLE-3 head. For T >= 0.7 the data are from recursive rejection, four levels
    of chains along the target's own samples, 816 nodes at each of the temperatures 0.5, 1, 1.5 and 2: survival of the
    first child by H, and the second's share of the rest by m:

        H          0.05   0.20   0.44   0.78   1.24   1.75   2.5    3.5    4.5    5.6
        measured   0.94   0.90   0.86   0.79   0.70   0.62   0.63   0.59   0.60   0.58
        formula    0.98   0.93   0.87   0.80   0.73   0.68   0.63   0.60   0.59   0.58

        m          0.05   0.15   0.27   0.41   0.54   0.67   0.75   0.90
        measured   0.12   0.25   0.23   0.37   0.28   0.43   0.54   0.62
        formula    0.15   0.20   0.26   0.33   0.39   0.46   0.50   0.57

    For T < 0.7 they are from the accepted paths of traversal through trees of 16 nodes, 2,800 nodes per temperature:

        H          0.01   0.05   0.20   0.45   0.8    1.2    2.0    3
        T = 0.3    0.95   0.89   0.73   0.65   0.57   0.49   0.26   0.37
        formula    0.99   0.94   0.81   0.64   0.52   0.44   0.40   0.38
        T = 0.5    0.99   0.96   0.92   0.81   0.76   0.59   0.61   0.56
        formula    1.00   0.97   0.90   0.79   0.69   0.61   0.55   0.51
    """
    weight_FS = support.weight_FS
    total_F = np.maximum(weight_FS.sum(-1), 1)
    # H = log W - (sum of w log w) / W for integer weights w of sum W.
    entropy_F = np.log(total_F) - (weight_FS * np.log(np.maximum(weight_FS, 1))).sum(-1) / total_F
    warmth_F = np.minimum(np.maximum(temperature_F / WARM, COLDEST), 1)
    floor_F = FIRST_FLOOR * np.sqrt(warmth_F)
    second_F = SECOND_FLOOR + SECOND_SLOPE * weight_FS[:, 0] / total_F
    ordinal = np.arange(max_children)
    share_FK = second_F[:, None] * DECAY ** (ordinal - 1)
    share_FK[:, 0] = floor_F + (1 - floor_F) * np.exp(-SURPRISE * entropy_F / warmth_F)
    share_FK[:, 1:] *= (1 - share_FK[:, :-1]).cumprod(axis=-1)
    return np.where(ordinal < num_children(support)[:, None], share_FK, 0).astype(np.float32)
