"""Losslessness by exact enumeration: the emitted tokens follow the target's distribution for any tree.

A small language (V = 3) has a random distribution p(. | prefix) for every prefix. Rounds of drafting, verification and
commit run through the real `walk` until L tokens are emitted. The weights of all points of the probability space sum to
the exact distribution of the first L tokens, which must equal the product of p.

    coupled        the noise of index t sets the winner y at every prefix of length t at once; the tree may be any
                   function of all noise
    deterministic  the tree may be any function of the history; the target draws y ~ p at every row

Mutants of the walk must fail the same comparison. Sampled drafts: `test_rejection_laws.py`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import scipy.stats
import torch

from drafter.tree.frontier import DraftVocabulary, Frontier
from drafter.tree.policy import DynamicTreePolicy, StaticTreePolicy, TreePolicy
from tests.support import oracles
from tests.support.growing import grow
from tests.support.oracles import SMALL_V, Path, distance, draft_logits, product_law, target_logits
from tests.support.verdicts import accept
from verifier.acceptance.coupled import walk
from workers.sampling.sampler import draw
from workers.settings import SamplingSettings
from workers.types import SamplingBatch, TreeBatch, Verdict

torch.set_num_threads(1)

V = 3
TOLERANCE = 1e-12
VISIBLE = 0.01  # what a wrong rule must be off by

Walk = Callable[[TreeBatch, list[int]], list[Verdict]]
Nodes = list[Path]  # paths below the root, breadth-first, the root () first
Winner = Callable[[Path], int]


def language(seed: int) -> Callable[[Path], np.ndarray]:
    """Return p(. | prefix): random, peaked, a function of the prefix."""

    @cache
    def p(prefix: Path) -> np.ndarray:
        return np.random.default_rng([seed, *prefix, 99]).dirichlet(np.full(V, 0.7))

    return p


# ---- trees, as a function of (round's random generator, the winners ahead)


def full_tree(shape: list[int]) -> Nodes:
    """Return a tree with shape[d] children per node at depth d, tokens 0, 1, ..."""
    levels = [[()]]
    for width in shape:
        levels.append([(*path, t) for path in levels[-1] for t in range(width)])
    return [path for level in levels for path in level]


def random_tree(rng: np.random.Generator, size: int, depth: int) -> Nodes:
    nodes: Nodes = [()]
    for _ in range(size):
        parent = nodes[rng.integers(len(nodes))]
        child = (*parent, int(rng.integers(V)))
        if child not in nodes and len(child) <= depth:
            nodes.append(child)
    return sorted(nodes, key=lambda path: (len(path), nodes.index(path[:-1]) if path else 0))


def pruned(nodes: Nodes, is_cut: Callable[[Path], bool]) -> Nodes:
    """Return the tree without the cut nodes and their descendants; the root stays."""
    kept: Nodes = []
    for path in nodes:
        if not path or (path[:-1] in kept and not is_cut(path)):
            kept.append(path)
    return kept


def is_winner(path: Path, winner: Winner) -> bool:
    return winner(path[:-1]) == path[-1]


Growth = Callable[[np.random.Generator, Winner], Nodes]
SHAPES: dict[str, Growth] = {
    "bare root": lambda rng, winner: [()],
    "chain": lambda rng, winner: [(), (0,), (0, 1), (0, 1, 2)],
    "2x2": lambda rng, winner: full_tree([2, 2]),
    "ragged": lambda rng, winner: [(), (0,), (2,), (0, 0), (0, 1), (0, 2), (2, 1), (0, 0, 2)],
    "random": lambda rng, winner: random_tree(rng, 6, 3),
}
LOOKING_AT_THE_NOISE: dict[str, Growth] = {
    "only what will be accepted": lambda rng, winner: pruned(full_tree([3, 3]), lambda n: not is_winner(n, winner)),
    "never what would be accepted": lambda rng, winner: pruned(full_tree([3, 3]), lambda n: is_winner(n, winner)),
    "winners but token 0": lambda rng, winner: pruned(
        full_tree([3, 3]), lambda n: is_winner(n, winner) == (n[-1] == 0)
    ),
    "cut at random by the noise ahead": lambda rng, winner: pruned(
        random_tree(rng, 8, 3), lambda n: (winner(n) + winner(n[:-1]) + n[-1]) % 3 == 0
    ),
    "empty when a 1 is coming": lambda rng, winner: [()] if winner(()) == 1 else full_tree([2, 2]),
}


def pack(all_nodes: list[Nodes]) -> TreeBatch:
    def parts(nodes: Nodes) -> tuple[list[int], list[int]]:
        row = {path: r for r, path in enumerate(nodes)}
        return [row[p[:-1]] if p else -1 for p in nodes], [p[-1] if p else 0 for p in nodes]

    return oracles.trees([parts(nodes) for nodes in all_nodes])


# ---- the coupled rule


def coupled_points(p: Callable[[Path], np.ndarray], length: int, seed: int) -> list[tuple[float, dict[Path, int]]]:
    """Every point of the noise, with its weight: for each index t one uniform that picks, through each prefix's own
    shuffled inverse CDF, the winner at every prefix of length t. Winners of one index depend on each other as oddly as
    the shuffles make them; different indices are independent. That is all a coupled verifier promises."""
    rng = np.random.default_rng(seed)
    per_index = []
    for t in range(length):
        prefixes = list(itertools.product(range(V), repeat=t))
        order = {x: rng.permutation(V) for x in prefixes}
        cdf = {x: np.cumsum(p(x)[order[x]]) for x in prefixes}
        edges = np.unique(np.concatenate([[0.0, 1.0], *(c[:-1] for c in cdf.values())]))
        cells = []
        for low, high in itertools.pairwise(edges.tolist()):
            u = (low + high) / 2
            cells.append((high - low, {x: int(order[x][np.searchsorted(cdf[x][:-1], u)]) for x in prefixes}))
        per_index.append(cells)
    points = []
    for choice in itertools.product(*per_index):
        winners: dict[Path, int] = {}
        for _, picked in choice:
            winners |= picked
        points.append((float(np.prod([weight for weight, _ in choice])), winners))
    return points


def independent_points(p: Callable[[Path], np.ndarray], length: int) -> list[tuple[float, dict[Path, int]]]:
    """Enumerate the independent assignments of a winner to every prefix."""
    prefixes = [x for t in range(length) for x in itertools.product(range(V), repeat=t)]
    return [
        (float(np.prod([p(x)[y] for x, y in zip(prefixes, ys, strict=True)])), dict(zip(prefixes, ys, strict=True)))
        for ys in itertools.product(range(V), repeat=len(prefixes))
    ]


def coupled_law(
    points: list[tuple[float, dict[Path, int]]], length: int, growth: Growth, walk: Walk = walk
) -> dict[Path, float]:
    """Return the distribution of the first `length` tokens, over all noise and the necessary rounds."""
    emitted: list[Path] = [() for _ in points]
    for round_ in range(length):
        open_ = [i for i, x in enumerate(emitted) if len(x) < length]
        all_nodes, rows = [], []
        for i in open_:
            # Beyond the horizon winners decide nothing that is measured: any value will do.
            winner: Winner = lambda path, x=emitted[i], w=points[i][1]: w.get((*x, *path), len(path) % V)  # noqa: E731
            nodes = growth(np.random.default_rng([round_, i % 7, *emitted[i]]), winner)
            all_nodes.append(nodes)
            rows += [winner(path) for path in nodes]
        for i, verdict in zip(open_, walk(pack(all_nodes), rows), strict=True):
            emitted[i] += verdict.tokens
    law: dict[Path, float] = defaultdict(float)
    for (weight, _), x in zip(points, emitted, strict=True):
        law[x[:length]] += weight
    return law


@pytest.mark.parametrize("growth", [*SHAPES, *LOOKING_AT_THE_NOISE])
def test_the_coupled_rule_emits_the_targets_law_for_any_tree_of_the_noise(growth):
    for seed in range(2):
        p = language(seed)
        law = coupled_law(coupled_points(p, 3, seed), 3, (SHAPES | LOOKING_AT_THE_NOISE)[growth])
        assert distance(law, product_law(p, 3)) < TOLERANCE


def test_the_coupled_rule_emits_the_targets_law_over_four_tokens():
    p = language(5)
    points = coupled_points(p, 3, 5)
    # The fourth index by its own: 3 winners at each of 27 prefixes, all equal, weight 1/3 each, under a flat law.
    flat = lambda x: p(x) if len(x) < 3 else np.full(V, 1 / V)  # noqa: E731
    four = [
        (weight / V, winners | {x: (y + sum(x)) % V for x in itertools.product(range(V), repeat=3)})
        for weight, winners in points
        for y in range(V)
    ]
    growth = LOOKING_AT_THE_NOISE["cut at random by the noise ahead"]
    assert distance(coupled_law(four, 4, growth), product_law(flat, 4)) < TOLERANCE


@pytest.mark.parametrize("growth", ["random", "winners but token 0", "cut at random by the noise ahead"])
def test_the_coupled_rule_emits_the_targets_law_with_independent_winners(growth):
    p = language(3)
    law = coupled_law(independent_points(p, 2), 2, (SHAPES | LOOKING_AT_THE_NOISE)[growth])
    assert distance(law, product_law(p, 2)) < TOLERANCE


# ---- the deterministic rule (target-only: the target draws, the tree only reads ahead)


def deterministic_law(
    p: Callable[[Path], np.ndarray], length: int, tree: Callable[[tuple[Path, ...]], Nodes], walk: Walk = walk
) -> dict[Path, float]:
    """Enumerate every draw at every row of every round; trees depend on past rounds only."""
    law: dict[Path, float] = defaultdict(float)

    def rounds(history: tuple[Path, ...], weight: float) -> None:
        prefix = tuple(token for part in history for token in part)
        if len(prefix) >= length:
            law[prefix[:length]] += weight
            return
        nodes = tree(history)
        # Rows at or beyond the horizon decide nothing that is measured: one draw stands for all.
        choices = [range(V) if len(prefix) + len(path) < length else (0,) for path in nodes]
        draws = list(itertools.product(*choices))
        chances = [
            float(np.prod([p((*prefix, *x))[y] for x, y, c in zip(nodes, ys, choices, strict=True) if len(c) > 1]))
            for ys in draws
        ]
        outcomes: dict[Path, float] = defaultdict(float)
        verdicts = walk(pack([nodes] * len(draws)), [y for ys in draws for y in ys])
        for verdict, chance in zip(verdicts, chances, strict=True):
            outcomes[verdict.tokens] += chance
        for tokens, chance in outcomes.items():
            rounds((*history, tokens[: length - len(prefix)]), weight * chance)

    rounds((), 1.0)
    return law


def from_history(growth: Growth) -> Callable[[tuple[Path, ...]], Nodes]:
    """Return a tree that depends on the whole history, including the boundaries of rounds."""

    def tree(history: tuple[Path, ...]) -> Nodes:
        rng = np.random.default_rng([len(history), *(len(part) for part in history), *sum(history, ())])
        nodes = growth(rng, lambda path: 0)
        return pruned(nodes, lambda path: rng.random() < 0.2)

    return tree


@pytest.mark.parametrize("shape", SHAPES)
def test_the_deterministic_rule_emits_the_targets_law_for_any_tree_of_the_past(shape):
    for seed in range(2):
        p = language(10 + seed)
        assert distance(deterministic_law(p, 3, from_history(SHAPES[shape])), product_law(p, 3)) < TOLERANCE


# ---- planted mutants: the same enumeration must see each of them


def walk_with(
    parent_of: Callable[[list[int], int, int], bool] | None = None,
    winner: Callable[[list[int], list[int], int, int], int] | None = None,
    takes_any_child: bool = False,
) -> Walk:
    """The walk with one line replaced. winner(winners, parents, row, parent row): the token drawn at a row."""

    def wrong_walk(trees: TreeBatch, winners_N: list[int]) -> list[Verdict]:
        verdicts = []
        offsets = trees.offsets.tolist()
        for begin, end in itertools.pairwise(offsets):
            parents, tokens = trees.parent_N[begin:end].tolist(), trees.token_N[begin:end].tolist()
            winners = winners_N[begin:end]
            row, path, emitted = 0, [], [winners[0]]
            for child in range(1, end - begin):
                is_child = parent_of(parents, child, row) if parent_of else parents[child] == row
                if is_child and (takes_any_child or tokens[child] == emitted[-1]):
                    emitted[-1] = tokens[child]
                    emitted.append(winner(winners, parents, child, row) if winner else winners[child])
                    path.append(child)
                    row = child
            verdicts.append(Verdict(tuple(path), tuple(emitted), len(parents) - 1, len(parents) - 1))
        return verdicts

    return wrong_walk


def siblings_winner(winners: list[int], parents: list[int], row: int, parent: int) -> int:
    return winners[next((r for r in range(len(parents)) if parents[r] == parent and r != row), row)]


def shy_walk(trees: TreeBatch, winners_N: list[int]) -> list[Verdict]:
    """A biased verifier that never emits the largest token if the tree has a smaller one."""
    verdicts = []
    for begin, verdict in zip(trees.offsets.tolist(), walk(trees, winners_N), strict=False):
        tokens = list(verdict.tokens)
        if tokens[0] == V - 1 and not verdict.path and trees.parent_N[begin + 1 : begin + 2].tolist() == [0]:
            tokens[0] = int(trees.token_N[begin + 1])
        verdicts.append(verdict._replace(tokens=tuple(tokens)))
    return verdicts


MUTANTS: dict[str, Walk] = {
    "the bonus token comes from a sibling's row": walk_with(winner=siblings_winner),
    "a child of another node is followed": walk_with(parent_of=lambda parents, child, row: child > row),
    "the parent's winner is used again": walk_with(winner=lambda winners, parents, row, parent: winners[parent]),
    "a child is accepted without comparing": walk_with(takes_any_child=True),
    "the verifier is biased towards the tree": shy_walk,
}


def test_the_mutants_harness_is_right_when_nothing_is_replaced():
    p = language(0)
    assert distance(coupled_law(coupled_points(p, 3, 0), 3, SHAPES["2x2"], walk_with()), product_law(p, 3)) < TOLERANCE


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_walk_is_detected(mutant):
    p = language(0)
    coupled = coupled_law(coupled_points(p, 3, 0), 3, SHAPES["2x2"], MUTANTS[mutant])
    deterministic = deterministic_law(p, 3, lambda history: full_tree([2, 2]), MUTANTS[mutant])
    assert distance(coupled, product_law(p, 3)) > VISIBLE
    assert distance(deterministic, product_law(p, 3)) > VISIBLE


# ---- the real pieces together: logits, noise, grow, accept


def test_the_argmax_of_log_p_plus_noise_follows_p():
    p = language(1)((1, 2))
    num = 30000
    params = SamplingBatch.stack([SamplingSettings(seed=12345)]).rows(torch.zeros(num, dtype=torch.long))
    logits_RV = torch.tensor(np.log(p), dtype=torch.float32).expand(num, -1)
    count = np.bincount(draw(logits_RV, params, torch.arange(num)).numpy(), minlength=V)
    assert scipy.stats.chisquare(count, p * num).pvalue > 1e-3


def generate(
    params: SamplingSettings, length: int, policy: TreePolicy | None, error: float, limits: tuple[int, float, float]
) -> Path:
    """Return the tokens after the prompt (1,), by the real grow and accept; policy None = no speculation."""
    tokens: Path = (1,)
    batch = SamplingBatch.stack([params])
    while len(tokens) < length:
        trees = oracles.tree([-1], [tokens[-1]])
        if policy is not None:
            paths: dict[int, Path] = {0: ()}

            def expand(level: Frontier, prefix: Path = tokens, paths: dict[int, Path] = paths) -> torch.Tensor:
                for row, parent, token in zip(level.row_F, level.parent_row_F, level.token_F, strict=True):
                    paths[int(row)] = (*paths[int(parent)], int(token))
                return torch.from_numpy(np.stack([draft_logits(prefix + paths[int(r)], error) for r in level.row_F]))

            num_nodes, min_prob, path_prob = limits
            trees, *_ = grow(
                torch.from_numpy(draft_logits(tokens, error))[None],
                np.array([tokens[-1]]),
                np.array([len(tokens)]),
                limits=oracles.limits([num_nodes], [4], [min_prob], [path_prob]),
                sampling=batch, policy=policy, expand=expand, vocab=DraftVocabulary(target_size=SMALL_V),
            )  # fmt: skip
        logits = np.stack([target_logits(tokens + path) for path in oracles.paths_of(trees)])
        (verdict,) = accept(trees, torch.from_numpy(logits), batch, torch.tensor([len(tokens) - 1]))
        tokens += verdict.tokens
    return tokens[:length]


@pytest.mark.parametrize(
    "params",
    [
        SamplingSettings(temperature=0.0),
        pytest.param(SamplingSettings(temperature=1.0, seed=2**64 - 9), marks=pytest.mark.slow),
        pytest.param(SamplingSettings(temperature=0.7, top_p=0.9, seed=3), marks=pytest.mark.slow),
        pytest.param(SamplingSettings(temperature=1.3, top_k=4, min_p=0.05, seed=4), marks=pytest.mark.slow),
    ],
    ids=["greedy", "sampled", "top-p", "top-k and min-p"],
)
def test_speculation_never_changes_a_token(params):
    plain = generate(params, 25, None, 0.0, (0, 0.0, 0.0))
    for policy in (
        DynamicTreePolicy(4, 4),
        StaticTreePolicy(((0,), (0, 0), (0, 0, 0))),
        StaticTreePolicy(((0,), (1,), (0, 0), (1, 0))),
    ):
        for error in (0.0, 0.8, 50.0):
            for limits in ((8, 0.0, 0.0), (8, 0.4, 0.05), (2, 0.0, 0.3), (1, 0.9, 0.0)):
                assert generate(params, 25, policy, error, limits) == plain
