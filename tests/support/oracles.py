"""Slow reference implementations in plain Python and float64, one value at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np
import torch

from drafter.tree.frontier import GrowLimits
from workers.config import TreeRules
from workers.settings import Constraints, Rule
from workers.types import NodeKind, TreeBatch

Path = tuple[int, ...]

# ---- noise


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Compute Philox4x32-10 with Python integers, as in the paper's figure: multiply, swap, xor, increment the key."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * a, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c, 2**32)
        a, b, c, d = high1 ^ b ^ k0, low1, high0 ^ d ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return a, b, c, d


def gumbel_of_word(r: int) -> float:
    """Return -log(-log u), u = (r + 1/2) / 2^32, in float64 without cancellation near u = 1."""
    if r < 2**31:
        return -math.log(-math.log((r + 0.5) / 2**32))
    return -math.log(-math.log1p(-(2**32 - r - 0.5) / 2**32))


def gumbel(seed: int, index: int, token: int) -> float:
    """Return the target's noise for one (seed, position of the drawn token, target token id)."""
    key = (seed % 2**32, seed // 2**32 % 2**32)
    return gumbel_of_word(philox(key, (token // 4, index, 0, 0))[token % 4])


# ---- sampling


def process(logits: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Apply temperature, min-p, top-k and top-p, each of which keeps all ties."""
    x = [float(v) for v in logits]
    if temperature == 0:
        return x
    x = [v / temperature for v in x]

    def keep(is_kept: Callable[[float], bool]) -> list[float]:
        return [v if is_kept(v) else -math.inf for v in x]

    if min_p > 0:
        x = keep(lambda v: math.exp(v - max(x)) >= min_p)
    if top_k > 0:
        kth = sorted(x, reverse=True)[min(top_k, len(x)) - 1]
        x = keep(lambda v: v >= kth)
    if top_p < 1:
        probs = softmax(x)
        mass, lowest = 0.0, max(x)
        for v, p in sorted(zip(x, probs, strict=True), reverse=True):
            if mass >= top_p:
                break
            mass, lowest = mass + p, v
        x = keep(lambda v: v >= lowest)
    return x


def softmax(x: Sequence[float]) -> list[float]:
    top = max(x)
    weights = [math.exp(v - top) for v in x]
    return [w / sum(weights) for w in weights]


# ---- constraints


def constrain(
    logits: dict[int, float], constraints: Constraints, end_token_ids: Sequence[int], prompt: Path, output: Path
) -> dict[int, float]:
    """Apply the logits processors for the token after prompt and output; `logits` covers the whole vocabulary.

    A mask that would exclude every token is not applied.
    """
    x = dict(logits)

    def mask(is_kept: Callable[[int], bool]) -> None:
        if any(is_kept(t) and x[t] > -math.inf for t in x):
            for t in x:
                x[t] = x[t] if is_kept(t) else -math.inf

    text = [*prompt, *output]
    if constraints.allowed_token_ids is not None:
        mask(lambda t: t in constraints.allowed_token_ids)
    mask(lambda t: not any([*output, t][-len(word) :] == word for word in constraints.bad_words))
    if len(output) < constraints.min_tokens:
        mask(lambda t: t not in end_token_ids)
    for t in x:
        x[t] += constraints.logit_bias.get(t, 0.0)
        if t in text:
            r = constraints.repetition_penalty
            x[t] = x[t] / r if x[t] > 0 else x[t] * r
        x[t] -= constraints.frequency_penalty * output.count(t)
        x[t] -= constraints.presence_penalty * (t in output)
    return x


# ---- trees


Model = Callable[[Path], Sequence[float]]
"""Draft logits after a path of tokens below the root."""


def typical_subtree(room: int, typical: Sequence[float]) -> list[float]:
    """Return all products of typical acceptance rates in a subtree of `room` levels, in descending order."""
    weights = [1.0]
    for levels in range(1, room + 1):
        weights += [math.prod(choice) for choice in itertools.product(typical, repeat=levels)]
    return sorted(weights, reverse=True)


def confidence_tau(temperature: float) -> float:
    """Return tau of coupled children: the temperature divides the logits, and so also the draft's errors."""
    return max(0.6, 0.45 / temperature) if temperature else 0.6


def deal_best_first(slots: int, room: int, weights: Sequence[float], typical: Sequence[float]) -> list[int]:
    """Return slots per child: the `slots` largest w * h, with h over the child's typical subtree of room - 1 levels."""
    values = [(w * h, k) for k, w in enumerate(weights) for h in typical_subtree(room - 1, typical) if w * h > 0]
    taken = sorted(values, key=lambda value: -value[0])[:slots]
    return [sum(k == child for _, k in taken) for child in range(len(weights))]


def candidates(
    model: Model,
    *,
    max_depth: int,
    max_children: int,
    min_prob: float,
    path_prob: float,
    temperature: float,
    seed: int,
    root_index: int,
    calibration: Sequence[float],
    cuts: tuple[int, float, float] = (0, 1.0, 0.0),
) -> dict[Path, float]:
    """Return every node that the thresholds allow, with its calibrated weight."""
    found: dict[Path, float] = {}

    def below(path: Path, weight: float, prob: float) -> None:
        x = process(model(path), temperature, *cuts)
        q = softmax(x)
        if len(path) == max_depth or prob < path_prob or max(q) < min_prob:
            return
        noise = [gumbel(seed, root_index + len(path), t) if temperature > 0 else 0.0 for t in range(len(q))]
        tau = confidence_tau(temperature)
        score = [math.log(p) + g if p > 0 else -math.inf for p, g in zip(q, noise, strict=True)]
        confidence = softmax([s / tau for s in score])
        shift = calibration[min(len(path), len(calibration) - 1)]
        for t in sorted(range(len(q)), key=lambda t: -confidence[t])[:max_children]:
            if not confidence[t]:
                break
            odds = confidence[t] / max(1 - confidence[t], 1e-16) * math.exp(shift)
            found[*path, t] = weight * odds / (1 + odds)
            below((*path, t), found[*path, t], prob * q[t])

    below((), 1.0, 1.0)
    return found


def without_descendants(paths: Iterable[Path], is_expanded: Callable[[Path], bool]) -> list[Path]:
    """Return the paths whose proper ancestors (the root () included) are all expanded."""
    return [p for p in paths if all(is_expanded(p[:n]) for n in range(len(p)))]


def limits(
    num_nodes: Sequence[int],
    max_depth: Sequence[int],
    min_prob: Sequence[float] | None = None,
    path_prob: Sequence[float] | None = None,
    rule: Sequence[int] | None = None,
    auto: Sequence[bool] | None = None,
    *,
    is_hybrid: bool = False,
) -> GrowLimits:
    """Return GrowLimits of as many requests; omitted settings are disabled."""
    nothing = [0] * len(num_nodes)
    return GrowLimits(
        num_nodes_B=np.array(num_nodes, dtype=np.int64),
        max_depth_B=np.array(max_depth, dtype=np.int64),
        rules=TreeRules(
            min_prob=np.array(min_prob or nothing, dtype=np.float32),
            path_prob=np.array(path_prob or nothing, dtype=np.float32),
        ),
        rule_B=np.array(rule or nothing, dtype=np.int64),
        auto_B=np.array(auto or nothing, dtype=np.int64),
        is_hybrid=is_hybrid,
    )


# ---- trees as TreeBatch


def tree(parents: Sequence[int], tokens: Sequence[int], kind: NodeKind = NodeKind.COUPLED) -> TreeBatch:
    return trees([(parents, tokens)], kind)


def trees(each: Sequence[tuple[Sequence[int], Sequence[int]]], kind: NodeKind = NodeKind.COUPLED) -> TreeBatch:
    """Pack trees from (parents, tokens) per request, with explicit depths and ancestor masks."""
    offsets, tokens, parents, depths, masks, kinds = [0], [], [], [], [], []
    for parent, token in each:
        begin = len(tokens)
        for row, p in enumerate(parent):
            assert p < row and (p < 0) == (row == 0)
            depths.append(0 if p < 0 else depths[begin + p] + 1)
            masks.append((masks[begin + p] if p >= 0 else 0) | 1 << row)
            kinds.append(NodeKind.ROOT if p < 0 else kind)
        tokens += token
        parents += parent
        offsets.append(len(tokens))
    return TreeBatch(
        offsets=torch.tensor(offsets, dtype=torch.int32),
        token_N=torch.tensor(tokens, dtype=torch.int32),
        parent_N=torch.tensor(parents, dtype=torch.int32),
        depth_N=torch.tensor(depths, dtype=torch.int32),
        ancestors_N=torch.from_numpy(np.array(masks, dtype=np.uint64).view(np.int64)),
        kind_N=torch.tensor(kinds, dtype=torch.uint8),
        weight_N=torch.ones(len(tokens)),
    )


def chain(drafts: Sequence[int], root: int = 0) -> tuple[list[int], list[int]]:
    """Return (parents, tokens) of a chain of drafts below a root token."""
    return list(range(-1, len(drafts))), [root, *drafts]


def paths_of(batch: TreeBatch, request: int = 0) -> list[Path]:
    """Return each row's token path below the root, () for the root."""
    begin, end = batch.offsets[request], batch.offsets[request + 1]
    tokens, parents = batch.token_N[begin:end].tolist(), batch.parent_N[begin:end].tolist()
    paths: list[Path] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


# ---- ratio tests


def reject(
    parents: Sequence[int],
    tokens: Sequence[int],
    kinds: Sequence[int],
    p_rows: Sequence[Sequence[float]],
    q_rows: Sequence[Sequence[int]],
    rule: Rule,
    uniforms: Sequence[float],
) -> tuple[Path, list[float]]:
    """Return (accepted rows, distribution of the next token) of one tree, with integer q and one uniform per row."""

    def visit(v: int, a: float) -> tuple[Path, list[float]] | None:
        p, q = list(p_rows[v]), list(q_rows[v])
        for child in range(len(parents)):
            if parents[child] != v:
                continue
            x = tokens[child]
            is_sampled = kinds[child] == NodeKind.SAMPLED
            law = [w / sum(q) for w in q] if is_sampled else [float(t == x) for t in range(len(p))]
            r = min(1.0, a * p[x] / law[x])
            below = None
            if rule == Rule.TRAVERSAL or uniforms[child] < r:
                below = visit(child, r if rule == Rule.TRAVERSAL else 1.0)
            if below is not None:
                return (child, *below[0]), below[1]
            rest = [max(a * p_t - q_t, 0.0) for p_t, q_t in zip(p, law, strict=True)]
            p = [r_t / sum(rest) for r_t in rest] if sum(rest) > 0 else p
            a = sum(rest) / (sum(rest) + 1 - a) if a < 1 else 1.0
            if is_sampled:
                q[x] = 0
        is_accepted = v == 0 or rule == Rule.RECURSIVE or uniforms[v] < a
        return ((), p) if is_accepted else None

    result = visit(0, 1.0)
    assert result is not None
    return result


# ---- the output law


def product_law(p: Callable[[Path], np.ndarray], length: int) -> dict[Path, float]:
    """Return the target's distribution of its first `length` tokens."""
    law: dict[Path, float] = {(): 1.0}
    for _ in range(length):
        law = {(*x, t): w * w_t for x, w in law.items() for t, w_t in enumerate(p(x))}
    return law


def distance(law: dict[Path, float], other: dict[Path, float]) -> float:
    """Return the largest difference of two distributions at one outcome."""
    return max(abs(law.get(x, 0.0) - other.get(x, 0.0)) for x in law.keys() | other.keys())


# ---- a language of a few tokens for the real pieces together

SMALL_V = 12


@cache
def target_logits(prefix: Path) -> np.ndarray:
    return np.random.default_rng([*prefix, 1]).normal(scale=1.5, size=SMALL_V).astype(np.float32)


@cache
def draft_logits(prefix: Path, error: float) -> np.ndarray:
    """Return the target's logits plus an error."""
    wrong = np.random.default_rng([*prefix, 2]).normal(scale=error, size=SMALL_V)
    return target_logits(prefix) + wrong.astype(np.float32)
