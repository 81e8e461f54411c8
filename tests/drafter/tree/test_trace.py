"""The trace of a tree holds every node that was drafted and says why pruned ones are not in the tree."""

from __future__ import annotations

import functools
import math
import zlib
from typing import Any

import numpy as np
import pytest
import torch

from drafter.tree.frontier import DraftVocabulary, Frontier
from drafter.tree.grow import GrownTrees
from drafter.tree.policy import DynamicTreePolicy, StaticTreePolicy, TreePolicy
from tests.support import oracles
from tests.support.draft_costs import costs
from tests.support.growing import grow
from workers.config import MAX_TREE_NODES
from workers.settings import PruneReason, Rule, SamplingSettings
from workers.types import SamplingBatch, TreeTrace

torch.set_num_threads(1)

V, NODES = 24, 12
DYNAMIC = DynamicTreePolicy(4, 4)
STATIC = StaticTreePolicy(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
Path = tuple[int, ...]


@functools.cache
def logits(model: int, path: Path) -> np.ndarray:
    rng = np.random.default_rng([model, zlib.crc32(repr(path).encode())])
    return rng.normal(scale=1.0 + 2.0 * rng.random(), size=V).astype(np.float32)


def q(model: int, path: Path) -> float:
    return float(torch.from_numpy(logits(model, path[:-1])).softmax(-1)[path[-1]])


def grown(
    num: int = 4,
    policy: TreePolicy = DYNAMIC,
    *,
    traced: list[bool] | None = None,
    rule: Rule = Rule.COUPLED,
    temperature: float = 1.0,
    auto: bool = False,
    node: float = 0.0,
    **thresholds: float,
) -> GrownTrees:
    paths: dict[tuple[int, int], Path] = {(b, 0): () for b in range(num)}

    def expand(frontier: Frontier) -> torch.Tensor:
        for b, row, parent, token in zip(*frontier[1:5], strict=True):
            paths[b, row] = (*paths[b, parent], int(token))
        keys = zip(frontier.request_F.tolist(), frontier.row_F.tolist(), strict=True)
        return torch.from_numpy(np.stack([logits(b, paths[b, row]) for b, row in keys]))

    limits: Any = [[thresholds.get(name, 0.0)] * num for name in ("min_prob", "path_prob")]
    return grow(
        torch.from_numpy(np.stack([logits(b, ()) for b in range(num)])),
        np.zeros(num, dtype=np.int64),
        np.full(num, 20),
        limits=oracles.limits([NODES] * num, [4] * num, *limits, [rule] * num, auto=[auto] * num),
        sampling=SamplingBatch.stack([SamplingSettings(temperature=temperature, seed=b) for b in range(num)]),
        policy=policy,
        expand=expand,
        vocab=DraftVocabulary(target_size=V),
        costs=costs(node=node) if auto else None,
        traced_B=np.array([True] * num if traced is None else traced),
    )


def rows_of(trace: TreeTrace, b: int) -> list[dict[str, Any]]:
    """The rows of a request, each with its path of tokens; -1 stands for nodes that were not drafted."""
    own = slice(*trace.offsets[b : b + 2].tolist())
    names = ("token", "parent", "depth", "prob", "weight", "reason")
    columns = [getattr(trace, f"{name}_T")[own].tolist() for name in names]
    rows: list[dict[str, Any]] = []
    for values in zip(*columns, strict=True):
        row = dict(zip(names, values, strict=True))
        row["path"] = (*rows[row["parent"]]["path"], row["token"]) if row["parent"] >= 0 else ()
        rows.append(row)
    return rows


def assert_begins_with_the_tree(got: GrownTrees, b: int, rows: list[dict[str, Any]]) -> None:
    begin, end = got.trees.offsets[b : b + 2].tolist()
    for name in ("token", "parent", "depth", "weight"):
        assert [row[name] for row in rows[: end - begin]] == getattr(got.trees, f"{name}_N")[begin:end].tolist()
    assert [row["reason"] for row in rows[: end - begin]] == [0] * (end - begin)
    assert all(row["reason"] for row in rows[end - begin :])
    assert len(rows) - (end - begin) <= MAX_TREE_NODES


def assert_probs(b: int, rows: list[dict[str, Any]]) -> None:
    for row in rows[1:]:
        if row["token"] < 0:
            assert math.isnan(row["prob"]) and math.isnan(row["weight"])
        else:
            assert row["prob"] == pytest.approx(q(b, row["path"]), rel=1e-4)
            assert row["weight"] <= rows[row["parent"]]["weight"] + 1e-6


@pytest.mark.parametrize("policy", [DYNAMIC, STATIC], ids=["dynamic", "static"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_threshold_s_children_are_those_of_the_unpruned_tree(policy, temperature):
    whole = grown(6, policy, temperature=temperature)
    reasons = set()
    for limits in ({"min_prob": 0.5}, {"path_prob": 0.2}, {"min_prob": 0.4, "path_prob": 0.1}):
        got = grown(6, policy, temperature=temperature, **limits)
        for b in range(6):
            rows = rows_of(got.trace, b)
            everything = [row["path"] for row in rows_of(whole.trace, b)]
            assert_begins_with_the_tree(got, b, rows)
            assert_probs(b, rows)
            assert {row["path"] for row in rows if row["token"] >= 0} <= set(everything)
            for row in rows:
                children = [path for path in everything if path[:-1] == rows[row["parent"]]["path"] and path]
                if row["reason"] == PruneReason.MIN_PROB:
                    best = max(q(b, path) for path in children)
                    assert best < limits["min_prob"] and row["path"] in children
                if row["reason"] == PruneReason.PATH_PROB:
                    assert children and (row["token"] == -1 if policy is STATIC else row["path"] in children)
                    path = rows[row["parent"]]["path"]
                    assert math.prod(q(b, path[:n]) for n in range(1, len(path) + 1)) < limits["path_prob"]
                reasons.add(row["reason"])
    assert reasons == {0, PruneReason.MIN_PROB, PruneReason.PATH_PROB}


@pytest.mark.parametrize("policy", [DYNAMIC, STATIC], ids=["best first", "static"])
def test_the_cut_s_nodes_are_shown_with_their_places(policy):
    whole, cut = grown(policy=policy, auto=True), grown(policy=policy, auto=True, node=1.0)
    assert len(cut.trees.token_N) < len(whole.trees.token_N)
    for b in range(4):
        rows = rows_of(cut.trace, b)
        assert_begins_with_the_tree(cut, b, rows)
        assert_probs(b, rows)
        assert len({row["path"] for row in rows}) == len(rows)
        costly = [row for row in rows if row["reason"] == PruneReason.COST and row["token"] >= 0]
        assert len(costly) == cut.pruned_BD[b].sum() or policy is STATIC


@pytest.mark.parametrize("limits", [{"min_prob": 0.5}, {"path_prob": 0.2}])
def test_best_first_growth_shows_what_thresholds_keep_out(limits):
    got = grown(8, auto=True, **limits)
    reasons = set()
    for b in range(8):
        rows = rows_of(got.trace, b)
        assert_begins_with_the_tree(got, b, rows)
        assert_probs(b, rows)
        for row in rows:
            reasons.add(row["reason"])
            if row["reason"] == PruneReason.MIN_PROB:
                assert row["prob"] < 0.5 or row["prob"] == pytest.approx(0.5)
            if row["reason"] == PruneReason.PATH_PROB:
                path = rows[row["parent"]]["path"]
                assert row["token"] == -1
                assert math.prod(q(b, path[:n]) for n in range(1, len(path) + 1)) < 0.2
    assert (PruneReason.MIN_PROB if "min_prob" in limits else PruneReason.PATH_PROB) in reasons


@pytest.mark.parametrize("rule", [Rule.TRAVERSAL, Rule.RECURSIVE])
def test_sampled_children_that_were_not_drawn_have_no_token(rule):
    whole, got = grown(6, rule=rule), grown(6, rule=rule, min_prob=0.5)
    shown = [row for b in range(6) for row in rows_of(got.trace, b)]
    assert {row["token"] for row in shown if row["reason"]} == {-1}
    for b in range(6):
        assert_begins_with_the_tree(got, b, rows_of(got.trace, b))
        drawn = [row for row in rows_of(whole.trace, b) if row["depth"]]
        assert all(row["prob"] == pytest.approx(q(b, row["path"]), abs=2e-3) for row in drawn)


@pytest.mark.parametrize(
    "options", [{}, {"min_prob": 0.4, "path_prob": 0.1}, {"auto": True, "node": 1.0, "path_prob": 0.1}, {"rule": 2}]
)
def test_who_is_traced_changes_no_tree(options):
    options = options | ({"rule": Rule(options["rule"])} if "rule" in options else {})
    seen, unseen = grown(4, **options), grown(4, traced=[False] * 4, **options)
    some = grown(4, traced=[False, True, False, True], **options)
    for name in seen.trees.__slots__:
        assert torch.equal(getattr(seen.trees, name), getattr(unseen.trees, name))
    assert (seen.pruned_BD == unseen.pruned_BD).all()
    assert [bool(n) for n in some.trace.offsets.diff().tolist()] == [False, True, False, True]
    assert repr(rows_of(some.trace, 3)) == repr(rows_of(seen.trace, 3))
    assert not unseen.trace.offsets.any() and not len(unseen.trace.token_T)
