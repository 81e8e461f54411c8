"""The rejection rule: sampled drafts, verified losslessly by the law they were drawn from.

At row v let P = p(. | v) and a the row's carry, 1 at the root. Its children x_1, x_2, ... are tested in order, each
against Q_i, the law it was drawn from given its earlier siblings (a fixed child: all mass on itself):

    r_i = min(1, a P(x_i) / Q_i(x_i))
    x_i rejected:   R = max(a P - Q_i, 0),  S = sum R,  a <- S / (S + 1 - a),  P <- R / S

    recursive   (Miao et al. 2305.09781, without replacement as in Yang et al.) from the root down: a stays 1; take x_i
                with probability r_i and go on there. No child taken: emit y ~ P.
    traversal   (Weng et al. 2505.12398; on a chain block verification, Sun et al. 2403.10444) from the leaves up: x_i's
                own carry is r_i; when all below v are rejected, stop at v with probability a and emit y ~ P, else v is
                rejected. The root always stops. Accepts more, because a token's surplus helps those below it.

Both are lossless if every decision to offer x_i looked at neither x_i nor anything computed from it. P differs from p
only where Q_i has mass, so a row is 64 numbers and a scale however large the vocabulary is.
Legend: B requests, N packed rows, R rows of one request, V vocabulary, E touched ids of one row, S sparse entries.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.random import Stream, residual_gumbel, uniform
from workers.types import DraftProbs, NodeKind, Rule, SamplingBatch, TreeBatch, Verdict


class Tree(NamedTuple):
    """One request's rows: parents before children, children of one parent in the order they were offered."""

    parent_R: Sequence[int]  # -1 at the root
    token_R: Sequence[int]
    kind_R: Sequence[int]  # NodeKind


class RowLaw(NamedTuple):
    """What verification needs to know of one row: p and q where q or a fixed child is, nothing elsewhere."""

    id_E: np.ndarray  # int64, distinct target ids: the draft support and the fixed children
    prob_E: np.ndarray  # float64, p(id | row)
    weight_E: np.ndarray  # int64, what the sampled children were drawn from; 0 = not drawable


class Residual(NamedTuple):
    """The law of the token after the path: P(id_E) = prob_E, and P(x) = scale * p(x) for every other x."""

    id_E: np.ndarray
    prob_E: np.ndarray
    scale: float


class Decision(NamedTuple):
    """Accepted rows below the root in order, and the law of what follows the last of them."""

    path: tuple[int, ...]
    residual: Residual

    @property
    def final_row(self) -> int:
        return self.path[-1] if self.path else 0


Laws = Callable[[int], RowLaw]
Coin = Callable[[int, float], bool]
"""coin(row, probability): true with that probability, independently for every row; at most one toss per row."""


def decide(tree: Tree, laws: Laws, rule: Rule, coin: Coin) -> Decision:
    """One request's verdict before its last token is drawn; laws(row) is asked at most once per row."""
    children: list[list[int]] = [[] for _ in tree.parent_R]
    for row, parent in enumerate(tree.parent_R):
        if parent >= 0:
            children[parent].append(row)
    match rule:
        case Rule.RECURSIVE:
            return _descend(tree, laws, coin, children)
        case Rule.TRAVERSAL:
            decision = _visit(tree, laws, coin, children, 0, 1.0)
            assert decision is not None, "the root always accepts"
            return decision
        case _:
            raise ValueError(f"{rule.name} is not a rule of ratio tests; verify these trees with `accept`")


def _descend(tree: Tree, laws: Laws, coin: Coin, children: list[list[int]]) -> Decision:
    path: list[int] = []
    row = 0
    while True:
        tests = _Tests(laws(row), carry=1.0)
        for child in children[row]:
            if coin(child, tests.ratio(tree.token_R[child], tree.kind_R[child])):
                path.append(child)
                row = child
                break
            tests.reject()
        else:
            return Decision(tuple(path), tests.residual())


def _visit(tree: Tree, laws: Laws, coin: Coin, children: list[list[int]], row: int, carry: float) -> Decision | None:
    """The decision if it lies in `row`'s subtree; None = all of the subtree is rejected."""
    tests = _Tests(laws(row), carry)
    for child in children[row]:
        ratio = tests.ratio(tree.token_R[child], tree.kind_R[child])
        if ratio > 0:  # at 0 nothing below could be accepted either
            below = _visit(tree, laws, coin, children, child, ratio)
            if below is not None:
                return below if row == 0 else below._replace(path=(row, *below.path))
        tests.reject()
    if row == 0:
        return Decision((), tests.residual())
    return Decision((row,), tests.residual()) if coin(row, tests.carry) else None


class _Tests:
    """P, carry and proposal of one row while its children are tested in turn: ratio(child), reject(), ratio(next)."""

    def __init__(self, law: RowLaw, carry: float) -> None:
        self.carry = carry
        self._id_E = law.id_E
        self._prob_E = law.prob_E
        self._left_E = law.weight_E  # integer weights of what is not drawn yet
        self._elsewhere = max(0.0, 1.0 - float(law.prob_E.sum()))  # P's mass off id_E
        self._scale = 1.0
        self._proposal_E: np.ndarray

    def ratio(self, token: int, kind: int) -> float:
        """r of the next child, whose proposal is remembered for `reject`."""
        is_child_E = self._id_E == token
        if kind == NodeKind.SAMPLED:
            self._proposal_E = self._left_E / self._left_E.sum()
            self._left_E = np.where(is_child_E, 0, self._left_E)
        else:
            self._proposal_E = is_child_E.astype(np.float64)
        place = int(is_child_E.argmax())
        return min(1.0, self.carry * float(self._prob_E[place]) / float(self._proposal_E[place]))

    def reject(self) -> None:
        """Takes the tested child, and all it stood for, out of P."""
        rest_E = np.maximum(self.carry * self._prob_E - self._proposal_E, 0.0)
        rest = self.carry * self._elsewhere
        total = float(rest_E.sum()) + rest
        if total > 0:  # else P = Q up to rounding, and the child could not be rejected
            self._prob_E = rest_E / total
            self._elsewhere = rest / total
            self._scale *= self.carry / total
        if self.carry < 1:  # S / (S + 1 - a) is 1 at a = 1, or 0 / 0
            self.carry = total / (total + 1 - self.carry)

    def residual(self) -> Residual:
        return Residual(self._id_E, self._prob_E, self._scale)


def accept_rejection(
    trees: TreeBatch,
    processed_NV: Tensor,
    params: SamplingBatch,
    root_position_B: Tensor,
    probs: DraftProbs | None,
    rule_B: Sequence[Rule],
) -> list[Verdict]:
    """Verdicts of B trees from the target's processed logits at every row, root included.

    processed_NV: `workers.sampling.process_logits` of all rows, log p up to a constant; rows of temperature 0 stand for
    their argmax. params: one entry per request, on that device. root_position_B: int64, position of each root.
    probs: weights as they were drawn from; a row without sampled children may be empty, and None is all rows empty.
    Noise is keyed on (seed, root position, row): a request's verdict does not depend on its batch.
    """
    assert processed_NV.shape[0] == len(trees.token_N), "one row of logits per tree row, no more and no fewer"
    assert not bool((trees.kind_N == NodeKind.COUPLED).any()), "coupled drafts are not verified by ratio tests"
    offsets = trees.offsets.numpy()
    request_N = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    row_N = np.arange(len(request_N)) - offsets[request_N]
    seed_N, root_position_N = (key_B.cpu().numpy()[request_N] for key_B in (params.seed_B, root_position_B))
    u_N = uniform(seed_N, root_position_N, row_N, np.int64(0), Stream.ACCEPT)
    laws_N = _row_laws(trees, processed_NV, params.temperature_B <= 0, probs, request_N)
    decisions = []
    for begin, end, rule in zip(offsets, offsets[1:], rule_B, strict=False):
        rows = slice(begin, end)
        tree = Tree(*(field_N[rows].tolist() for field_N in (trees.parent_N, trees.token_N, trees.kind_N)))
        coin = partial(_toss, u_N[rows])
        decisions.append(decide(tree, laws_N[rows].__getitem__, rule, coin))
    verdicts, token_N = [], trees.token_N.tolist()
    bonus_B = _draw_residual(decisions, offsets, processed_NV, params, root_position_B)
    for decision, begin, end, bonus in zip(decisions, offsets, offsets[1:], bonus_B, strict=False):
        tokens = [token_N[begin + row] for row in decision.path]
        count = int(end - begin) - 1
        verdicts.append(Verdict(decision.path, (*tokens, bonus), num_drafted=count, num_verified=count))
    return verdicts


def _toss(u_R: np.ndarray, row: int, probability: float) -> bool:
    return bool(u_R[row] < probability)


def _row_laws(
    trees: TreeBatch, processed_NV: Tensor, is_greedy_B: Tensor, probs: DraftProbs | None, request_N: np.ndarray
) -> list[RowLaw]:
    """Every row's law, with p fetched from the device in one gather and one copy."""
    is_fixed_N = (trees.kind_N == NodeKind.DETERMINISTIC).numpy()
    parent_N = trees.offsets.numpy()[request_N] + trees.parent_N.numpy()
    row_E, id_E = parent_N[is_fixed_N], trees.token_N.numpy()[is_fixed_N].astype(np.int64)
    weight_E = np.zeros(len(id_E), dtype=np.int64)
    if probs is not None:
        row_E = np.concatenate([row_E, np.repeat(np.arange(len(request_N)), probs.offsets.diff().numpy())])
        id_E = np.concatenate([id_E, probs.id_S.numpy().astype(np.int64)])
        weight_E = np.concatenate([weight_E, probs.weight_S.numpy().astype(np.int64)])
    order = row_E.argsort(kind="stable")
    row_E, id_E, weight_E = row_E[order], id_E[order], weight_E[order]
    prob_E = _probabilities(processed_NV, is_greedy_B, request_N, row_E, id_E)
    bounds = np.searchsorted(row_E, np.arange(len(request_N) + 1)).tolist()
    return [RowLaw(id_E[a:b], prob_E[a:b], weight_E[a:b]) for a, b in itertools.pairwise(bounds)]


def _probabilities(
    processed_NV: Tensor, is_greedy_B: Tensor, request_N: np.ndarray, row_E: np.ndarray, id_E: np.ndarray
) -> np.ndarray:
    """p(id | row) [E] float64; 0 for ids outside the vocabulary (placeholders) and where logits are not numbers."""
    device = processed_NV.device
    row, token, request = (torch.from_numpy(x).to(device) for x in (row_E, id_E, request_N[row_E]))
    is_token = (token >= 0) & (token < processed_NV.shape[-1])
    log_p = processed_NV[row, torch.where(is_token, token, 0)] - processed_NV.logsumexp(-1)[row]
    prob = log_p.double().exp()
    is_greedy = is_greedy_B[request]
    if bool(is_greedy.any()):
        prob = torch.where(is_greedy, (token == processed_NV.argmax(-1)[row]).double(), prob)
    return torch.where(is_token, prob, 0.0).nan_to_num(0.0).cpu().numpy()


def _draw_residual(
    decisions: list[Decision],
    offsets: np.ndarray,
    processed_NV: Tensor,
    params: SamplingBatch,
    root_position_B: Tensor,
) -> list[int]:
    """Each request's last token: argmax of log P + Gumbel noise, keyed on the final row (temperature 0: no noise)."""
    device, vocab = processed_NV.device, processed_NV.shape[-1]
    final_B = np.array([decision.final_row for decision in decisions])
    log_p_BV = processed_NV[torch.from_numpy(offsets[:-1] + final_B).to(device)]
    with np.errstate(divide="ignore"):  # log 0 = -inf: never drawn
        log_ratio_E = np.concatenate([np.log(d.residual.prob_E / d.residual.scale) for d in decisions])
    id_E = np.concatenate([d.residual.id_E for d in decisions])
    b_E = np.repeat(np.arange(len(decisions)), [len(d.residual.id_E) for d in decisions])
    is_token = (id_E >= 0) & (id_E < vocab)
    b, token, log_ratio = (torch.from_numpy(x[is_token]).to(device) for x in (b_E, id_E, log_ratio_E))
    log_rest_BV = log_p_BV.clone()
    log_rest_BV[b, token] = log_p_BV.logsumexp(-1)[b] + log_ratio.to(log_p_BV.dtype)
    # Rounding may reject a child where P = Q and leave nothing: p itself is then the nearest legal law.
    is_empty = log_rest_BV.isneginf().all(-1, keepdim=True)
    log_rest_BV = torch.where(is_empty, log_p_BV, log_rest_BV)
    sampled_B = params.temperature_B > 0
    if bool(sampled_B.any()):
        row_B = torch.from_numpy(final_B).to(device)
        noise_BV = residual_gumbel(params.seed_B, root_position_B.to(device), row_B, 0, vocab)
        log_rest_BV = torch.where(sampled_B[:, None], log_rest_BV + noise_BV, log_rest_BV)
    return log_rest_BV.argmax(-1).tolist()
