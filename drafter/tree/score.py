"""From a draft distribution to a node's candidate children: which they are, and how likely each is to survive.

    coupled        the best of log q + G, G being the target's own noise for that position (none at temperature 0);
                   weight = softmax((log q + G) / tau), see `confidence_tau`
    target-only    the most likely tokens; weight = q, the chance that a target like the draft draws the child
    sampled        drawn later, once the number of children is settled; weight = what q and T say about the i-th draw

Probabilities and noise live on the logits' device; the result is on the host. N-gram candidates never leave it.
Legend: F frontier nodes, K children, V draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafter.tree.frontier import Candidates, DraftVocabulary
from drafter.tree.sample import Support, expected_survival, quantize
from workers.kernels.select import TORCH, Kernels
from workers.sampling.philox import gumbel_at
from workers.sampling.sampler import process_logits_static
from workers.transfer import to_device, to_host
from workers.types import NodeKind, Rule, SamplingBatch

CONFIDENCE_TAU, COLD_TAU = 0.6, 0.45
"""See `confidence_tau`."""


class Scores(NamedTuple):
    """The candidate children of F nodes, best first; host arrays. Rows of sampled rules have no tokens yet."""

    token_FK: np.ndarray  # int64 target ids
    weight_FK: np.ndarray  # float32: chance to survive, given that the node does; 0 = no such candidate
    prob_FK: np.ndarray  # float32 q
    top_prob_F: np.ndarray  # float32 max q
    kind_F: np.ndarray  # uint8 NodeKind of the children
    support: Support | None  # of the rows whose rule is sampled, in order

    def rows(self, is_row_F: np.ndarray) -> Scores:
        """The same for some of the nodes."""
        sampled_F = self.kind_F == NodeKind.SAMPLED.value
        support = self.support
        if support is not None:
            own = is_row_F[sampled_F]
            support = Support(support.id_FS[own], support.weight_FS[own])
        token_FK, weight_FK, prob_FK, top_prob_F, kind_F = (array[is_row_F] for array in self[:5])
        return Scores(token_FK, weight_FK, prob_FK, top_prob_F, kind_F, support)


class Best(NamedTuple):
    """The same before it comes to the host: tensors on the logits' device."""

    token_FK: Tensor
    weight_FK: Tensor
    prob_FK: Tensor
    top_prob_F: Tensor
    column_FK: Tensor  # int64, where the tokens are in the logits


def score(
    draft: Tensor | Candidates,
    params: SamplingBatch,
    rule_F: np.ndarray,
    index_F: np.ndarray,
    num_children: int,
    vocab: DraftVocabulary,
    kernels: Kernels = TORCH,
    *,
    has_truncation: bool = True,
) -> Scores:
    """Candidates of each node, at most num_children.

    draft: (constrained) logits [F, V] or n-gram candidates. params: one entry per node, on the host, so that nothing is
    asked of a device that is not done with the logits.
    index_F: index of the token that the children stand for. Noise is keyed on target ids, so a reduced draft
    vocabulary sees the noise the verifier will see. has_truncation: some node may have min-p, top-k or top-p.
    """
    if isinstance(draft, Candidates):
        return _score_candidates(draft, params, rule_F, index_F, num_children)
    device = draft.device
    processed = process_logits_static(
        draft,
        params.to(device),
        has_min_p=has_truncation,
        has_top=has_truncation,
        threshold=kernels.truncation_threshold,
    )
    log_q = processed.log_softmax(-1)
    if (rule_F >= Rule.TRAVERSAL.value).all():
        return _score_sampled(log_q, params.temperature_B, num_children, vocab)
    hot_F, is_coupled_F = params.temperature_B.numpy() > 0, rule_F == Rule.COUPLED.value
    noisy_F = hot_F & is_coupled_F
    scored: Tensor = log_q
    if noisy_F.any():
        scored = log_q + vocab.noise.rows(params.seed_B.tolist(), index_F.tolist(), device)
        if not noisy_F.all():
            scored = torch.where(to_device(noisy_F, device)[:, None], scored, log_q)
    tau_F = to_device(confidence_tau(params.temperature_B.numpy(), is_coupled_F), device)
    best = best_children(log_q, scored, tau_F, num_children, vocab, kernels)
    token_FK, weight_FK, prob_FK, top_prob_F = to_host(best.token_FK, best.weight_FK, best.prob_FK, best.top_prob_F)
    kind_F = kinds(rule_F, hot_F)
    support, is_sampled_F = None, kind_F == NodeKind.SAMPLED.value
    if is_sampled_F.any():
        rows = torch.from_numpy(np.flatnonzero(is_sampled_F))
        sampled = _score_sampled(log_q[to_device(rows, device)], params.temperature_B[rows], weight_FK.shape[1], vocab)
        support, weight_FK[is_sampled_F] = sampled.support, sampled.weight_FK
    return Scores(
        token_FK=token_FK,
        weight_FK=weight_FK,
        prob_FK=prob_FK,
        top_prob_F=top_prob_F,
        kind_F=kind_F,
        support=support,
    )


def confidence_tau(temperature_F: np.ndarray, is_coupled_F: np.ndarray) -> np.ndarray:
    """float32 [F]: how far log q is from log p, in units of the Gumbel noise. A coupled child's weight,
    softmax((log q + G) / tau), is the chance that it is the target's draw if the difference is noise of that scale.

    Logits are divided by the temperature, and with them what the draft's differ by from the target's. On the bundled
    EAGLE-3 head trees of 16 nodes accept most with tau = 1.5, 0.9 and 0.7 at temperatures 0.3, 0.5 and 0.7 (5.22, 4.85
    and 4.44 tokens a step; with 0.6 they are up to a level deeper and accept 4.98, 4.77 and 4.44), with 0.6 at 1 and
    1.5, and with 0.5 to 0.6 at 0, where logits are taken as they are. Without noise the weight of a child is q itself.
    """
    is_hot_F = temperature_F > 0
    tau_F = np.maximum(COLD_TAU / np.where(is_hot_F, temperature_F, 1), CONFIDENCE_TAU)
    return np.where(is_hot_F & ~is_coupled_F, 1, tau_F).astype(np.float32)


def best_children(
    log_q_FV: Tensor,
    scored_FV: Tensor,
    tau_F: Tensor,
    num_children: int,
    vocab: DraftVocabulary,
    kernels: Kernels,
) -> Best:
    """The children of largest score, with weights softmax(score / tau); no value is looked at on the host."""
    best = kernels.top_k(scored_FV, num_children, tau_F)
    return Best(
        token_FK=best.index_RK if vocab.target_ids is None else vocab.target_ids[best.index_RK],
        weight_FK=torch.exp(best.value_RK / tau_F[:, None] - best.lse_R[:, None]),
        prob_FK=log_q_FV.gather(-1, best.index_RK).exp(),
        top_prob_F=log_q_FV.amax(-1).exp(),
        column_FK=best.index_RK,
    )


def _score_sampled(log_q: Tensor, temperature_F: Tensor, num_children: int, vocab: DraftVocabulary) -> Scores:
    """Scores of nodes whose children are yet to be drawn: there are no tokens to tell."""
    support = quantize(log_q, vocab)
    size = (len(log_q), min(num_children, log_q.shape[-1]))
    return Scores(
        token_FK=np.zeros(size, dtype=np.int64),
        weight_FK=expected_survival(support, temperature_F.numpy(), size[1]),
        prob_FK=np.zeros(size, dtype=np.float32),
        top_prob_F=log_q.amax(-1).exp().cpu().numpy(),
        kind_F=np.full(size[0], NodeKind.SAMPLED.value, dtype=np.uint8),
        support=support,
    )


def kinds(rule_F: np.ndarray, hot_F: np.ndarray) -> np.ndarray:
    """uint8 NodeKind of the children of nodes whose requests have these rules, hot = temperature > 0."""
    kind_F = np.full(len(rule_F), NodeKind.DETERMINISTIC.value, dtype=np.uint8)
    kind_F[(rule_F == Rule.COUPLED.value) & hot_F] = NodeKind.COUPLED.value
    kind_F[rule_F >= Rule.TRAVERSAL.value] = NodeKind.SAMPLED.value
    return kind_F


def _score_candidates(
    draft: Candidates, params: SamplingBatch, rule_F: np.ndarray, index_F: np.ndarray, num_children: int
) -> Scores:
    log_q_FK = draft.log_q_FK
    hot_F = params.temperature_B.numpy() > 0
    kind_F = kinds(rule_F, hot_F)
    scored_FK = log_q_FK
    noisy_F = kind_F == NodeKind.COUPLED.value
    if noisy_F.any():
        noise_FK = gumbel_at(params.seed_B.numpy()[:, None], index_F[:, None], draft.token_FK)
        scored_FK = np.where(noisy_F[:, None], log_q_FK + noise_FK, log_q_FK)
    order_FK = np.argsort(-scored_FK, axis=1, kind="stable")[:, :num_children]
    tau_F1 = np.where(hot_F & ~noisy_F, 1.0, CONFIDENCE_TAU)[:, None]
    weight_FK = np.exp((scored_FK - scored_FK.max(1, keepdims=True, initial=-1e30)) / tau_F1)
    # What lookup does not know of is the rest of the mass: the candidates share no more than their probability.
    known_F1 = np.exp(log_q_FK).sum(1, keepdims=True)
    weight_FK *= known_F1 / np.maximum(weight_FK.sum(1, keepdims=True), 1e-30)
    prob_FK = np.exp(log_q_FK)
    take = lambda array: np.take_along_axis(array, order_FK, axis=1)  # noqa: E731
    return Scores(
        token_FK=take(draft.token_FK),
        weight_FK=take(weight_FK).astype(np.float32),
        prob_FK=take(prob_FK),
        top_prob_F=prob_FK.max(1, initial=0.0),
        kind_F=kind_F,
        support=None,
    )
