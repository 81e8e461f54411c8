"""Exact output distributions of sampled drafts, by enumerating every random draw with its probability.

A `Scenario` is a small language, a drafter and a policy that gives the number of children of a node. It runs the
production code, `drafter.tree.sample.draw_children` and `verifier.acceptance.rejection.decide`, once for every outcome
of the random draws, round after round until enough tokens are emitted. Fields of the scenario select mutants.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple, TypeVar
from unittest import mock

import numpy as np
import torch

import drafter.tree.budgeted
import drafter.tree.sample
from drafter.tree.frontier import DraftVocabulary, Frontier, GrowLimits
from drafter.tree.policy import TreePolicy
from drafter.tree.sample import DrawBits, DrawnChildren, Support, draw_children, mask_fixed
from tests.support.growing import grow
from tests.support.oracles import Path, paths_of
from verifier.acceptance.rejection import Decision, Residual, RowLaw, Tree, decide
from workers.settings import Rule, SamplingSettings
from workers.types import DraftCosts, DraftProbs, NodeKind, SamplingBatch, TreeBatch

Choose = Callable[[list[float]], int]
"""choose(probabilities) -> index of the outcome."""
Weights = tuple[int, ...]
"""A draft distribution: integer weight per token."""
Interval = tuple[float, float]
"""The interval of a uniform that is known so far."""
History = tuple[Path, ...]
"""Tokens of every round so far."""
T = TypeVar("T")


def explore(run: Callable[[Choose], T]) -> Iterator[tuple[float, T]]:
    """Enumerate the outcomes of `run` with their probabilities, by running it once per sequence of choices."""
    scripts: list[list[int]] = [[]]
    while scripts:
        script, made, weight = scripts.pop(), [], 1.0

        def choose(probabilities: list[float], script: list[int] = script, made: list[int] = made) -> int:
            nonlocal weight
            if len(made) == len(script):
                possible = [i for i, chance in enumerate(probabilities) if chance > 0]
                scripts.extend([*made, other] for other in possible[1:])
                script.append(possible[0])
            made.append(script[len(made)])
            weight *= probabilities[made[-1]]
            return made[-1]

        result = run(choose)
        yield weight, result


# ---- drafting


class Slots(NamedTuple):
    """A policy's decision for a node before its children are drawn; fixed children are the most likely tokens."""

    count: int
    num_fixed: int = 0


class Node(NamedTuple):
    """One row of a draft."""

    parent: int
    path: Path
    kind: NodeKind
    noise: Interval = (0.0, 1.0)  # the uniform that drew it
    told: tuple[tuple[int, int], ...] = ()  # (token, weight): the reported distribution of its sampled children


Draft = tuple[Node, ...]
Policy = Callable[[History, Draft, int], Slots]
"""policy(history, rows drawn so far, row), which must not depend on the row's future subtree."""


def support_of(weights: Weights) -> Support:
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    return Support(np.array([order]), np.array([[weights[token] for token in order]]))


class Drawn(NamedTuple):
    token: int
    kind: NodeKind
    noise: Interval


@cache
def every_draw(weights: Weights, slots: Slots, keeps_noise: bool) -> list[tuple[float, tuple[Drawn, ...]]]:
    """Enumerate the distribution of a node's children. Without `keeps_noise`, draws of the same tokens are merged."""
    support, zero = support_of(weights), np.zeros(1, dtype=np.int64)

    def draw(choose: Choose) -> tuple[Drawn, ...]:
        noises: list[Interval] = []

        def below(limit: np.ndarray, *_: object) -> np.ndarray:
            total = int(limit[0])
            drawn = choose([1 / total] * total) if total and slots.num_fixed <= len(noises) < slots.count else 0
            noises.append((drawn / total, (drawn + 1) / total) if total and keeps_noise else (0.0, 1.0))
            return np.array([drawn])

        with mock.patch.object(drafter.tree.sample, "below", below):
            fields = (np.array([field]) for field in slots)
            children = draw_children(support, *fields, DrawBits.of(zero, zero, zero, max(slots.count, 1)))
        places, kinds = children.column_FK[0].tolist(), children.kind_FK[0].tolist()
        ids = support.id_FS[0].tolist()
        return tuple(
            Drawn(ids[place], NodeKind(kind), noise)
            for place, kind, noise in zip(places, kinds, noises, strict=False)
            if place >= 0
        )

    law: dict[tuple[Drawn, ...], float] = defaultdict(float)
    for weight, drawn in explore(draw):
        law[drawn] += weight
    return [(weight, drawn) for drawn, weight in law.items()]


@cache
def told_of(weights: Weights, num_fixed: int) -> tuple[tuple[int, int], ...]:
    support = support_of(weights)
    drawn = mask_fixed(support, np.array([num_fixed]))[0].tolist()
    return tuple((token, weight) for token, weight in zip(support.id_FS[0].tolist(), drawn, strict=True) if weight)


# ---- scenarios

CoinKey = Callable[[int, int, int], int]
"""(root position, depth, row) -> the uniform that a coin reads."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A drafter, a target and their protocol. The last group of fields is for mutants."""

    p: Callable[[Path], np.ndarray]
    q: Callable[[Path], Weights]
    rule: Rule
    policy: Policy = lambda history, draft, row: Slots(0)

    edit: Callable[[Draft, Callable[[Path], Weights]], Draft] = lambda draft, q: draft
    """Applied to a tree after it was drawn."""
    is_zeroed: bool = True
    """True if the reported distribution is zero on the fixed children."""
    coin_key: CoinKey | None = None
    """None: every coin is fresh."""
    draws_toss: bool = False
    """True if a node's coin is the uniform that drew it."""
    ending: Callable[[Residual], Residual] = lambda residual: residual

    def drafts(self, history: History) -> Iterator[tuple[float, Draft]]:
        """Enumerate the trees of the next round, with rows in breadth-first order."""
        prefix = sum(history, ())

        def grow(draft: Draft, row: int, weight: float) -> Iterator[tuple[float, Draft]]:
            if row == len(draft):
                yield weight, self.edit(draft, lambda path: self.q((*prefix, *path)))
                return
            node = draft[row]
            slots = self.policy(history, draft, row)
            weights = self.q((*prefix, *node.path))
            told = told_of(weights, slots.num_fixed if self.is_zeroed else 0)
            expanded = (*draft[:row], node._replace(told=told), *draft[row + 1 :])
            for chance, drawn in every_draw(weights, slots, self.draws_toss):
                children = (Node(row, (*node.path, token), kind, noise) for token, kind, noise in drawn)
                yield from grow((*expanded, *children), row + 1, weight * chance)

        yield from grow((Node(-1, (), NodeKind.ROOT),), 0, 1.0)

    def row_law(self, prefix: Path, draft: Draft, row: int) -> RowLaw:
        """Return what the drafter reports of a row: the weights of its sampled children, and its fixed children."""
        weight = dict(draft[row].told)
        for node in draft:
            if node.parent == row:
                weight.setdefault(node.path[-1], 0)
        ids = np.array(list(weight), dtype=np.int64)
        return RowLaw(ids, self.p((*prefix, *draft[row].path))[ids], np.array(list(weight.values()), dtype=np.int64))

    def verdicts(
        self, history: History, draft: Draft, known: dict[int, Interval]
    ) -> Iterator[tuple[float, Decision, dict[int, Interval]]]:
        """Enumerate the coins' outcomes with the resulting intervals of their uniforms."""
        prefix = sum(history, ())
        tree = Tree(
            [node.parent for node in draft],
            [node.path[-1] if node.path else 0 for node in draft],
            [node.kind for node in draft],
        )
        laws = [self.row_law(prefix, draft, row) for row in range(len(draft))]

        def run(choose: Choose) -> tuple[Decision, dict[int, Interval]]:
            learnt = dict(known)

            def coin(row: int, probability: float) -> bool:
                key = row if self.coin_key is None else self.coin_key(len(prefix), len(draft[row].path), row)
                low, high = learnt.get(key, draft[row].noise)
                cut = min(max(probability, low), high)
                is_below = choose([(cut - low) / (high - low), (high - cut) / (high - low)]) == 0
                learnt[key] = (low, cut) if is_below else (cut, high)
                return is_below

            decision = decide(tree, laws.__getitem__, self.rule, coin)
            return decision, learnt if self.coin_key else {}

        for weight, (decision, learnt) in explore(run):
            yield weight, decision, learnt

    def round(self, history: History, known: dict[int, Interval]) -> dict[tuple[Path, tuple], float]:
        """Return the distribution of (tokens of the next round, intervals of its uniforms)."""
        prefix = sum(history, ())
        law: dict[tuple[Path, tuple], float] = defaultdict(float)
        for drafted, draft in self.drafts(history):
            for chance, decision, learnt in self.verdicts(history, draft, known):
                path = draft[decision.final_row].path
                for y, p_y in enumerate(dense(self.ending(decision.residual), self.p((*prefix, *path)))):
                    law[(*path, y), tuple(learnt.items())] += drafted * chance * p_y
        return law

    def law(self, length: int) -> dict[Path, float]:
        """Return the exact distribution of the first `length` tokens, over the necessary number of rounds."""
        pending: list[dict[tuple[History, tuple], float]] = [defaultdict(float) for _ in range(length + 1)]
        pending[0][(), ()] = 1.0
        for num_tokens, reached in enumerate(pending[:-1]):
            for (history, known), weight in reached.items():
                for (tokens, learnt), chance in self.round(history, dict(known)).items():
                    if chance > 0:
                        past = self.past((*history, tokens[: length - num_tokens]))
                        pending[min(length, num_tokens + len(tokens))][past, learnt] += weight * chance
        law: dict[Path, float] = defaultdict(float)
        for (history, _), weight in pending[-1].items():
            law[sum(history, ())] += weight
        return law

    def past(self, history: History) -> History:
        """Return what the next round depends on."""
        return history

    def accepted(self, history: History = ()) -> float:
        """Return the expected number of accepted draft tokens in one round."""
        return sum(chance * (len(tokens) - 1) for (tokens, _), chance in self.round(history, {}).items())


def dense(residual: Residual, p: np.ndarray) -> np.ndarray:
    law = residual.scale * p
    law[residual.id_E] = residual.prob_E
    return law


def without(draft: Draft, is_removed: Callable[[Draft, int], bool]) -> Draft:
    """Return the draft without some rows and their descendants."""
    new_row = {0: 0}
    kept = [draft[0]]
    for row, node in enumerate(draft[1:], start=1):
        if node.parent in new_row and not is_removed(draft, row):
            new_row[row] = len(kept)
            kept.append(node._replace(parent=new_row[node.parent]))
    return tuple(kept)


# ---- trees of the real `grow`


@dataclass(frozen=True, kw_only=True)
class GrownScenario(Scenario):
    """A scenario with trees, budgets and thresholds of `drafter.tree`, of which only the draws are enumerated."""

    tree_policy: TreePolicy
    limits: GrowLimits
    costs: DraftCosts | None = None

    def past(self, history: History) -> History:
        return (sum(history, ()),)

    def drafts(self, history: History) -> Iterator[tuple[float, Draft]]:
        prefix = sum(history, ())

        def run(choose: Choose) -> Draft:
            paths: dict[int, Path] = {0: ()}

            def logits(rows: list[int]) -> torch.Tensor:
                weights = [self.q((*prefix, *paths[row])) for row in rows]
                return torch.tensor(weights, dtype=torch.float32).log()

            def expand(level: Frontier) -> torch.Tensor:
                for row, parent, token in zip(level.row_F, level.parent_row_F, level.token_F, strict=True):
                    paths[int(row)] = (*paths[int(parent)], int(token))
                return logits(level.row_F.tolist())

            def draw(support: Support, count_F: np.ndarray, num_fixed_F: np.ndarray, *_: object) -> DrawnChildren:
                return draw_by(choose, support, count_F, num_fixed_F, self.tree_policy.max_children)

            with mock.patch.object(drafter.tree.budgeted, "draw_children", draw):
                grown = grow(
                    logits([0]),
                    np.zeros(1, dtype=np.int64),
                    np.array([len(prefix) + 1]),
                    limits=self.limits,
                    sampling=SamplingBatch.stack([SamplingSettings()]),
                    policy=self.tree_policy,
                    expand=expand,
                    vocab=DraftVocabulary(target_size=len(self.q(prefix))),
                    costs=self.costs,
                )
            return as_draft(grown.trees, grown.probs)

        return explore(run)


def draw_by(
    choose: Choose, support: Support, count_F: np.ndarray, num_fixed_F: np.ndarray, max_children: int
) -> DrawnChildren:
    """Run `draw_children` with every random draw replaced by `choose`."""
    column_FK = np.full((len(count_F), max_children), -1)
    kind_FK = np.full(column_FK.shape, NodeKind.SAMPLED, dtype=np.uint8)
    for f, (count, num_fixed) in enumerate(zip(count_F.tolist(), num_fixed_F.tolist(), strict=True)):
        left = mask_fixed(support, num_fixed_F)[f]
        for k in range(min(count, int((support.weight_FS[f] > 0).sum()))):
            column_FK[f, k] = k if k < num_fixed else choose((left / left.sum()).tolist())
            kind_FK[f, k] = NodeKind.DETERMINISTIC if k < num_fixed else NodeKind.SAMPLED
            left[column_FK[f, k]] = 0
    return DrawnChildren(column_FK, kind_FK)


def as_draft(trees: TreeBatch, probs: DraftProbs | None) -> Draft:
    told: list[tuple[tuple[int, int], ...]] = [()] * len(trees.token_N)
    if probs is not None:
        pairs = list(zip(probs.id_S.tolist(), probs.weight_S.tolist(), strict=True))
        told = [tuple(pairs[a:b]) for a, b in pairwise(probs.offsets.tolist())]
    kinds = [NodeKind(kind) for kind in trees.kind_N.tolist()]
    fields = zip(trees.parent_N.tolist(), paths_of(trees), kinds, told, strict=True)
    return tuple(Node(parent, path, kind, told=told) for parent, path, kind, told in fields)
