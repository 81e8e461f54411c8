"""From draft distributions to candidate children: which tokens they are, and how likely each is to survive.

    coupled        the tokens of largest log q + G, where G is the target's own noise at that position (none at
                   temperature 0); weight = softmax((log q + G) / tau), see `confidence_tau`
    target-only    the most likely tokens; weight = q, the chance that a target like the draft draws the child
    sampled        drawn later, once their number is known; weight = the i-th draw's expected survival, given q and T

Probabilities and noise live on the logits' device; the result is on the host. N-gram candidates never leave the host.
Legend: F frontier nodes, K children, V draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafter.tree.frontier import DraftVocabulary, NgramCandidates
from drafter.tree.sample import Support, expected_survival, quantize
from workers.kernels.select import TORCH, Kernels
from workers.sampling.philox import gumbel_at
from workers.sampling.sampler import process_logits_static
from workers.settings import Rule
from workers.transfer import to_device, to_host
from workers.types import NodeKind, SamplingBatch

CONFIDENCE_TAU, COLD_TAU = 0.6, 0.45
"""See `confidence_tau`."""


class ChildScores(NamedTuple):
    """The candidate children of F nodes, best first; host arrays. Rows of sampled rules have no tokens yet."""

    token_FK: np.ndarray  # int64 target ids
    weight_FK: np.ndarray  # float32: chance to survive if the node does; 0 = no such candidate
    prob_FK: np.ndarray  # float32 q
    top_prob_F: np.ndarray  # float32 max q
    kind_F: np.ndarray  # uint8 NodeKind of the children
    support: Support | None  # of the rows whose rule is sampled, in order

    def rows(self, is_row_F: np.ndarray) -> ChildScores:
        """Select nodes by mask."""
        support = self.support
        if support is not None:
            support = Support(*(array[is_row_F[self.kind_F == NodeKind.SAMPLED.value]] for array in support))
        token_FK, weight_FK, prob_FK, top_prob_F, kind_F = (array[is_row_F] for array in self[:5])
        return ChildScores(token_FK, weight_FK, prob_FK, top_prob_F, kind_F, support)

    def without_children(self, is_dead_F: np.ndarray) -> ChildScores:
        """Return the scores with no candidates at some nodes."""
        if not is_dead_F.any():
            return self
        support = self.support
        if support is not None:
            is_dead = is_dead_F[self.kind_F == NodeKind.SAMPLED.value]
            support = support._replace(weight_FS=np.where(is_dead[:, None], 0, support.weight_FS))
        return self._replace(weight_FK=np.where(is_dead_F[:, None], np.float32(0), self.weight_FK), support=support)


def score(
    draft: Tensor | NgramCandidates,
    params: SamplingBatch,
    rule_F: np.ndarray,
    index_F: np.ndarray,
    num_children: int,
    vocab: DraftVocabulary,
    kernels: Kernels = TORCH,
    *,
    has_truncation: bool = True,
) -> ChildScores:
    """Score the candidates of each node, at most num_children of them.

    Args:
        draft: (constrained) logits [F, V] or n-gram candidates.
        params: one entry per node, on the host: reading it from the device would wait for the logits.
        index_F: index of the token that the children stand for. Noise is keyed on target ids, so a reduced draft
            vocabulary sees the noise that the verifier will see.
        has_truncation: some node may have min-p, top-k or top-p.
    """
    kind_F = child_kinds(rule_F, params.temperature_B.numpy() > 0)
    if isinstance(draft, NgramCandidates):
        return _score_candidates(draft, params, kind_F, index_F, num_children)
    device = draft.device
    log_q = process_logits_static(
        draft,
        params.to(device),
        has_min_p=has_truncation,
        has_top=has_truncation,
        threshold=kernels.truncation_threshold,
    ).log_softmax(-1)
    is_sampled_F = kind_F == NodeKind.SAMPLED.value
    if is_sampled_F.all():
        return _score_sampled(log_q, params.temperature_B, num_children, vocab)
    noisy_F = kind_F == NodeKind.COUPLED.value
    scored: Tensor = log_q
    if noisy_F.any():
        scored = log_q + vocab.noise.rows(params.seed_B.tolist(), index_F.tolist(), device)
        if not noisy_F.all():
            scored = torch.where(to_device(noisy_F, device)[:, None], scored, log_q)
    tau_F = to_device(confidence_tau(params.temperature_B.numpy(), rule_F == Rule.COUPLED.value), device)
    top = kernels.top_k(scored, num_children, tau_F)
    token_FK, weight_FK, prob_FK, top_prob_F = to_host(
        top.index_RK if vocab.target_ids is None else vocab.target_ids[top.index_RK],
        torch.exp(top.value_RK / tau_F[:, None] - top.lse_R[:, None]),
        log_q.gather(-1, top.index_RK).exp(),
        log_q.amax(-1).exp(),
    )
    support = None
    if is_sampled_F.any():
        rows = torch.from_numpy(np.flatnonzero(is_sampled_F))
        sampled = _score_sampled(log_q[to_device(rows, device)], params.temperature_B[rows], weight_FK.shape[1], vocab)
        support, weight_FK[is_sampled_F] = sampled.support, sampled.weight_FK
    return ChildScores(token_FK, weight_FK, prob_FK, top_prob_F, kind_F, support)


def confidence_tau(temperature_F: np.ndarray, is_coupled_F: np.ndarray) -> np.ndarray:
    """Return tau, float32 [F]: how far log q is from log p, in units of the Gumbel noise.

    A coupled child's weight, softmax((log q + G) / tau), is the chance that it is the target's draw if the difference
    is noise of that scale. Without noise the weight of a child is q itself.

    Logits are divided by the temperature, and so is the difference between the draft's and the target's. On the bundled
    EAGLE-3 head, trees of 16 nodes accept most with tau = 1.5, 0.9 and 0.7 at temperatures 0.3, 0.5 and 0.7 (5.22, 4.85
    and 4.44 tokens a step; with 0.6 they are up to a level deeper and accept 4.98, 4.77 and 4.44), with 0.6 at 1 and
    1.5, and with 0.5 to 0.6 at 0, where logits are not divided.
    """
    is_hot_F = temperature_F > 0
    tau_F = np.maximum(COLD_TAU / np.where(is_hot_F, temperature_F, 1), CONFIDENCE_TAU)
    return np.where(is_hot_F & ~is_coupled_F, 1, tau_F).astype(np.float32)


def _score_sampled(log_q: Tensor, temperature_F: Tensor, num_children: int, vocab: DraftVocabulary) -> ChildScores:
    """Score nodes whose children are not drawn yet: they have weights, but no tokens."""
    support = quantize(log_q, vocab)
    size = (len(log_q), min(num_children, log_q.shape[-1]))
    (top_prob_F,) = to_host(log_q.amax(-1).exp())
    return ChildScores(
        token_FK=np.zeros(size, dtype=np.int64),
        weight_FK=expected_survival(support, temperature_F.numpy(), size[1]),
        prob_FK=np.zeros(size, dtype=np.float32),
        top_prob_F=top_prob_F,
        kind_F=np.full(size[0], NodeKind.SAMPLED.value, dtype=np.uint8),
        support=support,
    )


def child_kinds(rule_F: np.ndarray, is_hot_F: np.ndarray) -> np.ndarray:
    """Return the NodeKind, uint8 [F], of the children of nodes under these rules; hot means temperature > 0."""
    kind_F = np.full(len(rule_F), NodeKind.DETERMINISTIC.value, dtype=np.uint8)
    kind_F[(rule_F == Rule.COUPLED.value) & is_hot_F] = NodeKind.COUPLED.value
    kind_F[rule_F >= Rule.TRAVERSAL.value] = NodeKind.SAMPLED.value
    return kind_F


def _score_candidates(
    draft: NgramCandidates, params: SamplingBatch, kind_F: np.ndarray, index_F: np.ndarray, num_children: int
) -> ChildScores:
    log_q_FK = draft.log_q_FK
    scored_FK = log_q_FK
    noisy_F = kind_F == NodeKind.COUPLED.value
    if noisy_F.any():
        noise_FK = gumbel_at(params.seed_B.numpy()[:, None], index_F[:, None], draft.token_FK)
        scored_FK = np.where(noisy_F[:, None], log_q_FK + noise_FK, log_q_FK)
    order_FK = np.argsort(-scored_FK, axis=1, kind="stable")[:, :num_children]
    tau_F1 = np.where((params.temperature_B.numpy() > 0) & ~noisy_F, 1.0, CONFIDENCE_TAU)[:, None]
    weight_FK = np.exp((scored_FK - scored_FK.max(1, keepdims=True, initial=-1e30)) / tau_F1)
    # Tokens unknown to lookup hold the rest of the mass: the candidates share no more than their own probability.
    known_F1 = np.exp(log_q_FK).sum(1, keepdims=True)
    weight_FK *= known_F1 / np.maximum(weight_FK.sum(1, keepdims=True), 1e-30)
    prob_FK = np.exp(log_q_FK)
    return ChildScores(
        token_FK=np.take_along_axis(draft.token_FK, order_FK, axis=1),
        weight_FK=np.take_along_axis(weight_FK, order_FK, axis=1).astype(np.float32),
        prob_FK=np.take_along_axis(prob_FK, order_FK, axis=1),
        top_prob_F=prob_FK.max(1, initial=0.0),
        kind_F=kind_F,
        support=None,
    )
