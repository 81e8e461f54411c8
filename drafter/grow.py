"""Grows draft trees level by level for a batch of requests: `grow` is a pure function of draft logits.

One level:
  1. score     the draft's processed distribution q at every frontier node; children = the best of log q + G, where G
               is the target's own Gumbel noise for that position (the coupled rule; G = 0 at temperature 0)
  2. prune     nodes whose most likely token is below the min threshold get no children
  3. deal      the node's slots go to children by weight = softmax((log q + G) / tau), see `drafter.shape`
  4. next      children that hold slots, have room below and pass the path threshold are the next frontier

Probabilities and noise live on the logits' device; the tree's few integers live on the host, in numpy.
Legend: B requests, R rows of a request, F frontier nodes, K children, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafter.level import DraftVocabulary, Level
from drafter.prune import passes_min, passes_path
from drafter.shape import Shape
from workers.sampling import process_logits, shared_gumbel
from workers.types import DraftProbs, NodeKind, SamplingBatch, TreeBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowLimits:
    """What each request allows its tree, as host arrays [B]."""

    num_nodes_B: np.ndarray
    max_depth_B: np.ndarray
    min_prob_B: np.ndarray
    path_prob_B: np.ndarray


class Scores(NamedTuple):
    """The best children of F nodes, as host arrays; children in order of weight."""

    token_FK: np.ndarray  # target ids
    weight_FK: np.ndarray  # softmax((log q + G) / tau)
    prob_FK: np.ndarray  # q
    top_prob_F: np.ndarray  # max q


CONFIDENCE_TAU = 0.6
"""How far log q is from log p, in units of the Gumbel noise: the weight of a child, softmax((log q + G) / tau), is the
probability that it is the target's draw if the difference is Gumbel noise of that scale. On the bundled EAGLE-3 head
0.5 fits best at temperature 0 (best child: weight .86, accepted .85) and 0.7 at temperature 1 (.67 and .65); with 1.0
a tree of 16 nodes accepts 5.12 tokens a step instead of 5.47."""

Expand = Callable[[Level], Tensor]
"""Runs one level through the draft model and returns its logits [F, V]."""


def grow(
    root_logits_BV: Tensor,
    root_token_B: np.ndarray,
    root_index_B: np.ndarray,
    *,
    limits: GrowLimits,
    sampling: SamplingBatch,
    shape: Shape,
    expand: Expand,
    vocab: DraftVocabulary,
) -> tuple[TreeBatch, DraftProbs | None]:
    """One tree per request, and None: neither coupled nor deterministic drafts need draft probabilities.

    root_index_B: index of the token drawn at the root (the root's position + 1); a child of a depth-d node is drawn
    with index root_index + d. `expand` is called once per level below the root, only with nodes that need logits.
    """
    trees = _Trees(root_token_B, shape.root_slots(limits.num_nodes_B))
    frontier = trees.root_level(limits)
    logits_FV = root_logits_BV[torch.from_numpy(frontier.request_F)]
    while len(frontier.request_F):
        request_F = frontier.request_F
        params = sampling.rows(torch.from_numpy(request_F).to(logits_FV.device))
        index_F = root_index_B[request_F] + frontier.depth
        scores = score_children(logits_FV, params, index_F, shape.max_children, vocab)
        room_F = limits.max_depth_B[request_F] - frontier.depth
        slots_F = trees.slots[request_F, frontier.row_F] * passes_min(scores.top_prob_F, limits.min_prob_B[request_F])
        dealt = shape.deal(slots_F, trees.label[request_F, frontier.row_F], room_F, scores.weight_FK)
        frontier = trees.add_level(frontier, scores, dealt.slots_FK, dealt.label_FK, limits)
        if len(frontier.request_F):
            logits_FV = expand(frontier)
    return trees.pack(sampling), None


def score_children(
    logits_FV: Tensor, params: SamplingBatch, index_F: np.ndarray, num_children: int, vocab: DraftVocabulary
) -> Scores:
    """The best children of each node under log q + G. Noise is keyed on target ids, so a reduced draft vocabulary
    sees the noise the verifier will see."""
    processed = process_logits(logits_FV, params)
    log_q = processed.log_softmax(-1)
    score = log_q
    if bool((params.temperature_B > 0).any()):
        score = log_q + _noise(params, index_F, vocab)
    best = score.topk(min(num_children, score.shape[-1]), dim=-1)
    confidence = score / CONFIDENCE_TAU
    weight = torch.exp(best.values / CONFIDENCE_TAU - confidence.logsumexp(-1, keepdim=True))
    token = best.indices if vocab.target_ids is None else vocab.target_ids[best.indices]
    return Scores(
        token_FK=token.cpu().numpy(),
        weight_FK=weight.cpu().numpy(),
        prob_FK=log_q.gather(-1, best.indices).exp().cpu().numpy(),
        top_prob_F=log_q.amax(-1).exp().cpu().numpy(),
    )


def _noise(params: SamplingBatch, index_F: np.ndarray, vocab: DraftVocabulary) -> Tensor:
    """The target's noise for the draft's tokens [F, V], zero in temperature-0 rows."""
    index = torch.from_numpy(index_F).to(params.seed_B.device)
    noise = shared_gumbel(params.seed_B, index, 0, vocab.target_size)
    if vocab.target_ids is not None:
        noise = noise[:, vocab.target_ids]
    return noise * (params.temperature_B > 0)[:, None]


class _Trees:
    """The growing trees as host arrays [B, R]; row 0 is the root, rows are handed out breadth-first."""

    def __init__(self, root_token_B: np.ndarray, slots_B: np.ndarray) -> None:
        size = (len(root_token_B), 1 + int(slots_B.max(initial=0)))
        self.token = np.zeros(size, dtype=np.int32)
        self.parent = np.full(size, -1, dtype=np.int32)
        self.depth = np.zeros(size, dtype=np.int32)
        self.ancestors = np.ones(size, dtype=np.uint64)
        self.weight = np.ones(size, dtype=np.float32)
        self.path_prob = np.ones(size, dtype=np.float64)
        self.slots = np.zeros(size, dtype=np.int64)  # descendants the node may have
        self.label = np.zeros(size, dtype=np.int64)
        self.count = np.ones(len(root_token_B), dtype=np.int64)
        self.token[:, 0] = root_token_B
        self.slots[:, 0] = slots_B

    def root_level(self, limits: GrowLimits) -> Level:
        requests = np.arange(len(self.count))
        return self._level(0, requests, np.zeros_like(requests), limits)

    def add_level(
        self, frontier: Level, scores: Scores, slots_FK: np.ndarray, label_FK: np.ndarray, limits: GrowLimits
    ) -> Level:
        """Adds every child that was dealt a slot, ordered by parent row then rank; returns the next frontier."""
        f, k = np.nonzero(slots_FK)
        b, parent = frontier.request_F[f], frontier.row_F[f]
        added_B = np.bincount(b, minlength=len(self.count))
        first_of_b = np.cumsum(added_B) - added_B
        row = self.count[b] + np.arange(len(b)) - first_of_b[b]
        self.count += added_B
        depth = frontier.depth + 1
        self.token[b, row] = scores.token_FK[f, k]
        self.parent[b, row] = parent
        self.depth[b, row] = depth
        self.ancestors[b, row] = self.ancestors[b, parent] | np.left_shift(np.uint64(1), row.astype(np.uint64))
        self.weight[b, row] = self.weight[b, parent] * scores.weight_FK[f, k]
        self.path_prob[b, row] = self.path_prob[b, parent] * scores.prob_FK[f, k]
        self.slots[b, row] = slots_FK[f, k] - 1
        self.label[b, row] = label_FK[f, k]
        return self._level(depth, b, row, limits)

    def _level(self, depth: int, b: np.ndarray, row: np.ndarray, limits: GrowLimits) -> Level:
        go_on = (self.slots[b, row] > 0) & (depth < limits.max_depth_B[b])
        go_on &= passes_path(self.path_prob[b, row], limits.path_prob_B[b])
        b, row = b[go_on], row[go_on]
        return Level(
            depth=depth,
            request_F=b,
            row_F=row,
            parent_row_F=self.parent[b, row],
            token_F=self.token[b, row],
            ancestors_F=self.ancestors[b, row].view(np.int64),
        )

    def pack(self, sampling: SamplingBatch) -> TreeBatch:
        used = np.arange(self.token.shape[1]) < self.count[:, None]
        sampled_B = (sampling.temperature_B > 0).cpu().numpy()
        kind = np.where(sampled_B, NodeKind.COUPLED, NodeKind.DETERMINISTIC).astype(np.uint8)
        kind = np.repeat(kind[:, None], used.shape[1], axis=1)
        kind[:, 0] = NodeKind.ROOT
        return TreeBatch(
            offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(self.count)]).astype(np.int32)),
            token_N=torch.from_numpy(self.token[used]),
            parent_N=torch.from_numpy(self.parent[used]),
            depth_N=torch.from_numpy(self.depth[used]),
            ancestors_N=torch.from_numpy(self.ancestors[used].view(np.int64)),
            kind_N=torch.from_numpy(kind[used]),
            weight_N=torch.from_numpy(self.weight[used]),
        )
