"""Rejection sampling: verifies sampled drafts losslessly, given the law they were drawn from.

At row v let P = p(. | v) and a the row's carry, 1 at the root. Its children x_1, x_2, ... are tested in order, each
against Q_i, the law it was drawn from given its earlier siblings (a fixed child: all mass on itself):

    r_i = min(1, a P(x_i) / Q_i(x_i))
    x_i rejected:   R = max(a P - Q_i, 0),  S = sum R,  a <- S / (S + 1 - a),  P <- R / S

    recursive   (Miao et al. 2305.09781, without replacement as in Yang et al.) from the root down: a stays 1; take x_i
                with probability r_i and go on there. No child taken: emit y ~ P.
    traversal   (Weng et al. 2505.12398; on a chain block verification, Sun et al. 2403.10444) from the leaves up: x_i's
                own carry is r_i; when all below v are rejected, stop at v with probability a and emit y ~ P, else v is
                rejected. The root always stops. Accepts more, because a token's surplus helps those below it.

Both are lossless if every decision to offer x_i depends neither on x_i nor on anything computed from it. P differs from
p only where Q_i has mass, so 64 numbers and a scale describe a row, however large the vocabulary is.
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

from workers.sampling.philox import Stream, uniform
from workers.settings import Rule
from workers.transfer import to_device, to_host
from workers.types import DraftProbs, NodeKind, SamplingBatch, TreeBatch, Verdict


class Tree(NamedTuple):
    """One request's rows: parents before children, children of one parent in the order they were offered."""

    parent_R: Sequence[int]  # -1 at the root
    token_R: Sequence[int]
    kind_R: Sequence[int]  # NodeKind


class RowLaw(NamedTuple):
    """p and q of one row, at the ids in the draft support or of fixed children."""

    id_E: np.ndarray  # int64, distinct target ids: the draft support and the fixed children
    prob_E: np.ndarray  # float64, p(id | row)
    weight_E: np.ndarray  # int64, the weights that sampled children were drawn by; 0 = not drawable


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
        """Return the last accepted row, or the root."""
        return self.path[-1] if self.path else 0


Laws = Callable[[int], RowLaw]
Coin = Callable[[int, float], bool]
"""coin(row, probability) is true with that probability, independently for every row; tossed at most once a row."""


def decide(tree: Tree, laws: Laws, rule: Rule, coin: Coin) -> Decision:
    """Return one request's decision before its last token is drawn; calls laws(row) at most once per row."""
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
            raise ValueError(f"{rule.name} is not a rejection rule; verify these trees with `walk`")


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
    """Return the decision if it lies in `row`'s subtree; None if the whole subtree is rejected."""
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
    """P, carry and proposal of one row while its children are tested: ratio(child), reject(), ratio(next)."""

    def __init__(self, law: RowLaw, carry: float) -> None:
        self.carry = carry
        self._id_E = law.id_E
        self._prob_E = law.prob_E
        self._left_E = law.weight_E  # integer weights of the tokens that are not drawn yet
        self._num_left = int(law.weight_E.sum())
        self._elsewhere = max(0.0, 1.0 - float(law.prob_E.sum()))  # P's mass off id_E
        self._scale = 1.0
        self._place: int  # index of the tested child in id_E
        self._is_sampled: bool

    def ratio(self, token: int, kind: int) -> float:
        """Return r of the next child; `reject` then refers to this child."""
        self._place, self._is_sampled = int((self._id_E == token).argmax()), kind == NodeKind.SAMPLED
        proposal = int(self._left_E[self._place]) / self._num_left if self._is_sampled else 1.0
        return min(1.0, self.carry * float(self._prob_E[self._place]) / proposal)

    def reject(self) -> None:
        """Subtract the tested child's proposal from P."""
        if self._is_sampled:
            rest_E = self.carry * self._prob_E - self._left_E / self._num_left
            self._num_left -= int(self._left_E[self._place])
            self._left_E = self._left_E.copy()
            self._left_E[self._place] = 0
        else:
            rest_E = self.carry * self._prob_E
            rest_E[self._place] -= 1.0
        rest_E = np.maximum(rest_E, 0.0)
        rest = self.carry * self._elsewhere
        total = float(rest_E.sum()) + rest
        if total > 0:  # otherwise P = Q up to rounding, and no child is rejected
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
    root_position_B: np.ndarray,
    probs: DraftProbs | None,
    rule_B: Sequence[Rule],
) -> list[Verdict]:
    """Return the verdicts of B trees from the target's processed logits at every row, root included.

    processed_NV: `workers.sampling.sampler.process_logits` of all rows, log p up to a constant; rows of temperature 0
    are reduced to their argmax. params: one entry per request, on the host.
    root_position_B: int64, position of each root.
    probs: the weights that children were drawn by. Rows without sampled children may be empty; None = all are.
    Noise is keyed on (seed, root position, row): a request's verdict does not depend on its batch.

    Vocabulary-wide tensors stay on the device. Two transfers reach the host: p at tested ids, and the last tokens.
    """
    assert processed_NV.shape[0] == len(trees.token_N), "one row of logits per tree row, no more and no fewer"
    assert not (trees.kind_N.numpy() == NodeKind.COUPLED.value).any(), "coupled drafts are not verified by ratio tests"
    offsets, token_N = trees.offsets.numpy(), trees.token_N.tolist()
    request_N = np.arange(len(offsets) - 1).repeat(offsets[1:] - offsets[:-1])
    log_p_NV = _log_p(processed_NV, params.temperature_B.numpy()[request_N] <= 0)
    laws_N = _row_laws(trees, log_p_NV, probs, request_N)
    bounds = list(itertools.pairwise(offsets.tolist()))
    keys = list(zip(params.seed_B.tolist(), root_position_B.tolist(), strict=True))
    decisions = []
    for (begin, end), rule, key in zip(bounds, rule_B, keys, strict=True):
        rows = slice(begin, end)
        tree = Tree(trees.parent_N[rows].tolist(), token_N[rows], trees.kind_N[rows].tolist())
        decisions.append(decide(tree, laws_N[rows].__getitem__, rule, partial(_toss, *key)))
    final_B = [begin + decision.final_row for (begin, _), decision in zip(bounds, decisions, strict=True)]
    u_B = [uniform(*key, decision.final_row, 0, Stream.RESIDUAL) for key, decision in zip(keys, decisions, strict=True)]
    log_p_BV = log_p_NV[to_device(final_B, log_p_NV.device)]
    bonus_B = _draw_residual([decision.residual for decision in decisions], log_p_BV, u_B)
    verdicts = []
    for decision, (begin, end), bonus in zip(decisions, bounds, bonus_B, strict=True):
        tokens = [token_N[begin + row] for row in decision.path]
        count = end - begin - 1
        verdicts.append(Verdict(decision.path, (*tokens, bonus), num_drafted=count, num_verified=count))
    return verdicts


def _log_p(processed_NV: Tensor, is_greedy_N: np.ndarray) -> Tensor:
    """Return log p [N, V]; at temperature 0 all mass lies on the largest logit."""
    log_p_NV = processed_NV.log_softmax(-1)
    if not is_greedy_N.any():
        return log_p_NV
    best_N1, is_greedy_N1 = processed_NV.argmax(-1, keepdim=True), to_device(is_greedy_N, processed_NV.device)[:, None]
    of_best_N1 = torch.where(is_greedy_N1, 0.0, log_p_NV.gather(1, best_N1))
    return log_p_NV.masked_fill_(is_greedy_N1, -torch.inf).scatter_(1, best_N1, of_best_N1)


def _toss(seed: int, root_position: int, row: int, probability: float) -> bool:
    if not 0 < probability < 1:
        return probability > 0  # a certain outcome needs no coin
    # A step tosses few coins, for which Philox in plain integers is faster than numpy.
    return uniform(seed, root_position, row, 0, Stream.ACCEPT) < probability


def _row_laws(trees: TreeBatch, log_p_NV: Tensor, probs: DraftProbs | None, request_N: np.ndarray) -> list[RowLaw]:
    """Return every row's law. p is fetched from the device in one gather and one copy."""
    is_fixed_N = trees.kind_N.numpy() == NodeKind.DETERMINISTIC.value
    parent_N = trees.offsets.numpy()[request_N] + trees.parent_N.numpy()
    row_E, id_E = parent_N[is_fixed_N], trees.token_N.numpy()[is_fixed_N].astype(np.int64)
    weight_E = np.zeros(len(id_E), dtype=np.int64)
    if probs is not None:
        row_E = np.concatenate([row_E, np.arange(len(request_N)).repeat(probs.offsets.diff().numpy())])
        id_E = np.concatenate([id_E, probs.id_S.numpy()])
        weight_E = np.concatenate([weight_E, probs.weight_S.numpy()])
        if is_fixed_N.any():
            order = row_E.argsort(kind="stable")
            row_E, id_E, weight_E = row_E[order], id_E[order], weight_E[order]
    prob_E = _probabilities(log_p_NV, row_E, id_E)
    bounds = np.searchsorted(row_E, np.arange(len(request_N) + 1)).tolist()
    return [RowLaw(id_E[a:b], prob_E[a:b], weight_E[a:b]) for a, b in itertools.pairwise(bounds)]


def _probabilities(log_p_NV: Tensor, row_E: np.ndarray, id_E: np.ndarray) -> np.ndarray:
    """Return p(id | row) [E] float64; 0 for ids outside the vocabulary (placeholders) and for NaN logits."""
    is_token_E = (id_E >= 0) & (id_E < log_p_NV.shape[-1])
    index_2E = torch.from_numpy(np.array([row_E, np.where(is_token_E, id_E, 0)]))
    row, token = to_device(index_2E, log_p_NV.device)
    (log_p_E,) = to_host(log_p_NV[row, token])
    return np.where(is_token_E & ~np.isnan(log_p_E), np.exp(log_p_E.astype(np.float64)), 0.0)


def _draw_residual(laws: list[Residual], log_p_BV: Tensor, u_B: list[float]) -> list[int]:
    """Return each request's last token, by inverting the residual law's cumulative mass at u, heaviest tokens first.

    Rounding differs between batches, and its error accumulates along the cumulative sum. With the heaviest tokens
    first, most draws fall where the error is small. Tokens are sorted by the exponent of their mass, which rounding
    hardly ever changes. log_p_BV: at the final rows. u_B: in [0, 1), 53 bits, so u times the mass is below the mass.
    """
    device, vocab = log_p_BV.device, log_p_BV.shape[-1]
    p_BV = log_p_BV.double().exp()
    scale_B1, u_B1 = (
        to_device(torch.tensor(values, dtype=torch.float64)[:, None], device)
        for values in ([law.scale for law in laws], u_B)
    )
    id_E = np.concatenate([law.id_E for law in laws])
    prob_E = np.concatenate([law.prob_E for law in laws])
    b_E = np.arange(len(laws)).repeat([len(law.id_E) for law in laws])
    is_token_E = (id_E >= 0) & (id_E < vocab)
    b, token, prob = (to_device(x[is_token_E], device) for x in (b_E, id_E, prob_E))
    mass_BV = (p_BV * scale_B1).index_put_((b, token), prob)
    if any(len(law.prob_E) and not law.prob_E.any() for law in laws):
        # Rounding may reject a child where P = Q, which leaves no mass; p itself is then the nearest valid law.
        mass_BV = torch.where(mass_BV.any(-1, keepdim=True), mass_BV, p_BV)
    # The exponent of a non-negative float64: CUDA sorts 16 bits in a quarter of the passes.
    exponent_BV = (mass_BV.view(torch.int64) >> 52).to(torch.int16)
    id_BV = exponent_BV.sort(dim=-1, descending=True, stable=True).indices
    sum_BV = mass_BV.gather(-1, id_BV).cumsum(-1)
    place_B1 = torch.searchsorted(sum_BV, u_B1 * sum_BV[:, -1:], right=True)
    (last_B,) = to_host(id_BV.gather(-1, place_B1.clamp(max=vocab - 1))[:, 0])  # rows of NaN have no mass
    return last_B.tolist()
